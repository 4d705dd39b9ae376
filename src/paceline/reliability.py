"""What a drafter's own confidence in its guesses is worth, learned from what became of them.

R rows of capacity, B live rows, K guesses. All of it lives on the host, in plain numbers: a round has a few guesses,
for which numpy's calls would take longer than the arithmetic.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

EDGES = (0.2, 0.45, 0.6, 0.72, 0.8, 0.88, 0.94, 0.98)  # of the bins
CENTRES = (0.1, 0.33, 0.53, 0.66, 0.76, 0.84, 0.91, 0.96, 0.99)  # what a confidence counts as at first
BIN_MEMORY = 100.0  # guesses of a bin after which one weighs 1 / e
ALL_MEMORY = 100.0  # guesses of any kind, likewise
ROW_MEMORY = 24.0  # rounds of a row, likewise
PRIOR_TRIALS = 4.0  # what a confidence itself weighs in its bin
PRIOR_MISSES = 2.0  # what it weighs against misses, of all rows and of one

_ROW_FADE = math.exp(-1 / ROW_MEMORY)


class Reliability:
    """Turns confidences into chances. Three corrections, each with a prior of a few guesses.

    Bins of confidence (a reliability table): tried, kept [9]. All guesses: misses over those that the confidences made
    expect; it moves bins that nobody tried. Each row: misses over those that the bins made expect: missed, expected
    [R].
    """

    def __init__(self, capacity: int) -> None:
        self.tried, self.kept = [0.0] * len(CENTRES), [0.0] * len(CENTRES)
        self.all_missed = self.all_expected = 0.0
        self.missed, self.expected = [0.0] * capacity, [0.0] * capacity
        self._misses = [1 - centre for centre in CENTRES]  # the chance of a miss by bin, whatever the row

    def reset(self, row: int) -> None:
        """A new sequence begins."""
        self.missed[row] = self.expected[row] = 0.0

    def copy_row(self, source: int, destination: int) -> None:
        self.missed[destination], self.expected[destination] = self.missed[source], self.expected[source]

    def chance(self, row: int, confidence: float) -> float:
        """That a guess of this row is right if all before it are."""
        luck = (self.missed[row] + PRIOR_MISSES) / (self.expected[row] + PRIOR_MISSES)
        return 1 - min(self._misses[bisect_left(EDGES, confidence)] * luck, 1.0)

    def update(self, confidence: Sequence[Sequence[float]], judged: Sequence[int], right: Sequence[int]) -> None:
        """Learn from a round: of row i's guesses, the first judged[i] were judged and the first right[i] were right."""
        if not any(judged):
            return
        tried, kept = [0] * len(CENTRES), [0] * len(CENTRES)
        for row, (count, good) in enumerate(zip(judged, right, strict=True)):
            if not count:
                continue
            bins = [bisect_left(EDGES, score) for score in confidence[row][:count]]
            for place, bin_ in enumerate(bins):
                tried[bin_] += 1
                kept[bin_] += place < good
            expected = sum(self._misses[bin_] for bin_ in bins)
            self.missed[row] = self.missed[row] * _ROW_FADE + count - good
            self.expected[row] = self.expected[row] * _ROW_FADE + expected
        self._learn_bins(tried, kept)

    def _learn_bins(self, tried: list[int], kept: list[int]) -> None:
        """So many guesses of each bin were judged, and so many of them right."""
        forget = math.exp(-sum(tried) / ALL_MEMORY)
        expected = sum(new * (1 - centre) for new, centre in zip(tried, CENTRES, strict=True))
        self.all_missed = self.all_missed * forget + sum(tried) - sum(kept)
        self.all_expected = self.all_expected * forget + expected
        of_all = (self.all_missed + PRIOR_MISSES) / (self.all_expected + PRIOR_MISSES)
        for bin_, (centre, new, good) in enumerate(zip(CENTRES, tried, kept, strict=True)):
            if new:
                fade = math.exp(-new / BIN_MEMORY)
                self.tried[bin_] = self.tried[bin_] * fade + new
                self.kept[bin_] = self.kept[bin_] * fade + good
            prior = PRIOR_TRIALS * min((1 - centre) * of_all, 1.0)
            self._misses[bin_] = (self.tried[bin_] - self.kept[bin_] + prior) / (self.tried[bin_] + PRIOR_TRIALS)
