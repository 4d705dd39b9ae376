"""Gated delta nets over prompts, 16 tokens at once (arXiv 2412.06464, section 3.3; arXiv 2406.06484, section 3.2).

Chunks begin at positions that are multiples of ``CHUNK``, and a chunk that a pass has whole is run here. What lies
before the first and behind the last one is run token by token (``gpu.delta_net``). So a token's bits depend on which
chunks before it were whole in a pass, but not on other rows, nor on the number of chunks in a pass.

In a chunk, with S the state before it, g the running sum of the log decays, and u the values that tokens add:

    (I + A) u = beta (v - e^g k S),   A_tj = beta_t e^(g_t - g_j) k_t k_j of j < t
    o_t = e^(g_t) q_t S + sum over j <= t of e^(g_t - g_j) (q_t k_j) u_j
    S after it = e^(g_last) S + sum of e^(g_last - g_j) k_j u_j

The first kernel makes what does not depend on S, for all chunks at once: q, k, (I + A)^-1 beta, the sums' factors and
the decays. The second one walks along the chunks. Products are three of TF32 each, whose error is about that of
float32. Log decays are summed in float64, because small differences of large sums matter. Outputs and states are those
of the recurrence in float64 but for 1e-5 of the largest number, as those of the kernel that runs token by token are.
``deterministic`` runs all tokens one by one.

Shapes: as in ``gpu.delta_net``; N chunks, C tokens in each. C is the least side of a product on tensor cores; with more
    tokens registers spill.
"""

from __future__ import annotations

from typing import NamedTuple, Self

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.core.recurrent_state import CHUNK, WINDOW, RowsPass
from paceline.kernels.delta import DeltaHeads, DeltaNet
from paceline.kernels.gpu.recurrent import causal_sum, silu

PREPARE_WARPS, WALK_WARPS = 8, 4
VALUES = 16  # columns of a state per program of the walk
_CHUNK = tl.constexpr(CHUNK)
_PRECISION = tl.constexpr("tf32x3")


@triton.jit
def whole_chunks(begin: tl.tensor, certain: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return the first node of a pass's first whole chunk, and the number of its whole chunks.

    begin: position of the first node. certain: leading nodes that may be part of a chunk.
    """
    first = ((begin + _CHUNK - 1) // _CHUNK * _CHUNK - begin).to(tl.int32)
    return first, tl.maximum(certain.to(tl.int32) - first, 0) // _CHUNK


@triton.jit
def gates_of(raw_beta: tl.tensor, raw: tl.tensor, rate: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return beta and the log decay of tokens. raw: input of the decay's softplus, with its bias."""
    beta = 1.0 / (1.0 + tl.exp(-raw_beta))
    softplus = tl.where(raw > 20.0, raw, tl.log(1.0 + tl.exp(tl.minimum(raw, 20.0))))
    return beta, rate * softplus


@triton.jit
def dot(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """a @ b with about the error of float32."""
    return tl.dot(a, b, input_precision=_PRECISION)


@triton.jit
def products_of_lines(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """a @ b.T of lines [C, D], first of their even columns, then of the odd ones: with whole lines registers spill."""
    HALF: tl.constexpr = a.shape[1] // 2
    a_even, a_odd = tl.split(tl.reshape(a, (_CHUNK, HALF, 2)))
    b_even, b_odd = tl.split(tl.reshape(b, (_CHUNK, HALF, 2)))
    return dot(a_even, tl.trans(b_even)) + dot(a_odd, tl.trans(b_odd))


@triton.jit
def unit_inverse(a: tl.tensor) -> tl.tensor:
    """(I + a)^-1 of a [C, C], which is 0 on and above its diagonal, by substitution, line by line."""
    row, column = tl.arange(0, _CHUNK)[:, None], tl.arange(0, _CHUNK)[None, :]
    inverse, turned = tl.where(row == column, 1.0, 0.0), tl.trans(a)
    for line in range(1, _CHUNK):
        factors = tl.sum(tl.where(column == line, turned, 0.0), 1)
        found = tl.sum(factors[:, None] * inverse, 0)[None, :]
        inverse = tl.where(row == line, tl.where(column == line, 1.0, 0.0) - found, inverse)
    return inverse


@triton.jit(do_not_specialize=["nodes", "chunks"])
def prepare_kernel(
    projected: tl.tensor,
    gates: tl.tensor,
    conv: tl.tensor,
    rate: tl.tensor,
    decay_bias: tl.tensor,
    tail: tl.tensor,
    inputs: tl.tensor,
    slots: tl.tensor,
    start: tl.tensor,
    applied: tl.tensor,
    certain: tl.tensor,
    keys: tl.tensor,
    squares: tl.tensor,
    decays: tl.tensor,
    projected_stride: tl.tensor,
    gates_stride: tl.tensor,
    nodes: tl.tensor,
    chunks: tl.tensor,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TAPS: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SCALE: tl.constexpr,
) -> None:
    """Grid (N, K, B): what the walk reads of a chunk (``ChunkTables``)."""
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    WIDTH: tl.constexpr = CHANNELS + 2 * VALUE_HEADS
    SHARED: tl.constexpr = VALUE_HEADS // KEY_HEADS
    chunk, key_head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    slot, begin, applied_count = tl.load(slots + row), tl.load(start + row), tl.load(applied + row).to(tl.int32)
    first, count = whole_chunks(begin, tl.load(certain + row))
    if chunk < count:
        token, key = tl.arange(0, _CHUNK), tl.arange(0, BLOCK_K)[None, :]
        is_key, node = key < KEY_DIM, first + chunk * _CHUNK + token
        own = projected + row * nodes * projected_stride
        earlier, before = inputs + slot * KEPT * WIDTH, tail + slot * (TAPS - 1) * CHANNELS
        q = causal_sum(
            own, earlier, before, slots, conv, node[:, None], applied_count, key_head * KEY_DIM + key, is_key, begin,
            projected_stride, CHANNELS, WIDTH, TAPS, False,
        )  # fmt: skip
        k = causal_sum(
            own, earlier, before, slots, conv, node[:, None], applied_count, (KEY_HEADS + key_head) * KEY_DIM + key,
            is_key, begin, projected_stride, CHANNELS, WIDTH, TAPS, False,
        )  # fmt: skip
        q, k = silu(q), silu(k)
        q = q * (tl.rsqrt(tl.sum(q * q, 1) + 1e-6) * SCALE)[:, None]
        k = k * tl.rsqrt(tl.sum(k * k, 1) + 1e-6)[:, None]
        place = (row * chunks + chunk) * KEY_HEADS + key_head
        to = keys + (2 * place * _CHUNK + token[:, None]) * BLOCK_K + key
        tl.store(to, q)
        tl.store(to + _CHUNK * BLOCK_K, k)
        qk, kk = products_of_lines(q, k), products_of_lines(k, k)
        for head in range(key_head * SHARED, (key_head + 1) * SHARED):
            of_node = gates + (row * nodes + node) * gates_stride + head
            raw_beta = tl.load(of_node).to(tl.float32)
            raw = tl.load(of_node + VALUE_HEADS).to(tl.float32) + tl.load(decay_bias + head).to(tl.float32)
            beta, log_decay = gates_of(raw_beta, raw, tl.load(rate + head))
            total = tl.cumsum(log_decay.to(tl.float64), 0)
            between = (total[:, None] - total[None, :]).to(tl.float32)
            decay = tl.exp(tl.where(token[:, None] >= token[None, :], between, float("-inf")))
            a = tl.where(token[:, None] > token[None, :], kk * decay * beta[:, None], 0.0)
            number = (row * chunks + chunk) * VALUE_HEADS + head
            square = squares + (2 * number * _CHUNK + token[:, None]) * _CHUNK + token[None, :]
            tl.store(square, unit_inverse(a) * beta[None, :])
            tl.store(square + _CHUNK * _CHUNK, qk * decay)
            to_end = tl.sum(log_decay.to(tl.float64), 0) - total
            tl.store(decays + 2 * number * _CHUNK + token, tl.exp(total.to(tl.float32)))
            tl.store(decays + (2 * number + 1) * _CHUNK + token, tl.exp(to_end.to(tl.float32)))


@triton.jit(do_not_specialize=["nodes", "chunks"])
def walk_kernel(
    projected: tl.tensor,
    conv: tl.tensor,
    state: tl.tensor,
    tail: tl.tensor,
    inputs: tl.tensor,
    slots: tl.tensor,
    start: tl.tensor,
    applied: tl.tensor,
    certain: tl.tensor,
    keys: tl.tensor,
    squares: tl.tensor,
    decays: tl.tensor,
    mixed: tl.tensor,
    projected_stride: tl.tensor,
    nodes: tl.tensor,
    chunks: tl.tensor,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TAPS: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    """Grid (B, H, blocks): the row's chunks -> mixed [B, L, H, V] float32; state [R, H, D, V] after them."""
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    WIDTH: tl.constexpr = CHANNELS + 2 * VALUE_HEADS
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot, begin, applied_count = tl.load(slots + row), tl.load(start + row), tl.load(applied + row).to(tl.int32)
    first, count = whole_chunks(begin, tl.load(certain + row))
    token, key = tl.arange(0, _CHUNK), tl.arange(0, BLOCK_K)
    value = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_key, is_value = key < KEY_DIM, value < VALUE_DIM
    cell = state + (slot * VALUE_HEADS + head) * KEY_DIM * VALUE_DIM + key[None, :] * VALUE_DIM + value[:, None]
    goes_on = (begin + first > 0).to(tl.int32)  # else the chunk is a text's first one
    current = tl.load(cell, mask=is_value[:, None] & (key < goes_on * KEY_DIM)[None, :], other=0.0)
    own = projected + row * nodes * projected_stride
    earlier, before = inputs + slot * KEPT * WIDTH, tail + slot * (TAPS - 1) * CHANNELS
    for chunk in range(count):
        node, place = first + chunk * _CHUNK + token, row * chunks + chunk
        number = place * VALUE_HEADS + head
        q_at = keys + 2 * (place * KEY_HEADS + head // (VALUE_HEADS // KEY_HEADS)) * _CHUNK * BLOCK_K
        k_at = q_at + _CHUNK * BLOCK_K
        recalled = dot(current, tl.load(k_at + token[None, :] * BLOCK_K + key[:, None]))
        v = causal_sum(
            own, earlier, before, slots, conv, node[None, :], applied_count,
            2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + value[:, None], is_value[:, None], begin, projected_stride,
            CHANNELS, WIDTH, TAPS, False,
        )  # fmt: skip
        since = tl.load(decays + 2 * number * _CHUNK + token)[None, :]
        square = squares + (2 * number * _CHUNK + token[None, :]) * _CHUNK + token[:, None]
        added = dot(silu(v) - recalled * since, tl.load(square))
        read = dot(current, tl.load(q_at + token[None, :] * BLOCK_K + key[:, None])) * since
        read += dot(added, tl.load(square + _CHUNK * _CHUNK))
        to = mixed + ((row * nodes + node[None, :]) * VALUE_HEADS + head) * VALUE_DIM + value[:, None]
        tl.store(to, read, mask=is_value[:, None])
        to_end = tl.load(decays + (2 * number + 1) * _CHUNK + token)[None, :]
        of_chunk = tl.load(decays + (2 * number + 1) * _CHUNK - 1)
        k = tl.load(k_at + token[:, None] * BLOCK_K + key[None, :])
        current = current * of_chunk + dot(added * to_end, k)
    if count > 0:
        tl.store(cell, current, mask=is_value[:, None] & is_key[None, :])


class ChunkTables(NamedTuple):
    """What the walk along chunks reads, float32.

    keys [B, N, K, 2, C, D up]: q and k, with zeros behind D, up to a power of two.
    squares [B, N, H, 2, C, C]: (I + A)^-1 beta, and the factors of u in the outputs.
    decays [B, N, H, 2, C]: from the chunk's begin to each token, and from there to its end.
    """

    keys: Tensor
    squares: Tensor
    decays: Tensor

    @classmethod
    def empty(cls, heads: DeltaHeads, rows: int, chunks: int, device: torch.device) -> Self:
        of_values = rows, chunks, heads.value_heads, 2, CHUNK
        sizes = (rows, chunks, heads.key_heads, 2, CHUNK, block_of(heads.key_dim)), (*of_values, CHUNK), of_values
        return cls(*(torch.empty(size, device=device) for size in sizes))


def block_of(width: int) -> int:
    """Return the columns of a block of ``width`` numbers: a power of two, and enough for two products."""
    return max(2 * CHUNK, 1 << (width - 1).bit_length())


def has_chunks(part: RowsPass) -> bool:
    """Whether a row of the pass may have a whole chunk of tokens that cannot be rejected."""
    certain = part.nodes if part.text else part.nodes - WINDOW
    return part.paths is None and certain >= CHUNK


def run_chunks(mixer: DeltaNet, part: RowsPass, layer: int, tensors: tuple[Tensor, Tensor, Tensor]) -> None:
    """Run the whole chunks of a padded pass, whose states before them are stored, and store the states after them.

    tensors: ``projected`` and ``gates`` of ``gpu.delta_net.delta_net``, and ``mixed`` [B L, H V] for the outputs.
    """
    states, heads, (projected, gates, mixed) = part.states, mixer.heads, tensors
    rows, chunks = len(part.slots), part.nodes // CHUNK
    tables = ChunkTables.empty(heads, rows, chunks, projected.device)
    of_slots = states.tail[layer], states.inputs[layer], part.slots, part.start, part.applied, part.certain
    sizes = {
        "KEY_HEADS": heads.key_heads, "VALUE_HEADS": heads.value_heads, "KEY_DIM": heads.key_dim,
        "VALUE_DIM": heads.value_dim, "TAPS": heads.taps, "KEPT": WINDOW,
        "BLOCK_K": block_of(heads.key_dim),
    }  # fmt: skip
    prepare_kernel[(chunks, heads.key_heads, rows)](
        projected, gates, mixer.conv, mixer.rate, mixer.bias, *of_slots, *tables, projected.stride(0), gates.stride(0),
        part.nodes, chunks, **sizes, SCALE=heads.key_dim**-0.5, num_warps=PREPARE_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    walk_kernel[(rows, heads.value_heads, triton.cdiv(heads.value_dim, VALUES))](
        projected, mixer.conv, states.state[layer], *of_slots, *tables, mixed, projected.stride(0), part.nodes, chunks,
        **sizes, BLOCK_V=VALUES, num_warps=WALK_WARPS, num_stages=1, enable_fp_fusion=False,
    )  # fmt: skip
