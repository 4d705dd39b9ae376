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
from typing import Any

import numpy as np
from numpy.typing import NDArray

Milliseconds = NDArray[np.float64]
Logs = NDArray[np.float64]


def interpolate(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """The line through the two measured points around x; outside, the nearest two go on (never below 0)."""
    if len(xs) == 1:
        return ys[0]
    right = min(max(bisect_left(xs, x), 1), len(xs) - 1)
    x0, x1, y0, y1 = xs[right - 1], xs[right], ys[right - 1], ys[right]
    return max(0.0, y0 + (y1 - y0) * (x - x0) / (x1 - x0))


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
LEVELS_AN_OCTAVE = 2  # kinds of rounds while the tokens of a row double


class _Bucket:
    """What rounds of about as many rows show: log(measured / predicted) by level, beyond the drift.

    A level is LEVELS_AN_OCTAVE * log2(tokens in flight / rows): 0 is plain decoding. Known at whole levels, a
    line between.
    """

    def __init__(self, levels: int) -> None:
        self.weight, self.mean = np.zeros(levels), np.zeros(levels)
        self._places = np.arange(levels)
        apart = np.abs(self._places[:, None] - self._places)
        self._kernel = np.where(apart == 0, 1.0, NEIGHBOUR / np.maximum(apart, 1) ** 2)
        self._smooth: Logs | None = None

    def ratios(self, level: Any) -> Any:
        """At these levels: their own mean, and their neighbours' where those know more."""
        if self._smooth is None:
            weights = self._kernel * self.weight
            self._smooth = weights @ self.mean / np.maximum(weights.sum(1), 1e-9)
        return np.interp(level, self._places, self._smooth)

    def known(self, level: float) -> float:
        return float(np.interp(level, self._places, self.weight))

    def learn(self, level: float, surprise: float) -> None:
        """The whole levels on both sides, each by its share."""
        low = min(int(level), len(self.mean) - 2)
        for place, share in ((low, low + 1 - level), (low + 1, level - low)):
            if share > 0:
                if not self.weight[place]:
                    self.mean[place] = self.ratios(place)
                self.weight[place] = self.weight[place] * math.exp(-share / CELL_MEMORY) + share
                self.mean[place] += share * surprise / (self.weight[place] + CELL_PRIOR)
        self._smooth = None


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
        self._levels = math.ceil(_level(longest)) + 1
        self._buckets: dict[int, _Bucket] = {}
        self._base: dict[int, tuple[Milliseconds, Milliseconds]] = {}

    def times(self, rows: int, context: float) -> Milliseconds:
        """[longest + 1]: milliseconds of a round with k = 0, 1, ... guesses a row."""
        lengths = np.arange(self.longest + 1)
        return self._predicted(rows, context) * self._factor(rows, lengths)

    def times_of_guesses(self, rows: int, most: int, context: float) -> Milliseconds:
        """[most + 1]: milliseconds of a round with 0, 1, ... guesses in all, at most ``longest`` a row on average."""
        spread = np.arange(most + 1) / rows
        predicted = np.interp(spread, np.arange(self.longest + 1), self._predicted(rows, context))
        return predicted * self._factor(rows, spread)

    def observe(self, rows: int, k: float, context: float, ms: float) -> None:
        """A real round took so long; k guesses a row, which need not be a whole number."""
        predicted = float(np.interp(k, np.arange(self.longest + 1), self._predicted(rows, context)))
        bucket = self._buckets.setdefault(_bucket(rows), _Bucket(self._levels))
        level = float(_level(k))
        surprise = math.log(ms / predicted) - self.drift - float(bucket.ratios(level))
        surprise = min(max(surprise, -JUMP), JUMP) if self._rounds else surprise
        self._rounds += 1
        known = bucket.known(level)
        step = surprise * max(1 / self._rounds, DRIFT * known / (known + WELL_KNOWN))
        self.drift += step
        bucket.learn(level, surprise - step)

    def feed_ms(self, tokens: int) -> float:
        return self.table.feed_ms(tokens) * math.exp(self.drift)

    def _predicted(self, rows: int, context: float) -> Milliseconds:
        if rows not in self._base:
            lengths = range(self.longest + 1)
            at_table = np.array([self.table.round_ms(rows, k) for k in lengths])
            slope = [rows * (self.table.context_once + (k + 1) * self.table.context_token) for k in lengths]
            self._base[rows] = np.maximum(at_table, 1e-6), np.array(slope)
        at_table, slopes = self._base[rows]
        if context == self.table.context:
            return at_table
        return np.maximum(at_table + slopes * (context - self.table.context), 0.1 * at_table)

    def _factor(self, rows: int, lengths: NDArray[Any]) -> Milliseconds:
        bucket = self._buckets.get(_bucket(rows))
        ratios = 0.0 if bucket is None else bucket.ratios(_level(lengths))
        return np.exp(self.drift + ratios)  # type: ignore[no-any-return]


def _level(k: Any) -> Any:
    return LEVELS_AN_OCTAVE * np.log2(1 + k)


def _bucket(rows: int) -> int:
    return (rows - 1).bit_length()
