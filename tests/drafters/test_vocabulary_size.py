"""How many tokens a draft model scores: from costs and coverage, which are injected here."""

from __future__ import annotations

from typing import Any

import pytest

from head_support import tiny_head, tiny_native_head
from paceline.config import EngineConfig
from paceline.drafters.vocabulary_size import DraftCost, best_size, draft_vocab_size, tokens_per_round
from paceline.errors import ParameterError
from paceline.kernels import native
from toy import ToyModel, make_engine, tiny_llama, tiny_native

pytestmark = pytest.mark.usefixtures("one_thread")
needs_kernels = pytest.mark.skipif(not native.available(), reason=f"needs the kernels: {native.why_none()}")
COVERED = {8_000: 0.90, 16_000: 0.95, 32_000: 0.98, 64_000: 0.995}


def test_mean_tokens_of_a_round() -> None:
    assert tokens_per_round(0.5, 3) == 1.875
    assert tokens_per_round(1.0, 3) == 4.0


@pytest.mark.parametrize(
    ("layers", "token_ms", "verify_ms", "wanted"),
    [
        (10.0, 0.000003, 30.0, 0),  # the head takes 0.5 ms of 10: not worth a lost draft token
        (10.0, 0.00001, 30.0, 64_000),
        (7.0, 0.00002, 30.0, 32_000),
        (1.0, 0.00002, 20.0, 16_000),
        (1.0, 0.00008, 20.0, 8_000),  # the head takes 12 times as long as the layers
    ],
)
def test_the_size_follows_from_milliseconds_and_coverage(
    layers: float, token_ms: float, verify_ms: float, wanted: int
) -> None:
    assert best_size(151_936, DraftCost(layers, token_ms, verify_ms), COVERED, k=3) == wanted


def test_the_unit_of_costs_does_not_matter() -> None:
    for unit in (1e-6, 1.0, 1e9):
        assert best_size(151_936, DraftCost(unit, 0.00002 * unit, 20 * unit), COVERED, k=3) == 16_000


def test_full_coverage_takes_the_smallest_size_and_no_coverage_none() -> None:
    cost = DraftCost(1.0, 0.00001, 20.0)
    assert best_size(151_936, cost, dict.fromkeys(COVERED, 1.0), k=3) == 8_000
    assert best_size(151_936, cost, dict.fromkeys(COVERED, 0.0), k=3) == 0


def test_a_vocabulary_that_is_small_already_stays_whole() -> None:
    assert best_size(8_000, DraftCost(0.1, 0.01, 20.0), COVERED, k=3) == 0


@needs_kernels
def test_small_vocabularies_stay_whole_by_default_and_a_given_size_is_taken() -> None:
    target, draft = tiny_native(1), tiny_native(1, 1)
    assert draft_vocab_size(target, draft, EngineConfig(drafter="model")) == 0
    assert draft_vocab_size(target, draft, EngineConfig(drafter="model", draft_vocab_size=7)) == 7
    assert draft_vocab_size(target, draft, EngineConfig(drafter="hybrid", draft_vocab_size=0)) == 0
    assert draft_vocab_size(target, None, EngineConfig(drafter="ngram")) == 0
    engine = make_engine(target, draft, drafter="hybrid", draft_vocab_size=7)
    assert "draft vocabulary 7 of 24" in engine.describe()
    assert "draft vocabulary 7 of 24" in engine.identity().drafter
    assert "draft vocabulary" not in make_engine(target, draft, drafter="hybrid").describe()


@needs_kernels
def test_the_memory_of_the_short_head_is_planned() -> None:
    from paceline.engine.memory import plan_memory

    target, draft = tiny_native(1), tiny_native(1, 1)
    plans = [
        plan_memory(target, draft, EngineConfig(drafter="model", draft_vocab_size=size), 2, 50).workspace
        for size in (0, 7)
    ]
    read = draft.pass_bytes
    assert read is not None
    assert plans[1] - plans[0] == 7 * read.token


@pytest.mark.parametrize(
    ("draft", "options", "reason"),
    [
        (lambda: ToyModel(blur=0.3), {"drafter": "model"}, "no output head that can be divided"),
        (lambda: tiny_head(ToyModel(), 8), {"drafter": "feature"}, "a short vocabulary of its own"),
        (lambda: tiny_native_head(ToyModel(), 8), {"drafter": "hybrid"}, "a short vocabulary of its own"),
        (lambda: tiny_llama(1), {"drafter": "model", "rounds": "device"}, "rounds of a device"),
    ],
)
def test_a_drafter_without_a_subset_refuses_a_size_by_name(draft: Any, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ParameterError, match=f"draft_vocab_size.*{reason}"):
        make_engine(ToyModel(), draft(), draft_vocab_size=7, **options)


def test_a_size_beyond_the_vocabulary_is_refused() -> None:
    with pytest.raises(ParameterError, match=r"draft_vocab_size.*from 1 to 23"):
        make_engine(tiny_llama(), tiny_llama(1), drafter="model", draft_vocab_size=24)
