"""Several calls on one LLM at the same time: from threads, beside an open stream, left early, interrupted."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest
import torch

from paceline import LLM, SamplingParams
from paceline.core.outputs import RequestOutput
from paceline.engine import sharing
from paceline.errors import PacelineError
from toy import ToyModel, slow_answer
from toy_llm import toy_llm

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(60)]

LONG = SamplingParams(max_tokens=60, seed=5)
PROMPTS = [[1, 2, 3], [4, 5], [6]]
TRUTH = [slow_answer(ToyModel(max_positions=200), prompt, LONG) for prompt in PROMPTS]


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def generate(llm: LLM, **options: Any) -> list[RequestOutput]:
    return llm.generate(PROMPTS, LONG, use_tqdm=False, **options)


def together(*works: Callable[[], Any]) -> list[Any]:
    """Run each function in a thread of its own, all started at once. Return their results."""
    start = threading.Barrier(len(works))

    def run(work: Callable[[], Any]) -> Any:
        start.wait()
        return work()

    with ThreadPoolExecutor(len(works)) as pool:
        return list(pool.map(run, works))


def check_idle(llm: LLM) -> None:
    assert not llm.engine.busy
    assert not llm.engine._requests
    llm.engine.scheduler.check_integrity()


def count_rounds(llm: LLM) -> list[int]:
    """Record the rows of every round from now on."""
    rows, original = [], llm.engine.rounds.step

    def recorded() -> Any:
        rows.append(llm.engine.batch.rows)
        return original()

    llm.engine.rounds.step = recorded  # type: ignore[method-assign]
    return rows


def begin_together(llm: LLM, threads: int) -> None:
    """Hold all rounds until ``threads`` threads have queued their requests."""
    shared, all_begun = llm._open_engine(), threading.Barrier(threads)
    original = shared.begin

    def begin(*requests: Any, **options: Any) -> Any:
        call = original(*requests, **options)
        all_begun.wait(60)
        return call

    shared.begin = begin  # type: ignore[method-assign]


@pytest.mark.parametrize("threads", [2, 6])
def test_threads_share_rounds_and_each_gets_its_own_answers(threads: int) -> None:
    llm = toy_llm(max_batch_size=32)
    rounds = count_rounds(llm)
    begin_together(llm, threads)
    for found in together(*[lambda: generate(llm)] * threads):
        assert tokens(found) == TRUTH
        assert [output.prompt_token_ids for output in found] == PROMPTS
    assert len(rounds) < threads * 60, "they were batched together"
    check_idle(llm)


def test_streams_in_threads_each_end_with_their_finished_results() -> None:
    llm = toy_llm(max_batch_size=3)

    def stream() -> list[list[int]]:
        last: dict[str, RequestOutput] = {}
        for output in llm.stream(PROMPTS, LONG):
            last[output.request_id] = output
        assert all(output.finished for output in last.values())
        return tokens([*last.values()])

    for found in together(*[stream] * 3):
        assert sorted(found) == sorted(TRUTH)
    check_idle(llm)


def test_generate_beside_an_open_stream_ends_no_request() -> None:
    llm = toy_llm()
    stream = llm.stream(PROMPTS[0], LONG)
    first = next(stream)
    assert tokens(generate(llm)) == TRUTH
    last = [*stream][-1]
    assert last is first
    assert (last.outputs[0].token_ids, last.outputs[0].finish_reason) == (TRUTH[0], "length")
    check_idle(llm)


def test_two_streams_of_one_thread_take_turns() -> None:
    llm = toy_llm()
    streams = [llm.stream(prompt, LONG) for prompt in PROMPTS]
    found: list[Any] = [None] * 3
    while streams:
        for place, stream in enumerate(streams):
            found[place] = next(stream, found[place])
        if all(output.finished for output in found):
            assert [next(stream, None) for stream in streams] == [None] * 3
            break
    assert tokens(found) == TRUTH
    check_idle(llm)


def test_generate_may_be_called_while_a_result_is_handled() -> None:
    llm, inner = toy_llm(), []
    found = generate(llm, on_finished=lambda _: inner.append(tokens(generate(llm))))
    assert tokens(found) == TRUTH
    assert inner == [TRUTH] * 3
    check_idle(llm)


def test_a_bad_prompt_leaves_other_calls_alone_and_nothing_behind() -> None:
    llm = toy_llm()
    stream = llm.stream(PROMPTS[0], LONG)
    next(stream)
    with pytest.raises(Exception, match="prompt"):
        llm.generate([[1], [99999]], LONG, use_tqdm=False)
    assert [*stream][-1].outputs[0].token_ids == TRUTH[0]
    check_idle(llm)


def test_a_collected_stream_frees_its_rows() -> None:
    llm = toy_llm()
    for _ in range(3):
        next(llm.stream(PROMPTS, LONG))
    gc.collect()
    check_idle(llm)


def test_a_stream_collected_in_the_middle_of_a_round_frees_its_rows_after_it() -> None:
    """The garbage collector may run anywhere, also in the thread that holds the engine."""
    llm, held = toy_llm(max_batch_size=8), []
    held.append(llm.stream(PROMPTS, LONG))
    next(held[0])
    original = llm.engine._step

    def step() -> list[RequestOutput]:
        if held:
            held.clear()
            gc.collect()
        return original()

    llm.engine._step = step  # type: ignore[method-assign]
    assert tokens(generate(llm)) == TRUTH
    check_idle(llm)


def test_an_interrupt_of_one_call_ends_its_requests_alone() -> None:
    llm = toy_llm(max_batch_size=8)
    stream = llm.stream(PROMPTS[0], LONG)
    next(stream)

    def interrupt(_: RequestOutput) -> None:
        raise KeyboardInterrupt

    short = SamplingParams(max_tokens=2, seed=1)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, [short, LONG, LONG], use_tqdm=False, on_finished=interrupt)
    assert [*stream][-1].outputs[0].token_ids == TRUTH[0]
    check_idle(llm)


class Interrupt:
    """Raises KeyboardInterrupt at the n-th place in the code of sharing where Python looks for a Ctrl-C.

    Those places are the beginnings of functions and the returns from functions of C (and the ends of loops).
    """

    def __init__(self, number: int) -> None:
        self._left = number
        self.place = ""

    def __call__(self, frame: FrameType, event: str, called: Any) -> None:
        if event not in ("call", "c_return") or frame.f_code.co_filename != sharing.__file__:
            return
        self._left -= 1
        if self._left == 0:
            self.place = f"{event} in {frame.f_code.co_qualname}, line {frame.f_lineno}"
            raise KeyboardInterrupt


def test_an_interrupt_at_any_place_leaves_the_engine_to_other_threads() -> None:
    short = SamplingParams(max_tokens=3, seed=5)
    llm, others = toy_llm(max_batch_size=8), toy_llm(max_batch_size=8)
    truth = tokens(others.generate(PROMPTS, short, use_tqdm=False))
    for number in range(1, 1000):
        interrupt, stream = Interrupt(number), llm.stream(PROMPTS[0], short)
        part = next(stream)  # another call, which the interrupted one leaves alone
        interrupted = contextlib.suppress(KeyboardInterrupt)
        with interrupted:
            sys.setprofile(interrupt)
            try:
                llm.generate(PROMPTS, short, use_tqdm=False)
            finally:
                sys.setprofile(None)
        found: list[list[list[int]]] = []
        other = threading.Thread(
            target=lambda found=found: found.append(tokens(llm.generate(PROMPTS, short, use_tqdm=False))), daemon=True
        )
        other.start()
        other.join(20)
        assert found == [truth], f"the other thread hangs after an interrupt at: {interrupt.place}"
        assert [part, *stream][-1].outputs[0].token_ids == truth[0]
        check_idle(llm)
        if not interrupt.place:
            break
    assert 50 < number < 999


@pytest.mark.parametrize("use", ["generate", "score", "stream", "close"])
def test_a_logits_processor_cannot_use_the_llm_that_runs_it(use: str) -> None:
    llm = toy_llm()
    open_stream = llm.stream(PROMPTS[1], LONG)
    next(open_stream)
    uses: dict[str, Callable[[], Any]] = {
        "generate": lambda: generate(llm),
        "score": lambda: llm.score([[1, 2]], [[3]], use_tqdm=False),
        "stream": lambda: next(llm.stream(PROMPTS[0], LONG)),
        "close": llm.close,
    }

    def process(answer: list[int], logits: torch.Tensor) -> torch.Tensor:
        uses[use]()
        return logits

    params = [replace(LONG, logits_processors=[process]), LONG, LONG]
    first, *rest = llm.generate(PROMPTS, params, use_tqdm=False)
    assert first.outputs[0].finish_reason == "error"
    assert isinstance(first.error, PacelineError)
    assert "use it outside of that function" in str(first.error)
    assert tokens(rest) == TRUTH[1:]
    assert [*open_stream][-1].outputs[0].token_ids == TRUTH[1]
    check_idle(llm)


def test_a_logits_processor_may_use_another_llm() -> None:
    llm, other = toy_llm(), toy_llm()
    wanted = tokens(generate(other))

    def process(answer: list[int], logits: torch.Tensor) -> torch.Tensor:
        assert len(answer) != 2 or tokens(generate(other)) == wanted
        return logits

    found = llm.generate(PROMPTS, replace(LONG, logits_processors=[process]), use_tqdm=False)
    assert tokens(found) == TRUTH


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failed_round_raises_in_its_caller_and_shows_in_the_results_of_others(error: type[BaseException]) -> None:
    llm = toy_llm(max_batch_size=2)
    stream = llm.stream(PROMPTS[0], LONG)
    begun = next(stream)
    late = llm.stream(PROMPTS[1], LONG)
    next(late)
    waits = llm.stream(PROMPTS[2], LONG)
    original = llm.engine.parts.accept

    def broken(*_: Any) -> Any:
        llm.engine.parts.accept = original
        raise error("as planned")

    waiting = llm._open_engine().call([llm.request(PROMPTS[2], LONG)]).__enter__()  # no row is free
    llm.engine.parts.accept = broken
    with pytest.raises(error, match="as planned"):
        list(stream)
    ended = [*late][-1]
    assert ended.outputs[0].finish_reason == "error"
    assert "as planned" in str(ended.error)
    assert begun.outputs[0].finish_reason == "abort"
    assert [*waiting][-1].outputs[0].token_ids == TRUTH[2], "what only waited goes on"
    assert [*waits][-1].outputs[0].token_ids == TRUTH[2]
    check_idle(llm)


def test_the_last_item_of_a_stream_is_finished_when_time_is_up() -> None:
    llm = toy_llm()
    items = [
        (output.request_id, output.outputs[0].finish_reason)
        for output in llm.stream(PROMPTS, replace(LONG, time_budget=1e-9))
    ]
    assert [reason for _, reason in items] == ["deadline"] * 3
    assert len({name for name, _ in items}) == 3


def test_the_last_item_of_a_stream_is_finished_when_its_request_is_aborted() -> None:
    llm = toy_llm()
    seen: list[str | None] = []
    for output in llm.stream(PROMPTS[0], LONG):
        seen.append(output.outputs[0].finish_reason)
        if len(seen) == 3:
            llm.engine.abort(output.request_id)
    assert seen == [None, None, None, "abort"]


class HoldsTextBack:
    """A text stream that gives its text only at the end."""

    def __init__(self) -> None:
        self.text, self.stopped, self.tokens = "", None, 0

    def push(self, token_id: int) -> str:
        self.tokens += 1
        return ""

    def finish(self) -> str:
        self.text = "x" * self.tokens
        return self.text


def test_text_that_is_held_back_until_the_end_is_in_the_last_item(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = toy_llm()
    request = llm.request(PROMPTS[0], LONG)
    request.make_stream = lambda _: HoldsTextBack()
    monkeypatch.setattr(llm, "_make_requests", lambda *_: [request])
    texts = [output.outputs[0].text for output in llm.stream(PROMPTS[0], LONG)]
    assert texts[-1] == "x" * 60


def test_closing_ends_open_streams() -> None:
    llm = toy_llm()
    stream = llm.stream(PROMPTS[0], LONG)
    next(stream)
    llm.close()
    assert [output.outputs[0].finish_reason for output in stream] == ["abort"]
