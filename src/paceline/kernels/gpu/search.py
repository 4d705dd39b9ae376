"""The search for n-gram drafts in one launch: each row's last tokens, where they occurred before."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.core.slots import Slots
from paceline.kernels.gpu.lookup import SEPARATOR

_BLOCK = 1024  # positions that a program compares at once
_WARPS = 8


@triton.jit(do_not_specialize=["table_stride"])
def match_kernel(
    table: tl.tensor,
    slots: tl.tensor,
    live: tl.tensor,
    size: tl.tensor,
    suffix: tl.tensor,
    place: tl.tensor,
    matched: tl.tensor,
    table_stride: tl.tensor,
    SUFFIX: tl.constexpr,
    BLOCK: tl.constexpr,
    SEPARATES: tl.constexpr,
    IDLE_ROWS: tl.constexpr,
) -> None:
    """Grid (B) -> place, matched [B] int64, as ``lookup.last_match``; 0 and 0 for rows from ``live`` [1] int64 on."""
    row = tl.program_id(0).to(tl.int64)
    line = table + tl.load(slots + row) * table_stride
    end = tl.load(size + row) - 1
    if IDLE_ROWS:
        end = tl.where(row < tl.load(live), end, 0)
    best = tl.zeros([BLOCK], tl.int64)
    for first in range(0, end, BLOCK):
        at = first + tl.arange(0, BLOCK).to(tl.int64)
        there = at < end
        agrees = there & (tl.load(line + at + 1, mask=there, other=SEPARATES) != SEPARATES)
        count = tl.zeros([BLOCK], tl.int64)
        for back in tl.static_range(SUFFIX):
            token = tl.load(suffix + row * SUFFIX + back)
            here = tl.load(line + at - back, mask=there & (at >= back), other=-3)
            agrees = agrees & (here == token)
            count += agrees.to(tl.int64)
        best = tl.maximum(best, count * 4294967296 + at)
    found = tl.max(best, 0)
    tl.store(place + row, found % 4294967296)
    tl.store(matched + row, found // 4294967296)


def last_match(table: Tensor, rows: Slots, size: Tensor, suffix: Tensor) -> tuple[Tensor, Tensor]:
    """See ``lookup.last_match``."""
    place, matched = torch.empty_like(size), torch.empty_like(size)
    match_kernel[(len(size),)](
        table,
        rows.index,
        rows.index if rows.live is None else rows.live,
        size,
        suffix.contiguous(),
        place,
        matched,
        table.stride(0),
        SUFFIX=suffix.shape[1],
        BLOCK=_BLOCK,
        SEPARATES=SEPARATOR,
        IDLE_ROWS=rows.live is not None,
        num_warps=_WARPS,
    )
    return place, matched
