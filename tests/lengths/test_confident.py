"""Drafts that end where the next guess would not pay: given likelihoods and costs, the expected lengths."""

from __future__ import annotations

import random
from collections.abc import Callable
from statistics import mean

import pytest
import torch

from paceline.batch import Batch, Draft, RowStart
from paceline.lengths.base import LengthPolicy
from paceline.lengths.confident import ConfidentLength
from paceline.lengths.cost import CostModel
from paceline.lengths.fixed import FixedLength
from paceline.lengths.goodput import FIRST_REACH, LONGEST_AUTO, GoodputLength
from paceline.params import SamplingParams
from simulation import GuessSimulation, linear_costs
from toy import FlatToy, ToyModel, make_engine

pytestmark = pytest.mark.usefixtures("one_thread")

# A target of 40 ms and 3 a token in flight, a draft model of 10: a guess takes a third of a plain round, one row alone.
PAIR = linear_costs(verify=37.0, token=3.0, draft_step=10.0)
Guesses = Callable[[int], list[tuple[float, bool]]]


def confident(simulation: GuessSimulation) -> ConfidentLength:
    return ConfidentLength(CostModel(PAIR, LONGEST_AUTO), clock=simulation.clock)


def steady(chance: float, score: float, seed: int = 0) -> Guesses:
    """Likelihoods that tell nothing: every guess has the same, and the same chance."""
    rng = random.Random(seed)
    return lambda row: [(score, rng.random() < chance) for _ in range(LONGEST_AUTO)]


def telling(seed: int = 0) -> Guesses:
    """Stretches that are nearly sure and places that are not; the likelihood says which."""
    rng = random.Random(seed)

    def guess(row: int) -> list[tuple[float, bool]]:
        chances = [0.97 if rng.random() < 0.75 else 0.3 for _ in range(LONGEST_AUTO)]
        return [(chance, rng.random() < chance) for chance in chances]

    return guess


def tokens_a_second(
    make: Callable[[GuessSimulation], LengthPolicy], guess: Callable[[int], Guesses], rows: int
) -> float:
    """Mean of a few seeds, 200 tokens a row."""
    speeds = []
    for seed in range(4):
        simulation = GuessSimulation(PAIR, guess(seed), rows, tokens=200, noise=0.05, seed=seed)
        speeds.append(rows * 200 / simulation.play(make(simulation)))
    return mean(speeds)


@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize(("chance", "score"), [(0.9, 0.9), (0.8, 0.5), (0.6, 0.95), (0.3, 0.6)])
def test_likelihoods_that_tell_nothing_leave_the_best_fixed_length(chance: float, score: float, rows: int) -> None:
    def guess(seed: int) -> Guesses:
        return steady(chance, score, seed)

    fixed = max(tokens_a_second(lambda _, k=k: FixedLength(k), guess, rows) for k in (0, 1, 2, 3, 5, 8))  # type: ignore[misc]
    assert tokens_a_second(confident, guess, rows) > 0.94 * fixed


def test_likelihoods_that_tell_beat_every_fixed_length() -> None:
    fixed = max(tokens_a_second(lambda _, k=k: FixedLength(k), telling, 1) for k in range(LONGEST_AUTO))  # type: ignore[misc]
    assert tokens_a_second(confident, telling, 1) > 1.05 * fixed


@pytest.mark.parametrize("rows", [1, 4, 16])
def test_a_draft_model_that_is_sure_and_wrong_costs_next_to_nothing(rows: int) -> None:
    def wrong(seed: int) -> Guesses:
        return steady(0.0, 0.99, seed)

    assert tokens_a_second(confident, wrong, rows) > 0.97 * tokens_a_second(lambda _: FixedLength(0), wrong, rows)


def started() -> ConfidentLength:
    """Past the first round, which may be a probe."""
    policy = ConfidentLength(CostModel(PAIR, LONGEST_AUTO))
    policy.rounds = 1
    return policy


def batch_of(rows: int) -> Batch:
    batch = Batch(rows, 200, 4)
    for row in range(rows):
        batch.set_row(row, RowStart([1] * 10, SamplingParams(temperature=0, max_tokens=150), row))
    batch.set_rows(rows)
    return batch


def test_only_guesses_that_may_well_be_right_are_verified() -> None:
    policy, batch = started(), batch_of(2)
    assert policy.choose(batch) == FIRST_REACH
    draft = Draft(
        torch.ones(2, 3, dtype=torch.int64), torch.tensor([3, 3]), confidence=[[0.99, 0.05, 0.99], [0.99] * 3]
    )
    assert policy.select(batch, draft).counts.tolist() == [1, 3]


def test_drawn_guesses_with_a_law_are_all_verified() -> None:
    """Under the rejection rule, to leave a guess out because of what it is would bend the law."""
    policy, batch = started(), batch_of(1)
    policy.choose(batch)
    tokens = torch.ones(1, 3, dtype=torch.int64)
    draft = Draft(tokens, torch.tensor([3]), torch.full((1, 3, 4), 0.25), [[0.01] * 3])
    assert policy.select(batch, draft).counts.tolist() == [3]


def test_a_draft_goes_on_while_any_row_makes_it_worth_it() -> None:
    policy, batch = started(), batch_of(2)
    policy.choose(batch)
    assert batch.enough is not None
    assert not batch.enough(batch, [[0.99], [0.99]])
    assert batch.enough(batch, [[0.1], [0.1]])


def test_rows_of_a_part_of_the_batch_are_judged_by_their_own_record() -> None:
    policy, batch = started(), batch_of(3)
    policy.choose(batch)
    batch.reliability.missed[2], batch.reliability.expected[2] = 400.0, 1.0  # the last row never has luck
    assert batch.enough is not None
    assert not batch.enough(batch.part(0, 2), [[0.95], [0.95]])
    assert batch.enough(batch.part(2, 3), [[0.95]])


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_a_draft_model_beside_a_flat_target_ends_its_own_drafts(rule: str) -> None:
    flat = make_engine(FlatToy(), FlatToy(blur=0.3), drafter="model", acceptance=rule, num_speculative_tokens="auto")
    assert isinstance(flat.parts.policy, ConfidentLength)
    padded = make_engine(ToyModel(), ToyModel(blur=0.3), drafter="model", num_speculative_tokens="auto")
    assert type(padded.parts.policy) is GoodputLength
