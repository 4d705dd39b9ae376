"""BASS, Algorithm 1, by hand: l0 = 7, +2 when some row keeps all, else -ceil(l / 10), one more each time in a row."""

from __future__ import annotations

import pytest

from paceline.config import MAX_SPECULATION_LENGTH
from paceline.core.batch import Batch
from paceline.core.draft import Verdict
from paceline.lengths.base import BassLength, FixedLength


@pytest.mark.parametrize(
    ("rounds", "lengths"),
    [
        # every round: what each row kept (x), and the length that follows
        ([[7], [9], [11]], [9, 11, 13]),
        ([[0, 7, 3], [0, 9, 1]], [9, 11]),  # one row that keeps all is enough
        ([[0], [0], [0], [0]], [6, 4, 2, 1]),  # 7-1-0, 6-1-1, 4-1-1, max(1, 2-1-1)
        ([[0], [0], [0], [0], [0], [1]], [6, 4, 2, 1, 1, 3]),
        ([[6], [5]], [6, 5]),  # never below what a row just kept: max(6, 7-1), max(5, 6-1-1)
        ([[0], [6], [0]], [6, 8, 7]),  # keeping all forgives the shrinking before
        ([[7], [9], [11], [0], [0]], [9, 11, 13, 11, 8]),  # 13-2-0, 11-2-1
    ],
)
def test_lengths_follow_algorithm_1(rounds: list[list[int]], lengths: list[int]) -> None:
    policy = BassLength()
    assert policy.k == 7
    for kept, length in zip(rounds, lengths, strict=True):
        policy.update(kept, policy.k)
        assert policy.k == length


def test_the_length_stops_at_the_limit() -> None:
    policy = BassLength()
    for _ in range(40):
        policy.update([policy.k], policy.k)
    assert policy.k == MAX_SPECULATION_LENGTH == 32


def verdict(accepted: list[int], drafted: list[int]) -> Verdict:
    return Verdict([[0] * (count + 1) for count in accepted], accepted, drafted)


def test_rounds_without_draft_tokens_teach_nothing() -> None:
    policy, batch = BassLength(), Batch(2, 8, 4)
    policy.observe(batch, verdict([0, 0], [0, 0]))
    assert policy.choose(batch).k == 7
    policy.observe(batch, verdict([0, 2], [0, 3]))
    assert policy.choose(batch).k == 6


def test_a_round_that_was_cut_short_counts_by_what_was_drafted() -> None:
    policy, batch = BassLength(), Batch(2, 8, 4)
    policy.observe(batch, verdict([3, 1], [3, 3]))
    assert policy.choose(batch).k == 9


def test_a_fixed_length_learns_nothing() -> None:
    policy, batch = FixedLength(3), Batch(1, 8, 4)
    policy.observe(batch, verdict([0], [3]))
    assert policy.choose(batch).k == 3
