"""What rounds brought lately: decayed means, rates, and the time saved for trials."""

from __future__ import annotations

import math

MEMORY = 0.9  # what is left of a round's evidence a round later
SHARE = 0.0075  # of the time, for trying what looks worthless


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
