"""The budget: which guesses are verified, given chances and costs; what is learned from those that are not."""

from __future__ import annotations

import itertools
import random
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from statistics import mean

import numpy as np
import pytest
import torch

from paceline.batch import Batch, Draft, RowStart, Verdict
from paceline.lengths.budget import SLACK, BudgetLength
from paceline.lengths.cost import CostModel, CostTable
from paceline.lengths.fixed import FixedLength
from paceline.lengths.goodput import LONGEST_AUTO
from paceline.params import SamplingParams
from paceline.reliability import CENTRES, EDGES
from simulation import GuessSimulation, linear_costs
from toy import FlatToy, make_engine

pytestmark = pytest.mark.usefixtures("one_thread")

# Like a CPU: while reading the weights takes longest, tokens are nearly free; beyond, each costs 2/3 of a plain one.
CPU = CostTable(
    (1, 2, 4, 8, 16),
    (0, 1, 3, 7),
    100,
    ((7.8, 7.9, 8.2, 9.5), (7.9, 8.2, 9.5, 15.2), (8.2, 9.5, 15.2, 25), (9.5, 15.2, 25, 45), (15.2, 25, 45, 85)),
    (0,) * 5,
    (0,) * 5,
)
LOOK = 0.25  # ms that looking for guesses takes


def budget(simulation: GuessSimulation, costs: CostTable = CPU) -> BudgetLength:
    return BudgetLength(CostModel(costs, LONGEST_AUTO), simulation.clock)


def batch_of(rows: int) -> Batch:
    batch = Batch(rows, 200, 4)
    for row in range(rows):
        batch.set_row(row, RowStart([1], SamplingParams(temperature=0, max_tokens=100), row))
    batch.set_rows(rows)
    batch.copy_reliability.tried[0] = 1000  # says nothing about the other bins, but makes bold
    return batch


def select(batch: Batch, confidence: list[list[float]], counts: list[int], costs: CostTable) -> list[int]:
    policy = BudgetLength(CostModel(costs, LONGEST_AUTO))
    policy.choose(batch)
    tokens = torch.zeros(len(counts), len(confidence[0]), dtype=torch.int64)
    draft = policy.select(batch, Draft(tokens, torch.tensor(counts), confidence=confidence))
    assert draft.k == max(draft.counts.tolist())
    return draft.counts.tolist()


def best_by_trying(batch: Batch, confidence: list[list[float]], counts: list[int], costs: CostTable) -> list[int]:
    reliability, rows = batch.copy_reliability, len(counts)
    chances = [
        [reliability.chance(row, score, place) for place, score in enumerate(line)]
        for row, line in enumerate(confidence)
    ]
    survival = np.array(chances).cumprod(1)

    def rate(choice: tuple[int, ...]) -> float:
        tokens = rows + sum(float(survival[row, :n].sum()) for row, n in enumerate(choice))
        return tokens / costs.verify_ms(rows, sum(choice) / rows)

    return list(max(itertools.product(*(range(count + 1) for count in counts)), key=rate))


@pytest.mark.parametrize("token", [0.5, 2.0, 5.0, 20.0])
def test_the_choice_is_the_best_of_all_choices(token: float) -> None:
    rng, costs = random.Random(int(token)), linear_costs(verify=30.0, token=token)
    for _ in range(20):
        confidence = [[rng.random() for _ in range(3)] for _ in range(3)]
        counts = [rng.randint(0, 3) for _ in range(3)]
        chosen = select(batch_of(3), confidence, counts, costs)
        best = best_by_trying(batch_of(3), confidence, counts, costs)
        if any(best):  # a gain of less than 1 % is left alone
            assert chosen in (best, [0, 0, 0])
        else:
            assert not any(chosen)


def test_rows_get_guesses_by_their_chances_and_one_without_hope_none() -> None:
    sure, fair, hopeless = [0.99] * 4, [0.66] * 4, [0.01] * 4
    chosen = select(batch_of(3), [sure, fair, hopeless], [4, 4, 4], linear_costs(verify=30.0, token=8.0))
    assert chosen[0] == 4
    assert chosen[0] > chosen[1]
    assert chosen[2] == 0


def test_where_tokens_are_dear_nothing_is_verified_and_the_round_is_a_plain_one() -> None:
    policy, batch = BudgetLength(CostModel(linear_costs(verify=0.0, token=10.0), LONGEST_AUTO)), batch_of(2)
    policy.choose(batch)
    confidence = [[0.9] * 3] * 2
    draft = policy.select(
        batch, Draft(torch.zeros(2, 3, dtype=torch.int64), torch.tensor([3, 3]), confidence=confidence)
    )
    assert draft.tokens.shape == (2, 0)


def coins(chance: dict[int, float], seed: int = 0, score: float = 0.8) -> Callable[[int], list[tuple[float, bool]]]:
    """Guesses with the same score everywhere; chance[row] that one is right if those before it are."""
    rng = random.Random(seed)
    return lambda row: [(score, rng.random() < chance[row]) for _ in range(8)]


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("rows", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("draining", [False, True], ids=["open", "draining"])
def test_a_drafter_that_is_always_wrong_costs_next_to_nothing(rows: int, noise: float, draining: bool) -> None:
    def tokens_a_second(policy: str, seed: int) -> float:
        simulation = GuessSimulation(CPU, lambda row: [(0.95, False)] * 8, rows, noise=noise, seed=seed, look=LOOK)
        return rows * 64 / simulation.play(budget(simulation) if policy == "auto" else FixedLength(0), draining)

    seeds = range(9 if noise else 1)
    assert mean(tokens_a_second("auto", s) for s in seeds) > 0.975 * mean(tokens_a_second("0", s) for s in seeds)


@pytest.mark.parametrize(
    ("rows", "right", "least", "most"), [(16, False, 0.1, 0.4), (16, True, 1, 1), (2, False, 0.1, 0.5), (2, True, 1, 1)]
)
def test_where_guesses_are_wrong_most_rounds_do_not_even_look(
    rows: int, right: bool, least: float, most: float
) -> None:
    simulation, asked = GuessSimulation(CPU, lambda row: [(0.95, right)] * 8, rows, tokens=256, look=LOOK), []
    policy = budget(simulation)
    choose = policy.choose
    policy.choose = lambda batch: (asked.append(choose(batch)), asked[-1])[1]  # type: ignore[method-assign]
    simulation.play(policy)
    assert least <= mean(k > 0 for k in asked) <= most


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("rows", [1, 2, 4, 8, 16])
def test_short_answers_gain_as_much_as_with_the_best_fixed_length(rows: int, noise: float) -> None:
    """Rows that differ, 64 tokens, costs as believed (times are noisy): mean seconds until a row ends."""
    chance = {row: (0.95, 0.6, 0.2, 0.85)[row % 4] for row in range(rows)}

    def latency(length: str, seed: int) -> float:
        simulation = GuessSimulation(CPU, coins(chance, seed), rows, noise=noise, seed=seed)
        simulation.play(budget(simulation) if length == "auto" else FixedLength(int(length)))
        return mean(simulation.ends.values())

    seeds = range(12)
    fixed = min(mean(latency(k, seed) for seed in seeds) for k in ("0", "1", "2", "4", "8"))
    assert mean(latency("auto", seed) for seed in seeds) < fixed / 0.97


@pytest.mark.parametrize("rows", [2, 8, 16])
def test_a_draining_batch_ends_no_later_for_the_sake_of_its_fast_rows(rows: int) -> None:
    chance = dict.fromkeys(range(rows), 0.9) | {0: 0.0}

    def play(length: str, draining: bool) -> GuessSimulation:
        simulation = GuessSimulation(CPU, coins(chance), rows)
        simulation.play(budget(simulation) if length == "auto" else FixedLength(0), draining)
        return simulation

    plain, drained, hurried = play("0", True), play("auto", True), play("auto", False)
    assert drained.now <= plain.now + 2.5 * CPU.verify_ms(rows, 0) / 1000
    assert mean(hurried.ends.values()) < 0.9 * mean(plain.ends.values())


@pytest.mark.parametrize(("count", "chosen"), [(4, True), (0, False)], ids=["has guesses", "has none"])
def test_a_row_that_is_behind_is_waited_for_unless_its_own_guesses_help(count: int, chosen: bool) -> None:
    """The other row's guesses rank first; they are verified only beside some that let the late row catch up."""
    batch, price = batch_of(2), 2 * 1.0 / 32.0
    batch.draining, batch.pace.ahead[1] = True, -SLACK / price**2 - 0.1
    counts = select(batch, [[0.99] * 4, [0.91] * 4], [4, count], linear_costs(verify=30.0, token=1.0))
    assert [verified > 0 for verified in counts] == [chosen, chosen]


def test_bad_luck_is_no_debt_but_rounds_without_guesses_of_its_own_are() -> None:
    """One row loses a guess that was good, the other has none: plain rounds would only have brought that further."""
    batch, policy = batch_of(2), BudgetLength(CostModel(linear_costs(verify=30.0, token=1.0), LONGEST_AUTO))
    policy.choose(batch)
    guesses = Draft(torch.ones(2, 1, dtype=torch.int64), torch.tensor([1, 0]), confidence=[[0.99]] * 2)
    assert policy.select(batch, guesses).counts.tolist() == [1, 0]
    nothing = torch.zeros(2, dtype=torch.int64)
    policy.observe(batch, Verdict(torch.zeros(2, 2, dtype=torch.int64), nothing, torch.tensor([1, 0])))
    ahead = batch.pace.ahead
    assert ahead[0] > 0.9
    assert -0.1 < ahead[1] < 0


def test_guesses_that_are_not_verified_teach_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """No guess pays, so none is verified; but what rows gain shows that the guesses were right."""
    monkeypatch.setattr("paceline.lengths.budget.PROBE_SHARE", 0.0)
    dear = linear_costs(verify=0.0, token=10.0)
    simulation = GuessSimulation(dear, lambda row: [(0.5, True)] * 4, rows=4)
    simulation.play(budget(simulation, dear))
    assert not np.any([sum(counts) for counts in simulation.verified])
    reliability = simulation.batch.copy_reliability
    assert min(reliability.chance(row, 0.5) for row in range(4)) > 0.85


def test_time_that_was_believed_too_long_is_found_out() -> None:
    """By the table no guess pays; in truth they are nearly free."""
    simulation = GuessSimulation(CPU, lambda row: [(0.9, True)] * 4, rows=1, tokens=600)
    simulation.play(budget(simulation, linear_costs(verify=0.0, token=10.0)))
    assert mean(sum(counts) for counts in simulation.verified[-40:]) > 2


def test_plain_rounds_that_were_believed_too_long_are_found_out() -> None:
    """By the table a round without guesses takes as long as one with a guess a row, and no row is ever without any."""
    believed = replace(CPU, verify=(*CPU.verify[:-1], (24.9, *CPU.verify[-1][1:])))
    simulation = GuessSimulation(CPU, coins(dict.fromkeys(range(16), 0.2)), rows=16, tokens=300)
    simulation.play(budget(simulation, believed))
    assert mean(any(counts) for counts in simulation.verified[:3]) == 1
    assert mean(any(counts) for counts in simulation.verified[-80:]) < 0.2


def test_a_requests_limit_is_kept() -> None:
    simulation = GuessSimulation(CPU, lambda row: [(0.99, True)] * 8, rows=2)
    policy = budget(simulation)
    simulation.play(policy)
    assert max(counts[0] for counts in simulation.verified) > 2
    batch = batch_of(2)
    batch.most_guesses[0] = 1
    policy.choose(batch)
    batch.cap_guesses(8)
    draft = Draft(torch.ones(2, 8, dtype=torch.int64), torch.tensor([8, 8]), confidence=[[0.99] * 8] * 2)
    assert policy.select(batch, draft.capped(batch.caps)).counts.tolist()[0] <= 1


def test_a_flat_model_with_free_guesses_has_a_budget() -> None:
    engine = make_engine(FlatToy(), drafter="ngram", num_speculative_tokens="auto", attention="auto")
    assert isinstance(engine.parts.policy, BudgetLength)
    assert "length auto (a budget for all rows)" in engine.describe()
    padded = make_engine(FlatToy(), FlatToy(), drafter="model", num_speculative_tokens="auto", attention="auto")
    assert not isinstance(padded.parts.policy, BudgetLength)


def test_the_centres_lie_between_the_edges() -> None:
    assert [bisect_left(EDGES, centre) for centre in CENTRES] == list(range(len(CENTRES)))
