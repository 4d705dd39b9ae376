"""What rounds brought lately: decayed means, rates, the time saved for trials, and how fast each row comes on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.batch import Batch
from paceline.row_keeper import PerRow

MEMORY = 0.9  # what is left of a round's evidence a round later
ROW_MEMORY = 24.0  # rounds of a row after which one weighs 1 / e
ROW_FADE = math.exp(-1 / ROW_MEMORY)
SHARE = 0.0075  # of the time, for trying what looks worthless

PRIOR_ROUNDS = 2.0  # of one token, that a row's pace begins with


class Mean:
    """Of what was told lately; what was believed before counts as one value."""

    def __init__(self, believed: float) -> None:
        self.value, self._weight, self._squares = believed, 1.0, 0.0

    @property
    def error(self) -> float:
        """A standard error."""
        return math.sqrt(self._squares) / self._weight

    def learn(self, value: float) -> None:
        """What was known fades, and this joins it."""
        known, off = self._weight * MEMORY, value - self.value
        self._weight = known + 1
        self.value += off / self._weight
        self._squares = self._squares * MEMORY + off * off * known / self._weight

    def doubt(self, trials: float) -> None:
        """What is known counts as so many values at most, and is as sure as before."""
        share = min(1.0, trials / self._weight)
        self._weight, self._squares = self._weight * share, self._squares * share * share


class Rate:
    """Tokens a millisecond; 0 before any.

    That the price of a guess follows what such prices have led to is Dinkelbach's way to the highest ratio (1967).
    """

    def __init__(self) -> None:
        self._tokens = self._ms = 0.0

    @property
    def value(self) -> float:
        return self._tokens / self._ms if self._ms else 0.0

    def learn(self, tokens: float, ms: float) -> None:
        """Of a round."""
        self._tokens = self._tokens * MEMORY + tokens
        self._ms = self._ms * MEMORY + ms


class Savings:
    """A share of the time, kept for trials: never more than the last one that was thought of costs."""

    def __init__(self) -> None:
        self._ms = self._price = 0.0

    def save(self, ms: float) -> None:
        """Of a round that took so long."""
        self._ms = min(self._ms + SHARE * ms, self._price)

    def pay(self, price: float) -> bool:
        """Whether there are so many milliseconds; if so, they are spent."""
        self._price = price
        if self._ms < price:
            return False
        self._ms -= price
        return True


@dataclass
class _Pace:
    """Of a row lately: tokens and rounds."""

    tokens: float = PRIOR_ROUNDS
    rounds: float = PRIOR_ROUNDS
    ahead: float = 0.0  # plain rounds by which its guesses should have brought it ahead of plain decoding


class Paces:
    """How fast each row comes on, and what a token of each is worth.

    Tokens per millisecond are the goal while other requests wait or may come: all tokens are worth the same. A batch
    that only drains has ended when its slowest row has, which gains nothing when the others hurry on at its expense.
    There a token counts by how late its row will end.
    """

    def __init__(self) -> None:
        self.rows: PerRow[_Pace] = PerRow()

    def learn(self, accepted: Sequence[int], expected: Sequence[float], took: float) -> None:
        """From a round: guesses kept and expected to be, and its time over a plain one's. Bad luck is no debt."""
        for row, (kept, promised) in enumerate(zip(accepted, expected, strict=True)):
            pace = self.rows.setdefault(row, _Pace())
            pace.tokens = PRIOR_ROUNDS + (pace.tokens - PRIOR_ROUNDS) * ROW_FADE + kept + 1
            pace.ahead += promised + 1 - took
            pace.rounds = PRIOR_ROUNDS + (pace.rounds - PRIOR_ROUNDS) * ROW_FADE + 1

    def worth_of_tokens(self, batch: Batch) -> list[float]:
        """[B], 1 on average: what a token does for an early end of all is (when its row ends) / (the row's pace)."""
        if not batch.draining or batch.rows == 1:
            return [1.0] * batch.rows
        worth = [(batch.limits[row] - batch.lengths[row]) * self._rounds_a_token(row) ** 2 for row in range(batch.rows)]
        total = sum(worth)
        return [batch.rows * each / total for each in worth]

    def last(self, rows: int) -> tuple[int, float]:
        """The row that is least ahead, and by how many plain rounds that is."""
        ahead = [pace.ahead if (pace := self.rows.get(row)) else 0.0 for row in range(rows)]
        return ahead.index(min(ahead)), min(ahead)

    def _rounds_a_token(self, row: int) -> float:
        pace = self.rows.get(row)
        return 1.0 if pace is None else pace.rounds / pace.tokens
