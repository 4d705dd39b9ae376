"""The order of measurements, and the lines that compare them with the wanted figures."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from benchmarks.gpu.auto import AutoRun
from benchmarks.gpu.cells import Axes, Cell, Setting
from benchmarks.gpu.results import Automatic, Measured, Results, Traced
from benchmarks.gpu.show import Line, show
from benchmarks.gpu.stage import TimedRounds, Trace

BASE = Setting("gpt-7.8b", "bf16", "ragged", 600, 8)
AXES = Axes(pairs=("gpt-7.8b",), formats=("bf16",), contexts=(600,), rows=(8, 1), lengths=(0, 7))


def rounds_with(gained: float) -> TimedRounds:
    return TimedRounds(round_ms=1.0, rounds=10, gained=gained, context=650, accepted=8, drafted=10)


def measured(setting: Setting, k: int, ms: float, gained: float = 1.0) -> Measured:
    return Measured(Cell(setting, k), ms, floor_ms=6.0, played=rounds_with(gained))


def results_of(*found: Measured | Automatic | Traced) -> Results:
    results = Results()
    for each in found:
        results.add(each)
    return results


def line_of(lines: list[Line], what: str) -> Line:
    (line,) = [line for line in lines if what in line.what]
    return line


def test_a_speed_up_counts_the_expected_tokens() -> None:
    results = results_of(measured(BASE, 0, 6.0), measured(BASE, 2, 9.0, gained=2.6), measured(BASE, 1, 9.0))
    assert results.speedup(BASE, 2, 0.8) == pytest.approx(6.0 * (1 + 0.8 + 0.64) / 9.0)
    assert results.speedup(BASE, 2, 0.5) == pytest.approx(6.0 * 1.75 / 9.0)
    assert results.best(BASE, 0.8) == (results.speedup(BASE, 2, 0.8), 2)
    assert results.measured_speedup(BASE, 2) == pytest.approx(6.0 * 2.6 / 9.0)
    assert results.speedup(BASE, 3, 0.8) is None
    assert results.best(replace(BASE, rows=4), 0.8) is None


def test_lines_say_whether_the_wanted_figures_were_met() -> None:
    results = results_of(
        measured(BASE, 0, 7.0),
        measured(replace(BASE, rows=1), 0, 8.0),
        measured(BASE, 7, 9.0, gained=4.0),
        Measured(Cell(BASE, 0, "verify"), 6.0, 5.0),
        Measured(Cell(BASE, 7, "verify"), 7.5, 5.0),
        Traced(Cell(BASE, 0, "trace"), 7.0, Trace(6.95, {})),
        Traced(Cell(BASE, 7, "trace"), 9.0, Trace(8.0, {})),
        Automatic(Cell(BASE, 0, "auto"), AutoRun(100, 97, 0.8, 50)),
        Automatic(Cell(replace(BASE, rows=1), 0, "auto"), AutoRun(100, 250, 0.8, 90)),
    )
    lines = show(results, [], AXES)
    assert (line := line_of(lines, "plain decoding")).met is False
    assert line.measured == "75.0%"  # the worst batch: 6 of 8 ms
    assert line_of(lines, "verify k=7").met is False
    assert line_of(lines, "idle in a round, k=0").met is True
    assert line_of(lines, "idle in a round, k=7").met is False
    assert (line := line_of(lines, "acceptance 0.8, batch 8")).met is True
    assert line.measured == "3.24x (k=7; 3.11x with the measured tokens)"
    assert line_of(lines, "acceptance 0.9, batch 8").measured == "4.43x (k=7)"
    assert line_of(lines, "acceptance 0.8, batch 1").met is None
    assert line_of(lines, "time per token").measured == "2.16 ms"
    assert (line := line_of(lines, "auto over plain")).met is False
    assert line.measured == "0.97x"


def test_documents_say_that_acceptance_is_synthetic() -> None:
    results = results_of(
        measured(BASE, 0, 6.0), measured(BASE, 7, 9.0), Automatic(Cell(BASE, 0, "auto"), AutoRun(1, 2, None, 1))
    )
    for document in [*results.speedups_as_json(), results.as_json()[0]["played"], results.as_json()[-1]]:
        assert document["acceptance"] == "synthetic"
    best = results.speedups_as_json()[0]["best"]
    assert set(best) == {"0.7", "0.8", "0.85", "0.9"}
    assert best["0.8"]["k"] == 7
    assert json.loads(json.dumps(results.as_json())) == results.as_json()
