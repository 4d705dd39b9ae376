"""Copies or the draft model: given both kinds of guesses and costs, the expected choice."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from statistics import mean
from typing import cast

import pytest
import torch

from paceline.batch import Batch, Draft, RowStart, Verdict
from paceline.decoder import Decoder
from paceline.lengths.base import LengthPolicy
from paceline.lengths.budget import BudgetLength
from paceline.lengths.confident import ConfidentLength
from paceline.lengths.cost import CostModel, CostTable
from paceline.lengths.goodput import FEW_TRIALS, FIRST_REACH, LONGEST_AUTO, GoodputLength
from paceline.lengths.hybrid import HybridLength
from paceline.params import SamplingParams
from simulation import RIGHT, WRONG, GuessSimulation, linear_costs
from toy import FlatToy, ToyModel, make_engine

pytestmark = pytest.mark.usefixtures("one_thread")

# A guess of the draft model takes a quarter of a plain round, and reading a missed token a tenth of that guess.
PAIR = linear_costs(verify=37.0, token=3.0, draft_step=10.0, feed_tokens=(1, 101), feed=(1.0, 101.0))
ROWS = [1, 2, 4]
WEAK, STRONG = 1 / 9, 25 / 33  # of copies after one token that matches, and after five
Guess = tuple[float, bool]
Kind = Callable[[random.Random, int], list[Guess]]  # guesses at a place of the text


def telling(chance: float = 0.75) -> Kind:
    """A draft model whose likelihoods say where it is nearly sure, which it is that often."""

    def guess(rng: random.Random, _place: int) -> list[Guess]:
        chances = [0.97 if rng.random() < chance else 0.3 for _ in range(LONGEST_AUTO)]
        return [(each, rng.random() < each) for each in chances]

    return guess


def always(right: bool, score: float) -> Kind:
    return lambda _rng, _place: [(score, right)] * LONGEST_AUTO


def stray(rng: random.Random, _place: int) -> list[Guess]:
    """Copies after short matches, of which one in ten is right."""
    return [(WEAK, rng.random() < 0.1) for _ in range(LONGEST_AUTO)]


def by_turns(rng: random.Random, place: int) -> list[Guess]:
    """Copies of a text of which every other stretch of 50 tokens stands elsewhere; a match is soon as long as any."""
    left = 50 - place % 50
    if place // 50 % 2:
        return stray(rng, place)
    inside = [(STRONG if place % 50 > 4 or j else WEAK, rng.random() < 0.97) for j in range(left)]
    return [*inside, *[(STRONG, False)] * LONGEST_AUTO][:LONGEST_AUTO]


def hybrid(simulation: GuessSimulation) -> HybridLength:
    return HybridLength(CostModel(simulation.costs, LONGEST_AUTO), decoders(simulation), simulation.clock)


def confident(simulation: GuessSimulation) -> ConfidentLength:
    return ConfidentLength(CostModel(simulation.costs, LONGEST_AUTO), decoders(simulation), simulation.clock)


def budget(simulation: GuessSimulation) -> BudgetLength:
    return BudgetLength(CostModel(simulation.costs, LONGEST_AUTO), simulation.clock)


def decoders(simulation: GuessSimulation) -> list[Decoder]:
    return [cast(Decoder, simulation.reader)]


def simulated(
    model: Kind | None, copies: Kind | None, rows: int, seed: int = 0, tokens: int = 200, costs: CostTable = PAIR
) -> GuessSimulation:
    """Of a draft model, of copies, or of both; either is as lucky with the other as alone."""

    def guesses(kind: Kind | None, luck: random.Random) -> Callable[[int], list[Guess]]:
        return lambda row: [] if kind is None else kind(luck, simulation.place(row))

    drafted, copied = guesses(model, random.Random(seed)), guesses(copies, random.Random(-1 - seed))
    if model is None:
        costs, drafted = costs.without_drafting(), copied
    simulation = GuessSimulation(costs, drafted, rows, tokens, noise=0.05, seed=seed)
    simulation.copies = copied if model and copies else None
    return simulation


def tokens_a_second(
    make: Callable[[GuessSimulation], LengthPolicy], model: Kind | None, copies: Kind | None, rows: int
) -> float:
    """Mean of a few seeds, 300 tokens a row."""
    speeds = []
    for seed in range(4):
        simulation = simulated(model, copies, rows, seed, 300)
        speeds.append(rows * 300 / simulation.play(make(simulation)))
    return mean(speeds)


def both(model: Kind, copies: Kind, rows: int) -> float:
    return tokens_a_second(hybrid, model, copies, rows)


def model_alone(model: Kind, rows: int) -> float:
    return tokens_a_second(confident, model, None, rows)


def copies_alone(copies: Kind, rows: int) -> float:
    return tokens_a_second(budget, None, copies, rows)


@pytest.mark.parametrize("rows", ROWS)
def test_copies_that_are_good_are_played_and_the_draft_model_is_not_asked(rows: int) -> None:
    simulation = simulated(telling(), always(True, STRONG), rows)
    simulation.play(hybrid(simulation))
    assert sum(asked > 0 for asked in simulation.asked) <= 2
    assert mean(map(sum, simulation.verified[2:])) > 4 * rows / 2
    assert both(telling(), always(True, STRONG), rows) > 0.95 * copies_alone(always(True, STRONG), rows)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("bad", [stray, always(False, STRONG)], ids=["stray", "sure and wrong"])
def test_copies_that_are_bad_cost_next_to_nothing(bad: Kind, rows: int) -> None:
    simulation = simulated(telling(), bad, rows, tokens=300)
    simulation.play(hybrid(simulation))
    assert mean(asked == 0 for asked in simulation.asked) < 0.1
    assert both(telling(), bad, rows) > 0.95 * model_alone(telling(), rows)


@pytest.mark.parametrize("rows", ROWS)
def test_a_text_of_which_a_part_can_be_copied_is_faster_with_both_than_with_either(rows: int) -> None:
    alone = max(model_alone(telling(), rows), copies_alone(by_turns, rows))
    assert both(telling(), by_turns, rows) > 1.05 * alone


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("copies", [by_turns, stray])
def test_beside_a_draft_model_that_is_always_wrong_copies_are_as_fast_as_alone(copies: Kind, rows: int) -> None:
    """But for the few drafts that show it to be wrong, which are made and verified for nothing."""
    tried = FEW_TRIALS * (PAIR.round_ms(rows, FIRST_REACH) - PAIR.round_ms(rows, 0)) / 1000
    seconds, alone = (
        rows * 300 / each for each in (both(always(False, 0.99), copies, rows), copies_alone(copies, rows))
    )
    assert seconds < alone / 0.97 + tried


def test_probes_go_on_while_copies_alone_are_played_and_keep_to_their_share() -> None:
    simulation = simulated(always(False, 0.99), by_turns, 1, tokens=2000)
    policy = hybrid(simulation)
    simulation.play(policy)
    assert policy.k == 0
    assert policy.probes > 2
    assert policy.total_ms == pytest.approx(1000 * simulation.now)
    assert policy.probe_ms < 0.02 * policy.total_ms


@pytest.mark.parametrize("rows", [1, 2])
def test_a_draft_model_of_which_little_is_known_is_not_given_up_for_copies_that_never_come(rows: int) -> None:
    """Its first guesses are wrong by bad luck: it is asked again all the same."""
    simulation = simulated(telling(), stray, rows)
    lucky = simulation.guess
    simulation.guess = lambda row: [(0.97, False)] if simulation.place(row) < 2 else lucky(row)
    simulation.play(hybrid(simulation))
    assert mean(asked > 0 for asked in simulation.asked) > 0.8


def started(rows: int, limit: int = 150, **given: Decoder) -> tuple[HybridLength, Batch]:
    """Past the first round, which may be a probe."""
    batch = Batch(rows, 400, 4)
    for row in range(rows):
        batch.set_row(row, RowStart([1] * 200, SamplingParams(temperature=0, max_tokens=limit), row))
    batch.set_rows(rows)
    policy = HybridLength(
        CostModel(PAIR, LONGEST_AUTO), list(given.values()), clock=itertools.count(step=0.005).__next__
    )
    policy.rounds = 1
    return policy, batch


def copied(score: float, rows: int = 1, k: int = 8) -> Draft:
    tokens = torch.full((rows, k), RIGHT)
    return Draft(tokens, torch.tensor([k] * rows), confidence=[[score] * k] * rows)


def ask(policy: HybridLength, batch: Batch, copies: Draft) -> int:
    """What a drafter of both kinds asks of its draft model."""
    assert policy.choose(batch) == LONGEST_AUTO
    batch.cap_guesses(LONGEST_AUTO)
    assert batch.instead is not None
    return batch.instead(batch, copies)


def played(policy: HybridLength, batch: Batch, copies: Draft, gained: list[int]) -> int:
    """A round of one row; returns what was asked of the draft model."""
    asked = ask(policy, batch, copies)
    draft = copies if asked == 0 else Draft(torch.full((1, 1), RIGHT), torch.tensor([1]), confidence=[[0.9]])
    draft = policy.select(batch, draft.capped(batch.caps)) if draft.k else draft
    kept = 0
    while kept < draft.counts.tolist()[0] and draft.tokens[0, kept] == gained[kept]:
        kept += 1
    verdict = Verdict(torch.tensor([gained[: kept + 1]]), torch.tensor([kept]), draft.counts)
    batch.commit(verdict)
    policy.observe(batch, verdict)
    return asked


class Behind:
    """A draft model's cache that lacks so many tokens of every row."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def lags(self, batch: Batch) -> list[int]:
        return [self.tokens + 1] * batch.rows


@pytest.mark.parametrize(("left", "read"), [(100, True), (4, False)])
def test_a_backlog_that_cannot_be_earned_back_before_the_rows_end_is_not_read(left: int, read: bool) -> None:
    policy, batch = started(1, left, decoder=cast(Decoder, Behind(150)))
    policy.k, policy._off = 4, True
    batch.history.update(4, [4])
    assert (ask(policy, batch, copied(WEAK)) > 0) == read


@pytest.mark.parametrize("copies", [copied(0.9), copied(0.9, k=0)], ids=["some", "none"])
def test_a_round_of_copies_says_nothing_about_the_draft_model(copies: Draft) -> None:
    behind = Behind(10_000)  # so it is not asked, whatever the copies are worth
    policy, batch = started(1, decoder=cast(Decoder, behind))
    policy.k = 2
    assert played(policy, batch, copies, [RIGHT] * 3 + [WRONG] + [RIGHT] * 20) == 0
    assert not any(batch.reliability.tried)
    assert not batch.history.all_tried.any()
    assert not batch.history.tried.any()
    assert policy._lately.value == 0, "the rate is that of the draft model's rounds"
    assert (policy._judged, policy._right) == (0, 0)
    assert any(batch.copy_reliability.tried) == (copies.k > 0)
    gained, took = (4, PAIR.verify_ms(1, 8) / PAIR.verify_ms(1, 0)) if copies.k else (1, 1)
    assert batch.pace.ahead[0] == pytest.approx(gained - took, abs=0.05), "nobody drafted"
    assert policy._off, "the draft model has fallen behind"


def test_what_the_draft_model_takes_to_catch_up_does_not_lower_the_rate_of_its_rounds() -> None:
    rates = []
    for missed in (0, 2):
        policy, batch = started(1, decoder=cast(Decoder, Behind(missed)))
        policy.k, policy._off = 2, True
        assert played(policy, batch, copied(WEAK), [RIGHT, RIGHT]) > 0
        rates.append(policy._lately.value)
    assert rates[1] > rates[0] > 0


def test_a_round_of_the_draft_model_says_what_the_copies_would_have_been_worth() -> None:
    policy, batch = started(1)
    policy.k = 2
    assert played(policy, batch, copied(WEAK), [RIGHT, RIGHT]) > 0
    assert sum(batch.copy_reliability.tried) == sum(batch.copy_reliability.kept) == 2
    assert sum(batch.reliability.tried) == 1
    assert batch.history.all_tried[0] == 1


def test_guesses_are_chosen_by_the_record_of_their_own_kind() -> None:
    policy, batch = started(1)
    policy.k = 2
    batch.reliability.missed[0], batch.reliability.expected[0] = 400.0, 1.0  # the draft model never has luck
    assert ask(policy, batch, copied(0.9)) == 0
    assert policy.select(batch, copied(0.9)).counts.tolist() == [8]


def test_copies_beyond_what_a_request_allows_are_neither_verified_nor_judged() -> None:
    policy, batch = started(1, decoder=cast(Decoder, Behind(10_000)))
    policy.k, batch.most_guesses[0] = 1, 1
    assert played(policy, batch, copied(0.99), [RIGHT] * 9) == 0
    assert batch.lengths[0] == 202
    assert sum(batch.copy_reliability.tried) == 1


def test_a_drafter_that_has_no_copies_is_asked_as_far_as_confidence_goes() -> None:
    policy, batch = started(1)
    policy.k = 2
    assert policy.choose(batch) == LONGEST_AUTO
    draft = policy.select(batch, Draft(torch.full((1, 2), RIGHT), torch.tensor([2]), confidence=[[0.9, 0.9]]))
    verdict = Verdict(torch.full((1, 3), RIGHT), torch.tensor([2]), draft.counts)
    batch.commit(verdict)
    policy.observe(batch, verdict)
    assert batch.history.all_kept[:2].tolist() == [1, 1]


def test_auto_of_a_hybrid_drafter_beside_a_flat_target_weighs_both_kinds() -> None:
    flat = make_engine(FlatToy(), FlatToy(blur=0.3), drafter="hybrid", num_speculative_tokens="auto", attention="auto")
    assert isinstance(flat.parts.policy, HybridLength)
    assert "drafter ngram or toy(blur=0.3)" in flat.describe()
    padded = make_engine(ToyModel(), ToyModel(blur=0.3), drafter="hybrid", num_speculative_tokens="auto")
    assert type(padded.parts.policy) is GoodputLength
