"""Running mean, token rate, exploration budget, and token weights of rows."""

from __future__ import annotations

from itertools import pairwise

import pytest

from batches import filled
from paceline.config import SamplingParams
from paceline.core.batch import Batch, RowStart
from paceline.lengths.records import EXPLORATION_SHARE, ExplorationBudget, RowProgress, RunningMean, TokenRate


def test_a_rate_forgets() -> None:
    rate = TokenRate()
    assert rate.value == 0
    for _ in range(60):
        rate.learn(2.0, 40.0)
    assert rate.value == pytest.approx(0.05)
    for _ in range(60):
        rate.learn(4.0, 40.0)
    assert rate.value == pytest.approx(0.1, rel=0.01)


def test_a_running_mean_begins_with_the_initial_value_and_has_a_standard_error() -> None:
    mean = RunningMean(3.0)
    assert (mean.value, mean.error) == (3.0, 0.0)
    mean.learn(0.0)
    assert 1 < mean.value < 2
    surprised = mean.error
    for _ in range(100):
        mean.learn(0.0)
    assert mean.value == pytest.approx(0.0, abs=0.01)
    assert mean.error < 0.1 * surprised


def test_a_doubted_mean_is_soon_replaced() -> None:
    sure, doubted = RunningMean(0.0), RunningMean(0.0)
    for mean in (sure, doubted):
        for _ in range(50):
            mean.learn(-1.0)
    doubted.doubt(3.0)
    assert doubted.value == sure.value
    for mean in (sure, doubted):
        mean.learn(1.0)
    assert doubted.value > sure.value
    assert doubted.error > sure.error


def test_the_exploration_budget_pays_once_it_covers_the_price_and_never_holds_more() -> None:
    budget, paid = ExplorationBudget(), []
    for number in range(2000):
        if budget.try_spend(4.0):
            paid.append(number)
        budget.accrue(10.0)
    gaps = {after - before for before, after in pairwise(paid)}
    assert all(abs(gap - 4.0 / (EXPLORATION_SHARE * 10.0)) <= 1 for gap in gaps)
    for _ in range(10_000):
        budget.accrue(10.0)
    assert budget.try_spend(4.0)
    assert not budget.try_spend(4.0)


def batch_of(tokens_left: list[int]) -> Batch:
    params = [SamplingParams(temperature=0, max_tokens=left) for left in tokens_left]
    return filled([RowStart([1] * 10, each, row) for row, each in enumerate(params)], 400, 4)


def test_while_requests_wait_or_may_come_all_tokens_weigh_the_same() -> None:
    assert RowProgress().token_weights(batch_of([10, 300])) == [1, 1]


def test_in_a_draining_batch_tokens_of_late_rows_weigh_more_and_1_on_average() -> None:
    batch = batch_of([100, 200, 200])
    batch.draining, paces = True, RowProgress()
    for _ in range(30):
        paces.learn({0: 0, 1: 0, 2: 3}, 1.0)  # the last row gains four tokens a round, the others one
    early, late, fast = paces.token_weights(batch)
    assert late > early > fast
    assert early + late + fast == pytest.approx(3)


def test_a_lone_row_has_weight_1() -> None:
    batch = batch_of([50])
    batch.draining = True
    assert RowProgress().token_weights(batch) == [1]
