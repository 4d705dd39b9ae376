"""From scores to probabilities, and draft tokens judged by the tokens that a row gained, verified or not."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.core.draft import Draft, Verdict
from paceline.lengths.scores import JudgedToken, ScoreCalibration, bins_of, judge

SCORES = [0.05, 0.3, 0.5, 0.7, 0.85, 0.93, 0.99]


def at(place: int, scores: list[float] | None = None) -> int:
    """The bin of a draft token of a chain."""
    return bins_of(place + 1, scores)[place]


def chance(belief: ScoreCalibration, score: float, row: int = 0) -> float:
    return belief.chance(row, at(0, [score]))


def outcomes(judged: list[int], right: list[int], scores: list[float] | None = None) -> list[list[JudgedToken]]:
    """Bins and outcomes of each row's first draft tokens, for chains."""
    return [
        [(at(place, scores), place < good) for place in range(count)] for count, good in zip(judged, right, strict=True)
    ]


def learn_rows(belief: ScoreCalibration, judged: list[list[JudgedToken]]) -> None:
    """Learn a round of rows in slots 0, 1, ..."""
    belief.learn(judged, range(len(judged)))


def learn(belief: ScoreCalibration, scores: list[float], right: list[bool], times: int = 1) -> None:
    """Learn rounds of one draft token per row."""
    for _ in range(times):
        learn_rows(belief, [[(at(0, [score]), it)] for score, it in zip(scores, right, strict=True)])


def test_without_observations_a_probability_is_about_the_score() -> None:
    assert [chance(ScoreCalibration(), score) for score in SCORES] == pytest.approx(SCORES, abs=0.1)


@pytest.mark.parametrize("truth", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("score", [0.3, 0.9, None])
def test_probabilities_converge_to_the_truth(score: float | None, truth: float) -> None:
    belief, rng, found = ScoreCalibration(), np.random.default_rng(0), []
    for _ in range(300):
        right = (rng.random(8) < truth).astype(int).tolist()
        scores = None if score is None else [score]
        learn_rows(belief, outcomes([1] * 8, right, scores))
        found.append(belief.chance(0, at(0, scores)))
    assert np.mean(found[50:]) == pytest.approx(truth, abs=0.07)


def test_a_drafter_that_is_wrong_is_found_out_within_a_round_or_two_whatever_its_scores() -> None:
    belief = ScoreCalibration()
    learn(belief, [0.9] * 8, [False] * 8)
    assert chance(belief, 0.9, row=7) < 0.25
    learn(belief, [0.9] * 8, [False] * 8)
    assert chance(belief, 0.9, row=7) < 0.1


@pytest.mark.parametrize(("before", "after"), [(0.9, 0.1), (0.1, 0.9)])
@pytest.mark.parametrize(("rows", "rounds"), [(16, 7), (1, 60)])
def test_a_change_is_believed_after_about_100_draft_tokens(rows: int, rounds: int, before: float, after: float) -> None:
    """In a row that is known, its own record makes up for that of all."""
    belief, rng = ScoreCalibration(), np.random.default_rng(0)

    def play(rate: float) -> None:
        right = (rng.random((rows, 2)) < rate).cumprod(1).sum(1).tolist()
        learn_rows(belief, outcomes([min(good + 1, 2) for good in right], right))

    for _ in range(100):
        play(before)
    for _ in range(rounds):
        play(after)
    assert abs(np.mean([belief.chance(row, at(0)) for row in range(rows)]) - after) < 0.3


def test_a_later_draft_token_is_judged_apart_from_a_first_one_with_the_same_score() -> None:
    belief = ScoreCalibration()
    for _ in range(20):
        learn_rows(belief, outcomes([1], [0], [0.5, 0.5]))
        learn_rows(belief, outcomes([2], [2], [0.5, 0.5]))
    assert belief.chance(0, at(0, [0.5])) < 0.6
    assert belief.chance(0, at(1, [0.5, 0.5])) > 0.9


def test_without_scores_every_place_has_a_chance_of_its_own_and_untried_ones_that_of_all() -> None:
    belief = ScoreCalibration()
    for _ in range(60):
        learn_rows(belief, outcomes([2], [1]))
    assert belief.chance(0, at(0)) > 0.85
    assert belief.chance(0, at(1)) < 0.15
    assert 0.2 < belief.chance(0, at(2)) < 0.8


def test_rows_differ_with_the_same_score() -> None:
    belief = ScoreCalibration()
    learn(belief, [0.7, 0.7], [True, False], times=30)
    assert chance(belief, 0.7, row=0) > 0.9
    assert chance(belief, 0.7, row=1) < 0.1
    assert 0.3 < chance(belief, 0.7, row=2) < 0.7


def test_the_chance_of_a_draft_token_and_all_before_it_falls_along_a_row() -> None:
    belief = ScoreCalibration()
    bins = bins_of(3, [0.9, 0.5, 0.9])
    survivals = belief.survivals(0, bins)
    chances = [belief.chance(0, bin_) for bin_ in bins]
    assert survivals == pytest.approx(np.cumprod(chances).tolist())


def test_a_round_without_judged_tokens_changes_nothing() -> None:
    belief = ScoreCalibration()
    before = chance(belief, 0.5)
    learn_rows(belief, [[], []])
    assert chance(belief, 0.5) == before


def test_drafts_from_other_texts_are_judged_apart_from_those_of_the_rows_own() -> None:
    belief = ScoreCalibration()
    own, other = (bins_of(2, [0.7, 0.7], kinds=[kind] * 2) for kind in (0, 2))
    assert own == bins_of(2, [0.7, 0.7])
    for row in range(30):
        learn_rows(belief, [[(own[0], True)] if row % 2 else [(other[0], False)]])
    assert belief.chance(1, own[0]) > 0.8
    assert belief.chance(1, other[0]) < 0.3


def judged(draft_tokens: list[int], gained: list[int], accepted: int, verified: int) -> tuple[int, int]:
    """Number of one row's draft tokens that can be judged, and number of those that are right."""
    (line,) = judge(Draft([draft_tokens]), Verdict([gained[: accepted + 1]], [accepted], [verified]))
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
    verdict = Verdict([[1, 1, 1], [1, 3], [7, 7, 7]], [2, 1, 2], [2, 2, 2])
    assert judge(draft, verdict) == [[(0, True)], [(0, True), (1, False)], []]
