"""Prompts that a draft model reads, counted in tokens."""

from __future__ import annotations

import math
import random
import time
from dataclasses import replace
from itertools import pairwise

import pytest

from paceline.config import SamplingParams
from paceline.core.batch import Batch, RowStart, SpeculationPlan
from paceline.engine.engine import Engine
from paceline.lengths.auto import AutoLength
from paceline.lengths.base import FixedLength, UnreadPrompt
from paceline.lengths.cost import CostModel
from simulation import LENGTHS, SIZES, DraftSimulation, Reader, linear_costs
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
    policy = AutoLength(CostModel(COSTS), [Reader(8)], copies=False)  # type: ignore[list-item]
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
def test_recent_rounds_decide_whatever_the_acceptance(chance: float) -> None:
    """Scores tell which of them are right, of which their mean chance says nothing."""
    for tokens in (1.0, 2.0):
        policy = policy_with(chance)
        plain_ms = policy.costs.times(8, policy.costs.table.context).plain
        for _ in range(20):
            policy.model_drafts.learn_speed(8, tokens, 1.5 * plain_ms, 0.1 * plain_ms)
        assert policy.expects_to_draft(8) == (tokens > 1.5)


def slow_reader(gain: float) -> AutoLength:
    """A policy whose draft model reads a token in 1 ms and gains this many tokens per row of a round of 10 ms."""
    costs = linear_costs(verify=10.0, token=0.0, feed_tokens=(1, 400), feed=(1.0, 400.0))
    policy = AutoLength(CostModel(costs), [Reader(8)], copies=False)  # type: ignore[list-item]
    policy.model_drafts.speed = lambda _rows: 1 + gain  # type: ignore[method-assign]
    return policy


@pytest.mark.parametrize(("rows", "sharing", "least"), [(8, 8, 440), (8, 1, 3520), (1, 1, 440)])
def test_a_prompt_is_read_if_what_is_left_of_its_answers_repays_it(rows: int, sharing: int, least: int) -> None:
    """At a speed of 1.1, 440 tokens repay the 40 rounds of each row that reading takes, for one row or for all."""
    policy = slow_reader(0.1)
    assert not policy.reads_prompt(rows, UnreadPrompt(400, sharing, least - 1))
    assert policy.reads_prompt(rows, UnreadPrompt(400, sharing, least + 1))
    assert policy.reads_prompt(rows, UnreadPrompt(0, sharing, 1))
    assert not policy.reads_prompt(rows, UnreadPrompt(400, sharing, math.inf, seconds=0.01 * (least - 1)))
    assert policy.reads_prompt(rows, UnreadPrompt(400, sharing, math.inf, seconds=0.01 * (least + 1)))
    assert not slow_reader(-0.1).reads_prompt(rows, UnreadPrompt(0, sharing, math.inf))


@pytest.mark.parametrize(("tokens", "reads"), [(60, False), (600, True)])
def test_eight_short_answers_do_not_wait_for_a_draft_model_that_saves_little(tokens: int, reads: bool) -> None:
    """Nine draft tokens of ten are right and save a fifth of the time, but reading takes as long as 40 rounds."""
    costs = linear_costs(verify=4.0, token=0.75, feed_tokens=(1, 400), feed=(1.0, 400.0))
    rng = random.Random(1)
    simulation = DraftSimulation(costs, lambda _: [(0.9, rng.random() < 0.9)], 8, tokens, prompt=400, asks=True)
    simulation.one_prompt, simulation.reader.prompt = True, 400
    policy = AutoLength(CostModel(costs), [simulation.reader], copies=False)  # type: ignore[list-item]
    for place in range(200):
        policy.model_drafts.learn([[(0, place % 10 < 9)]], [0])
    assert simulation.play(policy) <= 1.01 * tokens * costs.verify_ms(8, 0) / 1000
    assert (simulation.read > 0) == reads


@pytest.mark.parametrize("rounds", ["host", "device"])
def test_an_answer_is_expected_to_be_as_long_as_recent_ones(rounds: str) -> None:
    """Those that are cut or still run count with their tokens."""
    engine = make_engine(ToyModel(), max_batch_size=4, rounds=rounds, attention="padded")
    assert engine.batch.expected_tokens == math.inf
    params = SamplingParams(temperature=1.0, n=4, max_tokens=12, seed=3, stop_token_ids=[3])
    (output,) = run(engine, [PROMPT], [params])
    ends = [answer.finish_reason for answer in output.outputs]
    assert set(ends) == {"stop", "length"}
    tokens = sum(len(answer.token_ids) for answer in output.outputs)
    assert engine.batch.expected_tokens == pytest.approx(tokens / ends.count("stop"), rel=0.05)


def test_a_draft_model_that_fell_behind_catches_up_only_for_answers_that_are_expected_to_repay_it() -> None:
    """However many tokens the request allows, and within its time budget: 200 plain rounds take 2 seconds."""

    def chosen(expected_tokens: float, seconds: float) -> int:
        batch = Batch(1, 10_000, 8)
        start = RowStart([1] * 400, SamplingParams(max_tokens=9_000), 1, deadline=time.monotonic() + seconds)
        batch.set_row(0, start)
        batch.set_live([0])
        batch.expected_tokens = expected_tokens
        return slow_reader(0.1).choose(batch).k

    assert chosen(math.inf, math.inf) > 0
    assert chosen(200.0, math.inf) == 0
    assert chosen(math.inf, 2.0) == 0
    assert chosen(500.0, 5.0) > 0


def test_a_prompt_whose_prefix_the_draft_model_has_cached_needs_only_its_rest_to_be_repaid() -> None:
    engine, read = engine_with()
    asked: list[UnreadPrompt] = []
    engine.parts.policy.reads_prompt = lambda rows, prompt: asked.append(prompt) or True  # type: ignore[method-assign]
    params = SamplingParams(temperature=0, max_tokens=1)
    for prompt in (PROMPT, [*PROMPT, 1, 2, 3]):
        run(engine, [prompt], [params])
    assert [prompt.tokens for prompt in asked] == [40, 3]
    assert read == [40, 3]


@pytest.mark.parametrize(("n", "chance", "tokens"), [(1, 0.5, 40), (8, None, 0), (8, 0.9, 40), (8, 0.5, 0)])
def test_no_draft_model_reads_a_prompt_before_the_first_token_that_it_is_not_wanted_for(
    n: int, chance: float | None, tokens: int
) -> None:
    """All n answers begin at once, so the policy is asked about n rows for each of them."""
    engine, read = engine_with()
    policy = policy_with(chance)
    engine.use_policy(FixedLength(0))
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
    engine.use_policy(Late(5, only))
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
    costs = replace(COSTS, feed_tokens=(1, 401), feed=(0.25, 100.25))
    simulation = DraftSimulation(costs, lambda _: draft_token[rng.random() >= chance], rows, prompt=200, asks=True)
    policy = AutoLength(CostModel(costs), [simulation.reader], copies=False)  # type: ignore[list-item]
    for _ in range(5):
        simulation.play(policy)
        counts.append(simulation.read)
    return [after - before for before, after in pairwise(counts)]


def test_prompts_are_read_for_draft_tokens_that_are_right_and_else_for_a_trial_row() -> None:
    assert read_by(1, 0.9) == [199] * 5, "at once, and once"
    assert max(read_by(8, 0.0)) < 2 * 199, "each of the eight rows would have to read as much"
