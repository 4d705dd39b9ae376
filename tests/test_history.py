"""Acceptance by row and position."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.batch import Batch, RowStart
from paceline.history import STALE, AcceptanceHistory
from paceline.params import SamplingParams


def test_a_position_is_tried_when_it_was_asked_for_and_everything_before_it_was_kept() -> None:
    history = AcceptanceHistory(4)
    history.update(3, [0, 1, 3])
    assert history.tried[:3, :4].tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0]]
    assert history.kept[:3, :4].tolist() == [[0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 1, 0]]
    assert history.all_tried[:3].tolist() == [3, 2, 1]
    assert history.all_kept[:3].tolist() == [2, 1, 1]


def test_a_row_that_was_not_asked_learns_nothing() -> None:
    history = AcceptanceHistory(2)
    history.update([0, 2], [0, 0])
    assert history.tried.sum(1).tolist() == [0, 1]


def test_a_round_without_guesses_changes_nothing() -> None:
    history = AcceptanceHistory(2)
    history.update(2, [2, 0])
    before = history.tried.copy()
    history.update(0, [0, 0])
    assert np.array_equal(history.tried, before)


@pytest.mark.parametrize("rate", [0.0, 0.3, 1.0])
def test_the_estimate_comes_to_the_truth(rate: float) -> None:
    history, rng = AcceptanceHistory(8), np.random.default_rng(0)
    estimates = []
    for _ in range(400):
        kept = (rng.random((8, 4)) < rate).cumprod(1).sum(1)
        history.update(4, kept.tolist())
        estimates.append(history.batch_acceptance(4)[:2])
    assert np.mean(estimates[50:], axis=0) == pytest.approx([rate, rate], abs=0.06)


def test_rows_keep_their_own_acceptance_and_new_ones_begin_with_everybodys() -> None:
    history = AcceptanceHistory(3)
    for _ in range(60):
        history.update(1, [1, 0])
    own = history.acceptance(3, 1)[:, 0]
    assert own[0] > 0.85
    assert own[1] < 0.15
    assert own[2] == pytest.approx(0.5, abs=0.05)


def test_statistics_follow_their_row_and_begin_anew_with_a_new_one() -> None:
    batch = Batch(3, 16, 8)
    batch.history.update(2, [2, 0, 1])
    batch.copy_row(0, 2)
    assert batch.history.kept[2, :2].tolist() == [1, 1]
    batch.set_row(0, RowStart([1, 2], SamplingParams(), 0))
    assert batch.history.tried[0].sum() == 0
    assert batch.history.all_tried[0] == 3  # what all rows showed stays


def test_untried_positions_believe_their_predecessor() -> None:
    history = AcceptanceHistory(1)
    for _ in range(50):
        history.update(1, [1])
    assert history.batch_acceptance(4) == pytest.approx([1, 1, 1, 1], abs=0.02)


@pytest.mark.parametrize(("before", "after"), [(0.9, 0.1), (0.1, 0.9)])
@pytest.mark.parametrize(("rows", "rounds"), [(16, 2), (1, 14)])
def test_a_change_is_believed_at_once(rows: int, rounds: int, before: float, after: float) -> None:
    history, rng = AcceptanceHistory(rows), np.random.default_rng(0)

    def play(rate: float) -> None:
        history.update(2, (rng.random((rows, 2)) < rate).cumprod(1).sum(1).tolist())

    for _ in range(100):
        play(before)
    for _ in range(rounds):
        play(after)
    assert abs(history.batch_acceptance(1)[0] - after) < 0.25
    assert abs(history.acceptance(rows, 1).mean() - after) < 0.3


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_chance_is_seldom_taken_for_a_change(rate: float) -> None:
    history, rng = AcceptanceHistory(8), np.random.default_rng(0)
    begun_anew = 0
    for _ in range(500):
        had = history.all_tried[0]
        history.update(2, (rng.random((8, 2)) < rate).cumprod(1).sum(1).tolist())
        begun_anew += history.all_tried[0] < had / 2
    assert begun_anew <= 3


def test_after_a_rest_a_few_trials_decide() -> None:
    history = AcceptanceHistory(16)
    for _ in range(100):
        history.update(1, [0] * 16)
    history.rest()
    assert history.all_tried[0] == pytest.approx(STALE)
    history.update(1, [1] * 16)
    assert history.batch_acceptance(1)[0] > 0.8
