"""BASS's batch-wide draft length (2404.15778, Algorithm 1): up while some row keeps everything, down when none does."""

from __future__ import annotations

import math

from paceline.batch import Batch, Wish
from paceline.draft import Verdict
from paceline.lengths.base import LengthPolicy
from paceline.params import MAX_SPECULATION_LENGTH

FIRST = 7
INCREMENT = 2
SHRINK = 10  # a round that no row kept whole takes away ceil(l / SHRINK), and one more if the round before did so too


class BassLength(LengthPolicy):
    """One length l for all rows, driven by x_i = guesses that row i kept. Finished rows are not in the batch."""

    name = "bass"

    def __init__(self) -> None:
        self.k = FIRST
        self._shrank = 0

    def choose(self, batch: Batch) -> Wish:
        return Wish(self.k)

    def observe(self, batch: Batch, verdict: Verdict) -> None:
        if max(verdict.host.drafted) > 0:  # nothing guessed is no evidence
            self.update(verdict.host.accepted, max(verdict.host.drafted))

    def update(self, kept: list[int], drafted: int) -> None:
        """One step of Algorithm 1. drafted: the length of the round just played (the engine may have cut it short)."""
        if max(kept) == drafted:
            self.k = min(self.k + INCREMENT, MAX_SPECULATION_LENGTH)
            self._shrank = 0
        else:
            self.k = max(1, max(kept), self.k - math.ceil(self.k / SHRINK) - self._shrank)
            self._shrank = 1
