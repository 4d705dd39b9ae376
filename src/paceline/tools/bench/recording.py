"""Recording of every round of an engine, under any length policy."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.core.batch import Batch, SpeculationPlan
from paceline.core.draft import Draft, Verdict
from paceline.core.outputs import Latency
from paceline.core.row_keeper import RowKeeper, RowKeepers
from paceline.lengths import LengthPolicy
from paceline.lengths.base import UnreadPrompt


@dataclass(frozen=True)
class Round:
    """One round. began, ended: seconds of time.perf_counter. k: draft tokens wanted.

    drafted, accepted: draft tokens verified and accepted, per row; depths: depth of the verified draft. surplus: tokens
        beyond the ends of answers, which are dropped. saved: rows that accepted a draft token with a higher-ranked
        sibling.
    """

    began: float
    ended: float
    k: int
    accepted: tuple[int, ...]
    drafted: tuple[int, ...]
    surplus: int = 0
    depths: tuple[int, ...] = ()
    saved: int = 0

    @property
    def rows(self) -> int:
        return len(self.accepted)

    @property
    def tokens(self) -> int:
        return sum(self.accepted) + self.rows - self.surplus

    @property
    def mean_drafted(self) -> float:
        """Draft tokens verified per row."""
        return sum(self.drafted) / self.rows

    @property
    def ms(self) -> float:
        return 1000 * (self.ended - self.began)


@dataclass
class Recorder(RowKeepers, LengthPolicy):
    """A length policy that lets ``inner`` choose and records the rounds, which run as under ``inner``."""

    inner: LengthPolicy
    rounds: list[Round] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.name = self.inner.name

    @property
    def reads_drafts(self) -> bool:
        return self.inner.reads_drafts

    def choose(self, batch: Batch) -> SpeculationPlan:
        self._began = time.perf_counter()
        plan = self.inner.choose(batch).within(batch)
        self._k = plan.k
        return plan

    def select(self, batch: Batch, draft: Draft) -> Draft:
        return self.inner.select(batch, draft)

    def reads_prompt(self, rows: int, prompt: UnreadPrompt) -> bool:
        return self.inner.reads_prompt(rows, prompt)

    @property
    def keepers(self) -> tuple[RowKeeper, ...]:
        return (self.inner,)

    def observe(self, batch: Batch, verdict: Verdict) -> None:
        self.inner.observe(batch, verdict)
        ended = time.perf_counter()
        accepted, drafted, depths = map(tuple, (verdict.accepted, verdict.drafted, verdict.depths))
        surplus = sum(accepted) + len(accepted) - sum(verdict.gained)
        self.rounds.append(
            Round(self._began, ended, self._k, accepted, drafted, surplus, depths, verdict.rows_saved_by_sibling)
        )


def latency_of(rounds: Sequence[Round], seconds: float) -> Latency:
    """Milliseconds per token of the first, last and all rows, which all ran these rounds in ``seconds``."""
    tokens = [sum(accepted) + len(rounds) for accepted in zip(*(record.accepted for record in rounds), strict=True)]
    paces = [1000 * seconds / each for each in tokens]
    return Latency(min(paces), max(paces), sum(paces) / len(paces))


def longest_stretch(rounds: list[Round], rows: int) -> list[Round]:
    """The longest run of rounds with exactly ``rows`` rows."""
    best: list[Round] = []
    here: list[Round] = []
    for record in rounds:
        here = [*here, record] if record.rows == rows else []
        best = here if len(here) > len(best) else best
    return best


def kept_by_position(rows: Sequence[tuple[int, int]], k: int) -> tuple[float | None, ...]:
    """Acceptance probability by position. rows: accepted draft tokens and the draft's depth, per row and round.

    A draft token counts as tried if all before it were accepted.
    """
    tried = [sum(accepted >= place < drafted for accepted, drafted in rows) for place in range(k)]
    good = [sum(accepted > place for accepted, _ in rows) for place in range(k)]
    return tuple(right / all_ if all_ else None for right, all_ in zip(good, tried, strict=True))
