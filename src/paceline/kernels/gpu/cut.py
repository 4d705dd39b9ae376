"""Truncation, min-p, top-k and top-p without a sort: a few reads of the logits, whatever the distribution is.

Shapes: N lines (B rows x L positions), V vocabulary. A line is divided into blocks, one program each.

A token's *key* is its depth below the largest logit, after temperature: a float32 of at least 0, whose bits are ordered
like an integer. All three cuts keep the tokens up to some key, the *edge*:

    min-p    the depth of its floor
    top-k    the largest key below which fewer than k tokens lie
    top-p    the largest key below which less than p of the mass lies that the other two leave

1. ``tally_kernel`` counts tokens and mass below ``BINS`` keys, in every block.
2. ``bracket_kernel`` finds the bins that the edges of top-k and top-p lie in.
3. ``collect_kernel`` gathers the keys in these bins: some dozens of a chat's logits, many of flat ones without top-k.
4. ``edge_kernel`` searches the edges among these, with ``WAYS`` trial keys a pass.
5. ``cut_kernel`` removes the tokens beyond the edge.

Typical sampling finds its edge in the same way, with distances from the mean depth as keys (``truncate``).

Masses are the integers of ``sampling.masses``: sums do not depend on their order, and the kept tokens are the host's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.core.rows import RowState
from paceline.core.sampling import LOG2_E, TWO_TO
from paceline.core.truncation import WEIGHTLESS, WIDEST, Moments
from paceline.kernels.gpu.draw import Blocks, block_maxima, scaled_logits

WARPS = 8
BINS = 16
WAYS = 8
CHUNK = 256  # tokens per step of a tally or a search, whose accumulators are BINS or WAYS times as many
COLUMNS = 16  # room for what ``bracket_kernel`` stores of a line
_INFINITE = tl.constexpr(0x7F800000)  # the key of -inf
_OPTIONS = {"num_warps": WARPS, "enable_fp_fusion": False}
_ONE = tl.constexpr(1 << 43)  # a token, above the mass of a whole block: 2^12 tokens of at most 2^30
_LOG2_E = tl.constexpr(LOG2_E)
_P5, _P4, _P3, _P2, _P1, _P0 = (tl.constexpr(coefficient) for coefficient in TWO_TO)


@triton.jit
def mass_of(scaled: tl.tensor) -> tl.tensor:
    """``sampling.masses`` as float32, to the bit: every product and sum is rounded (the launch disables fusion)."""
    exponent = tl.maximum(scaled * _LOG2_E, -64.0)
    whole = (exponent + 12582912.0) - 12582912.0  # to the nearest, ties to even
    part = exponent - whole
    power = part * _P5 + _P4
    power = power * part + _P3
    power = power * part + _P2
    power = power * part + _P1
    power = power * part + _P0
    scale = ((whole.to(tl.int32) + 157) << 23).to(tl.float32, bitcast=True)
    mass = power * scale
    # below 2^23 to the nearest, ties to even; beyond it is whole
    return tl.where(mass < 8388608.0, (mass + 8388608.0) - 8388608.0, mass)


@triton.jit
def key_of(scaled: tl.tensor) -> tl.tensor:
    """The depths of scaled logits (at most 0) as int32 in the same order. NaN lies beyond ``_INFINITE``."""
    return scaled.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def centred(key: tl.tensor, centre: tl.tensor) -> tl.tensor:
    """The distance of a depth from the mean depth, as a key."""
    return key_of(tl.abs(key.to(tl.float32, bitcast=True) - centre))


@triton.jit
def mass_at(key: tl.tensor) -> tl.tensor:
    """The mass of a token with this key."""
    return mass_of(-key.to(tl.float32, bitcast=True))


@triton.jit
def deepest(edge: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """The depth of the lowest logit whose key is at most ``edge``, before temperature, as a key; -1 for edge -1.

    With it a pass over the vocabulary needs no division.
    """
    low = tl.where(edge == _INFINITE, _INFINITE, -1)
    high = tl.where(edge < 0, -1, tl.maximum(low, _INFINITE - 1))  # an infinite depth has an infinite key
    divisor = tl.where(temperature == 0.0, 1.0, temperature)
    largest = tl.minimum(divisor, 1.0) * 3e38  # a quotient beyond would be infinite
    way = tl.arange(0, 32)
    while low < high:
        trial = tl.minimum(low + (way + 1) * ((high - low + 31) // 32), high)
        scaled = tl.div_rn(tl.minimum(trial.to(tl.float32, bitcast=True), largest), divisor)
        within = key_of(scaled) <= edge
        low, high = tl.max(tl.where(within, trial, low), 0), tl.min(tl.where(within, high, trial - 1), 0)
    return low


@triton.jit(do_not_specialize=["per_row"])
def bounds_kernel(
    maxima: tl.tensor,
    temperatures: tl.tensor,
    slots: tl.tensor,
    tops: tl.tensor,
    bounds: tl.tensor,
    per_row: tl.tensor,
    BLOCKS: tl.constexpr,
    BLOCKS_UP: tl.constexpr,
    BINS: tl.constexpr,
) -> None:
    """Grid (N): the largest logit -> tops [N]; upper bounds of bins as keys -> bounds [N, BINS] int32, ascending.

    The last is infinite. Their unit is how far the blocks' largest logits lie below the largest of all, on average: few
    tokens are within it, and most within five, for any scale of the logits. Blocks far below, such as masked ones, do
    not count.
    """
    line = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + tl.load(slots + line // per_row))
    block = tl.arange(0, BLOCKS_UP)
    best = tl.load(maxima + line * BLOCKS + block, mask=block < BLOCKS, other=float("-inf"))
    top = tl.max(best, 0)
    some = best > float("-inf")
    depth = tl.where(some, top - best, 0.0)
    unit = tl.sum(depth, 0) / tl.maximum(tl.sum(some.to(tl.float32), 0), 1.0)
    near = some & (depth <= 2 * unit)
    unit = tl.sum(tl.where(near, depth, 0.0), 0) / tl.maximum(tl.sum(near.to(tl.float32), 0), 1.0)
    place = tl.arange(0, BINS)
    bound = unit * ((place + 1) * (place + 1)).to(tl.float32) * 0.03125
    bound = bound / tl.where(temperature == 0.0, 1.0, temperature)
    tl.store(tops + line, top)
    last = (place == BINS - 1) | (bound != bound)
    tl.store(bounds + line * BINS + place, tl.where(last, _INFINITE, key_of(bound)))


@triton.jit(do_not_specialize=["per_row"])
def tally_kernel(
    logits: tl.tensor,
    tops: tl.tensor,
    temperatures: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    slots: tl.tensor,
    centres: tl.tensor,
    bounds: tl.tensor,
    tallies: tl.tensor,
    line_stride: tl.tensor,
    vocab: tl.tensor,
    per_row: tl.tensor,
    CENTRED: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    BINS: tl.constexpr,
) -> None:
    """Grid (N, blocks): tokens below each bound (in units of ``_ONE``) and their mass -> tallies [N, blocks, BINS].

    CENTRED: for typical sampling, see ``truncate``. Lines without top-k and top-p are left out.

    A thread adds up BLOCK / CHUNK tokens, at most 32, in two float32 whose sums stay exact: their number and 13 bits of
    the masses in one, the other bits in another. That is three instructions for each bound and token; with integers
    they are five, at half the rate.
    """
    line, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + line // per_row)
    wanted = tl.load(top_p + slot) < 1.0
    if not CENTRED:
        wanted = wanted | (tl.load(top_k + slot) > 0)
    if wanted:
        temperature, top = tl.load(temperatures + slot), tl.load(tops + line)
        own, bins = logits + line * line_stride, tl.arange(0, BINS)
        bound = tl.load(bounds + line * BINS + bins).to(tl.float32, bitcast=True)
        low, high = tl.zeros([BINS, CHUNK], tl.float32), tl.zeros([BINS, CHUNK], tl.float32)
        for start in range(0, BLOCK, CHUNK):
            column = block * BLOCK + start + tl.arange(0, CHUNK)
            x = tl.load(own + column, mask=column < vocab, other=float("-inf")).to(tl.float32)
            score = scaled_logits(x, top, temperature)
            mass, depth = mass_of(score), -score
            if CENTRED:
                depth = tl.abs(depth - tl.load(centres + line))
            below = tl.where(depth[None, :] < bound[:, None], 1.0, 0.0)
            upper = tl.floor(mass * 0.0001220703125)
            low = tl.fma(below, (tl.fma(upper, -8192.0, mass) + 262144.0)[None, :], low)
            high = tl.fma(below, upper[None, :], high)
        sums = low.to(tl.int32)
        packed = (high.to(tl.int64) << 13) + (sums & 262143) + (sums >> 18).to(tl.int64) * _ONE
        tl.store(tallies + (line * BLOCKS + block) * BINS + bins, tl.sum(packed, 1))


@triton.jit
def highest(values: tl.tensor, chosen: tl.tensor) -> tl.tensor:
    """The largest chosen value, at least 0."""
    return tl.max(tl.where(chosen, values, 0), 0)


@triton.jit
def next_bound(bound: tl.tensor, chosen: tl.tensor) -> tl.tensor:
    """The smallest chosen bound; infinite if there is none."""
    return tl.min(tl.where(chosen, bound, _INFINITE), 0)


@triton.jit(do_not_specialize=["per_row"])
def bracket_kernel(
    tallies: tl.tensor,
    bounds: tl.tensor,
    temperatures: tl.tensor,
    floors: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    slots: tl.tensor,
    brackets: tl.tensor,
    per_row: tl.tensor,
    CENTRED: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCKS_UP: tl.constexpr,
    BINS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Grid (N): what the tallies say of the edges -> brackets [N, COLUMNS] int64.

    0, 1: depths before temperature (if ``CENTRED``, keys): the keys beyond the first and up to the second must be known
    one by one. 2: how many were collected, 0. 3, 4: smallest and largest possible edge of top-k. 5, 6: of top-p. 7, 8:
    tokens and mass below the keys to know. 9: mass of the line, or -1 if the mass that top-k and min-p leave must be
    summed.
    """
    line = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + line // per_row)
    most, share = tl.load(top_k + slot), tl.load(top_p + slot)
    floor = key_of(tl.load(floors + slot))
    if CENTRED:
        most, floor = most * 0, floor * 0 + _INFINITE
    lowest, beyond = tl.full([], _INFINITE, tl.int32), tl.full([], 0, tl.int32)
    k_low, k_high, p_low, p_high = lowest, lowest, lowest, lowest
    count_above, mass_above = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
    known = tl.full([], -1, tl.int64)
    if (most > 0) | (share < 1.0):
        bins, block = tl.arange(0, BINS), tl.arange(0, BLOCKS_UP)
        bound = tl.load(bounds + line * BINS + bins)
        place = (line * BLOCKS + block)[:, None] * BINS + bins[None, :]
        packed = tl.load(tallies + place, mask=(block < BLOCKS)[:, None], other=0)
        count, mass = tl.sum(packed >> 43, 0), tl.sum(packed & (_ONE - 1), 0)
        if most > 0:
            k_low, k_high = highest(bound, count < most), next_bound(bound, count >= most)
            lowest, beyond = k_low, k_high
        if share < 1.0:
            least, largest = tl.minimum(k_low, floor), tl.minimum(tl.maximum(k_high - 1, k_low), floor)
            total = tl.max(mass, 0)
            part = share.to(tl.float64)
            fewest = tl.maximum(part * highest(mass, bound <= least).to(tl.float64), 1.0)
            widest = tl.maximum(part * tl.min(tl.where(bound > largest, mass, total), 0).to(tl.float64), 1.0)
            p_low = highest(bound, mass.to(tl.float64) < fewest)
            p_high = next_bound(bound, mass.to(tl.float64) >= widest)
            lowest, beyond = tl.minimum(lowest, p_low), tl.maximum(beyond, p_high)
            if least == _INFINITE:
                known = total
            else:
                lowest = tl.minimum(lowest, highest(bound, bound <= least))
                beyond = tl.maximum(beyond, next_bound(bound, bound > largest))
        count_above, mass_above = highest(count, bound <= lowest), highest(mass, bound <= lowest)
    out = brackets + line * COLUMNS
    temperature = tl.load(temperatures + slot)
    if lowest < beyond:
        lowest, beyond = lowest - 1, beyond - 1
        if not CENTRED:
            lowest, beyond = deepest(lowest, temperature), deepest(beyond, temperature)
        tl.store(out, lowest.to(tl.int64))
        tl.store(out + 1, beyond.to(tl.int64))
    else:
        tl.store(out, tl.full([], 0, tl.int64))
        tl.store(out + 1, tl.full([], 0, tl.int64))
    tl.store(out + 2, tl.full([], 0, tl.int64))
    tl.store(out + 3, k_low.to(tl.int64))
    tl.store(out + 4, tl.maximum(k_high - 1, k_low).to(tl.int64))
    tl.store(out + 5, p_low.to(tl.int64))
    tl.store(out + 6, tl.maximum(p_high - 1, p_low).to(tl.int64))
    tl.store(out + 7, count_above)
    tl.store(out + 8, mass_above)
    tl.store(out + 9, known)


@triton.jit(do_not_specialize=["per_row"])
def collect_kernel(
    logits: tl.tensor,
    tops: tl.tensor,
    temperatures: tl.tensor,
    slots: tl.tensor,
    centres: tl.tensor,
    brackets: tl.tensor,
    keys: tl.tensor,
    line_stride: tl.tensor,
    vocab: tl.tensor,
    per_row: tl.tensor,
    CENTRED: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Grid (N, blocks): keys of the tokens in the line's bracket, in any order -> the first of keys [N, V] int32."""
    line, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    above, last = tl.load(brackets + line * COLUMNS).to(tl.int32), tl.load(brackets + line * COLUMNS + 1).to(tl.int32)
    if above < last:
        column, top = block * BLOCK + tl.arange(0, BLOCK), tl.load(tops + line)
        own = logits + line * line_stride
        x = tl.load(own + column, mask=column < vocab, other=float("-inf")).to(tl.float32)
        temperature = tl.load(temperatures + tl.load(slots + line // per_row))
        if CENTRED:
            at = centred(key_of(scaled_logits(x, top, temperature)), tl.load(centres + line))
        else:
            at = key_of(tl.where(x == float("inf"), 0.0, x - top))
        chosen = (at > above) & (at <= last)
        count = tl.sum(chosen.to(tl.int32), 0)
        if count > 0:
            first = tl.atomic_add(brackets + line * COLUMNS + 2, count.to(tl.int64), sem="relaxed")
            place = first + tl.cumsum(chosen.to(tl.int32), 0) - 1
            tl.store(keys + line * vocab + place, key_of(scaled_logits(x, top, temperature)), mask=chosen)


@triton.jit
def edge_in(
    keys: tl.tensor,
    count: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    above: tl.tensor,
    limit: tl.tensor,
    centre: tl.tensor,
    IN_MASS: tl.constexpr,
    CENTRED: tl.constexpr,
    CHUNK: tl.constexpr,
    WAYS: tl.constexpr,
) -> tl.tensor:
    """The largest key from low to high (int64) below which less than ``limit`` (float64) lies. It does below ``low``.

    keys: ``count`` of them, and ``above`` lies below all. IN_MASS: count mass; else tokens.
    """
    way = tl.arange(0, WAYS)
    while low < high:
        trial = tl.minimum(low + (way + 1) * ((high - low + WAYS - 1) // WAYS), high)
        sums = tl.zeros([WAYS, CHUNK], tl.int64)
        for start in range(0, count, CHUNK):
            place = start + tl.arange(0, CHUNK)
            key = tl.load(keys + place, mask=place < count, other=_INFINITE)
            weight = mass_at(key).to(tl.int32) if IN_MASS else tl.full([CHUNK], 1, tl.int32)
            at = centred(key, centre) if CENTRED else key
            sums += tl.where(at[None, :] < trial.to(tl.int32)[:, None], weight[None, :], 0).to(tl.int64)
        fits = (above + tl.sum(sums, 1)).to(tl.float64) < limit
        low = tl.max(tl.where(fits, trial, low), 0)
        high = tl.min(tl.where(fits, high, trial - 1), 0)
    return low


@triton.jit(do_not_specialize=["per_row"])
def edge_kernel(
    keys: tl.tensor,
    brackets: tl.tensor,
    temperatures: tl.tensor,
    floors: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    slots: tl.tensor,
    centres: tl.tensor,
    edges: tl.tensor,
    vocab: tl.tensor,
    per_row: tl.tensor,
    CENTRED: tl.constexpr,
    CHUNK: tl.constexpr,
    COLUMNS: tl.constexpr,
    WAYS: tl.constexpr,
) -> None:
    """Grid (N): the largest depth that stays, before temperature, as a key -> edges [N] int32.

    CENTRED: the largest distance from the mean depth (``centres``), after temperature.
    """
    line = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + line // per_row)
    own, bracket = keys + line * vocab, brackets + line * COLUMNS
    most, share = tl.load(top_k + slot), tl.load(top_p + slot)
    count = tl.load(bracket + 2).to(tl.int32)
    edge, centre = key_of(tl.load(floors + slot)).to(tl.int64), tl.load(centres + line)
    if CENTRED:
        most, edge = most * 0, edge * 0 + _INFINITE
    if most > 0:
        low, high, above = tl.load(bracket + 3), tl.load(bracket + 4), tl.load(bracket + 7)
        top = edge_in(own, count, low, high, above, most.to(tl.float64), centre, False, False, CHUNK, WAYS)
        edge = tl.minimum(edge, top)
    if share < 1.0:
        above, total = tl.load(bracket + 8), tl.load(bracket + 9)
        if total < 0:
            left = tl.zeros([CHUNK], tl.int64)
            for start in range(0, count, CHUNK):
                place = start + tl.arange(0, CHUNK)
                key = tl.load(own + place, mask=place < count, other=_INFINITE)
                left += tl.where(key <= edge, mass_at(key), 0.0).to(tl.int64)
            total = above + tl.sum(left, 0)
        limit = tl.maximum(share.to(tl.float64) * total.to(tl.float64), 1.0)  # the most likely token stays
        low, high = tl.load(bracket + 5), tl.load(bracket + 6)
        nucleus = edge_in(own, count, low, high, above, limit, centre, True, CENTRED, CHUNK, WAYS)
        edge = tl.minimum(edge, nucleus)
    last = edge.to(tl.int32)
    if not CENTRED:
        last = deepest(last, tl.load(temperatures + slot))
    tl.store(edges + line, last)


@triton.jit
def cut_kernel(
    logits: tl.tensor,
    tops: tl.tensor,
    edges: tl.tensor,
    out: tl.tensor,
    line_stride: tl.tensor,
    vocab: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Grid (N, blocks): the logits -> out [N, V] float32, -inf beyond the line's edge. NaN stays."""
    line, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column, own = block * BLOCK + tl.arange(0, BLOCK), logits + line * line_stride
    x = tl.load(own + column, mask=column < vocab, other=float("-inf")).to(tl.float32)
    depth = key_of(x - tl.load(tops + line))
    stays = (depth <= tl.load(edges + line)) | (depth > _INFINITE)  # infinity less infinity stays, too
    tl.store(out + line * vocab + column, tl.where(stays, x, float("-inf")), mask=column < vocab)


@triton.jit
def rounded(x: tl.tensor) -> tl.tensor:
    """float32 from 0 to 2^22 -> the nearest int64, ties to even."""
    return ((x + 12582912.0) - 12582912.0).to(tl.int64)


@triton.jit(do_not_specialize=["per_row"])
def moments_kernel(
    logits: tl.tensor,
    tops: tl.tensor,
    temperatures: tl.tensor,
    slots: tl.tensor,
    moments: tl.tensor,
    line_stride: tl.tensor,
    vocab: tl.tensor,
    per_row: tl.tensor,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    WEIGHTLESS: tl.constexpr,
    WIDEST: tl.constexpr,
) -> None:
    """Grid (N, blocks): a block's part of ``truncation.Moments`` -> moments [5, N, blocks] int64."""
    line, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature, top = tl.load(temperatures + tl.load(slots + line // per_row)), tl.load(tops + line)
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocab
    x = tl.load(logits + line * line_stride + column, mask=inside, other=float("-inf")).to(tl.float32)
    score = scaled_logits(x, top, temperature)
    mass = tl.where(inside, mass_of(score), 0.0).to(tl.int64)
    depth = rounded(tl.minimum(-score, WEIGHTLESS) * 65536.0)
    finite = (top - x < float("inf")).to(tl.int64)
    distance = rounded(tl.minimum(top - x, WIDEST) * 4096.0) * finite
    out, step = moments + line * BLOCKS + block, tl.num_programs(0).to(tl.int64) * BLOCKS
    tl.store(out, tl.sum(mass, 0))
    tl.store(out + step, tl.sum(mass * depth, 0))
    tl.store(out + 2 * step, tl.sum(finite, 0))
    tl.store(out + 3 * step, tl.sum(distance, 0))
    tl.store(out + 4 * step, tl.sum(distance * distance, 0))


@triton.jit(do_not_specialize=["per_row"])
def truncate_kernel(
    logits: tl.tensor,
    tops: tl.tensor,
    temperatures: tl.tensor,
    slots: tl.tensor,
    centres: tl.tensor,
    radii: tl.tensor,
    depths: tl.tensor,
    out: tl.tensor,
    line_stride: tl.tensor,
    vocab: tl.tensor,
    per_row: tl.tensor,
    LEAST: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Grid (N, blocks): remove tokens that are not typical or deeper than depths [N]: logits -> out [N, V] float32.

    LEAST: the smallest depth of the block's typical tokens -> out [N, blocks] instead.
    """
    line, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature, top = tl.load(temperatures + tl.load(slots + line // per_row)), tl.load(tops + line)
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocab
    x = tl.load(logits + line * line_stride + column, mask=inside, other=float("-inf")).to(tl.float32)
    key = key_of(scaled_logits(x, top, temperature))
    depth = key.to(tl.float32, bitcast=True)
    typical = centred(key, tl.load(centres + line)) <= tl.load(radii + line)
    if LEAST:
        tl.store(out + line * BLOCKS + block, tl.min(tl.where(typical & inside, depth, float("inf")), 0))
    else:
        stays = (typical & (depth <= tl.load(depths + line))) | (key > _INFINITE)
        tl.store(out + line * vocab + column, tl.where(stays, x, float("-inf")), mask=inside)


@dataclass(frozen=True)
class Search:
    """The launches that find lines' edges (this module's steps 1 to 4).

    lines: logits [N, V]. tops: the largest of each, [N]. bounds: of bins, [N, BINS].
    """

    lines: Tensor
    rows: RowState
    blocks: Blocks
    tops: Tensor
    bounds: Tensor

    @staticmethod
    def of(lines: Tensor, rows: RowState, blocks: Blocks) -> Search:
        count, new = len(lines), lines.new_empty
        tops, bounds = new(count, dtype=torch.float32), new((count, BINS), dtype=torch.int32)
        bounds_kernel[(count,)](
            block_maxima(lines, blocks)[0], rows.tables.temperature, rows.slots.index, tops, bounds, count // rows.rows,
            BINS=BINS, num_warps=1, **blocks.shape,
        )  # fmt: skip
        return Search(lines, rows, blocks, tops, bounds)

    @property
    def size(self) -> tuple[int, int, int]:
        """Stride of the lines, tokens, and lines per row."""
        return self.lines.stride(0), self.blocks.vocab, len(self.lines) // self.rows.rows

    def edges(self, keys: Tensor, share: Tensor, centres: Tensor | None = None) -> Tensor:
        """Return the edges [N] int32. keys: memory [N, V] int32. share: [R] float32, top-p's or typical sampling's.

        centres: mean depths [N] float32, for typical sampling, in which min-p and top-k have no part.
        """
        lines, blocks, of, slots = self.lines, self.blocks, self.rows.tables, self.rows.slots.index
        count, new, per_row = len(lines), lines.new_empty, self.size[-1]
        tallies = new((count, blocks.count, BINS), dtype=torch.int64)
        brackets, edges = new((count, COLUMNS), dtype=torch.int64), new(count, dtype=torch.int32)
        centre, kind = self.tops if centres is None else centres, {"CENTRED": centres is not None}
        grid, chunk = (count, blocks.count), min(CHUNK, blocks.size)
        tally_kernel[grid](
            lines, self.tops, of.temperature, of.top_k, share, slots, centre, self.bounds, tallies, *self.size,
            BLOCKS=blocks.count, BLOCK=blocks.size, CHUNK=chunk, BINS=BINS, **kind, **_OPTIONS,
        )  # fmt: skip
        bracket_kernel[(count,)](
            tallies, self.bounds, of.temperature, of.floor, of.top_k, share, slots, brackets, per_row, BINS=BINS,
            COLUMNS=COLUMNS, num_warps=1, **kind, **blocks.shape,
        )  # fmt: skip
        collect_kernel[grid](
            lines, self.tops, of.temperature, slots, centre, brackets, keys, *self.size, BLOCK=blocks.size,
            COLUMNS=COLUMNS, **kind, **_OPTIONS,
        )  # fmt: skip
        edge_kernel[(count,)](
            keys, brackets, of.temperature, of.floor, of.top_k, share, slots, centre, edges, blocks.vocab, per_row,
            CHUNK=chunk, COLUMNS=COLUMNS, WAYS=WAYS, **kind, **_OPTIONS,
        )  # fmt: skip
        return edges


def cut(lines: Tensor, rows: RowState, blocks: Blocks) -> Tensor:
    """Remove what the rows' min-p, top-k and top-p remove: logits [N, V] -> [N, V] float32, -inf where removed.

    The keys lie in the memory of the result until that is written.
    """
    search, out = Search.of(lines, rows, blocks), lines.new_empty(lines.shape, dtype=torch.float32)
    edges = search.edges(out.view(torch.int32), rows.tables.top_p)
    cut_kernel[(len(lines), blocks.count)](
        lines, search.tops, edges, out, *search.size[:2], BLOCK=blocks.size, **_OPTIONS
    )
    return out


def truncate(lines: Tensor, rows: RowState, blocks: Blocks) -> Tensor:
    """Remove what typical sampling, epsilon, eta and top-n-sigma remove (``core.truncation``): [N, V] -> float32.

    A token's key is then the distance of its depth from the mean depth: tokens are typical up to some distance.
    """
    search, of, slots = Search.of(lines, rows, blocks), rows.tables, rows.slots.index
    count, grid, new = len(lines), (len(lines), blocks.count), lines.new_empty
    parts, out = new((5, count, blocks.count), dtype=torch.int64), new(lines.shape, dtype=torch.float32)
    kept = lines, search.tops, of.temperature, slots
    options = {"BLOCKS": blocks.count, "BLOCK": blocks.size, **_OPTIONS}
    moments_kernel[grid](*kept, parts, *search.size, WEIGHTLESS=WEIGHTLESS, WIDEST=WIDEST, **options)
    moments = Moments(*parts.sum(-1).view(5, rows.rows, -1, 1))
    centres = moments.mean_depth.float().flatten()
    radii = search.edges(out.view(torch.int32), of.typical_p, centres)
    least = new((count, blocks.count), dtype=torch.float32)
    truncate_kernel[grid](*kept, centres, radii, centres, least, *search.size, LEAST=True, **options)
    greedy = (rows.values.temperature == 0)[:, None].expand(-1, search.size[-1]).flatten()  # which keep every token
    radii = radii.masked_fill(greedy, _INFINITE.value)
    limits = moments.deepest(rows.values.truncation, rows.values.temperature).flatten()
    depths = torch.maximum(limits, least.amin(-1)).masked_fill(greedy, torch.inf)
    truncate_kernel[grid](*kept, centres, radii, depths, out, *search.size, LEAST=False, **options)
    return out
