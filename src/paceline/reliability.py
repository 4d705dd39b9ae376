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
PRIOR_TRIALS = 3.0  # what a confidence itself weighs in its bin
PRIOR_MISSES = 1.0  # what it weighs against misses, of all rows and of one; in one row, against right guesses, too
SURPRISE = 4.0  # standard deviations: a round's first guesses that are further from what was expected have changed
REMEMBERED = 0.05  # what all that was known before such a round weighs after it

_BELIEVED = (*CENTRES, *CENTRES)  # of first guesses, and of those after a guess that was right, which is evidence too
_ROW_FADE = math.exp(-1 / ROW_MEMORY)


class Reliability:
    """Turns confidences into chances. Three corrections, each with a prior of a few guesses.

    Bins of confidence (a reliability table), the first guesses of a draft and the others apart: tried, kept [18]. All
    guesses: misses over those that the confidences made expect; it moves bins that nobody tried. Each row: its guesses,
    their misses, and the misses that the bins made expect: judged, missed, expected [R]; it moves the odds.
    """

    def __init__(self, capacity: int) -> None:
        self.tried, self.kept = [0.0] * len(_BELIEVED), [0.0] * len(_BELIEVED)
        self.all_missed = self.all_expected = 0.0
        self.judged, self.missed, self.expected = ([0.0] * capacity for _ in range(3))
        self.bad_luck = [1.0] * capacity  # the odds of a miss of each row, over those of all rows

    def reset(self, row: int) -> None:
        """A new sequence begins."""
        self.judged[row] = self.missed[row] = self.expected[row] = 0.0
        self.bad_luck[row] = 1.0

    def copy_row(self, source: int, destination: int) -> None:
        for table in (self.judged, self.missed, self.expected, self.bad_luck):
            table[destination] = table[source]

    def chance(self, row: int, confidence: float, place: int = 0) -> float:
        """That a guess of this row, the one at ``place`` of its draft, is right if all before it are."""
        miss = self._miss(_bin(confidence, place))
        return (1 - miss) / (1 - miss + miss * self.bad_luck[row])

    def _miss(self, bin_: int) -> float:
        """The chance of a miss in a bin, whatever the row."""
        of_all = (self.all_missed + PRIOR_MISSES) / (self.all_expected + PRIOR_MISSES)
        prior = PRIOR_TRIALS * min((1 - _BELIEVED[bin_]) * of_all, 1.0)
        return (self.tried[bin_] - self.kept[bin_] + prior) / (self.tried[bin_] + PRIOR_TRIALS)

    def _bad_luck(self, row: int) -> float:
        missed, expected, judged = self.missed[row] + PRIOR_MISSES, self.expected[row] + PRIOR_MISSES, self.judged[row]
        kept, expected_kept = judged - self.missed[row] + PRIOR_MISSES, judged - self.expected[row] + PRIOR_MISSES
        return missed / expected * expected_kept / kept

    def update(self, confidence: Sequence[Sequence[float]], judged: Sequence[int], right: Sequence[int]) -> None:
        """Learn from a round: of row i's guesses, the first judged[i] were judged and the first right[i] were right."""
        if not any(judged):
            return
        bins = [
            [_bin(score, place) for place, score in enumerate(line[:count])]
            for line, count in zip(confidence, judged, strict=True)
        ]
        if len(bins) > SURPRISE and self._surprised(bins, right):  # fewer rows cannot be so far off
            self._forget()
        news: dict[int, list[int]] = {}  # by bin: tried, kept
        for row, (line, good) in enumerate(zip(bins, right, strict=True)):
            if line:
                self._learn_row(row, line, good)
            for place, bin_ in enumerate(line):
                new = news.setdefault(bin_, [0, 0])
                new[0] += 1
                new[1] += place < good
        self._learn_bins(news)

    def _surprised(self, bins: Sequence[Sequence[int]], right: Sequence[int]) -> bool:
        """Whether what is known cannot explain this round's first guesses, which are each row's own."""
        misses = [self._miss(line[0]) for line in bins if line]
        missed = sum(not good for line, good in zip(bins, right, strict=True) if line)
        variance = sum(miss * (1 - miss) for miss in misses)
        return abs(missed - sum(misses)) > SURPRISE * math.sqrt(variance + 1)

    def _forget(self) -> None:
        """The guesses have become others."""
        for table in (self.tried, self.kept, self.judged, self.missed, self.expected):
            table[:] = [REMEMBERED * value for value in table]
        self.all_missed, self.all_expected = REMEMBERED * self.all_missed, REMEMBERED * self.all_expected
        self.bad_luck = [self._bad_luck(row) for row in range(len(self.judged))]

    def _learn_row(self, row: int, bins: Sequence[int], right: int) -> None:
        self.judged[row] = self.judged[row] * _ROW_FADE + len(bins)
        self.missed[row] = self.missed[row] * _ROW_FADE + len(bins) - right
        self.expected[row] = self.expected[row] * _ROW_FADE + sum(map(self._miss, bins))
        self.bad_luck[row] = self._bad_luck(row)

    def _learn_bins(self, news: dict[int, list[int]]) -> None:
        """So many guesses of a bin were judged, and so many of them right."""
        judged, right = map(sum, zip(*news.values(), strict=True))
        forget = math.exp(-judged / ALL_MEMORY)
        expected = sum(new * (1 - _BELIEVED[bin_]) for bin_, (new, _) in news.items())
        self.all_missed = self.all_missed * forget + judged - right
        self.all_expected = self.all_expected * forget + expected
        for bin_, (new, good) in news.items():
            fade = math.exp(-new / BIN_MEMORY)
            self.tried[bin_] = self.tried[bin_] * fade + new
            self.kept[bin_] = self.kept[bin_] * fade + good


def _bin(confidence: float, place: int) -> int:
    return bisect_left(EDGES, confidence) + (len(CENTRES) if place else 0)
