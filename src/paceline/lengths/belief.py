"""What is known from the rounds before: what a drafter's scores are worth, what rounds brought, how rows come on.

Draft tokens teach, verified or not. All of it lives on the host, in plain numbers: a round has a few draft tokens, for
which numpy's calls would take longer than the arithmetic.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from paceline.core.batch import Batch
from paceline.core.draft import MAX_KINDS, Draft, Verdict
from paceline.core.row_keeper import PerRow

Judged: TypeAlias = tuple[int, bool]  # a draft token's bin or place, and whether it is right

LONGEST_AUTO = 16  # most draft tokens of a row that auto considers
ROUND_FADE = 0.9  # what is left of a round's evidence a round later
ROW_MEMORY = 24.0  # rounds of a row after which one weighs 1 / e
ROW_FADE = math.exp(-1 / ROW_MEMORY)
SHARE = 0.0075  # of the time, for trying what looks worthless

PRIOR_ROUNDS = 2.0  # of one token, that a row's pace begins with

BIN = 0.75  # width of a bin of scores, a log of odds
BINS = 9
CLUELESS = 0.7  # chance of a draft token without a score, at first
MEMORY = 100.0  # draft tokens of a bin, or of any, after which one weighs 1 / e
PRIOR = 3.0  # draft tokens that a score itself weighs in its bin
PRIOR_MISSES = 1.0  # what it weighs against misses, of all rows and of one; in one row, against right draft tokens, too
SURPRISE = 4.0  # standard deviations: a round's first draft tokens that are further from what was expected have changed
DOUBTED = 5.0  # draft tokens of a bin, or of any, that what was known before such a change weighs at most

_LOW = -2 * BIN  # log of odds at the upper edge of the first bin
_EDGES = tuple(1 / (1 + math.exp(-(_LOW + BIN * edge))) for edge in range(BINS - 1))
_CENTRES = tuple(1 / (1 + math.exp(-(_LOW + BIN * (place - 0.5)))) for place in range(BINS))
PLACES = 2 * BINS * MAX_KINDS  # the first bin of those without scores
# Of each kind: first draft tokens; those after a draft token that was right, which is evidence, too. Without scores: by
# place.
_BELIEVED = (*_CENTRES * 2 * MAX_KINDS, *[CLUELESS] * LONGEST_AUTO)


@dataclass
class _Luck:
    """Of a row lately: draft tokens, misses, misses that the bins made expect; the odds of a miss over those of the
    bins.
    """

    judged: float = 0.0
    missed: float = 0.0
    expected: float = 0.0
    bad: float = 1.0

    def judge(self) -> None:
        missed, expected = self.missed + PRIOR_MISSES, self.expected + PRIOR_MISSES
        kept, expected_kept = self.judged - self.missed + PRIOR_MISSES, self.judged - self.expected + PRIOR_MISSES
        self.bad = missed / expected * expected_kept / kept


class Belief:
    """Turns scores into chances. Three corrections, each with a prior of a few draft tokens.

    Bins of scores (a reliability table): tried, kept. All draft tokens: misses over those that the scores made expect;
    it moves bins that nobody tried. Each row's luck: it moves the odds.
    """

    def __init__(self) -> None:
        self.tried, self.kept = [0.0] * len(_BELIEVED), [0.0] * len(_BELIEVED)
        self.all_missed = self.all_expected = 0.0
        self.rows: PerRow[_Luck] = PerRow()
        self._fresh = _Luck()
        self._misses: dict[int, float] = {}  # what ``_miss`` has worked out since anything was learned

    def chance(self, row: int, bin_: int) -> float:
        """That a draft token of this row is right if those that it follows are."""
        miss = self._miss(bin_)
        return (1 - miss) / (1 - miss + miss * self.rows.get(row, self._fresh).bad)

    def error(self) -> float:
        """A standard error of the first draft token's chance where there are no scores, over that chance; 0 before
        any.
        """
        chance, tried = 1 - self._miss(PLACES), self.tried[PLACES]
        return math.sqrt((1 - chance) / chance / (tried + 1)) if tried else 0.0

    def survivals(self, row: int, bins: Sequence[int], follows: Sequence[int] | None = None) -> list[float]:
        """Of a row's draft tokens: the chance that each and all that it follows are right. follows: of a tree."""
        survivals: list[float] = []
        for place, bin_ in enumerate(bins):
            parent = place - 1 if follows is None else follows[place]
            survivals.append(self.chance(row, bin_) * (survivals[parent] if parent >= 0 else 1.0))
        return survivals

    def learn(self, judged: Sequence[Sequence[Judged]]) -> None:
        """From a round: of each row, the bins of the draft tokens that could be judged."""
        if not any(judged):
            return
        if self._surprised(judged):  # few rows cannot be so far off
            self.doubt()
        for row, line in enumerate(judged):
            if line:
                self._learn_row(row, line)
        self._learn_bins(judged)
        self._misses.clear()

    def _miss(self, bin_: int) -> float:
        """The chance of a miss, whatever the row; worked out when it is first asked for."""
        miss = self._misses.get(bin_)
        if miss is None:
            of_all = (self.all_missed + PRIOR_MISSES) / (self.all_expected + PRIOR_MISSES)
            tried, prior = self.tried[bin_], PRIOR * min((1 - _BELIEVED[bin_]) * of_all, 1.0)
            miss = self._misses[bin_] = (tried - self.kept[bin_] + prior) / (tried + PRIOR)
        return miss

    def _surprised(self, judged: Sequence[Sequence[Judged]]) -> bool:
        """Whether what is known cannot explain this round's first draft tokens, which are each row's own."""
        firsts = [line[0] for line in judged if line]
        misses = [self._miss(bin_) for bin_, _ in firsts]
        missed = sum(not right for _, right in firsts)
        variance = sum(miss * (1 - miss) for miss in misses)
        return abs(missed - sum(misses)) > SURPRISE * math.sqrt(variance + 1)

    def doubt(self) -> None:
        """The draft tokens may have become others: what is known weighs little from now on."""
        for bin_, tried in enumerate(self.tried):
            share = DOUBTED / max(tried, DOUBTED)
            self.tried[bin_], self.kept[bin_] = share * tried, share * self.kept[bin_]
        share = DOUBTED / max(self.all_expected, DOUBTED)
        self.all_missed, self.all_expected = share * self.all_missed, share * self.all_expected
        self.rows.clear()
        self._misses.clear()

    def _learn_row(self, row: int, judged: Sequence[Judged]) -> None:
        luck = self.rows.setdefault(row, _Luck())
        luck.judged = luck.judged * ROW_FADE + len(judged)
        luck.missed = luck.missed * ROW_FADE + sum(not right for _, right in judged)
        luck.expected = luck.expected * ROW_FADE + sum(self._miss(bin_) for bin_, _ in judged)
        luck.judge()

    def _learn_bins(self, judged: Sequence[Sequence[Judged]]) -> None:
        """Places tell least of what comes next: draft tokens without scores are forgotten as rounds are."""
        news: dict[int, list[int]] = {}  # by bin: tried, kept
        for line in judged:
            for bin_, right in line:
                new = news.setdefault(bin_, [0, 0])
                new[0] += 1
                new[1] += right
        tried, kept = map(sum, zip(*news.values(), strict=True))
        fade = math.exp(-tried / MEMORY)
        self.all_missed = self.all_missed * fade + tried - kept
        self.all_expected = self.all_expected * fade + sum(n * (1 - _BELIEVED[bin_]) for bin_, (n, _) in news.items())
        for bin_, (count, good) in news.items():
            fade = math.exp(-count / MEMORY)
            fade = min(fade, ROUND_FADE) if bin_ >= PLACES else fade
            self.tried[bin_] = self.tried[bin_] * fade + count
            self.kept[bin_] = self.kept[bin_] * fade + good


def bins_of(
    count: int,
    scores: Sequence[float] | None = None,
    follows: Sequence[int] | None = None,
    kinds: Sequence[int] | None = None,
) -> list[int]:
    """Of the first ``count`` draft tokens of a row: by their scores, or by their places where there are none."""
    if scores is None:
        return [PLACES + min(place, LONGEST_AUTO - 1) for place in range(count)]
    bins = []
    for place in range(count):
        first = place == 0 if follows is None else follows[place] < 0
        kind = 0 if kinds is None else 2 * BINS * kinds[place]
        bins.append(bisect_left(_EDGES, scores[place]) + (0 if first else BINS) + kind)
    return bins


def bins_of_draft(draft: Draft) -> list[list[int]]:
    """Of each row's draft tokens."""
    nothing = [None] * len(draft.draft_tokens)
    scores, follows, kinds = draft.confidence or nothing, draft.host_parents or nothing, draft.kinds or nothing
    rows = zip(draft.draft_tokens, scores, follows, kinds, strict=True)
    return [bins_of(len(draft_tokens), score, parents, kind) for draft_tokens, score, parents, kind in rows]


def judge(draft: Draft, verdict: Verdict) -> list[list[Judged]]:
    """Which draft tokens of each row can be judged by what the row gained, as (place, right), verified or not.

    Those whose ancestors are all right, as far as what was gained reaches. Of equal siblings the first counts.
    """
    judged = []
    for row, (draft_tokens, gained) in enumerate(zip(draft.draft_tokens, verdict.host.tokens, strict=True)):
        follows = range(-1, len(draft_tokens) - 1) if draft.host_parents is None else draft.host_parents[row]
        line: list[Judged] = []
        after = {-1: 0}  # the draft tokens that are right so far, and where in ``gained`` those after them stand
        followed = set()
        for place, draft_token in enumerate(draft_tokens):
            at = after.get(parent := follows[place], len(gained))
            if at < len(gained):
                right = draft_token == gained[at] and parent not in followed
                line.append((place, right))
                if right:
                    after[place] = at + 1
                    followed.add(parent)
        judged.append(line)
    return judged


# --- rounds and rows ---------------------------------------------------------------


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
        known, off = self._weight * ROUND_FADE, value - self.value
        self._weight = known + 1
        self.value += off / self._weight
        self._squares = self._squares * ROUND_FADE + off * off * known / self._weight

    def doubt(self, trials: float) -> None:
        """What is known counts as so many values at most, and is as sure as before."""
        share = min(1.0, trials / self._weight)
        self._weight, self._squares = self._weight * share, self._squares * share * share


class Rate:
    """Tokens a millisecond; 0 before any.

    That the price of a draft token follows what such prices have led to is Dinkelbach's way to the highest ratio
    (1967).
    """

    def __init__(self) -> None:
        self._tokens = self._ms = 0.0

    @property
    def value(self) -> float:
        return self._tokens / self._ms if self._ms else 0.0

    def learn(self, tokens: float, ms: float) -> None:
        """Of a round."""
        self._tokens = self._tokens * ROUND_FADE + tokens
        self._ms = self._ms * ROUND_FADE + ms


class Savings:
    """A share of the time, kept for trials: never more than the last one that was thought of costs."""

    def __init__(self) -> None:
        self._ms = self._price = 0.0

    def save(self, ms: float) -> None:
        """Of a round that took so long."""
        self._ms = min(self._ms + SHARE * ms, self._price)

    def rounds(self, ms: float) -> int:
        """After how many rounds of so many ms there is enough for what was thought of last."""
        return math.ceil(max(0.0, self._price - self._ms) / (SHARE * ms))

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
    ahead: float = 0.0  # plain rounds by which its draft tokens have brought it ahead of plain decoding


class Paces:
    """How fast each row comes on, and what a token of each is worth.

    Tokens per millisecond are the goal while other requests wait or may come: all tokens are worth the same. A batch
    that only drains has ended when its slowest row has, which gains nothing when the others hurry on at its expense.
    There a token counts by how late its row will end.
    """

    def __init__(self) -> None:
        self.rows: PerRow[_Pace] = PerRow()

    def learn(self, accepted: Sequence[int], took: float) -> None:
        """From a round: draft tokens kept, and its time over a plain one's."""
        for row, kept in enumerate(accepted):
            pace = self.rows.setdefault(row, _Pace())
            pace.tokens = PRIOR_ROUNDS + (pace.tokens - PRIOR_ROUNDS) * ROW_FADE + kept + 1
            pace.ahead += kept + 1 - took
            pace.rounds = PRIOR_ROUNDS + (pace.rounds - PRIOR_ROUNDS) * ROW_FADE + 1

    def worth_of_tokens(self, batch: Batch) -> list[float]:
        """[B], 1 on average: what a token does for an early end of all is (when its row ends) / (the row's pace)."""
        if not batch.draining or batch.rows == 1:
            return [1.0] * batch.rows
        worth = [(batch.limits[row] - batch.lengths[row]) * self._rounds_a_token(row) ** 2 for row in range(batch.rows)]
        total = sum(worth)
        return [batch.rows * each / total for each in worth]

    def ahead(self, rows: int) -> list[float]:
        """Plain rounds by which draft tokens have brought each row ahead of plain decoding."""
        return [pace.ahead if (pace := self.rows.get(row)) else 0.0 for row in range(rows)]

    def _rounds_a_token(self, row: int) -> float:
        pace = self.rows.get(row)
        return 1.0 if pace is None else pace.rounds / pace.tokens
