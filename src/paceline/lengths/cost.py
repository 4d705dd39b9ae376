"""What a round costs: measured tables, corrected by the rounds that are played.

A round of b rows that guess k tokens each takes verify(b, k) + draft(b, k) milliseconds. Verification is a function of
the tokens fed, b (k + 1), of b, and of the context; drafting is a part that every draft pays and a part for each guess.
The tables are measured (``calibration``, or ``paceline profile``); real rounds then correct them.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Milliseconds = NDArray[np.float64]
Logs = NDArray[np.float64]


def interpolate(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """The line through the two measured points around x (never below 0).

    Below the first, the first two go on; beyond the last, the line from the middle to the last, which is less noisy.
    """
    if len(xs) == 1:
        return ys[0]
    right = min(max(bisect_left(xs, x), 1), len(xs) - 1)
    left = min(len(xs) // 2, right - 1) if x > xs[-1] else right - 1
    x0, x1, y0, y1 = xs[left], xs[right], ys[left], ys[right]
    return max(0.0, y0 + (y1 - y0) * (x - x0) / (x1 - x0))


def lower_hull(ys: Sequence[float]) -> list[float]:
    """The largest convex function below ys at 0, 1, 2, ...: what noise lifted is brought back to the line."""
    corners: list[int] = []
    for x, y in enumerate(ys):
        while len(corners) > 1:
            a, b = corners[-2:]
            if (ys[b] - ys[a]) * (x - a) < (y - ys[a]) * (b - a):
                break
            corners.pop()
        corners.append(x)
    return [float(y) for y in np.interp(np.arange(len(ys)), corners, [ys[corner] for corner in corners])]


@dataclass(frozen=True)
class CostTable:
    """Milliseconds, measured at ``context`` tokens a row.

    verify[i][j]: batch_sizes[i] rows with lengths[j] guesses each, acceptance and commit included.
    draft_once[i], draft_step[i]: a draft of k guesses for batch_sizes[i] rows takes draft_once + k * draft_step.
    context_once, context_token: what verification takes more for each row and each position of context beyond
        ``context``: once, and for each token fed.
    feed_tokens, feed: what feeding so many tokens of one row into the draft model takes (when it must catch up).
    """

    batch_sizes: tuple[int, ...]
    lengths: tuple[int, ...]
    context: int
    verify: tuple[tuple[float, ...], ...]
    draft_once: tuple[float, ...]
    draft_step: tuple[float, ...]
    context_once: float = 0.0
    context_token: float = 0.0
    feed_tokens: tuple[int, ...] = (1,)
    feed: tuple[float, ...] = (0.0,)

    def verify_ms(self, rows: int, k: float, context: float | None = None) -> float:
        """Between two measured batch sizes, each is asked for the same number of tokens."""
        tokens = rows * (k + 1)
        at_size = [
            interpolate([size * (length + 1) for length in self.lengths], times, tokens)
            for size, times in zip(self.batch_sizes, self.verify, strict=True)
        ]
        more = 0.0 if context is None else rows * (context - self.context)
        return interpolate(self.batch_sizes, at_size, rows) + more * (self.context_once + (k + 1) * self.context_token)

    def draft_ms(self, rows: int, k: float) -> float:
        if k == 0:
            return 0.0
        once, step = (interpolate(self.batch_sizes, table, rows) for table in (self.draft_once, self.draft_step))
        return once + k * step

    def round_ms(self, rows: int, k: float, context: float | None = None) -> float:
        return self.verify_ms(rows, k, context) + self.draft_ms(rows, k)

    def feed_ms(self, tokens: int) -> float:
        """Catching up by so many tokens, all rows together."""
        return interpolate(self.feed_tokens, self.feed, tokens) if tokens > 0 else 0.0

    def without_drafting(self) -> CostTable:
        """The same for guesses that cost nothing."""
        free = (0.0,) * len(self.batch_sizes)
        return replace(self, draft_once=free, draft_step=free)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(document: dict[str, Any]) -> CostTable:
        """Raises TypeError, KeyError or ValueError if the document is not one of ``as_json``."""
        if not isinstance(document, dict):
            raise TypeError(f"a table of costs is an object, not {type(document).__name__}")
        given = {name: _tupled(value) for name, value in document.items()}
        table = CostTable(**given)
        if len(table.verify) != len(table.batch_sizes) or any(len(r) != len(table.lengths) for r in table.verify):
            raise ValueError("the table of verification times has another shape than its axes")
        return table


def _tupled(value: Any) -> Any:
    return tuple(_tupled(entry) for entry in value) if isinstance(value, list) else value


# --- correction by real rounds -------------------------------------------------

CELL_MEMORY = 24.0  # rounds of one kind after which a measurement weighs 1 / e
DRIFT = 1 / 16  # what of a surprise in rounds of a well-known kind is the machine's pace
WELL_KNOWN = 16.0  # rounds of a kind after which half of that is
CELL_PRIOR = 2.0  # rounds that a cell's own ratio weighs before there are any
NEIGHBOUR = 0.03  # what a round says about the next kind; the one after it, a quarter of that, ...
JUMP = math.log(1.5)  # a single round moves an estimate as if it were off by this factor at most
REFRESH = 16  # rounds after which the times of guesses are worked out anew
LEVELS_AN_OCTAVE = 2  # kinds of rounds while the tokens of a row double


class _Bucket:
    """What rounds of about as many rows show: log(measured / predicted) by level, beyond the drift.

    A level is LEVELS_AN_OCTAVE * log2(tokens in flight / rows): 0 is plain decoding. Known at whole levels, a
    line between.
    """

    def __init__(self, levels: int) -> None:
        self.weight, self.mean = [0.0] * levels, [0.0] * levels
        self._near = [[1.0 if i == j else NEIGHBOUR / (i - j) ** 2 for i in range(levels)] for j in range(levels)]

    def ratios(self, levels: Logs) -> Logs:
        """At these levels: their own mean, and their neighbours' where those know more."""
        places = range(len(self.mean))
        return np.interp(levels, places, [self._smoothed(place) for place in places])

    def ratio(self, level: float) -> float:
        """At one level."""
        low, share = self._between(level)
        return self._smoothed(low) * (1 - share) + self._smoothed(low + 1) * share

    def known(self, level: float) -> float:
        low, share = self._between(level)
        return self.weight[low] * (1 - share) + self.weight[low + 1] * share

    def learn(self, level: float, surprise: float) -> None:
        """The whole levels on both sides, each by its share."""
        low, above = self._between(level)
        for place, share in ((low, 1 - above), (low + 1, above)):
            if share > 0:
                if not self.weight[place]:
                    self.mean[place] = self._smoothed(place)
                self.weight[place] = self.weight[place] * math.exp(-share / CELL_MEMORY) + share
                self.mean[place] += share * surprise / (self.weight[place] + CELL_PRIOR)

    def _between(self, level: float) -> tuple[int, float]:
        """The whole level below, and the share of the one above."""
        low = min(int(level), len(self.mean) - 2)
        return low, level - low

    def _smoothed(self, place: int) -> float:
        weights = [near * weight for near, weight in zip(self._near[place], self.weight, strict=True)]
        total = sum(weight * mean for weight, mean in zip(weights, self.mean, strict=True))
        return total / max(sum(weights), 1e-9)


@dataclass(frozen=True)
class _Rounds:
    """Rounds of one batch size with 0, 1, ... guesses in all, by the table; each [guesses + 1].

    at_table: ms at the table's context; slope: what each position of context adds. level: as a bucket's.
    """

    at_table: Milliseconds
    slope: Milliseconds
    level: Logs

    def ms(self, beyond: float) -> Milliseconds:
        """With ``beyond`` positions of context more than the table's."""
        return np.maximum(self.at_table + self.slope * beyond, 0.1 * self.at_table)

    def ms_of(self, guesses: int, beyond: float) -> float:
        """Of rounds with so many guesses alone."""
        at_table: float = self.at_table.item(guesses)
        return float(max(at_table + self.slope.item(guesses) * beyond, 0.1 * at_table))


@dataclass(frozen=True)
class GuessTimes:
    """Of rounds with 0, 1, ... guesses in all.

    ms: [guesses + 1]. cheapest: [guesses], the least that the next guess or one after it takes. as_of: rounds observed.
    """

    ms: list[float]
    cheapest: list[float]
    as_of: int


class _Observed(NamedTuple):
    """A round, as ``CostModel.observe`` was told of it."""

    rows: int
    k: float
    context: float
    ms: float


class CostModel:
    """time(b, k, context): the table times what real rounds show.

    log(measured / predicted) = drift (of all rounds: the machine's pace) + the ratio of this kind of round, by batch
    bucket (1, 2, 3-4, 5-8, 9-16, ... rows) and tokens a row. A machine that slows down for everybody moves the drift
    and so changes no decision. A kind that was never played has its neighbours' ratio.
    """

    def __init__(self, table: CostTable, longest: int) -> None:
        self.table = table
        self.longest = longest  # times are given for k = 0 .. longest
        self.drift = 0.0
        self._rounds = 0
        self._news: list[_Observed] = []  # rounds to learn from, when times are asked for anew
        self._levels = math.ceil(_level(longest)) + 1
        self._buckets: dict[int, _Bucket] = {}
        self._by_size: dict[int, _Rounds] = {}
        self._guess_times: dict[int, GuessTimes] = {}

    def times(self, rows: int, context: float) -> Milliseconds:
        """[longest + 1]: milliseconds of a round with k = 0, 1, ... guesses a row."""
        return self._times(rows, context)[::rows]

    def times_of_guesses(self, rows: int, context: float) -> GuessTimes:
        """Of rounds with 0, 1, ... guesses in all, up to ``longest`` a row; a few rounds old at most."""
        times, now = self._guess_times.get(rows), self._rounds + len(self._news)
        if times is None or now - times.as_of > min(now // 4, REFRESH):
            ms = self._times(rows, context)
            cheapest = np.minimum.accumulate((ms[1:] - ms[:-1])[::-1])[::-1]
            times = self._guess_times[rows] = GuessTimes(ms.tolist(), cheapest.tolist(), self._rounds)
        return times

    def observe(self, rows: int, k: float, context: float, ms: float) -> None:
        """A real round took so long; k guesses a row on average, at most ``longest``."""
        self._news.append(_Observed(rows, k, context, ms))
        if len(self._news) > REFRESH:
            self._learn()

    def _learn(self) -> None:
        """Many rounds at once are learned from in a fraction of the time that each would take between two others."""
        for news in self._news:
            self._learn_round(*news)
        self._news.clear()

    def _learn_round(self, rows: int, k: float, context: float, ms: float) -> None:
        kind, bucket, guesses = self._of_size(rows), self._bucket(rows), round(k * rows)
        level = kind.level.item(guesses)
        predicted = kind.ms_of(guesses, context - self.table.context)
        surprise = math.log(ms / predicted) - self.drift - bucket.ratio(level)
        surprise = min(max(surprise, -JUMP), JUMP) if self._rounds else surprise
        self._rounds += 1
        known = bucket.known(level)
        step = surprise * max(1 / self._rounds, DRIFT * known / (known + WELL_KNOWN))
        self.drift += step
        bucket.learn(level, surprise - step)

    def feed_ms(self, tokens: int) -> float:
        self._learn()
        return self.table.feed_ms(tokens) * math.exp(self.drift)

    def _times(self, rows: int, context: float) -> Milliseconds:
        """[rows * longest + 1]."""
        self._learn()
        kind = self._of_size(rows)
        return kind.ms(context - self.table.context) * np.exp(self.drift + self._bucket(rows).ratios(kind.level))

    def _bucket(self, rows: int) -> _Bucket:
        number = (rows - 1).bit_length()
        if number not in self._buckets:
            self._buckets[number] = _Bucket(self._levels)
        return self._buckets[number]

    def _of_size(self, rows: int) -> _Rounds:
        if rows not in self._by_size:
            self._by_size[rows] = self._tabulated(rows)
        return self._by_size[rows]

    def _tabulated(self, rows: int) -> _Rounds:
        table, lengths = self.table, np.arange(self.longest + 1)
        spread = np.arange(rows * self.longest + 1) / rows
        at_table = np.interp(spread, lengths, [table.round_ms(rows, k) for k in lengths.tolist()])
        slope = rows * (table.context_once + (spread + 1) * table.context_token)
        return _Rounds(np.maximum(at_table, 1e-6), slope, LEVELS_AN_OCTAVE * np.log2(1 + spread))


def _level(k: float) -> float:
    return LEVELS_AN_OCTAVE * math.log2(1 + k)
