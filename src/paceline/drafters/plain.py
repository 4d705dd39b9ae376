"""No guesses: plain decoding, as a drafter."""

from __future__ import annotations

from paceline.core.batch import Batch, Wish
from paceline.core.draft import Draft
from paceline.drafters.base import Drafter


class NoDrafter(Drafter):
    """Never guesses; every round is one plain decoding step."""

    name = "none"
    on_device = True
    uses_torch = False

    def propose(self, batch: Batch, wish: Wish) -> Draft:
        return batch.no_guesses

    def describe(self, draft: str | None) -> str:
        return ""
