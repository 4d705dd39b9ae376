"""Results of the cells, and the ratios between them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeAlias

from benchmarks.gpu.auto import AutoRun
from benchmarks.gpu.cells import RATE, RATES, Cell, Setting
from benchmarks.gpu.floors import tokens_a_round
from benchmarks.gpu.stage import TimedRounds, Trace


@dataclass(frozen=True)
class Measured:
    """The time of a round, or of the target's pass alone, and its floor.

    queued_ms: a round's time when the device need not wait for the host.
    """

    cell: Cell
    ms: float
    floor_ms: float
    played: TimedRounds | None = None
    queued_ms: float | None = None

    @property
    def of_floor(self) -> float:
        """Floor over measured time, from 0 to 1."""
        return self.floor_ms / self.ms

    def ms_per_token(self, rate: float) -> float:
        """Milliseconds per token of a sequence, at this acceptance rate."""
        return self.ms / tokens_a_round(rate, self.cell.k)

    def as_json(self) -> dict[str, Any]:
        document = {**self.cell.as_json(), "ms": self.ms, "floor_ms": self.floor_ms, "of_floor": self.of_floor}
        if self.played is not None:
            document["queued_ms"] = self.queued_ms
            document["ms_per_token"] = {str(rate): self.ms_per_token(rate) for rate in RATES}
            document["played"] = {**asdict(self.played), "acceptance": "synthetic"}
        return document


@dataclass(frozen=True)
class Automatic:
    """Results of auto in the cell's setting."""

    cell: Cell
    run: AutoRun

    def as_json(self) -> dict[str, Any]:
        return {**self.cell.as_json(), "tokens_a_second": self.run.as_json(), "acceptance": "synthetic"}


@dataclass(frozen=True)
class Traced:
    """A round of the same cell: its time without tracing, and its trace."""

    cell: Cell
    ms: float
    traced: Trace

    @property
    def idle(self) -> float:
        """Fraction of the round in which the device was idle, between rounds and between kernels."""
        return max(0.0, 1 - self.traced.busy_ms / self.ms)

    def as_json(self) -> dict[str, Any]:
        return {**self.cell.as_json(), "ms": self.ms, "idle": self.idle, **asdict(self.traced)}


Result: TypeAlias = Measured | Automatic | Traced


@dataclass
class Results:
    """Results by cell."""

    measured: dict[Cell, Measured] = field(default_factory=dict)
    automatic: dict[Cell, Automatic] = field(default_factory=dict)
    traced: dict[Cell, Traced] = field(default_factory=dict)

    def add(self, result: Result) -> None:
        match result:
            case Measured():
                self.measured[result.cell] = result
            case Automatic():
                self.automatic[result.cell] = result
            case Traced():
                self.traced[result.cell] = result

    def speedup(self, setting: Setting, k: int, rate: float) -> float | None:
        """Tokens per second over plain decoding in the same setting; None if either was not measured.

        A round's time does not depend on acceptance, so it is taken from any measured rate; the tokens per round are (1
        - a^(k + 1)) / (1 - a), the expectation of the measured ones.
        """
        base = replace(setting, rate=RATE)
        plain = self.measured.get(Cell(base, 0))
        speculating = self.measured.get(Cell(setting, k)) or self.measured.get(Cell(base, k))
        if plain is None or speculating is None:
            return None
        return plain.ms_per_token(rate) / speculating.ms_per_token(rate)

    def best(self, setting: Setting, rate: float) -> tuple[float, int] | None:
        """The largest speed-up of the measured lengths (k > 0), and that length."""
        lengths = {cell.k for cell in self.measured if cell.setting.rows == setting.rows and cell.k > 0}
        known = [(gain, k) for k in sorted(lengths) if (gain := self.speedup(setting, k, rate)) is not None]
        return max(known, default=None)

    def measured_speedup(self, setting: Setting, k: int) -> float | None:
        """The speed-up with the tokens that the rounds really gained."""
        plain, speculating = (
            self.measured.get(Cell(replace(setting, rate=RATE), 0)),
            self.measured.get(Cell(setting, k)),
        )
        if plain is None or speculating is None or speculating.played is None:
            return None
        return plain.ms * speculating.played.gained / speculating.ms

    def settings(self) -> list[Setting]:
        """The settings whose rounds at the usual rate were measured, in the order of measurement."""
        cells = [cell for cell in self.measured if cell.kind == "round" and cell.setting.rate == RATE]
        return list(dict.fromkeys(cell.setting for cell in cells))

    def as_json(self) -> list[dict[str, Any]]:
        return [result.as_json() for kind in (self.measured, self.automatic, self.traced) for result in kind.values()]

    def speedups_as_json(self) -> list[dict[str, Any]]:
        """The best length of every setting at every rate."""
        found = []
        for setting in self.settings():
            best = {str(rate): self.best(setting, rate) for rate in RATES}
            known = {rate: {"speedup": gain[0], "k": gain[1]} for rate, gain in best.items() if gain is not None}
            if known:
                fields = {name: value for name, value in asdict(setting).items() if name != "rate"}
                found.append({**fields, "acceptance": "synthetic", "best": known})
        return found
