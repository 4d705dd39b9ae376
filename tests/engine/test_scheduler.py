"""Waiting, prefill, decoding, leaving: every queue and every free slot, checked after every step."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from covering import in_pairs
from paceline.config import SamplingParams
from paceline.core import hardware
from paceline.core.batch import Batch
from paceline.core.draft_tensors import DraftTensors
from paceline.core.outputs import CompletionOutput, RequestOutput
from paceline.engine import engine as engine_module
from paceline.engine import request as request_module
from paceline.engine import scheduler as scheduler_module
from paceline.engine import sequences as sequences_module
from paceline.engine.engine import Engine, Request
from paceline.kernels import native
from paceline.models.base import HiddenStates
from paceline.models.decoding.decoder import Decoder
from toy import POSITIONS, VOCAB, FlatToy, RandomLength, ToyModel, answers, make_engine, run, slow_answer, tiny_native

pytestmark = pytest.mark.usefixtures("one_thread")

GREEDY = SamplingParams(temperature=0, max_tokens=5)


class Spy:
    """Wraps a decoder and records what is prefilled."""

    def __init__(self, decoder: Decoder, vocab: int = VOCAB) -> None:
        self.chunks: list[list[int]] = []
        self._prefill, self.decoder = decoder.prefill, decoder
        decoder.prefill = self.prefill  # type: ignore[method-assign]
        self._end, self.ended = decoder.end_prompts, 0
        decoder.end_prompts = self.end_prompts  # type: ignore[method-assign]

    def prefill(self, batch: Batch, rows: Sequence[int], starts: Sequence[int], stops: Sequence[int]) -> None:
        self.chunks.append([stop - start for start, stop in zip(starts, stops, strict=True)])
        self._prefill(batch, rows, starts, stops)

    def end_prompts(
        self, batch: Batch, rows: Sequence[int], starts: Sequence[int], stops: Sequence[int], count: int
    ) -> Tensor:
        """Last tokens, which a round would have read, are not recorded."""
        self.ended += count
        ends = [stop - (place >= len(stops) - count) for place, stop in enumerate(stops)]
        self.chunks.append([stop - start for start, stop in zip(starts, ends, strict=True)])
        return self._end(batch, rows, starts, stops, count)

    @property
    def tokens(self) -> int:
        return sum(map(sum, self.chunks))


def engine_of(**options: Any) -> Engine:
    return make_engine(ToyModel(), **options)


def add(engine: Engine, prompt: list[int], params: SamplingParams = GREEDY, **more: Any) -> RequestOutput:
    return engine.add(Request(prompt, params, **more))


def step(engine: Engine) -> list[RequestOutput]:
    outputs = engine.step()
    engine.scheduler.check_integrity()
    return outputs


def passes_of(engine: Engine, prompts: list[list[int]]) -> tuple[list[list[list[int]]], list[list[list[int]]]]:
    """Run the prompts together. Return the new tokens of each step, and its passes, each by its rows' tokens."""
    outputs = [add(engine, prompt, SamplingParams(temperature=0.8, seed=3, max_tokens=6)) for prompt in prompts]
    gained, passes, verify = [], [], engine.parts.target.verify
    spy = Spy(engine.parts.target)

    def noted(batch: Batch, draft: DraftTensors) -> Tensor:
        spy.chunks.append((draft.counts + 1).tolist())
        return verify(batch, draft)

    engine.parts.target.verify = noted  # type: ignore[method-assign]
    while engine.busy:
        before = [len(output.outputs[0].token_ids) for output in outputs]
        step(engine)
        gained.append([output.outputs[0].token_ids[n:] for output, n in zip(outputs, before, strict=True)])
        passes.append(spy.chunks[:])
        spy.chunks.clear()
    return gained, passes


@pytest.mark.parametrize("count", [1, 3])
def test_the_pass_that_ends_a_prompt_gives_its_first_token(count: int) -> None:
    """No round for the last token comes before it, and no draft is verified."""
    prompts = [[5, 6, 7, 5, 6, 7, number, 5, 6] for number in range(count)]
    options: dict[str, Any] = {"drafter": "ngram", "num_speculative_tokens": 4, "attention": "auto"}
    gained, passes = passes_of(make_engine(FlatToy(), **options), prompts)
    assert [len(tokens) for tokens in gained[0]] == [1] * count
    assert passes[0] == [[8] * count], "the last token is not recorded"
    assert max(passes[1][0]) > 1, "drafts are verified from the second token on"
    alone = make_engine(FlatToy(), **options)
    alone.expect(watched=False)  # rounds only
    expected, rounds = passes_of(alone, prompts)
    assert rounds[0][0] == passes[0][0]
    assert len(rounds[0]) == 2
    for row in range(count):
        assert [t for new in gained for t in new[row]] == [t for new in expected for t in new[row]]


def test_while_others_decode_first_tokens_come_from_their_round() -> None:
    engine = make_engine(FlatToy(), num_speculative_tokens=0, drafter=None, attention="auto")
    add(engine, [1, 2, 3])
    step(engine)
    second, spy = add(engine, [4, 5, 6, 7]), Spy(engine.parts.target)
    step(engine)
    assert len(second.outputs[0].token_ids) == 1
    assert spy.ended == 0
    assert engine.last_verdict is not None
    assert len(engine.last_verdict.tokens) == 2


def test_a_row_that_ends_leaves_at_once_and_the_next_request_takes_its_place() -> None:
    engine = engine_of(max_batch_size=2)
    short = SamplingParams(temperature=0, max_tokens=1)
    add(engine, [1, 2], GREEDY)
    add(engine, [3, 4], short)
    late = add(engine, [5, 6], short)
    step(engine)
    assert len(engine.scheduler.running) == 1
    assert not late.outputs[0].token_ids
    step(engine)
    assert late.finished
    assert [row.request_id for row in engine.scheduler.running] == ["request-0"]


def test_sequences_keep_their_slots_when_another_leaves() -> None:
    engine = engine_of(max_batch_size=4)
    for index, tokens in enumerate((9, 1, 9, 9)):
        add(engine, [index + 1, 2], SamplingParams(temperature=0, max_tokens=tokens), request_id=str(index))
    step(engine)
    assert [(row.request_id, row.slot) for row in engine.scheduler.running] == [("0", 0), ("2", 2), ("3", 3)]
    assert engine.batch.slots == [0, 2, 3]


def test_prompts_are_prefilled_in_chunks_while_others_decode() -> None:
    engine = engine_of(max_batch_size=3, prefill_chunk=4)
    first = add(engine, [1], SamplingParams(temperature=0, max_tokens=20))
    long = add(engine, [2] * 30)
    spy = Spy(engine.parts.target)
    for round_ in range(1, 8):
        step(engine)
        assert len(first.outputs[0].token_ids) == round_
    assert spy.chunks[:7] == [[4]] * 7
    assert not long.outputs[0].token_ids
    step(engine)
    assert spy.tokens == 29
    assert len(long.outputs[0].token_ids) == 1


def test_no_prefill_step_feeds_more_than_the_chunk() -> None:
    engine = engine_of(max_batch_size=6, prefill_chunk=10)
    spy = Spy(engine.parts.target)
    for index, size in enumerate((3, 4, 30, 2, 25, 3)):
        add(engine, [1 + index] * size)
    while engine.busy:
        step(engine)
    assert all(len(chunk) * max(chunk) <= 10 for chunk in spy.chunks)
    assert spy.tokens == sum(size - 1 for size in (3, 4, 30, 2, 25, 3))


@pytest.mark.parametrize(("rows", "chunk"), [(2, 3), (4, 1000), (8, 3)])
def test_the_samples_of_a_prompt_share_its_prefill(rows: int, chunk: int) -> None:
    engine = make_engine(ToyModel(), ToyModel(blur=0.3), drafter="model", max_batch_size=rows, prefill_chunk=chunk)
    spies = [Spy(decoder) for decoder in engine.parts.decoders]
    output = run(engine, [[3] * 15], [SamplingParams(n=rows, max_tokens=12, seed=4)])[0]
    assert [spy.tokens for spy in spies] == [14, 14]
    assert [a.token_ids for a in output.outputs] == [
        slow_answer(ToyModel(), [3] * 15, SamplingParams(max_tokens=12, seed=4), index) for index in range(rows)
    ]


@pytest.mark.parametrize("chunk", [3, 1000])
def test_answers_that_end_in_their_first_round_share_a_prefill(chunk: int) -> None:
    engine = make_engine(ToyModel(), ToyModel(blur=0.3), drafter="model", max_batch_size=4, prefill_chunk=chunk)
    spies = [Spy(decoder) for decoder in engine.parts.decoders]
    params = SamplingParams(n=4, max_tokens=1, seed=4)
    output = run(engine, [[3] * 15], [params])[0]
    assert [spy.tokens for spy in spies] == [14, 14]
    assert answers([output])[0] == [slow_answer(ToyModel(), [3] * 15, params, index) for index in range(4)]


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("rows", [1, 2])
def test_a_sample_that_waited_reuses_the_row_and_prompt_of_another_sample(rows: int, tokens: int) -> None:
    models = FlatToy(), FlatToy(blur=0.3)
    engine = make_engine(*models, drafter="model", attention="auto", max_batch_size=rows)
    spies = [Spy(decoder) for decoder in engine.parts.decoders]
    params = SamplingParams(n=5, max_tokens=tokens, seed=4)
    output = run(engine, [[3] * 15], [params])[0]
    assert [spy.tokens for spy in spies] == [14, 14]
    assert answers([output])[0] == [slow_answer(ToyModel(), [3] * 15, params, index) for index in range(5)]


def test_a_sample_that_starts_after_the_others_left_is_prefilled_again() -> None:
    """It waits because it is another client's turn."""
    engine = engine_of(max_batch_size=1)
    spy = Spy(engine.parts.target)
    params = SamplingParams(n=3, max_tokens=4, seed=4)
    output = add(engine, [3] * 15, params, client="a")
    other = add(engine, [2] * 9, client="b")
    while engine.busy:
        step(engine)
        assert not other.finished or len(output.outputs[2].token_ids) == 0 or output.outputs[1].finished
    assert spy.tokens == 14 + 8 + 14
    assert answers([output])[0] == [slow_answer(ToyModel(), [3] * 15, params, index) for index in range(3)]


def test_rows_in_prefill_survive_the_release_of_rows_before_and_among_them() -> None:
    engine = engine_of(max_batch_size=5, prefill_chunk=2)
    first = add(engine, [1], SamplingParams(temperature=0, max_tokens=2))
    second = add(engine, [2], SamplingParams(temperature=0, max_tokens=12))
    longs = [add(engine, [3 + i] * 9, request_id=f"long-{i}") for i in range(3)]
    step(engine)
    assert len(engine.scheduler.prefilling) == 3
    step(engine)
    assert first.finished
    engine.abort("long-1")
    engine.scheduler.check_integrity()
    while engine.busy:
        step(engine)
    assert longs[1].outputs[0].finish_reason == "abort"
    for output, prompt, tokens in ((second, [2], 12), (longs[0], [3] * 9, 5), (longs[2], [5] * 9, 5)):
        assert output.outputs[0].token_ids == slow_answer(
            ToyModel(), prompt, SamplingParams(temperature=0, max_tokens=tokens)
        )


@pytest.mark.parametrize("state", ["waiting", "prefilling", "running"])
@pytest.mark.parametrize("how", ["abort", "deadline"])
def test_a_request_can_be_ended_in_every_state(state: str, how: str) -> None:
    engine = engine_of(max_batch_size=2, prefill_chunk=3)
    other = add(engine, [1, 2], SamplingParams(temperature=0, max_tokens=30))
    step(engine)
    if state == "waiting":
        add(engine, [9] * 8, SamplingParams(temperature=0, max_tokens=30))
        step(engine)
    victim = add(
        engine, [7] * 8, SamplingParams(temperature=0, max_tokens=30, logit_bias={3: 1.0}), request_id="victim"
    )
    for _ in range({"waiting": 1, "prefilling": 1, "running": 4}[state]):
        step(engine)
    queue = getattr(engine.scheduler, state)
    row = next(row for row in queue if row.request_id == "victim")
    had = list(victim.outputs[0].token_ids)
    if how == "abort":
        assert engine.abort("victim") is victim
    else:
        row.deadline = 0.0
        assert victim in step(engine)
    engine.scheduler.check_integrity()
    assert victim.outputs[0].finish_reason == how
    assert victim.outputs[0].metrics.finished is not None
    assert victim.outputs[0].token_ids == had
    assert all(row.request_id != "victim" for row in getattr(engine.scheduler, state))
    while engine.busy:
        step(engine)
    expected = slow_answer(ToyModel(), [1, 2], SamplingParams(temperature=0, max_tokens=30))
    assert other.outputs[0].token_ids == expected


def test_aborting_a_request_ends_all_its_samples() -> None:
    engine = engine_of(max_batch_size=2, prefill_chunk=2)
    output = add(engine, [1] * 5, SamplingParams(n=5, max_tokens=20, seed=1, min_tokens=3), request_id="many")
    for _ in range(4):
        step(engine)
    engine.abort("many")
    engine.scheduler.check_integrity()
    assert output.finished
    assert not engine.busy
    assert engine.abort("many") is None


def test_the_integrity_check_notices_what_is_wrong() -> None:
    def broken(engine: Engine) -> Any:
        scheduler = engine.scheduler
        yield lambda: scheduler.running.reverse()
        yield lambda: scheduler.batch.set_live(range(1))
        yield lambda: scheduler.batch.lengths.__setitem__(0, 9)
        yield lambda: scheduler.batch.text[0, 0].fill_(9)
        yield lambda: setattr(scheduler.running[0].output, "finish_reason", "stop")

    for number in range(5):
        engine = engine_of(max_batch_size=2)
        add(engine, [1, 2])
        add(engine, [3, 4, 5])
        step(engine)
        list(broken(engine))[number]()
        with pytest.raises(AssertionError):
            engine.scheduler.check_integrity()


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_random_arrivals_aborts_and_deadlines_affect_no_other_request(seed: int) -> None:
    rng = random.Random(seed)
    kind = rng.choice([ToyModel, FlatToy])
    engine = make_engine(
        kind(),
        kind(blur=0.3),
        eos=(0,),
        drafter="model",
        attention="auto",
        longest_pause=rng.choice([None, 0.001]),
        max_batch_size=rng.randint(1, 5),
        prefill_chunk=rng.choice([1, 3, 8, 100]),
    )
    engine.use_policy(RandomLength(seed))
    added: dict[str, tuple[RequestOutput, list[int], SamplingParams]] = {}
    ended: Counter[str] = Counter()
    for name in map(str, range(10)):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.choice([1, 1, 2, 5, 20]))]
        params = SamplingParams(
            n=rng.choice([1, 1, 3]),
            temperature=rng.choice([0, 1.0]),
            max_tokens=rng.choice([1, 4, 12]),
            seed=rng.randrange(99),
            presence_penalty=rng.choice([0, 1.0]),
            logit_bias=rng.choice([{}, {5: 2.0}]),
        )
        added[name] = (add(engine, prompt, params, request_id=name), prompt, params)
        for _ in range(rng.randint(0, 4)):
            for output in step(engine):
                ended[output.request_id] += output.finished
        if rng.random() < 0.2:
            engine.abort(rng.choice(list(added)))
            engine.scheduler.check_integrity()
        if rng.random() < 0.2 and engine.scheduler.running:
            rng.choice(engine.scheduler.running).deadline = 0.0
    while engine.busy:
        for output in step(engine):
            ended[output.request_id] += output.finished
    assert all(count <= 1 for count in ended.values()), "a request ends once"
    for output, prompt, params in added.values():
        for index, answer in enumerate(output.outputs):
            expected = slow_answer(ToyModel(), prompt, params, index, (0,))
            cut = answer.finish_reason in ("abort", "deadline")
            assert answer.token_ids == (expected[: len(answer.token_ids)] if cut else expected)
            check_metrics(answer, len(prompt))


def check_metrics(answer: CompletionOutput, prompt_tokens: int) -> None:
    metrics = answer.metrics
    assert metrics.prompt_tokens == prompt_tokens
    assert metrics.output_tokens == len(answer.token_ids) == len(answer.token_kinds)
    assert metrics.accepted == answer.token_kinds.count("accepted") <= metrics.drafted
    assert metrics.finished is not None
    assert metrics.finished >= metrics.arrival_time
    others = len(answer.token_ids) - metrics.accepted
    assert metrics.rounds - 1 <= others <= metrics.rounds  # every round gives one token of its own, unless it was cut


def test_samples_end_at_the_longest_sequence() -> None:
    engine = engine_of(max_model_len=12, max_batch_size=2)
    outputs = run(engine, [[1] * 11, [2] * 4], [SamplingParams(temperature=0, max_tokens=50)] * 2)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 8]
    assert all(output.outputs[0].finish_reason == "length" for output in outputs)
    assert POSITIONS > 12


# --- deadlines, on a clock that only forward passes move ------------------------------------------------------------


class Slow(ToyModel):
    """A model that takes ``pass_ms`` per forward pass and ``token_ms`` per token; replaces ``time``."""

    def __init__(self, pass_ms: float = 8.0, token_ms: float = 1.0) -> None:
        super().__init__(max_positions=2000)
        self.pass_ms, self.token_ms, self.seconds = pass_ms, token_ms, 100.0

    def hidden_states(self, tokens: Tensor, *more: Any, **options: Any) -> HiddenStates:
        self.seconds += (self.pass_ms + self.token_ms * tokens.numel()) / 1000
        return super().hidden_states(tokens, *more, **options)

    def perf_counter(self) -> float:
        return self.seconds

    monotonic = perf_counter


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Slow:
    model = Slow()
    for module in (engine_module, scheduler_module, hardware, request_module, sequences_module):
        monkeypatch.setattr(module, "time", model)
    return model


def limited(budget: float, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=1900, ignore_eos=True, time_budget=budget, **more)


def late_ms(engine: Engine, slow: Slow, outputs: Sequence[RequestOutput]) -> list[float]:
    """Return the milliseconds from each request's deadline to its end, as the caller of ``step`` sees it."""
    deadlines = {output.request_id: slow.seconds for output in outputs}
    for sequence in engine.scheduler.waiting:
        deadlines[sequence.request_id] = sequence.deadline
    ends: dict[str, float] = {}
    while len(ends) < len(outputs):
        step(engine)
        ends |= {o.request_id: slow.seconds for o in outputs if o.finished and o.request_id not in ends}
    return [1000 * (ends[name] - deadline) for name, deadline in deadlines.items()]


@in_pairs(budget=[0.05, 0.1, 1.0], prompt=[2, 150, 1500], rows=[1, 4])
def test_a_time_budget_is_kept(slow: Slow, budget: float, prompt: int, rows: int) -> None:
    """A round takes 9 to 12 ms, the longest prompt 1.5 s."""
    engine = make_engine(slow, max_model_len=2000, longest_pause=0.1)
    for number in range(6):
        output = add(engine, [1 + number, *[2] * (prompt - 1)], limited(budget, n=rows))
        (late,) = late_ms(engine, slow, [output])
        assert {answer.finish_reason for answer in output.outputs} == {"deadline"}
        assert late < (10 if number else 60), "before the first one nothing is known of this machine"
        assert late > -14, "another round would have been in time"


def test_prefill_does_not_make_decoding_rows_miss_their_deadlines(slow: Slow) -> None:
    engine = make_engine(slow, max_model_len=2000, longest_pause=0.2)
    add(engine, [3] * 400, limited(2.0))
    while engine.busy:
        step(engine)
    outputs = [add(engine, [1, 2], limited(budget)) for budget in (0.15, 0.33)]
    outputs.append(add(engine, [5] * 1500, limited(1.0)))
    assert max(late_ms(engine, slow, outputs)) < 10, "a pass, as long as it is not known what a small one takes"


def test_a_sample_gets_all_tokens_that_its_time_budget_allows(slow: Slow) -> None:
    engine = make_engine(slow, max_model_len=2000)
    outputs = [add(engine, [1, 2], limited(1.0)) for _ in range(2)]
    late_ms(engine, slow, outputs)
    rounds = [answer.metrics.rounds for output in outputs for answer in output.outputs]
    assert min(rounds) >= (1000 - 2 * 20) // 10 - 1  # a round of two rows takes 10 ms


@pytest.mark.parametrize("stalled", ["round", "chunk"])
def test_a_stall_does_not_keep_later_requests_from_being_tried(slow: Slow, stalled: str) -> None:
    """If a stall were believed forever, no request with a small budget would show that it is over."""
    engine = make_engine(slow, max_model_len=2000, longest_pause=0.1)
    slow.pass_ms = 2000.0
    for number in range(9):
        output = add(engine, [1 + number % 20, *[2] * (40 if stalled == "chunk" else 0)], limited(5.0))
        late_ms(engine, slow, [output])
    slow.pass_ms = 8.0
    gained = []
    for number in range(30):
        output = add(engine, [1 + number % 20, *[2] * (40 if stalled == "chunk" else 0)], limited(0.2))
        late_ms(engine, slow, [output])
        gained.append(len(output.outputs[0].token_ids))
    assert min(gained[-5:]) >= 10, gained


@pytest.mark.skipif(not native.available(), reason=f"no kernels here: {native.why_none()}")
def test_a_row_freed_by_a_deadline_goes_to_a_waiting_request() -> None:
    """Also if the kernels' rounds run without torch's modes."""
    engine = make_engine(tiny_native(0), max_batch_size=1)
    first = add(engine, [1, 2], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, time_budget=0.002))
    second = add(engine, [3, 4, 5])
    while engine.busy:
        step(engine)
    assert first.outputs[0].finish_reason == "deadline"
    assert second.outputs[0].token_ids
