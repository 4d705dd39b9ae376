"""Time of a round: measured tables, corrected by the rounds that run.

A round of b rows with k draft tokens each takes verify(b, k) + draft(b, k) milliseconds. Verification depends on the
tokens fed, b (k + 1), on b, and on the context. Drafting has a fixed part and a part for each draft token. The tables
are measured by ``calibration`` or ``paceline profile``.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.lengths.records import REFRESH_ROUNDS, RunningMean
from paceline.lengths.scores import LONGEST_AUTO

Numbers = NDArray[np.float64]

# Variances of log(measured time / table), the observation of the Kalman filter:
NOISE = 0.04  # of a single round: a standard deviation of 20 %
DRIFT = 2e-4  # added per round, because the machine's speed changes
INITIAL_VARIANCE = 0.03  # of the table's error before the first round: a standard deviation of 17 %
# Largest surprise that a round may have, in log units: pauses of the machine count as two standard deviations. With 1.0
# n-gram drafts ran at 0.989 of the former policies' speed in the simulator, so at 0.994 (docs/log.md).
_MAX_SURPRISE = 2 * math.sqrt(NOISE)
# Consecutive rounds off by more than REFUTED, all slower or all faster, after which the last of them is believed. With
# the filter alone, a table of three times the true times kept 16 rows from drafting for 200 rounds (docs/log.md).
REFUTING_ROUNDS = 3
REFUTED = math.log(2)  # twice, or half
MIN_FACTOR = 0.1  # lower bounds: a time at a short context over the tabulated one, a drafting pass over the first one
MIN_MS = 1e-6  # lower bound of times whose logarithm is taken
MAX_FACTOR = 2  # a draft counts as at most twice the mean: pauses of the machine are no information


def interpolate(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """Piecewise linear interpolation of the points (xs, ys) at x, at least 0. xs ascend.

    Below the first point the first segment is extended. Beyond the last point the line through the middle point and the
    last is extended, which is less noisy than the last segment.
    """
    if len(xs) == 1:
        return ys[0]
    right = min(max(bisect_left(xs, x), 1), len(xs) - 1)
    left = min(len(xs) // 2, right - 1) if x > xs[-1] else right - 1
    x0, x1, y0, y1 = xs[left], xs[right], ys[left], ys[right]
    return max(0.0, y0 + (y1 - y0) * (x - x0) / (x1 - x0))


def lower_hull(ys: Sequence[float]) -> list[float]:
    """Values at 0, 1, 2, ... of the largest convex function that is nowhere above ``ys``: removes upward noise."""
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
    """Measured times in milliseconds, at ``context`` tokens per row.

    verify[i][j]: verification for batch_sizes[i] rows with lengths[j] draft tokens each, with acceptance and commit.
    draft_once[i], draft_step[i]: drafting k tokens for batch_sizes[i] rows takes draft_once + k * draft_step.
    context_once, context_token: extra verification time per row and position of context beyond ``context``: once, and
        for each token fed.
    feed[i]: added to a draft by reading feed_tokens[i] missing tokens of one row first.
    weight_bytes[i][j]: bytes of the target's weights that such a verification reads. A mixture of experts reads more
        with more tokens, since they run through more different experts. Empty: all sizes read the same.

    Raises TypeError or ValueError if the fields are not sizes and times of a possible measurement.
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
    weight_bytes: tuple[tuple[float, ...], ...] = ()

    def verify_ms(self, rows: int, k: float, context: float | None = None) -> float:
        """Verification of k draft tokens per row, in ms. context: tokens per row; None: the table's.

        Between two measured batch sizes their times for the same total number of tokens are interpolated.
        """
        positions = 0.0 if context is None else rows * (context - self.context)
        per_position = self.context_once + (k + 1) * self.context_token
        return self._interpolated(self.verify, rows, k) + positions * per_position

    def read_bytes(self, rows: int, k: float) -> float:
        """Bytes of weights that the verification of k draft tokens per row reads; 1 if all sizes read the same."""
        return self._interpolated(self.weight_bytes, rows, k) if self.weight_bytes else 1.0

    def _interpolated(self, table: tuple[tuple[float, ...], ...], rows: int, k: float) -> float:
        tokens = rows * (k + 1)
        at_size = [
            interpolate([size * (length + 1) for length in self.lengths], line, tokens)
            for size, line in zip(self.batch_sizes, table, strict=True)
        ]
        return interpolate(self.batch_sizes, at_size, rows)

    def draft_ms(self, rows: int, k: float) -> float:
        """Drafting of k tokens per row, in ms."""
        if k == 0:
            return 0.0
        once, step = (interpolate(self.batch_sizes, table, rows) for table in (self.draft_once, self.draft_step))
        return once + k * step

    def round_ms(self, rows: int, k: float, context: float | None = None) -> float:
        """Drafting and verification of k tokens per row, in ms."""
        return self.verify_ms(rows, k, context) + self.draft_ms(rows, k)

    def feed_ms(self, tokens: int) -> float:
        """Time in ms until the draft model has read ``tokens`` missing tokens, all rows together."""
        return interpolate(self.feed_tokens, self.feed, tokens) if tokens > 0 else 0.0

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(document: dict[str, Any]) -> CostTable:
        """The table that ``as_json`` wrote. Raises TypeError, KeyError or ValueError for any other document."""
        if not isinstance(document, dict):
            raise TypeError(f"a cost table is a JSON object, not {type(document).__name__}")
        return CostTable(**{name: _as_tuples(value) for name, value in document.items()})

    def __post_init__(self) -> None:
        axes = self.batch_sizes, self.lengths, self.feed_tokens
        times = *self.verify, *self.weight_bytes, self.draft_once, self.draft_step, self.feed
        scalars = self.context, self.context_once, self.context_token
        if not all(math.isfinite(number) and number >= 0 for line in (*axes, *times, scalars) for number in line):
            raise ValueError("a time or a size is not a number, or is below 0")
        if any(not axis or list(axis) != sorted(set(axis)) for axis in axes) or self.batch_sizes[0] < 1:
            raise ValueError("sizes are missing or not in ascending order")
        if self.weight_bytes and not all(size > 0 for line in self.weight_bytes for size in line):
            raise ValueError("a round reads no weights")
        tables = [self.verify, *([self.weight_bytes] if self.weight_bytes else [])]
        widths = *[self.lengths] * sum(map(len, tables)), *[self.batch_sizes] * (2 + len(tables)), self.feed_tokens
        lines = *(line for table in tables for line in table), *tables, self.draft_once, self.draft_step, self.feed
        if any(len(line) != len(axis) for line, axis in zip(lines, widths, strict=True)):
            raise ValueError("there are fewer or more times than sizes")
        if not all(ms > 0 for line in self.verify for ms in line):
            raise ValueError("a round takes 0 ms")


def _as_tuples(value: Any) -> Any:
    return tuple(_as_tuples(entry) for entry in value) if isinstance(value, list) else value


# --- correction by real rounds -------------------------------------------------


class _Correction:
    """log(measured / table) = level + slope * log2(1 + draft tokens per row), for batches of similar size.

    A Kalman filter whose two states are random walks. A state that recent rounds do not show (the slope, while no round
    has draft tokens) keeps its value, and its variance grows.
    """

    def __init__(self, level: float, slope: float) -> None:
        self.level, self.slope = level, slope
        self._streak = 0  # consecutive rounds off by more than ``REFUTED``: above 0 slower ones, below 0 faster ones
        self._reset_variances()

    def _reset_variances(self) -> None:
        # covariance matrix of (level, slope)
        self._level_var, self._covariance, self._slope_var = INITIAL_VARIANCE, 0.0, INITIAL_VARIANCE / 4

    @property
    def error(self) -> float:
        """Standard error of the level, in log units. A plain round depends on the level alone."""
        return math.sqrt(self._level_var)

    def learn(self, log_tokens: float, surprise: float) -> None:
        """Add a round. log_tokens: log2(1 + draft tokens per row). surprise: its log(measured / predicted)."""
        side = int(surprise > REFUTED) - int(surprise < -REFUTED)
        self._streak = self._streak + side if side * self._streak > 0 else side
        if abs(self._streak) == REFUTING_ROUNDS:
            self._restart(surprise)
            return
        self._level_var, self._slope_var = self._level_var + DRIFT, self._slope_var + DRIFT
        level = self._level_var + self._covariance * log_tokens
        slope = self._covariance + self._slope_var * log_tokens
        variance = level + slope * log_tokens + NOISE
        step = min(max(surprise, -_MAX_SURPRISE), _MAX_SURPRISE) / variance
        self.level, self.slope = self.level + level * step, self.slope + slope * step
        self._level_var -= level * level / variance
        self._covariance -= level * slope / variance
        self._slope_var -= slope * slope / variance

    def _restart(self, surprise: float) -> None:
        """Take the last round's time for the truth, as uncertain as a table is before its first round."""
        self.level, self._streak = self.level + surprise, 0
        self._reset_variances()


@dataclass(frozen=True)
class RoundTimes:
    """Predicted times of rounds of one batch size: T(n) of the value function.

    ms: [rows * LONGEST_AUTO + 1], milliseconds of a round with 0, 1, ... draft tokens, all rows together.
    hull: [same], without upward noise: time per byte of weights that a round reads is the largest convex function
        below, so a dense model's times are convex. A mixture of experts reads more and more, but ever fewer new experts
        for each further token, so its times need not be.
    least: [one less], the smallest step of the hull from each number of draft tokens on, in milliseconds.
    plain: T(0), milliseconds of a round without draft tokens. error: its standard error, in milliseconds.
    as_of: number of observed rounds when this was computed.
    """

    ms: list[float]
    hull: list[float]
    error: float
    as_of: int
    least: list[float] = field(init=False)
    plain: float = field(init=False)

    def __post_init__(self) -> None:
        steps = np.diff(self.hull)
        object.__setattr__(self, "least", np.minimum.accumulate(steps[::-1])[::-1].tolist())
        object.__setattr__(self, "plain", self.ms[0])

    def extra(self, draft_tokens: int) -> float:
        """T(n) - T(0): milliseconds that ``draft_tokens`` draft tokens add to a plain round."""
        return self.ms_of(draft_tokens) - self.plain

    def ms_of(self, draft_tokens: int) -> float:
        """T(n): milliseconds of a round that verifies ``draft_tokens`` draft tokens, all rows together."""
        return self.ms[min(draft_tokens, len(self.ms) - 1)]

    def best(
        self, lines: Sequence[Sequence[float]], rate: float, deadlines: Sequence[float], max_ms: float = math.inf
    ) -> tuple[float, list[int]]:
        """The highest value of verifying a set of draft tokens, and the number of tokens of each line in that set.

        lines: expected gain of each draft token, in tokens (w s), not increasing along a line, so the best set holds
            the first tokens of each line. The search ends where no later token can pay, which in a convex hull is the
            first that does not.
        rate: price of time, in tokens per millisecond.
        deadlines: of each line, in seconds; of equal gains, that of the line with the earliest deadline comes first.
        max_ms: longest round allowed, in milliseconds.
        """
        value, net, chosen, ms, counts = 0.0, 0.0, 0, self.hull, [0] * len(lines)
        min_gain = rate * self.least[0]
        candidates = [
            (-gain, deadlines[row], row) for row, line in enumerate(lines) for gain in line if gain > min_gain
        ]
        candidates.sort()
        for place, ((negated, _, _), least) in enumerate(zip(candidates, self.least, strict=False)):
            if -negated <= rate * least or ms[place + 1] > max_ms:
                break
            net += -negated - rate * (ms[place + 1] - ms[place])
            if net > value:
                value, chosen = net, place + 1
        for _, _, row in candidates[:chosen]:
            counts[row] += 1
        return value, counts


@dataclass(frozen=True)
class _TabulatedRounds:
    """Rounds of one batch size by the table alone, each [rows * LONGEST_AUTO + 1]: with 0, 1, ... draft tokens in all.

    ms: at the table's context. ms_per_position: added per position of context. log_tokens: log2(1 + draft tokens per
    row). reads: bytes of weights that the round reads, over those of a plain round.
    """

    ms: Numbers
    ms_per_position: Numbers
    log_tokens: Numbers
    reads: Numbers


class CostModel:
    """Times of verification and drafting: the table's, corrected by real rounds.

    The table of captured rounds on a GPU has no drafting times: its rounds include drafting.
    """

    def __init__(self, table: CostTable) -> None:
        self.table = table
        self._rounds = 0
        self._latest = _Correction(0.0, 0.0)  # of the last round's batch size: where other sizes start from
        self._corrections: dict[int, _Correction] = {}  # by batch size: 1, 2, 3-4, 5-8, ... rows
        self._tables: dict[int, _TabulatedRounds] = {}
        self._times: dict[tuple[int, int], RoundTimes] = {}
        self._draft_tables: dict[int, tuple[float, float]] = {}  # by number of rows: ms of one pass, of a further one
        self._draft_ratios: dict[int, RunningMean] = {}  # by number of rows: measured / tabulated
        self._next_passes: dict[int, float] = {}  # results of ``next_pass_ms`` since the last draft of so many rows

    def times(self, rows: int, context: float) -> RoundTimes:
        """Corrected times, at most ``REFRESH_ROUNDS`` rounds old. context: tokens per row, met within a factor of two.

        They are renewed more often while few rounds have been observed.
        """
        key = rows, int(context).bit_length()
        known = self._times.get(key)
        if known is None or self._rounds - known.as_of > min(self._rounds // 4, REFRESH_ROUNDS):
            known = self._times[key] = self._corrected(rows, context)
        return known

    def _corrected(self, rows: int, context: float) -> RoundTimes:
        """Times as of now."""
        table, correction = self._tabulated(rows), self._correction_of(rows)
        at_context = table.ms + table.ms_per_position * (context - self.table.context)
        ms = np.maximum(at_context, MIN_FACTOR * table.ms)
        corrected = ms * np.exp(correction.level + correction.slope * table.log_tokens)
        hull: list[float] = (np.array(lower_hull((corrected / table.reads).tolist())) * table.reads).tolist()
        return RoundTimes(corrected.tolist(), hull, corrected.item(0) * correction.error, self._rounds)

    def observe(self, rows: int, draft_tokens: int, context: float, ms: float) -> None:
        """Learn from a round that took ``ms`` milliseconds with ``draft_tokens`` draft tokens, all rows together."""
        table, correction = self._tabulated(rows), self._correction_of(rows)
        if draft_tokens >= len(table.ms):  # a trial of a wide tree, which the table does not know
            return
        base, log_tokens = table.ms.item(draft_tokens), table.log_tokens.item(draft_tokens)
        at_context = base + table.ms_per_position.item(draft_tokens) * (context - self.table.context)
        tabulated = max(at_context, MIN_FACTOR * base)
        surprise = math.log(max(ms, MIN_MS) / tabulated) - correction.level - correction.slope * log_tokens
        correction.learn(log_tokens, surprise)
        self._latest = self._corrections[(rows - 1).bit_length()] = correction
        self._rounds += 1

    def draft_ms(self, rows: int, passes: int) -> float:
        """Milliseconds of a draft of ``passes`` passes for ``rows`` rows, beside reading what is missing."""
        known = self._draft_ratios.get(rows)
        return self._tabulated_draft(rows, passes) * (known.value if known else 1.0)

    def next_pass_ms(self, rows: int) -> float:
        """Milliseconds that one more pass adds to a draft."""
        known = self._next_passes.get(rows)
        if known is None:
            known = self._next_passes[rows] = self.draft_ms(rows, 2) - self.draft_ms(rows, 1)
        return known

    def observe_draft(self, rows: int, passes: int, ms: float) -> None:
        """Learn from a draft that took ``ms`` milliseconds."""
        ratio = self._draft_ratios.setdefault(rows, RunningMean(1.0))
        ratio.learn(min(max(0.0, ms) / self._tabulated_draft(rows, passes), MAX_FACTOR * max(1.0, ratio.value)))
        self._next_passes.pop(rows, None)

    def _tabulated_draft(self, rows: int, passes: int) -> float:
        if rows not in self._draft_tables:  # kept: a policy asks after every draft token
            one = self.table.draft_ms(rows, 1)
            self._draft_tables[rows] = one, max(self.table.draft_ms(rows, 2) - one, MIN_FACTOR * one)
        one, step = self._draft_tables[rows]
        return max(one + (passes - 1) * step, MIN_MS)

    def feed_ms(self, tokens: int) -> float:
        """F: milliseconds until the draft model has read ``tokens`` missing tokens, all rows together."""
        return self.table.feed_ms(tokens) * math.exp(self._latest.level)

    def _correction_of(self, rows: int) -> _Correction:
        """The correction for the batch size; before its first round, what the last round's batch size taught."""
        known = self._corrections.get((rows - 1).bit_length())
        return known or _Correction(self._latest.level, self._latest.slope)

    def _tabulated(self, rows: int) -> _TabulatedRounds:
        if rows not in self._tables:
            table, lengths = self.table, np.arange(LONGEST_AUTO + 1)
            per_row = np.arange(rows * LONGEST_AUTO + 1) / rows
            ms = np.interp(per_row, lengths, [table.verify_ms(rows, k) for k in lengths.tolist()])
            ms_per_position = rows * (table.context_once + (per_row + 1) * table.context_token)
            reads = np.interp(per_row, lengths, [table.read_bytes(rows, k) for k in lengths.tolist()])
            log_tokens = np.log2(1 + per_row)
            self._tables[rows] = _TabulatedRounds(
                np.maximum(ms, MIN_MS), ms_per_position, log_tokens, reads / reads.item(0)
            )
        return self._tables[rows]
