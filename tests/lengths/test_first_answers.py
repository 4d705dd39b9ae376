"""First answers of a batch that drains, with n-gram drafts: recorded texts and measured costs, without a clock."""

from __future__ import annotations

import json
from collections.abc import Sequence
from statistics import geometric_mean, harmonic_mean

import pytest
from benchmarks.replay_auto import COSTS, PROMPTS, SHAPES, TEXTS, Text, costs_of, speed

pytestmark = pytest.mark.usefixtures("one_thread")
RECORDED = json.loads(TEXTS.read_text())


def speed_of(model: str, kernels: str, kind: str, rows: int, seeds: Sequence[int]) -> float:
    texts, costs = [Text(**each) for each in RECORDED[model][kind]], costs_of(COSTS, SHAPES[model], kernels)
    batches = [texts[first : first + rows] for first in range(0, PROMPTS, rows)]
    return harmonic_mean(speed(batch, costs, seed) for seed in seeds for batch in batches)


def test_eight_rows_whose_draft_tokens_hardly_pay_lose_next_to_nothing() -> None:
    """Stubs of both models: a draft token costs 0.85 to 0.98 of what it gains, and many rows copy at first."""
    speeds = [speed_of(model, kernels, "stubs", 8, range(2)) for model in SHAPES for kernels in ("avx2", "avx512-bw")]
    assert min(speeds) > 0.965
    assert geometric_mean(speeds) > 0.975
