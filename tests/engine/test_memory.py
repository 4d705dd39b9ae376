"""Rows that fit: defaults that give way, explicit sizes that are refused, and what a plan counts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.gpu import cards

from head_support import tiny_head
from paceline.config import EngineConfig
from paceline.core.row_tables import GROWS
from paceline.engine import memory
from paceline.engine.memory import GIB, default_length, fit_memory, plan_memory, row_bytes
from paceline.errors import CapacityError
from toy import ToyModel, make_engine

PLAIN = EngineConfig(drafter=None, num_speculative_tokens=0)


def test_cards_that_people_own_hold_models_of_4_and_8_billion_parameters() -> None:
    """16 rows of 4096 tokens are the default: an address range, in which rows grow into the pages that there are."""
    pytest.importorskip("triton", reason="triton is not installed")
    kinds = (("Qwen3-4B", "bf16"), ("Qwen3-8B", "bf16"), ("Qwen3-8B", "int8"), ("Qwen3-8B", "int4: AWQ"))
    small, large, rounded, awq = (cards.planned(*each) for each in kinds)
    assert rounded.weight_bytes() < 0.55 * large.weight_bytes()
    assert awq.weight_bytes() < 0.36 * large.weight_bytes()
    for card, model, least in (
        (16, small, 10),
        (16, rounded, 8),
        (24, large, 10),
        (24, rounded, 16),
        (24, small, 16),
        (16, awq, 14),
    ):
        found = cards.fitted(model, card)
        assert found is not None
        assert found.pool is not None
        assert (found.positions, found.rows, found.note) == (4096, 16, "")
        assert min(found.budget.max_rows(4096), 16) >= least
        pages = found.pool * found.budget.bytes_for(1)
        assert found.budget.limit - found.budget.bytes_for(1) < pages <= found.budget.limit
        plan = plan_memory(model, None, EngineConfig(drafter="ngram"), found.rows, found.positions)
        assert plan.weights + plan.to_allocate - plan.caches + pages < card * GIB - cards.TAKEN
        plain = cards.fitted(model, card, drafter=None)
        assert plain is not None
        assert plain.budget.limit >= found.budget.limit
    assert cards.fitted(large, 16) is None
    longer = cards.fitted(large, 24, max_batch_size=16, max_model_len=32768)
    assert longer is not None
    assert longer.budget.max_rows(32768) == 1
    assert cards.fitted(large, 24, max_batch_size=16, max_model_len=40960, kv_cache_dtype="int8") is not None
    assert cards.fitted(large, 24, max_batch_size=4, max_model_len=131072) is None


def test_a_head_beside_pages_is_whole_and_no_part_of_the_pool() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    model, head = cards.planned("Qwen3-8B", "int8"), tiny_head(ToyModel(max_positions=4096), 4096)
    head.device = model.device
    config = EngineConfig(drafter="feature", max_batch_size=16, max_model_len=4096)
    plan, plain = (plan_memory(model, draft, config, 16, 4096) for draft in (head, None))
    assert plan.caches == plain.caches == 16 * 64 * row_bytes(model, head, config, 1)
    assert plan.head == 16 * (4097 * 2 * head.kv_heads * head.head_dim * 4 + head.fused_bytes(4096))
    assert "caches of the draft head" in str(plan)
    found = fit_memory(model, head, config, 4096, 6 * GIB)
    assert found.budget.is_short
    assert found.budget.limit == 6 * GIB - int(0.1 * 6 * GIB) - plan.beside_caches


def test_the_table_for_owners_of_a_gpu_is_the_planners() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    page = (Path(__file__).parents[2] / "docs" / "own-gpu.md").read_text()
    assert "\n".join(cards.table()) in page, "python -m benchmarks.gpu.cards prints it"


@pytest.mark.parametrize(
    ("options", "rows", "positions"),
    [
        ({}, 3, 4000),
        ({"max_model_len": 3000}, 4, 3000),
        ({"max_batch_size": 8}, 8, 1792),
        ({"max_batch_size": 3}, 3, 4000),
        ({"max_batch_size": 4, "max_model_len": 3000}, 4, 3000),
        ({"max_batch_size": 5, "max_model_len": 4000}, None, None),
        ({"max_batch_size": 60}, None, None),
        ({"max_model_len": 30000}, None, None),
    ],
)
def test_only_what_was_left_to_its_default_becomes_smaller(
    options: dict[str, Any], rows: int | None, positions: int | None
) -> None:
    model, config = ToyModel(max_positions=1 << 20), replace(PLAIN, **options)
    model.device = torch.device("meta")  # where rows do not grow
    wanted = config.max_model_len or 4000
    least = plan_memory(model, None, config, 1, 0).to_allocate
    row = plan_memory(model, None, config, 1, 4000).to_allocate - least
    free = int((least + 3.7 * row) / 0.9)
    if rows is None:
        with pytest.raises(CapacityError, match=r"GiB are free: .*lower max_batch_size or max_model_len"):
            fit_memory(model, None, config, wanted, free)
        return
    found = fit_memory(model, None, config, wanted, free)
    assert (found.rows, found.positions) == (rows, positions)
    assert found.note.startswith(f"{config.rows} rows of {wanted} tokens need") == (
        (rows, positions) != (config.rows, wanted)
    )


def test_the_start_line_says_why_rows_are_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch's allocator held was given back before the device was asked for its free memory."""
    model, asked = ToyModel(), []
    monkeypatch.setattr(memory, "grows_on", lambda _device: False)
    free = plan_memory(model, None, PLAIN, 8, 96).to_allocate / 0.89
    monkeypatch.setattr(memory, "return_cached_memory", lambda _device: asked.append("returned"))
    monkeypatch.setattr(memory, "available_memory", lambda _device: asked.append("free") or int(free))
    engine = make_engine(model, max_batch_size=None)
    line = engine.describe()
    assert 8 <= engine.config.rows < 16
    assert f"; {engine.config.rows} rows of 96 tokens (" in line
    assert "; chosen to fit: 16 rows of 96 tokens need" in line
    assert asked == ["returned", "free"]


@pytest.mark.skipif(not GROWS, reason="rows do not grow here")
def test_where_rows_grow_the_default_length_is_the_models_if_one_row_fits() -> None:
    """A length that nobody asked for gives rows no more memory than 4096 tokens each, or one of them its whole."""
    model, usual = ToyModel(max_positions=30_000), PLAIN.DEFAULT_MAX_MODEL_LEN
    row = partial(row_bytes, model, None, PLAIN)
    rest = plan_memory(model, None, PLAIN, 16, 0).to_allocate - 16 * row(0)
    assert default_length(model, None, PLAIN, model.max_positions) == 30_000
    found = fit_memory(model, None, PLAIN, 30_000, 1 << 40)
    assert (found.rows, found.positions, found.budget.limit) == (16, 30_000, 16 * row(usual))
    asked = fit_memory(model, None, replace(PLAIN, max_model_len=30_000), 30_000, 1 << 40)
    assert asked.budget.limit == 16 * row(30_000)
    few = fit_memory(model, None, replace(PLAIN, max_batch_size=2), 30_000, 1 << 40)
    assert few.budget.limit == row(30_000)
    short = fit_memory(model, None, PLAIN, 30_000, int((rest + row(20_000)) / 0.9) + 1)
    assert short.rows == 16
    assert 19_000 < short.positions <= 20_000
    assert short.note.startswith("one row of 30000 tokens needs ")
    with pytest.raises(CapacityError):
        fit_memory(model, None, replace(PLAIN, max_model_len=30_000), 30_000, int((rest + row(20_000)) / 0.9))
    on_device = replace(PLAIN, rounds="device")
    assert default_length(model, None, on_device, model.max_positions) == usual


def test_without_a_drafter_there_is_no_workspace_for_draft_tokens() -> None:
    """2.3 GiB of logits, with 64 rows of a vocabulary of 152 thousand."""
    model = cards.planned("Qwen3-8B", "bf16")
    plain, drafting = (
        plan_memory(model, None, EngineConfig(drafter=drafter), 64, 96).workspace for drafter in (None, "ngram")
    )
    assert drafting - plain >= 4 * 64 * 16 * model.vocab_size * 4 > 2.3 * GIB
    assert plain < 0.6 * GIB


def test_deterministic_attention_counts_the_results_of_its_splits() -> None:
    """At 32k tokens, 64 rows and k = 7 one launch writes a gibibyte."""
    pytest.importorskip("triton", reason="triton is not installed")
    model = cards.planned("Qwen3-8B", "bf16")
    config = EngineConfig(drafter="ngram", num_speculative_tokens=7)
    usual, fixed = (
        plan_memory(model, None, replace(config, deterministic=value), 64, 32768).workspace for value in (False, True)
    )
    assert fixed - usual == pytest.approx(129 * 64 * 16 * 32 * 129 * 4)
    assert plan_memory(model, None, replace(config, deterministic=True), 64, 200).workspace == (
        plan_memory(model, None, config, 64, 200).workspace
    )
