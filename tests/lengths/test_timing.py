"""What rounds of late have taken and brought."""

from __future__ import annotations

import pytest

from paceline.lengths.timing import MOST_SURPRISE, DraftTimes, Rate
from simulation import linear_costs

TABLE = linear_costs(draft_once=2.0, draft_step=10.0)


def test_what_was_never_timed_takes_what_the_table_says() -> None:
    assert DraftTimes(TABLE).times(4, 3).tolist() == [0, 12, 22, 32]


def test_the_first_pass_is_known_apart_and_the_others_are_as_much_off_until_one_is_timed() -> None:
    times = DraftTimes(TABLE)
    for _ in range(100):
        times.observe(2, [18.0])
    assert times.times(2, 2).tolist() == pytest.approx([0, 18, 33], rel=0.01)
    for _ in range(100):
        times.observe(2, [18.0, 12.0, 12.0])
    assert times.times(2, 3).tolist() == pytest.approx([0, 18, 30, 42], rel=0.01)
    assert times.times(4, 1).tolist() == [0, 12], "other batch sizes are other drafts"


def test_a_pause_of_the_machine_is_no_news() -> None:
    times = DraftTimes(TABLE)
    for _ in range(50):
        times.observe(1, [12.0, 10.0])
    times.observe(1, [12.0, 5000.0])
    assert times.step_ms(1) < 10 * (1 + 0.11 * (MOST_SURPRISE - 1))


def test_a_rate_forgets() -> None:
    rate = Rate()
    assert rate.value == 0
    for _ in range(60):
        rate.learn(2.0, 40.0)
    assert rate.value == pytest.approx(0.05)
    for _ in range(60):
        rate.learn(4.0, 40.0)
    assert rate.value == pytest.approx(0.1, rel=0.01)
