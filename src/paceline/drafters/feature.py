"""A trained head draft tokens from the target's own streams: token by token, or all tokens in one pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import cast

from torch import Tensor

from paceline.core.batch import Batch, SpeculationPlan
from paceline.core.draft import Draft
from paceline.drafters.base import Equipment
from paceline.drafters.growth import Growth
from paceline.drafters.heads.decoder import HeadDecoder, HeadModel, TorchHeadDecoder
from paceline.drafters.heads.native import NativeHeadDecoder
from paceline.drafters.model import ModelDrafter, Read
from paceline.errors import ParameterError
from paceline.models.decoder import Reader


class FeatureDrafter(ModelDrafter):
    """A trained head in a draft model's place: it draws, scores and reports distributions as one does.

    An EAGLE-3 head (arXiv 2503.01840) reads each of its draft tokens before the next. A parallel one (P-EAGLE,
    2602.01469) reads masks instead, one that transfers hidden states (2404.12022) pseudo states: what all draft tokens
    are drawn from is there before the first is drawn.

    What it cannot say has probability 0 in its distributions. After a round it reads the kept tokens again, with their
    streams. A row whose text is one token has no streams yet and gets no draft token. Draft tokens may branch as a
    draft model's do; those of one pass are a lattice, at each depth the same candidates after whatever stands there, of
    which a tree is kept.
    """

    name = "feature"
    sources = ("head",)
    at_once = 16  # after a round it reads all kept tokens: draft tokens never counted as read

    def __init__(self, decoder: HeadDecoder, acceptance: str, width: int = 1) -> None:
        super().__init__(decoder, acceptance, width)
        self.head = decoder
        self.paying_rows = cast(HeadModel, decoder.model).paying_rows
        self._natively = decoder if isinstance(decoder, NativeHeadDecoder) else None
        self._model = cast(HeadModel, decoder.model)
        self.on_device = self._natively is None and not self._model.one_pass  # rounds of the device draw one by one
        self.uses_torch = self._natively is None or self._independent

    @classmethod
    def build(cls, equipment: Equipment, /) -> FeatureDrafter:
        decoder = equipment.draft_decoder()
        if not isinstance(decoder, HeadDecoder):
            allowed = f"'model' or 'hybrid' with {decoder.model.name}, which is no trained head"
            raise ParameterError("drafter", cls.name, allowed)
        return cls(decoder, equipment.acceptance, equipment.width(cls))

    @property
    def reader(self) -> Reader:
        return self.head.streams

    def describe(self, draft: str | None) -> str:
        kind = {"feature": "head", "parallel": "parallel head", "hidden_transfer": "hidden-transfer head"}
        return f"{kind[self._model.kind]} {draft}"

    def _propose(self, batch: Batch, wish: SpeculationPlan) -> Draft:
        """On the CPU kernels one call, but for what many rows lack; elsewhere a pass for each draft token, or for
        all.
        """
        if self._natively is not None:
            self._lag(batch)
            distributions = self._independent and not batch.sampling.all_greedy
            counts = wish.counts(batch)
            return self._natively.draft(
                batch, counts, wish.stop_drafting, distributions=distributions, width=self.width
            )
        if self._model.max_draft_tokens is not None:
            wish = replace(wish, k=min(wish.k, self._model.max_draft_tokens))
        draft = super()._propose(batch, wish)
        if min(batch.lengths[: batch.rows]) < 2:
            return draft.capped([draft.k if length > 1 else 0 for length in batch.lengths[: batch.rows]])
        return draft

    def _reading(self, batch: Batch, k: int) -> Read:
        if not self._model.one_pass:
            return super()._reading(batch, k)
        hidden = cast(TorchHeadDecoder, self.head).read_ahead(batch, self._lag(batch), k)
        return lambda draft_tokens: self.head.logits(hidden[:, draft_tokens.shape[1]])[:, None]

    def _branching(self, batch: Batch, k: int, grown: Growth) -> Callable[[int], Tensor]:
        if not self._model.one_pass:
            return super()._branching(batch, k, grown)
        hidden = cast(TorchHeadDecoder, self.head).read_ahead(batch, self._lag(batch), k)
        return lambda depth: self.head.logits(hidden[[row for row, _ in grown.new], depth])


def drafting_model(equipment: Equipment) -> ModelDrafter:
    """Who draft tokens with the engine's draft: a model or a head. Raises ParameterError if none was given."""
    kind = FeatureDrafter if isinstance(equipment.draft, HeadModel) else ModelDrafter
    return kind.build(equipment)
