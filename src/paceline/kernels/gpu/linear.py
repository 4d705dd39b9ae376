"""Matrix products of a few tokens with 8-bit and 4-bit weights (W8A16, W4A16), which are read once.

Shapes: M rows (tokens), K inputs, N outputs. Weights [N, K] are int8 or float8 (e4m3) with one scale per output; they
    are widened to the activations' type in registers, sums are float32. Two int8 weights lie in 16 bits (``paired``),
    which tensor cores read as they are, and which few instructions widen. The weights are the product's left side,
    because there are many outputs and few rows. With few outputs the inputs are split, too, to fill the GPU: the last
    program to arrive at a tile adds the parts in a fixed order, so the bits do not depend on the order of arrival. With
    many rows the tiles that read the same weights run side by side: the first one fetches them from memory, the others
    from the L2 cache. 4-bit weights have scales by groups of inputs (``four_bit``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from paceline.errors import ParameterError
from paceline.kernels import pack
from paceline.kernels.gpu import four_bit
from paceline.kernels.gpu.float8 import Float8Linear
from paceline.kernels.gpu.four_bit import RUN, FourBitWeight
from paceline.kernels.gpu.four_bit_kernels import constants_of, four_bit_sums, widen_four_bit
from paceline.kernels.gpu.launch import capability, interpreted, multiprocessors, shared_memory
from paceline.kernels.spec import LinearWeights

log = logging.getLogger("paceline")

Format = Literal["int8", "int4", "fp8", "same"]
LARGEST_ROWS = 256  # beyond it torch multiplies with the widened matrix: compute dominates, not memory traffic
ROW_TILES = (16, 32, 64, 128)
FOUR_BIT_ROW_TILES = ROW_TILES[:-1]  # more rows take several: registers hold no more sums
FIXED_ROWS = 64  # rows per tile in deterministic mode, whatever the number of rows
_FP8 = torch.float8_e4m3fn
_FEWEST_INPUTS = 512  # smallest part when the inputs are split
_PROGRAMS_EACH = (2, 1, 3)  # per multiprocessor; more parts than that cost more for their sums than they gain
_MOST_SUMS = 1 << 12  # of a program with 4-bit weights, whose warps are four: a thread has 32, and as many of a group
_MOST_WARPS = 8  # warps per program: with more, a thread may have half the registers
_MOST_REGISTERS = 80  # per thread, of 255; with 96 the compiler spills on some architectures (docs/gpu-kernels.md)
_LARGEST_STEP = 1 << 14  # inputs of all rows in a step with 8-bit weights; with more the compiler spills on sm_80
_WIDEN_BLOCK = 1024  # stored weights per program of ``widen``
_TOLERANCE = 0.05  # of ``is_right``: three roundings to bf16 explain 0.012; the known mistake exceeded the numbers
NO_GROUPS: dict[str, Any] = {"GRID": "", "GROUP": 0, "SHIFTED": False}
_GROUP = tl.constexpr(64)  # inputs: the 16 bits of a pair hold the weights of inputs i and i + 32 of a group

# Each takes two pairs, [a, b] and [c, d] with a and c in the low bytes, and returns (a, c) and (b, d). The bits of a
# number from 0 to 127 (255 in float16) are put into the mantissa of 128 (1024), from which a sum takes the rest away.
_TO_BF16 = tl.constexpr("""{
    .reg .b32 low, high, signs, sign_low, sign_high, one;
    mov.b32 one, 0x3F803F80;
    shr.u32 high, $2, 8;
    lop3.b32 low, $2, 0x007F007F, 0x43004300, 0xEA;
    lop3.b32 sign_low, $2, 0x00800080, 0xC300C300, 0xEA;
    lop3.b32 signs, high, 0x00800080, 0xC300C300, 0xEA;
    lop3.b32 high, high, 0x007F007F, 0x43004300, 0xEA;
    fma.rn.bf16x2 $0, low, one, sign_low;
    fma.rn.bf16x2 $1, high, one, signs;
}""")
_TO_FP16 = tl.constexpr("""{
    .reg .b32 low, high, less;
    mov.b32 less, 0xE480E480;
    shr.u32 high, $2, 8;
    lop3.b32 low, $2, 0x00FF00FF, 0x64806480, 0x6A;
    lop3.b32 high, high, 0x00FF00FF, 0x64806480, 0x6A;
    add.rn.f16x2 $0, low, less;
    add.rn.f16x2 $1, high, less;
}""")


@triton.jit
def _finished(sums: tl.tensor) -> tl.tensor:
    """Return the sums unchanged, after waiting for the products that add to them; the moves assemble to nothing."""
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [sums], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def tile_sums(
    x_line: tl.tensor,
    is_row: tl.tensor,
    weight: tl.tensor,
    line: tl.tensor,
    is_output: tl.tensor,
    scales: tl.tensor,
    outputs: tl.tensor,
    start: tl.tensor,
    stop: tl.tensor,
    inputs: tl.tensor,
    SCALED: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WIDENING: tl.constexpr,
    MAJOR: tl.constexpr,
) -> tl.tensor:
    """Return the products [BLOCK_N, BLOCK_M], float32, of lines of the weights and rows of x, from input start to stop.

    x_line: where the rows begin [BLOCK_M]. line: numbers of the weights' lines [BLOCK_N]. is_row, is_output: which of
        them there are; the others give zeros. GROUP, WIDENING, MAJOR: see ``linear_kernel``.
    scales, outputs: read for groups of inputs alone; the caller applies a scale of a whole line.
    """
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if WIDENING == "single":
        weight_line = weight + line.to(tl.int64)[:, None] * inputs
        for first in range(start, stop, BLOCK_K):
            k = first + tl.arange(0, BLOCK_K)
            w = tl.load(weight_line + k[None, :], mask=is_output[:, None] & (k < stop)[None, :], other=0.0)
            a = tl.load(x_line[None, :] + k[:, None], mask=is_row[None, :] & (k < stop)[:, None], other=0.0)
            product = tl.dot(w.to(a.dtype), a, input_precision="ieee")
            if GROUP:
                scale = tl.load(scales + first // GROUP * tl.cast(outputs, tl.int64) + line, mask=is_output, other=0.0)
                sums += product * scale[:, None]
            else:
                sums += product
            if SCALED and MAJOR == 9:
                sums = _finished(sums)
    else:
        high_sums = sums
        weight_line = weight + line.to(tl.int64)[:, None] * (tl.cdiv(inputs, _GROUP) * (_GROUP // 2))
        pair = tl.arange(0, BLOCK_K // 2)
        low = pair // (_GROUP // 2) * _GROUP + pair % (_GROUP // 2)
        for first in range(start, stop, BLOCK_K):
            k = first + low
            w_place = weight_line + (first // 2 + pair)[None, :]
            w = tl.load(w_place, mask=is_output[:, None] & (k < stop)[None, :], other=0)
            x_place = x_line[None, :] + k[:, None]
            a = tl.load(x_place, mask=is_row[None, :] & (k < stop)[:, None], other=0.0)
            further = is_row[None, :] & (k + _GROUP // 2 < stop)[:, None]
            b = tl.load(x_place + _GROUP // 2, mask=further, other=0.0)
            if WIDENING == "bf16":
                w_low, w_high = tl.inline_asm_elementwise(
                    _TO_BF16, "=r,=r,r", [w], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
                )
            elif WIDENING == "fp16":
                w_low, w_high = tl.inline_asm_elementwise(
                    _TO_FP16, "=r,=r,r", [w], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
                )
            else:
                w_low, w_high = ((w << 8) >> 8).to(tl.int16).to(a.dtype), (w >> 8).to(a.dtype)
            sums += tl.dot(w_low, a, input_precision="ieee")
            if MAJOR >= 10:
                high_sums += tl.dot(w_high, b, input_precision="ieee")
            else:
                sums += tl.dot(w_high, b, input_precision="ieee")
            if MAJOR == 9:
                sums = _finished(sums)
        if MAJOR >= 10:
            sums += high_sums
    return sums


@triton.jit(do_not_specialize=["rows", "parts"])  # one compiled kernel per tile serves any number of them
def linear_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    scales: tl.tensor,
    lows: tl.tensor,
    bias: tl.tensor,
    partial: tl.tensor,
    tickets: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    x_stride: tl.tensor,
    inputs: tl.tensor,
    outputs: tl.tensor,
    parts: tl.tensor,
    SCALED: tl.constexpr,
    BIASED: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GRID: tl.constexpr,
    GROUP: tl.constexpr,
    SHIFTED: tl.constexpr,
    WIDENING: tl.constexpr,
    MAJOR: tl.constexpr,
) -> None:
    """Grid (row tiles, output tiles, parts of the inputs): out [M, N] = x [M, K] @ weight[N, K].T * scales + bias.

    SPLIT: whether there are several parts.
    GRID, GROUP, SHIFTED: of 4-bit weights, see ``four_bit_sums``; GRID is "" for others.
    GROUP: inputs that share a scale, which is applied to the sum of a step; 0: scales are of whole outputs.
    WIDENING: "single" weights are loaded one by one; "pairs" of them (``paired``) are widened by Triton's own
        conversions, and pairs for "bf16" or "fp16" activations by the instructions above, with the same results.
    MAJOR: the GPU's compute capability, its first number; 0 in the interpreter. On two kinds Triton's code would
        otherwise be wrong (docs/log.md). On 9 (Hopper) a step's products end before the next step widens its weights:
        Triton 3.6 overwrites registers that they may still be read from. On 10 and later (Blackwell) the two products
        of a step have sums of their own (triton-lang/triton#10821).
    """
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    part, start, stop = tl.program_id(2), 0, inputs
    if SPLIT:
        share = tl.cdiv(tl.cdiv(inputs, BLOCK_K), parts) * BLOCK_K
        start = part * share
        stop = tl.minimum(start + share, inputs)
    x_line = x + m.to(tl.int64) * x_stride
    if GRID != "":
        sums = four_bit_sums(
            x_line[None, :], m < rows, weight, scales, lows, n, outputs, start, stop,
            SHIFTED, GRID, GROUP, WIDENING, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    else:
        sums = tile_sums(
            x_line, m < rows, weight, n, n < outputs, scales, outputs, start, stop, inputs,
            SCALED, GROUP, BLOCK_M, BLOCK_N, BLOCK_K, WIDENING, MAJOR,
        )  # fmt: skip

    inside = (n < outputs)[:, None] & (m < rows)[None, :]
    place = m.to(tl.int64)[None, :] * outputs + n[:, None]
    last = True
    if SPLIT:
        tl.store(partial + part.to(tl.int64) * rows * outputs + place, sums, mask=inside)
        tl.debug_barrier()  # all of the program's parts are stored before it takes its ticket
        ticket = tickets + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        last = tl.atomic_add(ticket, 1, sem="acq_rel", scope="gpu") == parts - 1
        if last:
            sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            for other in range(parts):
                line = tl.cast(other, tl.int64) * rows * outputs
                sums += tl.load(partial + line + place, mask=inside, other=0.0, cache_modifier=".cg")
            tl.store(ticket, 0)
    if last:
        if SCALED:
            sums = sums * tl.load(scales + n, mask=n < outputs, other=0.0)[:, None]
        if BIASED:
            sums = sums + tl.load(bias + n, mask=n < outputs, other=0.0).to(tl.float32)[:, None]
        tl.store(out + place, sums.to(out.dtype.element_ty), mask=inside)


@dataclass(frozen=True)
class LinearTile:
    """Outputs and inputs per step of a program, number of parts that the inputs are split into, and launch options."""

    outputs: int = 64
    inputs: int = 128
    parts: int = 1
    warps: int = 4
    stages: int = 3

    def split(self, outputs: int, inputs: int, device: torch.device) -> list[LinearTile]:
        """The tile with each number of parts that may be the best: a few programs per multiprocessor, none too many."""
        tiles, chip = triton.cdiv(outputs, self.outputs), multiprocessors(device)
        most = max(1, inputs // _FEWEST_INPUTS)
        parts = dict.fromkeys(max(1, min(each * chip // tiles, most)) for each in _PROGRAMS_EACH)
        return [replace(self, parts=count) for count in parts]

    def shared_bytes(self, block_m: int, weight: float, x: int) -> int:
        """Shared memory of a program in bytes; weight, x: bytes per weight and per input."""
        return self.stages * self.inputs * int(self.outputs * weight + block_m * x)

    def registers(self, block_m: int) -> int:
        """Registers of a thread for its part of the sums and of the widened weights, two of which share a register."""
        return self.outputs * (block_m + self.inputs // 2) // (32 * self.warps)

    def of_runs(self, block_m: int, x: int, most: int) -> LinearTile:
        """The tile for 4-bit weights, whose steps are runs, with the stages that ``most`` bytes hold; see ``fitted``.

        Beside its sums a thread has those of a group, so many rows take fewer outputs.
        """
        tile = replace(self, inputs=RUN, outputs=min(self.outputs, _MOST_SUMS // block_m))
        while tile.shared_bytes(block_m, 0.5, x) > most and tile.stages > 2:
            tile = replace(tile, stages=tile.stages - 1)
        return tile

    def fitted(self, block_m: int, weight: int, x: int, most: int) -> LinearTile:
        """The tile with as many stages, and then inputs per step, as ``most`` bytes of shared memory hold, without
        spills.

        weight, x: bytes per weight and per input. The order of the sums stays.
        """
        tile, fewest = self, _GROUP.value if weight == 1 else 16
        while weight == 1 and block_m * tile.inputs > _LARGEST_STEP and tile.inputs > fewest:
            tile = replace(tile, inputs=tile.inputs // 2)
        while tile.shared_bytes(block_m, weight, x) > most and tile.stages > 2:
            tile = replace(tile, stages=tile.stages - 1)
        while tile.shared_bytes(block_m, weight, x) > most and tile.inputs > fewest:
            tile = replace(tile, inputs=tile.inputs // 2)
        if tile.registers(block_m) > _MOST_REGISTERS and tile.warps < _MOST_WARPS:
            tile = replace(tile, warps=_MOST_WARPS)
        while tile.registers(block_m) > _MOST_REGISTERS and tile.inputs > fewest:
            tile = replace(tile, inputs=tile.inputs // 2)
        return tile


CANDIDATES = (  # the best of 33 for int8 on an H200: the second for at most 16 rows, the third for many outputs
    LinearTile(),
    LinearTile(inputs=256),
    LinearTile(outputs=128, warps=8),
)
FOUR_BIT_CANDIDATES = (LinearTile(stages=4), LinearTile(stages=6), LinearTile(outputs=128, stages=4))
"""Never timed: half the bytes in a step of 8-bit weights, so more steps on their way. Four warps, because with eight
Triton 3.9 compiles nothing but a trap for Blackwell."""


@dataclass(frozen=True)
class Quantized:
    """Quantised weights: scales float32 [N], or [G, N] of groups of inputs; None for unchanged values; inputs: K.

    values: [N, K] float8 or unchanged; pairs of int8 (``paired``), whose scales have no groups.
    """

    values: Tensor
    scales: Tensor | None
    inputs: int

    @property
    def outputs(self) -> int:
        """N."""
        return len(self.values)

    @property
    def kind(self) -> str:
        """Name of the format, for tables of tiles."""
        groups = " in groups" if self.group else ""
        return {torch.int16: "int8", _FP8: "fp8"}.get(self.values.dtype, "same") + groups

    @property
    def group(self) -> int:
        """Number of inputs that share a scale; 0: all."""
        return pack.FLOAT8_GROUP if self.scales is not None and self.scales.dim() > 1 else 0

    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors in memory, the values first."""
        return (self.values,) if self.scales is None else (self.values, self.scales)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights and their scales."""
        return sum(tensor.nbytes for tensor in self.tensors())

    def stacked(self, others: Sequence[Quantized]) -> Quantized:
        """Stack the matrices of experts, one below the other."""
        parts = [self, *others]
        scales = [part.scales for part in parts if part.scales is not None]
        return Quantized(torch.cat([part.values for part in parts]), torch.cat(scales) if scales else None, self.inputs)

    def of_expert(self, expert: int, count: int) -> Quantized:
        """The matrix of one of ``count`` experts."""
        values = self.values.view(count, -1, self.values.shape[1])[expert]
        return Quantized(values, None if self.scales is None else self.scales.view(count, -1)[expert], self.inputs)

    def unscaled(self, dtype: torch.dtype) -> Tensor:
        """The quantised numbers [N, K]."""
        if self.values.dtype != torch.int16:
            return self.values.to(dtype)
        return unpaired(self.values, dtype)[:, : self.inputs]

    def widened(self, dtype: torch.dtype) -> Tensor:
        """The dequantised weights [N, K]."""
        if self.scales is None:
            return self.values.to(dtype)
        scales = self.scales.view(-1, self.outputs).t()
        if self.group:
            scales = scales.repeat_interleave(self.group, 1)[:, : self.inputs]
        return (self.unscaled(torch.float32) * scales).to(dtype)


def paired(values: Tensor) -> Tensor:
    """Pair int8 weights [N, K] -> [N, P] int16. K is filled up with zeros to a multiple of 64.

    In each group of 64 inputs, number i and number i + 32 are the low and the high byte of a pair.
    """
    filled = functional.pad(values, (0, -values.shape[1] % _GROUP.value))
    groups = filled.view(len(values), -1, 2, _GROUP.value // 2)
    return groups.transpose(2, 3).contiguous().view(torch.int16).flatten(1)


def unpaired(pairs: Tensor, dtype: torch.dtype) -> Tensor:
    """The weights [N, 2 P] of pairs [N, P], widened in one operation."""
    out = torch.empty(len(pairs), 2 * pairs.shape[1], dtype=dtype, device=pairs.device)
    half = _GROUP.value // 2
    out.view(len(pairs), -1, 2, half).transpose(2, 3).copy_(pairs.view(torch.int8).view(len(pairs), -1, half, 2))
    return out


def quantise(weight: Tensor, to: Format) -> KeptWeight:
    """Round a matrix [N, K] to a format: 8 bits with one scale per output, or 4 bits in groups of 32 inputs.

    It takes the memory of twice the result, and of some rows in float32.
    """
    inputs = weight.shape[1]
    return Quantized(weight, None, inputs) if to == "same" else kept(pack.quantise(weight, to), inputs)


def kept(weight: pack.Weight, inputs: int) -> KeptWeight:
    """Rounded weights as the kernel reads them. inputs: K, without what fills up groups."""
    if isinstance(weight, pack.Int8Weight):
        return Quantized(paired(weight.values), weight.scales, inputs)
    if isinstance(weight, pack.Float8Weight):
        scales = weight.scales if weight.scales.dim() == 1 else weight.scales.t().contiguous()
        return Quantized(weight.values, scales, inputs)
    assert not isinstance(weight, pack.Bf16Weight), "they are kept as they are"
    return four_bit.pack(weight, inputs)


KeptWeight = Quantized | FourBitWeight
"""The weights that the kernel reads."""


def widening(words: Tensor, x: Tensor) -> str:
    """The kernel's WIDENING for weights in such words and activations x."""
    if words.dtype != torch.int16:
        return "single"
    names = {torch.bfloat16: "bf16", torch.float16: "fp16"}
    return "pairs" if interpreted() else names.get(x.dtype, "pairs")


def most_registers(major: int) -> int | None:
    """A thread's limit of registers; None: the assembler's. For Blackwell it stops at 80 by itself, and spills."""
    return 255 if major >= 10 else None


def linear(
    x: Tensor, weight: KeptWeight, bias: Tensor | None, tile: LinearTile, tickets: Tensor, block_m: int
) -> Tensor:
    """x [M, K], in the order of the weights, -> [M, N].

    tickets: int32 zeros, one per tile of the result; they are zeros again afterwards.
    """
    rows, outputs = len(x), weight.outputs
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    partial = out if tile.parts == 1 else torch.empty((tile.parts, rows, outputs), dtype=torch.float32, device=x.device)
    four = weight if isinstance(weight, FourBitWeight) else None
    tables = weight.scales, None if four is None else four.lows, bias
    constants = {"GRID": "", "GROUP": weight.group, "SHIFTED": False} if four is None else constants_of(four)
    words = weight.tensors()[0]
    linear_kernel[(triton.cdiv(rows, block_m), triton.cdiv(outputs, tile.outputs), tile.parts)](
        x,
        words,
        *(out if table is None else table for table in tables),
        partial,
        tickets,
        out,
        rows,
        x.stride(0),
        weight.inputs,
        outputs,
        tile.parts,
        SCALED=weight.scales is not None and not weight.group,
        BIASED=bias is not None,
        SPLIT=tile.parts > 1,
        BLOCK_M=block_m,
        BLOCK_N=tile.outputs,
        BLOCK_K=tile.inputs,
        **constants,
        WIDENING=widening(words, x),
        MAJOR=capability(x.device)[0],
        num_warps=tile.warps,
        num_stages=tile.stages,
        maxnreg=most_registers(capability(x.device)[0]),
    )
    return out


Shape = tuple[str, int, int, int]  # kind of the weights, outputs, inputs, rows of a tile
Timer = Callable[[Callable[[], object]], float]
"""Runs a call several times; returns the seconds of one."""


@triton.jit
def widen_kernel(
    weight: tl.tensor,
    scales: tl.tensor,
    out: tl.tensor,
    inputs: tl.tensor,
    PAIRED: tl.constexpr,
    SCALED: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Grid (outputs, blocks of weights): the weights, times their scales if ``SCALED``, in out's type [N, K].

    GROUP: inputs that share a scale; 0: all.
    """
    line = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    scale = 1.0
    if GROUP:
        scale = tl.load(scales + place // GROUP * tl.num_programs(0) + line, mask=place < inputs, other=0.0)
    elif SCALED:
        scale = tl.load(scales + line)
    if PAIRED:
        half = _GROUP // 2
        pairs = tl.cdiv(inputs, _GROUP) * half
        w = tl.load(weight + line * pairs + place, mask=place < pairs, other=0)
        k = place // half * _GROUP + place % half
        low, high = ((w << 8) >> 8).to(tl.float32) * scale, (w >> 8).to(tl.float32) * scale
        tl.store(out + line * inputs + k, low.to(out.dtype.element_ty), mask=k < inputs)
        tl.store(out + line * inputs + k + half, high.to(out.dtype.element_ty), mask=k + half < inputs)
    else:
        w = tl.load(weight + line * inputs + place, mask=place < inputs, other=0.0).to(tl.float32) * scale
        tl.store(out + line * inputs + place, w.to(out.dtype.element_ty), mask=place < inputs)


def widen(weight: Quantized, dtype: torch.dtype, *, scaled: bool) -> Tensor:
    """The quantised numbers [N, K], times their scales if ``scaled``: ``unscaled`` and ``widened`` in one pass."""
    values, scales = weight.values, weight.scales
    assert scales is not None, "16-bit weights need no widening"
    out = torch.empty((len(values), weight.inputs), dtype=dtype, device=values.device)
    grid = len(values), triton.cdiv(values.shape[1], _WIDEN_BLOCK)
    kind = {"PAIRED": values.dtype == torch.int16, "SCALED": scaled, "GROUP": weight.group if scaled else 0}
    widen_kernel[grid](values, scales, out, weight.inputs, **kind, BLOCK=_WIDEN_BLOCK)
    return out


def widened_linear(x: Tensor, weight: KeptWeight, bias: Tensor | None) -> Tensor:
    """The product by torch with the widened matrix, for many rows: five bytes of memory traffic per weight.

    8-bit numbers are exact in 16 bits, so the matrix is widened unscaled and the sums are scaled. In float16 such sums
    may overflow, so there the matrix is scaled. With several scales an output, the matrix is scaled and rounded.
    """
    if isinstance(weight, FourBitWeight):
        return functional.linear(x, widen_four_bit(weight, x.dtype), bias)
    if weight.scales is None:
        return functional.linear(x, weight.values, bias)
    if x.dtype == torch.float16 or weight.group:
        return functional.linear(x, widen(weight, x.dtype, scaled=True), bias)
    sums = functional.linear(x, widen(weight, x.dtype, scaled=False))
    return sums.mul_(weight.scales) if bias is None else (sums * weight.scales + bias).to(x.dtype)


class Linears:
    """Makes linear layers (a ``LinearFactory``) whose weights are kept in ``to``, and chooses their tiles by shape.

    deterministic: tiles that do not depend on the number of rows, so that a row's bits do not depend on its neighbours.
    rounds_rows: whether float8 weights are multiplied by activations in float8 (``Float8Linear``), where that fits.
    timer: times the candidates for a new shape at its first use, never inside a CUDA graph; None takes the first one
        whose product is right.
    tiles: the tiles chosen so far, by shape; ``models.load.kept_tiles`` fills it when a model is loaded.
    """

    def __init__(
        self, to: Format, *, deterministic: bool = False, rounds_rows: bool = False, timer: Timer | None = None
    ) -> None:
        self.to, self.deterministic, self.rounds_rows, self._timer = to, deterministic, rounds_rows, timer
        self.row_tiles = FOUR_BIT_ROW_TILES if to == "int4" else ROW_TILES
        self.tiles: dict[Shape, LinearTile | None] = {}

    def __call__(self, weights: LinearWeights) -> SmallRowLinear | Float8Linear:
        inputs = weights.weight.shape[1]
        if self.to == "same":
            return SmallRowLinear(Quantized(weights.weight, None, inputs), weights.bias, self)
        rounded = weights.rounded(self.to)
        if self.rounds_rows and isinstance(rounded, pack.Float8Weight) and Float8Linear.fits(rounded):
            return Float8Linear(rounded.values, rounded.scales, weights.bias)
        return SmallRowLinear(kept(rounded, inputs), weights.bias, self)

    def block_m(self, rows: int) -> int:
        """Rows of a program's tile."""
        tiles = self.row_tiles
        return FIXED_ROWS if self.deterministic else next((m for m in tiles if rows <= m), tiles[-1])

    def shape(self, layer: SmallRowLinear, rows: int) -> Shape:
        """The key that a tile is chosen by."""
        return layer.weight.kind, layer.weight.outputs, layer.weight.inputs, self.block_m(rows)

    def candidates(self, layer: SmallRowLinear, x: Tensor) -> list[LinearTile | None]:
        """The tiles that may be the fastest for x's rows; None stands for torch's own product."""
        _, outputs, inputs, block_m = self.shape(layer, x.shape[0])
        size, most = x.element_size(), shared_memory(x.device)
        if isinstance(layer.weight, FourBitWeight):
            fitted = [tile.of_runs(block_m, size, most) for tile in FOUR_BIT_CANDIDATES]
        else:
            bytes_each, step = size if layer.weight.scales is None else 1, layer.weight.group
            tiles = [replace(tile, inputs=min(tile.inputs, step or tile.inputs)) for tile in CANDIDATES]
            fitted = [tile.fitted(block_m, bytes_each, size, most) for tile in tiles]
        split = [part for tile in fitted for part in tile.split(outputs, inputs, x.device)]
        widens = block_m == ROW_TILES[-1] and not self.deterministic
        return [*dict.fromkeys(split), *([None] if widens else [])]

    def tile(self, layer: SmallRowLinear, x: Tensor) -> LinearTile | None:
        """The tile for x's rows, checked once per shape, and measured if there is a timer. None: torch's own product.

        A shape's first use is never inside a CUDA graph: programs are run once before they are captured.
        """
        if x.shape[0] > LARGEST_ROWS and not self.deterministic:
            return None
        shape = self.shape(layer, x.shape[0])
        if shape not in self.tiles:
            timer, probe = self._timer, _probe(x, shape)
            self.tiles[shape] = self.first_right(layer, probe) if timer is None else self.fastest(layer, x, timer)
        return self.tiles[shape]

    def first_right(self, layer: SmallRowLinear, x: Tensor) -> LinearTile | None:
        """The first candidate for x's rows whose product is right on this GPU.

        Raises ParameterError if there is none in deterministic mode, which does not use torch's product.
        """
        expected = layer.run(x, None)
        for tile in self.candidates(layer, x):
            if tile is None or is_right(layer, x, tile, expected):
                return tile
        if self.deterministic:
            raise ParameterError("deterministic", True, "False: every kernel computes wrong products on this GPU")
        return None

    def fastest(self, layer: SmallRowLinear, x: Tensor, timer: Timer) -> LinearTile | None:
        """The fastest candidate for x's rows whose product is right on this GPU: a compiler had one of them wrong."""
        expected = layer.run(x, None)
        right = [tile for tile in self.candidates(layer, x) if tile is None or is_right(layer, x, tile, expected)]
        tiles = right or [None]
        timed = [(timer(lambda tile=tile: layer.run(x, tile)), place) for place, tile in enumerate(tiles)]  # type: ignore[misc]
        return tiles[min(timed)[1]]


def _probe(x: Tensor, shape: Shape) -> Tensor:
    """Random activations like x, which itself may be of a broken prompt, for a whole tile of rows."""
    generator = torch.Generator(x.device).manual_seed(0)
    return torch.randn(shape[3], shape[2], dtype=x.dtype, device=x.device, generator=generator)


def is_right(layer: SmallRowLinear, x: Tensor, tile: LinearTile, expected: Tensor) -> bool:
    """Whether the tile's product of x [M, K] equals ``expected`` [M, N], torch's, but for rounding. Warns if not."""
    shape = f"{x.shape[0]} x {x.shape[1]} by {layer.weight.outputs}"
    return is_close(layer.run(x, tile), expected, f"{shape}, {tile}")


def is_close(product: Tensor, expected: Tensor, shape: str) -> bool:
    """Whether a kernel's product equals torch's but for rounding. Warns if not. shape: for the message.

    An error counts relative to the number and to the root mean square of all, because sums may cancel.
    """
    found, wanted = product.float(), expected.float()
    size = wanted.abs() + wanted.square().mean().sqrt()
    if bool(((found - wanted).abs() <= _TOLERANCE * size).all()):
        return True
    log.warning("a GPU kernel computes wrong products on this GPU and is not used (%s)", shape)
    return False


class SmallRowLinear:
    """A linear layer for few rows; implements ``models.torch.linear.Linear``."""

    def __init__(self, weight: KeptWeight, bias: Tensor | None, linears: Linears) -> None:
        self.weight, self.bias, self.linears = weight, bias, linears
        tiles = triton.cdiv(weight.outputs, min(tile.outputs for tile in (*CANDIDATES, *FOUR_BIT_CANDIDATES)))
        device = weight.tensors()[0].device
        self._tickets = torch.zeros(tiles * (LARGEST_ROWS // 16), dtype=torch.int32, device=device)

    def __call__(self, x: Tensor) -> Tensor:
        lines = x.reshape(-1, x.shape[-1])
        if isinstance(self.weight, FourBitWeight) and self.weight.order is not None:
            lines = lines.index_select(1, self.weight.order)
        return self.run(lines, self.linears.tile(self, lines)).view(*x.shape[:-1], -1)

    def run(self, x: Tensor, tile: LinearTile | None) -> Tensor:
        """x [M, K], in the order of the weights, -> [M, N] with the given tile; None: by torch's own product."""
        if tile is None:
            return widened_linear(x, self.weight, self.bias)
        if tile.parts == 1 or x.shape[0] <= LARGEST_ROWS:  # splitting the inputs of more rows would take much memory
            return linear(x, self.weight, self.bias, tile, self._tickets, self.linears.block_m(x.shape[0]))
        return torch.cat([self.run(part, tile) for part in torch.split(x, LARGEST_ROWS)])

    def tensors(self) -> tuple[Tensor, ...]:
        return self.weight.tensors() if self.bias is None else (*self.weight.tensors(), self.bias)
