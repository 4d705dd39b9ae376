"""From the scores of draft tokens, or their positions, to probabilities that they are accepted.

Draft tokens count whether or not they were verified. All estimates are Python numbers on the host: a round has few
draft tokens, and a numpy call takes longer than the arithmetic for them.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from paceline.core.draft import MAX_KINDS, Draft, Verdict
from paceline.core.row_keeper import PerRow
from paceline.lengths.records import ROUND_FADE, ROW_FADE

JudgedToken: TypeAlias = tuple[int, bool]  # (bin or position of a draft token, whether it is right)

LONGEST_AUTO = 16  # draft tokens per row: the most that auto considers
BIN_WIDTH = 0.75  # log-odds that one bin of scores spans
BINS = 9
PRIOR_ACCEPTANCE = 0.7  # probability of a draft token without a score, before any was judged
TOKEN_MEMORY = 100.0  # draft tokens, of one bin or of all, after which a token's weight has fallen to 1 / e
SCORE_PRIOR = 3.0  # draft tokens that the score itself counts as in its bin
MISS_PRIOR = 1.0  # misses and hits added to the observed and to the expected count: damps the first ones
CHANGE_SIGMAS = 4.0  # standard deviations beyond which a round's first draft tokens show that the acceptance changed
MAX_DOUBTED = 5.0  # what a record counts as at most after such a change or in a trial, in draft tokens or rounds

_LOWEST_EDGE = -2 * BIN_WIDTH  # log-odds at the upper edge of the first bin
_EDGES = tuple(1 / (1 + math.exp(-(_LOWEST_EDGE + BIN_WIDTH * edge))) for edge in range(BINS - 1))
_CENTRES = tuple(1 / (1 + math.exp(-(_LOWEST_EDGE + BIN_WIDTH * (place - 0.5)))) for place in range(BINS))
# The bins of each kind come in two groups: first draft tokens of a row, then those whose parent is a draft token. A
# parent that was right is evidence by itself. Behind them is one bin per position, for draft tokens without a score.
POSITION_BINS = 2 * BINS * MAX_KINDS  # index of the first of these
_PRIORS = (*_CENTRES * 2 * MAX_KINDS, *[PRIOR_ACCEPTANCE] * LONGEST_AUTO)  # [bins]: probability before any observation


@dataclass
class _MissOdds:
    """Factor on the odds of a miss, from recent draft tokens with fading weights.

    judged, missed, expected: draft tokens, misses, and the misses that were expected of them. ``MISS_PRIOR`` misses and
        as many hits, all of them expected, are added as a prior.
    odds_ratio: odds of a miss over the expected odds.
    """

    judged: float = 0.0
    missed: float = 0.0
    expected: float = 0.0
    odds_ratio: float = 1.0

    def learn(self, judged: float, missed: float, expected: float, fade: float) -> None:
        """Add a round. fade: weight of all earlier ones."""
        self.judged, self.missed = self.judged * fade + judged, self.missed * fade + missed
        self.expected = self.expected * fade + expected
        odds = (self.missed + MISS_PRIOR) / (self.judged - self.missed + MISS_PRIOR)
        self.odds_ratio = odds * (self.judged - self.expected + MISS_PRIOR) / (self.expected + MISS_PRIOR)

    def of(self, miss: float) -> float:
        """The corrected probability of a miss."""
        return miss * self.odds_ratio / (1 - miss + miss * self.odds_ratio)


class ScoreCalibration:
    """Turns the scores of draft tokens into probabilities of being right, given that their ancestors are.

    Three records, each with a prior worth a few draft tokens, and each the prior of the next:

    * ``overall``: a correction of all scores, so also of bins that were never tried;
    * ``tried`` and ``kept``, [bins]: draft tokens by bin, a Beta distribution each;
    * ``rows``: a correction by row.
    """

    def __init__(self) -> None:
        self.tried, self.kept = [0.0] * len(_PRIORS), [0.0] * len(_PRIORS)
        self.overall = _MissOdds()
        self.rows: PerRow[_MissOdds] = PerRow()
        self._misses: dict[int, float] = {}  # results of ``_miss`` since the last observation

    def chance(self, slot: int, bin_: int) -> float:
        """Probability that a draft token in this bin and slot is right if its ancestors are."""
        miss, row = self._miss(bin_), self.rows.get(slot)
        return 1 - (row.of(miss) if row else miss)

    def error(self) -> float:
        """Relative standard error of the probability at the first position, without scores; 0 before any trial."""
        chance, tried = 1 - self._miss(POSITION_BINS), self.tried[POSITION_BINS]
        return math.sqrt((1 - chance) / chance / (tried + 1)) if tried else 0.0

    def survivals(self, slot: int, bins: Sequence[int], parents: Sequence[int] | None = None) -> list[float]:
        """Probability of each draft token of a row that it and all its ancestors are right.

        bins: one per draft token. parents: index of each one's parent, -1 for none; None: a chain.
        """
        chances = {bin_: self.chance(slot, bin_) for bin_ in set(bins)}
        survivals: list[float] = []
        for place, bin_ in enumerate(bins):
            parent = place - 1 if parents is None else parents[place]
            survivals.append(chances[bin_] * (survivals[parent] if parent >= 0 else 1.0))
        return survivals

    def learn(self, judged: Sequence[Sequence[JudgedToken]], slots: Sequence[int]) -> None:
        """Learn from a round of the rows in ``slots``.

        judged: for each row, its draft tokens whose correctness is known, with their bins.
        """
        if not any(judged):
            return
        if self._has_changed(judged):
            self.doubt()
        for slot, line in zip(slots, judged, strict=True):
            if line:
                self._learn_row(slot, line)
        self._learn_bins(judged)
        self._misses.clear()

    def _miss(self, bin_: int) -> float:
        """Probability of a miss in this bin before the row calibration."""
        miss = self._misses.get(bin_)
        if miss is None:
            tried, prior = self.tried[bin_], SCORE_PRIOR * self.overall.of(1 - _PRIORS[bin_])
            miss = self._misses[bin_] = (tried - self.kept[bin_] + prior) / (tried + SCORE_PRIOR)
        return miss

    def _has_changed(self, judged: Sequence[Sequence[JudgedToken]]) -> bool:
        """Whether the number of misses among the rows' first draft tokens contradicts the estimates.

        The first ones are independent of each other. A round of few rows cannot contradict anything.
        """
        firsts = [line[0] for line in judged if line]
        misses = [self._miss(bin_) for bin_, _ in firsts]
        missed = sum(not right for _, right in firsts)
        variance = sum(miss * (1 - miss) for miss in misses)
        return abs(missed - sum(misses)) > CHANGE_SIGMAS * math.sqrt(variance + 1)

    def doubt(self) -> None:
        """Reduce the record to ``MAX_DOUBTED`` draft tokens per bin, and forget the row calibrations."""
        for bin_, tried in enumerate(self.tried):
            share = MAX_DOUBTED / max(tried, MAX_DOUBTED)
            self.tried[bin_], self.kept[bin_] = share * tried, share * self.kept[bin_]
        self.overall.learn(0.0, 0.0, 0.0, MAX_DOUBTED / max(self.overall.expected, MAX_DOUBTED))
        self.rows.clear()
        self._misses.clear()

    def _learn_row(self, slot: int, judged: Sequence[JudgedToken]) -> None:
        missed, expected = sum([not right for _, right in judged]), sum([self._miss(bin_) for bin_, _ in judged])
        self.rows.setdefault(slot, _MissOdds()).learn(len(judged), missed, expected, ROW_FADE)

    def _learn_bins(self, judged: Sequence[Sequence[JudgedToken]]) -> None:
        """Add a round to the bins. Position bins predict less than scores, so they also fade with each round."""
        counts: dict[int, list[int]] = {}  # by bin: tried, kept
        for line in judged:
            for bin_, right in line:
                of_bin = counts.setdefault(bin_, [0, 0])
                of_bin[0] += 1
                of_bin[1] += right
        tried, kept = map(sum, zip(*counts.values(), strict=True))
        expected = sum(n * (1 - _PRIORS[bin_]) for bin_, (n, _) in counts.items())
        self.overall.learn(tried, tried - kept, expected, math.exp(-tried / TOKEN_MEMORY))
        for bin_, (count, good) in counts.items():
            fade = math.exp(-count / TOKEN_MEMORY)
            fade = min(fade, ROUND_FADE) if bin_ >= POSITION_BINS else fade
            self.tried[bin_] = self.tried[bin_] * fade + count
            self.kept[bin_] = self.kept[bin_] * fade + good


def bins_of(
    count: int,
    scores: Sequence[float] | None = None,
    parents: Sequence[int] | None = None,
    kinds: Sequence[int] | None = None,
) -> list[int]:
    """Bins of a row's first ``count`` draft tokens: by score, or by position if ``scores`` is None.

    scores, parents, kinds: at least ``count`` entries each, as in ``Draft``. parents None: a chain. kinds None: all 0.
    """
    if scores is None:
        return [POSITION_BINS + min(place, LONGEST_AUTO - 1) for place in range(count)]
    bins = []
    for place in range(count):
        first = place == 0 if parents is None else parents[place] < 0
        kind = 0 if kinds is None else 2 * BINS * kinds[place]
        bins.append(bisect_left(_EDGES, scores[place]) + (0 if first else BINS) + kind)
    return bins


def bins_of_draft(draft: Draft) -> list[list[int]]:
    """Bins of the draft tokens, row by row."""
    nothing = [None] * len(draft.draft_tokens)
    scores, parents, kinds = draft.confidence or nothing, draft.host_parents or nothing, draft.kinds or nothing
    rows = zip(draft.draft_tokens, scores, parents, kinds, strict=True)
    return [bins_of(len(draft_tokens), score, tree, kind) for draft_tokens, score, tree, kind in rows]


def judge(draft: Draft, verdict: Verdict) -> list[list[JudgedToken]]:
    """Compare each row's draft tokens, verified or not, with the tokens that the row gained.

    Returns (position, whether right) for those that can be judged: their ancestors are all right, and the gained
    tokens reach as far. Of equal siblings only the first is right.
    """
    judged = []
    for row, (draft_tokens, gained) in enumerate(zip(draft.draft_tokens, verdict.host.tokens, strict=True)):
        parents = range(-1, len(draft_tokens) - 1) if draft.host_parents is None else draft.host_parents[row]
        line: list[JudgedToken] = []
        next_gained = {-1: 0}  # index in ``gained`` of the token after each draft token that is right so far
        continued = set()  # parents that have a right child
        for place, draft_token in enumerate(draft_tokens):
            at = next_gained.get(parent := parents[place], len(gained))
            if at < len(gained):
                right = draft_token == gained[at] and parent not in continued
                line.append((place, right))
                if right:
                    next_gained[place] = at + 1
                    continued.add(parent)
        judged.append(line)
    return judged
