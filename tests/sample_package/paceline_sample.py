"""What another package may bring: a drafter and a length policy, named in its entry points."""

from __future__ import annotations

import torch

from paceline.batch import Batch, SpeculationPlan
from paceline.draft import Draft, Verdict
from paceline.drafters import Drafter
from paceline.lengths import LengthPolicy
from paceline.row_keeper import PerRow, RowKeeper, RowKeepers

NOT_A_DRAFTER = 3


class Echo(RowKeepers, Drafter):
    """Drafts the row's own text of ``period`` tokens before; the period grows by one after every rejected token."""

    name = "echo"

    def __init__(self, period: int = 1) -> None:
        self.period = period
        self.periods: PerRow[int] = PerRow()

    @property
    def keepers(self) -> tuple[RowKeeper, ...]:
        return (self.periods,)

    def propose(self, batch: Batch, plan: SpeculationPlan) -> Draft:
        periods = [self.periods.setdefault(row, self.period) for row in range(batch.rows)]
        back = torch.tensor([[step % period - period for step in range(plan.k)] for period in periods])
        place = (batch.live_length[:, None] + back.to(batch.device)).clamp(min=0)
        return Draft(batch.tokens[: batch.rows].gather(1, place), torch.full_like(batch.live_length, plan.k))

    def observe(self, batch: Batch, verdict: Verdict) -> None:
        for row, (kept, drafted) in enumerate(zip(verdict.host.accepted, verdict.host.drafted, strict=True)):
            if kept < drafted and row in self.periods:
                self.periods[row] += 1


class Careful(LengthPolicy):
    """One draft token more than the most that a row kept in the round before."""

    name = "careful"
    max_draft_tokens = 5

    def __init__(self) -> None:
        self.k = 1

    def choose(self, batch: Batch) -> SpeculationPlan:
        return SpeculationPlan(self.k)

    def observe(self, batch: Batch, verdict: Verdict) -> None:
        self.k = min(max(verdict.host.accepted) + 1, self.max_draft_tokens)
