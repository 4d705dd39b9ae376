"""Quantisation of weights, and their packed form: the order in which the kernels read them (see csrc/kernels.h)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

from paceline.kernels.abi import INPUT_MULTIPLE, INT8_ZERO, PANEL, ROUTER_PANEL

Format = Literal["int8", "bf16", "int4", "fp8"]  # the last is for GPUs
Coding = Literal["int8", "bf16", "int4", "fp8", "fp4"]  # of stored codes: the formats, and MXFP4's numbers
Take: TypeAlias = Callable[[int], Tensor]
"""Allocates a number of bytes; returns uint8."""

# Raise it whenever a checkpoint's packed bytes change, by rounding or by order: files of packed weights depend on it.
LAYOUT_VERSION = 3
INT4_GROUP = 32
FLOAT8_GROUP = 128
_AT_ONCE = 1 << 20  # weights rounded and packed at a time, so that intermediate results stay in the cache
_AT_ONCE_ON_GPUS = 1 << 24  # the same where launches cost more than memory: 64 MiB in float32, a few times
_LARGEST = {"int8": 127.0, "fp8": 448.0}  # numbers of the formats with one scale per output


@dataclass(frozen=True)
class Int8Weight:
    """weight = values * scales[:, None]; values int8 [outputs, inputs]."""

    values: Tensor
    scales: Tensor


@dataclass(frozen=True)
class Bf16Weight:
    """weight = values, bfloat16 [outputs, inputs]."""

    values: Tensor


@dataclass(frozen=True)
class Int4Weight:
    """weight = values * scales + lows, by groups of inputs; values uint8 0..15 [outputs, inputs].

    scales and lows, float16, are [outputs, inputs / group]. A low need not be a multiple of its scale: so 4-bit groups
    of 32 from GGUF files (Q4_0, Q4_1, Q4_K) are taken unchanged; rounding them again would cost accuracy.

    order: the input of the layer that each column is, int64 [inputs] (GPTQ's activation order); None: its own.
    """

    values: Tensor
    scales: Tensor
    lows: Tensor
    group: int
    order: Tensor | None = None


@dataclass(frozen=True)
class Fp4Weight:
    """weight = FP4[values] * 2 ** (exponents - 127), by groups of 32 inputs (MXFP4); values uint8 [outputs, inputs].

    exponents: uint8 [outputs, inputs / 32].
    """

    values: Tensor
    exponents: Tensor


@dataclass(frozen=True)
class Float8Weight:
    """weight = values * scales; values float8 (e4m3) [outputs, inputs].

    scales: float32 [outputs], or [outputs, groups] of 128 inputs each.
    """

    values: Tensor
    scales: Tensor


FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # the numbers of codes 0 to 7; those of 8 to 15 are their negatives
_E8M0_BIAS, _E8M0_NAN = 127, 255
_MOST_E8M0 = 252  # exponent whose largest number, 6 * 2 ** 125, is a float32

Weight = Int8Weight | Bf16Weight | Int4Weight | Fp4Weight | Float8Weight
GroupedWeight = Int4Weight | Fp4Weight


def fp4_of(values: Tensor, exponents: Tensor) -> Fp4Weight | None:
    """The weight of codes and exponents; None if some of its numbers may not be finite."""
    return None if bool((exponents > _MOST_E8M0).any()) else Fp4Weight(values, exponents)


def fp4_values(codes: Tensor) -> Tensor:
    """The numbers, float32, of codes of 4 bits (float), uint8 of any shape, without their scales."""
    table = torch.tensor([*FP4, *(-number for number in FP4)], device=codes.device)
    return table[codes.long()]


def fp4_numbers(codes: Tensor, exponents: Tensor) -> Tensor:
    """The numbers, float32, of codes and exponents (MXFP4), uint8 and of shapes that broadcast."""
    numbers = torch.ldexp(fp4_values(codes), exponents.int() - _E8M0_BIAS)
    return numbers.masked_fill(exponents == _E8M0_NAN, torch.nan)


@dataclass(frozen=True)
class Packed:
    """A linear layer in the kernels' order. inputs and the stored columns are padded; outputs is the true number.

    order: the input of the layer that each input here is, int32 [inputs]; None: its own.
    """

    format: Format
    weights: Tensor  # uint8
    scales: Tensor | None
    bias: Tensor | None
    inputs: int
    outputs: int
    group: int
    order: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return self.weights.nbytes + sum(t.nbytes for t in (self.scales, self.bias, self.order) if t is not None)


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``value``."""
    return -(-value // multiple) * multiple


def quantise(weight: Tensor, to: Format, device: torch.device | None = None) -> Weight:
    """Round a weight [outputs, inputs] to a format. int4: inputs are padded to whole groups.

    device: where it is rounded and stays, a few rows at a time; None: the weight's.
    """
    device = weight.device if device is None else device
    if to == "bf16":
        return Bf16Weight(weight.to(device, torch.bfloat16))
    by: dict[Format, Callable[[Tensor], Weight]] = {"int8": _int8, "int4": _int4, "fp8": _float8}
    at_once = _AT_ONCE if device.type == "cpu" else _AT_ONCE_ON_GPUS
    rows = len(weight) if device.type == "meta" else _rows_at_once(weight.shape[1], at_once)  # meta takes no memory
    parts = torch.split(weight, rows)
    return stack([by[to](part.to(device).float()) for part in parts])


def _rows_at_once(inputs: int, at_once: int = _AT_ONCE) -> int:
    """Rows of a matrix whose copies in float32 are small beside a large one: whole panels."""
    return max(1, at_once // (inputs * PANEL)) * PANEL


def _scaled(weight: Tensor, largest: float) -> tuple[Tensor, Tensor]:
    """The weight over its scales [outputs], by which the largest amplitude of an output is ``largest``."""
    scales = weight.abs().amax(dim=1).clamp(min=1e-30) / largest
    return weight / scales[:, None], scales


def _int8(weight: Tensor) -> Int8Weight:
    values, scales = _scaled(weight, _LARGEST["int8"])
    return Int8Weight(values.round().clamp(-127, 127).to(torch.int8), scales)


def _float8(weight: Tensor) -> Float8Weight:
    values, scales = _scaled(weight, _LARGEST["fp8"])
    return Float8Weight(values.to(torch.float8_e4m3fn), scales)


def _int4(weight: Tensor) -> Int4Weight:
    """Codes, scales and lows of the grid with the smallest error.

    The lowest value is always on the grid. Tried are all grids that also contain the highest, with 15 down to 8 steps
    between them; fewer steps never give the smallest error, except on weights that had fewer bits before.
    """
    weight = pad(weight, (0, -weight.shape[1] % INT4_GROUP))
    groups = weight.view(weight.shape[0], -1, INT4_GROUP)
    low = groups.amin(dim=2, keepdim=True).half()
    span = groups.amax(dim=2, keepdim=True) - low.float()
    best = torch.full_like(span, torch.inf)
    scales = torch.zeros_like(low)
    for steps in range(15, 7, -1):
        scale = (span / steps).clamp(min=1e-7).half()
        error = (_int4_codes(groups, scale, low) * scale.float() + low.float() - groups).square().sum(2, keepdim=True)
        better = error < best
        best, scales = torch.where(better, error, best), torch.where(better, scale, scales)
    codes = _int4_codes(groups, scales, low).to(torch.uint8)
    return Int4Weight(codes.view_as(weight), scales[:, :, 0], low[:, :, 0], INT4_GROUP)


def _int4_codes(groups: Tensor, scale: Tensor, low: Tensor) -> Tensor:
    return ((groups - low.float()) / scale.float()).round().clamp(0, 15)


def dequantise(weight: Weight, inputs: int) -> Tensor:
    """The float32 matrix [outputs, inputs] of a quantised weight, by the layer's inputs."""
    if isinstance(weight, Bf16Weight):
        return weight.values.float()
    if isinstance(weight, Int8Weight | Float8Weight):
        scales = weight.scales.view(len(weight.values), -1)
        if scales.shape[1] > 1:
            scales = scales.repeat_interleave(FLOAT8_GROUP, 1)[:, :inputs]
        return weight.values.float() * scales
    if isinstance(weight, Fp4Weight):
        return fp4_numbers(weight.values, weight.exponents.repeat_interleave(INT4_GROUP, 1))[:, :inputs]
    groups = weight.values.view(weight.values.shape[0], -1, weight.group).float()
    numbers = (groups * weight.scales[:, :, None].float() + weight.lows[:, :, None].float()).flatten(1)[:, :inputs]
    return numbers if weight.order is None else numbers[:, weight.order.argsort()]


def interleave_gate_up(gate_up: Tensor) -> Tensor:
    """Rows [gate, up] -> 16 rows of the gate, the same 16 of up, and so on; the width is padded to a multiple of 16."""
    halves, rest = gate_up.chunk(2), gate_up.shape[1:]
    rows = round_up(halves[0].shape[0], 16)
    blocks = gate_up.new_empty(rows // 16, 2, 16, *rest)
    for part, half in enumerate(halves):
        blocks[:, part] = pad_rows(half, rows).view(-1, 16, *rest)
    return blocks.flatten(0, 2)


def reorder_rows(weight: Weight, order: Callable[[Tensor], Tensor]) -> Weight:
    """Reorder the rows of a weight that is already in its format. order: moves the first dimension of a tensor."""
    return _by_rows([weight], lambda tensors: order(tensors[0]))


def stack(parts: Sequence[Weight]) -> Weight:
    """Stack the rows of weights in one format and, for int4, of one group size and one order of inputs."""
    return parts[0] if len(parts) == 1 else _by_rows(parts, torch.cat)


def multiply_rows(weight: Weight, factors: Tensor) -> Weight | None:
    """Multiply the rows of a weight that is already in its format; None if its codes cannot stay as they are.

    factors: [rows], or [1] for all rows.
    """
    if isinstance(weight, Bf16Weight | Fp4Weight):
        return None

    def times(table: Tensor) -> Tensor:
        return (table.float() * factors.view(-1, *[1] * (table.dim() - 1))).to(table.dtype)

    if isinstance(weight, Int4Weight):
        return replace(weight, scales=times(weight.scales), lows=times(weight.lows))
    return replace(weight, scales=times(weight.scales))


def _by_rows(parts: Sequence[Weight], join: Callable[[list[Tensor]], Tensor]) -> Weight:
    """Apply ``join`` to the values, the scales and the lows of all parts, whose first dimension is the rows."""
    first = parts[0]
    tables = {name for name, table in vars(first).items() if isinstance(table, Tensor)} - {"order"}
    joined: dict[str, Any] = {name: join([getattr(part, name) for part in parts]) for name in tables}
    return replace(first, **joined)


def on(weight: Weight, device: torch.device | None) -> Weight:
    """The weight on a device; None: where it is."""
    tables: dict[str, Any] = {
        name: table.to(device) for name, table in vars(weight).items() if isinstance(table, Tensor)
    }
    return replace(weight, **tables)


def packed_bytes(outputs: int, inputs: int, to: Format, group: int = INT4_GROUP) -> int:
    """Bytes of the packed weights, without the scales of int8 and the bias."""
    columns, inputs = round_up(outputs, PANEL), round_up(inputs, INPUT_MULTIPLE)
    if to == "int4":
        return columns // PANEL * (inputs // group) * (4 * PANEL + group * PANEL // 2)
    return columns * inputs * (1 if to == "int8" else 2)


def allocate(outputs: int, inputs: int, to: Format, bias: bool, take: Take, group: int = INT4_GROUP) -> Packed:
    """A linear layer of this shape in memory from ``take``, uninitialised."""
    columns = round_up(outputs, PANEL)

    def floats() -> Tensor:
        return take(4 * columns).view(torch.float32)

    return Packed(
        format=to,
        weights=take(packed_bytes(outputs, inputs, to, group)),
        scales=floats() if to == "int8" else None,
        bias=floats() if bias else None,
        inputs=round_up(inputs, INPUT_MULTIPLE),
        outputs=outputs,
        group=group if to == "int4" else 0,
    )


def fill(packed: Packed, weight: Weight, bias: Tensor | None = None) -> None:
    """Put a weight (and its bias) into the kernels' order."""
    outputs = weight.values.shape[0]
    step, at = _rows_at_once(packed.inputs), 0
    for first in range(0, outputs, step):
        part = _some_rows(weight, first, first + step)
        data = _panels(part, packed.inputs).contiguous().view(torch.uint8).flatten()
        packed.weights[at : at + data.shape[0]] = data
        at += data.shape[0]
    more = round_up(outputs, PANEL) - outputs
    if packed.scales is not None and isinstance(weight, Int8Weight):
        packed.scales.copy_(pad(weight.scales, (0, more)))
    if packed.bias is not None and bias is not None:
        packed.bias.copy_(pad(bias, (0, more)))
    if packed.order is not None:
        packed.order.copy_(torch.arange(packed.inputs))
        if isinstance(weight, Int4Weight) and weight.order is not None:
            packed.order[: len(weight.order)] = weight.order


def _some_rows(weight: Weight, first: int, stop: int) -> Weight:
    return reorder_rows(weight, lambda rows: rows[first:stop])


def _panels(weight: Weight, inputs: int) -> Tensor:
    """The weight in the kernels' order, panel by panel; its inputs and outputs are padded."""
    outputs, stored = weight.values.shape
    columns = round_up(outputs, PANEL)
    values = pad(weight.values, (0, inputs - stored, 0, columns - outputs)).contiguous()
    if isinstance(weight, Int8Weight):
        return _by_panels((values.to(torch.int16) + INT8_ZERO).to(torch.uint8).view(torch.int32))
    if isinstance(weight, Bf16Weight):
        return _by_panels(values.view(torch.int32))
    assert isinstance(weight, Int4Weight), "the others are for GPUs"
    return _pack_int4(values, weight, columns, inputs)


def pack(weight: Weight, bias: Tensor | None = None) -> Packed:
    """A weight (and its bias) in the kernels' order, in memory of its own."""
    to: Format = "int8" if isinstance(weight, Int8Weight) else "bf16" if isinstance(weight, Bf16Weight) else "int4"
    group = weight.group if isinstance(weight, Int4Weight) else INT4_GROUP
    outputs, inputs = weight.values.shape
    packed = allocate(outputs, inputs, to, bias is not None, lambda n: torch.empty(n, dtype=torch.uint8), group)
    if isinstance(weight, Int4Weight) and weight.order is not None:
        packed = replace(packed, order=torch.empty(packed.inputs, dtype=torch.int32))
    fill(packed, weight, bias)
    return packed


def _by_panels(words: Tensor) -> Tensor:
    """[columns, words] -> [panel, word, 32 columns]."""
    return words.view(-1, PANEL, words.shape[1]).transpose(1, 2)


def _pack_int4(values: Tensor, weight: Int4Weight, columns: int, inputs: int) -> Tensor:
    groups = inputs // weight.group
    octets = values.view(columns // PANEL, PANEL, groups, weight.group // 8, 2, 4)
    nibbles = octets[..., 0, :] | (octets[..., 1, :] << 4)
    body = nibbles.permute(0, 2, 3, 1, 4).reshape(columns // PANEL, groups, -1)
    heads = [_group_head(scale, columns, groups).view(torch.uint8) for scale in (weight.scales, weight.lows)]
    return torch.cat([*heads, body], dim=2)


def _group_head(of_groups: Tensor, columns: int, groups: int) -> Tensor:
    """[outputs, groups] -> [panel, group, 32], padded with zeros."""
    full = pad(of_groups, (0, groups - of_groups.shape[1], 0, columns - of_groups.shape[0]))
    return full.view(-1, PANEL, groups).transpose(1, 2).contiguous()


def router_panels(weight: Tensor, input_multiple: int = INPUT_MULTIPLE) -> Tensor:
    """Scores' weights [experts, width] -> float32 [panel, padded width, 16 experts]."""
    experts, width = weight.shape
    padding = (0, -width % input_multiple, 0, -experts % ROUTER_PANEL)
    padded = pad(weight.float(), padding)
    return padded.view(-1, ROUTER_PANEL, padded.shape[1]).transpose(1, 2)


def pad_rows(x: Tensor, rows: int) -> Tensor:
    """x [N, ...] with rows of zeros appended, [rows, ...]."""
    if rows <= x.shape[0]:
        return x
    padded = x.new_zeros(rows, *x.shape[1:])  # torch.cat on device "meta" would import torch's compiler, 1 s
    padded[: x.shape[0]] = x
    return padded
