"""Masks of tokens that the host makes while a device computes, and that captured programs read.

Shapes: R slots, K + 1 positions of a round at most, V vocabulary, W = ceil(V / 32) words of a mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

RowMasks: TypeAlias = Sequence["np.ndarray | None"]  # a row's tokens that may come, bool [V] by position; None: all


class TokenMasks:
    """The masks of a round. Only positions that have one are sent.

    bits: [R * (K + 1), W] int32; bit i of word w is token 32 w + i. lines: [R, K + 1] int64, a position's line in
    ``bits``, or -1 where any token may come. Neither moves. A new round's masks may be set once the last one has ended.
    """

    def __init__(self, rows: int, positions: int, vocab_size: int, device: torch.device) -> None:
        words, pinned = -(-vocab_size // 32), device.type == "cuda"
        self.bits = torch.zeros((rows * positions, words), dtype=torch.int32, device=device)
        self.lines = torch.full((rows, positions), -1, dtype=torch.int64, device=device)
        self._bits = torch.zeros(self.bits.shape, dtype=torch.int32, pin_memory=pinned)
        self._lines = torch.full(self.lines.shape, -1, dtype=torch.int64, pin_memory=pinned)

    def set(self, rows: Sequence[RowMasks]) -> None:
        """Send the rows' masks, without waiting. Positions beyond a row's masks have none."""
        table, count = self._bits.numpy().view(np.uint8), 0
        self._lines.fill_(-1)
        for row, masks in enumerate(rows):
            for place, allowed in enumerate(masks):
                if allowed is not None:
                    packed = np.packbits(allowed, bitorder="little")
                    table[count, : len(packed)] = packed
                    self._lines[row, place] = count
                    count += 1
        self.bits[:count].copy_(self._bits[:count], non_blocking=True)
        self.lines.copy_(self._lines, non_blocking=True)


def masked(logits: Tensor, masks: TokenMasks) -> Tensor:
    """Set logits [B, L, V] of tokens that may not come to -inf. Reference implementation of ``gpu.shape.masked``."""
    rows, positions, vocab = logits.shape
    lines = masks.lines[:rows, :positions]
    shifts = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = (masks.bits[lines.clamp(min=0)][..., None] >> shifts & 1).flatten(2)[..., :vocab] > 0
    return logits.masked_fill(~allowed & (lines >= 0)[..., None], -torch.inf)
