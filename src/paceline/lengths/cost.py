"""What a round costs: measured tables, corrected by the rounds that are played.

A round of b rows that guess k tokens each takes verify(b, k) + draft(b, k) milliseconds. Verification is a function of
the tokens fed, b (k + 1), of b, and of the context; drafting is a part that every draft pays and a part for each guess.
The tables are measured (``calibration``, or ``paceline profile``); real rounds then correct them.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Milliseconds = NDArray[np.float64]


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

    def draft_ms(self, rows: int, k: int) -> float:
        if k == 0:
            return 0.0
        once, step = (interpolate(self.batch_sizes, table, rows) for table in (self.draft_once, self.draft_step))
        return once + k * step

    def round_ms(self, rows: int, k: int, context: float | None = None) -> float:
        return self.verify_ms(rows, k, context) + self.draft_ms(rows, k)

    def feed_ms(self, tokens: int) -> float:
        """Catching up by so many tokens, all rows together."""
        return interpolate(self.feed_tokens, self.feed, tokens) if tokens > 0 else 0.0

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

CELL_MEMORY = 24.0  # rounds of one (batch bucket, k) after which a measurement weighs 1 / e
ALL_MEMORY = 48.0  # rounds of any kind, likewise
ALL_ROUNDS = 1.0  # what the ratio of all rounds weighs in a cell's
JUMP = math.log(1.5)  # a single round moves an estimate as if it were off by this factor at most


@dataclass
class _Ratio:
    """A decayed mean of log(measured / predicted), robust against single slow rounds."""

    memory: float
    mean: float = 0.0
    weight: float = 0.0

    def learn(self, log_ratio: float, expected: float) -> None:
        self.weight = self.weight * math.exp(-1 / self.memory) + 1
        surprise = log_ratio - expected
        if self.weight > 2:  # the first rounds say how far off the table is
            surprise = min(max(surprise, -JUMP), JUMP)
        self.mean += (expected + surprise - self.mean) / self.weight


class CostModel:
    """time(b, k, context): the table times the ratio that real rounds show, by batch bucket and k.

    A cell without rounds of its own has the ratio of all rounds; one with n has the mean of both, weighted
    n : ALL_ROUNDS. Buckets are 1, 2, 3-4, 5-8, 9-16, ... rows.
    """

    def __init__(self, table: CostTable, longest: int) -> None:
        self.table = table
        self.longest = longest  # times are given for k = 0 .. longest
        self._base: dict[int, tuple[Milliseconds, Milliseconds]] = {}
        self._all = _Ratio(ALL_MEMORY)
        self._cells: dict[tuple[int, int], _Ratio] = {}
        self._factors: dict[int, Milliseconds] = {}

    def times(self, rows: int, context: float) -> Milliseconds:
        """[longest + 1]: milliseconds of a round with k = 0, 1, ... guesses a row."""
        return self._predicted(rows, context) * self._factor(_bucket(rows))

    def observe(self, rows: int, k: int, context: float, ms: float) -> None:
        """A real round took so long; k is what was asked for, whether or not the drafter had as many guesses."""
        log_ratio = math.log(ms / float(self._predicted(rows, context)[k]))
        bucket = _bucket(rows)
        cell = self._cells.setdefault((bucket, k), _Ratio(CELL_MEMORY))
        cell.learn(log_ratio, cell.mean if cell.weight else log_ratio)
        self._all.learn(log_ratio, self._all.mean if self._all.weight else log_ratio)
        self._factors.clear()

    def rounds(self, rows: int, k: int) -> float:
        """How many real rounds of this kind (decayed) have been measured."""
        cell = self._cells.get((_bucket(rows), k))
        return 0.0 if cell is None else cell.weight

    def feed_ms(self, tokens: int) -> float:
        return self.table.feed_ms(tokens) * math.exp(self._all.mean)

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

    def _factor(self, bucket: int) -> Milliseconds:
        if bucket not in self._factors:
            logs = [self._log_ratio(bucket, k) for k in range(self.longest + 1)]
            self._factors[bucket] = np.exp(logs)
        return self._factors[bucket]

    def _log_ratio(self, bucket: int, k: int) -> float:
        cell = self._cells.get((bucket, k))
        if cell is None:
            return self._all.mean
        return (cell.weight * cell.mean + ALL_ROUNDS * self._all.mean) / (cell.weight + ALL_ROUNDS)


def _bucket(rows: int) -> int:
    return (rows - 1).bit_length()
