"""``auto``: what it drafts, verifies and learns, given acceptance and costs, for each kind of drafts."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import cast

import numpy as np
import pytest
import torch

from batches import filled
from paceline.config import EngineConfig, SamplingParams
from paceline.core.batch import Batch, RowStart, SpeculationPlan
from paceline.core.draft import Draft, Verdict
from paceline.core.values import Accepted
from paceline.engine.engine import Engine, Request
from paceline.lengths.auto import AutoLength
from paceline.lengths.base import FixedLength, LengthPolicy
from paceline.lengths.calibration import Calibration, Grid
from paceline.lengths.cost import CostModel, CostTable
from paceline.lengths.scores import LONGEST_AUTO, bins_of
from paceline.lengths.sources import CREDIT, CREDIT_SHARE, FIRST_DRAFT
from paceline.models.decoding.draft_decoder import DraftDecoder
from scenarios import PAIR, STRONG, WEAK, by_turns, coins, steady, stray, telling
from scenarios import ROUNDS_OF_A_SMALL_MODEL as CPU
from simulation import LENGTHS, RIGHT, SIZES, WRONG, DraftSimulation, Reader, Simulation, linear_costs, with_timing
from toy import FlatToy, ToyModel, answers, make_engine, run

pytestmark = pytest.mark.usefixtures("one_thread")

ScriptedToken = tuple[float, bool]
Kind = Callable[[random.Random, int], list[ScriptedToken]]  # draft tokens at a position of the text

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


@pytest.mark.parametrize(
    ("name", "acceptance", "rows"),
    [("free", 0.0, 16), ("free", 0.9, 1), ("dear", 0.3, 1), ("dear", 0.6, 16), ("draft model", 0.6, 1)],
)
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


MEASURED = Path(__file__).parents[2] / "benchmarks" / "results" / "profile-qwen-int8-epyc-zen4.json"


@pytest.mark.parametrize("rows", [1, 4])
def test_drafts_stop_at_the_context_where_they_cease_to_pay(rows: int) -> None:
    """Measured times of Qwen2.5-Coder-1.5B and its draft model, of whose tokens 0.7 are right (docs/adaptive.md).

    A draft token is verified over the whole context, so from some length on a plain round brings more. Where the best
    length gains a few percent, drafts may go on or stop.
    """
    costs, outcomes = CostTable.from_json(json.loads(MEASURED.read_text())["costs"]), set[str]()
    for context in (1024, 2048, 4096, 8192, 16384, 32768):
        speeds = [rows * sum(0.7**i for i in range(k + 1)) / costs.round_ms(rows, k, context) for k in costs.lengths]
        gain = max(speeds) / speeds[0]
        simulation = Simulation(costs, lambda row, place: 0.7, capacity=4)
        simulation.rows(rows, context)
        simulation.play(blind(simulation, costs), 200)
        assert simulation.goodput > 1000 * max(0.92 * max(speeds), 0.96 * speeds[0])
        drafted = mean(simulation.asked[-100:])
        outcomes.add("pays" if gain > 1.02 else "does not")
        assert gain < 1.1 or drafted > 0.7
        assert gain > 1.0 or drafted < 0.15
    assert outcomes == {"pays", "does not"}


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


@pytest.mark.parametrize("factor", [3, 1 / 3], ids=["too long", "too short"])
def test_a_table_that_is_wrong_threefold_is_replaced_by_real_rounds_within_50(factor: float) -> None:
    right, speed = {"verify": 10.0, "token": 0.5, "draft_step": 0.7}, []
    for scale in (1, factor):
        simulation = Simulation(linear_costs(**right), lambda row, place: 0.9, seed=3)
        simulation.rows(16)
        policy = blind(simulation, linear_costs(**{name: scale * ms for name, ms in right.items()}))
        simulation.play(policy, 50)
        began, had = simulation.now, simulation.tokens
        simulation.play(policy, 100)
        speed.append((simulation.tokens - had) / (simulation.now - began))
    assert speed[1] > 0.97 * speed[0]


@pytest.mark.parametrize("rows", [1, 16])
def test_draft_tokens_that_become_good_are_noticed_and_those_that_become_bad_given_up(rows: int) -> None:
    """Good ones within about 150 rounds. Bad ones cost the time of a few plain rounds."""
    delays, lost = [], []
    for seed in range(3):
        rate = [0.0]
        simulation = Simulation(DRAFT_MODEL, lambda row, place, rate=rate: rate[0], seed=seed)  # type: ignore[misc]
        simulation.rows(rows)
        policy = blind(simulation, DRAFT_MODEL)
        simulation.play(policy, 200 + 7 * seed)
        assert sum(k > 0 for k in simulation.asked[-16:]) <= 2, "perhaps a trial"
        rate[0] = 0.95
        while not all(simulation.asked[-3:]):
            simulation.play(policy)
        delays.append(len(simulation.asked) - 200 - 7 * seed)
        simulation.play(policy, 100)
        rate[0], began = 0.0, simulation.now
        simulation.play(policy, 50)
        plain = DRAFT_MODEL.round_ms(rows, 0, simulation.batch.longest) / 1000
        lost.append((simulation.now - began) / plain - 50)
    assert mean(delays) <= 100, delays
    assert max(lost) <= 20, lost


def test_a_length_per_batch_size_that_falls_as_the_batch_grows() -> None:
    simulation = Simulation(FREE, lambda row, place: 0.7)
    policy, lengths = blind(simulation, FREE), []
    for rows in (1, 4, 16, 1):
        simulation.rows(rows)
        simulation.play(policy, 150)
        lengths.append(mean(simulation.asked[-70:]))
    assert lengths[0] > lengths[1] > lengths[2]
    assert lengths[3] > lengths[1]


PHASES = ((1, 0.9), (16, 0.9), (16, 0.1), (1, 0.1), (1, 0.9))


def test_through_changing_phases_it_stays_near_an_oracle_and_beats_every_fixed_length() -> None:
    def seconds(policy_name: int | str) -> list[float]:
        rate = [0.0]
        simulation = Simulation(DRAFT_MODEL, lambda row, place: rate[0], seed=1)
        policy = FixedLength(policy_name) if isinstance(policy_name, int) else blind(simulation, DRAFT_MODEL)
        each = []
        for rows, rate[0] in PHASES:
            simulation.rows(rows)
            began, had = simulation.now, simulation.tokens
            while simulation.tokens - had < 250 * rows:
                simulation.play(policy)
            each.append((simulation.now - began) / (simulation.tokens - had) * 250 * rows)
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


@pytest.mark.parametrize("allows", [True, False])
def test_a_row_that_has_just_joined_is_drafted_for_alone_if_all_rows_have_missed_too_much(allows: bool) -> None:
    """Unless its request allows no draft tokens: then the next one is."""
    simulation = DraftSimulation(PAIR, lambda _: [(0.9, simulation.rounds >= 60)] * LONGEST_AUTO, 4, 600)
    policy, batch = drafting(simulation), simulation.batch
    for row in range(4):
        begin(simulation, policy, row)
    batch.set_live(range(4))
    for _ in range(60):
        simulation._round(policy)
    assert simulation.drafting[-40:] == [[]] * 40, "all are behind, and were given up"
    batch.set_live([0, 3])
    begin(simulation, policy, 1, 16 if allows else 0)
    begin(simulation, policy, 2, missing=5)
    batch.set_live(range(4))
    for _ in range(80):
        simulation._round(policy)
    drafted = [rows for rows in simulation.drafting[60:] if rows]
    assert drafted[0] == [1 if allows else 2]
    assert len(drafted[-1]) == 3 + allows, "its good draft tokens show that it pays for the others to catch up, too"


def begin(
    simulation: DraftSimulation, policy: AutoLength, slot: int, max_draft_tokens: int = 16, missing: int = 1
) -> None:
    """Put a new sequence in the slot, of whose prompt the draft model has read all but ``missing`` tokens."""
    params = SamplingParams(temperature=0, max_tokens=simulation.tokens, num_speculative_tokens=max_draft_tokens)
    policy.leave(slot)
    simulation.batch.set_row(slot, RowStart([RIGHT] * simulation.prompt, params, slot))
    simulation.reader.seen[slot] = simulation.prompt - missing
    policy.join(slot)


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
        self.kept += sum(verdict.accepted)
        self.drafted += sum(verdict.drafted)


@pytest.mark.parametrize("only", [None, 0, 2])
def test_after_150_plain_rounds_the_draft_models_cache_is_right(only: int | None) -> None:
    model = ToyModel(max_positions=320)
    engine = make_engine(
        model, ToyModel(max_positions=320), drafter="model", num_speculative_tokens=3, max_model_len=320
    )
    script = engine.use_policy(Script([0] * 150 + [2, 0, 0, 0, 3, 1, 4], only))
    params = [SamplingParams(temperature=0, max_tokens=210, ignore_eos=True)] * 3
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]
    plain = make_engine(model, max_model_len=320)
    assert answers(run(engine, prompts, params)) == answers(run(plain, prompts, params))
    assert script.kept == script.drafted > 30  # the draft model is the target: every draft token is right


@pytest.mark.parametrize("lengths", [[0, 0, 2, 0, 1], [1, 1, 0, 2]])
def test_drafts_that_were_only_timed_leave_nothing_behind(lengths: list[int]) -> None:
    """Otherwise a first round without draft tokens, or with one row's, would be judged as the timed ones."""
    engine = make_engine(ToyModel(), ToyModel(), drafter="model", num_speculative_tokens=1)
    parts = engine.parts
    Calibration(parts.target, parts.drafter, parts.accept, Grid((1, 2), (0, 2), seconds=0.0)).run()
    engine.use_policy(Script(lengths, only=1))
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
    policy.costs = CostModel(replace(linear_costs(feed_tokens=(1, 1001), feed=(0.05, 50.05)), verify=times))
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
    if rounds == "host":  # a device reads no prompts of others, and may run a trial
        assert not any(output.outputs[0].metrics.accepted for output in outputs[1:])


# --- engines --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", ["model", "ngram", "hybrid"])
@pytest.mark.parametrize("toy", [ToyModel, FlatToy])
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
    assert table.batch_sizes == (1, 4)


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

    told = engine.use_policy(Told())
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (3, 9, 2, 7, 5, 4)]
    for number, each in enumerate(params, 1):
        engine.add(Request([number], each, request_id=str(number)))
    while engine.busy:
        engine.step()
    assert told.begun == 6
    assert not told.rows


# --- n-gram drafts: free, and each pays for its own verification ----------------------------------------

SEARCH = 0.25  # ms of a search for n-gram drafts


def copying(simulation: DraftSimulation, costs: CostTable = CPU) -> AutoLength:
    return AutoLength(CostModel(costs))


def batch_of(rows: int, tokens: int = 100) -> Batch:
    params = SamplingParams(temperature=0, max_tokens=tokens)
    return filled([RowStart([1] * 10, params, row) for row in range(rows)], 400, 4)


def select(confidence: list[list[float]], costs: CostTable) -> list[int]:
    """Number of n-gram draft tokens of each row that are verified."""
    policy, batch = AutoLength(CostModel(costs)), batch_of(len(confidence))
    policy.choose(batch)
    draft = policy.select(batch, Draft([[0] * len(line) for line in confidence], confidence=confidence))
    assert draft.k == max(draft.drafted)
    return draft.drafted


def test_rows_get_draft_tokens_by_their_probabilities_and_a_hopeless_row_none() -> None:
    sure, fair, hopeless = [0.99] * 4, [0.66] * 4, [0.01] * 4
    chosen = select([sure, fair, hopeless], linear_costs(verify=30.0, token=8.0))
    assert chosen[0] == 4
    assert chosen[0] > chosen[1]
    assert chosen[2] == 0


def test_where_tokens_are_expensive_nothing_is_verified_and_the_round_is_plain() -> None:
    assert select([[0.9] * 3] * 2, linear_costs(verify=0.0, token=10.0)) == [0, 0]


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


@pytest.mark.parametrize("rows", [1, 4])
def test_short_answers_gain_as_much_as_with_the_best_fixed_length(rows: int) -> None:
    """Mean seconds until a row ends: rows that differ, 64 tokens, true costs as predicted, noisy times."""
    chance = {row: (0.95, 0.6, 0.2, 0.85)[row % 4] for row in range(rows)}

    def latency(length: str, seed: int) -> float:
        simulation = DraftSimulation(CPU, coins(chance, seed), rows, noise=0.1, seed=seed)
        simulation.play(copying(simulation) if length == "auto" else FixedLength(int(length)))
        return mean(simulation.ends.values())

    seeds = range(6)
    fixed = min(mean(latency(k, seed) for seed in seeds) for k in ("0", "1", "2", "4", "8"))
    assert mean(latency("auto", seed) for seed in seeds) < fixed / 0.97


def test_a_draining_batch_ends_no_later_for_the_sake_of_its_fast_row() -> None:
    def play(length: str, draining: bool) -> DraftSimulation:
        simulation = DraftSimulation(CPU, coins({0: 0.0, 1: 0.9}, 0), 2)
        simulation.play(copying(simulation) if length == "auto" else FixedLength(0), draining)
        return simulation

    plain, drained, hurried = play("0", True), play("auto", True), play("auto", False)
    assert drained.now <= plain.now + 2.75 * CPU.verify_ms(2, 0) / 1000
    assert mean(hurried.ends.values()) < 0.9 * mean(plain.ends.values())


@pytest.mark.parametrize("rows", [4, 8])
def test_a_draft_model_that_costs_a_draining_batch_more_than_it_gains_is_given_up(rows: int) -> None:
    """An overconfident draft model: its draft tokens pay for their verification, but not for their drafting."""
    costs = linear_costs(verify=2.7, token=0.15, draft_once=0.2, draft_step=0.3)

    def seconds(seed: int) -> float:
        rng = random.Random(seed)
        simulation = DraftSimulation(
            costs, lambda _row: [(0.6, rng.random() < 0.3) for _ in range(8)], rows, tokens=96, seed=seed
        )
        return simulation.play(drafting(simulation), draining=True)

    plain = 96 * costs.verify_ms(rows, 0) / 1000
    assert plain / mean(seconds(seed) for seed in range(8)) > 0.96


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


def test_draft_tokens_that_are_not_verified_are_learned_from() -> None:
    """No draft token pays, so none is verified. The gained tokens still show that they were right."""
    dear = linear_costs(verify=0.0, token=10.0)
    simulation = DraftSimulation(dear, lambda row: [(0.5, True)] * 4, rows=4, tokens=16)
    policy = copying(simulation, dear)
    simulation.play(policy)
    assert not np.any([sum(counts) for counts in simulation.verified])
    assert policy.ngram_drafts.calibration.chance(9, *bins_of(1, [0.5])) > 0.85


# --- a draft model with scores: the target takes 40 ms, the draft model 10 ms per pass and 1 ms per missing token ----

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


def tokens_a_second(make: Maker, model: Kind | None, copies: Kind | None, rows: int, seeds: int = 3) -> float:
    """Mean over a few seeds, 300 tokens per row."""
    speeds = []
    for seed in range(seeds):
        simulation = simulated(model, copies, rows, seed, 300)
        speeds.append(rows * 300 / simulation.play(make(simulation)))
    return mean(speeds)


def best_fixed(chance: float, rows: int) -> Maker:
    """The length with which a round gains most per millisecond, if so many draft tokens are accepted."""
    return lambda _: FixedLength(best_length(PAIR, chance, rows))


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize(("chance", "score"), [(0.8, 0.5), (0.6, 0.95), (0.3, 0.6)])
def test_scores_without_information_match_the_best_fixed_length(chance: float, score: float, rows: int) -> None:
    best = tokens_a_second(best_fixed(chance, rows), steady(chance, score), None, rows)
    assert tokens_a_second(drafting, steady(chance, score), None, rows) > 0.94 * best


def test_informative_scores_beat_every_fixed_length() -> None:
    best = tokens_a_second(best_fixed(0.75 * 0.97 + 0.25 * 0.3, 1), telling, None, 1)
    assert tokens_a_second(drafting, telling, None, 1) > 1.05 * best


def test_a_good_draft_model_survives_wrong_first_draft_tokens() -> None:
    shares = []
    for seed in range(8):
        simulation = simulated(telling, None, 1, seed)
        lucky = simulation.draft_token
        simulation.draft_token = lambda row, lucky=lucky, simulation=simulation: (  # type: ignore[misc]
            [(0.97, False)] if simulation.place(row) < 2 else lucky(row)
        )
        simulation.play(drafting(simulation))
        shares.append(mean(asked > 0 for asked in simulation.asked))
    assert min(shares) > 0.8, shares


@pytest.mark.parametrize("draining", [False, True])
@pytest.mark.parametrize("rows", [1, 4])
def test_a_draft_model_whose_first_rounds_are_slow_is_not_given_up(rows: int, draining: bool) -> None:
    """The machine was busy: all passes of the first rounds took five times as long."""
    simulation = simulated(telling, None, rows)
    busy = replace(PAIR, **{name: scaled(getattr(PAIR, name), 5) for name in ("verify", "draft_step", "feed")})
    policy = drafting(simulation)
    choose = policy.choose

    def timed(batch: Batch) -> SpeculationPlan:
        simulation.costs = busy if simulation.rounds < 4 else PAIR
        return choose(batch)

    policy.choose = timed  # type: ignore[method-assign]
    simulation.play(policy, draining)
    assert mean(map(bool, simulation.asked)) > 0.85


def scaled(times: object, factor: float) -> object:
    """Times of a table, however deep, multiplied."""
    return tuple(scaled(each, factor) for each in times) if isinstance(times, tuple) else factor * times  # type: ignore[operator]


def believed(costs: CostTable, error: str) -> CostTable:
    """A table with an error."""
    if error == "a plain round takes 1.5 times as long":
        return replace(costs, verify=tuple((1.5 * plain, *line) for plain, *line in costs.verify))
    names = ["draft_once", "draft_step"] + ["verify", "feed"] * (error == "everything takes twice as long")
    return replace(costs, **{name: scaled(getattr(costs, name), 2) for name in names})


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize(
    ("kind", "error"),
    [
        (telling, "drafting takes twice as long"),
        (telling, "everything takes twice as long"),
        (steady(0.0, 0.6), "a plain round takes 1.5 times as long"),
    ],
)
def test_a_wrong_table_costs_at_most_5_percent(kind: Kind, error: str, rows: int) -> None:
    def play(costs: CostTable) -> float:
        return tokens_a_second(lambda s: AutoLength(CostModel(costs), decoders(s.reader), False), kind, None, rows)

    assert play(believed(PAIR, error)) > 0.95 * play(PAIR)


@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize("source", ["model", "search"])
def test_what_wrong_hopes_cost_is_bounded_by_the_credit(source: str, rows: int) -> None:
    """All draft tokens are wrong. The first rounds, which show it, are not on credit; a search takes 1 ms."""
    searches = source == "search"
    costs = CPU if searches else replace(PAIR, feed_tokens=(1,), feed=(0.0,))
    simulation = DraftSimulation(costs, lambda _row: [(0.9, False)] * 8, rows, tokens=800, look=float(searches))
    policy = AutoLength(CostModel(costs), [] if searches else decoders(simulation.reader), searches)
    began, choose = [], policy.choose
    policy.choose = lambda batch: (began.append(simulation.now), choose(batch))[1]  # type: ignore[method-assign]
    simulation.play(policy)
    plain, first = costs.verify_ms(rows, 0) / 1000, 20
    lost = (simulation.now - began[first]) / plain - (simulation.rounds - first)
    assert 0 < lost < CREDIT + CREDIT_SHARE * simulation.rounds
    assert (began[first] - began[0]) / plain - first < 8
    assert any(simulation.asked[-300:]) or searches, "trials go on"


@pytest.mark.parametrize("rows", [1, 4])
def test_a_good_drafter_is_found_again_after_a_bad_phase(rows: int) -> None:
    """Without the cost of catching up, which other tests cover."""
    costs = replace(PAIR, feed_tokens=(1,), feed=(0.0,))
    drafted = lambda row: [(0.9, not 200 <= simulation.place(row) < 300)] * LONGEST_AUTO  # noqa: E731
    simulation = DraftSimulation(costs, drafted, rows, tokens=1000, noise=0.05)
    simulation.play(drafting(simulation))
    assert mean(sum(counts) for counts in simulation.verified[-30:]) > 4


def test_only_draft_tokens_that_may_well_be_right_are_verified() -> None:
    policy, batch = AutoLength(CostModel(PAIR), decoders(Behind([0, 0])), False), batch_of(2)
    assert policy.choose(batch).k == FIRST_DRAFT
    draft = Draft([[1] * 3] * 2, confidence=[[0.99, 0.05, 0.99], [0.99] * 3])
    assert policy.select(batch, draft).drafted == [1, 3]


def test_sampled_draft_tokens_with_a_distribution_are_all_verified() -> None:
    """Under the rejection rule, leaving out a draft token for its value would bias the distribution."""
    policy, batch = AutoLength(CostModel(PAIR), decoders(Behind([0])), False), batch_of(1)
    policy.choose(batch)
    draft = Draft([[1] * 3], None, torch.full((1, 3, 4), 0.25), [[0.01] * 3])
    assert policy.select(batch, draft).drafted == [3]


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

    chances = [policy.model_drafts.calibration.chance(row, sure) for row in range(3)]
    assert chances[2] < 0.2 < 0.9 < chances[1]
    policy.leave(0)
    batch.set_live([1, 2])
    assert policy.model_drafts.calibration.chance(2, sure) == chances[2]
    policy.join(2)
    assert chances[2] < policy.model_drafts.calibration.chance(2, sure) < chances[1]


def test_a_round_observed_late_teaches_of_the_rows_that_were_in_it() -> None:
    """The sequence of slot 0 has ended since the round was chosen, and one in slot 2 has joined."""
    speeds = []
    for late in (False, True):
        policy, batch = AutoLength(CostModel(linear_costs()), ranks=False), batch_of(3)
        batch.set_live([0, 1])
        plan = policy.choose(batch)
        gained = [[1, 1, 1], [1, 1, 1]]
        if late:  # row 0 is now slot 1, and row 1 is not in the round
            batch.set_live([1, 2])
            gained[1] = []
        counts = [2, 0 if late else 2]
        policy.observe(batch, with_timing(Verdict(gained, counts, counts), plan))
        speeds.append(policy.model_drafts.speed(2))
    assert speeds[1] > 0.85 * speeds[0], "one row stands for both"
    assert speeds[0] > 2


def test_what_a_round_teaches_about_a_row_is_kept_by_slot() -> None:
    """Slots 1 and 2 are live; the draft tokens of slot 1 are right and those of slot 2 wrong."""
    policy, batch = AutoLength(CostModel(linear_costs()), decoders(Behind([0, 0])), False), batch_of(3)
    batch.set_live([1, 2])
    batch.draining = True
    for _ in range(5):
        plan = policy.choose(batch)
        draft = Draft([[1], [1]], confidence=[[0.9], [0.9]])
        drafted = policy.select(batch, draft).drafted
        verdict = Verdict([[1, 1], [2]], [1, 0], drafted)
        policy.observe(batch, with_timing(verdict, plan))
    (sure,) = bins_of(1, [0.9])
    neutral, right, wrong = (policy.model_drafts.calibration.chance(slot, sure) for slot in range(3))
    assert wrong < neutral < right


# --- n-gram drafts beside a draft model -----------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 4])
def test_good_ngram_drafts_are_used_and_the_draft_model_is_not(rows: int) -> None:
    copies = steady(1.0, STRONG)
    simulation = simulated(telling, copies, rows)
    simulation.play(hybrid(simulation))
    assert sum(asked > 0 for asked in simulation.asked) <= 2
    assert mean(map(sum, simulation.verified[2:])) > 4 * rows / 2


@pytest.mark.parametrize("rows", [1, 4])
def test_a_text_that_repeats_in_part_is_faster_with_both_sources_than_with_either(rows: int) -> None:
    copies_alone = tokens_a_second(lambda s: copying(s, s.costs), None, by_turns, rows)
    alone = max(tokens_a_second(drafting, telling, None, rows), copies_alone)
    assert tokens_a_second(hybrid, telling, by_turns, rows) > 1.05 * alone


def test_rows_with_good_ngram_drafts_keep_them_while_the_draft_model_drafts_for_the_others() -> None:
    """Rows 0 and 1 copy a text. One round verifies both kinds of drafts, so that it beats either kind alone."""
    costs = linear_costs(verify=37.0, token=0.5, draft_step=3.0, feed_tokens=(1, 101), feed=(0.3, 30.3))
    copies, seconds = [steady(0.95, STRONG)] * 2 + [stray] * 2, dict[str, float]()
    for sources in ("model", "copies", "both"):
        rng = random.Random(1)
        simulation = DraftSimulation(costs, lambda row, rng=rng: telling(rng, row), 4, 200, noise=0.05)  # type: ignore[misc]
        if sources != "model":
            simulation.copies = lambda row, rng=rng: copies[row](rng, row)[:8]  # type: ignore[misc]
        reader = [] if sources == "copies" else decoders(simulation.reader)
        policy = AutoLength(CostModel(costs), reader, sources != "model")
        simulation.play(policy)
        seconds[sources] = mean(simulation.ends.values())
    rounds = [
        (rows, counts)
        for rows, counts in zip(simulation.drafting, simulation.verified, strict=True)
        if len(counts) == 4
    ]
    mixed = [counts for rows, counts in rounds if rows == [2, 3]]
    assert len(mixed) > 0.8 * len(rounds)
    assert mean(sum(counts[:2]) for counts in mixed) > 6, "n-gram drafts are long"
    assert mean(sum(counts[2:]) for counts in mixed) > 1
    assert seconds["both"] < 0.8 * min(seconds["model"], seconds["copies"])


def copied(score: float, rows: int = 1, k: int = 8) -> Draft:
    return Draft([[RIGHT] * k] * rows, confidence=[[score] * k] * rows)


def started(lack: int = 0, left: int = 150) -> tuple[AutoLength, Batch]:
    return AutoLength(CostModel(PAIR), decoders(Behind([lack]))), batch_of(1, left)


def played(policy: AutoLength, batch: Batch, copies: Draft, gained: list[int]) -> int:
    """Run a round of one row. Returns the draft tokens requested from the draft model."""
    plan = policy.choose(batch).within(batch)
    assert plan.fallback is not None
    (asked,) = plan.fallback(batch, copies.capped(plan.caps or [plan.k]))
    draft = copies if asked == 0 else Draft([[RIGHT]], confidence=[[0.9]])
    draft = policy.select(batch, draft.capped(plan.caps or [plan.k])) if draft.k else draft
    kept = 0
    (tokens,) = draft.draft_tokens
    while kept < len(tokens) and tokens[kept] == gained[kept]:
        kept += 1
    verdict = batch.commit(draft, Accepted(torch.tensor([gained[: kept + 1]]), torch.tensor([kept])))
    policy.observe(batch, with_timing(verdict, plan, 15.0, 45.0))
    return asked


@pytest.mark.parametrize(("left", "read"), [(380, True), (40, False)])
def test_a_backlog_that_cannot_pay_before_the_rows_end_is_not_read(left: int, read: bool) -> None:
    policy, batch = started(1000, left)
    plan = policy.choose(batch)
    assert plan.fallback is not None
    assert (plan.fallback(batch, copied(WEAK)) > [0]) == read


@pytest.mark.parametrize("k", [8, 0], ids=["some", "none"])
def test_a_round_of_ngram_drafts_teaches_nothing_about_the_draft_model(k: int) -> None:
    policy, batch = started(1_000_000)  # so it is not used, whatever the value of the n-gram draft
    speed, acceptance = policy.model_drafts.speed(1), policy.model_drafts.acceptance
    assert played(policy, batch, copied(0.9, k=k), [RIGHT] * 3 + [WRONG] + [RIGHT] * 20) == 0
    assert policy.model_drafts.acceptance == acceptance
    assert policy.model_drafts.speed(1) == pytest.approx(speed, rel=0.1), "only the predicted times have changed"
    assert any(policy.ngram_drafts.calibration.tried) == (k > 0)


def test_catching_up_does_not_lower_the_speed_of_the_draft_model() -> None:
    speeds = []
    for missed in (0, 2):
        policy, batch = started(missed)
        assert played(policy, batch, copied(WEAK), [RIGHT, RIGHT]) > 0
        speeds.append(policy.model_drafts.speed(1))
    assert speeds[1] >= speeds[0] > 0


def test_a_round_of_the_draft_model_also_judges_the_ngram_draft() -> None:
    policy, batch = started()
    assert played(policy, batch, copied(WEAK), [RIGHT, RIGHT]) > 0
    assert sum(policy.ngram_drafts.calibration.tried) == pytest.approx(2, abs=0.02)
    assert sum(policy.ngram_drafts.calibration.kept) == pytest.approx(2, abs=0.02)
    assert sum(policy.model_drafts.calibration.tried) == 1


def test_draft_tokens_are_chosen_by_the_record_of_their_own_source() -> None:
    policy, batch = started()
    bins = bins_of(8, [0.9] * 8)
    policy.model_drafts.calibration.learn([[(bin_, False) for bin_ in bins]] * 20, range(1, 21))  # always wrong
    for _ in range(20):
        policy.ngram_drafts.learn([[(bin_, True) for bin_ in bins]], [0])
    plan = policy.choose(batch)
    assert plan.fallback is not None
    assert plan.fallback(batch, copied(0.9)) == [0]
    assert policy.select(batch, copied(0.9)).drafted == [8]


def test_draft_tokens_beyond_what_a_request_allows_are_neither_verified_nor_judged() -> None:
    policy, batch = started(1_000_000)
    batch.max_draft_tokens[0] = 1
    assert played(policy, batch, copied(0.99), [RIGHT] * 9) == 0
    assert batch.lengths[0] == 12
    assert sum(policy.ngram_drafts.calibration.tried) == 1
