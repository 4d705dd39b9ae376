"""What the kernels of recurrent layers share: the causal convolution at a node, and the inputs that slots keep.

Each pass of a layer applies the accepted inputs of the slot's last pass while it reads the state, runs the row's nodes,
and stores the state after the certain ones. Then ``keep`` stores the convolution's last inputs and the inputs of the
nodes that may be rejected. Lengths and accepted counts are read on the device, so that passes can be captured.

Shapes: B rows, L nodes per row, R slots, C channels of the convolution. Inputs that are kept hold gates as they came,
    not what they become, so that a token takes the same steps whether it is run or applied.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from paceline.core.recurrent_state import WINDOW, RowsPass

WARPS = 4
VALUES = 32  # columns of a state per program: they do not meet. With 64 and 8 warps, registers spill
COLUMNS = 256  # channels and gates per program of ``keep``


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


@triton.jit
def steps_to(
    node: tl.tensor,
    current: tl.tensor,
    cell: tl.tensor,
    real: tl.tensor,
    row: tl.tensor,
    begin: tl.tensor,
    nodes: tl.tensor,
    positions: tl.tensor,
    paths: tl.tensor,
    TREE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return the last and the first time on a node's path that are run for it, the path, and the state before them.

    A node of a tree whose parent is not the node before it runs its ancestors again, from the stored state on.

    current: the state after the node before it. cell: where the state is stored. real: which of its numbers exist.
    """
    last, first = node, node
    path = paths
    if TREE:
        path = paths + (row * nodes + tl.maximum(node, 0)) * nodes
        if node >= 0:
            last = (tl.load(positions + row * nodes + node) - begin).to(tl.int32)
            parent = tl.load(path + last - 1, mask=last > 0, other=-1)
            first = last
            if parent != node - 1:
                first = tl.minimum(last, 1)
                tl.debug_barrier()
                current = tl.load(cell, mask=real, other=0.0)
    return last, first, path, current


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
