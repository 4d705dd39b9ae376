"""Prefill chunks: which prompts are fed, and how many of their tokens. By time, shortest first, without starvation."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from paceline import LLM
from paceline.cli.jobs import Job, run_jobs
from paceline.cli.settings import running
from paceline.config import EngineConfig, SamplingParams, ServerConfig
from paceline.core.batch import Batch
from paceline.engine.chunks import PrefillChunker, PrefillSpeed, PromptSlice, RoundSeconds
from paceline.engine.engine import Engine, Request
from paceline.errors import ParameterError
from paceline.models.decoding.decoder import Decoder
from toy import FlatToy, ToyModel, answers, make_engine, make_request, run, slow_answer
from toy_llm import toy_llm

pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass
class FakePrompt:
    prefill_stop: int
    prefilled: int = 0
    priority: int = 0
    arrival_time: float = 0.0
    waits: bool = False

    @property
    def feeding_order(self) -> tuple[int, int]:
        return self.priority, self.prefill_stop - self.prefilled


def chunks_at(seconds_per_token: float, most: int = 1024, pause: float | None = 0.1) -> PrefillChunker:
    chunks = PrefillChunker(most, pause)
    chunks.speed.learn([PromptSlice(0, 0, 10)], 10 * seconds_per_token)
    return chunks


def sizes(parts: list[PromptSlice]) -> dict[int, int]:
    return {part.index: part.size for part in parts}


# --- by time ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rate", "size"), [(0.001, 80), (0.01, 8), (0.00001, 1024), (5.0, 1)])
def test_a_chunk_fits_into_the_longest_pause_of_a_decoding_row(rate: float, size: int) -> None:
    assert sizes(chunks_at(rate).choose([FakePrompt(5000)], decoding=True)) == {0: size}


def test_round_time_counts_but_prompts_always_get_a_quarter_of_the_pause() -> None:
    chunks = chunks_at(0.001)
    chunks.rounds.last = 0.03
    assert sizes(chunks.choose([FakePrompt(5000)], decoding=True)) == {0: 50}
    chunks.rounds.last = 0.5
    assert sizes(chunks.choose([FakePrompt(5000)], decoding=True)) == {0: 25}


def test_on_a_slow_machine_chunks_do_not_shrink_to_one_token() -> None:
    """A pass takes 60 ms, longer than its part of the pause, and each token 4 ms."""
    chunks, prompt, passes = PrefillChunker(1024, 0.1), FakePrompt(1500), []
    chunks.rounds.last = 0.065
    while prompt.prefilled < prompt.prefill_stop:
        (part,) = chunks.choose([prompt], decoding=bool(passes))
        passes.append(part.size)
        prompt.prefilled = part.stop
        chunks.speed.learn([part], 0.06 + 0.004 * part.size)
    assert min(passes[:-1]) >= 4
    assert 0.04 < chunks.speed.per_pass < 0.08


def test_small_chunks_set_the_pass_overhead_and_others_the_token_rate() -> None:
    speed = PrefillSpeed()
    for _ in range(20):
        speed.learn([PromptSlice(0, 0, 400)], 0.06 + 0.4)
        speed.learn([PromptSlice(0, 0, 10)], 0.06 + 0.01)
    assert speed.seconds_per_token(0) == pytest.approx(0.001, rel=0.05)
    assert speed.per_pass == pytest.approx(0.06, rel=0.05)


def test_fast_small_chunks_correct_a_rate_learned_in_a_stall() -> None:
    speed = PrefillSpeed()
    speed.learn([PromptSlice(0, 0, 40)], 2.0)
    for _ in range(30):
        speed.learn([PromptSlice(0, 0, 4)], 0.012)
    assert speed.seconds_per_token(0) + speed.per_pass < 0.015


def test_chunks_are_larger_if_no_row_decodes_and_largest_if_no_pause_matters() -> None:
    assert sizes(chunks_at(0.001).choose([FakePrompt(5000)], decoding=False)) == {0: 500}
    assert sizes(chunks_at(0.001, pause=None).choose([FakePrompt(5000)], decoding=True)) == {0: 1024}
    unawaited = chunks_at(0.001)
    unawaited.awaited = False
    assert sizes(unawaited.choose([FakePrompt(5000)], decoding=True)) == {0: 1024}
    assert sizes(PrefillChunker(7, None).choose([FakePrompt(5000)], decoding=True)) == {0: 7}


def test_a_chunk_ends_in_the_seconds_left_and_has_at_least_one_token() -> None:
    chunks = chunks_at(0.001)
    for left, size in ((0.0301, 30), (0.0005, 1), (-1.0, 1)):
        assert sizes(chunks.choose([FakePrompt(5000)], decoding=True, left=left)) == {0: size}
    chunks.speed.per_pass = 0.02
    assert sizes(chunks.choose([FakePrompt(5000)], decoding=True, left=0.0301)) == {0: 10}
    assert chunks.least_seconds(0) == pytest.approx(0.021)


def test_round_seconds_come_from_recent_rounds_of_as_many_rows() -> None:
    rounds = RoundSeconds()
    assert rounds.expected(3) == 0
    for rows, seconds in ((1, 0.01), (1, 0.01), (1, 3.0), (8, 0.04), (9, 0.05), (8, 0.04)):
        rounds.learn(rows, seconds)
    assert [rounds.expected(rows) for rows in (1, 2, 6, 15, 64)] == [0.01, 0.01, 0.04, 0.04, 0.04]
    for _ in range(8):
        rounds.learn(1, 0.02)
    assert rounds.expected(1) == 0.02


def test_a_slow_round_that_prevents_further_rounds_is_forgotten() -> None:
    rounds = RoundSeconds()
    for seconds in (5.0, 6.0, 0.01):
        rounds.learn(1, seconds)
    for expected in (5.0, 2.505, 0.01, 0, 0):
        assert rounds.expected(1) == pytest.approx(expected)
        rounds.doubt(1)


def test_the_first_chunk_is_small() -> None:
    assert 1 <= sizes(PrefillChunker(1024, 0.1).choose([FakePrompt(5000)], decoding=True))[0] <= 64


def test_the_rate_is_learned_by_position_and_a_stall_counts_half() -> None:
    speed = PrefillSpeed()
    speed.learn([PromptSlice(0, 0, 100)], 0.1)
    assert speed.seconds_per_token(0) == speed.seconds_per_token(9000) == pytest.approx(0.001)
    for _ in range(20):
        speed.learn([PromptSlice(0, 5000, 5100)], 0.8)
    assert speed.seconds_per_token(0) == pytest.approx(0.001)
    assert speed.seconds_per_token(5050) == pytest.approx(0.008, rel=0.01)
    speed.learn([PromptSlice(0, 0, 100)], 0.3)
    assert speed.seconds_per_token(0) == pytest.approx(0.002)


def test_a_chunk_of_several_prompts_updates_all_their_positions() -> None:
    speed = PrefillSpeed()
    for _ in range(30):
        speed.learn([PromptSlice(0, 0, 50), PromptSlice(1, 4000, 4050)], 0.2)
        speed.learn([PromptSlice(0, 0, 50)], 0.05)
    assert speed.seconds_per_token(0) == pytest.approx(0.001, rel=0.1)
    assert speed.seconds_per_token(4000) == pytest.approx(0.003, rel=0.1)


class Later:
    """A chunk on a device that runs behind the host."""

    def __init__(self) -> None:
        self.took: float | None = None

    def seconds(self) -> float | None:
        return self.took


def test_unfinished_chunks_are_learned_later_and_in_order() -> None:
    chunks, first, second = chunks_at(0.001), Later(), Later()
    chunks.watch([PromptSlice(0, 0, 100)], first)
    chunks.watch([PromptSlice(0, 0, 100)], second)
    second.took = 0.1
    chunks.choose([FakePrompt(5000)], decoding=True)
    assert chunks.speed.seconds_per_token(0) == pytest.approx(0.001)
    first.took = 0.3
    assert sizes(chunks.choose([FakePrompt(5000)], decoding=True))[0] < 100


# --- whose ------------------------------------------------------------------------------------------------------------


def test_the_shortest_remaining_prompt_is_fed_first_and_others_fill_the_chunk() -> None:
    prompts = [FakePrompt(5000), FakePrompt(30), FakePrompt(4000, prefilled=3960), FakePrompt(20)]
    assert sizes(chunks_at(0.001).choose(prompts, decoding=True)) == {3: 20, 1: 30, 2: 30}


def test_no_chunk_is_wider_than_allowed_with_its_padding() -> None:
    prompts = [FakePrompt(5000), FakePrompt(30), FakePrompt(35)]
    assert sizes(chunks_at(0.00001, most=100).choose(prompts, decoding=True)) == {1: 30, 2: 35}


def test_lower_priorities_come_before_shorter_prompts() -> None:
    prompts = [FakePrompt(20), FakePrompt(5000, priority=-1)]
    assert sizes(chunks_at(0.001).choose(prompts, decoding=True)) == {1: 80}


def test_a_prompt_that_waits_for_a_common_prefix_is_not_fed() -> None:
    prompts = [FakePrompt(90, waits=True), FakePrompt(90, 10), FakePrompt(90)]
    assert sizes(chunks_at(0.0001).choose(prompts, decoding=True)) == {1: 80, 2: 90}


def test_endless_short_prompts_do_not_starve_a_long_one() -> None:
    chunks, long = chunks_at(0.001), FakePrompt(5000, arrival_time=0.0)
    for turn in range(1, 1000):
        short = [FakePrompt(100, arrival_time=float(turn)) for _ in range(3)]
        for part in chunks.choose([*short, long], decoding=True):
            long.prefilled += part.size if part.index == 3 else 0
        if long.prefilled == long.prefill_stop:
            break
    assert turn <= 4 * 63, "a quarter of all chunks are the oldest prompt's"


# --- in the engine ----------------------------------------------------------------------------------------------------


def engine_at(tokens: int, kind: type[ToyModel], **options: Any) -> Engine:
    """An engine whose chunks all have ``tokens`` tokens, whatever time they take."""
    engine = make_engine(kind(), kind(blur=0.3), drafter="model", attention="auto", longest_pause=0.1, **options)
    engine.chunks.speed.learn([PromptSlice(0, 0, 10)], 10 * 0.1 / tokens)
    engine.chunks.speed.learn = lambda parts, seconds: None  # type: ignore[method-assign]
    engine.chunks._seconds = lambda decoding: 0.1000001  # type: ignore[method-assign]
    return engine


@pytest.mark.parametrize("kind", [ToyModel, FlatToy])
def test_a_short_prompt_overtakes_long_ones_and_every_answer_stays_the_same(kind: type[ToyModel]) -> None:
    engine = engine_at(4, kind, max_batch_size=6)
    params = SamplingParams(max_tokens=40, seed=3)
    stream = engine.add(Request([1, 2], params))
    engine.step()
    longs = [engine.add(Request([3 + i] * (50 + i), replace(params, max_tokens=5))) for i in range(3)]
    for _ in range(3):
        engine.step()
        engine.scheduler.check_integrity()
    short = engine.add(Request([9] * 4, params))
    steps = 0
    while not short.outputs[0].token_ids:
        engine.step()
        engine.scheduler.check_integrity()
        steps += 1
    assert steps <= 2
    assert not any(output.outputs[0].token_ids for output in longs)
    while engine.busy:
        engine.step()
        engine.scheduler.check_integrity()
    for output in (stream, short, *longs):
        wanted = params if output in (stream, short) else replace(params, max_tokens=5)
        assert output.outputs[0].token_ids == slow_answer(ToyModel(), output.prompt_token_ids, wanted)


def test_rows_join_and_leave_without_a_copy_of_their_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_at(4, FlatToy, max_batch_size=4)
    cache, params = engine.parts.target.cache, SamplingParams(max_tokens=4, seed=3)

    def copied(*_: Any) -> None:
        raise AssertionError("copied")

    monkeypatch.setattr(cache, "copy_row", copied)
    outputs = [engine.add(Request([size] * size, params)) for size in (3, 20, 12, 2, 5, 1)]
    while engine.busy:
        engine.step()
        engine.scheduler.check_integrity()
    for output in outputs:
        assert output.outputs[0].token_ids == slow_answer(ToyModel(), output.prompt_token_ids, params)


# --- offline ----------------------------------------------------------------------------------------------------------

LONG_PROMPTS = [[3 + i] * (150 - 4 * i) for i in range(4)]
PARAMS = SamplingParams(max_tokens=30, seed=1)


def slow_llm() -> LLM:
    """An LLM whose chunks are assumed to take 0.01 s per token: 8 tokens while a row decodes, 50 while none does."""
    llm = toy_llm(num_speculative_tokens=0, longest_pause=0.1, prefill_chunk=64, prefix_cache=False)
    llm.engine.chunks.speed.learn([PromptSlice(0, 0, 10)], 0.1)
    llm.engine.chunks.speed.learn = lambda parts, seconds: None  # type: ignore[method-assign]
    return llm


def passes(llm: LLM, work: Callable[[LLM], object]) -> list[int]:
    """Return the widest slice of each prefill pass."""
    target, widths = llm.engine.parts.target, []

    def prefill(batch: Batch, rows: list[int], starts: list[int], stops: list[int]) -> None:
        widths.append(max(stop - start for start, stop in zip(starts, stops, strict=True)))
        Decoder.prefill(target, batch, rows, starts, stops)

    target.prefill = prefill  # type: ignore[method-assign]
    work(llm)
    return widths


def generate(llm: LLM, prompts: list[list[int]] = LONG_PROMPTS, params: SamplingParams = PARAMS) -> None:
    for output in llm.generate(prompts, params, use_tqdm=False):
        assert output.outputs[0].token_ids == truth(tuple(output.prompt_token_ids))


@functools.cache
def truth(prompt: tuple[int, ...]) -> list[int]:
    return slow_answer(ToyModel(max_positions=200), list(prompt), PARAMS)


def stream(llm: LLM) -> None:
    for _ in llm.stream(LONG_PROMPTS, PARAMS):
        pass


def generate_beside_a_stream(llm: LLM) -> None:
    opened = llm.stream([1, 2], replace(PARAMS, max_tokens=190))
    next(opened)
    generate(llm)
    opened.close()  # type: ignore[attr-defined]


def serve(llm: LLM) -> None:
    """Run requests like the server's thread."""
    engine = llm.engine
    for prompt in LONG_PROMPTS:
        engine.add(Request(prompt, PARAMS))
    while engine.busy:
        engine.step()


def serve_a_file(llm: LLM) -> None:
    """Run requests like ``paceline batch``: lines come while others run, and are written when complete."""

    async def begin() -> None:
        async with running(llm, ServerConfig()):
            pass

    asyncio.run(begin())
    serve(llm)


def test_offline_long_prompts_need_no_more_passes_together_than_one_by_one() -> None:
    alone = sum(len(passes(slow_llm(), lambda llm: generate(llm, [prompt]))) for prompt in LONG_PROMPTS)  # noqa: B023
    assert len(passes(slow_llm(), generate)) <= alone == 4 * 3


def test_prompts_of_a_batch_file_need_no_more_passes_together() -> None:
    llm = slow_llm()
    assert len(passes(llm, serve_a_file)) <= len(passes(slow_llm(), generate)) + 1, "one warms up"
    assert llm.engine.scheduler.watched is False


def generate_on_the_command_line(llm: LLM) -> None:
    jobs = [Job("--prompt", PARAMS, prompt=prompt) for prompt in LONG_PROMPTS]
    assert run_jobs(llm, jobs, lambda number, result: None, progress=False) == 0


def test_prompts_of_paceline_generate_need_no_more_passes_together() -> None:
    llm = slow_llm()
    assert len(passes(llm, generate_on_the_command_line)) == len(passes(slow_llm(), generate))
    assert llm.engine.scheduler.final is False


@pytest.mark.parametrize("work", [stream, generate_beside_a_stream, serve])
def test_the_pause_is_limited_with_streams_and_servers(work: Callable[[LLM], object]) -> None:
    widths = passes(slow_llm(), work)
    assert len(widths) > 20
    assert sum(width > 8 for width in widths) <= 5, "while no row decodes"


def test_the_pause_is_limited_with_a_time_budget() -> None:
    limited = replace(PARAMS, time_budget=3600)
    assert max(passes(slow_llm(), lambda llm: generate(llm, params=limited))[3:]) <= 8
    mixed = [limited, PARAMS, PARAMS, PARAMS]
    assert len(passes(slow_llm(), lambda llm: llm.generate(LONG_PROMPTS, mixed, use_tqdm=False))) > 12


def test_a_call_resets_whether_pauses_matter() -> None:
    llm = slow_llm()
    generate(llm)
    assert len(passes(llm, stream)) > 20


@pytest.mark.parametrize("pause", [0, -1, float("nan")])
def test_a_pause_that_is_not_positive_is_refused(pause: float) -> None:
    with pytest.raises(ParameterError, match="longest_pause"):
        EngineConfig(longest_pause=pause)


def test_of_equally_long_prompts_the_earliest_deadline_is_read_first() -> None:
    engine = make_engine(ToyModel(), prefill_chunk=4, max_batch_size=3)
    budgets = (None, 1000.0, 500.0)
    outputs = [
        engine.add(make_request([1 + row] * 20, SamplingParams(max_tokens=40, ignore_eos=True, time_budget=budget)))
        for row, budget in enumerate(budgets)
    ]
    while not all(output.outputs[0].token_ids for output in outputs):
        engine.step()
    begun = [output.outputs[0].metrics.first_token or 0.0 for output in outputs]
    assert begun[2] < min(begun[:2])


def test_a_measured_chunk_sizes_the_first_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, where 3 ms a token would read the first prompt in chunks of 25 to 160 tokens."""
    engine = make_engine(ToyModel(), max_batch_size=2, longest_pause=0.1, prefill_chunk=64)
    assert engine.chunks.speed.seconds_per_token(0) == 0.003
    monkeypatch.setattr("paceline.core.hardware.Stopwatch.seconds", lambda _timer: 0.0064)
    engine.measure_prefill()
    assert engine.chunks.speed.seconds_per_token(0) == pytest.approx(0.0001)
    monkeypatch.undo()
    prompts, params = [[1, 2, 3], [4] * 70], [SamplingParams(temperature=0, max_tokens=8)] * 2
    plain = make_engine(ToyModel(), max_batch_size=1)
    assert answers(run(engine, prompts, params)) == answers(run(plain, prompts, params))
