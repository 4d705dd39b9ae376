"""Rows that wait for memory: none starves, the limit holds, and answers do not change."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from core.test_row_tables import taken
from engine.test_ranking import LETTERS, Letters
from engine.test_scheduler import step
from paceline.config import MAX_SPECULATION_LENGTH, SamplingParams
from paceline.core.cache_budget import CacheUsage
from paceline.core.outputs import RequestOutput
from paceline.core.row_tables import GROWS
from paceline.engine import slot_memory
from paceline.engine.engine import Engine, Request
from paceline.engine.memory import plan_memory, row_bytes
from paceline.engine.scoring import PooledStates, PromptReading, PromptScores
from paceline.engine.slot_memory import SlotMemory
from paceline.errors import CapacityError, ParameterError
from toy import VOCAB, FlatToy, ToyModel, answers, make_engine, run

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.skipif(not GROWS, reason="rows do not grow here")]

LONGEST = 1500  # tokens: six pages of each head
ROWS = 6
GREEDY = SamplingParams(temperature=0, max_tokens=3)


def prompt_of(size: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(1, VOCAB) for _ in range(size)]


def limit_for(lengths: Sequence[int], target: ToyModel, draft: ToyModel | None = None, **options: Any) -> int:
    """Smallest memory_limit in bytes under which rows of these lengths fit at once."""
    config = make_engine(target, draft, **{"max_batch_size": ROWS} | options).config
    plan = plan_memory(target, draft, config, config.max_batch_size, config.max_model_len or LONGEST)
    caches = sum(row_bytes(target, draft, config, length) for length in lengths)
    return plan.weights + plan.workspace + caches


def short_engine(lengths: Sequence[int], kind: type[ToyModel] = ToyModel, **options: Any) -> Engine:
    """Engine whose memory fits exactly rows of these lengths at once."""
    model = kind(max_positions=LONGEST)
    options = {"max_batch_size": ROWS, "max_model_len": LONGEST} | options
    engine = make_engine(model, **options, memory_limit=limit_for(lengths, model, **options))
    assert engine.room.is_short
    return engine


def add(engine: Engine, size: int, params: SamplingParams = GREEDY, seed: int = 0, **fields: Any) -> RequestOutput:
    return engine.add(Request(prompt_of(size, seed), params, **fields))


def reach(size: int, max_tokens: int = 3) -> int:
    return size + max_tokens + MAX_SPECULATION_LENGTH


def ends_after(count: int) -> SamplingParams:
    """Answers that might be of any length and end soon after so many tokens."""
    return SamplingParams(temperature=0, max_tokens=10**6, min_tokens=count, stop_token_ids=(5, 9))


def memory_of(engine: Engine) -> int:
    return sum(taken(*decoder.cache.tables) for decoder in engine.parts.decoders)


def finish(engine: Engine) -> None:
    """Run until idle; check the limit after every step, as counted by the scheduler and by the system."""
    while engine.busy:
        step(engine)
        assert memory_of(engine) <= engine.room.limit


@pytest.mark.parametrize(("kind", "drafter"), [(ToyModel, None), (ToyModel, "model"), (FlatToy, "model")])
def test_answers_do_not_depend_on_the_memory_limit_which_holds(kind: type[ToyModel], drafter: str | None) -> None:
    draw, shared = random.Random(7), prompt_of(400, 99)
    sizes = [draw.choice([5, 40, 250, 500, 900, 1470]) for _ in range(8)]
    prompts = [[*shared[: size // 2], *prompt_of(size - size // 2, size % 5)] for size in sizes]
    params = [
        SamplingParams(temperature=1, seed=index, n=1 + index % 3, max_tokens=10**9 if size > 1300 else 8)
        for index, size in enumerate(sizes)
    ]
    target = kind(max_positions=LONGEST)
    draft = None if drafter is None else kind(max_positions=LONGEST, blur=0.1)
    options: dict[str, Any] = {"max_model_len": LONGEST, "drafter": drafter, "num_speculative_tokens": 3}
    limit = limit_for([LONGEST, 600, 300], target, draft, **options)
    roomy = make_engine(target, draft, max_batch_size=ROWS, **options)
    tight = make_engine(target, draft, max_batch_size=ROWS, memory_limit=limit, **options)
    assert not roomy.room.is_short
    expected = run(roomy, prompts, params)
    outputs = [tight.add(Request(list(prompt), params)) for prompt, params in zip(prompts, params, strict=True)]
    finish(tight)
    assert answers(outputs) == answers(expected)


def test_rows_begin_while_all_can_grow_once_more_and_the_last_gives_way() -> None:
    """Memory of one whole row: 3 begin at 10 tokens and grow; the first never gives way, others go on where it ends."""
    engine, params = short_engine([LONGEST]), ends_after(800)
    outputs = [add(engine, 10, params, seed=seed) for seed in range(4)]
    step(engine)
    begun = len(engine.slots.used)
    assert 1 < begun < 4
    assert engine.scheduler.admissible == 0
    while len(engine.slots.used) > 1:
        step(engine)
        assert engine.slots.by_rank[0].request_id == outputs[0].request_id
        assert memory_of(engine) <= engine.room.limit
    assert engine.scheduler.preemptions >= begun - 1
    waits = engine.scheduler.preempted[-1]
    engine.abort(waits.request_id)
    assert waits not in engine.scheduler.unfinished
    finish(engine)
    whole = [output for output in outputs if output.outputs[0].finish_reason == "stop"]
    assert len(whole) == 3
    roomy = make_engine(ToyModel(max_positions=LONGEST), max_model_len=LONGEST)
    assert answers(whole) == answers(run(roomy, [each.prompt_token_ids for each in whole], [params] * 3))
    metrics = [output.outputs[0].metrics for output in outputs]
    assert engine.scheduler.preemptions == sum(each.preempted for each in metrics)
    assert engine.scheduler.prefill.recomputed_tokens == sum(each.recomputed_tokens for each in metrics) > 0
    assert f"{engine.scheduler.preemptions} gave way for others" in engine.describe()
    assert all(each.cached_tokens == 0 for each in metrics), "a row's own text is no saving of its request"


def test_a_row_gives_way_to_urgent_ones_that_began_after_it() -> None:
    engine, params = short_engine([LONGEST, 300]), ends_after(1030)
    patient, urgent = (add(engine, 10, params, seed=priority, priority=priority) for priority in (1, 0))
    step(engine)
    assert len(engine.slots.used) == 2
    while not (patient.finished or engine.scheduler.preempted):
        step(engine)
    assert [sequence.request_id for sequence in engine.scheduler.preempted] == [patient.request_id]
    finish(engine)
    assert urgent.finished


def test_a_preempted_row_streams_on_ends_by_its_deadline_and_lets_urgent_requests_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Memory of seven pages of 250 tokens: of five rows the last two are preempted when each needs a second page."""
    monkeypatch.setattr(slot_memory, "STRETCH", 16)
    monkeypatch.setattr(SlotMemory, "growth", lambda *_: 0)
    engine, params = short_engine([LONGEST, 100]), SamplingParams(temperature=0, max_tokens=80)
    streamed: dict[str, Any] = {"priority": 1, "make_stream": lambda _: Letters("")}
    outputs = [add(engine, 170, params, seed, **streamed) for seed in range(5)]
    while not engine.scheduler.preempted:
        step(engine)
    resumes, late = engine.scheduler.preempted
    assert [resumes.request_id, late.request_id] == [output.request_id for output in outputs[3:]]
    late.deadline = 0.0
    urgent, patient = (add(engine, 5, seed=priority, priority=priority) for priority in (0, 1))
    step(engine)
    assert outputs[4].outputs[0].finish_reason == "deadline"
    while not (urgent.finished or outputs[0].finished):
        step(engine)
    assert engine.scheduler.preempted == [resumes]
    assert not patient.outputs[0].token_ids
    finish(engine)
    assert patient.finished
    roomy = make_engine(ToyModel(max_positions=LONGEST), max_model_len=LONGEST)
    expected = answers(run(roomy, [output.prompt_token_ids for output in outputs], [params] * 5))
    for output, (whole,) in zip(outputs, expected, strict=True):
        answer = output.outputs[0]
        assert answer.token_ids == (whole if output is not outputs[4] else whole[: len(answer.token_ids)])
        assert "".join(answer.pieces) == answer.text == "".join(LETTERS[token] for token in answer.token_ids) > ""


@pytest.mark.parametrize("reads", [PooledStates, PromptScores])
def test_what_is_collected_from_a_prompt_survives_that_it_is_read_again(
    reads: type[PromptReading], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_memory, "STRETCH", 16)
    monkeypatch.setattr(SlotMemory, "growth", lambda *_: 0)
    engine, text = short_engine([LONGEST], FlatToy, prefill_chunk=8), prompt_of(950, 1)
    grows = add(engine, 370, SamplingParams(temperature=0, max_tokens=150))
    while not grows.outputs[0].token_ids:
        step(engine)
    reading, alone = reads(text), reads(text)
    output = engine.add(Request(text, SamplingParams(max_tokens=1), reading=reading, only_read=True))
    finish(engine)
    assert output.outputs[0].metrics.preempted == 1
    roomy = make_engine(FlatToy(max_positions=LONGEST), max_model_len=LONGEST)
    roomy.add(Request(text, SamplingParams(max_tokens=1), reading=alone, only_read=True))
    finish(roomy)
    if isinstance(reading, PooledStates) and isinstance(alone, PooledStates):
        assert torch.equal(reading.vector, alone.vector)
    elif isinstance(reading, PromptScores) and isinstance(alone, PromptScores):
        assert reading.logprobs == alone.logprobs


def test_rows_of_short_answers_begin_when_their_maximum_lengths_fit() -> None:
    engine = short_engine([LONGEST, reach(400), reach(400)])
    outputs = [add(engine, 400, seed=seed) for seed in range(8)]
    step(engine)
    scheduler = engine.scheduler
    each = engine.room.bytes_for(reach(400))
    fitting = engine.room.limit // each
    assert len(scheduler.running) + len(scheduler.prefilling) == fitting < ROWS
    assert engine.slots.memory.reserved_bytes == fitting * each
    finish(engine)
    assert [output.outputs[0].finish_reason for output in outputs] == ["length"] * 8
    assert engine.slots.memory.reserved_bytes == 0


def test_a_request_that_waits_for_memory_is_not_overtaken_by_smaller_ones() -> None:
    engine = short_engine([LONGEST])
    first = add(engine, 300, SamplingParams(temperature=0, max_tokens=20))
    long, late = add(engine, LONGEST - 10, seed=1), add(engine, 5, seed=2)
    step(engine)
    assert first.outputs[0].token_ids
    assert engine.scheduler.admissible == 0
    while not long.outputs[0].token_ids:
        assert not late.outputs[0].token_ids
        step(engine)
    finish(engine)
    assert late.finished


@pytest.mark.parametrize("wanted", [LONGEST, 10**6, 2**31 - 1])
def test_a_request_for_the_longest_answer_gets_the_whole_memory_and_no_more(wanted: int) -> None:
    engine = short_engine([LONGEST])
    params = SamplingParams(temperature=0, max_tokens=wanted)
    outputs = [add(engine, LONGEST - 5, params, seed) for seed in range(2)]
    step(engine)
    assert [sequence.reserved_tokens for sequence in engine.scheduler.prefilling] == [LONGEST]
    finish(engine)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [5, 5]


def test_the_least_recently_used_cached_prefixes_are_freed_first() -> None:
    engine = short_engine([LONGEST])
    for seed in (1, 2, 3):
        add(engine, 300, seed=seed)
        finish(engine)
    lengths = [len(each.tokens) for each in engine.slots.free.prefixes.values()]
    assert lengths == [302, 302, 302]
    add(engine, 700, seed=4)  # one cached prefix fits beside it
    finish(engine)
    kept = [each.tokens[:300].tolist() for each in engine.slots.free.prefixes.values()]
    assert prompt_of(300, 1) not in kept
    assert prompt_of(300, 3) in kept
    again = add(engine, 300, seed=3)
    finish(engine)
    assert again.cached_tokens == 299


def test_a_cached_prefix_without_memory_for_a_copy_is_reused_in_place() -> None:
    engine = short_engine([LONGEST])
    text = add(engine, 900, seed=1)
    finish(engine)
    prompt = [*prompt_of(800, 1), *prompt_of(500, 2)]
    next_one = engine.add(Request(prompt, GREEDY))
    finish(engine)
    assert text.finished
    assert next_one.cached_tokens == 800
    roomy = make_engine(ToyModel(max_positions=LONGEST), max_model_len=LONGEST)
    assert answers([next_one]) == answers(run(roomy, [prompt], [GREEDY]))


def test_rows_take_the_memory_of_prefixes_and_give_it_back() -> None:
    """Beside rows of 2 x 1500 tokens there is memory for a prefix of 900: 20 are not kept, and none fails a request."""
    model = FlatToy(max_positions=LONGEST)
    options: dict[str, Any] = {"max_batch_size": 2, "max_model_len": LONGEST, "drafter": "ngram"}
    beside = make_engine(model, **options).room.bytes_for(900)
    engine = make_engine(model, **options, prefix_memory=beside)
    rows = 2 * engine.room.bytes_for(LONGEST)
    assert (engine.room.limit, engine.room.slots > 20) == (rows + beside, True)
    outputs = [add(engine, 300 + 10 * seed, seed=seed) for seed in range(20)]
    finish(engine)
    kept = sorted(len(each.tokens) for each in engine.slots.free.prefixes.values())
    assert kept[-1] == 492, "the latest"
    assert sum(kept) > 2 * LONGEST, "idle rows leave their memory to prefixes"
    assert engine.slots.free.counts.dropped == 20 - len(kept) > 0
    whole = [add(engine, LONGEST - 5, SamplingParams(temperature=0, max_tokens=5), seed) for seed in (50, 51)]
    step(engine)
    assert len(engine.slots.used) == 2, "both have a row at once"
    assert engine.slots.free.bytes <= beside
    finish(engine)
    for output in (*outputs, *whole):
        assert output.outputs[0].finish_reason == "length"
    assert answers(whole) == answers(
        run(
            make_engine(model, **options),
            [each.prompt_token_ids for each in whole],
            [SamplingParams(temperature=0, max_tokens=5)] * 2,
        )
    )


def test_memory_for_prefixes_must_fit_and_be_of_use() -> None:
    model, options = FlatToy(max_positions=LONGEST), {"max_batch_size": ROWS, "max_model_len": LONGEST}
    with pytest.raises(CapacityError, match=r"prefixes 1024\.00 GiB, but"):
        make_engine(model, **options, memory_limit=10**9, prefix_memory=2**40)
    for refused, more in ((ToyModel(max_positions=LONGEST), {}), (model, {"prefix_cache": False})):
        with pytest.raises(ParameterError, match=r"prefix_memory=1 .* 0 or left out"):
            make_engine(refused, **options, prefix_memory=1, **more)
        assert make_engine(refused, **options, prefix_memory=0, **more).room.slots == ROWS


def test_a_request_that_ends_early_frees_memory_for_the_next() -> None:
    engine = short_engine([LONGEST])
    add(engine, 300, SamplingParams(temperature=0, max_tokens=10**6), request_id="gone")
    next_one = add(engine, 300, SamplingParams(temperature=0, max_tokens=10**6, stop_token_ids=tuple(range(VOCAB))))
    step(engine)
    assert engine.scheduler.admissible == 0
    engine.abort("gone")
    step(engine)
    assert next_one.outputs[0].token_ids
    finish(engine)
    assert memory_of(engine) < engine.room.limit // 2


def test_a_row_that_fails_to_begin_takes_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = short_engine([LONGEST])
    add(engine, 300, seed=1)
    finish(engine)
    set_row = engine.batch.set_row
    monkeypatch.setattr(engine.batch, "set_row", lambda *_: 1 / 0)
    failed = add(engine, 1000, seed=2)
    step(engine)
    assert failed.outputs[0].finish_reason == "error"
    engine.scheduler.check_integrity()
    monkeypatch.setattr(engine.batch, "set_row", set_row)
    whole = add(engine, LONGEST - 5, seed=3)
    finish(engine)
    assert whole.outputs[0].error is None


def test_clearing_after_an_interrupt_frees_all_memory() -> None:
    engine = short_engine([LONGEST])
    for seed in range(3):
        add(engine, 300, SamplingParams(temperature=0, max_tokens=100), seed)
    step(engine)
    engine.clear()
    engine.scheduler.check_integrity()
    assert memory_of(engine) == 0
    last = add(engine, LONGEST - 5)
    finish(engine)
    assert last.finished


def test_measuring_costs_respects_the_limit_and_frees_its_memory() -> None:
    engine = short_engine([LONGEST], num_speculative_tokens="auto", drafter="ngram")
    assert engine.models.costs
    assert memory_of(engine) == 0
    short = add(engine, 20)
    finish(engine)
    assert short.finished


def test_one_row_of_maximum_length_and_all_rows_of_128_tokens_must_fit() -> None:
    model, options = ToyModel(max_positions=LONGEST), {"max_model_len": LONGEST}
    limit = limit_for([LONGEST], model, **options)
    make_engine(model, max_batch_size=ROWS, memory_limit=limit, **options)
    with pytest.raises(CapacityError, match=r"one row of max_model_len=1500 tokens .*: 1 rows of this length"):
        make_engine(model, max_batch_size=ROWS, memory_limit=limit - 1, **options)
    with pytest.raises(CapacityError, match=r"max_batch_size=60 rows of 128 .* lower max_batch_size or max_model_len"):
        make_engine(model, max_batch_size=60, memory_limit=limit, **options)


def test_the_start_line_says_that_rows_grow() -> None:
    grow = "6 rows of 1500 tokens (they grow: 1 of that length at once, 0.00 GiB; kv_cache_dtype='int8' would fit 2)"
    assert grow in short_engine([LONGEST]).describe()
    roomy = make_engine(ToyModel(max_positions=LONGEST), max_model_len=LONGEST)
    assert "rows of 1500 tokens (0.00 GiB)," in roomy.describe()


@pytest.mark.parametrize("limited", [False, True])
def test_cache_usage_is_reported_in_bytes(limited: bool) -> None:
    model = FlatToy(max_positions=LONGEST)
    options: dict[str, Any] = {"max_batch_size": ROWS, "max_model_len": LONGEST}
    limit = limit_for([LONGEST, 300], model, **options) if limited else None
    engine = make_engine(model, **options, memory_limit=limit)
    assert engine.scheduler.filled == CacheUsage(0, 0, engine.room.limit)
    of = engine.room.bytes_for
    outputs = [add(engine, size, seed=size) for size in (300, 20)]
    engine.step()
    lengths = engine.batch.lengths[:2]
    assert engine.scheduler.filled == CacheUsage(sum(map(of, lengths)), 0, engine.room.limit)
    assert engine.scheduler.filled.fraction == engine.scheduler.filled.row_bytes / engine.room.limit > 0
    while not all(output.finished for output in outputs):
        engine.step()
    ended = engine.scheduler.filled
    assert ended.row_bytes == ended.fraction == 0
    assert of(300) + of(20) <= ended.prefix_bytes <= of(reach(300)) + of(reach(20))
    text = PromptScores(prompt_of(600))
    engine.add(Request(text.token_ids, SamplingParams(max_tokens=1), reading=text, only_read=True))
    while engine.busy:
        engine.step()
    assert None not in text.logprobs[1:]
    assert engine.scheduler.filled.row_bytes == 0
    assert engine.scheduler.filled.prefix_bytes <= engine.scheduler.filled.limit_bytes
    assert engine.scheduler.filled.prefix_bytes - ended.prefix_bytes >= of(598) - of(300), (
        "a scored text is a cached prefix"
    )


@pytest.mark.parametrize("kind", [ToyModel, FlatToy])
def test_draft_tokens_beyond_a_rows_end_have_cache_slots(kind: type[ToyModel]) -> None:
    """Draft tokens beyond the end of an answer are verified, too, at the border of a page."""
    options: dict[str, Any] = {"max_model_len": LONGEST, "drafter": "model"}
    options |= {"max_batch_size": ROWS, "num_speculative_tokens": MAX_SPECULATION_LENGTH}
    target, draft = kind(max_positions=LONGEST), kind(max_positions=LONGEST, blur=0.05)
    limit = limit_for([LONGEST, 256], target, draft, **options)
    engine = make_engine(target, draft, memory_limit=limit, **options)
    assert engine.room.is_short
    outputs = [add(engine, size, seed=size) for size in (250, 253, 254, 256, LONGEST - 2)]
    finish(engine)
    expected = run(
        make_engine(target, max_model_len=LONGEST), [one.prompt_token_ids for one in outputs], [GREEDY] * len(outputs)
    )
    assert answers(outputs) == answers(expected)
