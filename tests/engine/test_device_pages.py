"""Rows of device rounds that share pages: texts are those of plain decoding, the pool suffices, and no page is lost.

Ragged attention reads the pages in place (tests/kernels/attention/test_ragged.py). Here padded attention gathers them,
and gives exact sums, at any speed. The table that programs read is another tensor than the host's, as on a GPU.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from core.test_cache_budget import prompt_of
from engine.test_prefixes import SometimesHopeful
from head_support import tiny_head
from paceline.config import SamplingParams, StructuredOutputs
from paceline.core.cache import KVCache, KVHeads
from paceline.core.outputs import RequestOutput
from paceline.core.paged_tables import PagedTables
from paceline.engine import memory, slot_memory
from paceline.engine.engine import Engine, Request
from paceline.engine.memory import plan_memory, row_bytes
from paceline.engine.slot_memory import SlotMemory
from paceline.models.base import AnyModel
from toy import ToyModel, answers, make_engine, make_request, run

pytestmark = pytest.mark.usefixtures("one_thread")

LONGEST, ROWS = 300, 4
DRAFTS: dict[str | None, Callable[[], AnyModel | None]] = {
    None: lambda: None,
    "ngram": lambda: None,
    "model": lambda: ToyModel(max_positions=LONGEST, blur=0.3),
    "hybrid": lambda: ToyModel(max_positions=LONGEST, blur=0.3),
    "feature": lambda: tiny_head(ToyModel(max_positions=LONGEST), 8),
}


@pytest.fixture(autouse=True)
def paged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan rows with pages whatever the attention, and keep the device's table apart from the host's."""
    monkeypatch.setattr(memory, "chosen_backend", lambda *_: "ragged")
    make = PagedTables.__init__

    def apart(self: PagedTables, *sizes: Any) -> None:
        make(self, *sizes)
        self.pages = self.table.pages.clone()

    monkeypatch.setattr(PagedTables, "__init__", apart)


def engine_of(drafter: str | None, whole_rows: float | None = None, **options: Any) -> Engine:
    """An engine whose pool holds so many rows at their full length; None: all."""
    target, draft = ToyModel(max_positions=LONGEST), DRAFTS[drafter]()
    sizes = {"max_batch_size": ROWS, "max_model_len": LONGEST, "drafter": drafter, "rounds": "device"}
    options = sizes | {"attention": "padded", "prefill_chunk": 90} | options
    if whole_rows is not None:
        config = make_engine(target, draft, **options).config
        plan = plan_memory(target, draft, config, ROWS, LONGEST)
        row = row_bytes(target, draft, config, LONGEST)
        options["memory_limit"] = plan.weights + plan.to_allocate - plan.caches + int(whole_rows * row)
    return make_engine(target, draft, **options)


def storages(engine: Engine) -> list[PagedTables]:
    found = [decoder.cache.storage for decoder in engine.parts.decoders if decoder.cache.has_pool]
    return [storage for storage in found if isinstance(storage, PagedTables)]


def step(engine: Engine) -> None:
    engine.step()
    engine.scheduler.check_integrity()
    for storage in storages(engine):
        assert torch.equal(storage.pages, storage.table.pages), "the device has another table"


def plain_answers(asked: list[tuple[RequestOutput, SamplingParams]]) -> list[list[list[int]]]:
    """Each request's answers by plain decoding, without prefixes of others."""
    plain = engine_of(None, max_batch_size=32, prefix_cache=False, rounds="host")
    return answers(run(plain, [output.prompt_token_ids for output, _ in asked], [params for _, params in asked]))


def chat(engine: Engine, seed: int, turns: int) -> int:
    """Random chats, some with a grammar, that continue, branch, are aborted and end together.

    Return the number of copied tokens.
    """
    rng = random.Random(seed)
    texts, asked = [prompt_of(150, seed)], []
    for name in range(turns):
        known = rng.choice(texts[-4:])[: LONGEST - 60]
        prompt = [*known[: rng.choice([len(known), rng.randint(0, len(known))])], *prompt_of(rng.randint(1, 40), name)]
        params = SamplingParams(
            n=rng.choice([1, 1, 3]), temperature=1.0, max_tokens=rng.choice([1, 5, 30]), seed=rng.randrange(99)
        )
        if name % 3 == 1:
            params = replace(params, structured_outputs=StructuredOutputs(json_object=True))
        asked.append((engine.add(replace(make_request(prompt, params), request_id=str(name))), params))
        for _ in range(rng.choice([0, 1, 2, 12])):
            step(engine)
        texts += [[*prompt, *answer.token_ids] for answer in asked[-1][0].outputs]
        if rng.random() < 0.15:
            engine.abort(rng.choice(asked)[0].request_id)
    while engine.busy:
        step(engine)
    for (output, _), expected in zip(asked, plain_answers(asked), strict=True):
        for answer, whole in zip(output.outputs, expected, strict=True):
            size = len(answer.token_ids) if answer.finish_reason == "abort" else None
            assert answer.token_ids == whole[:size]
    return sum(output.cached_tokens for output, _ in asked)


@pytest.mark.parametrize(
    ("drafter", "whole_rows", "options"),
    [
        ("model", None, {}),
        ("model", 1.6, {}),
        ("model", 1.6, {"speculation_width": 2}),
        ("ngram", 1.6, {}),
        ("hybrid", 1.8, {"rounds": "host"}),
        ("feature", 1.6, {}),
        (None, 1.6, {}),
    ],
)
def test_random_chats_share_pages_of_a_pool_and_lose_none(
    drafter: str | None, whole_rows: float | None, options: dict[str, Any]
) -> None:
    engine = engine_of(drafter, whole_rows, **options)
    assert engine.room.is_short == (whole_rows is not None)
    assert len(storages(engine)) == (2 if drafter in ("model", "hybrid") else 1)
    if drafter is not None and options.get("speculation_width") is None:
        engine.use_policy(SometimesHopeful(5))
    assert chat(engine, seed=3, turns=9) > 100
    engine.clear()
    assert [storage.table.used for storage in storages(engine)] == [0] * len(storages(engine))
    engine.scheduler.check_integrity()


@pytest.mark.parametrize("drafter", ["ngram", "model", "feature"])
def test_rows_that_give_way_while_a_round_is_in_flight_equal_plain_decoding(
    drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four rows begin that cannot all grow to their three pages."""
    monkeypatch.setattr(slot_memory, "STRETCH", 1)
    monkeypatch.setattr(SlotMemory, "growth", lambda *_: 0)
    engine = engine_of(drafter, 1.6)
    params = [SamplingParams(temperature=1.0, max_tokens=80, seed=seed) for seed in range(5)]
    asked = [(engine.add(Request(prompt_of(55, seed), each)), each) for seed, each in enumerate(params)]
    while engine.busy:
        step(engine)
    assert answers([output for output, _ in asked]) == plain_answers(asked)
    assert engine.scheduler.preemptions > 0


def test_the_ragged_kernel_reads_shared_pages_in_rounds_of_the_device() -> None:
    """Through Triton's interpreter where there is no GPU; one row has a grammar, two have a common beginning."""
    pytest.importorskip("triton", reason="triton is not installed")
    engine = engine_of("model", attention="ragged", num_speculative_tokens=2)
    prompts = [[*prompt_of(70), 1], [*prompt_of(70), 2, 3], [4, 5]]
    params = [SamplingParams(temperature=1.0, max_tokens=5, seed=seed) for seed in range(3)]
    params[2] = replace(params[2], structured_outputs=StructuredOutputs(json_object=True))
    outputs = run(engine, prompts, params)
    assert answers(outputs) == plain_answers(list(zip(outputs, params, strict=True)))
    assert engine.rounds.counts == {"device": sum(engine.rounds.counts.values()), "host": 0}
    assert outputs[1].cached_tokens == 70


def test_samples_share_their_prompts_pages_and_grow_into_pages_of_their_own() -> None:
    engine = engine_of("model", 2.5)
    params = SamplingParams(n=ROWS, temperature=1.0, max_tokens=60, seed=4)
    output = engine.add(Request(prompt_of(200), params))
    most = 0
    while engine.busy:
        step(engine)
        most = max(most, storages(engine)[0].table.used)
    assert answers([output]) == plain_answers([(output, params)])
    assert most <= 200 // 64 + 2 * ROWS  # alone each would have five


def test_sharing_makes_room_in_the_only_pool_and_in_no_draft_models() -> None:
    for drafter, room in (("ngram", 2), ("model", 1)):
        engine = engine_of(drafter, 1.6)
        params = SamplingParams(temperature=0, max_tokens=30)
        for last in (1, 2):  # four pages each, of which they share three
            engine.add(Request([*prompt_of(200), last], params))
        most = 0
        while engine.busy:
            step(engine)
            most = max(most, len(engine.slots.used))
        assert most == room


def test_the_pool_is_what_the_memory_limit_holds() -> None:
    engine = engine_of("model", 1.6)
    pool = len(storages(engine)[0].table.references) - 1
    assert pool == engine.room.limit // engine.room.bytes_for(1) == 8  # five pages of 64 hold 300 tokens
    assert "they grow: 1 of that length at once" in engine.describe()
    assert [storage.tables[0].shape[0] for storage in storages(engine)] == [1 + pool] * 2


def test_a_pool_that_is_empty_says_who_is_wrong() -> None:
    cache = KVCache([KVHeads(1, 4)], 3, 200, paged=True, pool=4)
    cache.cover([0], [0], [200])
    with pytest.raises(AssertionError, match="no page is left: more rows were admitted"):
        cache.cover([1], [0], [1])
