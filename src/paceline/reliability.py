"""What a drafter's own confidence in its guesses is worth, learned from what became of them.

R rows of capacity, B live rows, K guesses. All of it lives on the host (numpy).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Chances = NDArray[np.float64]
Bins = NDArray[np.int64]

EDGES = np.array([0.2, 0.45, 0.6, 0.72, 0.8, 0.88, 0.94, 0.98])  # of the bins
CENTRES = np.array([0.1, 0.33, 0.53, 0.66, 0.76, 0.84, 0.91, 0.96, 0.99])  # what a confidence counts as at first
BIN_MEMORY = 100.0  # guesses of a bin after which one weighs 1 / e
ALL_MEMORY = 100.0  # guesses of any kind, likewise
ROW_MEMORY = 24.0  # rounds of a row, likewise
PRIOR_TRIALS = 4.0  # what a confidence itself weighs in its bin
PRIOR_MISSES = 2.0  # what it weighs against misses, of all rows and of one


class Reliability:
    """Turns confidences into chances. Three corrections, each with a prior of a few guesses.

    Bins of confidence (a reliability table): tried, kept [9]. All guesses: misses over those that the confidences made
    expect; it moves bins that nobody tried. Each row: misses over those that the bins made expect: missed, expected
    [R].
    """

    def __init__(self, capacity: int) -> None:
        self.tried, self.kept = np.zeros(len(CENTRES)), np.zeros(len(CENTRES))
        self.all_missed = self.all_expected = 0.0
        self.missed, self.expected = np.zeros(capacity), np.zeros(capacity)
        self._misses = 1 - CENTRES  # the chance of a miss by bin, whatever the row

    def reset(self, row: int) -> None:
        """A new sequence begins."""
        self.missed[row] = self.expected[row] = 0

    def copy_row(self, source: int, destination: int) -> None:
        self.missed[destination], self.expected[destination] = self.missed[source], self.expected[source]

    @staticmethod
    def bins(confidence: Chances) -> Bins:
        """Confidences [B, K] from 0 to 1 -> [B, K], what the other methods take."""
        return EDGES.searchsorted(confidence)

    def acceptance(self, bins: Bins) -> Chances:
        """[B, K]: the chance that a guess is right if all before it are."""
        rows = len(bins)
        of_row = (self.missed[:rows] + PRIOR_MISSES) / (self.expected[:rows] + PRIOR_MISSES)
        return 1 - np.minimum(self._misses[bins] * of_row[:, None], 1)

    def update(self, bins: Bins, tried: NDArray[np.bool_], kept: NDArray[np.bool_]) -> None:
        """Learn from a round: which guesses were judged (all before them being right), and which were right; [B, K]."""
        row, place = np.nonzero(tried)
        if len(row) == 0:
            return
        rows, bins, missed = len(tried), bins[row, place], ~kept[row, place]
        self._learn_rows(rows, row, missed, self._misses[bins])
        new = np.bincount(bins, minlength=len(self.tried))
        fade = np.exp(-new / BIN_MEMORY)
        self.tried = self.tried * fade + new
        self.kept = self.kept * fade + np.bincount(bins[~missed], minlength=len(self.kept))
        forget = float(np.exp(-len(row) / ALL_MEMORY))
        self.all_missed = self.all_missed * forget + float(missed.sum())
        self.all_expected = self.all_expected * forget + float((1 - CENTRES)[bins].sum())
        of_all = (self.all_missed + PRIOR_MISSES) / (self.all_expected + PRIOR_MISSES)
        prior = np.minimum((1 - CENTRES) * of_all, 1)
        self._misses = (self.tried - self.kept + PRIOR_TRIALS * prior) / (self.tried + PRIOR_TRIALS)

    def _learn_rows(self, rows: int, row: Bins, missed: NDArray[np.bool_], expected: Chances) -> None:
        judged = np.bincount(row, minlength=rows)
        fade = np.where(judged > 0, np.exp(-1 / ROW_MEMORY), 1.0)
        self.missed[:rows] = self.missed[:rows] * fade + np.bincount(row, missed, minlength=rows)
        self.expected[:rows] = self.expected[:rows] * fade + np.bincount(row, expected, minlength=rows)
