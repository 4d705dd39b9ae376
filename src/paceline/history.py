"""How well guesses were kept lately, by row and by position in the draft. R rows of capacity, B live rows, K positions.

All of it lives on the host (numpy), as the decision it serves does; an update is a handful of small array operations.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from paceline.params import MAX_SPECULATION_LENGTH

Counts = NDArray[np.float64]
NewCounts = NDArray[np.bool_] | NDArray[np.int64]

ROW_MEMORY = 24.0  # rounds after which a row's evidence weighs 1 / e
ALL_MEMORY = 20.0  # likewise, of all rows together: more evidence a round, so it may be forgotten sooner
STALE = 3.0  # evidence about positions that nobody tries fades down to so many trials, so that a few new ones decide
PRIOR = 0.75  # acceptance of the first guess before anything is known: hope is soon corrected, its lack is not
PRIOR_TRIALS = 1.0  # what the prior weighs at first
PREDECESSOR_TRIALS = 2.0  # and what each position's predecessor does: one early miss does not make a position hopeless
PRIOR_TRIALS_GONE = 4.0  # after so many trials it weighs half of that
PACE_PRIOR = 2.0  # rounds of one token that a row's pace begins with
ALL_TRIALS = 4.0  # what the batch's acceptance weighs in a row's
CHANGE = 2.0  # what is to be noticed at once: so many times fewer right guesses, or fewer wrong ones, than believed
LEAST_CHANCE = 0.02  # and most of 1 - that: nothing that was seen is impossible
ALARM = 7.0  # log of how much likelier such a change must make what was seen


class AcceptanceHistory:
    """Decayed counts of guesses tried and kept at every position, per row and for all rows together.

    A position counts as tried when a guess was asked for there and everything before it was kept, whether or not the
    drafter had a guess: missing guesses lower the acceptance, as they should, for the round was paid for.

    most: [R], guesses that a row's request allows: positions beyond them are never tried, and nothing is kept there.
    tried, kept: [R, K]. all_tried, all_kept: [K]; they outlive the rows: new rows begin with what others showed.
    """

    def __init__(self, capacity: int) -> None:
        self.tried = np.zeros((capacity, MAX_SPECULATION_LENGTH))
        self.kept = np.zeros((capacity, MAX_SPECULATION_LENGTH))
        self.most = np.full(capacity, MAX_SPECULATION_LENGTH)
        self.all_tried = np.zeros(MAX_SPECULATION_LENGTH)
        self.all_kept = np.zeros(MAX_SPECULATION_LENGTH)
        self._place = np.arange(MAX_SPECULATION_LENGTH)
        self._worse, self._better = _Change(better=False), _Change(better=True)

    def reset(self, row: int, most: int = MAX_SPECULATION_LENGTH) -> None:
        """A new sequence begins."""
        self.tried[row] = self.kept[row] = 0
        self.most[row] = most

    def copy_row(self, source: int, destination: int) -> None:
        self.tried[destination] = self.tried[source]
        self.kept[destination] = self.kept[source]
        self.most[destination] = self.most[source]

    def update(self, asked: int | Sequence[int], accepted: Sequence[int]) -> None:
        """Learn from a round of len(accepted) rows: guesses asked for (of each row) and kept."""
        rows, deepest = len(accepted), asked if isinstance(asked, int) else max(asked)
        if deepest == 0:
            return
        place = self._place[:deepest]
        count = np.asarray(accepted)[:, None]
        tried = (place <= count) & (place < np.minimum(asked, self.most[:rows])[:, None])
        kept = place < count
        believed = self.acceptance(rows, deepest)
        _learn(self.tried[:rows, :deepest], self.kept[:rows, :deepest], tried, kept, ROW_MEMORY)
        _learn(self.all_tried[:deepest], self.all_kept[:deepest], tried.sum(0), kept.sum(0), ALL_MEMORY)
        _fade(self.all_tried[deepest:], self.all_kept[deepest:])
        for change in (self._worse, self._better):
            if change.noticed(believed, tried, kept):
                self._begin_anew(change)

    def _begin_anew(self, change: _Change) -> None:
        """Only what was seen since the change counts, and rows have nothing of their own."""
        self.tried[:] = self.kept[:] = 0
        self.all_tried[:], self.all_kept[:] = change.tried, change.kept
        self._worse.reset()
        self._better.reset()

    def rest(self) -> None:
        """Nothing was tried for a while: what is known weighs little from now on."""
        for tried, kept in ((self.tried, self.kept), (self.all_tried, self.all_kept)):
            factor = STALE / np.maximum(tried, STALE)
            tried *= factor
            kept *= factor

    def acceptance(self, rows: int, k: int) -> Counts:
        """[rows, k]: the chance that a guess is kept if all before it were; each row's shrunk to all rows'."""
        batch = self.batch_acceptance(k)
        chance = (self.kept[:rows, :k] + ALL_TRIALS * batch) / (self.tried[:rows, :k] + ALL_TRIALS)
        return chance * (self._place[:k] < self.most[:rows, None])

    def batch_acceptance(self, k: int) -> Counts:
        """[k]: of all rows together; each position's shrunk to the one before it, the first to the prior."""
        chance, trials, chances = PRIOR, PRIOR_TRIALS, []
        for tried, kept in zip(self.all_tried[:k].tolist(), self.all_kept[:k].tolist(), strict=True):
            weight = trials / (1 + tried / PRIOR_TRIALS_GONE)
            chance, trials = (kept + weight * chance) / (tried + weight), PREDECESSOR_TRIALS
            chances.append(chance)
        return np.array(chances)


class _Change:
    """Whether guesses have become better (or worse) than they are believed to be: a cumulative sum test (Page 1954).

    The averages take ten rounds to follow what changes at once, and a batch pays for every guess of them. The sum is
    how much likelier the change makes what was seen (a log) since the round in which it was least likely.

    tried, kept: [K], since then.
    """

    def __init__(self, better: bool) -> None:
        self._better = better
        self._sum = 0.0
        self.tried, self.kept = np.zeros(MAX_SPECULATION_LENGTH), np.zeros(MAX_SPECULATION_LENGTH)

    def reset(self) -> None:
        """Nothing speaks for a change."""
        self._sum = 0.0
        self.tried[:] = self.kept[:] = 0

    def noticed(self, believed: Counts, tried: NDArray[np.bool_], kept: NDArray[np.bool_]) -> bool:
        """[B, k] each: the chances believed, and the guesses of a round."""
        chances, right = believed[tried].clip(LEAST_CHANCE, 1 - LEAST_CHANCE), kept[tried]
        rarer = 1 - chances if self._better else chances
        ratios = np.where(right == self._better, (1 - rarer / CHANGE) / (1 - rarer), 1 / CHANGE)
        self._sum += float(np.log(ratios).sum())
        if self._sum <= 0:
            self.reset()
        else:
            self.tried[: tried.shape[1]] += tried.sum(0)
            self.kept[: kept.shape[1]] += kept.sum(0)
        return self._sum >= ALARM


class Pace:
    """How fast each row has come on. R rows of capacity. Plain numbers, as ``reliability``'s.

    ahead: [R], by how many plain rounds' time a row is ahead of where plain decoding would be since it began, or should
        be by what its guesses promised.
    """

    def __init__(self, capacity: int) -> None:
        self.ahead, self._gained, self._rounds = ([0.0] * capacity for _ in range(3))

    def reset(self, row: int) -> None:
        """A new sequence begins."""
        self.ahead[row] = self._gained[row] = self._rounds[row] = 0.0

    def copy_row(self, source: int, destination: int) -> None:
        for table in (self.ahead, self._gained, self._rounds):
            table[destination] = table[source]

    def update(self, accepted: Sequence[int], took: float, expected: Sequence[float] | None = None) -> None:
        """A round of len(accepted) rows that took so many times what a plain one would have taken.

        expected: guesses of each row that were expected to be accepted, if that is to count.
        """
        decay = _DECAY[ROW_MEMORY]
        for row, (kept, counts) in enumerate(zip(accepted, expected or accepted, strict=True)):
            self.ahead[row] += counts + 1 - took
            self._gained[row] = self._gained[row] * decay + kept + 1
            self._rounds[row] = self._rounds[row] * decay + 1

    def tokens(self, row: int) -> float:
        """Tokens a round of this row, lately; 1 before anything is known."""
        return (self._gained[row] + PACE_PRIOR) / (self._rounds[row] + PACE_PRIOR)


_DECAY = {memory: float(np.exp(-1 / memory)) for memory in (ROW_MEMORY, ALL_MEMORY)}


def _learn(tried: Counts, kept: Counts, new_tried: NewCounts, new_kept: NewCounts, memory: float) -> None:
    """In place. Positions with news forget by one round; the others fade until little is left."""
    decay = np.where((new_tried > 0) | (tried > STALE), _DECAY[memory], 1.0)
    tried *= decay
    kept *= decay
    tried += new_tried
    kept += new_kept


def _fade(tried: Counts, kept: Counts) -> None:
    decay = np.where(tried > STALE, _DECAY[ALL_MEMORY], 1.0)
    tried *= decay
    kept *= decay
