"""Penalties and minimum length in one launch, then truncation and cuts (``gpu.cut``): ``sampling.shaped``, no sort.

Shapes: B rows, L positions, N = B * L lines, V vocabulary, S stop tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.core.rows import RowState, StepFeatures
from paceline.core.sampling import count_tokens
from paceline.kernels.gpu.cut import cut, truncate
from paceline.kernels.gpu.draw import BLOCK, Blocks
from paceline.kernels.gpu.masks import TokenMasks

_WARPS = 8


@triton.jit(do_not_specialize=["draft_stride", "first", "per_row"])
def adjust_kernel(
    logits: tl.tensor,
    counts: tl.tensor,
    seen: tl.tensor,
    draft_tokens: tl.tensor,
    draft_stride: tl.tensor,
    presence: tl.tensor,
    frequency: tl.tensor,
    repetition: tl.tensor,
    length: tl.tensor,
    min_length: tl.tensor,
    stops: tl.tensor,
    slots: tl.tensor,
    out: tl.tensor,
    line_stride: tl.tensor,
    vocab: tl.tensor,
    first: tl.tensor,
    per_row: tl.tensor,
    STOPS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Grid (N, blocks): penalties and minimum length -> out [N, V] float32.

    Line b * per_row + j follows row b's first ``first + j`` draft tokens, which are counted; counts, seen [B, V]
    describe its text. slots: [B] int64, the rows' places in presence, ..., stops.
    """
    line, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, before = line // per_row, first + (line % per_row).to(tl.int32)
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocab
    x = tl.load(logits + line * line_stride + column, mask=inside, other=float("-inf")).to(tl.float32)
    count = tl.load(counts + row * vocab + column, mask=inside, other=0.0)
    known = tl.load(seen + row * vocab + column, mask=inside, other=0.0)
    for place in range(before):
        same = (column == tl.load(draft_tokens + row * draft_stride + place)).to(tl.float32)
        count += same
        known += same
    slot = tl.load(slots + row)
    factor = tl.load(repetition + slot)
    repeated = tl.where(x > 0, tl.div_rn(x, factor + tl.zeros_like(x)), x * factor)
    x = tl.where(known > 0, repeated, x)
    x = x - tl.load(presence + slot) * (count > 0).to(tl.float32) - tl.load(frequency + slot) * count
    if tl.load(length + slot) + before < tl.load(min_length + slot):
        for stop in tl.static_range(STOPS):
            x = tl.where(column == tl.load(stops + slot * STOPS + stop), float("-inf"), x)
    tl.store(out + line * vocab + column, x, mask=inside)


@triton.jit(do_not_specialize=["per_row"])
def mask_kernel(
    logits: tl.tensor,
    bits: tl.tensor,
    lines: tl.tensor,
    out: tl.tensor,
    line_stride: tl.tensor,
    words: tl.tensor,
    vocab: tl.tensor,
    per_row: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Grid (N, blocks): the logits -> out [N, V] float32, -inf where a line's bits (``TokenMasks``) are 0."""
    line, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocab
    x = tl.load(logits + line * line_stride + column, mask=inside, other=float("-inf")).to(tl.float32)
    mask = tl.load(lines + line // per_row * WIDTH + line % per_row)
    if mask >= 0:
        word = tl.load(bits + mask * words + (column >> 5), mask=inside, other=0)
        x = tl.where((word >> (column & 31)) & 1 != 0, x, float("-inf"))
    tl.store(out + line * vocab + column, x, mask=inside)


def masked(logits: Tensor, masks: TokenMasks, block: int = BLOCK) -> Tensor:
    """Set logits of tokens that may not come to -inf: [B, L, V] -> [B, L, V] float32."""
    rows, length, vocab = logits.shape
    lines, blocks = logits.reshape(-1, vocab), Blocks(vocab, block)
    out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    mask_kernel[(rows * length, blocks.count)](
        lines, masks.bits, masks.lines, out, lines.stride(0), masks.bits.shape[1], vocab, length,
        WIDTH=masks.lines.shape[1], BLOCK=block, num_warps=_WARPS,
    )  # fmt: skip
    return out


def shaped(
    logits: Tensor, rows: RowState, asks: StepFeatures, draft_tokens: Tensor, first: int = 0, block: int = BLOCK
) -> Tensor:
    """Apply ``sampling.shaped``: logits [B, L, V] -> [B, L, V] float32."""
    length, blocks = logits.shape[1], Blocks(logits.shape[-1], block)
    lines = logits.reshape(-1, blocks.vocab)
    if asks.adjusts:
        lines = _adjusted(lines, rows, draft_tokens, first, blocks)
    if asks.truncates:
        lines = truncate(lines, rows, blocks)
    if asks.cuts:
        lines = cut(lines, rows, blocks)
    return lines.view(rows.rows, length, blocks.vocab)


def _adjusted(lines: Tensor, rows: RowState, draft_tokens: Tensor, first: int, blocks: Blocks) -> Tensor:
    counts, seen = count_tokens(rows, blocks.vocab)
    of = rows.tables
    out = torch.empty(lines.shape, dtype=torch.float32, device=lines.device)
    adjust_kernel[(lines.shape[0], blocks.count)](
        lines, counts, seen, draft_tokens, draft_tokens.stride(0), of.presence_penalty, of.frequency_penalty,
        of.repetition_penalty, of.length, of.min_length, of.stops, rows.slots.index, out, lines.stride(0), blocks.vocab,
        first, per_row=lines.shape[0] // rows.rows, STOPS=of.stops.shape[1], BLOCK=blocks.size, num_warps=_WARPS,
        enable_fp_fusion=False,
    )  # fmt: skip
    return out
