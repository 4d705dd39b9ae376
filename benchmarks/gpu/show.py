"""The requested figures: wanted and measured values, and whether they are met."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.gpu.attention import LONGER, SDPA, Timed
from benchmarks.gpu.cells import RATE, Axes, Cell, Setting, traces
from benchmarks.gpu.models import WEIGHT_BYTES, WeightFormat
from benchmarks.gpu.results import Results

# By bytes per weight.
# Wanted figures by bytes of a weight; of 4 bits a plain round in 0.55 of bfloat16's time
BANDWIDTH = {2: 0.80, 1: 0.70, 0.625: 0.45}
VERIFY = {2: 1.15, 1: 1.25, 0.625: 1.25}
MS_PER_TOKEN = {2: 2.7, 1: 1.6, 0.625: 1.5}  # on an H100

SPEEDUPS = ((1, 0.8, 2.7), (8, 0.8, 2.5), (32, 0.8, 1.9), (64, 0.8, 1.5), (8, 0.9, 3.5))  # rows, acceptance, wanted
IDLE, AUTO, LONG_ROW = 0.03, 0.98, 2.0
PAPER_PAIR = "gpt-7.8b"  # the model whose time per token is in the paper
BY_TESTS = ("greedy and coupled outputs equal the CPU's in fp32", "bf16 output is batch-invariant when deterministic")


@dataclass(frozen=True)
class Line:
    """One figure. met: None if it was not measured."""

    what: str
    wanted: str
    measured: str | None
    met: bool | None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class _Unit:
    """The format of a number."""

    form: str

    def at_least(self, what: str, value: float | None, wanted: float) -> Line:
        met = None if value is None else value >= wanted
        return Line(what, "at least " + self.form.format(wanted), self._write(value), met)

    def at_most(self, what: str, value: float | None, wanted: float) -> Line:
        met = None if value is None else value <= wanted
        return Line(what, "at most " + self.form.format(wanted), self._write(value), met)

    def _write(self, value: float | None) -> str | None:
        return None if value is None else self.form.format(value)


_SHARE, _TIMES, _MS = _Unit("{:.1%}"), _Unit("{:.2f}x"), _Unit("{:.2f} ms")


def show(results: Results, attention: Sequence[Timed], axes: Axes) -> list[Line]:
    """All lines; speed-ups are at synthetic acceptance, over plain decoding of the same run."""
    lines = [line for pair in axes.pairs for to in axes.formats for line in _Model(results, axes, pair, to).lines()]
    by_tests = [Line(what, "always", "see tests/kernels/gpu", None) for what in BY_TESTS]
    return [*lines, *_attention(results, attention), *by_tests]


@dataclass(frozen=True)
class _Model:
    """The lines of a pair in one format."""

    results: Results
    axes: Axes
    pair: str
    format: WeightFormat

    def lines(self) -> Iterator[Line]:
        who, size = f"{self.pair} {self.format}", WEIGHT_BYTES[self.format]
        rows, k = self.axes.rows[0], self.axes.lengths[1]
        yield _SHARE.at_least(
            f"{who}: plain decoding, fraction of bandwidth, batch 1..{rows}", self._plain(), BANDWIDTH[size]
        )
        yield _TIMES.at_most(f"{who}: verify k={k} over a decode step, batch {rows}", self._verify(k), VERIFY[size])
        for length in (0, k) if self._is_traced() else ():
            yield _SHARE.at_most(f"{who}: GPU idle in a round, k={length}, batch {rows}", self._idle(length), IDLE)
        for batch, rate, wanted in SPEEDUPS:
            yield self._speedup(f"{who}: speed-up at acceptance {rate}, batch {batch}", batch, rate, wanted)
        if self.pair == PAPER_PAIR:
            yield _MS.at_most(f"{who}: time per token, batch {rows}", self._ms_per_token(), MS_PER_TOKEN[size])
        if (auto := self._auto()) is not None:
            yield _TIMES.at_least(f"{who}: auto over plain, worst batch", auto, AUTO)

    def _at(self, rows: int) -> Setting:
        axes = self.axes
        return Setting(self.pair, self.format, axes.attentions[0], axes.contexts[0], rows)

    def _plain(self) -> float | None:
        cells = [Cell(self._at(rows), 0) for rows in self.axes.rows if rows <= self.axes.rows[0]]
        return min((found.of_floor for cell in cells if (found := self.results.measured.get(cell))), default=None)

    def _verify(self, k: int) -> float | None:
        setting = self._at(self.axes.rows[0])
        step, verify = (self.results.measured.get(Cell(setting, length, "verify")) for length in (0, k))
        return verify.ms / step.ms if step and verify else None

    def _idle(self, k: int) -> float | None:
        found = self.results.traced.get(Cell(self._at(self.axes.rows[0]), k, "trace"))
        return None if found is None else found.idle

    def _is_traced(self) -> bool:
        return any(_model(cell) == (self.pair, self.format) for cell in traces(self.axes))

    def _speedup(self, what: str, rows: int, rate: float, wanted: float) -> Line:
        best = self.results.best(self._at(rows), rate)
        line = _TIMES.at_least(what, best and best[0], wanted)
        if best is None:
            return line
        measured = self.results.measured_speedup(replace(self._at(rows), rate=rate), best[1])
        really = "" if measured is None else f"; {measured:.2f}x with the measured tokens"
        return replace(line, measured=f"{line.measured} (k={best[1]}{really})")

    def _ms_per_token(self) -> float | None:
        setting = self._at(self.axes.rows[0])
        best = self.results.best(setting, RATE)
        return best and self.results.measured[Cell(setting, best[1])].ms_per_token(RATE)

    def _auto(self) -> float | None:
        mine = (each for each in self.results.automatic.values() if _model(each.cell) == (self.pair, self.format))
        return min((each.run.over_plain for each in mine), default=None)


def _attention(results: Results, attention: Sequence[Timed]) -> Iterator[Line]:
    """The worst case of each comparison."""
    alone = [over for timed in attention for name, over in timed.over_ragged.items() if name != SDPA]
    yield _TIMES.at_least("attention alone: padded, split over ragged, worst", min(alone, default=None), 1.0)
    others = [found for cell, found in results.measured.items() if cell.setting.attention != "ragged"]
    references = [(found, results.measured.get(_ragged(found.cell))) for found in others]
    rounds = [found.ms / reference.ms for found, reference in references if reference]
    yield _TIMES.at_least("whole rounds: padded, split over ragged, worst", min(rounds, default=None), 1.0)
    long = [timed.over_ragged for timed in attention if timed.case.spread == "one long" and timed.case.rows >= 8]
    padded = [over["padded"] for over in long if "padded" in over]
    what = f"attention alone: padded over ragged, one row of 8 or more {LONGER} times as long"
    yield _TIMES.at_least(what, min(padded, default=None), LONG_ROW)


def _model(cell: Cell) -> tuple[str, WeightFormat]:
    return cell.setting.pair, cell.setting.format


def _ragged(cell: Cell) -> Cell:
    return replace(cell, setting=replace(cell.setting, attention="ragged"))
