"""n-gram drafts in the rows where they suffice, the draft model's or head's in the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from paceline.core.batch import Batch, ParallelSample, SpeculationPlan
from paceline.core.draft import Draft, Verdict, branching
from paceline.core.row_keeper import RowKeeper, RowKeepers
from paceline.drafters.base import Drafter, Equipment
from paceline.drafters.feature import drafting_model
from paceline.drafters.model import ModelDrafter
from paceline.drafters.ngram import STRONG, NgramDrafter
from paceline.models.decoding.draft_decoder import DraftDecoder
from paceline.models.decoding.passes import FeatureReader


class HybridDrafter(RowKeepers, Drafter):
    """Searches for n-gram drafts first, which costs little. The draft model drafts the rows where they do not suffice.

    The length policy decides in which rows they suffice (``SpeculationPlan.fallback``). Without its decision they do in
    all rows if every row has a match of five tokens or more, and otherwise in none. SuffixDecoding (arXiv 2411.04975)
    falls back on a draft model in the same way. The draft model's cache falls behind in rows with n-gram drafts, and
    catches up when the model drafts for them next. Under the rejection rule with sampling, where the model's draft
    tokens have distributions, one drafter serves all rows.

    In captured rounds on a device the model drafts for all rows, and an n-gram draft replaces its draft in the rows
    whose match is as long as the policy asks for (``SpeculationPlan.least_matches``), under either rule.

    The kinds of draft tokens (``Draft.kinds``) are the search's, then the model's.
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
        self.paying_rows, self.one_pass, self.answers = model.paying_rows, model.one_pass, ngram.answers
        self.sources = *ngram.sources, *model.sources
        self.on_device = ngram.on_device and model.on_device and self.width == 1

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
        counts = self._model_counts(batch, ngram_draft, plan)
        if not any(counts):
            return ngram_draft
        one_drafter = self.has_probabilities and not batch.sampling.all_greedy
        if one_drafter:
            counts = [min(max(counts), allowed) for allowed in plan.counts(batch)]
        draft = self._model.propose(batch, replace(plan, k=max(counts), caps=counts))
        kinds = draft.kinds or [[0] * draft.k] * batch.rows
        draft = draft.with_kinds([[kind + len(self._ngram.sources) for kind in line] for line in kinds])
        if one_drafter or all(counts):
            return draft
        return mixed(ngram_draft, draft, [count > 0 for count in counts])

    def _model_counts(self, batch: Batch, ngram_draft: Draft, plan: SpeculationPlan) -> list[int]:
        """Draft tokens of each row to request from the draft model, [B]; 0 where the n-gram draft suffices."""
        if plan.fallback is not None:
            allowed = plan.counts(batch)
            return [min(pair) for pair in zip(allowed, plan.fallback(batch, ngram_draft), strict=True)]
        strong = all(len(scores) > 0 and scores[0] >= STRONG for scores in ngram_draft.confidence or [[0.0]])
        return [0] * batch.rows if strong else plan.counts(batch)

    def observe(self, batch: Batch, verdict: Verdict) -> None:
        self._model.observe(batch, verdict)

    def end(self, slot: int, sample: ParallelSample, text: Sequence[int]) -> None:
        self._ngram.end(slot, sample, text)

    def describe(self, draft: str | None) -> str:
        return f"ngram or {self._model.describe(draft)}"


def mixed(first: Draft, second: Draft, takes_second: Sequence[bool]) -> Draft:
    """A draft of rows of two drafts without probabilities. takes_second: [B], whether a row is the second's."""
    tokens, scores, kinds, parents = [], [], [], []
    for row, takes in enumerate(takes_second):
        draft = second if takes else first
        count = len(draft.draft_tokens[row])
        tokens.append(draft.draft_tokens[row])
        scores.append(draft.confidence[row] if draft.confidence else [0.0] * count)
        kinds.append(draft.kinds[row] if draft.kinds else [0] * count)
        parents.append(draft.parents[row] if draft.parents else list(range(-1, count - 1)))
    return branching(tokens, parents, scores, kinds)
