"""One round of ``auto``: which of its draft tokens have the highest value together."""

from __future__ import annotations

import math
import time
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import itemgetter
from typing import TypeAlias

from paceline.core.batch import Batch
from paceline.core.draft import Draft
from paceline.lengths.cost import CostModel, RoundTimes
from paceline.lengths.scores import LONGEST_AUTO, bins_of, bins_of_draft
from paceline.lengths.sources import DraftSource

Parents: TypeAlias = Sequence[int] | None  # index of each draft token's parent in its row, -1 for none; None: a chain


@dataclass
class AutoRound:
    """What was planned for a round, and what was drafted in it.

    rows, context, slots: number of rows, length of the longest and slot of each, when the round was chosen.
    times: predicted times. token_weights: w of each row, [B]. leads: of each row over plain decoding, in plain rounds,
        [B]; empty unless the batch drains and has several rows.
    source: of the draft tokens; None in plain rounds. rate: price of time, in tokens per millisecond.
    feed_ms: for reading what the draft model has missed.
    k: draft tokens planned per row. trial_rows: rows that get draft tokens; None: all. passes: of the draft model.
    drafts: all drafts that the policy saw, with their sources.
    """

    batch: Batch
    times: RoundTimes
    token_weights: list[float]
    leads: list[float]
    source: DraftSource | None = None
    rate: float = 0.0
    feed_ms: float = 0.0
    k: int = 0
    trial: bool = False
    is_plain_check: bool = False  # runs without draft tokens, to measure a plain round
    trial_rows: range | None = None
    passes: int = 0
    drafts: list[tuple[DraftSource, Draft]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rows, self.context, self.slots = self.batch.rows, self.batch.longest, self.batch.slots

    @property
    def scale(self) -> float:
        """Rows of the batch per row with draft tokens: converts a trial's result to the whole batch."""
        return 1.0 if self.trial_rows is None else self.rows / len(self.trial_rows)

    @property
    def drafting_rows(self) -> int:
        return self.rows if self.trial_rows is None else len(self.trial_rows)

    @property
    def tokens_left(self) -> float:
        """Tokens that a row of the batch is still expected to gain, at the pace of plain decoding."""
        batch = self.batch
        allowed = max(limit - length for limit, length in zip(batch.limits, batch.lengths, strict=True))
        seconds = max(batch.deadlines) - time.monotonic()
        return min(allowed, batch.expected_tokens, 1000 * seconds / self.times.plain)

    def lines(
        self, source: DraftSource, bins: Sequence[Sequence[int]], trees: Sequence[Parents], first: int = 0
    ) -> list[list[float]]:
        """Expected gain w s of each draft token, row by row. first: row of the batch that ``bins`` start at."""
        lines = []
        rows = zip(self.slots[first:], self.token_weights[first:], bins, trees, strict=False)
        for slot, weight, line, parents in rows:
            survivals = source.calibration.survivals(slot, line, parents)
            lines.append(survivals if weight == 1 else [weight * survival for survival in survivals])
        return lines

    def ranked(self, source: DraftSource, draft: Draft) -> tuple[Draft, list[list[float]]]:
        """The draft with each row's tokens in descending order of expected gain, and these gains.

        No token's gain exceeds its parent's, so chains are in order already, and any first tokens of a tree are a tree.
        """
        lines = self.lines(source, bins_of_draft(draft), draft.host_parents or [None] * len(draft.draft_tokens))
        if draft.host_parents is None:
            return draft, lines
        orders = [sorted(range(len(line)), key=line.__getitem__, reverse=True) for line in lines]
        return draft.ordered(orders), [sorted(line, reverse=True) for line in lines]

    def best(self, source: DraftSource, lines: list[list[float]], discount: float = 1.0) -> tuple[float, list[int]]:
        """Highest value of a set of draft tokens, and the number of each line's. discount: factor on predicted times.

        A draining batch ends with its last row, and rows advance unevenly where many draft tokens are wrong, so its
        price of time is divided by the acceptance, and its draft tokens may take no longer than the row with the
        smallest lead is expected to gain.
        """
        rate, deadlines = self.rate * discount, self.batch.deadlines
        if self.leads:
            rate /= source.acceptance
        max_ms = self.times.plain * (1 + source.max_extra(self.rows))
        value, counts = self.times.best(lines, rate, deadlines, max_ms)
        if self.leads and len(lines) == self.rows:
            row = self.leads.index(min(self.leads))
            gain = max(0.0, self.leads[row]) + sum(lines[row][: counts[row]]) / self.token_weights[row]
            value, counts = self.times.best(lines, rate, deadlines, min(max_ms, self.times.plain * (1 + gain)))
        return value, counts

    def value_of_one_more(
        self, source: DraftSource, first: int, scores: Sequence[Sequence[float]], parents: Sequence[Sequence[int]]
    ) -> float:
        """Value, in tokens, that a child of every leaf is expected to add. first: row that ``scores`` start at.

        scores, parents: score and parent of each row's draft tokens so far.
        """
        bins = [bins_of(len(line), line, tree) for line, tree in zip(scores, parents, strict=True)]
        acceptance, before, after = source.acceptance, [], []
        for line, tree in zip(self.lines(source, bins, parents, first), parents, strict=True):
            children = [acceptance * gain for place, gain in enumerate(line) if place not in tree]
            before.append(sorted(line, reverse=True))
            after.append(sorted(line + children, reverse=True))
        return self.best(source, after)[0] - self.best(source, before)[0]


def best_depth(
    costs: CostModel,
    gains: Iterable[float],
    times: RoundTimes,
    rows: int,
    rate: float,
    depths: Container[int] = range(1, LONGEST_AUTO + 1),
) -> tuple[float, float, int]:
    """Value, expected tokens and depth of the best draft that is equally deep in every row, at least 1.

    gains: expected tokens at depth 1, 2, ..., all rows together. depths: those that are allowed.
    """
    values = [
        (tokens - rate * (times.extra(rows * k) + costs.draft_ms(rows, k)), tokens, k)
        for k, tokens in enumerate(accumulate(gains), 1)
        if k in depths
    ]
    return max(values, key=itemgetter(0), default=(-math.inf, 0.0, 1))
