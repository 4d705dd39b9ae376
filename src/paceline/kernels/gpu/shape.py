"""Penalties, minimum length, min-p, top-k and top-p in two launches: ``sampling.shaped`` without a sort.

Truncation by the shape of the distribution runs in torch, and only where a row asks for it.

Shapes: B rows, L positions, N = B * L lines, V vocabulary, S stop tokens. Top-k and top-p both search the lowest score
    above which the count or the probability mass stays below a limit. Floats are ordered like integers (but for the
    sign), so bisection finds it: 31 passes over a line, in the L2 cache. Masses are the integers of
    ``sampling.masses``: their sums do not depend on order, and the nucleus is the same to the token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.core.rows import RowState, StepFeatures
from paceline.core.sampling import LOG2_E, TWO_TO, count_tokens, truncate
from paceline.kernels.gpu.draw import BLOCK, Blocks, block_maxima, line_max, scaled_logits

_WARPS = 8
MOST_REGISTERS = 96  # per thread of cut_kernel: by default the assembler stops at 64 and spills (sm_100)
_LOWEST = tl.constexpr(-2139095041)  # ``order_of`` -inf
_LOG2_E = tl.constexpr(LOG2_E)
_P5, _P4, _P3, _P2, _P1, _P0 = (tl.constexpr(coefficient) for coefficient in TWO_TO)


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


@triton.jit
def order_of(x: tl.tensor) -> tl.tensor:
    """float32 -> int32 in the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def mass_of(scaled: tl.tensor) -> tl.tensor:
    """``sampling.masses``, to the bit: every product and sum is rounded on its own (the launch disables fusion)."""
    exponent = tl.maximum(scaled * _LOG2_E, -64.0)
    whole = (exponent + 12582912.0) - 12582912.0  # to the nearest, ties to even
    part = exponent - whole
    power = part * 0.0 + _P5
    power = power * part + _P4
    power = power * part + _P3
    power = power * part + _P2
    power = power * part + _P1
    power = power * part + _P0
    scale = ((whole.to(tl.int32) + 157) << 23).to(tl.float32, bitcast=True)
    mass = power * scale
    floor = tl.floor(mass)
    rest, units = mass - floor, floor.to(tl.int64)
    up = (rest > 0.5) | ((rest == 0.5) & (units % 2 == 1))
    return units + up.to(tl.int64)


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
    logits: tl.tensor,
    line: tl.tensor,
    top: tl.tensor,
    temperature: tl.tensor,
    line_stride: tl.tensor,
    vocab: tl.tensor,
    floor: tl.tensor,
    limit: tl.tensor,
    IN_MASS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The lowest rank (``order_of``) above which less than ``limit`` (float64) lies, among scores of at least
    ``floor``.

    IN_MASS: count probability mass; else tokens.
    """
    low = tl.full([], _LOWEST, tl.int64)
    high = tl.full([], 0, tl.int64)
    while low < high:
        middle = low + ((high - low) >> 1)
        above = tl.full([], 0, tl.int64)
        for start in range(0, vocab, BLOCK):
            score = scores(logits, line, start, top, temperature, line_stride, vocab, BLOCK)
            higher = (order_of(score) > middle) & (score >= floor) & (start + tl.arange(0, BLOCK) < vocab)
            weight = mass_of(score) if IN_MASS else tl.full([BLOCK], 1, tl.int64)
            above += tl.sum(tl.where(higher, weight, 0), 0)
        enough = above.to(tl.float64) < limit
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, middle + 1)
    return low


@triton.jit(do_not_specialize=["per_row"])
def cut_kernel(
    logits: tl.tensor,
    maxima: tl.tensor,
    temperatures: tl.tensor,
    floors: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    slots: tl.tensor,
    out: tl.tensor,
    line_stride: tl.tensor,
    vocab: tl.tensor,
    per_row: tl.tensor,
    BLOCKS: tl.constexpr,
    BLOCKS_UP: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
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
            mass += tl.sum(tl.where(kept, mass_of(score), 0), 0)
        limit = tl.maximum(share.to(tl.float64) * mass.to(tl.float64), 1.0)  # the most likely token stays
        nucleus = lowest_kept(logits, line, top, temperature, line_stride, vocab, under, limit, True, BLOCK)
        least = tl.maximum(least, nucleus)
    for start in range(0, vocab, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(logits + line * line_stride + column, mask=column < vocab, other=float("-inf")).to(tl.float32)
        score = scaled_logits(x, top, temperature)
        stays = (order_of(score) >= least) & (score >= floor)
        tl.store(out + line * vocab + column, tl.where(stays, x, float("-inf")), mask=column < vocab)


def shaped(
    logits: Tensor, rows: RowState, asks: StepFeatures, draft_tokens: Tensor, first: int = 0, block: int = BLOCK
) -> Tensor:
    """Apply ``sampling.shaped``: logits [B, L, V] -> [B, L, V] float32."""
    length, blocks = logits.shape[1], Blocks(logits.shape[-1], block)
    lines = logits.reshape(-1, blocks.vocab)
    if asks.adjusts:
        lines = _adjusted(lines, rows, draft_tokens, first, blocks)
    if asks.truncates:
        lines = truncate(lines.view(rows.rows, length, blocks.vocab).float(), rows.values).view(lines.shape)
    if asks.cuts:
        lines = _cut(lines, rows, blocks)
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


def _cut(lines: Tensor, rows: RowState, blocks: Blocks) -> Tensor:
    maxima, _ = block_maxima(lines, blocks)
    of = rows.tables
    out = torch.empty(lines.shape, dtype=torch.float32, device=lines.device)
    cut_kernel[(lines.shape[0],)](
        lines, maxima, of.temperature, of.floor, of.top_k, of.top_p, rows.slots.index, out, lines.stride(0),
        blocks.vocab, per_row=lines.shape[0] // rows.rows, BLOCK=blocks.size, num_warps=_WARPS, enable_fp_fusion=False,
        maxnreg=MOST_REGISTERS, **blocks.shape,
    )  # fmt: skip
    return out
