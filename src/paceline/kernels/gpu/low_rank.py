"""Low-rank changes of a linear layer by row, in two launches: x to the ranks of each row's adapter, and these to y.

Shapes: B rows of L tokens, K inputs, N outputs, A adapters of at most R ranks. Programs of rows without an adapter end
    at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.low_rank import RANKS, LowRankChanges

TOKEN_TILES = (16, 64)  # tokens of a program
_INPUTS, _OUTPUTS = 128, 64  # of a program: inputs per step, and outputs
_RANKS = tl.constexpr(RANKS)


@triton.jit(do_not_specialize=["length", "tiles"])
def shrink_kernel(
    x: tl.tensor,
    down: tl.tensor,
    ranks: tl.tensor,
    adapters: tl.tensor,
    out: tl.tensor,
    length: tl.tensor,
    tiles: tl.tensor,
    x_stride: tl.tensor,
    inputs: tl.tensor,
    MOST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Grid (B tiles, blocks of ranks): out [B L, R] = x [B L, K] @ down[A, R, K] of each row's adapter."""
    row, token = tl.program_id(0) // tiles, tl.program_id(0) % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    adapter, rank = tl.load(adapters + row).to(tl.int64) - 1, tl.program_id(1) * _RANKS + tl.arange(0, _RANKS)
    count = tl.load(ranks + adapter, mask=adapter >= 0, other=0)
    if tl.program_id(1) * _RANKS < count:
        line, inside = (row * length + token).to(tl.int64), token < length
        of_adapter = down + (adapter * MOST + rank) * inputs
        sums = tl.zeros([BLOCK_M, _RANKS], tl.float32)
        for first in range(0, inputs, BLOCK_K):
            k = first + tl.arange(0, BLOCK_K)
            mask = inside[:, None] & (k < inputs)[None, :]
            a = tl.load(x + line[:, None] * x_stride + k[None, :], mask=mask, other=0.0)
            d = tl.load(of_adapter[None, :] + k[:, None], mask=(k < inputs)[:, None], other=0.0)
            sums += tl.dot(a, d, input_precision="ieee")
        tl.store(out + line[:, None] * MOST + rank[None, :], sums.to(out.dtype.element_ty), mask=inside[:, None])


@triton.jit(do_not_specialize=["length", "tiles"])
def expand_kernel(
    inner: tl.tensor,
    up: tl.tensor,
    ranks: tl.tensor,
    adapters: tl.tensor,
    y: tl.tensor,
    length: tl.tensor,
    tiles: tl.tensor,
    y_stride: tl.tensor,
    outputs: tl.tensor,
    MOST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """Grid (B tiles, output tiles): y [B L, N] += inner [B L, R] @ up[A, N, R] of each row's adapter."""
    row, token = tl.program_id(0) // tiles, tl.program_id(0) % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    adapter = tl.load(adapters + row).to(tl.int64) - 1
    count = tl.load(ranks + adapter, mask=adapter >= 0, other=0)
    if count > 0:
        line, inside = (row * length + token).to(tl.int64), token < length
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        of_adapter = up + (adapter * outputs + n) * MOST
        place = y + line[:, None] * y_stride + n[None, :]
        mask = inside[:, None] & (n < outputs)[None, :]
        sums = tl.load(place, mask=mask, other=0.0).to(tl.float32)
        for first in range(0, count, _RANKS):
            rank = first + tl.arange(0, _RANKS)
            h = tl.load(inner + line[:, None] * MOST + rank[None, :], mask=inside[:, None], other=0.0)
            u = tl.load(of_adapter[None, :] + rank[:, None], mask=(n < outputs)[None, :], other=0.0)
            sums += tl.dot(h, u, input_precision="ieee")
        tl.store(place, sums.to(y.dtype.element_ty), mask=mask)


def add_changes(
    y: Tensor, x: Tensor, changes: LowRankChanges, adapters: Tensor, *, deterministic: bool = False
) -> None:
    """Add each row's change to y [B L, N], in place; see ``LowRankChanges.add_to``.

    deterministic: tiles of one size, so that a token's bits do not depend on the length of the pass.
    """
    (tokens, inputs), outputs, most = x.shape, y.shape[1], changes.down.shape[1]
    length = tokens // len(adapters)
    block = TOKEN_TILES[length > TOKEN_TILES[0] and not deterministic]
    tiles = triton.cdiv(length, block)
    inner = torch.empty((tokens, most), dtype=x.dtype, device=x.device)
    common = changes.ranks, adapters
    shrink_kernel[(len(adapters) * tiles, most // RANKS)](
        x, changes.down, *common, inner, length, tiles, x.stride(0), inputs, MOST=most, BLOCK_M=block, BLOCK_K=_INPUTS
    )
    expand_kernel[(len(adapters) * tiles, triton.cdiv(outputs, _OUTPUTS))](
        inner, changes.up, *common, y, length, tiles, y.stride(0), outputs, MOST=most, BLOCK_M=block, BLOCK_N=_OUTPUTS
    )
