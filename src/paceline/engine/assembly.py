"""Assembles an engine's parts: its models, their decoders and caches, and the chosen drafter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakSet

import torch

from paceline.config import EngineConfig
from paceline.drafters import Drafter, Equipment, NoDrafter, make_drafter
from paceline.drafters.heads.assistant import Assistant, AssistantDecoder
from paceline.drafters.heads.block_decoder import TorchBlock, TorchBlockDecoder
from paceline.drafters.heads.block_native import NativeBlock, NativeBlockDecoder
from paceline.drafters.heads.decoder import HeadModel, TorchHead, TorchHeadDecoder
from paceline.drafters.heads.native import NativeHead, NativeHeadDecoder
from paceline.drafters.vocabulary_size import draft_vocab_size
from paceline.engine.cache_dtype import cache_dtype
from paceline.engine.memory import default_length
from paceline.engine.request import check_tokens
from paceline.engine.rounds.kernels import runs_native_rounds
from paceline.errors import ParameterError
from paceline.kernels.attention import AttentionBackend, make_backend
from paceline.lengths.cost import CostTable
from paceline.models.base import AnyModel, FlatModel, SharedModel, Shortenable, state_shape_of
from paceline.models.decoding.decoder import Decoder
from paceline.models.decoding.draft_decoder import DraftDecoder
from paceline.models.decoding.draft_vocabulary import DraftVocabulary
from paceline.models.decoding.native_draft import NativeDraftDecoder

if TYPE_CHECKING:
    from paceline.models.text.tokenizer import Tokenizer  # needs packages that models without a tokenizer do not


@dataclass
class Models:
    """The models of an engine.

    target: the model whose output is produced.
    draft: the draft model, if one was given.
    eos_token_ids: tokens that end a text.
    documents: token ids of texts for the n-gram drafter.
    costs: cost tables measured by engines with these models.
    users: objects that hold the models; the last one to give them back closes a target shared with other ranks.
    embeds_only: whether the target has no output head, so that texts can be embedded only.
    tokenizer: of the target; None if prompts and answers are token ids.
    """

    target: AnyModel
    draft: AnyModel | None = None
    eos_token_ids: tuple[int, ...] = ()
    documents: Sequence[Sequence[int]] = field(default_factory=tuple)  # for the n-gram drafter
    costs: dict[tuple[object, ...], CostTable] = field(default_factory=dict)  # measured by engines with these models
    users: WeakSet[object] = field(default_factory=WeakSet)
    embeds_only: bool = False
    tokenizer: Tokenizer | None = None

    def give_back(self, user: object) -> None:
        """Remove a user. With the last one, the other ranks of a shared target end."""
        self.users.discard(user)
        if not self.users and isinstance(self.target, SharedModel):
            self.target.close()


@dataclass(frozen=True)
class Assembly:
    """Makes an engine's parts.

    slots: of all caches. max_model_len: tokens of its longest sequence. pool: pages of each cache that ragged attention
        reads by pages; None: rows lie side by side.
    """

    models: Models
    config: EngineConfig
    slots: int
    max_model_len: int
    pool: int | None = None

    def backend(self) -> AttentionBackend:
        """Return the attention backend of models that do not run their own attention."""
        config, target = self.config, self.models.target
        deterministic = config.deterministic and not isinstance(target, FlatModel)  # a FlatModel always is
        return make_backend(config.attention, target.device, deterministic=deterministic)

    def target(self) -> Decoder:
        """Return the target's decoder, with a cache of all slots."""
        return Decoder(self.models.target, *self._sizes(self.models.target), pool=self.pool)

    def _sizes(self, model: AnyModel) -> tuple[AttentionBackend, int, int, int, torch.dtype]:
        vocab_size, dtype = self.models.target.vocab_size, cache_dtype(model, self.config)
        return self.backend(), self.slots, self.max_model_len, vocab_size, dtype

    def draft_decoder(self, model: AnyModel) -> DraftDecoder:
        """Return a draft model's decoder, with a cache of all slots. Its logits have the target's vocabulary size."""
        sizes = self._sizes(model)
        if isinstance(model, NativeBlock):
            return NativeBlockDecoder(model, *sizes)
        if isinstance(model, NativeHead):
            return NativeHeadDecoder(model, *sizes)
        if isinstance(model, Assistant):
            return AssistantDecoder(model, *sizes)
        if isinstance(model, TorchBlock):
            return TorchBlockDecoder(model, *sizes)
        if isinstance(model, TorchHead):
            return TorchHeadDecoder(model, *sizes)
        if runs_native_rounds(model) and model.vocab_size == self.models.target.vocab_size:
            return NativeDraftDecoder(model, *sizes)
        return DraftDecoder(model, *sizes, pool=self.pool)

    def drafter(self, target: Decoder) -> Drafter:
        """Return the drafter. Raises ParameterError if something that it needs is missing."""
        config, models, kind = self.config, self.models, self.config.drafter_kind
        if kind is None or not config.draft_tokens:
            return NoDrafter()
        if kind.needs_draft_model and models.draft is None:
            raise ParameterError("drafter", config.drafter, "needs a draft_model; or choose 'ngram' or None")
        if models.draft is not None and state_shape_of(models.draft) is not None:
            allowed = (
                "a model without recurrent layers: their states cannot drop rejected draft tokens while they draft"
            )
            raise ParameterError("draft_model", models.draft.name, allowed)
        for document in models.documents if config.looks_up else ():
            check_tokens("reference_documents", document, models.target.vocab_size)
        equipment = Equipment(
            *(target, config.acceptance, models.draft, models.documents, self.draft_decoder, config.width_of),
            config.lookup_tokens,
        )
        drafter = make_drafter(kind, equipment)
        self._shorten(drafter)
        return drafter

    def _shorten(self, drafter: Drafter) -> None:
        """Let the draft model score a part of its vocabulary. Raises ParameterError for a size that it cannot have."""
        config, target, draft = self.config, self.models.target, self.models.draft
        size = draft_vocab_size(target, draft, config)
        if size == 0 or not isinstance(draft, Shortenable):
            return
        (decoder,) = drafter.decoders
        decoder.shorten(
            DraftVocabulary(
                draft.short_head(size),
                target.vocab_size,
                self.models.eos_token_ids,
                known=decoder.model.vocab_size,
                follows=config.acceptance != "rejection",
            )
        )


def drafts_alone(models: Models, config: EngineConfig) -> bool:
    """Whether the draft model drafts without n-gram lookup under ``drafter="auto"``.

    On a device a draft model runs for every row in any case. Beside n-gram drafts, whose tokens it has not read, its
    first pass is longer; a head reads accepted tokens anew anyway. Documents ask for lookup.
    """
    by_choice = config.rounds == "host" or (config.rounds == "auto" and config.tensor_parallel > 1)
    on_host = models.target.device.type != "cuda" or by_choice
    return not (on_host or models.draft is None or isinstance(models.draft, HeadModel) or models.documents)


def max_model_len(models: Models, config: EngineConfig) -> int:
    """Return the tokens of the longest sequence. Raises ParameterError if a model's limit is lower than asked for."""
    running = [models.target]
    if models.draft is not None and config.asks_draft_model:
        running.append(models.draft)
    shortest = min(running, key=lambda model: model.max_positions)
    if config.max_model_len is None:
        return default_length(models.target, models.draft, config, shortest.max_positions)
    if config.max_model_len > shortest.max_positions:
        allowed = f"at most {shortest.max_positions}, the limit of {shortest.name}"
        raise ParameterError("max_model_len", config.max_model_len, allowed)
    return config.max_model_len


def check_attention(models: Models, config: EngineConfig) -> None:
    """Raise ParameterError if the chosen attention does not fit the weights, which were packed, or not, when loaded."""
    packed = isinstance(models.target, FlatModel)
    if config.attention in ("padded", "split", "ragged") and packed:
        raise ParameterError(
            "attention", config.attention, "'native' or 'auto' with weights loaded for the CPU kernels"
        )
    if config.attention == "native" and not packed:
        raise ParameterError("attention", "native", "weights loaded with attention='native' or 'auto'")
