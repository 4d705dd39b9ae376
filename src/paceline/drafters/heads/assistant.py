"""An assistant: a small decoder that reads its target's keys and values, and has none of its own.

Gemma 4's assistants (``models/gemma4_assistant`` of transformers). The first layer's input is made of the target's
embedding of a token and of a state: the target's last hidden state before that token, then the assistant's own. Every
layer attends to the keys and values of the target's last layer of its kind, with or without a window. All draft tokens
of a round have the position of the text's last token, whose keys the target has not computed yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from paceline.core.batch import Batch
from paceline.core.cache import KVCache, KVHeads
from paceline.core.draft import Draft
from paceline.core.draft_tensors import DraftTensors
from paceline.drafters.heads.decoder import FusedStates, HeadDecoder, HeadModel
from paceline.kernels import structs
from paceline.kernels.attention.base import AttentionBackend
from paceline.kernels.attention.cached import CachedAttend
from paceline.models.base import AnyModel, PassBytes
from paceline.models.decoding.decoder import Decoder
from paceline.models.decoding.draft_vocabulary import NEVER
from paceline.models.native.layers import NativeLayers
from paceline.models.torch.transformer import Transformer


@dataclass(frozen=True)
class Centroids:
    """An output head that scores only the tokens of the groups whose centroids a state is nearest to.

    centroids [C, width]; tokens [C, V / C] int64: the tokens of each group. opened: number of groups that are scored.
    """

    centroids: Tensor
    tokens: Tensor
    opened: int

    def logits(self, hidden: Tensor, head: Tensor) -> Tensor:
        """Hidden [N, width], head [V, width] -> [N, V] float32; ``NEVER`` for tokens of other groups."""
        groups = functional.linear(hidden, self.centroids).topk(self.opened, dim=-1).indices
        tokens = self.tokens[groups].flatten(1)
        scores = torch.einsum("nw,ntw->nt", hidden, head[tokens]).float()
        return scores.new_full((len(hidden), len(head)), NEVER).scatter_(1, tokens, scores)


class Assistant(HeadModel):
    """An assistant for one target, in torch; its layers on the CPU kernels where they run the target.

    decoder: its layers and its head. layers: its layers on the kernels; ``decoder`` then has none.
    embedding [V, width]: the target's, with its scale.
    before [inner, 2 * width], after [width, inner]: the maps between the target's hidden states and its own.
    """

    kind, one_pass, captured, max_draft_tokens, paying_rows = "assistant", False, False, None, None
    kv_layers: Sequence[KVHeads] = ()

    def __init__(
        self,
        decoder: Transformer,
        target: AnyModel,
        embedding: Tensor,
        before: Tensor,
        after: Tensor,
        centroids: Centroids | None,
        layers: NativeLayers | None = None,
    ) -> None:
        self.name, self.decoder, self.centroids, self.native_layers = decoder.name, decoder, centroids, layers
        if layers is not None:
            self.precision = layers.precision
        self.embedding, self.before, self.after = embedding, before, after
        self.taps, self.max_positions = (target.layers,), target.max_positions
        self.vocab_size, self.layers, self.width = decoder.vocab_size, decoder.layers, len(after)
        self.kv_heads, self.head_dim = decoder.kv_heads, decoder.head_dim
        self.dtype, self.device = decoder.dtype, decoder.device

    @property
    def pass_bytes(self) -> PassBytes | None:
        """None: instead of a short vocabulary, an assistant has groups of tokens."""
        return None

    def logits(self, hidden: Tensor) -> Tensor:
        if self.centroids is None:
            return self.decoder.logits(hidden)
        flat = hidden.reshape(-1, hidden.shape[-1])
        logits = self.centroids.logits(flat, self.decoder.ends()[0])
        return self.decoder.scaled(logits).view(*hidden.shape[:-1], -1)

    def weight_bytes(self) -> int:
        others = [self.embedding, self.before, self.after]
        others += [] if self.centroids is None else [self.centroids.centroids, self.centroids.tokens]
        packed = 0 if self.native_layers is None else self.native_layers.weight_bytes()
        return self.decoder.weight_bytes() + packed + sum(tensor.nbytes for tensor in others)


class _TargetStates(FusedStates):
    """The target's last hidden states at every position of every slot, as they are."""

    def read(self, rows: Tensor, slots: Tensor, features: Tensor) -> None:
        self.fused[rows, self.table.within(rows, slots)] = features[:, 0].to(self.fused.dtype)


class AssistantDecoder(HeadDecoder):
    """Decoder of an ``Assistant``. There is nothing to read before it drafts: the target has read the text."""

    model: Assistant
    fused_states: _TargetStates

    def __init__(
        self,
        model: Assistant,
        backend: AttentionBackend,
        rows: int,
        positions: int,
        vocab_size: int | None = None,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.fused_states = _TargetStates(model, rows, positions)
        super().__init__(model, backend, rows, positions, vocab_size, kv_dtype)
        self._target: Decoder
        self._states: Tensor  # [B, n, width]: own states at the text's last token and at the draft tokens

    def _new_cache(
        self, model: AnyModel, rows: int, positions: int, dtype: torch.dtype | None, pool: int | None
    ) -> KVCache:
        """The stored states, whose rows are resized, copied and cut like those of keys and values."""
        return cast(KVCache, self.fused_states.table)

    def read_from(self, target: Decoder) -> None:
        self._target = target
        self._described = structs.cache(target.cache) if self.model.native_layers is not None else None

    def prefill(self, batch: Batch, rows: Sequence[int], starts: Sequence[int], stops: Sequence[int]) -> None:
        """Count the tokens as read."""
        for row, stop in zip(rows, stops, strict=True):
            self.num_computed_tokens[row] = max(1, stop)

    def next_hidden(self, batch: Batch, missing: int) -> Tensor:
        """Read each row's last token -> hidden [B, inner]. Undefined for rows of one token."""
        self.num_computed_tokens[batch.live_slots.where] = batch.live_length
        return self._run(batch, batch.pending(), self._root(batch))[:, 0]

    def hidden_after(self, batch: Batch, draft_tokens: Tensor) -> Tensor:
        """See ``Decoder``. A draft token is read with the assistant's own state before it."""
        return self._run(batch, draft_tokens[:, -1:], self._states)[:, 0]

    def hidden_after_branches(self, batch: Batch, draft: Draft, read: Sequence[int]) -> Tensor:
        """See ``DraftDecoder``. All draft tokens are read, each with the state at its parent."""
        chain = torch.arange(draft.k, device=batch.device).expand(batch.rows, -1)
        tensors = DraftTensors.of(draft, batch.device)
        places = chain if tensors.parents is None else tensors.parents + 1
        before = self._states.gather(1, places[..., None].expand(-1, -1, self._states.shape[-1]))
        tokens = torch.cat([batch.pending(), tensors.tokens], dim=1)
        hidden = self._run(batch, tokens, torch.cat([self._root(batch), before], dim=1))
        new = [(row, i + 1) for row, count in enumerate(draft.drafted) for i in range(read[row], count)]
        return hidden[[row for row, _ in new], [index for _, index in new]]

    def _root(self, batch: Batch) -> Tensor:
        """The target's hidden state before each row's last token, [B, 1, width]."""
        return self.fused_states.at(batch.live_slots, (batch.live_length - 2).clamp(min=0)[:, None])

    def _run(self, batch: Batch, tokens: Tensor, states: Tensor) -> Tensor:
        """Tokens [B, L], the states before them [B, L, width] -> hidden [B, L, inner]; notes the states after them."""
        model, last = self.model, (batch.live_length - 1)[:, None].expand_as(tokens)
        embedded = functional.embedding(tokens.clamp(max=model.vocab_size - 1), model.embedding)
        x = functional.linear(torch.cat([embedded, states], dim=-1), model.before).flatten(0, 1)
        hidden = self._run_layers(batch, x, last)
        self._states = functional.linear(hidden, model.after)
        return hidden

    def _run_layers(self, batch: Batch, x: Tensor, last: Tensor) -> Tensor:
        """X [B * L, inner], positions [B, L] -> hidden [B, L, inner]."""
        model, keys = self.model, (last - 1).clamp(min=0)
        if model.native_layers is not None and self._described is not None:
            rows = batch.live_slots.index[:, None].expand_as(last).flatten()
            hidden = model.native_layers.run(x, rows, keys.flatten(), self._described)
            return hidden.to(x.dtype).view(*last.shape, -1)
        plan = self.backend.plan(keys, min(batch.longest, self._target.cache.positions + 1))
        target_keys = CachedAttend(self._target.cache, self.backend, plan, batch.live_slots)
        return model.decoder.run(x, last, target_keys)
