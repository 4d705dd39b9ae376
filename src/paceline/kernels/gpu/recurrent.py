"""Gated delta nets over the states of slots, token by token, without snapshots.

The contract is that of the CPU kernels (``csrc/recurrent.h``). The first kernel applies the accepted inputs of the
slot's last pass while it reads the state, runs the row's nodes, and stores the state after the certain ones. The second
one stores the convolution's last inputs and the inputs of the nodes that may be rejected. The third one norms and gates
the outputs. Lengths and accepted counts are read on the device, so that all three can be captured.

Shapes: B rows, L nodes per row, R slots, K key heads, H value heads, D key width, V value width, C channels of the
    convolution. A state is [D, V] per value head. Inputs that are kept hold beta's and the decay's arguments as they
    came, not their values, so that a token takes the same steps whether it is run or applied.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.core.recurrent_state import WINDOW, RowsPass
from paceline.kernels.delta import DeltaNet

WARPS = 4
VALUES = 32  # columns of a state per program: they do not meet. With 64 and 8 warps, registers spill
COLUMNS = 256  # channels and gates per program of the second kernel


@triton.jit
def input_at(
    own: tl.tensor,
    inputs: tl.tensor,
    tail: tl.tensor,
    node: tl.tensor,
    time: tl.tensor,
    applied: tl.tensor,
    column: tl.tensor,
    inside: tl.tensor,
    begin: tl.tensor,
    own_stride: tl.tensor,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    TAPS: tl.constexpr,
) -> tl.tensor:
    """Columns of the convolution's input, float32, at a time from the pass's first node on.

    From 0 on it is the node's own, before that one of the last pass's inputs, before those one of the stored tail;
    zeros before a text, which begins at position 0.
    """
    place = applied + time
    is_own, is_kept = (place >= applied).to(tl.int32), ((place >= 0) & (place < applied)).to(tl.int32)
    is_old = ((place < 0) & (begin > 0)).to(tl.int32)  # a number: the interpreter makes no mask of a scalar and a block
    x = tl.load(own + node * own_stride + column, mask=inside & (column < is_own * WIDTH), other=0.0).to(tl.float32)
    x += tl.load(inputs + place * WIDTH + column, mask=inside & (column < is_kept * WIDTH), other=0.0)
    from_tail = tail + (TAPS - 1 + place) * CHANNELS + column
    return x + tl.load(from_tail, mask=inside & (column < is_old * WIDTH), other=0.0)


@triton.jit
def causal_sum(
    own: tl.tensor,
    inputs: tl.tensor,
    tail: tl.tensor,
    path: tl.tensor,
    conv: tl.tensor,
    time: tl.tensor,
    applied: tl.tensor,
    column: tl.tensor,
    inside: tl.tensor,
    begin: tl.tensor,
    own_stride: tl.tensor,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    TAPS: tl.constexpr,
    TREE: tl.constexpr,
) -> tl.tensor:
    """The causal convolution at a time on a node's path."""
    total = tl.zeros_like(column).to(tl.float32)
    for tap in tl.static_range(TAPS):
        at = time - (TAPS - 1) + tap
        node = at
        if TREE:
            node = tl.load(path + at, mask=applied + at >= applied, other=0)
        x = input_at(own, inputs, tail, node, at, applied, column, inside, begin, own_stride, CHANNELS, WIDTH, TAPS)
        total += x * tl.load(conv + column * TAPS + tap, mask=inside, other=0.0).to(tl.float32)
    return total


@triton.jit
def silu(x: tl.tensor) -> tl.tensor:
    """x times its sigmoid."""
    return x / (1.0 + tl.exp(-x))


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
) -> None:
    """Grid (B, H, blocks): nodes -> mixed [B, L, H, V] float32; state [R, H, D, V] after the certain nodes."""
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
    goes_on = ((begin > 0) & (count > 0)).to(tl.int32)
    current = tl.load(cell, mask=real & (key < goes_on * KEY_DIM)[:, None], other=0.0)
    rate_of_head = tl.load(rate + head)
    bias_of_head = tl.load(decay_bias + head).to(tl.float32)

    for node in range(-applied_count, count):
        last, first = node, node
        path = paths
        if TREE:
            path = paths + (row * nodes + tl.maximum(node, 0)) * nodes
            if node >= 0:
                last = (tl.load(positions + row * nodes + node) - begin).to(tl.int32)
                parent = tl.load(path + last - 1, mask=last > 0, other=-1)
                first = last
                if parent != node - 1:  # from the stored state again, through the node's ancestors
                    first = tl.minimum(last, 1)
                    tl.debug_barrier()
                    current = tl.load(cell, mask=real, other=0.0)
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
            beta = 1.0 / (1.0 + tl.exp(-raw_beta))
            softplus = tl.where(raw > 20.0, raw, tl.log(1.0 + tl.exp(tl.minimum(raw, 20.0))))
            current = current * tl.exp(rate_of_head * softplus)
            recalled = tl.sum(current * k[:, None], 0)
            current = current + k[:, None] * ((v - recalled) * beta)[None, :]
            read = tl.sum(current * q[:, None], 0)
        if node >= 0:
            to = mixed + ((row * nodes + node) * VALUE_HEADS + head) * VALUE_DIM + value
            tl.store(to, read, mask=is_value)
        if node == certain_count - 1:
            tl.store(cell, current, mask=real)


@triton.jit(do_not_specialize=["nodes"])
def keep_kernel(
    projected: tl.tensor,
    gates: tl.tensor,
    tail: tl.tensor,
    inputs: tl.tensor,
    slots: tl.tensor,
    start: tl.tensor,
    applied: tl.tensor,
    counts: tl.tensor,
    certain: tl.tensor,
    projected_stride: tl.tensor,
    gates_stride: tl.tensor,
    nodes: tl.tensor,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    TAPS: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Grid (B, blocks): tail [R, TAPS - 1, C] before the first uncertain node, inputs [R, KEPT, WIDTH] from it on."""
    row = tl.program_id(0).to(tl.int64)
    slot, begin, applied_count = tl.load(slots + row), tl.load(start + row), tl.load(applied + row).to(tl.int32)
    count, certain_count = tl.load(counts + row).to(tl.int32), tl.load(certain + row).to(tl.int32)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_channel = column < CHANNELS
    own = projected + row * nodes * projected_stride
    earlier = inputs + slot * KEPT * WIDTH
    before = tail + slot * (TAPS - 1) * CHANNELS
    if count > 0:
        for tap in tl.static_range(TAPS - 1):  # an entry comes from behind its place: ascending order loses none
            at = certain_count - (TAPS - 1) + tap
            x = input_at(
                own, earlier, before, at, at, applied_count, column, is_channel, begin, projected_stride,
                CHANNELS, WIDTH, TAPS,
            )  # fmt: skip
            tl.store(before + tap * CHANNELS + column, x, mask=is_channel)
        own_gates = gates + row * nodes * gates_stride + column - CHANNELS
        is_gate = (column >= CHANNELS) & (column < WIDTH)
        for node in range(certain_count, count):
            x = tl.load(own + node * projected_stride + column, mask=is_channel, other=0.0).to(tl.float32)
            x += tl.load(own_gates + node * gates_stride, mask=is_gate, other=0.0).to(tl.float32)
            tl.store(earlier + (node - certain_count) * WIDTH + column, x, mask=column < WIDTH)


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


def keep(part: RowsPass, layer: int, channels: Tensor, gates: Tensor, sizes: tuple[int, int]) -> None:
    """Store the convolution's last inputs, and those of nodes that may be rejected, after a layer has run.

    channels [B L, C, ...], gates [B L, ...]: the nodes' inputs, which may have more columns. sizes: C and taps.
    """
    states, rows, width = part.states, part.slots.shape[0], part.states.shape.input_width
    keep_kernel[(rows, triton.cdiv(width, COLUMNS))](
        channels, gates, states.tail[layer], states.inputs[layer], part.slots, part.start, part.applied, part.counts,
        part.certain, channels.stride(0), gates.stride(0), part.nodes, CHANNELS=sizes[0], WIDTH=width, TAPS=sizes[1],
        KEPT=WINDOW, BLOCK=COLUMNS, num_warps=WARPS,
    )  # fmt: skip


def delta_net(mixer: DeltaNet, part: RowsPass, layer: int, projected: Tensor, gates: Tensor) -> Tensor:
    """Run a padded pass through a layer -> the inputs of its second matrix [B L, H V], in the type of ``projected``.

    projected [B L, C + H V], gates [B L, 2 H]: outputs of the first matrix and of the small one. Those of padding are
    zeros.
    """
    states, heads = part.states, mixer.heads
    state, tail, inputs = states.state[layer], states.tail[layer], states.inputs[layer]
    rows = part.slots.shape[0]
    mixed = projected.new_zeros((rows * part.nodes, heads.value_heads * heads.value_dim), dtype=torch.float32)
    out = torch.empty_like(mixed, dtype=projected.dtype)
    of_rows = part.slots, part.start, part.applied, part.counts, part.certain
    tree = mixed if part.positions is None else part.positions, mixed if part.paths is None else part.paths
    strides = projected.stride(0), gates.stride(0)
    values = min(VALUES, triton.next_power_of_2(heads.value_dim))
    delta_kernel[(rows, heads.value_heads, triton.cdiv(heads.value_dim, values))](
        projected, gates, mixer.conv, mixer.rate, mixer.bias, state, tail, inputs, *of_rows, *tree, mixed, *strides,
        part.nodes, KEY_HEADS=heads.key_heads, VALUE_HEADS=heads.value_heads, KEY_DIM=heads.key_dim,
        VALUE_DIM=heads.value_dim, TAPS=heads.taps, KEPT=WINDOW, BLOCK_K=triton.next_power_of_2(heads.key_dim),
        BLOCK_V=values, SCALE=heads.key_dim**-0.5, TREE=part.paths is not None, num_warps=WARPS,
        enable_fp_fusion=False,
    )  # fmt: skip
    keep(part, layer, projected, gates, (heads.channels, heads.taps))
    finish_kernel[(rows * part.nodes, heads.value_heads)](
        mixed, projected, mixer.norm, out, mixer.epsilon, strides[0], VALUE_HEADS=heads.value_heads,
        VALUE_DIM=heads.value_dim, CHANNELS=heads.channels, BLOCK_V=triton.next_power_of_2(heads.value_dim),
        num_warps=1,
    )  # fmt: skip
    return out
