"""``auto``: given acceptances and costs, the expected length; probes, hysteresis, a draft model that fell behind."""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import mean, median

import numpy as np
import pytest
import torch

from paceline.batch import Batch, Verdict
from paceline.engine import Engine
from paceline.lengths.base import LengthPolicy
from paceline.lengths.calibration import Calibration, Grid
from paceline.lengths.cost import CostModel, CostTable
from paceline.lengths.fixed import FixedLength
from paceline.lengths.goodput import LONGEST_AUTO, GoodputLength, expected_tokens
from paceline.params import EngineConfig, SamplingParams
from simulation import LENGTHS, SIZES, Simulation, linear_costs
from toy import ToyModel, answers, make_engine, run

pytestmark = pytest.mark.usefixtures("one_thread")

FREE = linear_costs()  # 10 ms and 0.25 ms a token
DEAR = linear_costs(token=1.0, draft_step=1.0)
DRAFT_MODEL = linear_costs(draft_step=3.5)
COSTS = {"free": FREE, "dear": DEAR, "draft model": DRAFT_MODEL}


def best_length(costs: CostTable, acceptance: float, rows: int) -> int:
    tokens = expected_tokens(np.full((rows, LONGEST_AUTO), acceptance))
    return max(range(LONGEST_AUTO + 1), key=lambda k: tokens[k] / costs.round_ms(rows, k))


def auto(simulation: Simulation, costs: CostTable) -> GoodputLength:
    return GoodputLength(CostModel(costs, LONGEST_AUTO), clock=simulation.clock)


def test_expected_tokens_of_a_round() -> None:
    tokens = expected_tokens(np.array([[0.5, 0.5], [1.0, 0.0]]))
    assert tokens.tolist() == [2, 2 + 1.5, 2 + 1.5 + 0.25]
    late = expected_tokens(np.array([[0.5, 0.5], [1.0, 0.0]]), [2.0, 1.0])
    assert late.tolist() == [3, 3 + 2.0, 3 + 2.0 + 0.5], "a token counts what its row's tokens are worth"


@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("name", COSTS)
def test_it_finds_the_length_that_pays_best(name: str, acceptance: float, rows: int) -> None:
    costs, goodput = COSTS[name], {}
    fixed = {0, best_length(costs, acceptance, rows)}
    for policy in ("auto", *fixed):
        simulation = Simulation(costs, lambda row, place: acceptance)
        simulation.rows(rows)
        simulation.play(FixedLength(policy) if isinstance(policy, int) else auto(simulation, costs), 500)
        goodput[policy] = simulation.goodput
    assert goodput["auto"] > 0.93 * max(goodput[k] for k in fixed)
    assert goodput["auto"] > 0.98 * goodput[0]


def test_costs_that_were_measured_wrongly_are_corrected_by_real_rounds() -> None:
    simulation = Simulation(FREE, lambda row, place: 0.8)
    simulation.rows(4)
    simulation.play(auto(simulation, linear_costs(verify=3.0, token=1.0, draft_step=2.0)), 600)
    assert mean(simulation.asked[300:]) == pytest.approx(best_length(FREE, 0.8, 4), abs=2)


def test_a_longer_draft_must_pay_noticeably_more() -> None:
    flat = CostTable((1,), (0, 8), 100, ((10, 80),), (0,), (0,))  # k = 1 brings a = 0.88 for 8.75 ms: 0.3 % more
    simulation = Simulation(flat, lambda row, place: 0.88)
    simulation.rows(1)
    policy = auto(simulation, flat)
    policy.choose(simulation.batch)
    simulation.batch.history.all_tried[:] = 1000
    simulation.batch.history.all_kept[:] = 880
    policy.k = 0
    policy._decide(simulation.batch)
    assert policy.k == 0
    simulation.batch.history.all_kept[:] = 900
    policy._decide(simulation.batch)
    assert policy.k > 0


@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize("name", ["dear", "draft model"])
def test_where_no_guess_is_kept_probes_cost_less_than_one_percent(name: str, rows: int) -> None:
    simulation = Simulation(COSTS[name], lambda row, place: 0.0)
    simulation.rows(rows)
    policy = auto(simulation, COSTS[name])
    simulation.play(policy, 3000)
    asked = np.array(simulation.asked[50:])
    plain = COSTS[name].round_ms(rows, 0, 1600)
    lost = sum(COSTS[name].round_ms(rows, int(k), 1600) - plain for k in asked)
    assert 0 < lost / (plain * len(asked)) < 0.01
    gaps = np.diff(np.flatnonzero(asked))
    assert gaps.max() <= 150
    assert gaps.min() >= 16


@pytest.mark.parametrize("rows", [1, 16])
def test_guesses_that_become_good_are_noticed_within_about_100_rounds(rows: int) -> None:
    delays = []
    for seed in range(9):
        rate = [0.0]
        simulation = Simulation(DRAFT_MODEL, lambda row, place, rate=rate: rate[0], seed=seed)  # type: ignore[misc]
        simulation.rows(rows)
        policy = auto(simulation, DRAFT_MODEL)
        simulation.play(policy, 700 + 7 * seed)
        assert policy.k == 0
        rate[0] = 0.95
        while policy.k == 0:
            simulation.play(policy)
        delays.append(len(simulation.asked) - 700 - 7 * seed)
    assert median(delays) <= 100
    assert max(delays) <= 200  # the first probe may be unlucky


@pytest.mark.parametrize(("rows", "rounds"), [(1, 10), (16, 2)])
def test_guesses_that_become_bad_are_noticed_within_a_few_rounds(rows: int, rounds: int) -> None:
    rate = [0.9]
    simulation = Simulation(DRAFT_MODEL, lambda row, place: rate[0])
    simulation.rows(rows)
    policy = auto(simulation, DRAFT_MODEL)
    simulation.play(policy, 300)
    rate[0] = 0.0
    simulation.play(policy, rounds + 1)
    assert policy.k == 0


def test_a_length_per_batch_size_that_falls_as_the_batch_grows() -> None:
    simulation = Simulation(FREE, lambda row, place: 0.7)
    policy, lengths = auto(simulation, FREE), []
    for rows in (1, 4, 16, 1):
        simulation.rows(rows)
        simulation.play(policy, 300)
        lengths.append(mean(simulation.asked[-100:]))
    assert lengths[0] > lengths[1] > lengths[2]
    assert lengths[3] > lengths[1]


PHASES = ((1, 0.9), (16, 0.9), (16, 0.1), (1, 0.1), (1, 0.9))


@pytest.mark.parametrize("name", COSTS)
def test_through_changing_phases_it_stays_near_an_oracle_and_beats_every_fixed_length(name: str) -> None:
    def seconds(policy_name: int | str) -> list[float]:
        rate = [0.0]
        simulation = Simulation(COSTS[name], lambda row, place: rate[0], seed=1)
        policy = FixedLength(policy_name) if isinstance(policy_name, int) else auto(simulation, COSTS[name])
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


# --- a draft model that falls behind ---------------------------------------------


@dataclass
class Lagging:
    """As much of a decoder as the policy looks at: each row lacks so many tokens."""

    lacks: list[int]

    def lags(self, batch: Batch) -> list[int]:
        return self.lacks[: batch.rows]


def test_switching_on_is_charged_what_the_draft_model_must_catch_up() -> None:
    costs = linear_costs(draft_step=1.0, feed_tokens=(1, 1000), feed=(1.0, 1000.0))
    chosen = {}
    for lag in (1, 3000):
        simulation = Simulation(costs, lambda row, place: 0.7)
        simulation.rows(4)
        policy = GoodputLength(CostModel(costs, 8), [Lagging([lag] * 4)], simulation.clock)  # type: ignore[list-item]
        policy._off, policy.rounds = True, 1  # the very first probe is free
        chosen[lag] = policy.choose(simulation.batch)
    assert chosen[1] > 0
    assert chosen[3000] == 0


def test_a_probe_asks_only_the_row_that_lacks_least() -> None:
    costs = linear_costs(draft_step=4.0, feed_tokens=(1, 1000), feed=(0.1, 100.0))
    simulation = Simulation(costs, lambda row, place: 0.0)
    simulation.rows(4)
    lagging = Lagging([1, 1, 1, 1])
    policy = GoodputLength(CostModel(costs, 8), [lagging], simulation.clock)  # type: ignore[list-item]
    simulation.play(policy, 60)
    assert policy.k == 0
    lagging.lacks = [300, 200, 2, 200]
    for _ in range(200):
        k = policy.choose(simulation.batch)
        if k:
            break
        policy.observe(simulation.batch, _plain_verdict(simulation))
    assert k == 1
    assert simulation.batch.caps == [0, 0, 1, 0]


def _plain_verdict(simulation: Simulation) -> Verdict:
    simulation.now += 0.01
    rows = simulation.batch.rows
    return Verdict(
        torch.zeros(rows, 1, dtype=torch.int64),
        torch.zeros(rows, dtype=torch.int64),
        torch.zeros(rows, dtype=torch.int64),
    )


class Script(LengthPolicy):
    """Asks for k in each round as written, then for the last one again; caps likewise."""

    name = "script"

    def __init__(self, lengths: list[int], probe: int | None = None) -> None:
        self.lengths, self.probe = lengths, probe
        self.kept = self.drafted = 0

    def choose(self, batch: Batch) -> int:
        k = self.lengths.pop(0) if len(self.lengths) > 1 else self.lengths[0]
        if k and self.probe is not None:
            batch.caps = [k if row == self.probe else 0 for row in range(batch.rows)]
        return k

    def observe(self, batch: Batch, verdict: Verdict) -> None:
        self.kept += sum(verdict.host.accepted)
        self.drafted += sum(verdict.host.drafted)


@pytest.mark.parametrize("probe", [None, 0, 1, 2])
def test_after_500_plain_rounds_the_draft_models_cache_is_right(probe: int | None) -> None:
    model = ToyModel(max_positions=700)
    engine = make_engine(
        model, ToyModel(max_positions=700), drafter="model", num_speculative_tokens=3, max_model_len=700
    )
    script = engine.parts.policy = Script([0] * 500 + [2, 0, 0, 0, 3, 1, 4], probe)
    params = [SamplingParams(temperature=0, max_tokens=560, ignore_eos=True)] * 3
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]
    plain = make_engine(model, max_model_len=700)
    assert answers(run(engine, prompts, params)) == answers(run(plain, prompts, params))
    assert script.kept == script.drafted > 30  # the draft model is the target: every guess is right


@pytest.mark.parametrize("lengths", [[0, 0, 2, 0, 1], [1, 1, 0, 2]])
def test_drafts_that_were_only_timed_leave_nothing_behind(lengths: list[int]) -> None:
    """Else a first round without guesses, or with one row's, passes for the verdict on the last of them."""
    engine = make_engine(ToyModel(), ToyModel(), drafter="model", num_speculative_tokens=1)
    parts = engine.parts
    Calibration(parts.target, parts.drafter, parts.accept, Grid((1, 2), (0, 2), seconds=0.0)).run()
    parts.policy = Script(lengths, probe=1)
    params = [SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)] * 2
    plain = run(make_engine(ToyModel()), [[1, 2, 3], [4]], params)
    assert answers(run(engine, [[1, 2, 3], [4]], params)) == answers(plain)


@pytest.mark.parametrize("rounds", ["host", "device"])
def test_a_draft_model_that_cannot_pay_is_spared_the_prompts_and_catches_up_when_it_can(rounds: str) -> None:
    """Beyond two tokens a round every token costs as much as a plain one: two rows gain nothing, one does."""
    times = tuple(tuple(max(10.0, 5.0 * b * (k + 1)) for k in LENGTHS) for b in SIZES)
    engine = make_engine(
        ToyModel(), ToyModel(), drafter="model", num_speculative_tokens="auto", rounds=rounds, attention="padded"
    )
    policy = engine.parts.policy
    assert isinstance(policy, GoodputLength)
    policy.costs = CostModel(replace(linear_costs(), verify=times), LONGEST_AUTO)
    assert policy.hopeful(1)
    assert not policy.hopeful(2)
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


@pytest.mark.parametrize("drafter", ["model", "ngram"])
def test_the_default_is_auto_and_lossless(drafter: str) -> None:
    draft = ToyModel(blur=0.3) if drafter == "model" else None
    assert EngineConfig().num_speculative_tokens == "auto"
    engine = make_engine(ToyModel(), draft, drafter=drafter, num_speculative_tokens="auto")
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
