"""Prompts that a draft model reads, counted in tokens."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from paceline.config import SamplingParams
from paceline.core.batch import Batch, SpeculationPlan
from paceline.engine.engine import Engine
from paceline.lengths.auto import AutoLength
from paceline.lengths.base import FixedLength
from paceline.lengths.cost import CostModel
from paceline.lengths.records import RunningMean
from simulation import LENGTHS, SIZES, DraftSimulation, linear_costs
from toy import FlatToy, ToyModel, answers, make_engine, run

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = [1 + i % 7 for i in range(41)]  # of which prefill reads 40
# Beyond eight tokens a round each costs nearly as much as a plain one: eight rows gain by draft tokens that are hardly
# ever wrong, one row by almost any.
COSTS = replace(
    linear_costs(draft_step=0.5), verify=tuple(tuple(10.0 + max(0, b * (k + 1) - 8) for k in LENGTHS) for b in SIZES)
)


def engine_with(kind: type[ToyModel] = ToyModel) -> tuple[Engine, list[int]]:
    """With the target as its own draft model; and how many tokens that read, pass by pass, but for its drafting."""
    engine = make_engine(kind(), kind(), drafter="model", max_batch_size=8, attention="auto")
    (draft,), read = engine.parts.drafter.decoders, []
    original = draft.prefill

    def prefill(batch: Batch, rows: list[int], starts: list[int], stops: list[int]) -> None:
        read.append(sum(stops) - sum(starts))
        original(batch, rows, starts, stops)

    draft.prefill = prefill  # type: ignore[method-assign, assignment]
    return engine, read


def policy_with(chance: float | None) -> AutoLength:
    """A policy with 200 rounds of a draft model of this acceptance; None: no rounds."""
    policy = AutoLength(CostModel(COSTS), [], copies=False)
    for place in range(200 if chance is not None else 0):
        policy.model_drafts.learn([[(0, place % 10 < 10 * (chance or 0.0))] * 4], [0])
    return policy


def test_expects_to_draft_follows_the_record() -> None:
    """Eight rows need a higher acceptance than one, and than the prior of an unknown draft model."""
    hopes = {
        chance: [policy_with(chance).expects_to_draft(rows) for rows in (1, 8)] for chance in (None, 0.9, 0.5, 0.0)
    }
    assert hopes == {None: [True, False], 0.9: [True, True], 0.5: [True, False], 0.0: [False, False]}


@pytest.mark.parametrize("chance", [0.5, 0.9])
def test_recent_gain_decides_whatever_the_acceptance(chance: float) -> None:
    """Scores tell which of them are right, of which their mean chance says nothing."""
    policy = policy_with(chance)
    policy.model_drafts.gains[8] = RunningMean(0.1)
    assert policy.expects_to_draft(8)
    policy.model_drafts.gains[8] = RunningMean(-0.1)
    assert not policy.expects_to_draft(8)


def test_an_uncertain_gain_gets_an_allowance_of_its_standard_error() -> None:
    policy = policy_with(0.5)
    policy.model_drafts.gains[8] = brought = RunningMean(-0.1)
    for value in (-1.0, 0.7):
        brought.learn(value)
    assert brought.value < 0
    assert policy.expects_to_draft(8)


@pytest.mark.parametrize(("n", "chance", "tokens"), [(1, 0.5, 40), (8, None, 0), (8, 0.9, 40), (8, 0.5, 0)])
def test_no_draft_model_reads_a_prompt_before_the_first_token_that_it_is_not_wanted_for(
    n: int, chance: float | None, tokens: int
) -> None:
    """All n answers begin at once, so the policy is asked about n rows for each of them."""
    engine, read = engine_with()
    policy, engine.parts.policy = policy_with(chance), FixedLength(0)
    engine.parts.policy.expects_to_draft = policy.expects_to_draft  # type: ignore[method-assign]
    run(engine, [PROMPT], [SamplingParams(temperature=1.0, n=n, max_tokens=3, seed=1)])
    assert sum(read) == tokens


class Late(FixedLength):
    """Reads no prompt beforehand; drafts for one row, then for all."""

    def __init__(self, plain: int, only: int | None) -> None:
        super().__init__(3)
        self.plain, self.only, self.rounds = plain, only, 0

    def expects_to_draft(self, rows: int) -> bool:
        assert rows == 8
        return False

    def choose(self, batch: Batch) -> SpeculationPlan:
        self.rounds += 1
        if self.rounds <= self.plain:
            return SpeculationPlan(0)
        one = self.rounds == self.plain + 1 and self.only is not None
        return SpeculationPlan(3, [3 * (row == self.only) for row in range(batch.rows)] if one else None)


@pytest.mark.parametrize("only", [None, 0, 5])
@pytest.mark.parametrize("kind", [ToyModel, FlatToy])
def test_a_prompt_that_was_not_read_is_read_once_for_all_answers_when_it_is_wanted(
    kind: type[ToyModel], only: int | None
) -> None:
    engine, read = engine_with(kind)
    engine.parts.policy = Late(5, only)
    surprises: list[int] = []
    (draft,), catch_up = engine.parts.drafter.decoders, engine.parts.drafter.decoders[0].catch_up

    def watched(batch: Batch) -> None:
        expected = sum(draft.missing_tokens(batch)) - batch.rows - draft.spared(batch) + sum(read)
        catch_up(batch)
        surprises.append(expected - sum(read))

    draft.catch_up = watched  # type: ignore[method-assign]
    params = SamplingParams(temperature=1.0, n=8, max_tokens=30, seed=1, ignore_eos=True)
    (output,) = run(engine, [PROMPT], [params])
    assert answers([output]) == answers(run(make_engine(kind(), max_batch_size=8), [PROMPT], [params]))
    rounds = 5 if only is None else 6
    first = engine.parts.target.reads_ends  # the row that read the prompt gained a token with it
    assert sum(read) == 40 + 8 * rounds + first  # the prompt, and what each row gained before all were asked
    assert len(surprises) == 1 + (only is not None)
    assert set(surprises) == {0}  # a policy knows beforehand how much that is
    measured = [answer.metrics for answer in output.outputs]
    assert sum(m.accepted for m in measured) == sum(m.drafted for m in measured) > 8 * 15  # it has read all there is


def read_by(rows: int, chance: float) -> list[int]:
    """Tokens that a draft model reads for each of five batches of ``rows`` prompts of 200 tokens."""
    rng, counts = random.Random(1), [0]
    draft_token = [(0.9, True)] * 4, [(0.9, False)] * 4
    simulation = DraftSimulation(COSTS, lambda _: draft_token[rng.random() >= chance], rows, prompt=200, asks=True)
    policy = AutoLength(CostModel(COSTS), [simulation.reader], copies=False)  # type: ignore[list-item]
    for _ in range(5):
        simulation.play(policy)
        counts.append(simulation.read)
    return [after - before for before, after in pairwise(counts)]


def test_prompts_are_read_for_draft_tokens_that_are_right_and_else_for_a_trial_row() -> None:
    assert read_by(1, 0.9) == [199] * 5, "at once, and once"
    assert max(read_by(8, 0.0)) < 2 * 199, "each of the eight rows would have to read as much"
