"""Calibration of round times, and its handling of noise."""

from __future__ import annotations

from collections import Counter

import pytest

from paceline.config import SamplingParams
from paceline.core.batch import Batch
from paceline.core.draft import Draft, Verdict
from paceline.engine.rounds.kernels import NativeRound
from paceline.kernels import native
from paceline.lengths import calibration as calibration_module
from paceline.lengths.by_position import DEPTHS
from paceline.lengths.calibration import Calibration, Grid, TimedRun
from paceline.lengths.cost import CostTable
from toy import ToyModel, make_engine, run, slow_answer, tiny_native, tiny_native_experts

pytestmark = pytest.mark.usefixtures("one_thread")

(coarse,) = Grid.coarse.__defaults__  # the test suite shortens its table; this is the table itself


def calibration(grid: Grid) -> Calibration:
    parts = make_engine(ToyModel(), drafter="ngram", num_speculative_tokens=1).parts
    return Calibration(parts.target, parts.drafter, parts.accept, grid)


def test_an_engine_measures_powers_of_two_and_its_capacity() -> None:
    assert coarse(1).batch_sizes == (1,)
    assert coarse(12).batch_sizes == (1, 2, 4, 12)
    assert coarse(16).batch_sizes == (1, 2, 4, 8, 16)


def test_long_rounds_of_many_rows_are_skipped_but_every_size_has_two_lengths() -> None:
    grid = Grid((1, 16, 64), (0, 1, 3, 7), max_tokens=64)
    assert [grid.measured(rows) for rows in grid.batch_sizes] == [(0, 1, 3, 7), (0, 1, 3), (0, 1)]
    assert Grid((64,), (0, 1, 7)).measured(64) == (0, 1, 7)


def test_on_a_gpu_rounds_of_many_tokens_are_measured_not_extrapolated() -> None:
    grid = coarse(64, on_gpu=True)
    assert {grid.measured(rows) for rows in grid.batch_sizes} == {(0, 1, 3, 8)}
    assert set(grid.lengths) <= {0, *DEPTHS}


def test_skipped_rounds_are_extrapolated() -> None:
    grid = Grid((1, 4), (0, 1, 3), max_tokens=4)
    table = calibration(grid)._verify_table({(1, 0): 10, (1, 1): 11, (1, 3): 13, (4, 0): 12, (4, 1): 16})
    assert table == ((10, 11, 13), (12, 16, 24))


def test_a_round_is_never_slower_than_a_larger_one() -> None:
    noisy = {(1, 0): 10, (1, 1): 30, (1, 3): 12, (4, 0): 9, (4, 1): 13, (4, 3): 20}
    table = calibration(Grid((1, 4), (0, 1, 3)))._verify_table(noisy)
    assert table == ((9, 12, 12), (9, 13, 20))


def test_a_noisy_point_lowers_no_extrapolated_time() -> None:
    """The line through 25.6 and 16 ms leads below 0, where every smaller round followed it."""
    grid = Grid((1, 16), (0, 1, 3, 7), max_tokens=64)
    rows = {(1, 0): 8.0, (1, 1): 8.5, (1, 3): 9.0, (1, 7): 10.0, (16, 0): 12.0, (16, 1): 25.6, (16, 3): 16.0}
    table = calibration(grid)._verify_table(rows)
    assert table == ((8.0, 8.5, 9.0, 10.0), (12.0, 16.0, 16.0, 16.0))


class Machine:
    """A clock that only rounds move, and what they take; the first rounds of ``disturbed`` take ``factor`` times that.

    It stands in for the module ``time``.
    """

    def __init__(self, disturbed: tuple[int, int], factor: float, times: int) -> None:
        self.disturbed, self.factor, self.times = disturbed, factor, times
        self.seconds, self.played = 0.0, Counter[tuple[int, int]]()

    def perf_counter(self) -> float:
        return self.seconds

    def ms(self, rows: int, k: int) -> float:
        return 8 + 0.25 * rows * (k + 1)

    def play(self, rows: int, k: int) -> None:
        self.played[rows, k] += 1
        slow = (rows, k) == self.disturbed and self.played[rows, k] <= self.times
        self.seconds += self.ms(rows, k) / 1000 * (self.factor if slow else 1)

    def calibrate(self, monkeypatch: pytest.MonkeyPatch) -> CostTable:
        """Measure each point twice, and implausible ones again."""
        measured = calibration(Grid((1, 2, 4, 8, 16), (0, 1, 3, 7), seconds=0.0, max_tokens=64))
        monkeypatch.setattr(calibration_module, "time", self)
        monkeypatch.setattr(measured, "_verify", lambda rows, k, _: TimedRun(lambda: self.play(rows, k)))
        return measured.run()


@pytest.mark.parametrize(
    ("disturbed", "factor"), [((16, 1), 2.5), ((8, 0), 10.0), ((16, 3), 3.0), ((1, 7), 2.0), ((2, 7), 4.0)]
)
def test_implausible_points_are_measured_again(
    monkeypatch: pytest.MonkeyPatch, disturbed: tuple[int, int], factor: float
) -> None:
    """The machine may be busy in both measurements of a point."""
    machine = Machine(disturbed, factor, times=3)  # its own two, and one that only warms up or tells context
    table = machine.calibrate(monkeypatch)
    for rows in table.batch_sizes:
        for k in table.lengths:
            assert table.verify_ms(rows, k) == pytest.approx(machine.ms(rows, k), rel=0.25)


def test_points_that_stay_implausible_still_give_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Machine((16, 1), 1.6, times=1000).calibrate(monkeypatch)
    assert min(map(min, table.verify)) >= 8
    assert table.verify_ms(16, 7) >= table.verify_ms(16, 3) >= table.verify_ms(16, 1)


def test_a_table_comes_from_real_rounds() -> None:
    table = calibration(Grid((1, 3), (0, 2), seconds=0.0)).run()
    assert table.batch_sizes == (1, 3)
    assert all(0 < ms < 60_000 for line in table.verify for ms in line)


@pytest.mark.parametrize("drafter", ["model", "hybrid"])
def test_trees_drafted_for_a_measurement_are_in_no_round(drafter: str) -> None:
    """The first round may have fewer rows and no draft tokens."""
    target, params = ToyModel(), SamplingParams(max_tokens=6, seed=1, num_speculative_tokens=0)
    engine = make_engine(target, ToyModel(blur=0.3), drafter=drafter, num_speculative_tokens=2, speculation_width=3)
    parts = engine.parts
    Calibration(parts.target, parts.drafter, parts.accept, Grid((1, 4), (0, 2), seconds=0.0)).run()
    (output,) = run(engine, [[1, 2, 3]], [params])
    assert output.outputs[0].token_ids == slow_answer(target, [1, 2, 3], params)


@pytest.mark.skipif(not native.available(), reason=f"the kernels count experts: {native.why_none()}")
def test_measured_rounds_read_more_experts_the_more_tokens_they_have() -> None:
    """Draft tokens differ, so they run through different experts."""
    model = tiny_native_experts()
    engine = make_engine(model, drafter="ngram", max_batch_size=8)
    parts, layers, experts, used = engine.parts, 2, 11, 3
    one = model.expert_bytes() / (layers * experts)
    measurement = Calibration(parts.target, parts.drafter, parts.accept, Grid((1, 8), (0, 3), seconds=0.0))

    def read(rows: int, k: int) -> int:
        before = model.expert_bytes_read()
        measurement._verify(rows, k, measurement.context).measure()
        return model.expert_bytes_read() - before

    assert read(1, 0) == layers * used * one, "a token reads its experts"
    assert layers * used * one < read(1, 3) < read(8, 3) <= model.expert_bytes()


@pytest.mark.skipif(not native.available(), reason=f"the kernels play these rounds: {native.why_none()}")
def test_native_rounds_are_measured_as_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, played, by_host = make_engine(tiny_native(1), drafter="ngram"), set[tuple[int, int, int]](), list[Batch]()
    play = NativeRound.run

    def watched(runner: NativeRound, draft: Draft) -> Verdict:
        verdict = play(runner, draft)
        played.add((runner._batch.rows, draft.k, len(verdict.gained)))
        assert runner._batch is not engine.batch, "no request sees it"
        return verdict

    monkeypatch.setattr(NativeRound, "run", watched)
    monkeypatch.setattr(engine.parts.target, "verify", lambda batch, _draft: by_host.append(batch))
    table = engine.measure_costs(Grid((1, 3), (0, 2), seconds=0.0))
    assert {place[:2] for place in played} == {(1, 0), (1, 2), (3, 0), (3, 2)}
    assert all(rows == gained for rows, _, gained in played)
    assert not by_host
    assert all(0 < ms < 60_000 for line in table.verify for ms in line)
    engine.scheduler.check_integrity()
