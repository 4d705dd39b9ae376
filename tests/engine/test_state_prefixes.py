"""Prefixes of models with recurrent layers: a state is found at or before the token where prompts part."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from benchmarks.state_memory import resident

from paceline.config import SamplingParams
from paceline.core.batch import Batch
from paceline.core.outputs import RequestOutput
from paceline.core.recurrent_state import StatefulCache
from paceline.engine import prefill, prefix_reuse, request
from paceline.models.base import AnyModel, FlatModel
from paceline.models.decoding.cached_rows import CachedRows
from recurrent_support import (
    in_torch,
    on_kernels,
    tiny_granite_hybrid,
    tiny_lfm2,
    tiny_native_recurrent,
    tiny_qwen3_5,
)
from toy import VOCAB, answers, make_engine, run

pytestmark = pytest.mark.usefixtures("one_thread")

MODELS: dict[str, Callable[[], AnyModel]] = {
    "gated delta net, kernels": functools.cache(tiny_native_recurrent),
    "gated delta net": functools.cache(lambda: in_torch(tiny_qwen3_5(kinds="df"))),
    "mamba2": functools.cache(lambda: in_torch(tiny_granite_hybrid(kinds="mf"))),
    "short convolution": functools.cache(lambda: in_torch(tiny_lfm2(kinds="cf"))),
    "short convolution, kernels": functools.cache(lambda: on_kernels(tiny_lfm2())),
}
CHUNK = 16
APART = 32  # tokens between saved states
WORTH = 8  # tokens worth a state of their own
TOKENS = 4


@pytest.fixture(autouse=True)
def _short_distances(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of tests are short."""
    monkeypatch.setattr(prefill, "STATES_APART", APART)
    for module in (prefix_reuse, request):
        monkeypatch.setattr(module, "WORTH_WAITING", WORTH)


def text_of(size: int, seed: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(VOCAB) for _ in range(size)]


def greedy(count: int) -> list[SamplingParams]:
    return [SamplingParams(temperature=0, max_tokens=TOKENS, seed=seed) for seed in range(count)]


def alone(model: AnyModel, prompts: Sequence[list[int]]) -> list[list[list[int]]]:
    """Answers of plain decoding that reuses nothing."""
    engine = make_engine(model, max_batch_size=1, prefix_cache=False)
    return answers(run(engine, prompts, greedy(len(prompts))))


def in_turn(model: AnyModel, prompts: Sequence[list[int]], rows: int) -> list[RequestOutput]:
    """Run one prompt after the other; the slots keep their states."""
    engine = make_engine(model, drafter="ngram", max_batch_size=rows, prefill_chunk=CHUNK)
    return [run(engine, [prompt], greedy(1))[0] for prompt in prompts]


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("rows", [1, 3])
def test_a_prompt_goes_on_from_the_latest_state_before_it_parts(kind: str, rows: int) -> None:
    model, document = MODELS[kind](), text_of(50, 1)
    prompts = [document, [*document[:41], *text_of(9, 2)], [*document[:41], *text_of(9, 3)]]
    outputs = in_turn(model, prompts, rows)
    assert answers(outputs) == alone(model, prompts)
    found = [output.cached_tokens for output in outputs]
    assert found == [0, 32, 41], "the last state before; then the one saved where they part"


@pytest.mark.parametrize(("kind", "rows"), zip(MODELS, (1, 2, 8, 2, 8), strict=True))
def test_questions_on_one_document_read_it_at_most_twice(kind: str, rows: int) -> None:
    model, document = MODELS[kind](), text_of(60, 4)
    prompts = [[*document, *text_of(3 + seed % 5, 100 + seed)] for seed in range(rows + 4)]
    outputs = in_turn(model, prompts, rows)
    assert answers(outputs) == alone(model, prompts)
    assert all(output.cached_tokens >= len(document) for output in outputs[2:])


@pytest.mark.parametrize("kind", MODELS)
def test_questions_that_come_together_read_their_document_once(kind: str) -> None:
    model, document = MODELS[kind](), text_of(60, 5)
    prompts = [[*document, *text_of(3 + seed, 200 + seed)] for seed in range(6)]
    engine = make_engine(model, drafter="ngram", max_batch_size=6, prefill_chunk=CHUNK)
    outputs = run(engine, prompts, greedy(6))
    assert answers(outputs) == alone(model, prompts)
    assert sorted(output.cached_tokens for output in outputs) == [0, *[len(document)] * 5]


@pytest.mark.parametrize(("kind", "rows"), zip(MODELS, (1, 4, 1, 1, 4), strict=True))
def test_each_turn_of_a_chat_reads_what_is_new(kind: str, rows: int) -> None:
    model, text = MODELS[kind](), text_of(20, 6)
    engine = make_engine(model, drafter="ngram", max_batch_size=rows, prefill_chunk=CHUNK)
    for turn in range(5):
        (output,) = run(engine, [text], greedy(1))
        assert answers([output]) == alone(model, [text])
        assert output.cached_tokens == (len(text) - 3 - 1 if turn else 0), "all but the message and the token before"
        text = [*text, *output.outputs[0].token_ids, *text_of(3, 50 + turn)]


@pytest.mark.parametrize("kind", MODELS)
def test_conversations_beside_the_rows_keep_their_states_within_the_limit(kind: str) -> None:
    """On the kernels six conversations find their states on two rows, or as many as memory is given for."""
    model = MODELS[kind]()
    apart = isinstance(model, FlatModel)
    plenty = make_engine(model, drafter="ngram", max_batch_size=2)
    room = plenty.room
    engines = (
        [plenty]
        if not apart
        else [plenty, make_engine(model, drafter="ngram", max_batch_size=2, prefix_memory=3 * room.prefix_bytes(40))]
    )
    for engine in engines:
        cached, texts = 0, [text_of(24, seed) for seed in range(6)]
        for turn in range(2):
            outputs = [run(engine, [text], greedy(1))[0] for text in texts]
            assert answers(outputs) == alone(model, texts)
            cached += sum(output.cached_tokens > 0 for output in outputs)
            texts = [
                [*text, *o.outputs[0].token_ids, *text_of(5, turn)] for text, o in zip(texts, outputs, strict=True)
            ]
        assert cached == (6 if apart and engine is plenty else 0)
        cache = engine.parts.target.cache
        assert isinstance(cache, StatefulCache)
        states = cache.states
        assert sum(map(len, states._saved.values())) <= states.max_saved
        if engine is not plenty:
            held = int((states.base > 0).sum())
            assert held == len(engine.slots.free.prefixes) < 6
            assert resident(states.state) <= held * states.state[:, 0].nbytes


def test_prompts_are_divided_where_a_gpu_divides_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """At multiples of its chunks, whatever the limit of a pass and wherever prompts part; and at their ends."""
    monkeypatch.setattr(CachedRows, "prefill_step", CHUNK)
    model, document, stops = MODELS["gated delta net"](), text_of(70, 1), list[int]()
    prompts = [document, [*document[:41], *text_of(9, 2)], [*document[:41], *text_of(12, 3)]]
    for together in (False, True):
        engine = make_engine(model, drafter="ngram", max_batch_size=3, prefill_chunk=2 * CHUNK + 3)
        prefill = engine.parts.target.prefill

        def spied(batch: Batch, slots: list[int], starts: list[int], ends: list[int], *, own: Any = prefill) -> None:
            stops.extend(ends)
            own(batch, slots, starts, ends)

        monkeypatch.setattr(engine.parts.target, "prefill", spied)
        turns = [prompts] if together else [[prompt] for prompt in prompts]
        outputs = [output for turn in turns for output in run(engine, turn, greedy(len(turn)))]
        assert answers(outputs) == alone(model, prompts)
        assert outputs[2].cached_tokens == 2 * CHUNK
        ends = {len(prompt) - 1 for prompt in prompts}
        assert {2 * CHUNK, 4 * CHUNK} <= {stop for stop in stops if stop % CHUNK == 0} == set(stops) - ends
