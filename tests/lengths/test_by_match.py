"""On a device: which matches replace a model's draft, and what n-gram drafts cost where nothing repeats."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from paceline.core.draft import Verdict
from paceline.drafters.lookup import LONGEST_SUFFIX
from paceline.lengths.auto import AutoLength
from paceline.lengths.by_match import ChoiceByMatch
from paceline.lengths.by_position import DEPTHS
from paceline.lengths.cost import CostModel
from simulation import Simulation, linear_costs

NEVER = LONGEST_SUFFIX + 1


def learned(matched: Sequence[int], accepted: Sequence[int], rounds: int = 40, k: int = 4) -> ChoiceByMatch:
    """A choice after rounds in which rows had matches of so many tokens (0: the model's draft)."""
    choice, slots = ChoiceByMatch(), range(len(matched))
    tokens = [[0] * (count + 1) for count in accepted]
    for _ in range(rounds):
        choice.learn(Verdict(tokens, list(accepted), [k] * len(matched), matched=list(matched)), slots)
    return choice


def test_at_first_only_long_matches_replace_the_models_draft() -> None:
    assert ChoiceByMatch().least_matches([0, 1], 4) == [5, 5]


@pytest.mark.parametrize(
    ("matched", "accepted", "least", "most"),
    [
        ((0, 0), (0, 0), 1, 2),  # the model is always wrong
        ((0, 0), (4, 4), NEVER, NEVER),  # and always right
        ((LONGEST_SUFFIX, LONGEST_SUFFIX), (0, 0), NEVER, NEVER),  # long matches continue wrongly
        ((3, 3), (4, 4), 1, 3),  # short ones rightly
    ],
)
def test_the_source_that_was_right_is_taken(
    matched: Sequence[int], accepted: Sequence[int], least: int, most: int
) -> None:
    assert all(least <= each <= most for each in learned(matched, accepted).least_matches([0, 1], 4))


def test_rows_that_repeat_themselves_take_shorter_matches_than_others() -> None:
    choice = learned((3, 3, 0, 0), (4, 0, 2, 2))
    repeating, other, *_ = choice.least_matches(range(4), 4)
    assert repeating < other


class Captured:
    """All lengths have been captured."""

    capture_ms = 60.0

    def is_captured(self, k: int) -> bool:
        return True


@pytest.mark.parametrize("rows", [1, 8, 16])
def test_lookup_costs_next_to_nothing_where_nothing_repeats(rows: int) -> None:
    """A round of so many rows on a GPU takes up to 1.5 times a plain one with eight draft tokens."""
    costs = linear_costs(verify=4.7, token=0.3 / rows)
    policy = AutoLength(CostModel(costs), copies=True, ranks=False, device=Captured())
    simulation = Simulation(costs, lambda _row, _place: 0.0)
    simulation.rows(rows)
    simulation.play(policy, 2000)
    plain_ms = costs.verify_ms(rows, 0, 100)
    lost = 1000 * simulation.now / plain_ms - 2000
    assert 0 < lost < 25
    assert set(simulation.asked) <= {0, *DEPTHS}
