"""Rows that share pages: texts are those of rows of their own, memory holds its limit, and no page is lost."""

from __future__ import annotations

import math
import mmap
import os
import random
import sys
import time
from typing import Any

import pytest
import torch

from core.test_cache_budget import limit_for, memory_of, prompt_of
from core.test_row_tables import taken
from kernels.tools import random_spec
from paceline.config import SamplingParams
from paceline.core.outputs import RequestOutput
from paceline.core.paged_tables import PagedTables
from paceline.core.row_tables import GROWS
from paceline.engine.engine import Engine, Request
from paceline.kernels import native
from paceline.models.native.model import NativeModel
from toy import VOCAB, answers, make_engine, run

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not native.available(), reason="rows have pages on the CPU kernels only"),
]

LONGEST, ROWS = 500, 5


def model_of(seed: int, *, paged: bool = True) -> NativeModel:
    spec = random_spec(vocab_size=VOCAB, max_positions=LONGEST, tied=False, seed=seed)
    model = NativeModel(spec, f"native {seed}", quantization="int8", threads=1)
    model.paged = paged
    return model


def storages(engine: Engine) -> list[PagedTables]:
    found = [decoder.cache.storage for decoder in engine.parts.decoders]
    assert all(isinstance(storage, PagedTables) for storage in found)
    return found  # type: ignore[return-value]


def used(engine: Engine) -> list[int]:
    return [storage.table.used for storage in storages(engine)]


def finish(engine: Engine) -> None:
    while engine.busy:
        engine.step()
        engine.scheduler.check_integrity()


def engine_of(limited: bool, target: NativeModel, draft: NativeModel, **options: Any) -> Engine:
    options = {"max_batch_size": ROWS, "max_model_len": LONGEST, "drafter": "model", "prefill_chunk": 90} | options
    limit = limit_for([LONGEST, 300], target, draft, **options) if limited else None  # type: ignore[arg-type]
    return make_engine(target, draft, **options, memory_limit=limit)  # type: ignore[arg-type]


def plain_answers(asked: list[tuple[RequestOutput, SamplingParams]]) -> list[list[list[int]]]:
    """Each request's answers by plain decoding of it alone, in rows of their own."""
    alone = make_engine(
        model_of(3, paged=False), drafter=None, max_batch_size=1, max_model_len=LONGEST, prefix_cache=False
    )
    return [answers(run(alone, [output.prompt_token_ids], [params]))[0] for output, params in asked]


def chat(engine: Engine, seed: int, turns: int) -> None:
    """Random chats that continue, branch, are aborted and end together; checks texts, pages and memory."""
    rng, limit = random.Random(seed), engine.room.limit if engine.room.is_short else 2**40
    spare = sum(storage.page_bytes for storage in storages(engine))  # page 0 is no row's
    texts, asked = [prompt_of(200, seed)], []
    for name in range(turns):
        known = rng.choice(texts[-6:])[: LONGEST - 60]
        prompt = [*known[: rng.choice([len(known), rng.randint(0, len(known))])], *prompt_of(rng.randint(1, 40), name)]
        params = SamplingParams(
            n=rng.choice([1, 1, 3]), temperature=1.0, max_tokens=rng.choice([1, 5, 20]), seed=rng.randrange(99)
        )
        asked.append((engine.add(Request(prompt, params, request_id=str(name))), params))
        for _ in range(rng.choice([0, 1, 2, 12])):
            engine.step()
            engine.scheduler.check_integrity()
            assert memory_of(engine) <= limit + spare
        texts += [[*prompt, *answer.token_ids] for answer in asked[-1][0].outputs]
        if rng.random() < 0.15:
            engine.abort(rng.choice(asked)[0].request_id)
    finish(engine)
    for (output, _), expected in zip(asked, plain_answers(asked), strict=True):
        for answer, whole in zip(output.outputs, expected, strict=True):
            size = len(answer.token_ids) if answer.finish_reason == "abort" else None
            assert answer.token_ids == whole[:size]


@pytest.mark.parametrize("limited", [pytest.param(True, marks=pytest.mark.skipif(not GROWS, reason="Linux")), False])
def test_random_chats_share_pages_and_lose_none(limited: bool) -> None:
    engine = engine_of(limited, model_of(3), model_of(4))
    assert engine.room.is_short == limited
    chat(engine, seed=1 + limited, turns=8)
    engine.clear()
    assert used(engine) == [0, 0]
    engine.scheduler.check_integrity()


@pytest.mark.slow
def test_random_chats_for_some_minutes() -> None:
    """PACELINE_SOAK_MINUTES: how long, 2 unless it is set."""
    engine = engine_of(True, model_of(3), model_of(4))
    ends, seed, resident = time.monotonic() + 60 * float(os.environ.get("PACELINE_SOAK_MINUTES", "2")), 0, []
    while time.monotonic() < ends:
        chat(engine, seed := seed + 1, turns=20)
        engine.clear()
        assert used(engine) == [0, 0]
        resident.append(memory_of(engine))
    assert max(resident) == resident[0]


def test_samples_of_a_prompt_share_its_pages() -> None:
    engine = engine_of(False, model_of(3), model_of(4))
    params = SamplingParams(n=ROWS, temperature=1.0, max_tokens=30, seed=4)
    output = engine.add(Request(prompt_of(330), params))
    while not all(answer.token_ids for answer in output.outputs):
        engine.step()
    assert used(engine)[0] <= 330 // 64 + 2 * ROWS  # alone each would have six
    alone = ROWS * engine.room.bytes_for(330)
    assert engine.scheduler.filled.row_bytes < alone / 2
    finish(engine)
    assert answers([output]) == plain_answers([(output, params)])


@pytest.mark.skipif(not GROWS, reason="rows do not grow here")
def test_rows_that_share_a_prompt_fit_where_rows_of_their_own_do_not() -> None:
    target = model_of(3)
    options: dict[str, Any] = {"max_batch_size": ROWS, "max_model_len": LONGEST, "drafter": None}
    engine = make_engine(target, **options, memory_limit=limit_for([LONGEST, 128], target, None, **options))  # type: ignore[arg-type]
    params = SamplingParams(temperature=0, max_tokens=3)
    first = engine.add(Request(prompt_of(300), params))
    finish(engine)
    outputs = [engine.add(Request([*prompt_of(300), token], params)) for token in range(1, 4)]
    most = 0
    while engine.busy:
        engine.step()
        engine.scheduler.check_integrity()
        most = max(most, len(engine.slots.used))
        assert memory_of(engine) <= engine.room.limit + storages(engine)[0].page_bytes
    assert most == 3
    assert first.finished
    assert [output.cached_tokens for output in outputs] == [300] * 3
    alone = [
        answers(run(make_engine(model_of(3, paged=False), **options), [o.prompt_token_ids], [params])) for o in outputs
    ]
    assert [answers([output]) for output in outputs] == alone


def test_a_failed_rows_pages_are_cleared() -> None:
    storage = storages(engine_of(False, model_of(3), model_of(4)))[0]
    storage.cover([0, 1], [0, 0], [100, 10])
    for table in storage.tables:
        table[storage.table.pages_of(0)] = torch.nan
    storage.erase_row(0)
    storage.cover([2], [0], [400])
    for table in storage.tables:
        assert not table.isnan().any()
    beside = sum(math.prod(table.shape[1:3]) for table in storage.tables)  # pages of the system that row 1 shares
    assert sys.platform != "linux" or taken(*storage.tables) <= beside * mmap.PAGESIZE


@pytest.mark.skipif(not GROWS, reason="rows do not grow here")
def test_a_prefix_whose_pages_a_row_shares_frees_none_of_them() -> None:
    """Of 16 pages a row has 8, a prefix has 6 and shares 5 of them, another has 5: the next row needs 5."""
    target = model_of(3)
    options: dict[str, Any] = {"max_batch_size": 3, "max_model_len": LONGEST, "drafter": None, "prefix_memory": 0}
    engine = make_engine(target, **options, memory_limit=limit_for([LONGEST] * 2, target, None, **options))  # type: ignore[arg-type]
    one = SamplingParams(temperature=0, max_tokens=1)
    row = engine.add(Request(prompt_of(350), SamplingParams(temperature=0, max_tokens=LONGEST)))
    for prompt in ([*prompt_of(350), 1], prompt_of(280, 5), prompt_of(250, 6)):
        output = engine.add(Request(prompt, one))
        while not output.finished:
            engine.step()
            engine.scheduler.check_integrity()
    assert not row.finished
    assert sorted(len(prefix.tokens) for prefix in engine.slots.free.prefixes.values()) == [250]
    finish(engine)
