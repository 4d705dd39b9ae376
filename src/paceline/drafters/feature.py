"""A trained head as a drafter: it drafts from the target's hidden states, token by token or in one pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from paceline.core.batch import Batch, SpeculationPlan
from paceline.core.draft import Draft
from paceline.core.sampling import Choices
from paceline.drafters.base import Equipment
from paceline.drafters.growth import Growth
from paceline.drafters.heads.block_decoder import BlockDecoder, BlockModel
from paceline.drafters.heads.decoder import DraftPass, HeadDecoder, HeadModel, TorchHeadDecoder
from paceline.drafters.model import ModelDrafter
from paceline.errors import ParameterError
from paceline.models.decoding.draft_decoder import ComputeLogits
from paceline.models.decoding.passes import FeatureReader


class FeatureDrafter(ModelDrafter):
    """Uses a trained head like a draft model: it samples, scores and reports distributions in the same way.

    An EAGLE-3 head (arXiv 2503.01840) reads each draft token before it makes the next. A parallel head (P-EAGLE, arXiv
    2602.01469) reads masks instead, a hidden transfer head (arXiv 2404.12022) pseudo hidden states, and a Chimera head
    (arXiv 2402.15758) nothing. These three make the logits of all draft tokens in one pass, before the first is
    sampled. A block drafter (``heads.block``) does, too, and its logits may depend on the draft token before.

    Tokens outside of the head's vocabulary have probability 0. After a round the head reads the accepted tokens again,
    now with the target's hidden states. A row of one token has no hidden states yet, and gets no draft tokens. Trees
    grow as a draft model's do. If they come from one pass, all nodes of a depth have the same candidates.
    """

    name = "feature"
    sources = ("head",)

    def __init__(self, decoder: HeadDecoder, acceptance: str, width: int = 1) -> None:
        super().__init__(decoder, acceptance, width)
        self.head = decoder
        self.paying_rows = cast(HeadModel, decoder.model).paying_rows
        self._model = cast(HeadModel, decoder.model)
        self.one_pass = isinstance(self._model, BlockModel)  # others score token by token
        self._pass: DraftPass | None = None  # of the round's chains
        self.on_device = self._native is None and self._model.captured

    @classmethod
    def build(cls, equipment: Equipment, /) -> FeatureDrafter:
        decoder = equipment.draft_decoder()
        if not isinstance(decoder, HeadDecoder):
            allowed = f"'model' or 'hybrid': {decoder.model.name} is not a trained head"
            raise ParameterError("drafter", cls.name, allowed)
        decoder.read_from(equipment.target)
        return cls(decoder, equipment.acceptance, equipment.width(cls))

    @property
    def reader(self) -> FeatureReader:
        return self.head.fused_states

    def describe(self, draft: str | None) -> str:
        kind = {
            "mtp": "the model's own head",
            "feature": "head",
            "parallel": "parallel head",
            "hidden_transfer": "hidden-transfer head",
            "chimera": "Chimera head",
            "assistant": "assistant",
            "dflash": "DFlash drafter",
            "dspark": "DSpark drafter",
            "dflash2": "DFlash2 drafter",
        }
        return f"{kind[self._model.kind]} {draft}"

    def _propose(self, batch: Batch, plan: SpeculationPlan) -> Draft:
        if self._native is not None:
            return super()._propose(batch, plan)
        if self._model.max_draft_tokens is not None:
            plan = replace(plan, k=min(plan.k, self._model.max_draft_tokens))
        draft = super()._propose(batch, plan)
        if min(batch.lengths) < 2:
            return draft.capped([draft.k if length > 1 else 0 for length in batch.lengths])
        return draft

    def _reading(self, batch: Batch, k: int) -> ComputeLogits:
        if not self._model.one_pass:
            return super()._reading(batch, k)
        self._pass = self._draft_pass(batch, k)
        return self._pass.chain(batch.pending())

    def _draft_pass(self, batch: Batch, k: int) -> DraftPass:
        missing = self._missing(batch)  # a large backlog is read here
        if isinstance(self.head, BlockDecoder):
            return self.head.draft_pass(batch, k)
        return cast(TorchHeadDecoder, self.head).draft_pass(batch, missing, k)

    def _chance(self, choices: Choices, draft_token: Tensor, batch: Batch, draft_tokens: Tensor) -> Tensor:
        own = None if self._pass is None else self._pass.confidence(_path(batch, draft_tokens))
        return super()._chance(choices, draft_token, batch, draft_tokens) if own is None else own[:, None]

    def _branching(self, batch: Batch, k: int, grown: Growth) -> Callable[[int], Tensor]:
        if not self._model.one_pass:
            return super()._branching(batch, k, grown)
        found, pending = self._draft_pass(batch, k), batch.pending()

        def after(_depth: int) -> Tensor:
            rows = torch.tensor([row for row, _ in grown.new], device=batch.device)
            ways = [grown.rows[row].tokens_to(node) for row, node in grown.new]
            return found.logits(rows, torch.cat([pending[rows], pending.new_tensor(ways).view(len(ways), -1)], dim=1))

        return after


def _path(batch: Batch, draft_tokens: Tensor) -> Tensor:
    """Each row's last token, and its draft tokens [B, n] behind it."""
    return torch.cat([batch.pending(), draft_tokens], dim=1)


class MtpDrafter(FeatureDrafter):
    """Drafts with the head that the target's own checkpoint has (multi-token prediction).

    It reads a token's embedding beside the target's last hidden state before it, and then its own.
    """

    name = "mtp"
    sources = ("mtp",)

    @classmethod
    def build(cls, equipment: Equipment, /) -> FeatureDrafter:
        draft = equipment.draft
        if not isinstance(draft, HeadModel) or draft.kind != "mtp":
            raise ParameterError("drafter", cls.name, "'model', 'feature' or 'hybrid' with this draft_model")
        return super().build(equipment)


def drafting_model(equipment: Equipment) -> ModelDrafter:
    """The drafter for the engine's draft model or head. Raises ParameterError if none was given."""
    kind = FeatureDrafter if isinstance(equipment.draft, HeadModel) else ModelDrafter
    return kind.build(equipment)
