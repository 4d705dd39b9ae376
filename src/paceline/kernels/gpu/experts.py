"""A mixture of experts on a GPU: choice, order, two grouped products and the sum, in six launches and without a wait.

Shapes: N tokens, E experts, ``used`` of them for each token, W width, I inner width. A pair is a token and one of its
    experts; there are P = N ``used`` of them, numbered token by token. The pairs are ordered by expert, and a tile has
    some pairs of one expert, so a program of a grouped product multiplies one expert's weights with the rows of a tile.
    Numbers of tiles and programs depend on N alone; tiles beyond those that there are end at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.errors import ModelError
from paceline.kernels.experts import ExpertMatrices, Mixture
from paceline.kernels.gpu.four_bit import RUN, WORDS, FourBitWeight
from paceline.kernels.gpu.four_bit_kernels import constants_of, four_bit_sums
from paceline.kernels.gpu.launch import capability, shared_memory
from paceline.kernels.gpu.linear import (
    CANDIDATES,
    FOUR_BIT_CANDIDATES,
    NO_GROUPS,
    KeptWeight,
    LinearTile,
    Quantized,
    is_close,
    most_registers,
    tile_sums,
    widening,
)

PAIR_TILES = (16, 32, 64)  # pairs of a tile
_PAIRS_BLOCK = 1024  # pairs that a program orders in a step
_RUN, _WORDS = tl.constexpr(RUN), tl.constexpr(WORDS)
_SUM_BLOCK = 1024  # width per program of the sum


@triton.jit
def _share_of(scores: tl.tensor, among: tl.tensor, own: tl.tensor) -> tl.tensor:
    """Softmax of the scores ``among``, at the score ``own``."""
    top = tl.max(tl.where(among, scores, float("-inf")), 0)
    return tl.exp(own - top) / tl.sum(tl.where(among, tl.exp(scores - top), 0.0), 0)


@triton.jit
def _in_best_groups(
    values: tl.tensor, number: tl.tensor, GROUPS: tl.constexpr, USED: tl.constexpr, BEST: tl.constexpr,
    SIZE: tl.constexpr, GROUPS_UP: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The values, -inf in groups of SIZE experts that are not among the USED ones with the largest sums of BEST."""
    group = tl.arange(0, GROUPS_UP)
    totals = tl.full([GROUPS_UP], float("-inf"), tl.float32)
    for each in tl.static_range(GROUPS):
        left = tl.where(number // SIZE == each, values, float("-inf"))
        total = 0.0
        for _ in tl.static_range(BEST):
            total += tl.max(left, 0)
            left = tl.where(number == tl.argmax(left, 0), float("-inf"), left)
        totals = tl.where(group == each, total, totals)
    kept = number < 0
    for _ in tl.static_range(USED):
        best = tl.argmax(totals, 0)
        kept = kept | (number // SIZE == best)
        totals = tl.where(group == best, float("-inf"), totals)
    return tl.where(kept, values, float("-inf"))


@triton.jit
def route_kernel(
    scores: tl.tensor,
    correction: tl.tensor,
    factors: tl.tensor,
    weights: tl.tensor,
    chosen: tl.tensor,
    scores_stride: tl.tensor,
    scores_scale: tl.tensor,
    output_scale: tl.tensor,
    margin: tl.tensor,
    EXPERTS: tl.constexpr,
    EXPERTS_UP: tl.constexpr,
    USED: tl.constexpr,
    USED_UP: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALISED: tl.constexpr,
    CORRECTED: tl.constexpr,
    FACTORS: tl.constexpr,
    MARGIN: tl.constexpr,
    GROUPS: tl.constexpr,
    USED_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr,
    GROUPS_UP: tl.constexpr,
) -> None:
    """Grid (N): scores [N, E] -> weights and numbers of each token's experts, [N, used] each; see ``experts.route``."""
    token, number = tl.program_id(0).to(tl.int64), tl.arange(0, EXPERTS_UP)
    real = number < EXPERTS
    plain = tl.load(scores + token * scores_stride + number, mask=real, other=0.0).to(tl.float32) * scores_scale
    score = tl.where(real, plain, float("-inf"))
    if SIGMOID:
        chances = 1.0 / (1.0 + tl.exp(-score))
    else:
        chances = tl.where(real, tl.exp(score - tl.max(score, 0)), 0.0)
        chances = chances / tl.sum(chances, 0)
    values = score
    if CORRECTED:
        values = tl.where(real, chances + tl.load(correction + number, mask=real, other=0.0), float("-inf"))
    if GROUPS > 1:
        values = _in_best_groups(values, number, GROUPS, USED_GROUPS, GROUP_BEST, EXPERTS // GROUPS, GROUPS_UP)
    rank = tl.arange(0, USED_UP)
    among = rank < USED
    experts, shares = tl.zeros([USED_UP], tl.int32), tl.zeros([USED_UP], tl.float32)
    left = score
    for place in tl.static_range(USED):
        best = tl.minimum(tl.argmax(values, 0), EXPERTS - 1)  # of scores that are no numbers: any expert
        values = tl.where(number == best, float("-inf"), values)
        own = tl.sum(tl.where(number == best, score, 0.0), 0)
        if MARGIN:
            size = tl.maximum(tl.maximum(tl.abs(plain), own), 1e-30)
            far = (own - plain) / size > margin
            share = _share_of(left, (far == 0) & (left > float("-inf")), own)
            left = tl.where(number == best, float("-inf"), left)
        elif NORMALISED and not SIGMOID:
            share = own
        else:
            share = tl.sum(tl.where(number == best, chances, 0.0), 0)
        experts, shares = tl.where(rank == place, best, experts), tl.where(rank == place, share, shares)
    if NORMALISED and not MARGIN:
        if SIGMOID:
            shares = shares / tl.sum(shares, 0)
        else:
            shares = tl.where(among, tl.exp(shares - tl.max(tl.where(among, shares, float("-inf")), 0)), 0.0)
            shares = shares / tl.sum(shares, 0)
    if FACTORS:
        shares = shares * tl.load(factors + experts, mask=among, other=0.0).to(tl.float32)
    tl.store(weights + token * USED + rank, (shares * output_scale).to(weights.dtype.element_ty), mask=among)
    tl.store(chosen + token * USED + rank, experts, mask=among)


@triton.jit(do_not_specialize=["pairs", "most_tiles"])
def order_kernel(
    chosen: tl.tensor,
    order: tl.tensor,
    tiles: tl.tensor,
    pairs: tl.tensor,
    most_tiles: tl.tensor,
    EXPERTS_UP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Grid (E): order [P], the pairs by expert; tiles [T, 3]: expert, first pair of the order and the one behind.

    EXPERTS_UP: more than E, because bin E counts what is beyond the pairs. A tile that is not there has no pairs.
    """
    expert, number = tl.program_id(0), tl.arange(0, EXPERTS_UP)
    counts = tl.zeros([EXPERTS_UP], tl.int32)
    for first in range(0, pairs, BLOCK):
        pair = first + tl.arange(0, BLOCK)
        owner = tl.load(chosen + pair, mask=pair < pairs, other=tl.num_programs(0))
        counts += tl.histogram(owner, EXPERTS_UP)
    tiles_each = tl.cdiv(counts, BLOCK_M)
    start = tl.sum(tl.where(number < expert, counts, 0), 0)
    stop = start + tl.sum(tl.where(number == expert, counts, 0), 0)
    tile = tl.sum(tl.where(number < expert, tiles_each, 0), 0)
    place = start
    for first in range(0, pairs, BLOCK):
        pair = first + tl.arange(0, BLOCK)
        own = (tl.load(chosen + pair, mask=pair < pairs, other=-1) == expert).to(tl.int32)
        tl.store(order + place + tl.cumsum(own, 0) - 1, pair, mask=own > 0)
        place += tl.sum(own, 0)
    last = tile + tl.cdiv(stop - start, BLOCK_M)
    if expert == tl.num_programs(0) - 1:
        last = most_tiles  # the last expert has the tiles that are not there, too: they begin at its end
    for first in range(tile, last, BLOCK):
        at = first + tl.arange(0, BLOCK)
        begin = tl.minimum(start + (at - tile) * BLOCK_M, stop)
        line, inside = tiles + 3 * at, at < last
        tl.store(line, expert + tl.zeros_like(at), mask=inside)
        tl.store(line + 1, begin, mask=inside)
        tl.store(line + 2, tl.minimum(begin + BLOCK_M, stop), mask=inside)


@triton.jit
def grouped_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    scales: tl.tensor,
    lows: tl.tensor,
    bias: tl.tensor,
    order: tl.tensor,
    tiles: tl.tensor,
    out: tl.tensor,
    x_stride: tl.tensor,
    inputs: tl.tensor,
    outputs: tl.tensor,
    SHARED: tl.constexpr,
    SCALED: tl.constexpr,
    BIASED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GRID: tl.constexpr,
    GROUP: tl.constexpr,
    SHIFTED: tl.constexpr,
    WIDENING: tl.constexpr,
    MAJOR: tl.constexpr,
) -> None:
    """Grid (tiles, output tiles): out [P, N] = x [P // SHARED, K] by the matrices of the pairs' experts.

    weight: lines [E N, K] of all experts, scales and bias [E N]. SHARED: pairs that have the same row of x.
    GRID, GROUP, SHIFTED, WIDENING, MAJOR: see ``linear.linear_kernel``. 4-bit weights are [E, ...] (``FourBitWeight``).
    """
    tile = tiles + 3 * tl.program_id(0)
    expert, first, behind = tl.load(tile).to(tl.int64), tl.load(tile + 1), tl.load(tile + 2)
    if first < behind:
        place = first + tl.arange(0, BLOCK_M)
        there = place < behind
        pair = tl.load(order + place, mask=there, other=0).to(tl.int64)
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        is_output, line = n < outputs, expert * outputs + n
        x_line = x + pair // SHARED * x_stride
        if GRID != "":
            first_run = expert * tl.cdiv(inputs, _RUN) * outputs
            of_groups = first_run * (_RUN // GROUP)
            sums = four_bit_sums(
                x_line[None, :], there, weight + first_run * _WORDS, scales + of_groups, lows + of_groups, n, outputs,
                0, inputs, SHIFTED, GRID, GROUP, WIDENING, BLOCK_M, BLOCK_N,
            )  # fmt: skip
        else:
            sums = tile_sums(
                x_line, there, weight, line, is_output, scales, outputs, 0, inputs, inputs,
                SCALED, 0, BLOCK_M, BLOCK_N, BLOCK_K, WIDENING, MAJOR,
            )  # fmt: skip
        if SCALED:
            sums = sums * tl.load(scales + line, mask=is_output, other=0.0)[:, None]
        if BIASED:
            sums = sums + tl.load(bias + line, mask=is_output, other=0.0).to(tl.float32)[:, None]
        to = out + pair[None, :] * outputs + n[:, None]
        tl.store(to, sums.to(out.dtype.element_ty), mask=is_output[:, None] & there[None, :])


@triton.jit
def sum_kernel(
    parts: tl.tensor,
    weights: tl.tensor,
    out: tl.tensor,
    width: tl.tensor,
    USED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Grid (N, blocks): out [N, W], the sum of a token's parts [N, used, W] times their weights, in their order."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for place in tl.static_range(USED):
        pair = token * USED + place
        part = tl.load(parts + pair * width + column, mask=column < width, other=0.0).to(tl.float32)
        total += part * tl.load(weights + pair).to(tl.float32)
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=column < width)


@dataclass(frozen=True)
class Order:
    """The pairs by expert: order [P] and tiles [T, 3], int32 (``order_kernel``). block_m: pairs of a tile."""

    order: Tensor
    tiles: Tensor
    block_m: int


def route(scores: Tensor, mixture: Mixture, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Scores [N, E] -> weights, in ``dtype``, and int32 numbers of each token's experts, [N, used] each, by rank."""
    routing, (tokens, count) = mixture.routing, scores.shape
    weights = torch.empty((tokens, routing.used), dtype=dtype, device=scores.device)
    chosen = torch.empty((tokens, routing.used), dtype=torch.int32, device=scores.device)
    correction, factors = mixture.correction, mixture.factors
    route_kernel[(tokens,)](
        scores, scores if correction is None else correction, scores if factors is None else factors, weights, chosen,
        scores.stride(0), mixture.scores_scale, mixture.output_scale, routing.margin,
        EXPERTS=count, EXPERTS_UP=triton.next_power_of_2(count), USED=routing.used,
        USED_UP=triton.next_power_of_2(routing.used), SIGMOID=routing.sigmoid, NORMALISED=routing.normalised,
        CORRECTED=correction is not None, FACTORS=factors is not None, MARGIN=routing.margin > 0,
        GROUPS=routing.groups, USED_GROUPS=routing.used_groups,
        GROUP_BEST=min(routing.group_best, count // routing.groups),
        GROUPS_UP=triton.next_power_of_2(routing.groups), num_warps=1,
    )  # fmt: skip
    return weights, chosen


def ordered(chosen: Tensor, count: int, block_m: int) -> Order:
    """Order the pairs of chosen [N, used] by expert, of which there are ``count``."""
    pairs = chosen.numel()
    most = min(pairs, pairs // block_m + count)
    order = torch.empty(pairs, dtype=torch.int32, device=chosen.device)
    tiles = torch.empty((most, 3), dtype=torch.int32, device=chosen.device)
    block = min(_PAIRS_BLOCK, max(16, triton.next_power_of_2(pairs)))
    experts_up = max(32, triton.next_power_of_2(count + 1))
    order_kernel[(count,)](chosen, order, tiles, pairs, most, EXPERTS_UP=experts_up, BLOCK_M=block_m, BLOCK=block)
    return Order(order, tiles, block_m)


def grouped(x: Tensor, matrices: ExpertMatrices, order: Order, tile: LinearTile) -> Tensor:
    """x [P, K], or [N, K] with a row for all pairs of a token -> [P, N], each pair by the matrix of its expert."""
    pairs, (rows, inputs) = len(order.order), x.shape
    weight, outputs = packed(matrices), matrices.outputs
    four = weight if isinstance(weight, FourBitWeight) else None
    out = torch.empty((pairs, outputs), dtype=x.dtype, device=x.device)
    major, tables = capability(x.device)[0], (weight.scales, None if four is None else four.lows, matrices.bias)
    grouped_kernel[(len(order.tiles), triton.cdiv(outputs, tile.outputs))](
        x, weight.tensors()[0], *(out if table is None else table for table in tables), order.order, order.tiles, out,
        x.stride(0), inputs, outputs, SHARED=pairs // rows, SCALED=four is None and weight.scales is not None,
        BIASED=matrices.bias is not None, BLOCK_M=order.block_m, BLOCK_N=tile.outputs, BLOCK_K=tile.inputs,
        **NO_GROUPS if four is None else constants_of(four), WIDENING=widening(weight.tensors()[0], x),
        MAJOR=major, num_warps=tile.warps, num_stages=tile.stages, maxnreg=most_registers(major),
    )  # fmt: skip
    return out


def packed(matrices: ExpertMatrices) -> KeptWeight:
    """The weights of all experts as the kernel reads them."""
    weight = matrices.weight
    if isinstance(weight, Tensor):
        return Quantized(weight, None, weight.shape[1])
    assert isinstance(weight, Quantized | FourBitWeight), "layers of Linears"
    return weight


def candidates(weight: KeptWeight, block_m: int, size: int, most: int) -> list[LinearTile]:
    """Return the tiles that may be used. size: bytes of an activation. most: bytes of shared memory of a program."""
    if isinstance(weight, FourBitWeight):  # half the outputs of a single product: registers hold the pairs' places, too
        return list(dict.fromkeys(tile.of_runs(2 * block_m, size, most) for tile in FOUR_BIT_CANDIDATES))
    return [tile.fitted(block_m, size if weight.scales is None else 1, size, most) for tile in CANDIDATES]


def weighted_sum(parts: Tensor, weights: Tensor) -> Tensor:
    """parts [P, W], weights [N, used] -> the sum of each token's parts [N, W]."""
    (tokens, used), width = weights.shape, parts.shape[1]
    out = torch.empty((tokens, width), dtype=parts.dtype, device=parts.device)
    sum_kernel[(tokens, triton.cdiv(width, _SUM_BLOCK))](parts, weights, out, width, USED=used, BLOCK=_SUM_BLOCK)
    return out


class GroupedProducts:
    """Runs mixtures of experts. Each shape's tile is compared with torch's products before its first use.

    A shape's first use is never inside a CUDA graph: programs are run once before they are captured.

    deterministic: tiles of one size whatever the number of tokens, so that a token's bits do not depend on the others.
    """

    def __init__(self, *, deterministic: bool = False) -> None:
        self.deterministic = deterministic
        self._tiles: dict[tuple[object, ...], LinearTile] = {}

    def __call__(self, x: Tensor, scores: Tensor, mixture: Mixture, activated: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the weighted sum of the outputs of each token's experts; see ``gpu.steps.LayerSteps``."""
        weights, chosen = route(scores, mixture, x.dtype)
        pairs, count = chosen.numel(), mixture.first.count
        order = ordered(chosen, count, PAIR_TILES[-1] if self.deterministic else pairs_of_tile(pairs, count))
        inner = activated(grouped(x, mixture.first, order, self._tile(x, mixture.first, order.block_m)))
        parts = grouped(inner, mixture.second, order, self._tile(inner, mixture.second, order.block_m))
        return weighted_sum(parts, weights)

    def _tile(self, x: Tensor, matrices: ExpertMatrices, block_m: int) -> LinearTile:
        weight = packed(matrices)
        shape = weight.kind, matrices.outputs, x.shape[1], x.dtype, matrices.count, block_m
        if shape not in self._tiles:
            self._tiles[shape] = first_right(x, matrices, block_m)
        return self._tiles[shape]


def pairs_of_tile(pairs: int, experts: int) -> int:
    """Pairs of a tile: what an expert has if they are spread evenly, up to the largest."""
    return next((size for size in PAIR_TILES if pairs <= size * experts), PAIR_TILES[-1])


def first_right(x: Tensor, matrices: ExpertMatrices, block_m: int) -> LinearTile:
    """Return the first tile whose products are right on this GPU: a full tile of pairs, and some of another expert.

    x: the activations whose type and width the products will have. Raises ModelError if none is right.
    """
    owners = torch.zeros(block_m + 8, 1, dtype=torch.int32, device=x.device)
    owners[block_m:] = matrices.count - 1
    generator = torch.Generator(x.device).manual_seed(0)
    probe = torch.randn(len(owners), x.shape[1], dtype=x.dtype, device=x.device, generator=generator)
    parts = (probe[:block_m], 0), (probe[block_m:], matrices.count - 1)
    expected = torch.cat([matrices.product(part, expert) for part, expert in parts])
    order, weight = ordered(owners, matrices.count, block_m), packed(matrices)
    for tile in candidates(weight, block_m, x.element_size(), shared_memory(x.device)):
        if is_close(grouped(probe, matrices, order, tile), expected, f"{matrices.count} experts, {tile}"):
            return tile
    raise ModelError("every kernel for mixtures of experts computes wrong products on this GPU; set device='cpu'")
