"""n-gram drafts where they suffice, otherwise the draft model's or head's."""

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
from paceline.models.draft_decoder import DraftDecoder
from paceline.models.passes import FeatureReader


class HybridDrafter(RowKeepers, Drafter):
    """Searches for n-gram drafts first, which costs little. If they do not suffice, the draft model drafts every row.

    The length policy decides whether they suffice (``SpeculationPlan.fallback``). Without its decision they do if every
    row has a match of the longest kind. SuffixDecoding (arXiv 2411.04975) falls back on a draft model in the same way.
    The draft model's cache falls behind in rounds with n-gram drafts, and catches up when the model drafts next.
    """

    name = "hybrid"
    needs_draft_model = True
    copies = True
    scores_subset = True
    auto_width = 1

    def __init__(self, ngram: NgramDrafter, model: ModelDrafter) -> None:
        self._ngram, self._model = ngram, model
        self.uses_torch = model.uses_torch or ngram.uses_torch
        self.width = max(ngram.width, model.width)
        self.paying_rows = model.paying_rows
        self._last: Drafter = ngram  # drafter of the last draft

    @classmethod
    def build(cls, equipment: Equipment, /) -> HybridDrafter:
        return cls(NgramDrafter.build(equipment), drafting_model(equipment))

    @property
    def decoders(self) -> Sequence[DraftDecoder]:
        return self._model.decoders

    @property
    def reader(self) -> FeatureReader | None:
        return self._model.reader

    @property
    def has_probabilities(self) -> bool:
        return self._model.has_probabilities

    @property
    def keepers(self) -> tuple[RowKeeper, ...]:
        return self._ngram, self._model

    def propose(self, batch: Batch, plan: SpeculationPlan) -> Draft:
        ngram_draft = self._ngram.propose(batch, plan).capped(plan.caps)
        depth = self._depth_to_draft(batch, ngram_draft, plan)
        self._last = self._model if depth > 0 else self._ngram
        if depth > 0:
            return self._model.propose(batch, replace(plan, k=depth))
        return ngram_draft

    @property
    def sources(self) -> Sequence[str]:  # type: ignore[override]
        return self._last.sources

    def _depth_to_draft(self, batch: Batch, ngram_draft: Draft, plan: SpeculationPlan) -> int:
        """Draft tokens per row to request from the draft model; 0 if the n-gram draft suffices."""
        if plan.fallback is not None:
            return min(plan.k, plan.fallback(batch, ngram_draft))
        return (
            0
            if all(len(scores) > 0 and scores[0] >= STRONG for scores in ngram_draft.confidence or [[0.0]])
            else plan.k
        )

    def observe(self, batch: Batch, verdict: Verdict) -> None:
        self._model.observe(batch, verdict)

    def describe(self, draft: str | None) -> str:
        return f"ngram or {self._model.describe(draft)}"
