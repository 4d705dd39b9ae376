"""What rounds of late have taken and brought."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from paceline.lengths.cost import CostTable

Clock: TypeAlias = Callable[[], float]  # seconds

RATE_MEMORY = 0.9  # what tokens and milliseconds of a round are worth a round later
PASS_MEMORY = 0.9  # what the time of a pass of the draft model is worth a pass later
MOST_SURPRISE = 2.0  # a pass counts as at most so many times what is believed: pauses of the machine are no news


class DraftTimes:
    """What drafts take, by rows: the table's times, corrected by those measured.

    The first pass may feed more tokens than the others, and so is known apart.
    """

    def __init__(self, table: CostTable) -> None:
        self._table = table
        self._first: dict[int, _Ratio] = {}
        self._step: dict[int, _Ratio] = {}

    def times(self, rows: int, longest: int) -> NDArray[np.float64]:
        """[longest + 1]: of k = 0, 1, ... guesses."""
        first, step = self._first_ms(rows), self.step_ms(rows)
        return np.array([0.0, *(first + step * after for after in range(longest))])

    def step_ms(self, rows: int) -> float:
        """Of every pass but the first."""
        first = self._first.get(rows, _Ratio()).value  # where no second pass was ever timed, as much off as the first
        return self._step.get(rows, _Ratio(first)).value * self._believed_step(rows)

    def observe(self, rows: int, passes: Sequence[float]) -> None:
        """A draft whose passes took so many ms."""
        self._first.setdefault(rows, _Ratio()).learn(passes[0], self._table.draft_ms(rows, 1))
        for ms in passes[1:]:
            self._step.setdefault(rows, _Ratio()).learn(ms, self._believed_step(rows))

    def _first_ms(self, rows: int) -> float:
        return self._first.get(rows, _Ratio()).value * self._table.draft_ms(rows, 1)

    def _believed_step(self, rows: int) -> float:
        return max(self._table.draft_ms(rows, 2) - self._table.draft_ms(rows, 1), 1e-6)


class _Ratio:
    """Measured over believed, lately."""

    def __init__(self, prior: float = 1.0) -> None:
        self._measured, self._weight = prior, 1.0

    @property
    def value(self) -> float:
        return self._measured / self._weight

    def learn(self, measured: float, believed: float) -> None:
        ratio = min(measured / max(believed, 1e-6), MOST_SURPRISE * self.value)
        self._measured = self._measured * PASS_MEMORY + ratio
        self._weight = self._weight * PASS_MEMORY + 1


class Mean:
    """What rounds of a kind brought lately; the first value is believed, and weighs as much as a round."""

    def __init__(self, believed: float) -> None:
        self._sum, self._weight = believed, 1.0

    @property
    def value(self) -> float:
        return self._sum / self._weight

    def learn(self, value: float) -> None:
        self._sum = self._sum * RATE_MEMORY + value
        self._weight = self._weight * RATE_MEMORY + 1


class Rate:
    """Tokens a millisecond of the rounds that speculated lately: 0 before any did.

    That the price of a guess follows what such prices have led to is Dinkelbach's way to the highest ratio (1967).
    """

    def __init__(self) -> None:
        self._tokens = self._ms = 0.0

    @property
    def value(self) -> float:
        return self._tokens / self._ms if self._ms else 0.0

    def learn(self, tokens: float, ms: float) -> None:
        self._tokens = self._tokens * RATE_MEMORY + tokens
        self._ms = self._ms * RATE_MEMORY + ms
