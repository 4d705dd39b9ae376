"""What a round costs: measured tables, corrected by the rounds that are played.

A round of b rows that draft token k tokens each takes verify(b, k) + draft(b, k) milliseconds. Verification is a
function of the tokens fed, b (k + 1), of b, and of the context; drafting is a part that every draft pays and a part for
each draft token. The tables are measured (``calibration``, or ``paceline profile``); real rounds then correct them.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.lengths.belief import LONGEST_AUTO, Mean

Numbers = NDArray[np.float64]

NOISE = 0.04  # variance of log(a round's time)
DRIFT = 2e-4  # by which the machine's pace may change from round to round, likewise
UNKNOWN = 0.03  # of a table's error, likewise, before any round was played
_JUMP = 2 * math.sqrt(NOISE)  # a single round moves an estimate as if it were off by this factor at most, a log
REFRESH = 16  # rounds after which times are worked out anew


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

    verify[i][j]: batch_sizes[i] rows with lengths[j] draft tokens each, acceptance and commit included.
    draft_once[i], draft_step[i]: a draft of k draft tokens for batch_sizes[i] rows takes draft_once + k * draft_step.
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

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(document: dict[str, Any]) -> CostTable:
        """Raises TypeError, KeyError or ValueError if the document is not one of ``as_json``."""
        if not isinstance(document, dict):
            raise TypeError(f"a table of costs is an object, not {type(document).__name__}")
        given = {name: _tupled(value) for name, value in document.items()}
        return CostTable(**given)

    def __post_init__(self) -> None:
        """Raise TypeError or ValueError unless all are times and sizes that a measurement could have given."""
        axes = self.batch_sizes, self.lengths, self.feed_tokens
        others = *self.verify, self.draft_once, self.draft_step, self.feed
        single = self.context, self.context_once, self.context_token
        if not all(math.isfinite(number) and number >= 0 for line in (*axes, *others, single) for number in line):
            raise ValueError("a time or a size is no number, or below 0")
        if any(not axis or list(axis) != sorted(set(axis)) for axis in axes) or self.batch_sizes[0] < 1:
            raise ValueError("sizes do not ascend, or there are none")
        widths = *[self.lengths] * len(self.verify), *[self.batch_sizes] * 3, self.feed_tokens
        lines = *self.verify, self.verify, self.draft_once, self.draft_step, self.feed
        if any(len(line) != len(axis) for line, axis in zip(lines, widths, strict=True)):
            raise ValueError("a time is missing, or too many are there")
        if not all(ms > 0 for line in self.verify for ms in line):
            raise ValueError("a round that takes no time")


def _tupled(value: Any) -> Any:
    return tuple(_tupled(entry) for entry in value) if isinstance(value, list) else value


# --- correction by real rounds -------------------------------------------------


class _Line:
    """log(measured / table) = level + slope * log2(1 + draft tokens a row), for batches of a size; follows what drifts.

    A Kalman filter whose two numbers walk at random: what rounds do not show (the slope, where none has draft tokens)
    stays as it was, and is doubted more as time passes.
    """

    def __init__(self, level: float, slope: float) -> None:
        self.level, self.slope = level, slope
        self._level, self._both, self._slope = UNKNOWN, 0.0, UNKNOWN / 4  # how much either may be off: a covariance

    @property
    def error(self) -> float:
        """A standard error of the level, which is all that counts of a plain round."""
        return math.sqrt(self._level)

    def learn(self, draft_tokens: float, surprise: float) -> None:
        """Of rounds with ``draft_tokens`` = log2(1 + draft tokens a row), one was off from this line by so much, a
        log.
        """
        self._level, self._slope = self._level + DRIFT, self._slope + DRIFT
        level, slope = self._level + self._both * draft_tokens, self._both + self._slope * draft_tokens
        certain = level + slope * draft_tokens + NOISE
        news = min(max(surprise, -_JUMP), _JUMP) / certain
        self.level, self.slope = self.level + level * news, self.slope + slope * news
        self._level -= level * level / certain
        self._both -= level * slope / certain
        self._slope -= slope * slope / certain


@dataclass(frozen=True)
class RoundTimes:
    """ms: [rows * LONGEST_AUTO + 1], of rounds with 0, 1, ... draft tokens in all. error: a standard error of the
    first.

    as_of: rounds that had been played.
    """

    ms: list[float]
    error: float
    as_of: int

    @property
    def plain(self) -> float:
        return self.ms[0]

    def more(self, draft_tokens: int) -> float:
        """Milliseconds that so many draft tokens take beyond a plain round."""
        return self.ms[min(draft_tokens, len(self.ms) - 1)] - self.ms[0]

    def best(
        self, lines: Sequence[Sequence[float]], rate: float, deadlines: Sequence[float], most: float = math.inf
    ) -> tuple[float, list[int]]:
        """The value of the best draft tokens at this rate, and how many of each line those are; ``most``: ms of the
        round.

        Of draft tokens that bring as much, those of the line with the first deadline are taken first.

        lines: what each draft token brings. It falls along a line, so the best of all are the first of some; and times
        are convex, so the first that does not pay is the last.
        """
        value, ms, counts = 0.0, self.ms, [0] * len(lines)
        least = rate * (ms[1] - ms[0])
        able = [(-each, deadlines[row], row) for row, line in enumerate(lines) for each in line if each > least]
        for (brings, _, row), before, after in zip(sorted(able), ms, ms[1:], strict=False):
            gain = -brings - rate * (after - before)
            if gain <= 0 or after > most:
                break
            value += gain
            counts[row] += 1
        return value, counts


@dataclass(frozen=True)
class _Tabulated:
    """Rounds of one batch size with 0, 1, ... draft tokens in all, by the table; each [draft tokens + 1].

    ms: at the table's context; by_context: what each position of context adds. draft tokens: log2(1 + draft tokens a
    row).
    """

    ms: Numbers
    by_context: Numbers
    draft_tokens: Numbers


class CostModel:
    """What verifying and drafting take: the table's times, corrected by real rounds.

    whole: rounds are told with their drafts, and their times are given so; else drafts are told apart, by passes.
    """

    def __init__(self, table: CostTable, whole: bool = False) -> None:
        self.table, self.whole = table, whole
        self._rounds = 0
        self._line = _Line(0.0, 0.0)  # of the last round's batch size
        self._lines: dict[int, _Line] = {}  # by batch size: 1, 2, 3-4, 5-8, ... rows
        self._tables: dict[int, _Tabulated] = {}
        self._times: dict[tuple[int, int], RoundTimes] = {}
        self._passes: dict[tuple[int, bool], Mean] = {}

    def times(self, rows: int, context: float) -> RoundTimes:
        """A few rounds old at most, and of such a context within a factor of two."""
        kind = rows, int(context).bit_length()
        known = self._times.get(kind)
        if known is None or self._rounds - known.as_of > min(self._rounds // 4, REFRESH):
            known = self._times[kind] = self._now(rows, context)
        return known

    def _now(self, rows: int, context: float) -> RoundTimes:
        """Verification alone is convex in truth: what noise lifted is brought back to the line."""
        table, line = self._tabulated(rows), self._of_size(rows)
        ms = np.maximum(table.ms + table.by_context * (context - self.table.context), 0.1 * table.ms)
        corrected: list[float] = (ms * np.exp(line.level + line.slope * table.draft_tokens)).tolist()
        times = corrected if self.whole else lower_hull(corrected)
        return RoundTimes(times, times[0] * line.error, self._rounds)

    def observe(self, rows: int, draft_tokens: int, context: float, ms: float) -> None:
        """A round with so many draft tokens in all took so long."""
        table, line = self._tabulated(rows), self._of_size(rows)
        base, among = table.ms.item(draft_tokens), table.draft_tokens.item(draft_tokens)
        believed = max(base + table.by_context.item(draft_tokens) * (context - self.table.context), 0.1 * base)
        surprise = math.log(max(ms, 1e-6) / believed) - line.level - line.slope * among
        line.learn(among, surprise)
        self._line = line
        self._rounds += 1

    def pass_ms(self, rows: int, first: bool) -> float:
        """Of the draft model for so many rows: the first pass of a draft, or any other."""
        known = self._passes.get((rows, first))
        return self._believed_pass(rows, first) if known is None else known.value

    def observe_passes(self, rows: int, passes: Sequence[float]) -> None:
        """A draft's passes took so many ms."""
        for place, ms in enumerate(passes):
            kind = rows, place == 0
            mean = self._passes.setdefault(kind, Mean(self._believed_pass(*kind)))
            most = max(2 * mean.value, self._believed_pass(rows, first=True))  # from 0, too
            mean.learn(min(ms, most))  # pauses of the machine are no news

    def _believed_pass(self, rows: int, first: bool) -> float:
        one = self.table.draft_ms(rows, 1)
        return one if first else max(self.table.draft_ms(rows, 2) - one, 1e-6)

    def feed_ms(self, tokens: int) -> float:
        """Reading so many tokens that the draft model missed, all rows together."""
        return self.table.feed_ms(tokens) * math.exp(self._line.level)

    def _of_size(self, rows: int) -> _Line:
        size = (rows - 1).bit_length()
        if size not in self._lines:
            self._lines[size] = _Line(self._line.level, self._line.slope)
        return self._lines[size]

    def _tabulated(self, rows: int) -> _Tabulated:
        if rows not in self._tables:
            table, lengths = self.table, np.arange(LONGEST_AUTO + 1)
            spread = np.arange(rows * LONGEST_AUTO + 1) / rows
            at = table.round_ms if self.whole else table.verify_ms
            ms = np.interp(spread, lengths, [at(rows, k) for k in lengths.tolist()])
            by_context = rows * (table.context_once + (spread + 1) * table.context_token)
            self._tables[rows] = _Tabulated(np.maximum(ms, 1e-6), by_context, np.log2(1 + spread))
        return self._tables[rows]
