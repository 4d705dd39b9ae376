"""Top-k, top-p and min-p as version 0.3 had them, for comparison: one program a line bisects over the vocabulary."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.core.rows import RowState
from paceline.kernels.gpu.cut import mass_of
from paceline.kernels.gpu.draw import Blocks, block_maxima, line_max, scaled_logits

_WARPS, _MOST_REGISTERS = 8, 96
_LOWEST = tl.constexpr(-2139095041)  # ``order_of`` -inf


@triton.jit
def order_of(x: tl.tensor) -> tl.tensor:
    """float32 -> int32 in the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def scores(
    logits: tl.tensor, line: tl.tensor, start: tl.tensor, top: tl.tensor, temperature: tl.tensor,
    line_stride: tl.tensor, vocab: tl.tensor, BLOCK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """A block of a line's scaled logits; the largest logit becomes 0."""
    column = start + tl.arange(0, BLOCK)
    x = tl.load(logits + line * line_stride + column, mask=column < vocab, other=float("-inf")).to(tl.float32)
    return scaled_logits(x, top, temperature)


@triton.jit
def lowest_kept(
    logits: tl.tensor, line: tl.tensor, top: tl.tensor, temperature: tl.tensor, line_stride: tl.tensor,
    vocab: tl.tensor, floor: tl.tensor, limit: tl.tensor, IN_MASS: tl.constexpr, BLOCK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The lowest rank above which less than ``limit`` lies, in mass or tokens, among scores of at least ``floor``."""
    low = tl.full([], _LOWEST, tl.int64)
    high = tl.full([], 0, tl.int64)
    while low < high:
        middle = low + ((high - low) >> 1)
        above = tl.full([], 0, tl.int64)
        for start in range(0, vocab, BLOCK):
            score = scores(logits, line, start, top, temperature, line_stride, vocab, BLOCK)
            higher = (order_of(score) > middle) & (score >= floor) & (start + tl.arange(0, BLOCK) < vocab)
            weight = mass_of(score).to(tl.int64) if IN_MASS else tl.full([BLOCK], 1, tl.int64)
            above += tl.sum(tl.where(higher, weight, 0), 0)
        enough = above.to(tl.float64) < limit
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, middle + 1)
    return low


@triton.jit(do_not_specialize=["per_row"])
def bisect_kernel(
    logits: tl.tensor, maxima: tl.tensor, temperatures: tl.tensor, floors: tl.tensor, top_k: tl.tensor,
    top_p: tl.tensor, slots: tl.tensor, out: tl.tensor, line_stride: tl.tensor, vocab: tl.tensor, per_row: tl.tensor,
    BLOCKS: tl.constexpr, BLOCKS_UP: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Grid (N): min-p, top-k, then top-p of the remaining tokens -> out [N, V] float32, -inf for removed tokens."""
    line = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + line // per_row)
    temperature, floor = tl.load(temperatures + slot), tl.load(floors + slot)
    top = line_max(maxima, line, BLOCKS, BLOCKS_UP)
    least = tl.full([], _LOWEST, tl.int64)
    most, share = tl.load(top_k + slot), tl.load(top_p + slot)
    nothing = float("-inf")
    if most > 0:
        least = lowest_kept(
            logits, line, top, temperature, line_stride, vocab, nothing, most.to(tl.float64), False, BLOCK
        )  # fmt: skip
    if share < 1.0:
        edge = least.to(tl.int32)
        edge = tl.where(edge >= 0, edge, edge ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)
        under = tl.maximum(floor, edge)
        mass = tl.full([], 0, tl.int64)
        for start in range(0, vocab, BLOCK):
            score = scores(logits, line, start, top, temperature, line_stride, vocab, BLOCK)
            kept = (score >= under) & (start + tl.arange(0, BLOCK) < vocab)
            mass += tl.sum(tl.where(kept, mass_of(score).to(tl.int64), 0), 0)
        limit = tl.maximum(share.to(tl.float64) * mass.to(tl.float64), 1.0)
        nucleus = lowest_kept(logits, line, top, temperature, line_stride, vocab, under, limit, True, BLOCK)
        least = tl.maximum(least, nucleus)
    for start in range(0, vocab, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(logits + line * line_stride + column, mask=column < vocab, other=float("-inf")).to(tl.float32)
        score = scaled_logits(x, top, temperature)
        stays = (order_of(score) >= least) & (score >= floor)
        tl.store(out + line * vocab + column, tl.where(stays, x, float("-inf")), mask=column < vocab)


def bisected(lines: Tensor, rows: RowState, blocks: Blocks) -> Tensor:
    """As ``gpu.cut.cut``."""
    maxima, _ = block_maxima(lines, blocks)
    of = rows.tables
    out = torch.empty(lines.shape, dtype=torch.float32, device=lines.device)
    bisect_kernel[(lines.shape[0],)](
        lines, maxima, of.temperature, of.floor, of.top_k, of.top_p, rows.slots.index, out, lines.stride(0),
        blocks.vocab, per_row=lines.shape[0] // rows.rows, BLOCK=blocks.size, num_warps=_WARPS, enable_fp_fusion=False,
        maxnreg=_MOST_REGISTERS, **blocks.shape,
    )  # fmt: skip
    return out
