"""Prefix reuse: tokens are read once, and outputs do not change."""

from __future__ import annotations

import functools
import random
from array import array
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.test_scheduler import Spy, step
from paceline.config import SamplingParams
from paceline.core.outputs import RequestOutput
from paceline.engine.engine import Engine, Request
from paceline.engine.prefixes import (
    LEAST,
    TOKENS_PER_USE,
    WORTH_WAITING,
    CachedPrefix,
    FreeSlotPool,
    Scope,
    common_prefix_length,
)
from toy import VOCAB, FlatToy, RandomLength, ToyModel, answers, make_engine, run, slow_answer, tiny_native

pytestmark = pytest.mark.usefixtures("one_thread")

SHORT = SamplingParams(temperature=0, max_tokens=3)


def prompt_of(size: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, VOCAB) for _ in range(size)]


def ask(engine: Engine, prompt: Sequence[int], params: SamplingParams = SHORT) -> RequestOutput:
    """Run one request alone, to its end."""
    return run(engine, [prompt], [params])[0]


def finish(engine: Engine) -> None:
    while engine.busy:
        step(engine)


# --- bookkeeping ------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 1), max_size=200), st.integers(0, 200), st.integers(0, 220))
def test_common_prefixes_are_counted_to_the_token(text: list[int], at: int, most: int) -> None:
    other = [*text[:at], *(1 - token for token in text[at:])]
    assert common_prefix_length(text, other, most) == min(at, len(text), most)
    assert common_prefix_length(text, text[:at], most) == min(at, len(text), most)


def kept(size: int) -> CachedPrefix:
    return CachedPrefix(array("i", [1] * size), Scope("", ""))


def pool_of(*texts: int) -> FreeSlotPool:
    """Return a pool of prefixes with these numbers of tokens, the least recently used first; 0: an empty slot."""
    pool = FreeSlotPool(())
    for slot, size in enumerate(texts):
        pool.put(slot, kept(size))
    return pool


@pytest.mark.parametrize(
    ("sizes", "fits", "elsewhere", "is_full", "place"),
    [
        ((50, 60, 70), {}, 0, False, 0),  # no slot holds anything: the oldest
        ((50, 60, 70), {2: 70}, 0, False, 2),  # nothing is lost where all that a slot holds is wanted
        ((50, 60, 70), {1: 40}, 0, False, 1),  # 20 tokens are lost instead of 50
        ((50, 60, 120), {2: 40}, 0, False, 0),  # 80 would be
        ((50, 60, 70), {1: 60}, 61, False, 0),  # a row in use holds more
        ((60, 0, 70), {2: 40}, 0, False, 1),  # an empty slot is taken for nothing
        ((60, 0, 70), {2: 70 - LEAST + 1}, 0, False, 2),  # so few tokens are not worth a copy
        ((60, 0, 70), {2: 40}, 0, True, 2),  # beside a copy the oldest would not fit, which has more tokens
        ((20, 0, 70), {2: 40}, 0, True, 1),  # fewer
    ],
)
def test_the_free_slot_that_loses_least_is_chosen(
    sizes: tuple[int, ...], fits: dict[int, int], elsewhere: int, is_full: bool, place: int
) -> None:
    assert pool_of(*sizes).choose(fits, elsewhere, is_full=is_full) == place


def test_recently_used_rows_are_overwritten_last_and_private_ones_first() -> None:
    pool = pool_of(50, 50, 50)
    pool.use(pool.prefixes[0])
    assert pool.by_use == [1, 2, 0]
    pool.prefixes[2].scope = Scope("", None)
    assert pool.choose({}, 0, is_full=False) == 2


# --- what is read -----------------------------------------------------------------------------------------------------


def chat_engine(**options: Any) -> Engine:
    kind = options.pop("kind", FlatToy)
    return make_engine(kind(), kind(blur=0.3), drafter="model", attention="auto", **options)


@pytest.mark.parametrize(("options", "cached"), [({}, 20 * (39 + 51)), ({"prefix_memory": 0}, 0)])
def test_twenty_conversations_on_four_rows_find_what_they_said(options: dict[str, Any], cached: int) -> None:
    """Each takes its own slot again: nothing is copied. Where only rows keep prefixes, they push each other out."""
    engine = make_engine(tiny_native(3), tiny_native(3, 1), drafter="hybrid", attention="auto", **options)
    texts = [prompt_of(40, seed)[:37] for seed in range(20)]
    params = [SamplingParams(temperature=seed % 2, max_tokens=3, seed=seed) for seed in range(20)]
    found, slots = 0, []
    for turn in range(3):
        outputs = run(engine, texts, params)
        assert answers(outputs) == answers(run(plain_engine(), texts, params))
        found += sum(output.cached_tokens for output in outputs)
        texts = [[*o.prompt_token_ids, *o.outputs[0].token_ids, *prompt_of(9, turn)] for o in outputs]
        slots.append({tuple(prefix.tokens[:37]): slot for slot, prefix in engine.slots.free.prefixes.items()})
    assert found == cached
    assert engine.batch.max_rows == 4
    assert (slots[0] == slots[1] == slots[2]) == (cached > 0)
    assert len(slots[0]) == (20 if cached else 4)


@functools.cache
def plain_engine() -> Engine:
    return make_engine(tiny_native(3), prefix_cache=False)


@pytest.mark.parametrize("kind", [ToyModel, FlatToy])
@pytest.mark.parametrize("rows", [1, 3])
def test_the_next_turn_of_a_chat_reads_what_is_new(kind: type[ToyModel], rows: int) -> None:
    engine = chat_engine(kind=kind, max_batch_size=rows)
    spies = [Spy(decoder) for decoder in engine.parts.decoders]
    first = ask(engine, prompt_of(30))
    assert first.cached_tokens == 0
    text = [*prompt_of(30), *first.outputs[0].token_ids]
    second = ask(engine, [*text, *prompt_of(10, 1)])
    seen = len(text) - 1  # the answer's last token was never read
    assert second.cached_tokens == seen
    assert spies[0].tokens == 29 + len(text) + 10 - 1 - seen
    assert spies[1].tokens <= spies[0].tokens + 3  # a draft model may not have read the last draft tokens
    assert second.outputs[0].token_ids == slow_answer(kind(), [*text, *prompt_of(10, 1)], SHORT)


def test_a_chats_next_turn_takes_its_row_and_copies_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = chat_engine(max_batch_size=3)
    first = ask(engine, prompt_of(30))

    def copied(*_: Any) -> None:
        raise AssertionError("copied")

    monkeypatch.setattr(engine.parts.target.cache, "copy_row", copied)
    other = engine.add(Request(prompt_of(20, 7), SHORT))
    second = ask(engine, [*prompt_of(30), *first.outputs[0].token_ids, 5])
    assert (second.cached_tokens, other.cached_tokens) == (32, 0)


def test_prefixes_are_copied_from_decoding_rows() -> None:
    engine = chat_engine(max_batch_size=2)
    spy = Spy(engine.parts.target)
    longer = engine.add(Request(prompt_of(30), SamplingParams(temperature=0, max_tokens=40)))
    for _ in range(8):
        step(engine)
    text = [*prompt_of(30), *longer.outputs[0].token_ids]
    branch = engine.add(Request([*text, 3, 4], SHORT))
    finish(engine)
    assert branch.cached_tokens == len(text) - 1
    assert spy.tokens == 29 + 2
    for output in (longer, branch):
        params = SHORT if output is branch else SamplingParams(temperature=0, max_tokens=40)
        assert output.outputs[0].token_ids == slow_answer(ToyModel(), output.prompt_token_ids, params)


@pytest.mark.parametrize("chunk", [7, 1000])
@pytest.mark.parametrize("kind", [ToyModel, FlatToy])
def test_a_common_prefix_of_prompts_that_come_together_is_read_once(kind: type[ToyModel], chunk: int) -> None:
    head = prompt_of(WORTH_WAITING + 1)
    engine = chat_engine(kind=kind, max_batch_size=4, prefill_chunk=chunk)
    spies = [Spy(decoder) for decoder in engine.parts.decoders]
    prompts = [[*head, *prompt_of(size, size)] for size in (9, 5, 14, 5)]
    outputs = run(engine, prompts, [SHORT] * 4)
    assert all(spy.tokens == len(head) + 8 + 5 - 1 + 13 for spy in spies), "the last prompt is the second again"
    assert sorted(output.cached_tokens for output in outputs) == [0, len(head), len(head), len(head) + 4]
    for output, prompt in zip(outputs, prompts, strict=True):
        assert output.outputs[0].token_ids == slow_answer(ToyModel(), prompt, SHORT)


@pytest.mark.parametrize("after", [0, 2, 5])
def test_a_prompt_reads_on_where_its_aborted_prefix_reader_stopped(after: int) -> None:
    head = prompt_of(WORTH_WAITING + 1)
    engine = chat_engine(max_batch_size=3, prefill_chunk=10)
    spy = Spy(engine.parts.target)
    first = engine.add(Request([*head, 1], SHORT, request_id="first"))
    others = [engine.add(Request([*head, 2, 3 + index], SHORT)) for index in range(2)]
    for _ in range(after):
        step(engine)
    engine.abort("first")
    finish(engine)
    assert first.outputs[0].finish_reason == "abort"
    assert spy.tokens == len(head) + 1
    for output in others:
        assert output.outputs[0].token_ids == slow_answer(ToyModel(), output.prompt_token_ids, SHORT)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("size", [1, 2, 5, LEAST, LEAST + 1])
def test_short_prompts_that_differ_in_their_last_token_end(size: int) -> None:
    engine = chat_engine(max_batch_size=3, prefill_chunk=2)
    outputs = run(engine, [[*prompt_of(size), 1], [*prompt_of(size), 2], [*prompt_of(size), 3, 4]], [SHORT] * 3)
    for output in outputs:
        assert output.outputs[0].token_ids == slow_answer(ToyModel(), output.prompt_token_ids, SHORT)


def test_a_long_prompt_waits_for_a_short_one_to_read_their_common_prefix() -> None:
    head = prompt_of(WORTH_WAITING)
    engine = chat_engine(max_batch_size=2, prefill_chunk=10)
    long = engine.add(Request([*head, *prompt_of(25, 1)], SHORT))
    step(engine)
    short = engine.add(Request([*head, 3], SHORT))
    while not short.finished:
        step(engine)
    assert short.cached_tokens == 0 or long.cached_tokens > 0
    assert not long.outputs[0].token_ids
    finish(engine)


def test_the_least_recently_used_row_is_overwritten_first() -> None:
    engine = chat_engine(max_batch_size=3, prefix_memory=0)
    texts = [prompt_of(40, seed) for seed in range(3)]
    for text in texts:
        ask(engine, text)
    assert (
        ask(engine, [*texts[0][:35], 1]).cached_tokens == 35
    )  # the first is of use again, and the oldest is the second
    ask(engine, prompt_of(40, 9))
    found = {
        index: max(
            common_prefix_length(held.tokens, array("i", text), 40) for held in engine.slots.free.prefixes.values()
        )
        for index, text in enumerate(texts)
    }
    assert found == {0: 35, 1: 0, 2: 40} or found == {0: 40, 1: 0, 2: 40}


def test_few_tokens_are_read_and_not_copied() -> None:
    engine = chat_engine()
    ask(engine, prompt_of(40))
    assert ask(engine, [*prompt_of(LEAST - 1), 0, *prompt_of(20, 5)]).cached_tokens == 0
    assert ask(engine, [*prompt_of(LEAST), 0, *prompt_of(20, 5)]).cached_tokens == LEAST


# --- scopes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 3])
def test_without_prefix_cache_only_the_answers_of_a_request_share_its_prompt(rows: int) -> None:
    engine = chat_engine(max_batch_size=rows, prefix_cache=False)
    spy = Spy(engine.parts.target)
    for turn in range(1, 3):
        output = ask(engine, prompt_of(30), SamplingParams(n=4, max_tokens=3, seed=1))
        assert (output.cached_tokens, spy.tokens) == (0, 29 * turn)
        assert sorted(answer.metrics.cached_tokens for answer in output.outputs) == [0, 29, 29, 29]


@pytest.mark.parametrize(
    ("first", "second", "cached"),
    [
        ({}, {}, 29),
        ({"cache_salt": "a"}, {"cache_salt": "a"}, 29),
        ({"cache_salt": "a"}, {"cache_salt": "b"}, 0),
        ({"cache_salt": "a"}, {}, 0),
        ({}, {"cache_salt": "a"}, 0),
        ({"keep_prefix": False}, {}, 0),
        ({}, {"keep_prefix": False}, 29),
        ({"prefix_owner": "one"}, {"prefix_owner": "one"}, 29),
        ({"prefix_owner": "one"}, {"prefix_owner": "two"}, 0),
        ({"prefix_owner": "one"}, {}, 0),
        ({"prefix_owner": "one"}, {"cache_salt": "one"}, 0),
        ({"prefix_owner": "one", "cache_salt": "a"}, {"prefix_owner": "one", "cache_salt": "b"}, 0),
    ],
)
@pytest.mark.parametrize("together", [False, True])
def test_scopes_restrict_prefix_reuse(
    first: dict[str, Any], second: dict[str, Any], cached: int, together: bool
) -> None:
    engine = chat_engine(max_batch_size=4, prefill_chunk=10)
    spy = Spy(engine.parts.target)

    def add(n: int, prefix_owner: str = "", **options: Any) -> RequestOutput:
        params = SamplingParams(max_tokens=3, seed=1, n=n, **options)
        return engine.add(Request(prompt_of(30), params, prefix_owner=prefix_owner))

    one = add(n=2, **first)
    if not together:
        finish(engine)
    other = add(n=1, **second)
    finish(engine)
    assert (one.cached_tokens, other.cached_tokens) == (0, cached)
    assert spy.tokens == 29 + 29 - cached


def test_overwritten_prefixes_are_forgotten() -> None:
    engine = chat_engine()
    ask(engine, prompt_of(30))
    engine.clear()
    assert ask(engine, prompt_of(30)).cached_tokens == 0
    assert ask(engine, prompt_of(30)).cached_tokens == 29
    engine.slots.forget()
    assert ask(engine, prompt_of(30)).cached_tokens == 0


# --- the bits ---------------------------------------------------------------------------------------------------------


class SometimesHopeful(RandomLength):
    """A policy for which draft models read some prompts and not others."""

    def expects_to_draft(self, rows: int) -> bool:
        return self.rng.random() < 0.6


def check_caches(engine: Engine) -> None:
    """Check that every row's cache equals its text: a toy's keys and values are whole numbers that name their token."""
    scheduler = engine.scheduler
    texts = {sequence.slot: engine.slots.text(sequence) for sequence in scheduler.in_use}
    texts |= {slot: held.tokens for slot, held in engine.slots.free.prefixes.items()}
    for index, decoder in enumerate(engine.parts.decoders):
        for row, text in texts.items():
            known = text[: decoder.num_computed(row)] if index else text
            if not known:
                continue
            tokens, positions = torch.tensor([known]), torch.arange(len(known))[None]
            for layer in range(decoder.model.layers):
                values = decoder.cache.values[layer, row, :, : len(known)]
                wanted = decoder.model._code(layer, tokens, positions)[0]  # type: ignore[attr-defined, union-attr]
                assert torch.equal(values, wanted), f"row {row} of decoder {index}"


def soak(seed: int, **options: Any) -> int:
    """Run random chats that continue, branch, are aborted and end together. Return the number of copied tokens."""
    rng = random.Random(seed)
    kind = options.pop("kind", rng.choice([ToyModel, FlatToy]))
    if kind is FlatToy:
        options |= rng.choice([{}, {"prefix_memory": 0}, {"prefix_memory": 1 << rng.randint(1, 18)}])
    rows, chunk = rng.randint(1, 5), rng.choice([3, 8, 100])
    engine = chat_engine(kind=kind, max_batch_size=rows, prefill_chunk=chunk, **options)
    engine.use_policy(SometimesHopeful(seed))
    texts, asked = [prompt_of(40, seed)], []
    for name in map(str, range(14)):
        known = rng.choice(texts)[:70]
        prompt = [
            *known[: rng.choice([len(known), rng.randint(0, len(known))])],
            *prompt_of(rng.randint(1, 9), rng.random()),
        ]
        params = SamplingParams(
            n=rng.choice([1, 1, 3]), temperature=1.0, max_tokens=rng.choice([1, 5, 12]), seed=rng.randrange(99)
        )
        asked.append((engine.add(Request(prompt, params, request_id=name)), prompt, params))
        for _ in range(rng.choice([0, 1, 2, 12])):
            step(engine)
            check_caches(engine)
        texts += [[*prompt, *answer.token_ids] for answer in asked[-1][0].outputs]
        if rng.random() < 0.3:
            engine.abort(rng.choice([output.request_id for output, _, _ in asked]))
            check_caches(engine)
    while engine.busy:
        step(engine)
        check_caches(engine)
    for output, prompt, params in asked:
        for index, answer in enumerate(output.outputs):
            expected = slow_answer(ToyModel(), prompt, params, index)
            cut = answer.finish_reason == "abort"
            assert answer.token_ids == (expected[: len(answer.token_ids)] if cut else expected)
            assert answer.metrics.cached_tokens < len(prompt)
    return sum(output.cached_tokens for output, _, _ in asked)


@settings(max_examples=4)
@given(seed=st.integers(0, 10**6))
def test_every_cache_equals_its_text_after_random_copies(seed: int) -> None:
    soak(seed)


@pytest.mark.slow
def test_every_cache_equals_its_text_in_many_runs() -> None:
    assert sum(soak(seed) for seed in range(12)) > 1000, "much is copied in these tests"


@settings(max_examples=2)
@given(seed=st.integers(0, 10**6))
def test_device_rounds_keep_the_prefixes_of_free_rows(seed: int) -> None:
    soak(seed, kind=ToyModel, rounds="device")


def bits(engine: Engine, size: int) -> list[torch.Tensor]:
    """Return the only sequence's keys and values of ``size`` tokens, of all decoders."""
    (sequence,) = engine.scheduler.in_use
    tables = [table for decoder in engine.parts.decoders for table in (decoder.cache.keys, decoder.cache.values)]
    return [table[:, sequence.slot, :, :size].clone() for table in tables]


def native_engine() -> Engine:
    return make_engine(tiny_native(3), tiny_native(3, 1), drafter="model", attention="auto", max_batch_size=3)


@settings(max_examples=10)
@given(data=st.data())
def test_on_the_kernels_a_copied_prefix_has_a_cold_prefills_bits_at_any_split(data: st.DataObject) -> None:
    """The copied tokens were read as a prompt, as draft tokens, or one by one."""
    rng = random.Random(data.draw(st.integers(0, 999)))
    warm, cold = native_engine(), native_engine()
    before = ask(warm, prompt_of(data.draw(st.integers(1, 40)), rng.random()), SamplingParams(max_tokens=30, seed=5))
    text = [*before.prompt_token_ids, *before.outputs[0].token_ids]
    split = data.draw(st.integers(0, len(text)))
    prompt = [*text[:split], *prompt_of(data.draw(st.integers(1, 15)), rng.random())]
    params = SamplingParams(max_tokens=8, seed=6, logprobs=2)
    outputs = [engine.add(Request(prompt, params)) for engine in (warm, cold)]
    for engine in (warm, cold):
        engine.step()
    assert outputs[1].cached_tokens == 0
    assert outputs[0].cached_tokens >= (min(split, len(text) - 1, len(prompt) - 1) if split >= LEAST else 0)
    for one, other in zip(bits(warm, len(prompt) - 1), bits(cold, len(prompt) - 1), strict=True):
        assert torch.equal(one, other)
    for engine in (warm, cold):
        finish(engine)
    one, other = (output.outputs[0] for output in outputs)
    assert (one.token_ids, one.logprobs) == (other.token_ids, other.logprobs)  # type: ignore[attr-defined]


def test_a_long_prefix_outlives_short_ones_used_later_but_not_for_ever() -> None:
    pool = pool_of(20 * TOKENS_PER_USE, 50, 50)
    pool.use(pool.prefixes[1])
    uses = 0
    while (victim := pool.by_use[0]) != 0 and uses < 60:
        pool.take(victim)
        pool.put(victim, kept(50))
        uses += 1
    assert 15 < uses < 25
