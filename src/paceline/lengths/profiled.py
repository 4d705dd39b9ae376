"""Synergy's policy (2310.18813): a table, measured beforehand, from the batch size to the best length."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping

from paceline.batch import Batch, Wish
from paceline.lengths.base import LengthPolicy, Means


class ProfiledLength(LengthPolicy):
    """The table's length for the present batch size; sizes between two entries are rounded up to the next.

    Beyond the largest entry, the largest counts.
    """

    name = "profiled"
    needs_profile = reads_profile = True

    def __init__(self, best: Mapping[int, int]) -> None:
        self._sizes = sorted(best)
        self._lengths = [best[size] for size in self._sizes]

    @classmethod
    def build(cls, means: Means, /) -> ProfiledLength:
        return cls(means.profile().best)

    def length_for(self, rows: int) -> int:
        return self._lengths[min(bisect_left(self._sizes, rows), len(self._sizes) - 1)]

    def choose(self, batch: Batch) -> Wish:
        return Wish(self.length_for(batch.rows))
