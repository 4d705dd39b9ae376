"""Products with 4-bit weights for the kernels that have such matrices, and their widening; see ``four_bit``.

Codes are widened to the activations' type, which holds them exactly, and 32 inputs are a product of their own. Scales
and lows are applied to its sums in float32, so no weight is rounded.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.gpu.four_bit import MIDDLE, RUN, WORDS, FourBitWeight

_WIDEN_OUTPUTS = 32  # outputs per program of ``widen_four_bit``, which has one run of each

_RUN, _WORDS, _MIDDLE = tl.constexpr(RUN), tl.constexpr(WORDS), tl.constexpr(MIDDLE)
_EXPONENT = tl.constexpr(23)  # place of a float32's exponent
_SUBNORMAL = tl.constexpr(1 << 22)  # the bits of 2 ** -127

# Each takes two words and returns, for each of their four codes, the pair of their numbers. A code of "int4" is put
# into the mantissa of 128 (1024 in float16), and 8 more than that is taken away. A code of "fp4" has a sign, two bits
# of exponent and one of mantissa, which are put where the activations' type has them; a factor mends the exponent.
_INT4_TO_BF16 = tl.constexpr("""{
    .reg .b32 part, one, less;
    mov.b32 one, 0x3F803F80;
    mov.b32 less, 0xC308C308;
    lop3.b32 part, $4, 0x000F000F, 0x43004300, 0xEA;
    fma.rn.bf16x2 $0, part, one, less;
    shr.u32 part, $4, 4;
    lop3.b32 part, part, 0x000F000F, 0x43004300, 0xEA;
    fma.rn.bf16x2 $1, part, one, less;
    shr.u32 part, $4, 8;
    lop3.b32 part, part, 0x000F000F, 0x43004300, 0xEA;
    fma.rn.bf16x2 $2, part, one, less;
    shr.u32 part, $4, 12;
    lop3.b32 part, part, 0x000F000F, 0x43004300, 0xEA;
    fma.rn.bf16x2 $3, part, one, less;
}""")
_INT4_TO_FP16 = tl.constexpr("""{
    .reg .b32 part, less;
    mov.b32 less, 0xE408E408;
    lop3.b32 part, $4, 0x000F000F, 0x64006400, 0xEA;
    add.rn.f16x2 $0, part, less;
    shr.u32 part, $4, 4;
    lop3.b32 part, part, 0x000F000F, 0x64006400, 0xEA;
    add.rn.f16x2 $1, part, less;
    shr.u32 part, $4, 8;
    lop3.b32 part, part, 0x000F000F, 0x64006400, 0xEA;
    add.rn.f16x2 $2, part, less;
    shr.u32 part, $4, 12;
    lop3.b32 part, part, 0x000F000F, 0x64006400, 0xEA;
    add.rn.f16x2 $3, part, less;
}""")
_FP4_TO_BF16 = tl.constexpr("""{
    .reg .b32 part, sign, factor, zero;
    mov.b32 factor, 0x7E807E80;
    mov.b32 zero, 0x80008000;
    shl.b32 part, $4, 6;
    shl.b32 sign, $4, 12;
    and.b32 part, part, 0x01C001C0;
    lop3.b32 part, sign, 0x80008000, part, 0xEA;
    fma.rn.bf16x2 $0, part, factor, zero;
    shl.b32 part, $4, 2;
    shl.b32 sign, $4, 8;
    and.b32 part, part, 0x01C001C0;
    lop3.b32 part, sign, 0x80008000, part, 0xEA;
    fma.rn.bf16x2 $1, part, factor, zero;
    shr.u32 part, $4, 2;
    shl.b32 sign, $4, 4;
    and.b32 part, part, 0x01C001C0;
    lop3.b32 part, sign, 0x80008000, part, 0xEA;
    fma.rn.bf16x2 $2, part, factor, zero;
    shr.u32 part, $4, 6;
    and.b32 part, part, 0x01C001C0;
    lop3.b32 part, $4, 0x80008000, part, 0xEA;
    fma.rn.bf16x2 $3, part, factor, zero;
}""")
_FP4_TO_FP16 = tl.constexpr("""{
    .reg .b32 part, sign, factor;
    mov.b32 factor, 0x74007400;
    shl.b32 part, $4, 9;
    shl.b32 sign, $4, 12;
    and.b32 part, part, 0x0E000E00;
    lop3.b32 part, sign, 0x80008000, part, 0xEA;
    mul.rn.f16x2 $0, part, factor;
    shl.b32 part, $4, 5;
    shl.b32 sign, $4, 8;
    and.b32 part, part, 0x0E000E00;
    lop3.b32 part, sign, 0x80008000, part, 0xEA;
    mul.rn.f16x2 $1, part, factor;
    shl.b32 part, $4, 1;
    shl.b32 sign, $4, 4;
    and.b32 part, part, 0x0E000E00;
    lop3.b32 part, sign, 0x80008000, part, 0xEA;
    mul.rn.f16x2 $2, part, factor;
    shr.u32 part, $4, 3;
    and.b32 part, part, 0x0E000E00;
    lop3.b32 part, $4, 0x80008000, part, 0xEA;
    mul.rn.f16x2 $3, part, factor;
}""")


@triton.jit
def code_of(words: tl.tensor, PLACE: tl.constexpr, GRID: tl.constexpr) -> tl.tensor:
    """The numbers, float32, of the codes at ``PLACE`` (0 to 3) of words, before their scale."""
    code = (words.to(tl.int32) >> (4 * PLACE)) & 15
    if GRID == "int4":
        return (code - _MIDDLE).to(tl.float32)
    size, exponent = (code & 1) + 2, (code >> 1) & 3  # half of mantissa and exponent; those of 0 and 0.5 have none
    number = tl.where(exponent == 0, (code & 1).to(tl.float32), (size << exponent).to(tl.float32) * 0.5) * 0.5
    return tl.where(code < 8, number, -number)


@triton.jit
def codes_of(words: tl.tensor, TYPE: tl.constexpr, GRID: tl.constexpr, BY: tl.constexpr) -> tl.tensor:
    """The four numbers of each word, in a type. BY: its name if the instructions above widen to it (``WIDENING``)."""
    if BY == "bf16":
        return tl.inline_asm_elementwise(
            _INT4_TO_BF16 if GRID == "int4" else _FP4_TO_BF16, "=r,=r,=r,=r,r", [words],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    elif BY == "fp16":
        return tl.inline_asm_elementwise(
            _INT4_TO_FP16 if GRID == "int4" else _FP4_TO_FP16, "=r,=r,=r,=r,r", [words],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return (
            code_of(words, 0, GRID).to(TYPE), code_of(words, 1, GRID).to(TYPE),
            code_of(words, 2, GRID).to(TYPE), code_of(words, 3, GRID).to(TYPE),
        )  # fmt: skip


@triton.jit
def of_groups(
    table: tl.tensor, run: tl.tensor, n: tl.tensor, outputs: tl.tensor, GROUP: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """The entries of a table [G, N] for outputs ``n`` and each 32 inputs of a run."""
    there, of_run = n < outputs, tl.cast(outputs, tl.int64)
    line = table + run * (_RUN // GROUP) * of_run + n
    e0 = tl.load(line, mask=there, other=0)
    e1 = tl.load(line + of_run, mask=there, other=0) if GROUP == 32 else e0
    e2 = tl.load(line + 64 // GROUP * of_run, mask=there, other=0) if GROUP < 128 else e0
    e3 = tl.load(line + 3 * of_run, mask=there, other=0) if GROUP == 32 else e2
    return e0, e1, e2, e3


@triton.jit
def scale_of(stored: tl.tensor, GRID: tl.constexpr) -> tl.tensor:
    """float32 of scales as they are stored."""
    if GRID == "int4":
        return stored.to(tl.float32)
    exponent = stored.to(tl.int32)
    return tl.where(exponent == 0, _SUBNORMAL, exponent << _EXPONENT).to(tl.float32, bitcast=True)


@triton.jit
def four_bit_sums(
    x_line: tl.tensor,
    live: tl.tensor,
    words: tl.tensor,
    scales: tl.tensor,
    lows: tl.tensor,
    n: tl.tensor,
    outputs: tl.tensor,
    start: tl.tensor,
    stop: tl.tensor,
    SHIFTED: tl.constexpr,
    GRID: tl.constexpr,
    GROUP: tl.constexpr,
    BY: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> tl.tensor:
    """Sums [BLOCK_N, BLOCK_M], float32, over the inputs from ``start``, which begins a run, to ``stop``.

    x_line: pointers to the lines of activations [1, BLOCK_M]; live [BLOCK_M]: those that there are.
    words, scales, lows: of one matrix (``FourBitWeight``). n: the program's outputs [BLOCK_N].
    SHIFTED: whether the matrix has lows. BY: see ``codes_of``.
    """
    there, word, of_run = n < outputs, tl.arange(0, _WORDS), tl.cast(outputs, tl.int64)
    words_line = words + n.to(tl.int64)[:, None] * _WORDS + word[None, :]
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for run in range(start // _RUN, tl.cdiv(stop, _RUN)):
        of_scales = of_groups(scales, run, n, outputs, GROUP)  # first, because they are on their way for long
        of_lows = of_groups(lows, run, n, outputs, GROUP) if SHIFTED else of_scales
        w = tl.load(words_line + run * of_run * _WORDS, mask=there[:, None], other=0)
        numbers = codes_of(w, x_line.dtype.element_ty, GRID, BY)
        for part in tl.static_range(0, 4):
            scale = scale_of(of_scales[part], GRID)[:, None]
            k = run * _RUN + part * _WORDS + word
            a = tl.load(x_line + k[:, None], mask=(k < stop)[:, None] & live[None, :], other=0.0)
            sums += tl.dot(numbers[part], a, input_precision="ieee") * scale
            if SHIFTED:  # the sum of the inputs, by the tensor cores, in the layout of the other sums
                shift = of_lows[part].to(tl.float32)[:, None] + _MIDDLE * scale
                ones = tl.full([BLOCK_N, _WORDS], 1.0, a.dtype)
                sums += tl.dot(ones, a, input_precision="ieee") * shift
    return sums


def constants_of(weight: FourBitWeight) -> dict[str, Any]:
    """The constants of kernels that describe the weights."""
    return {
        "GRID": weight.grid,
        "GROUP": weight.group,
        "SHIFTED": weight.lows is not None,
    }


@triton.jit
def widen_four_bit_kernel(
    words: tl.tensor,
    scales: tl.tensor,
    lows: tl.tensor,
    out: tl.tensor,
    inputs: tl.tensor,
    outputs: tl.tensor,
    GRID: tl.constexpr,
    GROUP: tl.constexpr,
    SHIFTED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Grid (output blocks, runs): the numbers of one matrix, in out's type [N, K]."""
    n, run = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1)
    there, word = n < outputs, tl.arange(0, _WORDS)
    of_scales = of_groups(scales, run, n, outputs, GROUP)
    of_lows = of_groups(lows, run, n, outputs, GROUP) if SHIFTED else of_scales
    in_run = (run * tl.cast(outputs, tl.int64) + n)[:, None] * _WORDS + word[None, :]
    w = tl.load(words + in_run, mask=there[:, None], other=0)
    for part in tl.static_range(0, 4):
        scale = scale_of(of_scales[part], GRID)[:, None]
        numbers = code_of(w, part, GRID) * scale
        if SHIFTED:
            numbers += of_lows[part].to(tl.float32)[:, None] + _MIDDLE * scale
        k = run * _RUN + part * _WORDS + word
        into = out + n.to(tl.int64)[:, None] * inputs + k[None, :]
        tl.store(into, numbers.to(out.dtype.element_ty), mask=there[:, None] & (k < inputs)[None, :])


def widen_four_bit(weight: FourBitWeight, dtype: torch.dtype) -> Tensor:
    """The numbers of one matrix [N, K], rounded to a type, its inputs in its own order."""
    out = torch.empty((weight.outputs, weight.inputs), dtype=dtype, device=weight.words.device)
    tables = (out if table is None else table for table in (weight.scales, weight.lows))
    grid = triton.cdiv(weight.outputs, _WIDEN_OUTPUTS), weight.words.shape[0]
    sizes = weight.inputs, weight.outputs
    widen_four_bit_kernel[grid](weight.words, *tables, out, *sizes, **constants_of(weight), BLOCK=_WIDEN_OUTPUTS)
    return out
