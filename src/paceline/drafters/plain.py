"""No draft tokens: plain decoding, as a drafter."""

from __future__ import annotations

from paceline.core.batch import Batch, SpeculationPlan
from paceline.core.draft import Draft
from paceline.drafters.base import Drafter


class NoDrafter(Drafter):
    """Never draft tokens; every round is one plain decoding step."""

    name = "none"
    on_device = True
    uses_torch = False

    def propose(self, batch: Batch, wish: SpeculationPlan) -> Draft:
        return batch.empty_draft

    def describe(self, draft: str | None) -> str:
        return ""
