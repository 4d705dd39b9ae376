"""Draft tokens judged by the tokens that a row gained, verified or not."""

from __future__ import annotations

import pytest
import torch

from paceline.core.draft import Draft, Verdict
from paceline.lengths.belief import judge


def judged(draft_tokens: list[int], gained: list[int], accepted: int, verified: int) -> tuple[int, int]:
    """Number of one row's draft tokens that can be judged, and number of those that are right."""
    draft = Draft(torch.tensor([draft_tokens], dtype=torch.int64), torch.tensor([len(draft_tokens)]))
    width = max(len(gained), 1)
    tokens = torch.full((1, width), 99)  # beyond what was gained lies anything
    tokens[0, : len(gained)] = torch.tensor(gained)
    verdict = Verdict(tokens, torch.tensor([accepted]), torch.tensor([verified]))
    (line,) = judge(draft, verdict)
    assert [place for place, _ in line] == list(range(len(line)))
    return len(line), sum(right for _, right in line)


@pytest.mark.parametrize(
    ("draft_tokens", "gained", "accepted", "verified", "expected"),
    [
        ([1, 2, 3], [1, 2, 3, 4], 3, 3, (3, 3)),
        ([1, 2, 3], [1, 5], 1, 3, (2, 1)),
        ([1, 2, 3], [5], 0, 3, (1, 0)),
        ([1, 2, 3], [1, 2], 1, 1, (2, 2)),
        ([1, 2, 3], [1, 5], 1, 1, (2, 1)),
        ([1, 2, 3], [1], 0, 0, (1, 1)),
        ([1, 2, 3], [5], 0, 0, (1, 0)),
        ([], [1], 0, 0, (0, 0)),
    ],
    ids=[
        "all kept",
        "the second wrong",
        "the first wrong",
        "the next one right, unverified",
        "the next one wrong, unverified",
        "none verified, right",
        "none verified, wrong",
        "none",
    ],
)
def test_draft_tokens_up_to_the_first_that_is_wrong_or_unknown_are_judged(
    draft_tokens: list[int], gained: list[int], accepted: int, verified: int, expected: tuple[int, int]
) -> None:
    assert judged(draft_tokens, gained, accepted, verified) == expected


@pytest.mark.parametrize(
    ("draft_tokens", "expected"),
    [([1, 2, 3, 4], (4, 4)), ([1, 2, 3, 4, 5, 6], (4, 4)), ([1, 9, 3, 4], (2, 1)), ([9, 2], (1, 0)), ([1, 2], (2, 2))],
    ids=["as long", "longer", "the second wrong", "the first wrong", "shorter"],
)
def test_draft_tokens_are_judged_by_tokens_gained_from_another_draft(
    draft_tokens: list[int], expected: tuple[int, int]
) -> None:
    """Three draft tokens of another drafter were kept, and a token came after them."""
    assert judged(draft_tokens, [1, 2, 3, 4], accepted=3, verified=5) == expected


def test_padding_is_ignored_and_rows_are_judged_apart() -> None:
    draft = Draft(torch.tensor([[1, 1], [1, 2], [7, 7]]), torch.tensor([1, 2, 0]))
    verdict = Verdict(torch.tensor([[1, 1, 1], [1, 3, 0], [7, 7, 7]]), torch.tensor([2, 1, 2]), torch.tensor([2, 2, 2]))
    assert judge(draft, verdict) == [[(0, True)], [(0, True), (1, False)], []]
