"""What a token of each row is worth."""

from __future__ import annotations

import pytest

from paceline.config import SamplingParams
from paceline.core.batch import Batch, RowStart
from paceline.lengths.belief import RowProgress


def batch_of(tokens_left: list[int]) -> Batch:
    batch = Batch(len(tokens_left), 400, 4)
    for row, left in enumerate(tokens_left):
        batch.set_row(row, RowStart([1] * 10, SamplingParams(temperature=0, max_tokens=left), row))
    batch.set_rows(len(tokens_left))
    return batch


def test_while_others_wait_or_may_come_all_tokens_are_worth_the_same() -> None:
    assert RowProgress().token_weights(batch_of([10, 300])) == [1, 1]


def test_in_a_batch_that_drains_tokens_of_late_rows_are_worth_more_and_all_one_on_average() -> None:
    batch = batch_of([100, 200, 200])
    batch.draining, paces = True, RowProgress()
    for _ in range(30):
        paces.learn([0, 0, 3], 1.0)  # the last row gains four tokens a round, the others one
    early, late, fast = paces.token_weights(batch)
    assert late > early > fast
    assert early + late + fast == pytest.approx(3)


def test_a_lone_row_has_nobody_to_wait_for() -> None:
    batch = batch_of([50])
    batch.draining = True
    assert RowProgress().token_weights(batch) == [1]
