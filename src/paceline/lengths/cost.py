"""Time of a round: measured tables, corrected by the rounds that run.

A round of b rows with k draft tokens each takes verify(b, k) + draft(b, k) milliseconds. Verification depends on the
tokens fed, b (k + 1), on b, and on the context. Drafting has a fixed part and a part for each draft token. The tables
are measured by ``calibration`` or ``paceline profile``.
"""

from __future__ import annotations

import copy
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.lengths.scores import LONGEST_AUTO, ROUND_FADE, SLOW_FADE

Numbers = NDArray[np.float64]

TABLE_PRIOR = 1.0  # rounds that the table counts as
MAX_SLOWER, MAX_FASTER = 0.2, 0.4  # log of the largest surprise that counts: pauses of the machine tell nothing
# Consecutive rounds beyond that, all slower or all faster, after which they are believed. With clipped surprises alone,
# a table of three times the true times kept 16 rows from drafting for 200 rounds (docs/log.md).
REFUTING_ROUNDS = 3
# Share of a correction that rounds with twice or half as many tokens take over, and those with draft tokens from those
# without, while none of theirs were measured.
SPREAD = 0.5
TABLE_ERROR = 0.3  # share of a plain round's time that the table may be wrong by, before one was measured
REFRESH_ROUNDS = 16  # rounds for which corrected times are reused at most: making them takes time, too
MIN_FACTOR = 0.1  # lower bounds: a time at a short context over the tabulated one, a drafting pass over the first one
MIN_MS = 1e-6  # lower bound of times whose logarithm is taken


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


@dataclass(frozen=True)
class CostTable:
    """Measured times in milliseconds, at ``context`` tokens per row.

    verify[i][j]: verification for batch_sizes[i] rows with lengths[j] draft tokens each, with acceptance and commit.
    draft_once[i], draft_step[i]: drafting k tokens for batch_sizes[i] rows takes draft_once + k * draft_step.
    context_once, context_token: extra verification time per row and position of context beyond ``context``: once, and
        for each token fed.
    feed[i]: added to a draft by reading feed_tokens[i] missing tokens of one row first.
    one_pass: whether a draft takes the same time whatever its number of tokens, ``draft_once``.
    cut_once[i], cut_step[i]: with min-p, top-k or top-p a round of batch_sizes[i] rows with k draft tokens takes
        cut_once + k * cut_step more. Empty where that was not measured.

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
    one_pass: bool = False
    cut_once: tuple[float, ...] = ()
    cut_step: tuple[float, ...] = ()

    def verify_ms(self, rows: int, k: float, context: float | None = None) -> float:
        """Verification of k draft tokens per row, in ms. context: tokens per row; None: the table's.

        Between two measured batch sizes their times for the same total number of tokens are interpolated.
        """
        at_size = [
            interpolate([size * (length + 1) for length in self.lengths], line, rows * (k + 1))
            for size, line in zip(self.batch_sizes, self.verify, strict=True)
        ]
        positions = 0.0 if context is None else rows * (context - self.context)
        per_position = self.context_once + (k + 1) * self.context_token
        return interpolate(self.batch_sizes, at_size, rows) + positions * per_position

    def draft_ms(self, rows: int, k: float) -> float:
        """Drafting of k tokens per row, in ms."""
        if k == 0:
            return 0.0
        once, step = (interpolate(self.batch_sizes, table, rows) for table in (self.draft_once, self.draft_step))
        return once + k * step

    def round_ms(self, rows: int, k: float, context: float | None = None) -> float:
        """Drafting and verification of k tokens per row, in ms."""
        return self.verify_ms(rows, k, context) + self.draft_ms(rows, k)

    def cut_ms(self, rows: int, k: float) -> float:
        """What min-p, top-k and top-p add to a round of k draft tokens per row, in ms."""
        if not self.cut_once:
            return 0.0
        once, step = (interpolate(self.batch_sizes, table, rows) for table in (self.cut_once, self.cut_step))
        return once + k * step

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
        ignored = "weight_bytes"  # in profiles of version 0.2
        return CostTable(**{name: _as_tuples(value) for name, value in document.items() if name != ignored})

    def __post_init__(self) -> None:
        axes = self.batch_sizes, self.lengths, self.feed_tokens
        cuts = self.cut_once, self.cut_step
        times = *self.verify, self.draft_once, self.draft_step, self.feed, *cuts
        scalars = self.context, self.context_once, self.context_token
        if not all(math.isfinite(number) and number >= 0 for line in (*axes, *times, scalars) for number in line):
            raise ValueError("a time or a size is not a number, or is below 0")
        if any(not axis or list(axis) != sorted(set(axis)) for axis in axes) or self.batch_sizes[0] < 1:
            raise ValueError("sizes are missing or not in ascending order")
        widths = *[self.lengths] * len(self.verify), *[self.batch_sizes] * 3, self.feed_tokens
        lines = *self.verify, self.verify, self.draft_once, self.draft_step, self.feed
        cut_sizes = {len(line) for line in cuts}
        if cut_sizes not in ({0}, {len(self.batch_sizes)}) or any(
            len(line) != len(axis) for line, axis in zip(lines, widths, strict=True)
        ):
            raise ValueError("there are fewer or more times than sizes")
        if not all(ms > 0 for line in self.verify for ms in line):
            raise ValueError("a round takes 0 ms")


def _as_tuples(value: Any) -> Any:
    return tuple(_as_tuples(entry) for entry in value) if isinstance(value, list) else value


# --- correction by real rounds -------------------------------------------------

_SIZES = 13  # numbers of tokens with a correction of their own: 1, 2, 4, ..., 4096


class TimeCorrection:
    """log(measured / table) = level + shape, from recent rounds.

    level: of the machine's speed, which changes, and the same for all rounds.
    shape: [plain rounds, rounds with draft tokens], each the table's error by the number of tokens that a round feeds,
        1, 2, 4, 8, ..., interpolated between these. Batches of all sizes share it.
    """

    def __init__(self) -> None:
        self.level = self._level_weight = 0.0
        self.shape, self._weights = ([[0.0] * _SIZES, [0.0] * _SIZES] for _ in range(2))
        self._refuting = 0  # consecutive rounds off by more than ``MAX_FASTER``: below 0 faster ones

    def copy(self) -> TimeCorrection:
        return copy.deepcopy(self)

    def at(self, log_tokens: float, drafts: bool) -> float:
        """The correction of a round that feeds 2 ** log_tokens tokens. drafts: whether some are draft tokens."""
        return self.level + _interpolated(self.shape[drafts], log_tokens)

    def rounds(self, log_tokens: float, drafts: bool) -> float:
        """Number of such rounds that were measured."""
        return _interpolated(self._weights[drafts], log_tokens)

    def learn(self, log_tokens: float, drafts: bool, log_ratio: float) -> None:
        """Add a round."""
        off = log_ratio - self.at(log_tokens, drafts)
        side = int(off > MAX_FASTER) - int(off < -MAX_FASTER)
        self._refuting = self._refuting + side if side * self._refuting > 0 else side
        if abs(self._refuting) == REFUTING_ROUNDS:  # believed: the machine is not what it was
            self.__init__()  # type: ignore[misc]
            self.level, self._level_weight = log_ratio, 1.0
            return
        off = _clipped(off)
        # What is known less takes over more: a size that was never measured, or the level of a first round.
        level, shape = (1 / (weight + TABLE_PRIOR) for weight in (self._level_weight, self.rounds(log_tokens, drafts)))
        gain = off / (1 + level + shape)
        self.level, self._level_weight = self.level + gain * level, self._level_weight * ROUND_FADE + 1
        for kind, (shapes, weights) in enumerate(zip(self.shape, self._weights, strict=True)):
            for size in range(_SIZES):
                distance = abs(size - log_tokens) + (kind != drafts)
                part = max(0.0, 1 - distance) or SPREAD**distance
                shapes[size] += part * gain / (weights[size] + TABLE_PRIOR)
                if distance < 1:
                    weights[size] = weights[size] * SLOW_FADE**part + part


def _interpolated(table: Sequence[float], log_tokens: float) -> float:
    size, share = _place(log_tokens)
    return table[size] + share * (table[size + 1] - table[size])


def _clipped(surprise: float) -> float:
    return min(max(surprise, -MAX_FASTER), MAX_SLOWER)


def _place(log_tokens: float) -> tuple[int, float]:
    """Index of the size below, and the share of the one above."""
    size = min(int(log_tokens), _SIZES - 2)
    return size, min(1.0, log_tokens - size)


class RoundKind(NamedTuple):
    """How a round's rows are sampled, where rounds of equal size take different times.

    greedy: whether all rows are. cuts: whether some ask for min-p, top-k or top-p.
    """

    greedy: bool = True
    cuts: bool = False


GREEDY = RoundKind()


@dataclass(frozen=True)
class RoundTimes:
    """Predicted times of rounds of one batch size: T(n) of the value function.

    ms: [rows * LONGEST_AUTO + 1], milliseconds of a round with 0, 1, ... draft tokens, all rows together.
    plain: T(0), milliseconds of a round without draft tokens.
    as_of: number of observed rounds when this was computed. slowness: of the machine at that time, over the table's:
        a factor in ``ms``.
    """

    ms: list[float]
    as_of: int
    slowness: float = 1.0
    plain: float = field(init=False)
    least: float = field(init=False)  # smallest step between two numbers of draft tokens, in milliseconds

    def __post_init__(self) -> None:
        object.__setattr__(self, "plain", self.ms[0])
        object.__setattr__(self, "least", float(np.diff(self.ms).min(initial=math.inf)))

    def extra(self, draft_tokens: int) -> float:
        """T(n) - T(0): milliseconds that ``draft_tokens`` draft tokens add to a plain round."""
        return self.ms_of(draft_tokens) - self.plain

    def ms_of(self, draft_tokens: int) -> float:
        """T(n): milliseconds of a round that verifies ``draft_tokens`` draft tokens, all rows together."""
        return self.ms[min(draft_tokens, len(self.ms) - 1)]

    def best(
        self, lines: Sequence[Sequence[float]], price: float, deadlines: Sequence[float], max_ms: float = math.inf
    ) -> tuple[float, list[int]]:
        """The highest value of verifying a set of draft tokens, and the number of tokens of each line in that set.

        lines: expected gain of each draft token, in tokens (w s), not increasing along a line, so the best set holds
            the first tokens of each line.
        price: of time, in tokens per millisecond.
        deadlines: of each line, in seconds; of equal gains, that of the line with the earliest deadline comes first.
        max_ms: longest round allowed, in milliseconds.
        """
        ms, plain, least = self.ms, self.plain, price * self.least
        candidates = [(-gain, deadlines[row], row) for row, line in enumerate(lines) for gain in line if gain > least]
        candidates.sort()
        value, tokens, chosen, counts = 0.0, 0.0, 0, [0] * len(lines)
        for n, (negated, _, _) in enumerate(candidates[: len(ms) - 1], 1):
            tokens -= negated
            net = tokens - price * (ms[n] - plain)
            if net > value and ms[n] <= max_ms:
                value, chosen = net, n
        for _, _, row in candidates[:chosen]:
            counts[row] += 1
        return value, counts


class CostModel:
    """Times of verification and drafting: the table's, corrected by real rounds.

    The table of captured rounds on a GPU has no drafting times: its rounds include drafting.
    """

    def __init__(self, table: CostTable) -> None:
        self.table = table
        self._rounds = 0
        self._corrections: dict[RoundKind, TimeCorrection] = {}
        self._latest = TimeCorrection()  # of the last round: where other kinds start from
        self._tables: dict[tuple[int, int, bool], tuple[Numbers, Numbers]] = {}
        self._times: dict[tuple[int, int, RoundKind], RoundTimes] = {}
        self._draft_tables: dict[int, tuple[float, float]] = {}  # by rows: ms of one pass, of a further one
        self._draft_ratios: dict[int, tuple[float, float]] = {}  # by rows: sum of log(measured / table), and weight

    def times(self, rows: int, context: float, kind: RoundKind = GREEDY) -> RoundTimes:
        """Corrected times, at most ``REFRESH_ROUNDS`` rounds old. context: tokens per row, met within a factor of two.

        They are renewed more often while few rounds have been observed.
        """
        key = rows, int(context).bit_length(), kind
        known = self._times.get(key)
        if known is None or self._rounds - known.as_of > min(self._rounds // 4, REFRESH_ROUNDS):
            ms, log_tokens = self._tabulated(rows, context, kind.cuts)
            correction = self._corrections.get(kind, self._latest)
            plain, drafted = (np.interp(log_tokens, np.arange(_SIZES), shape) for shape in correction.shape)
            drafted[0] = plain[0]
            factors = np.exp(correction.level + drafted)
            known = self._times[key] = RoundTimes((ms * factors).tolist(), self._rounds, math.exp(correction.level))
        return known

    def plain_doubt(self, rows: int, kind: RoundKind = GREEDY) -> float:
        """The share by which a plain round's predicted time may be too long; it falls with each that is measured."""
        return TABLE_ERROR / (1 + self._corrections.get(kind, self._latest).rounds(math.log2(rows), False))

    def observe(self, rows: int, draft_tokens: int, context: float, ms: float, kind: RoundKind = GREEDY) -> None:
        """Learn from a round that took ``ms`` milliseconds with ``draft_tokens`` draft tokens, all rows together."""
        tabulated, log_tokens = self._tabulated(rows, context, kind.cuts)
        if draft_tokens >= len(tabulated):  # a trial of a wide tree, which the table does not know
            return
        if kind not in self._corrections:
            self._corrections[kind] = self._latest.copy()
        self._latest = self._corrections[kind]
        ratio = max(ms, MIN_MS) / tabulated.item(draft_tokens)
        self._latest.learn(log_tokens.item(draft_tokens), draft_tokens > 0, math.log(ratio))
        self._rounds += 1

    def draft_ms(self, rows: int, passes: int) -> float:
        """Milliseconds of a draft of ``passes`` passes for ``rows`` rows, beside reading what is missing."""
        total, weight = self._draft_ratios.get(rows, (0.0, 0.0))
        return self._tabulated_draft(rows, passes) * math.exp(total / (weight + TABLE_PRIOR) + self._latest.level)

    def next_pass_ms(self, rows: int) -> float:
        """Milliseconds that one more pass adds to a draft."""
        return self.draft_ms(rows, 2) - self.draft_ms(rows, 1)

    def observe_draft(self, rows: int, passes: int, ms: float) -> None:
        """Learn from a draft that took ``ms`` milliseconds."""
        total, weight = self._draft_ratios.get(rows, (0.0, 0.0))
        expected = total / (weight + TABLE_PRIOR)
        off = math.log(max(ms, MIN_MS) / self._tabulated_draft(rows, passes)) - self._latest.level - expected
        ratio = expected + _clipped(off)
        self._draft_ratios[rows] = total * SLOW_FADE + ratio, weight * SLOW_FADE + 1

    def _tabulated_draft(self, rows: int, passes: int) -> float:
        if rows not in self._draft_tables:  # kept: a policy asks after every draft token
            one = self.table.draft_ms(rows, 1)
            further = max(self.table.draft_ms(rows, 2) - one, MIN_FACTOR * one)
            self._draft_tables[rows] = one, 0.0 if self.table.one_pass else further
        one, step = self._draft_tables[rows]
        return max(one + (passes - 1) * step, MIN_MS)

    def feed_ms(self, tokens: int) -> float:
        """F: milliseconds until the draft model has read ``tokens`` missing tokens, all rows together."""
        return self.table.feed_ms(tokens) * math.exp(self._latest.level)

    def _tabulated(self, rows: int, context: float, cuts: bool) -> tuple[Numbers, Numbers]:
        """By the table: ms of a round with 0, 1, ... draft tokens in all, and log2 of the tokens that it feeds."""
        key = rows, int(context).bit_length(), cuts
        if key not in self._tables:
            table, lengths = self.table, np.arange(LONGEST_AUTO + 1)
            per_row = np.arange(rows * LONGEST_AUTO + 1) / rows
            here, there = (
                np.interp(per_row, lengths, [table.verify_ms(rows, k, at) for k in lengths.tolist()])
                for at in (context, None)
            )
            ms = np.maximum(np.maximum(here, MIN_FACTOR * there), MIN_MS)
            ms += np.interp(per_row, lengths, [cuts * table.cut_ms(rows, k) for k in lengths.tolist()])
            self._tables[key] = ms, np.log2(rows * (1 + per_row))
        return self._tables[key]
