"""Gated delta nets over the states of slots, without snapshots: token by token, and prompts 16 tokens at once.

The contract is that of the CPU kernels (``csrc/recurrent.h``). The first kernel applies the accepted inputs of the
slot's last pass while it reads the state, runs the row's nodes, and stores the state after the certain ones. The second
one keeps inputs (``gpu.recurrent``). The third one norms and gates the outputs. Lengths and accepted counts are read on
the device, so that all three can be captured. Of a prompt the first kernel runs only what lies before its first whole
chunk and behind its last one, before and after ``gpu.delta_chunks`` ran these.

Shapes: B rows, L nodes per row, R slots, K key heads, H value heads, D key width, V value width, C channels of the
    convolution. A state is [D, V] per value head.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.core.recurrent_state import CHUNK, WINDOW, RowsPass
from paceline.kernels.delta import DeltaNet
from paceline.kernels.gpu.delta_chunks import gates_of, has_chunks, run_chunks, whole_chunks
from paceline.kernels.gpu.launch import capability
from paceline.kernels.gpu.linear import most_registers
from paceline.kernels.gpu.recurrent import VALUES, WARPS, causal_sum, keep, silu, steps_to

_CHUNK = tl.constexpr(CHUNK)


@triton.jit(do_not_specialize=["nodes"])  # a prompt of another length does not recompile it
def delta_kernel(
    projected: tl.tensor,
    gates: tl.tensor,
    conv: tl.tensor,
    rate: tl.tensor,
    decay_bias: tl.tensor,
    state: tl.tensor,
    tail: tl.tensor,
    inputs: tl.tensor,
    slots: tl.tensor,
    start: tl.tensor,
    applied: tl.tensor,
    counts: tl.tensor,
    certain: tl.tensor,
    positions: tl.tensor,
    paths: tl.tensor,
    mixed: tl.tensor,
    projected_stride: tl.tensor,
    gates_stride: tl.tensor,
    nodes: tl.tensor,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TAPS: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SCALE: tl.constexpr,
    TREE: tl.constexpr,
    NODES: tl.constexpr,
) -> None:
    """Grid (B, H, blocks): nodes -> mixed [B, L, H, V] float32; state [R, H, D, V] after the certain nodes.

    NODES: "all", "before chunks" (the whole chunks of ``gpu.delta_chunks``; none of rows without one), or "behind
        chunks" (all of rows without one).
    """
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    WIDTH: tl.constexpr = CHANNELS + 2 * VALUE_HEADS
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot, begin, applied_count = tl.load(slots + row), tl.load(start + row), tl.load(applied + row).to(tl.int32)
    count, certain_count = tl.load(counts + row).to(tl.int32), tl.load(certain + row)
    key, value = tl.arange(0, BLOCK_K), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_key, is_value = key < KEY_DIM, value < VALUE_DIM
    q_at = head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM + key
    v_at = 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + value
    own = projected + row * nodes * projected_stride
    own_gates = gates + row * nodes * gates_stride + head
    earlier = inputs + slot * KEPT * WIDTH
    before = tail + slot * (TAPS - 1) * CHANNELS
    cell = state + (slot * VALUE_HEADS + head) * KEY_DIM * VALUE_DIM + key[:, None] * VALUE_DIM + value[None, :]
    real = is_key[:, None] & is_value[None, :]
    begin_node, end_node, stored_node = -applied_count, count, certain_count - 1
    if NODES != "all":
        first_in_chunk, chunks = whole_chunks(begin, certain_count)
        if NODES == "before chunks":
            end_node = tl.where(chunks > 0, first_in_chunk, begin_node)
            stored_node = end_node - 1
        else:
            begin_node = tl.where(chunks > 0, first_in_chunk + chunks * _CHUNK, begin_node)
    goes_on = ((begin + tl.maximum(begin_node, 0) > 0) & (count > 0)).to(tl.int32)
    current = tl.load(cell, mask=real & (key < goes_on * KEY_DIM)[:, None], other=0.0)
    rate_of_head = tl.load(rate + head)
    bias_of_head = tl.load(decay_bias + head).to(tl.float32)

    for node in range(begin_node, end_node):
        last, first, path, current = steps_to(
            node, current, cell, real, row, begin, nodes, positions, paths, TREE
        )  # fmt: skip
        read = tl.zeros([BLOCK_V], dtype=tl.float32)
        for time in range(first, last + 1):
            at, place = time, applied_count + time
            is_own = place >= applied_count
            if TREE:
                at = tl.load(path + time, mask=is_own, other=0)
            q = causal_sum(
                own, earlier, before, path, conv, time, applied_count, q_at, is_key, begin, projected_stride,
                CHANNELS, WIDTH, TAPS, TREE,
            )  # fmt: skip
            k = causal_sum(
                own, earlier, before, path, conv, time, applied_count, KEY_HEADS * KEY_DIM + q_at, is_key, begin,
                projected_stride, CHANNELS, WIDTH, TAPS, TREE,
            )  # fmt: skip
            v = causal_sum(
                own, earlier, before, path, conv, time, applied_count, v_at, is_value, begin, projected_stride,
                CHANNELS, WIDTH, TAPS, TREE,
            )  # fmt: skip
            q, k, v = silu(q), silu(k), silu(v)
            q = q * (tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * SCALE)
            k = k * tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
            from_node, from_slot = own_gates + at * gates_stride, earlier + place * WIDTH + CHANNELS + head
            raw_beta = tl.load(from_node, mask=is_own, other=0.0).to(tl.float32)
            raw_beta += tl.load(from_slot, mask=place < applied_count, other=0.0)
            raw = tl.load(from_node + VALUE_HEADS, mask=is_own, other=0.0).to(tl.float32)
            raw += tl.load(from_slot + VALUE_HEADS, mask=place < applied_count, other=0.0) + bias_of_head
            beta, log_decay = gates_of(raw_beta, raw, rate_of_head)
            current = current * tl.exp(log_decay)
            recalled = tl.sum(current * k[:, None], 0)
            current = current + k[:, None] * ((v - recalled) * beta)[None, :]
            read = tl.sum(current * q[:, None], 0)
        if node >= 0:
            to = mixed + ((row * nodes + node) * VALUE_HEADS + head) * VALUE_DIM + value
            tl.store(to, read, mask=is_value)
        if node == stored_node:
            tl.store(cell, current, mask=real)


@triton.jit
def finish_kernel(
    mixed: tl.tensor,
    projected: tl.tensor,
    norm: tl.tensor,
    out: tl.tensor,
    epsilon: tl.tensor,
    projected_stride: tl.tensor,
    VALUE_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    """Grid (B L, H): mixed [B L, H, V] -> out, the norm of each head times silu of the gate behind the channels."""
    token, head, value = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BLOCK_V)
    inside, at = value < VALUE_DIM, head * VALUE_DIM + value
    x = tl.load(mixed + token * VALUE_HEADS * VALUE_DIM + at, mask=inside, other=0.0)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / VALUE_DIM + epsilon)
    x = x * tl.load(norm + value, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(projected + token * projected_stride + CHANNELS + at, mask=inside, other=0.0).to(tl.float32)
    x = x * (gate / (1.0 + tl.exp(-gate)))
    tl.store(out + token * VALUE_HEADS * VALUE_DIM + at, x.to(out.dtype.element_ty), mask=inside)


def delta_net(
    mixer: DeltaNet, part: RowsPass, layer: int, projected: Tensor, gates: Tensor, *, in_chunks: bool = True
) -> Tensor:
    """Run a padded pass through a layer -> the inputs of its second matrix [B L, H V], in the type of ``projected``.

    projected [B L, C + H V], gates [B L, 2 H]: outputs of the first matrix and of the small one. Those of padding are
    zeros. in_chunks: whether whole chunks of text are run at once, with another rounding than token by token.
    """
    heads, rows = mixer.heads, len(part.slots)
    mixed = projected.new_zeros((rows * part.nodes, heads.value_heads * heads.value_dim), dtype=torch.float32)
    if in_chunks and has_chunks(part):
        _run_nodes(mixer, part, layer, (projected, gates, mixed), "before chunks")
        run_chunks(mixer, part, layer, (projected, gates, mixed))
        _run_nodes(mixer, part, layer, (projected, gates, mixed), "behind chunks")
    else:
        _run_nodes(mixer, part, layer, (projected, gates, mixed), "all")
    keep(part, layer, projected, gates, (heads.channels, heads.taps))
    out = torch.empty_like(mixed, dtype=projected.dtype)
    finish_kernel[(rows * part.nodes, heads.value_heads)](
        mixed, projected, mixer.norm, out, mixer.epsilon, projected.stride(0), VALUE_HEADS=heads.value_heads,
        VALUE_DIM=heads.value_dim, CHANNELS=heads.channels, BLOCK_V=triton.next_power_of_2(heads.value_dim),
        num_warps=1,
    )  # fmt: skip
    return out


def _run_nodes(mixer: DeltaNet, part: RowsPass, layer: int, tensors: tuple[Tensor, Tensor, Tensor], which: str) -> None:
    """Run nodes one after the other. tensors: ``projected``, ``gates`` and ``mixed``. which: the kernel's ``NODES``."""
    states, heads, (projected, gates, mixed) = part.states, mixer.heads, tensors
    of_rows = part.slots, part.start, part.applied, part.counts, part.certain
    tree = mixed if part.positions is None else part.positions, mixed if part.paths is None else part.paths
    values = min(VALUES, triton.next_power_of_2(heads.value_dim))
    delta_kernel[(len(part.slots), heads.value_heads, triton.cdiv(heads.value_dim, values))](
        projected, gates, mixer.conv, mixer.rate, mixer.bias, states.state[layer], states.tail[layer],
        states.inputs[layer], *of_rows, *tree, mixed, projected.stride(0), gates.stride(0), part.nodes,
        KEY_HEADS=heads.key_heads, VALUE_HEADS=heads.value_heads, KEY_DIM=heads.key_dim, VALUE_DIM=heads.value_dim,
        TAPS=heads.taps, KEPT=WINDOW, BLOCK_K=triton.next_power_of_2(heads.key_dim), BLOCK_V=values,
        SCALE=heads.key_dim**-0.5, TREE=part.paths is not None, NODES=which, num_warps=WARPS, enable_fp_fusion=False,
        maxnreg=None if part.paths is None else most_registers(capability(projected.device)[0]),
    )  # fmt: skip
