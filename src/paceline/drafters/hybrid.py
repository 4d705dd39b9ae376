"""Draft tokens copied from text where they will do, else a draft model's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from paceline.core.batch import Batch, SpeculationPlan
from paceline.core.draft import Draft, Verdict
from paceline.core.row_keeper import RowKeeper, RowKeepers
from paceline.drafters.base import Drafter, Equipment
from paceline.drafters.feature import drafting_model
from paceline.drafters.model import ModelDrafter
from paceline.drafters.ngram import STRONG, NgramDrafter
from paceline.models.decoder import Decoder, Reader


class HybridDrafter(RowKeepers, Drafter):
    """Looks for copies first, which costs nothing; where they do not suffice, the draft model draft tokens for all
    rows.

    Whether they suffice the length policy says (``SpeculationPlan.fallback``); where it does not, they must follow a
    match of the longest kind in every row. (SuffixDecoding, 2411.04975, falls back on a draft model in the same way.) A
    round of copies leaves the draft model's cache behind; it reads what it missed when it is asked next.
    """

    name = "hybrid"
    needs_draft_model = True
    copies = True
    auto_width = 1

    def __init__(self, copying: NgramDrafter, model: ModelDrafter) -> None:
        self._copying, self._model = copying, model
        self.uses_torch = model.uses_torch or copying.uses_torch
        self.width = max(copying.width, model.width)
        self.paying_rows = model.paying_rows
        self._last: Drafter = copying  # who drafted

    @classmethod
    def build(cls, equipment: Equipment, /) -> HybridDrafter:
        return cls(NgramDrafter.build(equipment), drafting_model(equipment))

    @property
    def decoders(self) -> Sequence[Decoder]:
        return self._model.decoders

    @property
    def reader(self) -> Reader | None:
        return self._model.reader

    @property
    def has_probabilities(self) -> bool:
        return self._model.has_probabilities

    @property
    def keepers(self) -> tuple[RowKeeper, ...]:
        return self._copying, self._model

    def propose(self, batch: Batch, wish: SpeculationPlan) -> Draft:
        copied = self._copying.propose(batch, wish).capped(wish.caps)
        asked = self._asked(batch, copied, wish)
        self._last = self._model if asked > 0 else self._copying
        if asked > 0:
            return self._model.propose(batch, replace(wish, k=asked))
        return copied

    @property
    def sources(self) -> Sequence[str]:  # type: ignore[override]
        return self._last.sources

    def _asked(self, batch: Batch, copied: Draft, wish: SpeculationPlan) -> int:
        """Draft tokens to ask of the draft model; 0: the copies suffice."""
        if wish.fallback is not None:
            return wish.fallback(batch, copied)
        return 0 if all(len(scores) > 0 and scores[0] >= STRONG for scores in copied.confidence or [[0.0]]) else wish.k

    def observe(self, batch: Batch, verdict: Verdict) -> None:
        self._model.observe(batch, verdict)

    def describe(self, draft: str | None) -> str:
        return f"ngram or {self._model.describe(draft)}"
