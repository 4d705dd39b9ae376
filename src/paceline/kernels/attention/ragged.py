"""All rows in one Triton launch, each over its own length: no padding, no loop over rows, no read by the host.

Shapes: B rows, L new tokens per row, H heads, G key/value heads, P positions, D width of a key, V of a value. One
    program takes one row, one key head, a tile of the H / G x L queries that share it (packed along the tile's first
    axis), and one split of the row's positions. A second kernel joins the splits (Flash-Decoding's reduction, here for
    more than one query).

The kernel computes a row's splits from the positions of its queries, so lengths stay on the device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.core.eight_bits import LARGEST, vector_width
from paceline.kernels.attention.base import PLAIN, AttentionTerms, Plan
from paceline.kernels.gpu.launch import capability, multiprocessors, shared_memory

_LOG2_E = 1.4426950408889634
_SMALLEST_TILE = 16  # smallest tile side that tl.dot multiplies
_JOINED_AT_ONCE = 16


# Arguments that vary between prompts and batches are not specialised, so a new length never recompiles the kernel.
@triton.jit(do_not_specialize=["longest", "window", "cap", "rows_times_heads", "new_tokens", "splits", "blocks"])
def attend_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    k_scales: tl.tensor,
    v_scales: tl.tensor,
    positions: tl.tensor,
    cache_rows: tl.tensor,
    pages: tl.tensor,
    live: tl.tensor,
    tree: tl.tensor,
    partial: tl.tensor,
    levels: tl.tensor,
    out: tl.tensor,
    sinks: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    longest: tl.tensor,
    window: tl.tensor,
    rows_times_heads: tl.tensor,
    q_row: tl.tensor,
    q_head: tl.tensor,
    q_token: tl.tensor,
    k_row: tl.tensor,
    k_head: tl.tensor,
    k_position: tl.tensor,
    v_row: tl.tensor,
    v_head: tl.tensor,
    v_position: tl.tensor,
    new_tokens: tl.tensor,
    splits: tl.tensor,
    blocks: tl.tensor,
    GROUPS: tl.constexpr,
    SHARED: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    K_POSITION: tl.constexpr,
    V_POSITION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SPLIT_SIZE: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    TREE: tl.constexpr,
    HEAD_TILES: tl.constexpr,
    IDLE_ROWS: tl.constexpr,
    SCALED: tl.constexpr,
    PAGE: tl.constexpr,
) -> None:
    """Grid (splits, B * G, query tiles) -> partial [splits, B, L, H, V] and levels [splits, B, L, H], both float32.

    With one split the kernel writes out [B, L, H, V] itself.

    tree: with TREE "ancestors", [B, L, L] int8: whether a new token (second dimension) sees another (third). With TREE
        "paths" a tile holds queries of one token only (HEAD_TILES tiles per token) and visits its keys in the order of
        positions: tree [B, L, L] int32 holds the indices of the new tokens on its path. Each token then loads its own
        keys, and gets the bits of plain decoding.

    cache_rows: [B] int64, each row's place in k and v.

    pages: with PAGE positions in a page, [R, blocks] int32: k and v are [pages, G, PAGE, D], and a tile of keys lies in
        one page, because PAGE is a multiple of BLOCK_N. Page 0 stands for none, and is not read. K_POSITION and
        V_POSITION are then k_position and v_position, which in a page of known size saves a quarter of the addresses'
        instructions. PAGE 0: each of the R rows is a page.

    live: with IDLE_ROWS, [1] int64: rows from this number on are
        idle. They read no keys, and their result is 0.

    A tile reads keys from its first query's window up to its last query's position, not up to its row's.

    levels: base-2 logarithm of the sum of the split's weights, -inf where it holds no visible key.

    sinks: with SINKS, [H] float32, times log2(e); with several splits the second kernel adds them.

    scale: of the scores, times log2(e). With CAPPED, the scores are cap * tanh(product * scale).

    k_scales, v_scales: with SCALED, k and v as float32: a vector's scale lies behind its elements of 8 bits.

    SPLIT_SIZE: positions per split, counted from position 0; 0 shares each row's blocks evenly among the splits.
    """
    split = tl.program_id(0)
    row = (tl.program_id(1) // GROUPS).to(tl.int64)
    group = (tl.program_id(1) % GROUPS).to(tl.int64)
    cache_row = tl.load(cache_rows + row)
    pages_of_row = pages + cache_row * blocks
    place = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    real = place < SHARED * new_tokens
    head, token = group * SHARED + place // new_tokens, place % new_tokens
    alone = tl.program_id(2) // HEAD_TILES
    if TREE == "paths":
        place = (tl.program_id(2) % HEAD_TILES) * BLOCK_M + tl.arange(0, BLOCK_M)
        real = place < SHARED
        head, token = group * SHARED + place, place * 0 + alone
    column = tl.arange(0, BLOCK_D)
    inside = column < DIM
    value_column = tl.arange(0, BLOCK_V)
    in_value = value_column < VALUE_DIM

    query_at = tl.load(positions + row * new_tokens + token, mask=real, other=-1).to(tl.int32)
    base = tl.load(positions + row * new_tokens).to(tl.int32)
    first = base
    last = tl.max(query_at, 0)
    if TREE == "none":
        first = tl.min(tl.where(real, query_at, 2147483647), 0)
    if TREE == "ancestors":  # the new keys lie side by side from the root's position on, whatever their own positions
        last = base + new_tokens - 1
    end = tl.minimum(last + 1, longest)
    if IDLE_ROWS:
        end = tl.where(row < tl.load(live), end, 0)
    begin = 0
    if WINDOWED:
        begin = tl.maximum(first - window + 1, 0) // BLOCK_N * BLOCK_N
    if SPLIT_SIZE > 0:
        start = tl.maximum(split * SPLIT_SIZE, begin)
        stop = tl.minimum((split + 1) * SPLIT_SIZE, end)
    else:
        share = tl.cdiv(tl.cdiv(end - begin, BLOCK_N), splits) * BLOCK_N
        start = begin + split * share
        stop = tl.minimum(start + share, end)

    k_step, v_step = k_position, v_position
    if PAGE > 0:
        k_step, v_step = K_POSITION, V_POSITION
    q_place = q + row * q_row + head[:, None] * q_head + token[:, None] * q_token + column[None, :]
    queries = tl.load(q_place, mask=real[:, None] & inside[None, :], other=0.0)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    if SINKS:  # noqa: SIM102 (known when the kernel is compiled, unlike the number of splits)
        if splits == 1:
            top = tl.load(sinks + head, mask=real, other=float("-inf"))
            total += 1.0
    for block in range(start, stop, BLOCK_N):
        key_at = block + tl.arange(0, BLOCK_N)
        there = key_at < stop
        page, slot = cache_row, key_at
        if TREE == "paths":
            way = tree + (row * new_tokens + alone) * new_tokens
            among = there & (key_at >= base)
            slot = tl.where(among, base + tl.load(way + key_at - base, mask=among, other=0), key_at)
            if PAGE > 0:  # the nodes of a path lie anywhere
                slot = tl.minimum(slot, blocks * PAGE - 1)
                page = tl.load(pages_of_row + slot // PAGE, mask=there, other=0).to(tl.int64)
                there = there & (page > 0)
                slot = slot % PAGE
        elif PAGE > 0:
            page = tl.load(pages_of_row + block // PAGE).to(tl.int64)
            there = key_at < tl.where(page > 0, stop, 0)
            # The same number: small tiles and wide heads have fewer registers with the first, others with the second
            slot = key_at % PAGE if BLOCK_M == 16 or BLOCK_D > 128 else block % PAGE + tl.arange(0, BLOCK_N)
        key = page * k_row + group * k_head + slot.to(tl.int64) * k_step
        keys = tl.load(k + key[None, :] + column[:, None], mask=there[None, :] & inside[:, None], other=0.0)
        scores = tl.dot(queries, keys.to(queries.dtype), input_precision="ieee") * scale
        if SCALED:
            scores = scores * tl.load(k_scales + (key + DIM) // 4, mask=there, other=0.0)[None, :]
        if CAPPED:
            scores = (2.0 * tl.sigmoid(2.0 * scores) - 1.0) * cap
        if TREE == "ancestors":
            new = key_at - base
            among = there & (new >= 0)
            line = tree + (row * new_tokens + token[:, None]) * new_tokens + new[None, :]
            kept = tl.load(line, mask=real[:, None] & among[None, :], other=0) != 0
            visible = there[None, :] & tl.where(among[None, :], kept, True)
            new_at = tl.load(positions + row * new_tokens + new, mask=among, other=0).to(tl.int32)
            key_at = tl.where(among, new_at, key_at)
        else:
            visible = there[None, :] & (key_at[None, :] <= query_at[:, None])
        if WINDOWED:
            visible = visible & (key_at[None, :] > query_at[:, None] - window)
        scores = tl.where(visible, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        level = tl.where(higher == float("-inf"), 0.0, higher)  # no visible key yet: -inf - -inf would be NaN
        weights = tl.exp2(scores - level[:, None])
        fade = tl.exp2(top - level)
        total = total * fade + tl.sum(weights, 1)
        value = page * v_row + group * v_head + slot.to(tl.int64) * v_step
        values = tl.load(v + value[:, None] + value_column[None, :], mask=there[:, None] & in_value[None, :], other=0.0)
        if SCALED:
            weights = weights * tl.load(v_scales + (value + VALUE_DIM) // 4, mask=there, other=0.0)[None, :]
        values = values.to(queries.dtype)
        mixed = mixed * fade[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        top = higher

    seen = total > 0
    mixed = mixed / tl.where(seen, total, 1.0)[:, None]
    line = (row * new_tokens + token) * (GROUPS * SHARED) + head
    if splits == 1:
        whole = real[:, None] & in_value[None, :]
        tl.store(out + line[:, None] * VALUE_DIM + value_column[None, :], mixed.to(out.dtype.element_ty), mask=whole)
    else:
        line += split.to(tl.int64) * rows_times_heads * new_tokens
        some = place < tl.where(start < stop, SHARED if TREE == "paths" else SHARED * new_tokens, 0)
        some = some[:, None] & in_value[None, :]  # a split without keys writes no result
        tl.store(partial + line[:, None] * VALUE_DIM + value_column[None, :], mixed, mask=some)
        tl.store(levels + line, tl.where(seen, top + tl.log2(tl.where(seen, total, 1.0)), float("-inf")), mask=real)


@triton.jit(do_not_specialize=["lines", "splits"])
def join_kernel(
    partial: tl.tensor,
    levels: tl.tensor,
    out: tl.tensor,
    sinks: tl.tensor,
    lines: tl.tensor,
    splits: tl.tensor,
    HEADS: tl.constexpr,
    SINKS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
) -> None:
    """Grid (B * L * H): partial [splits, lines, D] and levels [splits, lines] -> out [lines, D], in a fixed order."""
    line = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_D)
    inside = column < DIM
    top = -float("inf")
    total = 0.0
    if SINKS:
        top = tl.load(sinks + line % HEADS)
        total = 1.0
    mixed = tl.zeros([BLOCK_D], tl.float32)
    for first in range(0, splits, BLOCK_S):
        split = (first + tl.arange(0, BLOCK_S)).to(tl.int64)
        level = tl.load(levels + split * lines + line, mask=split < splits, other=float("-inf"))
        higher = tl.maximum(top, tl.max(level, 0))
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp2(level - safe)
        there = (level > float("-inf"))[:, None] & inside[None, :]
        parts = tl.load(partial + (split[:, None] * lines + line) * DIM + column[None, :], mask=there, other=0.0)
        fade = tl.exp2(top - safe)
        mixed = mixed * fade + tl.sum(parts * weight[:, None], 0)
        total = total * fade + tl.sum(weight, 0)
        top = higher
    mixed = mixed / tl.where(total > 0, total, 1.0)
    tl.store(out + line * DIM + column, mixed.to(out.dtype.element_ty), mask=inside)


@dataclass(frozen=True)
class Tiles:
    """Tile sizes. queries, positions: size of a program's tile. split: positions per split.

    None: chosen by the shape of the batch. With ``queries`` and ``split`` fixed, absolute positions fix the order of
        every sum: a query's bits do not depend on its neighbours, on their number or on the row's other queries, in a
        chain or in a tree.
    """

    queries: int | None = None
    positions: int = 64
    split: int | None = None
    warps: int = 4
    stages: int = 2

    def warps_for(self, queries: int, width: int) -> int:
        """Warps per program: doubled for the largest tile, which spills registers otherwise (docs/gpu-kernels.md)."""
        return self.warps if queries < largest_tile(width) else 2 * self.warps

    def stages_for(self, width: int, bytes_each: int) -> int:
        """Tiles of keys that a program loads at once; bytes_each: of a key's number."""
        return self.stages if width * bytes_each <= _WIDEST_PIPELINED else 1

    def positions_for(self, queries: int, width: int, bytes_each: int, device: torch.device) -> int:
        """Positions of a tile, so few that a program's shared memory suffices.

        The sizes are those that Triton 3.9 reports for compute capabilities from 7.5 to 9.0.
        """
        stages, positions = self.stages_for(width, bytes_each), self.positions
        copies_twice = bytes_each == 2 and capability(device) < _FIRST_WITH_ASYNC_COPIES

        def used(positions: int) -> int:
            lines = 2 * (queries + positions) if copies_twice else queries + stages * positions
            return lines * width * bytes_each + (0 if copies_twice else 4 * queries * positions + 64)

        while positions > _SMALLEST_TILE and used(positions) > shared_memory(device):
            positions //= 2
        return positions


FIXED = Tiles(queries=_SMALLEST_TILE, positions=64, split=256)
_MOST_SPLITS = 64
_MORE_SPLITS = 3  # splits beyond those that two programs for every multiprocessor need
_SPLIT_COST = 0.03  # of one more split, whose results are written and joined, in times of the attention without splits
# Programs on a multiprocessor by numbers of a tile of queries, from their registers on sm_90 (docs/gpu-kernels.md):
# 80, 181 and 174 a thread, of 4, 4 and 8 warps; without pages 89, 140 and 198
_AT_ONCE = {16 * 128: 5, 32 * 128: 2, 64 * 128: 1}
_LARGEST_TILE = 64  # queries of a tile
_LARGEST_NUMBERS = 64 * 128  # numbers of a tile of queries: more take too many registers
_FIRST_WITH_ASYNC_COPIES = 8, 0  # compute capability
_MOST_SCRATCH = 256 << 20  # bytes of the splits' results: more new tokens are attended to in parts
_WIDEST_PIPELINED = 512  # bytes of a head: two tiles of wider keys exceed a program's shared memory on sm_89


def join_warps(width: int) -> int:
    """Warps of a program that joins the splits of a head of ``width`` numbers."""
    return max(1, width // 256)


def largest_tile(width: int) -> int:
    """Queries of the largest tile, of heads of ``width`` numbers, a power of 2."""
    return max(_SMALLEST_TILE, min(_LARGEST_TILE, _LARGEST_NUMBERS // width))


class RaggedAttention:
    """One launch for all rows, split along the positions so that a few rows also fill the GPU.

    deterministic: tiles and splits of fixed size, so that a token's bits do not depend on the batch or on k.
    """

    name = "ragged"

    def __init__(self, *, deterministic: bool = False, tiles: Tiles | None = None) -> None:
        self.tiles = tiles or (FIXED if deterministic else Tiles())

    def plan(self, positions: Tensor, longest: int, ancestors: Tensor | None = None) -> Plan:
        """A plan without any computation: rows may have any lengths below ``longest``."""
        return Plan(positions.contiguous(), longest, None if ancestors is None else ancestors.contiguous())

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: Plan, terms: AttentionTerms = PLAIN) -> Tensor:
        rows, heads, length, dim = q.shape
        groups, value_dim, scaled = k_cache.shape[1], vector_width(v_cache), k_cache.dtype in LARGEST
        page = 0 if plan.pages is None else k_cache.shape[2]
        shared = heads // groups
        kind, tree = self._tree(plan)
        block_d, block_v = (max(_SMALLEST_TILE, triton.next_power_of_2(width)) for width in (dim, value_dim))
        widest = max(block_d, block_v)
        tile = self.tiles.queries or _tile(shared * length, q.dtype, widest)
        head_tiles = triton.cdiv(shared, tile)
        tiles = head_tiles * length if kind == "paths" else triton.cdiv(shared * length, tile)
        positions = self.tiles.positions_for(tile, widest, q.element_size(), q.device)
        assert page % positions == 0, "a tile of keys lies in one page"
        splits, split_size = self._splits(rows * groups * tiles, plan.longest, tile * widest, q.device)
        joined = splits if splits > 1 else 0
        most = _most_new_tokens(tile, joined, rows, heads, value_dim)
        if joined and length > most and plan.ancestors is None:
            plans = [replace(plan, positions=part.contiguous()) for part in torch.split(plan.positions, most, 1)]
            pieces = zip(torch.split(q, most, 2), plans, strict=True)
            return torch.cat([self.attend(piece, k_cache, v_cache, own, terms) for piece, own in pieces], 2)
        scale, window = terms.scale_of(dim), terms.window
        sinks = q if terms.sinks is None else terms.sinks.float() * _LOG2_E
        partial = torch.empty((joined, rows, length, heads, value_dim), dtype=torch.float32, device=q.device)
        levels = torch.empty((joined, rows, length, heads), dtype=torch.float32, device=q.device)
        out = torch.empty((rows, length, heads, value_dim), dtype=q.dtype, device=q.device)
        q = q if q.stride(-1) == 1 else q.contiguous()
        live = None if plan.cache_rows is None else plan.cache_rows.live
        cache_rows = torch.arange(rows, device=q.device) if plan.cache_rows is None else plan.cache_rows.index
        attend_kernel[(splits, rows * groups, tiles)](
            q,
            k_cache,
            v_cache,
            *(table.view(torch.float32) if scaled else table for table in (k_cache, v_cache)),
            plan.positions,
            cache_rows,
            cache_rows if plan.pages is None else plan.pages,
            cache_rows if live is None else live,
            tree,
            partial,
            levels,
            out,
            sinks,
            scale * _LOG2_E if terms.cap is None else scale / terms.cap,
            0.0 if terms.cap is None else terms.cap * _LOG2_E,
            plan.longest,
            0 if window is None else window,
            rows * heads,
            *q.stride()[:3],
            *k_cache.stride()[:3],
            *v_cache.stride()[:3],
            length,
            splits,
            0 if plan.pages is None else plan.pages.shape[1],
            GROUPS=groups,
            SHARED=shared,
            DIM=dim,
            VALUE_DIM=value_dim,
            K_POSITION=k_cache.stride(2) if page else 0,
            V_POSITION=v_cache.stride(2) if page else 0,
            BLOCK_M=tile,
            BLOCK_N=positions,
            BLOCK_D=block_d,
            BLOCK_V=block_v,
            SPLIT_SIZE=split_size,
            WINDOWED=window is not None,
            CAPPED=terms.cap is not None,
            SINKS=terms.sinks is not None,
            TREE=kind,
            HEAD_TILES=head_tiles,
            IDLE_ROWS=live is not None,
            SCALED=scaled,
            PAGE=page,
            num_warps=self.tiles.warps_for(tile, widest),
            num_stages=self.tiles.stages_for(widest, q.element_size()),
        )
        if joined:
            lines = rows * length * heads
            join_kernel[(lines,)](
                partial, levels, out, sinks, lines, splits, HEADS=heads, SINKS=terms.sinks is not None, DIM=value_dim,
                BLOCK_D=block_v, BLOCK_S=_JOINED_AT_ONCE, num_warps=join_warps(block_v),
            )  # fmt: skip
        return out.transpose(1, 2)

    def _tree(self, plan: Plan) -> tuple[str, Tensor]:
        """The kernel's TREE mode and its ``tree`` argument; "none" for a chain."""
        if plan.ancestors is None:
            return "none", plan.positions
        if self.tiles.split is None or plan.looks_ahead:
            return "ancestors", plan.ancestors.view(torch.int8)
        return "paths", plan.paths

    def _splits(self, programs: int, longest: int, numbers: int, device: torch.device) -> tuple[int, int]:
        """Number of splits, and their size in positions (0: each row's positions are shared evenly).

        programs: without splits. numbers: of a tile of queries.
        """
        if self.tiles.split is not None:
            return triton.cdiv(longest, self.tiles.split), self.tiles.split
        most = min(_MOST_SPLITS, triton.cdiv(longest, 2 * self.tiles.positions))
        return splits_for(programs, most, programs_at_once(numbers), multiprocessors(device)), 0


def programs_at_once(numbers: int) -> int:
    """Programs that the registers of a multiprocessor hold, of tiles of ``numbers`` numbers of queries."""
    return next((count for largest, count in _AT_ONCE.items() if numbers <= largest), 1)


def splits_for(programs: int, most: int, at_once: int, multiprocessors: int) -> int:
    """Number of splits, at most ``most``, with which the programs fill a GPU.

    Two programs for every multiprocessor if all of them run at once. If not, they run in waves, and few more splits may
    fill the last one better. at_once: programs on a multiprocessor.
    """
    places = at_once * multiprocessors
    wanted = max(1, min(-(-2 * multiprocessors // programs), most))
    if programs * wanted <= places:
        return wanted

    def cost(splits: int) -> float:
        return -(-programs * splits // places) / splits + _SPLIT_COST * splits

    return min(range(wanted, max(wanted, min(most, wanted + _MORE_SPLITS)) + 1), key=cost)


def _most_new_tokens(tile: int, splits: int, rows: int, heads: int, dim: int) -> int:
    """New tokens of a row that are attended to at once, so that the results of the splits stay small."""
    return max(tile, _MOST_SCRATCH // (4 * max(splits, 1) * rows * heads * dim))


def scratch_bytes(rows: int, heads: int, length: int, dim: int, longest: int) -> int:
    """Bytes of the splits' results with ``FIXED`` tiles, where long contexts have many.

    rows of ``length`` new tokens, which see at most ``longest`` positions.
    """
    assert FIXED.queries is not None
    assert FIXED.split is not None
    splits = triton.cdiv(longest, FIXED.split)
    if splits == 1:
        return 0
    length = min(length, _most_new_tokens(FIXED.queries, splits, rows, heads, dim))
    return 4 * int(splits) * rows * length * heads * (dim + 1)


def _tile(queries: int, dtype: torch.dtype, width: int) -> int:
    """Queries per tile, of heads of ``width`` numbers.

    float32 takes the smallest: without tensor cores, larger tiles only use up registers.
    """
    if dtype == torch.float32:
        return _SMALLEST_TILE
    return int(min(largest_tile(width), max(_SMALLEST_TILE, triton.next_power_of_2(queries))))
