"""The operations between a layer's matrix products: sum and norm in one launch, activation and gate in another.

Shapes: N tokens, W width, I inner width of the MLP. Sums are float32; the values that torch rounds between two
    operations are rounded here, too. A program has a token's whole line, so its bits do not depend on the other tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.gpu.float8 import LARGEST, RoundedRows, memory_for, store_rounded
from paceline.kernels.gpu.state import CLAMPED_LIMIT, CLAMPED_SLOPE, Norm

_BLOCK = (
    1024  # inner width per program; like the warps, chosen so that nothing spills (docs/gpu-kernels.md), not measured
)
_WARPS = 4
_LIMIT, _SLOPE = tl.constexpr(CLAMPED_LIMIT), tl.constexpr(CLAMPED_SLOPE)  # of "clamped_silu"
_WIDE = 4096  # longer lines get twice the warps
_MOST_WARPS = 16  # of a line of gates


@triton.jit
def add_norm_kernel(
    x: tl.tensor,
    added: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    total: tl.tensor,
    out: tl.tensor,
    values: tl.tensor,
    scales: tl.tensor,
    epsilon: tl.tensor,
    x_stride: tl.tensor,
    added_stride: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    CENTRED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BIASED: tl.constexpr,
    ROUNDS: tl.constexpr,
    LARGEST: tl.constexpr,
) -> None:
    """Grid (N): total [N, W] = x + added; out [N, W] = total over its root mean square, or its standard deviation.

    ROUNDS: whether values [N, W] and scales [N] get out in float8 (``store_rounded``).
    """
    line = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    one = tl.load(x + line * x_stride + column, mask=inside, other=0.0)
    other = tl.load(added + line * added_stride + column, mask=inside, other=0.0)
    both = (one.to(tl.float32) + other.to(tl.float32)).to(one.dtype)
    tl.store(total + line * WIDTH + column, both, mask=inside)
    value = both.to(tl.float32)
    if CENTRED:
        value = tl.where(inside, value - tl.sum(value, 0) / WIDTH, 0.0)
    value = value * tl.rsqrt(tl.sum(value * value, 0) / WIDTH + epsilon)
    if WEIGHTED:
        value = value * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if BIASED:
        value = value + tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    normed = value.to(out.dtype.element_ty)
    tl.store(out + line * WIDTH + column, normed, mask=inside)
    if ROUNDS:
        row = tl.where(inside, normed.to(tl.float32), 0.0)
        store_rounded(row, values + line * WIDTH + column, scales + line, inside, LARGEST)


@triton.jit
def activated(x: tl.tensor, ACTIVATION: tl.constexpr) -> tl.tensor:
    """float32 -> float32; the names are those of ``gpu.steps.ACTIVATIONS``."""
    if ACTIVATION == "silu":
        y = x / (1.0 + tl.exp(-x))
    elif ACTIVATION == "relu":
        y = tl.maximum(x, 0.0)
    elif ACTIVATION == "relu2":
        y = tl.maximum(x, 0.0) * tl.maximum(x, 0.0)
    elif ACTIVATION == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        tl.static_assert(ACTIVATION == "gelu_tanh")
        y = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))  # (1 + tanh z) / 2 is sigmoid(2 z)
    return y


@triton.jit
def gate_kernel(
    gate_up: tl.tensor,
    out: tl.tensor,
    values: tl.tensor,
    scales: tl.tensor,
    stride: tl.tensor,
    width: tl.tensor,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
    ROUNDS: tl.constexpr,
    LARGEST: tl.constexpr,
) -> None:
    """Grid (N, blocks): out [N, I] of gate_up [N, 2 I], gates first; see ``gpu.steps.gate``.

    ROUNDS: whether values [N, I] and scales [N] get out in float8 (``store_rounded``); then a line is one block.
    """
    line = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up + line * stride + column, mask=inside, other=0.0)
    up = tl.load(gate_up + line * stride + width + column, mask=inside, other=0.0)
    if ACTIVATION == "clamped_silu":
        slope = tl.minimum(gate.to(tl.float32), _LIMIT)
        opened = (slope * tl.sigmoid(slope * _SLOPE)).to(gate.dtype)
        factor = (tl.minimum(tl.maximum(up.to(tl.float32), -_LIMIT), _LIMIT) + 1.0).to(gate.dtype)
    else:
        opened, factor = activated(gate.to(tl.float32), ACTIVATION).to(gate.dtype), up
    gated = (opened.to(tl.float32) * factor.to(tl.float32)).to(gate.dtype)
    tl.store(out + line * width + column, gated, mask=inside)
    if ROUNDS:
        row = tl.where(inside, gated.to(tl.float32), 0.0)
        store_rounded(row, values + line * width + column, scales + line, inside, LARGEST)


def gate_warps(block: int) -> int:
    """Warps of a program of ``gate_kernel``: a thread has 32 numbers of the gate at most, as far as programs go."""
    return max(_WARPS, min(_MOST_WARPS, block // 1024))


def warps_for(width: int) -> int:
    """Warps of a program for a line of ``width`` numbers."""
    return _WARPS if width <= _WIDE else 2 * _WARPS


def add_norm(x: Tensor, added: Tensor, norm: Norm, *, rounds: bool = False) -> tuple[Tensor, Tensor]:
    """See ``gpu.steps.LayerSteps``. rounds: whether the norm is also rounded to float8, which makes ``RoundedRows``."""
    tokens, width = x.shape
    total, out = (torch.empty((tokens, width), dtype=x.dtype, device=x.device) for _ in range(2))
    values, scales = memory_for(tokens, width, x.device) if rounds else (out, out)
    add_norm_kernel[(tokens,)](
        x, added, out if norm.weight is None else norm.weight, out if norm.bias is None else norm.bias, total, out,
        values, scales, norm.eps, x.stride(0), added.stride(0), WIDTH=width, BLOCK=triton.next_power_of_2(width),
        CENTRED=norm.centred, WEIGHTED=norm.weight is not None, BIASED=norm.bias is not None, ROUNDS=rounds,
        LARGEST=LARGEST, num_warps=warps_for(width),
    )  # fmt: skip
    return total, RoundedRows.of(out, values, scales) if rounds else out


def gate(gate_up: Tensor, activation: str, *, rounds: bool = False) -> Tensor:
    """See ``gpu.steps.LayerSteps``. rounds: see ``add_norm``; a program then has a whole line, for its scale."""
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((tokens, width), dtype=gate_up.dtype, device=gate_up.device)
    values, scales = memory_for(tokens, width, gate_up.device) if rounds else (out, out)
    block = triton.next_power_of_2(width) if rounds else _BLOCK
    gate_kernel[(tokens, triton.cdiv(width, block))](
        gate_up, out, values, scales, gate_up.stride(0), width, ACTIVATION=activation, BLOCK=block, ROUNDS=rounds,
        LARGEST=LARGEST, num_warps=gate_warps(block),
    )  # fmt: skip
    return RoundedRows.of(out, values, scales) if rounds else out
