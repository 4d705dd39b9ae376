"""``auto``: what it drafts, verifies and learns, given acceptance and costs, for each kind of drafts."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import mean, median
from typing import cast

import numpy as np
import pytest
import torch

from batches import filled
from paceline.config import EngineConfig, SamplingParams
from paceline.core.batch import Batch, RowStart, SpeculationPlan
from paceline.core.draft import Draft, HostVerdict, Verdict
from paceline.engine.engine import Engine, Request
from paceline.lengths.auto import AutoLength
from paceline.lengths.base import FixedLength, LengthPolicy
from paceline.lengths.calibration import Calibration, Grid
from paceline.lengths.cost import CostModel, CostTable, RoundTimes
from paceline.lengths.records import RunningMean
from paceline.lengths.scores import LONGEST_AUTO, bins_of
from paceline.lengths.sources import PRIOR_TOKENS
from paceline.models.draft_decoder import DraftDecoder
from simulation import LENGTHS, RIGHT, SIZES, WRONG, DraftSimulation, Reader, Simulation, linear_costs, with_timing
from toy import FlatToy, ToyModel, answers, make_engine, run

pytestmark = pytest.mark.usefixtures("one_thread")

ScriptedToken = tuple[float, bool]
Kind = Callable[[random.Random, int], list[ScriptedToken]]  # draft tokens at a position of the text
WEAK, STRONG = 1 / 9, 25 / 33  # scores of n-gram drafts after one matched token, and after five


# --- drafts that are not seen before verification: judged by position --------------------------------------

FREE = linear_costs()  # 10 ms and 0.25 ms a token
DEAR = linear_costs(token=1.0, draft_step=1.0)
DRAFT_MODEL = linear_costs(draft_step=3.5)
COSTS = {"free": FREE, "dear": DEAR, "draft model": DRAFT_MODEL}


def best_length(costs: CostTable, acceptance: float, rows: int) -> int:
    def rate(k: int) -> float:
        return rows * sum(acceptance**place for place in range(k + 1)) / costs.round_ms(rows, k)

    return max(range(LONGEST_AUTO + 1), key=rate)


def blind(simulation: Simulation, costs: CostTable) -> AutoLength:
    return AutoLength(CostModel(costs), ranks=False)


@pytest.mark.parametrize("rows", [1, pytest.param(4, marks=pytest.mark.slow), 16])
@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("name", COSTS)
@pytest.mark.one_in(11)
def test_it_finds_the_length_that_pays_best(name: str, acceptance: float, rows: int) -> None:
    costs, goodput = COSTS[name], {}
    fixed = {0, best_length(costs, acceptance, rows)}
    for policy in ("auto", *fixed):
        simulation = Simulation(costs, lambda row, place: acceptance)
        simulation.rows(rows)
        simulation.play(FixedLength(policy) if isinstance(policy, int) else blind(simulation, costs), 500)
        goodput[policy] = simulation.goodput
    assert goodput["auto"] > 0.93 * max(goodput[k] for k in fixed)
    assert goodput["auto"] > 0.98 * goodput[0]


class Captures:
    """A device that captures rounds at their first use, for ``capture_ms`` each."""

    def __init__(self, capture_ms: float, *captured: int) -> None:
        self.capture_ms, self.captured = capture_ms, list(captured)

    def is_captured(self, k: int, /) -> bool:
        return k in self.captured


def lengths_on(device: Captures, rounds: int = 300) -> list[int]:
    """The length of each round of four rows whose draft tokens are mostly right."""

    class Launched(AutoLength):
        def choose(self, batch: Batch) -> SpeculationPlan:
            plan = super().choose(batch)
            lengths.append(plan.k)
            if not device.is_captured(plan.k):
                device.captured.append(plan.k)
            return plan

    lengths: list[int] = []
    simulation = Simulation(FREE, lambda row, place: 0.8)
    simulation.rows(4)
    simulation.play(Launched(CostModel(FREE), ranks=False, device=device), rounds)
    return lengths


def test_a_length_is_captured_once_the_captured_ones_have_cost_as_much_as_a_capture() -> None:
    at_once, later, never = (Captures(ms, 0, 1) for ms in (0.0, 40.0, 1e9))
    free, waiting, thrifty = (lengths_on(device) for device in (at_once, later, never))
    assert set(thrifty) <= {0, 1}
    assert never.captured == [0, 1]
    usual = max(set(free), key=free.count)
    assert usual > 1
    first = next(place for place, k in enumerate(waiting) if k > 1)
    assert next(place for place, k in enumerate(free) if k > 1) < first < 40  # a round takes some 12 ms
    assert max(set(waiting), key=waiting.count) > 1
    assert len(later.captured) <= len(at_once.captured)


def test_without_any_captured_length_the_best_is_captured_at_once() -> None:
    assert lengths_on(Captures(1e9, 0), 40)[0] == lengths_on(Captures(0.0, 0), 40)[0] > 0


def test_costs_that_were_measured_wrongly_are_corrected_by_real_rounds() -> None:
    simulation = Simulation(FREE, lambda row, place: 0.8)
    simulation.rows(4)
    simulation.play(blind(simulation, linear_costs(verify=3.0, token=1.0, draft_step=2.0)), 600)
    assert mean(simulation.asked[300:]) == pytest.approx(best_length(FREE, 0.8, 4), abs=2)


@pytest.mark.parametrize("factor", [3, 1 / 3], ids=["too long", "too short"])
def test_a_table_that_is_wrong_threefold_is_replaced_by_real_rounds_within_50(factor: float) -> None:
    """The same lengths and speed as with the right table, from round 50 to 150."""
    right, asked, speed = {"verify": 10.0, "token": 0.5, "draft_step": 0.7}, [], []
    for scale in (1, factor):
        simulation = Simulation(linear_costs(**right), lambda row, place: 0.9, seed=3)
        simulation.rows(16)
        policy = blind(simulation, linear_costs(**{name: scale * ms for name, ms in right.items()}))
        simulation.play(policy, 50)
        began, had = simulation.now, simulation.tokens
        simulation.play(policy, 100)
        asked.append(mean(simulation.asked[50:]))
        speed.append((simulation.tokens - had) / (simulation.now - began))
    assert asked[1] == pytest.approx(asked[0], abs=1)
    assert speed[1] > 0.97 * speed[0]


@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize("name", ["dear", "draft model"])
@pytest.mark.one_in(11)
def test_where_no_draft_token_is_kept_trials_cost_less_than_one_percent(name: str, rows: int) -> None:
    simulation = Simulation(COSTS[name], lambda row, place: 0.0)
    simulation.rows(rows)
    simulation.play(blind(simulation, COSTS[name]), 3000)
    asked = np.array(simulation.asked[50:])
    plain = COSTS[name].round_ms(rows, 0, 1600)
    lost = sum(COSTS[name].round_ms(rows, int(k), 1600) - plain for k in asked)
    assert 0 < lost / (plain * len(asked)) < 0.01
    gaps = np.diff(np.flatnonzero(asked))
    assert gaps.max() <= 150
    assert gaps.min() >= 16


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.one_in(11)
def test_draft_tokens_that_become_good_are_noticed_within_about_100_rounds(rows: int) -> None:
    delays = []
    for seed in range(9):
        rate = [0.0]
        simulation = Simulation(DRAFT_MODEL, lambda row, place, rate=rate: rate[0], seed=seed)  # type: ignore[misc]
        simulation.rows(rows)
        policy = blind(simulation, DRAFT_MODEL)
        simulation.play(policy, 700 + 7 * seed)
        assert sum(k > 0 for k in simulation.asked[-16:]) <= 1, "perhaps a trial"
        rate[0] = 0.95
        while not all(simulation.asked[-3:]):
            simulation.play(policy)
        delays.append(len(simulation.asked) - 700 - 7 * seed)
    assert median(delays) <= 100
    assert max(delays) <= 200  # the first trial may be unlucky


@pytest.mark.parametrize(("rows", "rounds"), [(1, 10), (16, 2)])
def test_draft_tokens_that_become_bad_are_noticed_within_a_few_rounds(rows: int, rounds: int) -> None:
    rate = [0.9]
    simulation = Simulation(DRAFT_MODEL, lambda row, place: rate[0])
    simulation.rows(rows)
    policy = blind(simulation, DRAFT_MODEL)
    simulation.play(policy, 300)
    rate[0] = 0.0
    simulation.play(policy, rounds + 1)
    assert 0 in simulation.asked[-rounds - 1 :]
    assert simulation.asked[-1] <= 1
    simulation.play(policy, 20)
    assert simulation.asked[-5:] == [0] * 5


def test_a_length_per_batch_size_that_falls_as_the_batch_grows() -> None:
    simulation = Simulation(FREE, lambda row, place: 0.7)
    policy, lengths = blind(simulation, FREE), []
    for rows in (1, 4, 16, 1):
        simulation.rows(rows)
        simulation.play(policy, 300)
        lengths.append(mean(simulation.asked[-100:]))
    assert lengths[0] > lengths[1] > lengths[2]
    assert lengths[3] > lengths[1]


PHASES = ((1, 0.9), (16, 0.9), (16, 0.1), (1, 0.1), (1, 0.9))


@pytest.mark.parametrize("name", COSTS)
@pytest.mark.one_in(11)
def test_through_changing_phases_it_stays_near_an_oracle_and_beats_every_fixed_length(name: str) -> None:
    def seconds(policy_name: int | str) -> list[float]:
        rate = [0.0]
        simulation = Simulation(COSTS[name], lambda row, place: rate[0], seed=1)
        policy = FixedLength(policy_name) if isinstance(policy_name, int) else blind(simulation, COSTS[name])
        each = []
        for rows, rate[0] in PHASES:
            simulation.rows(rows)
            began, had = simulation.now, simulation.tokens
            while simulation.tokens - had < 700 * rows:
                simulation.play(policy)
            each.append((simulation.now - began) / (simulation.tokens - had) * 700 * rows)
        return each

    fixed = [seconds(k) for k in (0, 1, 2, 4, 8)]
    oracle = sum(min(each[phase] for each in fixed) for phase in range(len(PHASES)))
    mine = sum(seconds("auto"))
    assert mine < 1.05 * oracle
    assert mine < min(sum(each) for each in fixed)


# --- a draft model that falls behind ------------------------------------------------------------------


class Behind(Reader):
    """A draft model's cache with a fixed number of missing tokens per row."""

    def __init__(self, lacks: list[int]) -> None:
        self.lacks = lacks

    def missing_tokens(self, batch: Batch) -> list[int]:
        return [1 + lack for lack in self.lacks[: batch.rows]]


def decoders(reader: Reader) -> list[DraftDecoder]:
    return [cast(DraftDecoder, reader)]


def test_drafting_is_charged_for_the_missing_tokens_that_are_read_first() -> None:
    costs = linear_costs(draft_step=1.0, feed_tokens=(1, 1000), feed=(1.0, 1000.0))
    chosen = {}
    for lack in (0, 3_000_000):
        simulation = Simulation(costs, lambda row, place: 0.7)
        simulation.rows(4)
        policy = AutoLength(CostModel(costs), decoders(Behind([lack] * 4)), ranks=False)
        chosen[lack] = policy.choose(simulation.batch).k
    assert chosen[0] > 0
    assert chosen[3_000_000] == 0


@pytest.mark.parametrize("ranks", [True, False])
def test_a_trial_drafts_only_for_the_row_with_the_fewest_missing_tokens(ranks: bool) -> None:
    costs = linear_costs(draft_step=4.0, feed_tokens=(1, 1000), feed=(0.1, 100.0))
    simulation = Simulation(costs, lambda row, place: 0.0)
    simulation.rows(4)
    behind = Behind([0, 0, 0, 0])
    policy = AutoLength(CostModel(costs), decoders(behind), False, ranks)
    plan = SpeculationPlan(0)
    for number in range(800):
        behind.lacks = [300, 200, 2, 200] if number > 60 else [0] * 4
        plan = policy.choose(simulation.batch)
        if number > 60 and plan.k:
            break
        drafted, draft_ms = [0] * 4, 0.0
        if plan.k:
            draft_ms = costs.draft_ms(4, 1)
            assert plan.stop_drafting is None or plan.stop_drafting(simulation.batch, [[0.9]] * 4) in (True, False)
            wrong = Draft(torch.full((4, 1), RIGHT), torch.ones(4, dtype=torch.int64), confidence=[[0.9]] * 4)
            drafted = policy.select(simulation.batch, wrong).counts.tolist()
        verdict = verdict_of([[WRONG]] * 4, drafted)
        policy.observe(simulation.batch, with_timing(verdict, plan, draft_ms, costs.verify_ms(4, 0)))
    assert plan.caps == [0, 0, plan.k, 0]
    assert plan.k == 1 or ranks


def verdict_of(gained: list[list[int]], drafted: list[int]) -> Verdict:
    width = max(len(line) for line in gained)
    table = torch.tensor([line + [0] * (width - len(line)) for line in gained])
    return Verdict(table, torch.tensor([len(line) - 1 for line in gained]), torch.tensor(drafted))


class Script(LengthPolicy):
    """Plans the given k round by round, then the last one again; for one row alone if ``only`` is given."""

    name = "script"

    def __init__(self, lengths: list[int], only: int | None = None) -> None:
        self.lengths, self.only = lengths, only
        self.kept = self.drafted = 0

    def choose(self, batch: Batch) -> SpeculationPlan:
        k = self.lengths.pop(0) if len(self.lengths) > 1 else self.lengths[0]
        if k == 0 or self.only is None:
            return SpeculationPlan(k)
        return SpeculationPlan(k, [k if row == self.only else 0 for row in range(batch.rows)])

    def observe(self, batch: Batch, verdict: Verdict) -> None:
        self.kept += sum(verdict.host.accepted)
        self.drafted += sum(verdict.host.drafted)


@pytest.mark.parametrize("only", [None, 0, 1, 2])
@pytest.mark.one_in(11)
def test_after_500_plain_rounds_the_draft_models_cache_is_right(only: int | None) -> None:
    model = ToyModel(max_positions=700)
    engine = make_engine(
        model, ToyModel(max_positions=700), drafter="model", num_speculative_tokens=3, max_model_len=700
    )
    script = engine.parts.policy = Script([0] * 500 + [2, 0, 0, 0, 3, 1, 4], only)
    params = [SamplingParams(temperature=0, max_tokens=560, ignore_eos=True)] * 3
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]
    plain = make_engine(model, max_model_len=700)
    assert answers(run(engine, prompts, params)) == answers(run(plain, prompts, params))
    assert script.kept == script.drafted > 30  # the draft model is the target: every draft token is right


@pytest.mark.parametrize("lengths", [[0, 0, 2, 0, 1], [1, 1, 0, 2]])
def test_drafts_that_were_only_timed_leave_nothing_behind(lengths: list[int]) -> None:
    """Otherwise a first round without draft tokens, or with one row's, would be judged as the timed ones."""
    engine = make_engine(ToyModel(), ToyModel(), drafter="model", num_speculative_tokens=1)
    parts = engine.parts
    Calibration(parts.target, parts.drafter, parts.accept, Grid((1, 2), (0, 2), seconds=0.0)).run()
    parts.policy = Script(lengths, only=1)
    params = [SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)] * 2
    plain = run(make_engine(ToyModel()), [[1, 2, 3], [4]], params)
    assert answers(run(engine, [[1, 2, 3], [4]], params)) == answers(plain)


@pytest.mark.parametrize("rounds", ["host", "device"])
def test_a_draft_model_that_cannot_pay_reads_no_prompts_and_catches_up_when_it_can(rounds: str) -> None:
    """From the third token of a round on, each costs as much as a plain one: one row gains, two do not."""
    times = tuple(tuple(max(10.0, 5.0 * b * (k + 1)) for k in LENGTHS) for b in SIZES)
    engine = make_engine(
        ToyModel(), ToyModel(), drafter="model", num_speculative_tokens="auto", rounds=rounds, attention="padded"
    )
    policy = engine.parts.policy
    assert isinstance(policy, AutoLength)
    policy.costs = CostModel(replace(linear_costs(), verify=times))
    assert policy.expects_to_draft(1)
    assert not policy.expects_to_draft(2)
    (draft,), read = engine.parts.drafter.decoders, []
    prefill = draft.prefill
    draft.prefill = lambda *args: (read.append(engine.batch.rows), prefill(*args))[1]  # type: ignore[method-assign]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (20, 3, 2)]
    prompts = [[1, 2, 3, 4] * 8, [5, 6, 7], [8, 9, 10]]
    outputs = run(engine, prompts, params)
    assert answers(outputs) == answers(run(make_engine(ToyModel()), prompts, params))
    assert read == ([1] if rounds == "host" else [])  # the last row left: caught up in a round, not while admitted
    metrics = outputs[0].outputs[0].metrics
    assert metrics.accepted == metrics.drafted > 5  # the draft model is the target: it has read all there is
    assert not any(output.outputs[0].metrics.accepted for output in outputs[1:])


def test_a_trial_takes_a_row_that_allows_draft_tokens() -> None:
    """A row that allows no draft tokens may always have the fewest missing ones, and would block all trials."""
    costs = linear_costs(draft_step=4.0)
    for ranks in (True, False):
        policy, batch = AutoLength(CostModel(costs), decoders(Behind([0, 3])), False, ranks), batch_of(2)
        batch.max_draft_tokens[0] = 0
        policy.model_drafts.gains[2] = RunningMean(-100.0)
        policy.model_drafts.budget._ms = policy.model_drafts.budget._price = 1e6
        policy.model_drafts.learn([[(bins_of(1)[0], False)]] * 100, range(100))
        plan = policy.choose(batch).within(batch)
        assert plan.caps is not None
        assert plan.caps[0] == 0
        assert plan.caps[1] > 0


def test_a_plain_check_that_was_paid_for_runs_although_there_are_ngram_drafts() -> None:
    policy, batch = started()
    policy.model_drafts.gains[1], policy.ngram_drafts.gains[0] = RunningMean(0.1), RunningMean(0.1)
    policy._had_drafts, policy._budget._ms, policy._budget._price = True, 5.0, 5.0  # for one of them
    assert policy.choose(batch).k == 0
    assert policy._budget._ms < 5.0


# --- engines --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", ["model", "ngram", "hybrid"])
@pytest.mark.parametrize("toy", [ToyModel, FlatToy])
@pytest.mark.one_in(11)
def test_the_default_is_auto_and_lossless(toy: Callable[..., ToyModel], drafter: str) -> None:
    draft = None if drafter == "ngram" else toy(blur=0.3)
    assert EngineConfig().num_speculative_tokens == "auto"
    engine = make_engine(toy(), draft, drafter=drafter, num_speculative_tokens="auto", attention="auto")
    assert isinstance(engine.parts.policy, AutoLength)
    assert engine.parts.policy.reads_drafts == (toy is FlatToy)
    assert "length auto, " in engine.describe()
    params = [SamplingParams(temperature=t, seed=i, max_tokens=40) for i, t in enumerate((0, 1.0, 0.5, 0, 2.0, 1.0))]
    prompts = [[1], [2, 3], [4, 5, 6], [7, 8], [9], [10, 11]]
    assert answers(run(engine, prompts, params)) == answers(run(make_engine(ToyModel()), prompts, params))


def test_engines_on_the_same_models_measure_only_once() -> None:
    engine = make_engine(ToyModel(), drafter="ngram", num_speculative_tokens="auto")
    again = Engine(engine.models, engine.config)
    assert len(again.models.costs) == 1
    table = next(iter(engine.models.costs.values()))
    assert all(ms > 0 for line in table.verify for ms in line)
    assert table.batch_sizes == (1, 2, 4)


def test_the_policy_learns_when_sequences_begin_and_end() -> None:
    """Six answers in three slots: join and leave tell which answer is in which slot."""
    engine = make_engine(ToyModel(), max_batch_size=3)

    class Told(FixedLength):
        def __init__(self) -> None:
            super().__init__(0)
            self.rows: dict[int, int] = {}
            self.begun = 0

        def join(self, slot: int) -> None:
            assert slot not in self.rows
            self.rows[slot] = self.begun = self.begun + 1

        def leave(self, slot: int) -> None:
            del self.rows[slot]

        def choose(self, batch: Batch) -> SpeculationPlan:
            assert [self.rows[slot] for slot in batch.slots] == [
                int(sequence.request_id) for sequence in engine.scheduler.running
            ]
            return SpeculationPlan(0)

    engine.parts.policy = told = Told()
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (3, 9, 2, 7, 5, 4)]
    for number, each in enumerate(params, 1):
        engine.add(Request([number], each, request_id=str(number)))
    while engine.busy:
        engine.step()
    assert told.begun == 6
    assert not told.rows


# --- n-gram drafts: free, and each pays for its own verification ----------------------------------------

# Like a CPU: tokens are nearly free while reading the weights takes longest; beyond, each costs 2/3 of a plain one.
CPU = CostTable(
    (1, 2, 4, 8, 16),
    (0, 1, 3, 7),
    100,
    ((7.8, 7.9, 8.2, 9.5), (7.9, 8.2, 9.5, 15.2), (8.2, 9.5, 15.2, 25), (9.5, 15.2, 25, 45), (15.2, 25, 45, 85)),
    (0,) * 5,
    (0,) * 5,
)
SEARCH = 0.25  # ms of a search for n-gram drafts


def copying(simulation: DraftSimulation, costs: CostTable = CPU) -> AutoLength:
    return AutoLength(CostModel(costs))


def batch_of(rows: int, tokens: int = 100) -> Batch:
    params = SamplingParams(temperature=0, max_tokens=tokens)
    return filled([RowStart([1] * 10, params, row) for row in range(rows)], 400, 4)


def select(confidence: list[list[float]], counts: list[int], costs: CostTable) -> tuple[AutoLength, list[int]]:
    policy, batch = AutoLength(CostModel(costs)), batch_of(len(counts))
    policy.ngram_drafts.judged = 1000  # lifts the cap on extra time, but tells nothing about any draft token
    policy.choose(batch)
    tokens = torch.zeros(len(counts), len(confidence[0]), dtype=torch.int64)
    draft = policy.select(batch, Draft(tokens, torch.tensor(counts), confidence=confidence))
    assert draft.k == max(draft.counts.tolist())
    return policy, draft.counts.tolist()


def best_by_trying(
    policy: AutoLength, confidence: list[list[float]], counts: list[int], costs: CostTable
) -> tuple[int, ...]:
    rows, belief = len(counts), policy.ngram_drafts.calibration
    survival = [belief.survivals(row, bins_of(len(line), line)) for row, line in enumerate(confidence)]

    def rate(choice: tuple[int, ...]) -> float:
        tokens = rows + sum(sum(survival[row][:n]) for row, n in enumerate(choice))
        return tokens / costs.verify_ms(rows, sum(choice) / rows)

    return max(itertools.product(*(range(count + 1) for count in counts)), key=rate)


@pytest.mark.parametrize("token", [0.5, 2.0, 5.0, 20.0])
def test_the_chosen_set_has_the_highest_value_of_all_sets(token: float) -> None:
    rng, costs = random.Random(int(token)), linear_costs(verify=30.0, token=token)
    for _ in range(20):
        confidence = [[rng.random() for _ in range(3)] for _ in range(3)]
        counts = [rng.randint(0, 3) for _ in range(3)]
        policy, chosen = select(confidence, counts, costs)
        assert chosen == list(best_by_trying(policy, confidence, counts, costs))


def test_rows_get_draft_tokens_by_their_probabilities_and_a_hopeless_row_none() -> None:
    sure, fair, hopeless = [0.99] * 4, [0.66] * 4, [0.01] * 4
    _, chosen = select([sure, fair, hopeless], [4, 4, 4], linear_costs(verify=30.0, token=8.0))
    assert chosen[0] == 4
    assert chosen[0] > chosen[1]
    assert chosen[2] == 0


@pytest.mark.parametrize("first", range(3))
def test_of_equal_gains_those_of_the_row_with_the_earliest_deadline_come_first(first: int) -> None:
    """Only one is worth verifying: the weights are read anyway for one more token."""
    policy, batch = AutoLength(CostModel(linear_costs())), batch_of(3)
    for row, deadline in enumerate((7.0, 8.0, 9.0)):
        batch.deadlines[(first + row) % 3] = deadline
    policy.choose(batch)
    times = [10.0, 10.1, *(30.0 + 20.0 * more for more in range(40))]
    policy._round.times = RoundTimes(times, times, 0.0, 0)
    counts = policy.select(batch, copied(0.9, rows=3, k=1)).counts.tolist()
    assert counts == [row == first for row in range(3)]


def test_a_rows_deadline_is_its_requests() -> None:
    engine = make_engine(ToyModel(), max_batch_size=3)
    for number, seconds in enumerate((None, 300.0, 100.0)):
        params = SamplingParams(temperature=0, max_tokens=2 + 8 * number, time_budget=seconds, ignore_eos=True)
        engine.add(Request([1, 2], params, arrival=time.monotonic()))
    engine.step()
    assert engine.batch.deadlines[2] < engine.batch.deadlines[1] < engine.batch.deadlines[0] == math.inf
    soonest = engine.batch.deadlines[2]
    while engine.batch.rows == 3:
        engine.step()
    assert engine.batch.deadlines[1] == soonest, "the last row is the second of two"


def test_where_tokens_are_expensive_nothing_is_verified_and_the_round_is_plain() -> None:
    _, chosen = select([[0.9] * 3] * 2, [3, 3], linear_costs(verify=0.0, token=10.0))
    assert chosen == [0, 0]


def coins(chance: dict[int, float], seed: int = 0, score: float = 0.8) -> Callable[[int], list[ScriptedToken]]:
    """Draft tokens of equal score; each is right with probability chance[row] if those before it are."""
    rng = random.Random(seed)
    return lambda row: [(score, rng.random() < chance[row]) for _ in range(8)]


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("rows", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("draining", [False, True], ids=["open", "draining"])
@pytest.mark.one_in(11)
def test_ngram_drafts_that_are_always_wrong_cost_next_to_nothing(rows: int, noise: float, draining: bool) -> None:
    def tokens_a_second(policy: str, seed: int) -> float:
        simulation = DraftSimulation(CPU, lambda row: [(0.95, False)] * 8, rows, noise=noise, seed=seed, look=SEARCH)
        return rows * 64 / simulation.play(copying(simulation) if policy == "auto" else FixedLength(0), draining)

    seeds = range(9 if noise else 1)
    assert mean(tokens_a_second("auto", s) for s in seeds) > 0.975 * mean(tokens_a_second("0", s) for s in seeds)


@pytest.mark.parametrize(
    ("rows", "right", "least", "most"), [(16, False, 0.1, 0.4), (16, True, 1, 1), (2, False, 0.1, 0.5), (2, True, 1, 1)]
)
def test_where_draft_tokens_are_wrong_most_rounds_do_not_even_search(
    rows: int, right: bool, least: float, most: float
) -> None:
    simulation, asked = DraftSimulation(CPU, lambda row: [(0.95, right)] * 8, rows, tokens=256, look=SEARCH), []
    policy = copying(simulation)
    choose = policy.choose
    policy.choose = lambda batch: (asked.append(choose(batch)), asked[-1])[1]  # type: ignore[method-assign]
    simulation.play(policy)
    assert least <= mean(plan.k > 0 for plan in asked) <= most


@pytest.mark.parametrize("noise", [pytest.param(0.0, marks=pytest.mark.slow), 0.1])
@pytest.mark.parametrize("rows", [1, 2, 4, 8, 16])
@pytest.mark.one_in(11)
def test_short_answers_gain_as_much_as_with_the_best_fixed_length(rows: int, noise: float) -> None:
    """Mean seconds until a row ends: rows that differ, 64 tokens, true costs as predicted, noisy times."""
    chance = {row: (0.95, 0.6, 0.2, 0.85)[row % 4] for row in range(rows)}

    def latency(length: str, seed: int) -> float:
        simulation = DraftSimulation(CPU, coins(chance, seed), rows, noise=noise, seed=seed)
        simulation.play(copying(simulation) if length == "auto" else FixedLength(int(length)))
        return mean(simulation.ends.values())

    seeds = range(12)
    fixed = min(mean(latency(k, seed) for seed in seeds) for k in ("0", "1", "2", "4", "8"))
    assert mean(latency("auto", seed) for seed in seeds) < fixed / 0.97


@pytest.mark.parametrize("rows", [2, 8, 16])
def test_a_draining_batch_ends_no_later_for_the_sake_of_its_fast_rows(rows: int) -> None:
    chance = dict.fromkeys(range(rows), 0.9) | {0: 0.0}

    def play(length: str, draining: bool) -> DraftSimulation:
        simulation = DraftSimulation(CPU, coins(chance), rows)
        simulation.play(copying(simulation) if length == "auto" else FixedLength(0), draining)
        return simulation

    plain, drained, hurried = play("0", True), play("auto", True), play("auto", False)
    assert drained.now <= plain.now + 2.5 * CPU.verify_ms(rows, 0) / 1000
    assert mean(hurried.ends.values()) < 0.9 * mean(plain.ends.values())


@pytest.mark.parametrize("rows", [4, 8])
def test_drafts_that_cost_a_draining_batch_more_than_they_gain_are_stopped(rows: int) -> None:
    """An overconfident draft model: its draft tokens pay for their verification, but not for their drafting."""
    costs = linear_costs(verify=2.7, token=0.15, draft_once=0.2, draft_step=0.3)

    def seconds(seed: int) -> float:
        rng = random.Random(seed)
        simulation = DraftSimulation(
            costs, lambda _row: [(0.6, rng.random() < 0.3) for _ in range(8)], rows, tokens=96, seed=seed
        )
        policy = AutoLength(CostModel(costs), [simulation.reader], copies=False)
        return simulation.play(policy, draining=True)

    plain = 96 * costs.verify_ms(rows, 0) / 1000
    assert plain / mean(seconds(seed) for seed in range(8)) > 0.968


def measured(rows: int, paying_rows: int, copies: bool = False) -> tuple[AutoLength, DraftSimulation]:
    """A policy after rounds of drafts that are always right, of a head measured to pay up to ``paying_rows`` rows."""
    costs = linear_costs(verify=10.0, token=0.1, draft_once=0.2, draft_step=0.2)
    simulation = DraftSimulation(costs, lambda _row: [(0.9, True)] * 8, rows, tokens=200)
    simulation.copies = (lambda _row: [(STRONG, True)] * 8) if copies else None
    policy = AutoLength(CostModel(costs), [simulation.reader], copies)
    policy.paying_rows = paying_rows
    simulation.play(policy)
    return policy, simulation


def test_the_draft_model_is_not_used_for_more_rows_than_it_was_measured_to_pay_at() -> None:
    """Not even as a trial: the measurement showed that the table's times are wrong for them."""
    policy, simulation = measured(4, paying_rows=2)
    assert max(simulation.asked) == 0
    assert [policy.expects_to_draft(rows) for rows in (2, 3)] == [True, False]
    assert simulation.now == pytest.approx(200 * simulation.costs.verify_ms(4, 0) / 1000)
    _, simulation = measured(2, paying_rows=2)
    assert mean(map(bool, simulation.asked)) > 0.9


def test_ngram_drafts_are_used_at_any_number_of_rows() -> None:
    _, simulation = measured(4, paying_rows=2, copies=True)
    assert max(simulation.asked) == 0
    assert mean(map(sum, simulation.verified)) > 4


def test_without_any_source_the_back_off_lasts_until_the_rows_change() -> None:
    policy, simulation = measured(4, paying_rows=2)
    looked = look_ups(policy)
    simulation.play(policy)
    assert len(looked) < 200 / 4


def look_ups(policy: AutoLength) -> list[float]:
    """Rows of each cost look-up from now on."""
    looked: list[float] = []
    times = policy.costs.times
    policy.costs.times = lambda rows, context: (looked.append(rows), times(rows, context))[1]  # type: ignore[func-returns-value, method-assign]
    return looked


def resting() -> tuple[Simulation, AutoLength, list[float]]:
    """A policy after many rounds of eight rows with wrong draft tokens only, and its cost look-ups since."""
    costs = linear_costs(draft_step=4.0)
    simulation = Simulation(costs, lambda row, place: 0.0)
    simulation.rows(8)
    policy = AutoLength(CostModel(costs), [Reader(16)], copies=False)  # type: ignore[list-item]
    simulation.play(policy, 100)
    return simulation, policy, look_ups(policy)


def test_where_nothing_pays_it_backs_off_until_a_trial_is_affordable() -> None:
    """Decisions take time, too: a few percent of a small model's rounds."""
    simulation, policy, looked = resting()
    simulation.asked.clear()
    simulation.play(policy, 200)
    assert len(looked) < 50
    assert any(simulation.asked)  # trials go on


def test_a_price_that_rises_as_fast_as_the_budget_ends_no_back_off_early() -> None:
    """The missing tokens of a draft model grow round by round, and with them the price of a trial."""
    simulation, policy, looked = resting()
    asked_at: list[int] = []

    def missing(_batch: Batch) -> list[int]:
        asked_at.append(len(simulation.asked))
        return [2 + asked_at[-1]] * 8

    policy.decoders[0].missing_tokens = missing  # type: ignore[method-assign]
    policy.costs.feed_ms = lambda tokens: 0.01 * tokens  # type: ignore[method-assign]
    simulation.asked.clear()
    simulation.play(policy, 200)
    assert not any(simulation.asked)
    assert len(looked) < 30


def test_more_or_fewer_rows_end_the_back_off() -> None:
    simulation, policy, looked = resting()
    for rows in (9, 7):
        while not policy._backoff._left > 1:
            simulation.play(policy)
        before = len(looked)
        simulation.rows(rows)
        simulation.play(policy)
        assert len(looked) > before


def test_draft_tokens_that_are_not_verified_are_learned_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """No draft token pays, so none is verified. The gained tokens still show that they were right."""
    monkeypatch.setattr("paceline.lengths.records.EXPLORATION_SHARE", 0.0)
    dear = linear_costs(verify=0.0, token=10.0)
    simulation = DraftSimulation(dear, lambda row: [(0.5, True)] * 4, rows=4, tokens=16)
    policy = copying(simulation, dear)
    found: list[float] = []
    observe = policy.observe
    policy.observe = lambda batch, verdict: (observe(batch, verdict), found.append(chance()))[0]  # type: ignore[func-returns-value, method-assign]

    def chance() -> float:
        return min(policy.ngram_drafts.calibration.chance(row, *bins_of(1, [0.5])) for row in range(4))

    simulation.play(policy)
    assert not np.any([sum(counts) for counts in simulation.verified])
    assert found[-2] > 0.85


def test_a_predicted_time_that_is_too_long_is_corrected() -> None:
    """By the table no draft token pays; in reality they are nearly free."""
    simulation = DraftSimulation(CPU, lambda row: [(0.9, True)] * 4, rows=1, tokens=600)
    simulation.play(copying(simulation, linear_costs(verify=0.0, token=10.0)))
    assert mean(sum(counts) for counts in simulation.verified[-40:]) > 2


def test_a_predicted_plain_time_that_is_too_long_is_corrected() -> None:
    """By the table a plain round takes as long as one with a draft token per row, and all rows always have some."""
    believed = replace(CPU, verify=(*CPU.verify[:-1], (24.9, *CPU.verify[-1][1:])))
    simulation = DraftSimulation(CPU, coins(dict.fromkeys(range(16), 0.2)), rows=16, tokens=300)
    simulation.play(copying(simulation, believed))
    assert mean(any(counts) for counts in simulation.verified[:3]) == 1
    assert mean(any(counts) for counts in simulation.verified[-80:]) < 0.2


# --- a draft model with scores -------------------------------------------------------------------------

# The target takes 40 ms and 3 ms per token, the draft model 10 ms per pass and 1 ms per missing token.
PAIR = linear_costs(verify=37.0, token=3.0, draft_step=10.0, feed_tokens=(1, 101), feed=(1.0, 101.0))
ROWS = [1, 2, 4]


def telling(chance: float = 0.75) -> Kind:
    """A draft model whose scores tell where it is nearly always right, for the given share of positions."""

    def draft_token(rng: random.Random, _place: int) -> list[ScriptedToken]:
        chances = [0.97 if rng.random() < chance else 0.3 for _ in range(LONGEST_AUTO)]
        return [(each, rng.random() < each) for each in chances]

    return draft_token


def steady(chance: float, score: float) -> Kind:
    """Scores without information: all draft tokens have the same score and probability."""
    return lambda rng, _place: [(score, rng.random() < chance) for _ in range(LONGEST_AUTO)]


def stray(rng: random.Random, _place: int) -> list[ScriptedToken]:
    """n-gram drafts after short matches; one in ten is right."""
    return [(WEAK, rng.random() < 0.1) for _ in range(LONGEST_AUTO)]


def by_turns(rng: random.Random, place: int) -> list[ScriptedToken]:
    """n-gram drafts of a text of which every other stretch of 50 tokens occurs elsewhere, with long matches."""
    left = 50 - place % 50
    if place // 50 % 2:
        return stray(rng, place)
    inside = [(STRONG if place % 50 > 4 or j else WEAK, rng.random() < 0.97) for j in range(left)]
    return [*inside, *[(STRONG, False)] * LONGEST_AUTO][:LONGEST_AUTO]


Maker = Callable[[DraftSimulation], LengthPolicy]


def drafting(simulation: DraftSimulation) -> AutoLength:
    return AutoLength(CostModel(simulation.costs), decoders(simulation.reader), False)


def hybrid(simulation: DraftSimulation) -> AutoLength:
    return AutoLength(CostModel(simulation.costs), decoders(simulation.reader), True)


def simulated(model: Kind | None, copies: Kind | None, rows: int, seed: int = 0, tokens: int = 200) -> DraftSimulation:
    """Drafts of a draft model, n-gram drafts, or both. Each has the same outcomes with the other as alone."""

    def draft_tokens(kind: Kind | None, luck: random.Random) -> Callable[[int], list[ScriptedToken]]:
        return lambda row: [] if kind is None else kind(luck, simulation.place(row))

    drafted, copied = draft_tokens(model, random.Random(seed)), draft_tokens(copies, random.Random(-1 - seed))
    costs, free = PAIR, (0.0,) * len(SIZES)
    if model is None:
        costs, drafted = replace(costs, draft_once=free, draft_step=free), copied
    simulation = DraftSimulation(costs, drafted, rows, tokens, noise=0.05, seed=seed)
    simulation.copies = copied if model and copies else None
    return simulation


def tokens_a_second(make: Maker, model: Kind | None, copies: Kind | None, rows: int) -> float:
    """Mean over a few seeds, 300 tokens per row."""
    speeds = []
    for seed in range(4):
        simulation = simulated(model, copies, rows, seed, 300)
        speeds.append(rows * 300 / simulation.play(make(simulation)))
    return mean(speeds)


def fixed(k: int) -> Maker:
    return lambda _: FixedLength(k)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("chance", "score"), [(0.9, 0.9), (0.8, 0.5), (0.6, 0.95), (0.3, 0.6)])
@pytest.mark.one_in(11)
def test_scores_without_information_match_the_best_fixed_length(chance: float, score: float, rows: int) -> None:
    best = max(tokens_a_second(fixed(k), steady(chance, score), None, rows) for k in (0, 1, 2, 3, 5, 8))
    assert tokens_a_second(drafting, steady(chance, score), None, rows) > 0.94 * best


def test_informative_scores_beat_every_fixed_length() -> None:
    best = max(tokens_a_second(fixed(k), telling(), None, 1) for k in range(LONGEST_AUTO))
    assert tokens_a_second(drafting, telling(), None, 1) > 1.05 * best


@pytest.mark.parametrize("seed", range(100, 124))
@pytest.mark.one_in(11)
def test_a_good_draft_model_survives_wrong_first_draft_tokens(seed: int) -> None:
    simulation = simulated(telling(), None, 1, seed, 300)
    simulation.play(drafting(simulation))
    assert mean(asked > 0 for asked in simulation.asked) > 0.8


@pytest.mark.parametrize("rows", [1, 4, 16])
def test_a_draft_model_that_is_sure_and_wrong_costs_next_to_nothing(rows: int) -> None:
    wrong = steady(0.0, 0.99)
    assert tokens_a_second(drafting, wrong, None, rows) > 0.97 * tokens_a_second(fixed(0), wrong, None, rows)


@pytest.mark.parametrize("rows", [1, 4])
def test_a_good_drafter_is_found_again_after_a_bad_phase(rows: int) -> None:
    """Without the cost of catching up, which other tests cover."""
    costs = replace(PAIR, feed_tokens=(1,), feed=(0.0,))
    drafted = lambda row: [(0.9, not 200 <= simulation.place(row) < 400)] * LONGEST_AUTO  # noqa: E731
    simulation = DraftSimulation(costs, drafted, rows, tokens=2000, noise=0.05)
    simulation.play(drafting(simulation))
    assert mean(sum(counts) for counts in simulation.verified[-30:]) > 4


def test_only_draft_tokens_that_may_well_be_right_are_verified() -> None:
    policy, batch = AutoLength(CostModel(PAIR), decoders(Behind([0, 0])), False), batch_of(2)
    assert policy.choose(batch).k == PRIOR_TOKENS
    draft = Draft(
        torch.ones(2, 3, dtype=torch.int64), torch.tensor([3, 3]), confidence=[[0.99, 0.05, 0.99], [0.99] * 3]
    )
    assert policy.select(batch, draft).counts.tolist() == [1, 3]


def test_sampled_draft_tokens_with_a_distribution_are_all_verified() -> None:
    """Under the rejection rule, leaving out a draft token for its value would bias the distribution."""
    policy, batch = AutoLength(CostModel(PAIR), decoders(Behind([0])), False), batch_of(1)
    policy.choose(batch)
    tokens = torch.ones(1, 3, dtype=torch.int64)
    draft = Draft(tokens, torch.tensor([3]), torch.full((1, 3, 4), 0.25), [[0.01] * 3])
    assert policy.select(batch, draft).counts.tolist() == [3]


def test_drafting_goes_on_while_any_row_pays_for_it() -> None:
    policy, batch = AutoLength(CostModel(PAIR), decoders(Behind([0, 0])), False), batch_of(2)
    enough = policy.choose(batch).stop_drafting
    assert enough is not None
    assert not enough(batch, [[0.99], [0.99]])
    assert enough(batch, [[0.1], [0.1]])


def test_row_calibrations_stay_with_their_slots_and_end_with_their_sequences() -> None:
    policy, batch = AutoLength(CostModel(PAIR), decoders(Behind([0] * 3)), False), batch_of(3)
    (sure,) = bins_of(1, [0.95])
    for _ in range(30):  # the last row's are always wrong
        policy.model_drafts.calibration.learn([[(sure, row < 2)] for row in range(3)], range(3))

    def asks_again(first: int, stop: int) -> bool:
        enough = policy.choose(batch).stop_drafting
        assert enough is not None
        return not enough(batch.part(first, stop), [[0.95]] * (stop - first))

    assert asks_again(0, 2)
    assert not asks_again(2, 3)
    chances = [policy.model_drafts.calibration.chance(row, sure) for row in range(3)]
    policy.leave(0)
    batch.set_live([1, 2])
    assert policy.model_drafts.calibration.chance(2, sure) == chances[2]
    assert asks_again(0, 1)
    assert not asks_again(1, 2)
    policy.join(2)
    assert chances[2] < policy.model_drafts.calibration.chance(2, sure) < chances[1]


def test_a_round_observed_late_teaches_of_the_rows_that_were_in_it() -> None:
    """The sequence of slot 0 has ended since the round was chosen, and one in slot 2 has joined."""
    policy, batch = AutoLength(CostModel(linear_costs()), ranks=False), batch_of(3)
    batch.set_live([0, 1])
    plan = policy.choose(batch)
    policy._round.source, policy._round.token_weights = policy.model_drafts, [0.25, 1.75]
    batch.set_live([1, 2])
    policy.observe(batch, with_timing(Verdict.of(HostVerdict([[1, 1, 1], []], [2, 0], [2, 0])), plan, 0.0, 1.0))
    assert set(policy._progress.rows) == {1}
    assert policy.model_drafts.rate(2) == pytest.approx(2 + 2 * 1.75 * 2)  # one row stands for both


def test_what_a_round_teaches_about_a_row_is_kept_by_slot() -> None:
    """Slots 1 and 2 are live; the draft tokens of slot 1 are right and those of slot 2 wrong."""
    policy, batch = AutoLength(CostModel(linear_costs()), decoders(Behind([0, 0])), False), batch_of(3)
    batch.set_live([1, 2])
    batch.draining = True
    for _ in range(5):
        plan = policy.choose(batch)
        draft = Draft(torch.ones(2, 1, dtype=torch.int64), torch.tensor([1, 1]), confidence=[[0.9], [0.9]])
        drafted = policy.select(batch, draft).drafted
        verdict = Verdict.of(HostVerdict([[1, 1], [2]], [1, 0], drafted))
        policy.observe(batch, with_timing(verdict, plan))
    policy.choose(batch)
    unknown, fast, slow = policy._progress.leads(range(3))
    assert slow < unknown < fast
    assert policy._round.leads == [fast, slow]
    assert policy._round.token_weights[0] < 1 < policy._round.token_weights[1]
    (sure,) = bins_of(1, [0.9])
    wrong, neutral, right = sorted(policy.model_drafts.calibration.chance(slot, sure) for slot in range(3))
    assert [policy.model_drafts.calibration.chance(slot, sure) for slot in range(3)] == [neutral, right, wrong]
    assert wrong < neutral < right


# --- n-gram drafts beside a draft model -----------------------------------------------------------------


@pytest.mark.parametrize("rows", ROWS)
def test_good_ngram_drafts_are_used_and_the_draft_model_is_not(rows: int) -> None:
    copies = steady(1.0, STRONG)
    simulation = simulated(telling(), copies, rows)
    simulation.play(hybrid(simulation))
    assert sum(asked > 0 for asked in simulation.asked) <= 2
    assert mean(map(sum, simulation.verified[2:])) > 4 * rows / 2
    alone = tokens_a_second(lambda s: copying(s, s.costs), None, copies, rows)
    assert tokens_a_second(hybrid, telling(), copies, rows) > 0.95 * alone


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("bad", [stray, steady(0.0, STRONG)], ids=["stray", "sure and wrong"])
@pytest.mark.one_in(11)
def test_bad_ngram_drafts_cost_next_to_nothing(bad: Kind, rows: int) -> None:
    simulation = simulated(telling(), bad, rows, tokens=300)
    simulation.play(hybrid(simulation))
    assert mean(asked == 0 for asked in simulation.asked) < 0.1
    alone = tokens_a_second(drafting, telling(), None, rows)
    assert tokens_a_second(hybrid, telling(), bad, rows) > 0.95 * alone


@pytest.mark.parametrize("rows", ROWS)
def test_a_text_that_repeats_in_part_is_faster_with_both_sources_than_with_either(rows: int) -> None:
    copies_alone = tokens_a_second(lambda s: copying(s, s.costs), None, by_turns, rows)
    alone = max(tokens_a_second(drafting, telling(), None, rows), copies_alone)
    assert tokens_a_second(hybrid, telling(), by_turns, rows) > 1.05 * alone


FIRST_DRAFTS = 4  # rounds that a draft model which is always wrong may take before it is given up


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("copies", [by_turns, stray])
@pytest.mark.one_in(11)
def test_beside_a_draft_model_that_is_always_wrong_ngram_drafts_are_as_fast_as_alone(copies: Kind, rows: int) -> None:
    """Apart from the few drafts that show that it is wrong."""
    tried = FIRST_DRAFTS * (PAIR.round_ms(rows, PRIOR_TOKENS) - PAIR.round_ms(rows, 0)) / 1000
    alone = rows * 300 / tokens_a_second(lambda s: copying(s, s.costs), None, copies, rows)
    assert rows * 300 / tokens_a_second(hybrid, steady(0.0, 0.99), copies, rows) < alone / 0.97 + tried


def test_trials_of_the_draft_model_go_on_beside_ngram_drafts_and_keep_to_their_budget() -> None:
    simulation = simulated(steady(0.0, 0.99), by_turns, 1, tokens=2000)
    simulation.play(hybrid(simulation))
    later = simulation.asked[50:]
    tried = sum(asked > 0 for asked in later)
    assert tried > 0
    reading = 1.0 * len(later)  # ms: each missing token once
    assert tried * PAIR.round_ms(1, PRIOR_TOKENS) + reading * 0.2 < 0.02 * 1000 * simulation.now + 200


@pytest.mark.parametrize("rows", [1, 2])
def test_a_draft_model_with_a_short_record_is_not_given_up_where_no_ngram_drafts_come(rows: int) -> None:
    """Its first draft tokens happen to be wrong; it is used again all the same."""
    simulation = simulated(telling(), stray, rows)
    lucky = simulation.draft_token
    simulation.draft_token = lambda row: [(0.97, False)] if simulation.place(row) < 2 else lucky(row)
    simulation.play(hybrid(simulation))
    assert mean(asked > 0 for asked in simulation.asked) > 0.8


def copied(score: float, rows: int = 1, k: int = 8) -> Draft:
    return Draft(torch.full((rows, k), RIGHT), torch.tensor([k] * rows), confidence=[[score] * k] * rows)


def started(lack: int = 0, left: int = 150) -> tuple[AutoLength, Batch]:
    return AutoLength(CostModel(PAIR), decoders(Behind([lack]))), batch_of(1, left)


def played(policy: AutoLength, batch: Batch, copies: Draft, gained: list[int]) -> int:
    """Run a round of one row. Returns the draft tokens requested from the draft model."""
    plan = policy.choose(batch).within(batch)
    assert plan.fallback is not None
    asked = plan.fallback(batch, copies.capped(plan.caps or [plan.k]))
    draft = copies if asked == 0 else Draft(torch.full((1, 1), RIGHT), torch.tensor([1]), confidence=[[0.9]])
    draft = policy.select(batch, draft.capped(plan.caps or [plan.k])) if draft.k else draft
    kept = 0
    while kept < draft.counts.tolist()[0] and draft.tokens[0, kept] == gained[kept]:
        kept += 1
    verdict = Verdict(torch.tensor([gained[: kept + 1]]), torch.tensor([kept]), draft.counts)
    batch.commit(verdict)
    policy.observe(batch, with_timing(verdict, plan, 15.0, 45.0))
    return asked


@pytest.mark.parametrize(("left", "read"), [(100, True), (4, False)])
def test_a_backlog_that_cannot_pay_before_the_rows_end_is_not_read(left: int, read: bool) -> None:
    policy, batch = started(100, left)
    plan = policy.choose(batch)
    assert plan.fallback is not None
    assert (plan.fallback(batch, copied(WEAK)) > 0) == read


@pytest.mark.parametrize("copies", [copied(0.9), copied(0.9, k=0)], ids=["some", "none"])
def test_a_round_of_ngram_drafts_teaches_nothing_about_the_draft_model(copies: Draft) -> None:
    policy, batch = started(1_000_000)  # so it is not used, whatever the value of the n-gram draft
    before = policy.model_drafts.acceptance
    assert played(policy, batch, copies, [RIGHT] * 3 + [WRONG] + [RIGHT] * 20) == 0
    assert not any(policy.model_drafts.calibration.tried)
    assert policy.model_drafts.rate(1) == 0, "the rate is that of the draft model's rounds"
    assert policy.model_drafts.acceptance == before
    assert any(policy.ngram_drafts.calibration.tried) == (copies.k > 0)


def test_catching_up_does_not_lower_the_rate_of_the_draft_models_rounds() -> None:
    rates = []
    for missed in (0, 2):
        policy, batch = started(missed)
        assert played(policy, batch, copied(WEAK), [RIGHT, RIGHT]) > 0
        rates.append(policy.model_drafts.rate(1))
    assert rates[1] > rates[0] > 0


def test_a_round_of_the_draft_model_also_judges_the_ngram_draft() -> None:
    policy, batch = started()
    assert played(policy, batch, copied(WEAK), [RIGHT, RIGHT]) > 0
    assert sum(policy.ngram_drafts.calibration.tried) == pytest.approx(2, abs=0.02)
    assert sum(policy.ngram_drafts.calibration.kept) == pytest.approx(2, abs=0.02)
    assert sum(policy.model_drafts.calibration.tried) == 1


def test_draft_tokens_are_chosen_by_the_record_of_their_own_source() -> None:
    policy, batch = started()
    policy.model_drafts.calibration.learn(
        [[(bin_, False) for bin_ in bins_of(8, [0.9] * 8)]], [0]
    )  # the draft model is always wrong
    for _ in range(20):
        policy.ngram_drafts.learn([[(bin_, True) for bin_ in bins_of(8, [0.9] * 8)]], [0])
    plan = policy.choose(batch)
    assert plan.fallback is not None
    assert plan.fallback(batch, copied(0.9)) == 0
    assert policy.select(batch, copied(0.9)).counts.tolist() == [8]


def test_draft_tokens_beyond_what_a_request_allows_are_neither_verified_nor_judged() -> None:
    policy, batch = started(1_000_000)
    batch.max_draft_tokens[0] = 1
    policy.ngram_drafts.judged = 1000
    assert played(policy, batch, copied(0.99), [RIGHT] * 9) == 0
    assert batch.lengths[0] == 12
    assert sum(policy.ngram_drafts.calibration.tried) == 1


def test_drafts_that_pay_again_are_noticed_although_they_once_paid_much_better() -> None:
    """A trial is priced at plain decoding's rate: 61 rounds on average; at the first phase's rate it was 82."""
    lines = (6.5, 7.5, 8.5, 10.5, 14.0), (16.0, 26.0, 36.0, 56.0, 96.0)
    costs, rounds = CostTable((1, 16), (0, 1, 2, 4, 8), 100, lines, (0.0,) * 2, (0.0,) * 2), []
    for seed in range(6):
        rng, chance = random.Random(seed), [0.0]
        simulation = DraftSimulation(
            costs, lambda _, rng=rng, chance=chance: sixteen(rng, chance[0]), 16, 20_000, 0.1, seed, look=0.3
        )  # fmt: skip
        policy = AutoLength(CostModel(costs))
        for row in range(16):
            simulation.batch.set_row(row, RowStart([RIGHT] * 8, SamplingParams(max_tokens=20_000), row))
            policy.join(row)
        for rows, chance[0] in ((1, 0.95), (16, 0.9), (16, 0.1), (1, 0.1), (1, 0.9)):
            simulation.batch.set_live(range(rows))
            gained, before = simulation.gained, simulation.rounds
            while simulation.gained - gained < 300 * rows:
                simulation._round(policy)
        rounds.append(simulation.rounds - before)
    assert mean(rounds) < 72


def sixteen(rng: random.Random, chance: float) -> list[ScriptedToken]:
    """Sixteen draft tokens of one score, each right with this probability."""
    return [(0.8, rng.random() < chance) for _ in range(LONGEST_AUTO)]
