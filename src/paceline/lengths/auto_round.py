"""What ``auto`` plans for one round, and what was drafted in it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import NamedTuple

from paceline.core.batch import Batch
from paceline.core.draft import Draft
from paceline.lengths.cost import RoundKind, RoundTimes
from paceline.lengths.sources import DraftSource


class Missing(NamedTuple):
    """Tokens that the draft model has to read before a draft, beyond the one that every draft reads.

    by_row: [B]. total: of all rows, less what samples of one request share, which is read once.
    """

    by_row: list[int]
    total: int


NOTHING_MISSING = Missing([], 0)


@dataclass
class AutoRound:
    """The plan of a round, and what was drafted in it.

    rows, context, slots: number of rows, length of the longest and slot of each, when the round was chosen.
    kind, times: how its rows are sampled, and predicted times. weights: w of each row, [B].
    sources: of each row's draft tokens, [B]; None: no draft tokens. price: of time, in tokens per millisecond.
    feed_ms: for reading what the draft model has missed. on_credit: whether the source seems not to pay.
    k: draft tokens planned per row. passes: of the draft model.
    ngrams: expected tokens of the n-gram drafts, row by row. expected: accepted tokens that are expected of them.
    drafts: all drafts that the policy saw, with their sources and the bins of those rows that had this source.
    """

    batch: Batch
    kind: RoundKind
    times: RoundTimes
    weights: list[float]
    sources: list[DraftSource | None]
    price: float = 0.0
    feed_ms: float = 0.0
    on_credit: bool = False
    k: int = 0
    passes: int = 0
    ngrams: list[list[float]] = field(default_factory=list)
    expected: float = 0.0
    drafts: list[tuple[DraftSource, Draft, list[list[int]]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rows, self.context, self.slots = self.batch.rows, self.batch.longest, self.batch.slots

    @property
    def plain_rounds_left(self) -> float:
        """Plain rounds until the last row is expected to end."""
        batch = self.batch
        allowed = max(limit - length for limit, length in zip(batch.limits, batch.lengths, strict=True))
        seconds = max(batch.deadlines) - time.monotonic()
        return min(allowed, batch.expected_tokens, 1000 * seconds / self.times.plain)

    def rows_of(self, source: DraftSource) -> int:
        """Number of rows whose draft tokens are of this source."""
        return self.sources.count(source)
