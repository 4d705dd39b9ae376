"""What a drafter's score of a guess is worth, learned from what became of guesses.

All of it lives on the host, in plain numbers: a round has a few guesses, for which numpy's calls would take longer than
the arithmetic.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from paceline.lengths import lately
from paceline.lengths.cost import LONGEST_AUTO

Scores: TypeAlias = Sequence[Sequence[float]] | None  # of each row's guesses; None: a drafter without any

BIN = 0.75  # width of a bin of scores, a log of odds
BINS = 9
CLUELESS = 0.7  # chance of a guess without a score, at first
MEMORY = 100.0  # guesses of a bin, or of any, after which one weighs 1 / e
ROW_MEMORY = 24.0  # rounds of a row, likewise
PRIOR = 3.0  # guesses that a score itself weighs in its bin
PRIOR_MISSES = 1.0  # what it weighs against misses, of all rows and of one; in one row, against right guesses, too
SURPRISE = 4.0  # standard deviations: a round's first guesses that are further from what was expected have changed
DOUBTED = 5.0  # guesses of a bin, or of any, that what was known before such a change weighs at most

_LOW = -2 * BIN  # log of odds at the upper edge of the first bin
_EDGES = tuple(1 / (1 + math.exp(-(_LOW + BIN * edge))) for edge in range(BINS - 1))
_CENTRES = tuple(1 / (1 + math.exp(-(_LOW + BIN * (place - 0.5)))) for place in range(BINS))
PLACES = 2 * BINS  # the first bin of those without scores
# Of first guesses; of those after a guess that was right, which is evidence, too; of guesses without scores, by place.
_BELIEVED = (*_CENTRES, *_CENTRES, *[CLUELESS] * LONGEST_AUTO)
ROW_FADE = math.exp(-1 / ROW_MEMORY)


@dataclass
class _Luck:
    """Of a row lately: guesses, misses, misses that the bins made expect; the odds of a miss over those of the bins."""

    judged: float = 0.0
    missed: float = 0.0
    expected: float = 0.0
    bad: float = 1.0

    def judge(self) -> None:
        missed, expected = self.missed + PRIOR_MISSES, self.expected + PRIOR_MISSES
        kept, expected_kept = self.judged - self.missed + PRIOR_MISSES, self.judged - self.expected + PRIOR_MISSES
        self.bad = missed / expected * expected_kept / kept


class Belief:
    """Turns scores into chances. Three corrections, each with a prior of a few guesses.

    Bins of scores (a reliability table): tried, kept. All guesses: misses over those that the scores made expect; it
    moves bins that nobody tried. Each row's luck: it moves the odds.
    """

    def __init__(self) -> None:
        self.tried, self.kept = [0.0] * len(_BELIEVED), [0.0] * len(_BELIEVED)
        self.all_missed = self.all_expected = 0.0
        self.rows: dict[int, _Luck] = {}
        self._fresh = _Luck()
        self._misses = [0.0] * len(_BELIEVED)  # the chance of a miss in each bin, whatever the row
        self._work_out()

    def chance(self, row: int, scores: Sequence[float] | None, place: int) -> float:
        """That the guess at ``place`` of this row's draft is right if all before it are."""
        miss = self._misses[_bin(scores, place)]
        return (1 - miss) / (1 - miss + miss * self.rows.get(row, self._fresh).bad)

    def error(self) -> float:
        """A standard error of the first guess's chance where there are no scores, over that chance; 0 before any."""
        chance, tried = 1 - self._misses[PLACES], self.tried[PLACES]
        return math.sqrt((1 - chance) / chance / (tried + 1)) if tried else 0.0

    def survivals(self, row: int, scores: Sequence[float] | None, count: int) -> list[float]:
        """Of the first ``count`` guesses of a row's draft: the chance that each and all before it are right."""
        survival, all_ = 1.0, []
        for place in range(count):
            survival *= self.chance(row, scores, place)
            all_.append(survival)
        return all_

    def learn(self, scores: Scores, judged: Sequence[int], right: Sequence[int]) -> None:
        """From a round: of row i's guesses, the first judged[i] were judged and the first right[i] were right."""
        if not any(judged):
            return
        bins = [
            [_bin(None if scores is None else scores[row], place) for place in range(count)]
            for row, count in enumerate(judged)
        ]
        if self._surprised(bins, right):  # few rows cannot be so far off
            self.doubt()
        for row, (line, good) in enumerate(zip(bins, right, strict=True)):
            if line:
                self._learn_row(row, line, good)
        self._learn_bins(bins, right)
        self._work_out()

    def _work_out(self) -> None:
        of_all = (self.all_missed + PRIOR_MISSES) / (self.all_expected + PRIOR_MISSES)
        for bin_, believed in enumerate(_BELIEVED):
            tried, prior = self.tried[bin_], PRIOR * min((1 - believed) * of_all, 1.0)
            self._misses[bin_] = (tried - self.kept[bin_] + prior) / (tried + PRIOR)

    def _surprised(self, bins: Sequence[Sequence[int]], right: Sequence[int]) -> bool:
        """Whether what is known cannot explain this round's first guesses, which are each row's own."""
        misses = [self._misses[line[0]] for line in bins if line]
        missed = sum(not good for line, good in zip(bins, right, strict=True) if line)
        variance = sum(miss * (1 - miss) for miss in misses)
        return abs(missed - sum(misses)) > SURPRISE * math.sqrt(variance + 1)

    def doubt(self) -> None:
        """The guesses may have become others: what is known weighs little from now on."""
        for bin_, tried in enumerate(self.tried):
            share = DOUBTED / max(tried, DOUBTED)
            self.tried[bin_], self.kept[bin_] = share * tried, share * self.kept[bin_]
        share = DOUBTED / max(self.all_expected, DOUBTED)
        self.all_missed, self.all_expected = share * self.all_missed, share * self.all_expected
        self.rows.clear()
        self._work_out()

    def _learn_row(self, row: int, bins: Sequence[int], right: int) -> None:
        luck = self.rows.setdefault(row, _Luck())
        luck.judged = luck.judged * ROW_FADE + len(bins)
        luck.missed = luck.missed * ROW_FADE + len(bins) - right
        luck.expected = luck.expected * ROW_FADE + sum(self._misses[bin_] for bin_ in bins)
        luck.judge()

    def _learn_bins(self, bins: Sequence[Sequence[int]], right: Sequence[int]) -> None:
        """Places tell least of what comes next: guesses without scores are forgotten as rounds are."""
        news: dict[int, list[int]] = {}  # by bin: tried, kept
        for line, good in zip(bins, right, strict=True):
            for place, bin_ in enumerate(line):
                new = news.setdefault(bin_, [0, 0])
                new[0] += 1
                new[1] += place < good
        judged, kept = map(sum, zip(*news.values(), strict=True))
        fade = math.exp(-judged / MEMORY)
        self.all_missed = self.all_missed * fade + judged - kept
        self.all_expected = self.all_expected * fade + sum(n * (1 - _BELIEVED[bin_]) for bin_, (n, _) in news.items())
        for bin_, (tried, good) in news.items():
            fade = math.exp(-tried / MEMORY)
            fade = min(fade, lately.MEMORY) if bin_ >= PLACES else fade
            self.tried[bin_] = self.tried[bin_] * fade + tried
            self.kept[bin_] = self.kept[bin_] * fade + good


def _bin(scores: Sequence[float] | None, place: int) -> int:
    if scores is None:
        return PLACES + min(place, LONGEST_AUTO - 1)
    return bisect_left(_EDGES, scores[place]) + (BINS if place else 0)
