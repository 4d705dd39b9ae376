"""Token weights of rows."""

from __future__ import annotations

import pytest

from paceline.config import SamplingParams
from paceline.core.batch import Batch, RowStart
from paceline.lengths.belief import RowProgress


def batch_of(tokens_left: list[int]) -> Batch:
    batch = Batch(len(tokens_left), 400, 4)
    for row, left in enumerate(tokens_left):
        batch.set_row(row, RowStart([1] * 10, SamplingParams(temperature=0, max_tokens=left), row))
    batch.set_live(range(len(tokens_left)))
    return batch


def test_while_requests_wait_or_may_come_all_tokens_weigh_the_same() -> None:
    assert RowProgress().token_weights(batch_of([10, 300])) == [1, 1]


def test_in_a_draining_batch_tokens_of_late_rows_weigh_more_and_1_on_average() -> None:
    batch = batch_of([100, 200, 200])
    batch.draining, paces = True, RowProgress()
    for _ in range(30):
        paces.learn([0, 1, 2], [0, 0, 3], 1.0)  # the last row gains four tokens a round, the others one
    early, late, fast = paces.token_weights(batch)
    assert late > early > fast
    assert early + late + fast == pytest.approx(3)


def test_a_lone_row_has_weight_1() -> None:
    batch = batch_of([50])
    batch.draining = True
    assert RowProgress().token_weights(batch) == [1]
