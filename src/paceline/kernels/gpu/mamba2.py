"""Mamba-2 layers (arXiv 2405.21060) and short convolutions over the states of slots, token by token.

The contract is that of ``gpu.delta_net``: a kernel applies the accepted inputs of the slot's last pass, runs the row's
nodes and stores the state after the certain ones; another one stores the inputs that are kept. What lies between them
and the layer's matrices is torch's (``RecurrentMixer.split`` and ``finish``).

Shapes: B rows, L nodes per row, H heads of width P, G groups of heads that share B and C, each of width S, C channels
    of the convolution. A state is [S, P] per head. Inputs of a node are its channels, then its H steps.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from paceline.core.recurrent_state import WINDOW, RowsPass
from paceline.kernels.gpu.recurrent import COLUMNS, VALUES, WARPS, causal_sum, keep, silu, steps_to
from paceline.kernels.mamba2 import Mamba2
from paceline.kernels.short_conv import ShortConv


@triton.jit(do_not_specialize=["nodes"])  # a prompt of another length does not recompile it
def mamba2_kernel(
    own: tl.tensor,
    conv: tl.tensor,
    conv_bias: tl.tensor,
    rate: tl.tensor,
    skip: tl.tensor,
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
    nodes: tl.tensor,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUPS: tl.constexpr,
    STATE_DIM: tl.constexpr,
    TAPS: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BIASED: tl.constexpr,
    TREE: tl.constexpr,
) -> None:
    """Grid (B, H, blocks): own [B L, C + H] -> mixed [B L, H, P] float32; state [R, H, S, P] after certain nodes."""
    CHANNELS: tl.constexpr = HEADS * HEAD_DIM + 2 * GROUPS * STATE_DIM
    WIDTH: tl.constexpr = CHANNELS + HEADS
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot, begin, applied_count = tl.load(slots + row), tl.load(start + row), tl.load(applied + row).to(tl.int32)
    count, certain_count = tl.load(counts + row).to(tl.int32), tl.load(certain + row)
    shared, value = tl.arange(0, BLOCK_S), tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    is_shared, is_value = shared < STATE_DIM, value < HEAD_DIM
    x_at = head * HEAD_DIM + value
    b_at = HEADS * HEAD_DIM + head // (HEADS // GROUPS) * STATE_DIM + shared
    c_at = b_at + GROUPS * STATE_DIM
    of_row = own + row * nodes * WIDTH
    earlier, before = inputs + slot * KEPT * WIDTH, tail + slot * (TAPS - 1) * CHANNELS
    cell = state + (slot * HEADS + head) * STATE_DIM * HEAD_DIM + shared[:, None] * HEAD_DIM + value[None, :]
    real = is_shared[:, None] & is_value[None, :]
    goes_on = ((begin > 0) & (count > 0)).to(tl.int32)
    current = tl.load(cell, mask=real & (shared < goes_on * STATE_DIM)[:, None], other=0.0)
    rate_of_head, skip_of_head = tl.load(rate + head).to(tl.float32), tl.load(skip + head).to(tl.float32)

    for node in range(-applied_count, count):
        last, first, path, current = steps_to(
            node, current, cell, real, row, begin, nodes, positions, paths, TREE
        )  # fmt: skip
        read = tl.zeros([BLOCK_P], dtype=tl.float32)
        for time in range(first, last + 1):
            at, place = time, applied_count + time
            is_own = place >= applied_count
            if TREE:
                at = tl.load(path + time, mask=is_own, other=0)
            x = causal_sum(
                of_row, earlier, before, path, conv, time, applied_count, x_at, is_value, begin, WIDTH,
                CHANNELS, WIDTH, TAPS, TREE,
            )  # fmt: skip
            b = causal_sum(
                of_row, earlier, before, path, conv, time, applied_count, b_at, is_shared, begin, WIDTH,
                CHANNELS, WIDTH, TAPS, TREE,
            )  # fmt: skip
            c = causal_sum(
                of_row, earlier, before, path, conv, time, applied_count, c_at, is_shared, begin, WIDTH,
                CHANNELS, WIDTH, TAPS, TREE,
            )  # fmt: skip
            if BIASED:
                x += tl.load(conv_bias + x_at, mask=is_value, other=0.0).to(tl.float32)
                b += tl.load(conv_bias + b_at, mask=is_shared, other=0.0).to(tl.float32)
                c += tl.load(conv_bias + c_at, mask=is_shared, other=0.0).to(tl.float32)
            x, b, c = silu(x), silu(b), silu(c)
            step = tl.load(of_row + at * WIDTH + CHANNELS + head, mask=is_own, other=0.0)
            step += tl.load(earlier + place * WIDTH + CHANNELS + head, mask=place < applied_count, other=0.0)
            current = current * tl.exp(step * rate_of_head) + b[:, None] * (x * step)[None, :]
            read = tl.sum(current * c[:, None], 0) + x * skip_of_head
        if node >= 0:
            tl.store(mixed + ((row * nodes + node) * HEADS + head) * HEAD_DIM + value, read, mask=is_value)
        if node == certain_count - 1:
            tl.store(cell, current, mask=real)


@triton.jit(do_not_specialize=["nodes"])
def short_conv_kernel(
    own: tl.tensor,
    conv: tl.tensor,
    tail: tl.tensor,
    inputs: tl.tensor,
    slots: tl.tensor,
    start: tl.tensor,
    applied: tl.tensor,
    positions: tl.tensor,
    paths: tl.tensor,
    mixed: tl.tensor,
    nodes: tl.tensor,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK: tl.constexpr,
    TREE: tl.constexpr,
) -> None:
    """Grid (B L, blocks): own [B L, C] -> mixed [B L, C] float32, the convolution at each node."""
    token = tl.program_id(0).to(tl.int64)
    row, node = token // nodes, (token % nodes).to(tl.int32)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < CHANNELS
    slot, begin, applied_count = tl.load(slots + row), tl.load(start + row), tl.load(applied + row).to(tl.int32)
    last, path = node, paths
    if TREE:
        path = paths + token * nodes
        last = (tl.load(positions + token) - begin).to(tl.int32)
    total = causal_sum(
        own + row * nodes * CHANNELS, inputs + slot * KEPT * CHANNELS, tail + slot * (TAPS - 1) * CHANNELS, path, conv,
        last, applied_count, column, inside, begin, CHANNELS, CHANNELS, CHANNELS, TAPS, TREE,
    )  # fmt: skip
    tl.store(mixed + token * CHANNELS + column, total, mask=inside)


def mamba2(mixer: Mamba2, part: RowsPass, layer: int, inputs: Tensor) -> Tensor:
    """Run a padded pass through a layer's states: inputs [B L, C + H] float32 -> outputs [B L, H, P] float32."""
    states, heads = part.states, mixer.heads
    mixed = inputs.new_empty((len(inputs), heads.heads, heads.head_dim))
    tree = mixed if part.positions is None else part.positions, mixed if part.paths is None else part.paths
    values = min(VALUES, triton.next_power_of_2(heads.head_dim))
    mamba2_kernel[(len(part.slots), heads.heads, triton.cdiv(heads.head_dim, values))](
        inputs, mixer.conv, mixed if mixer.conv_bias is None else mixer.conv_bias, mixer.rate, mixer.skip,
        states.state[layer], states.tail[layer], states.inputs[layer], part.slots, part.start, part.applied,
        part.counts, part.certain, *tree, mixed, part.nodes, HEADS=heads.heads, HEAD_DIM=heads.head_dim,
        GROUPS=heads.groups, STATE_DIM=heads.state_dim, TAPS=heads.taps, KEPT=WINDOW,
        BLOCK_S=triton.next_power_of_2(heads.state_dim), BLOCK_P=values, BIASED=mixer.conv_bias is not None,
        TREE=part.paths is not None, num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    keep(part, layer, inputs, inputs[:, heads.channels :], (heads.channels, heads.taps))
    return mixed


def short_conv(mixer: ShortConv, part: RowsPass, layer: int, inputs: Tensor) -> Tensor:
    """Run a padded pass through a layer: inputs [B L, C] float32 -> the convolution [B L, C] float32."""
    states, (channels, taps) = part.states, mixer.conv.shape
    mixed = inputs.new_empty(inputs.shape)
    tree = mixed if part.positions is None else part.positions, mixed if part.paths is None else part.paths
    short_conv_kernel[(len(inputs), triton.cdiv(channels, COLUMNS))](
        inputs, mixer.conv, states.tail[layer], states.inputs[layer], part.slots, part.start, part.applied, *tree,
        mixed, part.nodes, CHANNELS=channels, TAPS=taps, KEPT=WINDOW, BLOCK=COLUMNS, TREE=part.paths is not None,
        num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    keep(part, layer, inputs, inputs, (channels, taps))
    return mixed
