"""Block drafters with their caches: the text's keys and values are stored from the target's hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from paceline.core.batch import Batch
from paceline.core.cache import KVCache
from paceline.core.draft import Draft
from paceline.core.draft_tensors import DraftTensors
from paceline.core.nodes import Tree
from paceline.core.slots import Slots
from paceline.core.uploads import uploaded
from paceline.drafters.heads.block import BlockHead, BlockTail, ScoredPart, TextKeys, scaled
from paceline.drafters.heads.block_spec import BlockSpec
from paceline.drafters.heads.decoder import DraftPass, HeadDecoder, HeadModel, TorchFusedStates, TorchHead
from paceline.kernels.attention import AttentionBackend
from paceline.kernels.attention.base import PLAIN, AttentionTerms
from paceline.kernels.attention.cached import CachedAttend
from paceline.models.base import AnyModel, PassBytes, ShortHead
from paceline.models.decoding.draft_decoder import ComputeLogits
from paceline.models.decoding.passes import Part, Passes
from paceline.models.torch.short_head import TorchShortHead


class BlockModel(HeadModel):
    """A block drafter with the interface of a draft model. tail: the parts behind its layers."""

    spec: BlockSpec
    tail: BlockTail

    def row_logits(self, states: Tensor) -> Tensor:
        """Logits [..., Vd] of a block's rows by their normed states [..., H], float32, before ``tail``."""
        raise NotImplementedError

    def by_target(self, draft_logits: Tensor) -> Tensor:
        """Logits [..., V] from those over its vocabulary [..., Vd], in float32."""
        raise NotImplementedError

    def logits(self, hidden: Tensor) -> Tensor:
        return self.by_target(self.row_logits(hidden))


class BlockShortHead:
    """The output head of a block drafter, and W2 of its Markov head, over a part of its vocabulary."""

    def __init__(self, head: ShortHead, bias: ShortHead | None) -> None:
        self._head, self._bias, self.size = head, bias, head.size
        self.logits, self.bias = head.logits, None if bias is None else bias.logits

    def put(self, places: Tensor, tokens: Tensor) -> None:
        self._head.put(places, tokens)
        if self._bias is not None:
            self._bias.put(places, tokens)


class TorchBlock(BlockModel, TorchHead):
    """A block drafter in torch.

    shared_bytes: of tensors that are the target's, and not counted twice.
    """

    head: BlockHead

    def __init__(
        self, head: BlockHead, name: str, taps: Sequence[int], max_positions: int, shared_bytes: int = 0
    ) -> None:
        super().__init__(head, name, taps, max_positions)
        self.spec, self.tail, self.slots_behind = head.spec, head.tail, head.spec.size
        self.captured, self.text_keys = True, TextKeys(head)
        self._shared_bytes = shared_bytes

    def row_logits(self, states: Tensor) -> Tensor:
        return self.head.logits(states)

    def by_target(self, draft_logits: Tensor) -> Tensor:
        whole = draft_logits.shape[-1] == self.vocab_size
        return draft_logits if whole else TorchHead.by_target(self, draft_logits)

    def weight_bytes(self) -> int:
        return super().weight_bytes() - self._shared_bytes

    @property
    def pass_bytes(self) -> PassBytes | None:
        output, embedding = self.head.lm_head.weight, self.head.embed_tokens.weight
        if len(output) < self.vocab_size or self.spec.logits_cap is not None:
            return None
        return PassBytes(super().weight_bytes() - output.nbytes - embedding.nbytes, output.nbytes // self.vocab_size)

    def short_head(self, size: int) -> ShortHead:
        markov = self.head.markov_head
        bias = None if markov is None else TorchShortHead(cast(Tensor, markov.markov_w2.weight), None, size)
        return BlockShortHead(super().short_head(size), bias)


class BlockPass(DraftPass):
    """Result of a block's pass. The output head has scored the rows of all draft tokens in one product."""

    def __init__(self, decoder: BlockDecoder, states: Tensor) -> None:
        super().__init__(decoder, states)
        self._block, self._row_logits = decoder, decoder.row_logits(states)

    def logits(self, rows: Tensor, path: Tensor) -> Tensor:
        step = path.shape[1]
        return self._block.continued(self._row_logits[rows, step - 1], self._states[rows, :step], path)

    def confidence(self, path: Tensor) -> Tensor | None:
        return self._block.model.tail.confidence(self._states[:, path.shape[1] - 1], path[:, -1])


class BlockPasses(Passes):
    """Passes of a block drafter over a text: its keys and values come from the stored hidden states."""

    def __init__(self, decoder: BlockDecoder) -> None:
        super().__init__(decoder.model, decoder.cache, decoder.vocab_size)
        self._decoder = decoder

    def fill(self, parts: Sequence[Part]) -> None:
        slots, firsts, sizes = zip(*((part.slot, part.first, len(part.tokens)) for part in parts), strict=True)
        self._decoder.inject(*listed(slots, firsts, sizes, self.cache.device))

    def read(self, parts: Sequence[Part]) -> list[Tensor]:
        raise AssertionError("the text of a block drafter has no hidden states")

    def forward(
        self,
        tokens: Tensor,
        start: Tensor,
        longest: int,
        rows: Slots,
        counts: Tensor | None = None,
        tree: Tree | None = None,
        *,
        adapted: bool = True,
    ) -> Tensor:
        raise AssertionError("a block drafter reads blocks")

    def verify(self, batch: Batch, draft: DraftTensors) -> Tensor:
        raise AssertionError("a block drafter verifies nothing")

    def branches(self, batch: Batch, draft: Draft, new: Sequence[range]) -> Tensor:
        raise AssertionError("one pass gives the logits of all branches")


def listed(
    slots: Sequence[int], firsts: Sequence[int], sizes: Sequence[int], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Slot and position of ``sizes`` consecutive tokens of each slot, [N] int64 each."""
    rows = [slot for slot, size in zip(slots, sizes, strict=True) for _ in range(size)]
    positions = [first + i for first, size in zip(firsts, sizes, strict=True) for i in range(size)]
    return uploaded(rows, device), uploaded(positions, device)


class BlockDecoder(HeadDecoder):
    """Decoder of a block drafter. A token counts as computed when its keys and values are stored.

    The last token of a text has no hidden states yet: it is the anchor of the next block. The block lies in the slots
    behind the text, where the next tokens overwrite it.
    """

    unread = 0
    model: BlockModel

    @property
    def fed_tokens(self) -> int:  # type: ignore[override]
        return self.missing_after(self.model.spec.most_drafted)

    def _new_cache(
        self, model: AnyModel, rows: int, positions: int, dtype: torch.dtype | None, pool: int | None
    ) -> KVCache:
        assert isinstance(model, BlockModel)
        return super()._new_cache(model, rows, positions + model.slots_behind, dtype, pool)

    def _new_passes(self) -> Passes:
        return BlockPasses(self)

    def resize_row(self, row: int, positions: int) -> None:
        self.cache.resize(row, positions + self.model.slots_behind if positions else 0)
        self.fused_states.resize_row(row, positions)

    def capacity_of(self, row: int) -> int:
        return max(0, super().capacity_of(row) - self.model.slots_behind)

    def read_after(self, before: Tensor, kept: Tensor) -> Tensor:
        return before - 1

    def missing_after(self, k: int) -> int:
        return k + 2  # the anchor, k accepted draft tokens and the bonus token

    def inject(self, rows: Tensor, positions: Tensor) -> None:
        """Store keys and values of N tokens. rows, positions: [N] int64, slot and position of each.

        Positions beyond a row's end are padding.
        """
        raise NotImplementedError

    def run_block(self, anchors: Tensor, starts: Tensor, longest: int, rows: Slots) -> Tensor:
        """Run a block behind each text -> the normed states [B, size - first row, H] of the rows that draft.

        anchors: [B] int64, the last token of each text. starts: [B] int64, its position. longest: upper bound of the
            texts' lengths, known to the host.
        """
        raise NotImplementedError

    def feed(self, text: Tensor, span: int, rows: Slots) -> None:
        places = rows.of(self.num_computed_tokens)[:, None] + torch.arange(text.shape[1], device=text.device)
        self.inject(rows.index[:, None].expand_as(places).flatten(), places.flatten())

    def drafting(self, text: Tensor, before: Tensor, k: int, span: int, rows: Slots) -> ComputeLogits:
        """See ``DraftDecoder``. A whole block of every row is run at once."""
        last = (before - rows.of(self.num_computed_tokens) - 1).clamp(0, text.shape[1] - 1)
        pending = text.gather(1, last[:, None])
        self.feed(text[:, :-1], span, rows)
        states = self.run_block(pending[:, 0], (before - 1).clamp(min=0), span, rows)
        return BlockPass(self, states[:, :k]).chain(pending)

    def row_logits(self, states: Tensor) -> Tensor:
        """Logits of a block's rows by their states [..., H]: [..., Vd], or [..., S] where a part of V is scored."""
        if self.vocabulary is None:
            return self.model.row_logits(states)
        own = self.vocabulary.head.logits(states.reshape(-1, states.shape[-1]))
        return scaled(self.model.spec, own).view(*states.shape[:-1], -1)

    def continued(self, logits: Tensor, states: Tensor, path: Tensor) -> Tensor:
        """Logits [N, V] of a draft token; arguments as for ``BlockTail``, logits those of ``row_logits``."""
        if (vocabulary := self.vocabulary) is None:
            return self.model.by_target(self.model.tail.continued(logits, states, path))
        head = vocabulary.head
        part = ScoredPart(vocabulary.tokens, head.bias if isinstance(head, BlockShortHead) else None)
        return vocabulary.by_target(self.model.tail.continued(logits, states, path, part))

    def draft_pass(self, batch: Batch, k: int) -> BlockPass:
        """Store the tokens that are missing except each row's last one, and run a whole block of every row.

        k: draft tokens that are scored; the states of the first ones do not depend on it.
        """
        computed = self.num_computed_tokens[batch.live_slots.where].tolist()
        known = [length - 1 for length in batch.lengths]
        missing = [length - done for length, done in zip(known, computed, strict=True)]
        if any(missing):
            self.inject(*listed(batch.slots, computed, missing, batch.device))
        self.num_computed_tokens[batch.live_slots.where] = batch.live_length - 1
        states = self.run_block(batch.pending()[:, 0], batch.live_length - 1, batch.longest, batch.live_slots)
        return BlockPass(self, states[:, :k])


class BlockAttend:
    """An ``Attend`` of a block: layer by layer its rows see all of them, or those before them. positions: [B, size]."""

    def __init__(
        self, head: BlockHead, cache: KVCache, backend: AttentionBackend, positions: Tensor, longest: int, rows: Slots
    ) -> None:
        everyone = torch.ones((*positions.shape, positions.shape[1]), dtype=torch.bool, device=positions.device)
        kinds = [head.spec.is_causal(attention.window) for attention in head.config.decoder.attentions]
        plans = {causal: backend.plan(positions, longest, None if causal else everyone) for causal in set(kinds)}
        for causal, plan in plans.items():
            plan.looks_ahead = not causal
        attends = {causal: CachedAttend(cache, backend, plan, rows) for causal, plan in plans.items()}
        self._of_layers = [attends[causal] for causal in kinds]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, terms: AttentionTerms = PLAIN) -> Tensor:
        return self._of_layers[layer](layer, q, k, v, terms)


class TorchBlockDecoder(BlockDecoder):
    """Decoder of a ``TorchBlock``."""

    model: TorchBlock
    fused_states: TorchFusedStates

    def __init__(
        self,
        model: TorchBlock,
        backend: AttentionBackend,
        rows: int,
        positions: int,
        vocab_size: int | None = None,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.fused_states = TorchFusedStates(model, rows, positions)
        super().__init__(model, backend, rows, positions, vocab_size, kv_dtype)

    def inject(self, rows: Tensor, positions: Tensor) -> None:
        fused = self.fused_states.fused[rows, self.fused_states.table.within(rows, positions)]
        index = self.cache.write_index(rows, positions[:, None])
        for layer, (k, v) in enumerate(self.model.text_keys(fused, positions)):
            self.cache.write(layer, index, k[:, :, None], v[:, :, None])

    def run_block(self, anchors: Tensor, starts: Tensor, longest: int, rows: Slots) -> Tensor:
        size = self.model.spec.size
        positions = starts[:, None] + torch.arange(size, device=anchors.device)
        longest = min(longest + size, self.cache.positions + 1)
        attend = BlockAttend(self.model.head, self.cache, self.backend, positions, longest, rows)
        return self.model.head.block(anchors, positions, attend)
