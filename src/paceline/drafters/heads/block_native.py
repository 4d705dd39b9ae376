"""Block drafters on the CPU kernels: fusion, the text's keys and values, and the block are one call each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from paceline.core.nodes import Nodes
from paceline.core.slots import Slots
from paceline.drafters.heads.block import BlockHead, scaled
from paceline.drafters.heads.block_decoder import BlockDecoder, BlockModel
from paceline.drafters.heads.native import NativeFusedStates, NativeHead
from paceline.errors import ParameterError
from paceline.kernels import abi, native, pack, structs
from paceline.kernels.attention import AttentionBackend
from paceline.kernels.pack import Format
from paceline.models.base import PassBytes
from paceline.models.decoding.draft_vocabulary import NEVER
from paceline.models.native.model import LAYER_FORMAT, NativeModel, Quantization


class PackedProduct(nn.Module):
    """A linear layer on packed weights, [N, inputs] -> [N, outputs] float32."""

    def __init__(self, weight: Tensor, to: Format) -> None:
        super().__init__()
        self._kernels, (self._outputs, inputs) = native.required(), weight.shape
        size = pack.packed_bytes(self._outputs, inputs, to) + 4 * pack.round_up(self._outputs, abi.PANEL) + _SLACK
        self._arena = native.Arena(self._kernels.library, size)
        packed = pack.allocate(self._outputs, inputs, to, False, self._arena.take)
        pack.fill(packed, pack.quantise(weight, to))
        self._linear, self._inputs, self.nbytes = structs.linear(packed), packed.inputs, size

    def forward(self, x: Tensor) -> Tensor:
        wide = pad(x.float(), (0, self._inputs - x.shape[1])).contiguous()
        out = wide.new_empty(len(x), self._outputs)
        native.multiply(self._kernels, self._linear, wide, out)
        return out


_SLACK = 2 * 64  # bytes: weights and scales each begin on a cache line


class NativeBlock(BlockModel, NativeHead):
    """A block drafter with packed weights. The parts behind its layers stay in torch but for the largest product.

    Arguments as for ``NativeHead``. Raises ModelFormatError if the kernels cannot run it.
    """

    def __init__(
        self,
        head: BlockHead,
        name: str,
        taps: Sequence[int],
        max_positions: int,
        *,
        quantization: Quantization | None = None,
        target: NativeModel | None = None,
    ) -> None:
        NativeHead.__init__(self, head, name, taps, max_positions, quantization=quantization, target=target)
        if head.markov_head is not None:
            weight = cast(Tensor, head.markov_head.markov_w2.weight)
            head.markov_head.markov_w2 = PackedProduct(weight, LAYER_FORMAT[quantization])
        self.spec, self.tail, self.slots_behind = head.spec, head.tail, head.spec.size
        self._whole = self.drafted == self.vocab_size
        self._tokens = head.targets
        self._tail_bytes = self.tail.weight_bytes()

    def row_logits(self, states: Tensor) -> Tensor:
        flat = states.reshape(-1, self.width).float().contiguous()
        logits = flat.new_empty(flat.shape[0], self.drafted)
        self.decoder.logits(flat, logits)
        return scaled(self.spec, logits).view(*states.shape[:-1], self.drafted)

    def by_target(self, draft_logits: Tensor) -> Tensor:
        if self._whole:
            return draft_logits
        logits = draft_logits.new_full((*draft_logits.shape[:-1], self.vocab_size), NEVER)
        return logits.index_copy_(-1, self._tokens, draft_logits)

    def weight_bytes(self) -> int:
        return super().weight_bytes() + self._tail_bytes

    @property
    def pass_bytes(self) -> PassBytes | None:
        return None if self.spec.logits_cap is not None else super().pass_bytes


class NativeBlockDecoder(BlockDecoder):
    """Decoder of a ``NativeBlock``."""

    model: NativeBlock
    fused_states: NativeFusedStates

    def __init__(
        self,
        model: NativeBlock,
        backend: AttentionBackend,
        rows: int,
        positions: int,
        vocab_size: int | None = None,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.fused_states = NativeFusedStates(model, rows, positions)
        super().__init__(model, backend, rows, positions, vocab_size, kv_dtype)
        self._described = structs.cache(self.cache)

    def inject(self, rows: Tensor, positions: Tensor) -> None:
        self.cache.cover(*Nodes(positions, rows, positions).written())
        problem = self.model.decoder.inject(self.fused_states.described, self._described, rows, positions)
        if problem is not None:
            raise ParameterError("tokens", f"[{len(rows)} tokens]", problem)

    def run_block(self, anchors: Tensor, starts: Tensor, longest: int, rows: Slots) -> Tensor:
        spec, model = self.model.spec, self.model
        positions = starts[:, None] + torch.arange(spec.size)
        tokens = torch.full_like(positions, spec.mask_token)
        tokens[:, 0] = anchors
        nodes = Nodes(tokens.flatten(), rows.index.repeat_interleave(spec.size), positions.flatten())
        ends = (starts + spec.size - 1).repeat_interleave(spec.size)
        hidden = torch.empty(tokens.numel(), model.width)
        self.cache.cover(*nodes.written())
        problem = model.decoder.forward(nodes, self._described, hidden, None, None, ends=ends)
        if problem is not None:
            raise ParameterError("tokens", f"[{len(nodes.tokens)} tokens]", problem)
        return hidden.view(*tokens.shape, -1)[:, spec.first_row :]
