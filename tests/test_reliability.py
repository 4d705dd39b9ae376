"""From a drafter's confidence to a chance."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.batch import Batch, RowStart
from paceline.params import SamplingParams
from paceline.reliability import CENTRES, Reliability


def chance(reliability: Reliability, confidence: float, row: int = 0) -> float:
    return reliability.chance(row, confidence)


def learn(reliability: Reliability, confidence: list[float], right: list[bool], times: int = 1) -> None:
    """A guess a row."""
    for _ in range(times):
        reliability.update([[score] for score in confidence], [1] * len(right), [int(it) for it in right])


def test_before_anything_is_known_a_chance_is_the_confidence() -> None:
    assert [chance(Reliability(1), c) for c in CENTRES] == pytest.approx(list(CENTRES))


@pytest.mark.parametrize("truth", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("confidence", [0.3, 0.9])
def test_chances_come_to_the_truth(confidence: float, truth: float) -> None:
    reliability, rng, found = Reliability(8), np.random.default_rng(0), []
    for _ in range(300):
        learn(reliability, [confidence] * 8, (rng.random(8) < truth).tolist())
        found.append(chance(reliability, confidence))
    assert np.mean(found[50:]) == pytest.approx(truth, abs=0.07)


def test_a_drafter_that_is_wrong_is_found_out_within_a_round_or_two_whatever_its_confidence() -> None:
    reliability = Reliability(8)
    learn(reliability, [0.9] * 8, [False] * 8)
    assert chance(reliability, 0.9, row=7) < 0.1
    assert chance(reliability, 0.99) < 0.95  # nobody tried it
    learn(reliability, [0.9] * 8, [False] * 8, times=3)
    assert chance(reliability, 0.7) < 0.1


def test_a_change_is_told_from_bad_luck() -> None:
    """What was learned from hundreds of guesses is forgotten in one round that it cannot explain, and in no other."""
    reliability = Reliability(17)
    learn(reliability, [0.6] * 16, [True] * 14 + [False] * 2, times=40)
    learn(reliability, [0.6] * 16, [True] * 9 + [False] * 7)
    assert chance(reliability, 0.6, row=16) > 0.7
    learn(reliability, [0.6] * 16, [True] * 2 + [False] * 14)
    assert chance(reliability, 0.6, row=16) < 0.4


def test_a_later_guess_is_judged_apart_from_a_first_one_with_the_same_confidence() -> None:
    reliability = Reliability(1)
    for _ in range(20):
        reliability.update([[0.5, 0.5]], [1], [0])
        reliability.update([[0.5, 0.5]], [2], [2])
    assert reliability.chance(0, 0.5, place=0) < 0.6
    assert reliability.chance(0, 0.5, place=1) > 0.9


def test_rows_differ_with_the_same_confidence() -> None:
    reliability = Reliability(3)
    learn(reliability, [0.7, 0.7], [True, False], times=30)
    assert chance(reliability, 0.7, row=0) > 0.85
    assert chance(reliability, 0.7, row=1) < 0.3
    assert 0.3 < chance(reliability, 0.7, row=2) < 0.7


def test_what_was_not_judged_teaches_nothing() -> None:
    reliability = Reliability(2)
    reliability.update([[0.5] * 3] * 2, [0, 0], [0, 0])
    assert chance(reliability, 0.5) == pytest.approx(CENTRES[2])


def test_luck_and_pace_follow_their_row_and_begin_anew_with_a_new_one() -> None:
    batch = Batch(3, 16, 8)
    learn(batch.reliability, [0.9, 0.9], [False, True], times=5)
    batch.pace.update([3, 0], 1.5)
    batch.copy_row(0, 2)
    assert batch.reliability.missed[2] == batch.reliability.missed[0] > 3
    assert batch.pace.ahead == [2.5, -0.5, 2.5]
    assert batch.pace.tokens(0) > batch.pace.tokens(1)
    batch.set_row(0, RowStart([1, 2], SamplingParams(), 0))
    assert batch.reliability.missed[0] == batch.pace.ahead[0] == 0
    assert batch.pace.tokens(0) == 1
