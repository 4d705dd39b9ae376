"""The drafter that proposes nothing."""

from __future__ import annotations

from paceline.core.batch import Batch, SpeculationPlan
from paceline.core.draft import Draft
from paceline.drafters.base import Drafter


class NoDrafter(Drafter):
    """Proposes no draft tokens, so every round is one step of plain decoding."""

    name = "none"
    on_device = True
    uses_torch = False

    def propose(self, batch: Batch, plan: SpeculationPlan) -> Draft:
        return batch.empty_draft

    def describe(self, draft: str | None) -> str:
        return ""
