"""Always the same speculation length."""

from __future__ import annotations

from paceline.batch import Batch, Wish
from paceline.lengths.base import LengthPolicy


class FixedLength(LengthPolicy):
    """k guesses for every row, every round."""

    def __init__(self, k: int) -> None:
        self.k = self.most_guesses = k
        self.name = f"fixed({k})"

    def choose(self, batch: Batch) -> Wish:
        return Wish(self.k)
