"""First answers of a batch that drains, with n-gram drafts: recorded texts and measured costs, without a clock."""

from __future__ import annotations

import json
from collections.abc import Sequence
from statistics import geometric_mean, harmonic_mean

import pytest
from benchmarks.replay_auto import COSTS, PROMPTS, SHAPES, TEXTS, Text, costs_of, speed

from batches import filled
from paceline.config import SamplingParams
from paceline.core.batch import RowStart
from paceline.lengths.cost import CostModel
from paceline.lengths.rounds import AutoRound
from paceline.lengths.sources import DraftSource
from simulation import linear_costs

pytestmark = pytest.mark.usefixtures("one_thread")
RECORDED = json.loads(TEXTS.read_text())


def speed_of(model: str, kernels: str, kind: str, rows: int, seeds: Sequence[int]) -> float:
    texts, costs = [Text(**each) for each in RECORDED[model][kind]], costs_of(COSTS, SHAPES[model], kernels)
    batches = [texts[first : first + rows] for first in range(0, PROMPTS, rows)]
    return harmonic_mean(speed(batch, costs, seed) for seed in seeds for batch in batches)


def test_eight_rows_whose_draft_tokens_hardly_pay_lose_next_to_nothing() -> None:
    """Stubs of both models: a draft token costs 0.85 to 0.98 of what it gains, and many rows copy at first."""
    speeds = [speed_of(model, kernels, "stubs", 8, range(4)) for model in SHAPES for kernels in ("avx2", "avx512-bw")]
    assert min(speeds) > 0.965
    assert geometric_mean(speeds) > 0.975


def counts_verified(acceptance: float, leads: Sequence[float]) -> list[int]:
    """Draft tokens verified of four rows, each with one that is right with .9 and costs 0.8 tokens."""
    params = SamplingParams(temperature=0, max_tokens=20)
    batch = filled([RowStart([1] * 100, params, row) for row in range(4)], 128, 4)
    source = DraftSource(1.0)
    source.judged, source.right = 1000.0, 1000.0 * acceptance
    times = CostModel(linear_costs(verify=2.0, token=2.0)).times(4, 100)  # a plain round takes 10 ms
    return AutoRound(batch, times, [1.0] * 4, list(leads), rate=0.4).best(source, [[0.9]] * 4)[1]


@pytest.mark.parametrize(("acceptance", "drains", "verified"), [(0.5, False, 1), (0.5, True, 0), (0.99, True, 1)])
def test_a_draining_batch_pays_more_for_time_the_more_draft_tokens_are_wrong(
    acceptance: float, drains: bool, verified: int
) -> None:
    assert counts_verified(acceptance, [1.0] * 4 if drains else []) == [verified] * 4
