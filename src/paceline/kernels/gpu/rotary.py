"""Norms of query and key, rotary embedding and cache write in one launch, at ragged slots.

Shapes: B rows, L new tokens per row, H heads, G key/value heads, D head width; R rows and P positions of the cache.
    Values are rounded where the model's own torch operations (``models/torch/layers.py``) round, in the same order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.attention.base import Plan
from paceline.kernels.gpu.state import PackedHeads

_HEADS_AT_ONCE = 8


@triton.jit
def normed(x: tl.tensor, y: tl.tensor, mean_square: tl.tensor, weight: tl.tensor, epsilon: tl.tensor) -> tl.tensor:
    """x [heads, D] float32 over its root mean square, times the weight; rounded to y's type where torch rounds."""
    scaled = (x * tl.rsqrt(mean_square + epsilon)[:, None]).to(y.dtype)
    return (scaled.to(tl.float32) * weight.to(tl.float32)).to(y.dtype).to(tl.float32)


@triton.jit(do_not_specialize=["new_tokens", "blocks"])  # a prompt of another length does not recompile it
def rotary_kernel(
    qkv: tl.tensor,
    cosine: tl.tensor,
    sine: tl.tensor,
    norm: tl.tensor,
    slots: tl.tensor,
    cache_rows: tl.tensor,
    pages: tl.tensor,
    out: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    epsilon: tl.tensor,
    last: tl.tensor,
    qkv_stride: tl.tensor,
    k_row: tl.tensor,
    k_head: tl.tensor,
    k_position: tl.tensor,
    v_row: tl.tensor,
    v_head: tl.tensor,
    v_position: tl.tensor,
    new_tokens: tl.tensor,
    blocks: tl.tensor,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    ROTATED: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    TURNED: tl.constexpr,
    NORMED: tl.constexpr,
    PAGE: tl.constexpr,
) -> None:
    """Grid (B * L, head tiles): queries -> out [B, L, H, D], keys and values -> the cache [R, G, P, D].

    pages: with PAGE positions in a page, [R, blocks] int32, and the cache is [pages, G, PAGE, D].
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    column = tl.arange(0, BLOCK_D)
    inside = (column < DIM)[None, :]
    real = (head < HEADS + 2 * GROUPS)[:, None] & inside
    line = qkv + token * qkv_stride + head[:, None] * DIM
    x = tl.load(line + column[None, :], mask=real, other=0.0)
    value = x.to(tl.float32)
    turned = (head < HEADS + GROUPS)[:, None] & inside
    if TURNED:
        partner = tl.where(column < ROTATED, (column + ROTATED // 2) % ROTATED, column)
        other = tl.load(line + partner[None, :], mask=turned, other=0.0).to(tl.float32)
        if NORMED:
            square = tl.sum(value * value, 1) / DIM
            weight = tl.load(norm + head[:, None] * DIM + column[None, :], mask=turned, other=0.0)
            partner_weight = tl.load(norm + head[:, None] * DIM + partner[None, :], mask=turned, other=0.0)
            value = tl.where(turned, normed(value, x, square, weight, epsilon), value)
            other = normed(other, x, square, partner_weight, epsilon)
        cos = tl.load(cosine + token * ROTATED + column, mask=column < ROTATED, other=1.0).to(tl.float32)
        sin = tl.load(sine + token * ROTATED + column, mask=column < ROTATED, other=0.0).to(tl.float32)
        kept = (value * cos[None, :]).to(x.dtype).to(tl.float32)
        value = tl.where(turned, kept + other * sin[None, :], value)
    found = value.to(x.dtype)

    page = tl.load(cache_rows + token // new_tokens)
    slot = tl.minimum(tl.load(slots + token), last)
    if PAGE > 0:
        page = tl.load(pages + page * blocks + slot // PAGE).to(tl.int64)
        slot = slot % PAGE
    to_query = (head < HEADS)[:, None] & inside
    tl.store(out + (token * HEADS + head[:, None]) * DIM + column[None, :], found, mask=to_query)
    group = (head - HEADS)[:, None]
    to_key = (group >= 0) & (group < GROUPS) & inside
    place = keys + page * k_row + group.to(tl.int64) * k_head + slot * k_position + column[None, :]
    tl.store(place, found.to(keys.dtype.element_ty), mask=to_key)
    group = group - GROUPS
    to_value = (group >= 0) & (group < GROUPS) & inside
    place = values + page * v_row + group.to(tl.int64) * v_head + slot * v_position + column[None, :]
    tl.store(place, found.to(values.dtype.element_ty), mask=to_value)


def turn_and_store(packed: PackedHeads, plan: Plan, keys: Tensor, values: Tensor) -> Tensor:
    """Write the new keys and values into the cache at the plan's slots -> queries [B, H, L, D].

    keys, values: of the cache, [R, G, P, D], or if the plan has pages [pages, G, positions of a page, D].

    Slots beyond the cache's last position are written there: it is never read.
    """
    assert plan.cache_rows is not None
    cache_rows, pages = plan.cache_rows.index, plan.pages
    places = keys.shape[2] if pages is None else pages.shape[1] * keys.shape[2]
    table = packed.table
    rows, length, all_heads, dim = table.shape
    out = torch.empty((rows, length, packed.heads, dim), dtype=table.dtype, device=table.device)
    cos, sin = (out, out) if packed.rotation is None else packed.rotation
    rotary_kernel[(rows * length, triton.cdiv(all_heads, _HEADS_AT_ONCE))](
        table,
        cos,
        sin,
        out if packed.norm is None else packed.norm,
        plan.slots,
        cache_rows,
        cache_rows if pages is None else pages,
        out,
        keys,
        values,
        packed.eps,
        places - 1,
        table.stride(1),
        *keys.stride()[:3],
        *values.stride()[:3],
        length,
        0 if pages is None else pages.shape[1],
        HEADS=packed.heads,
        GROUPS=packed.kv_heads,
        DIM=dim,
        ROTATED=cos.shape[-1],
        BLOCK_D=triton.next_power_of_2(dim),
        BLOCK_H=_HEADS_AT_ONCE,
        TURNED=packed.rotation is not None,
        NORMED=packed.rotation is not None and packed.norm is not None,
        PAGE=0 if pages is None else keys.shape[2],
        num_warps=4,
    )
    return out.transpose(1, 2)
