"""Packed 4-bit weights against the numbers that they were made of."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from kernels.gpu.four_bit_support import grouped, mxfp4
from paceline.kernels.gpu.four_bit import FourBitWeight, Grid, empty, pack, stack
from paceline.kernels.pack import FP4, Fp4Weight, Int4Weight, dequantise, fp4_numbers, quantise


def of_fp4(weight: Fp4Weight) -> torch.Tensor:
    return fp4_numbers(weight.values, weight.exponents.repeat_interleave(32, 1))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("inputs", "group", "kept"), [(32, 32, 32), (352, 32, 32), (384, 64, 64), (512, 256, 128)])
def test_packed_codes_are_the_numbers_of_their_file(inputs: int, group: int, kept: int, symmetric: bool) -> None:
    """In the widest groups that say the same; symmetric ones keep no lows. Beside others in a stack, in theirs."""
    weight = grouped(7, inputs, group, symmetric=symmetric)
    packed = pack(weight, inputs)
    expected = dequantise(weight, inputs)
    torch.testing.assert_close(packed.widened(), expected, atol=1e-6, rtol=0)
    assert (packed.group, packed.lows is None) == (kept, symmetric)
    other = grouped(7, inputs, 32)
    both = stack([packed, pack(other, inputs)])
    torch.testing.assert_close(both.widened(), torch.stack([expected, dequantise(other, inputs)]), atol=1e-6, rtol=0)
    assert shapes(both) == shapes(empty((2, 7, inputs), "int4", 32, shifted=True, device=torch.device("meta")))


def shapes(weight: FourBitWeight) -> tuple[Grid, int, list[tuple[torch.Size, torch.dtype]]]:
    return weight.grid, weight.group, [(tensor.shape, tensor.dtype) for tensor in weight.tensors()]


def test_rounded_matrices_of_any_width_are_packed() -> None:
    matrix = torch.randn(5, 77)
    weight = quantise(matrix, "int4")
    assert isinstance(weight, Int4Weight)
    torch.testing.assert_close(pack(weight, 77).widened(), dequantise(weight, 77), atol=1e-6, rtol=0)


def test_mxfp4_keeps_every_code_and_exponent() -> None:
    weight = mxfp4(5, 96)
    assert torch.equal(pack(weight, 96).widened(), of_fp4(weight))
    assert shapes(pack(weight, 96)) == shapes(empty((5, 96), "fp4", 32, shifted=False, device=torch.device("meta")))


def test_inputs_in_another_order_come_back_in_the_layers() -> None:
    order = torch.randperm(256)
    weight = grouped(3, 256, 64)
    turned = Int4Weight(weight.values[:, order], weight.scales, weight.lows, 32, order)
    expected = dequantise(replace(turned, order=None), 256)
    assert torch.equal(pack(turned, 256).widened()[:, order], expected)
    assert torch.equal(dequantise(turned, 256)[:, order], expected)


BITS: dict[str, Callable[..., int]] = {
    "mov": lambda a: a,
    "shr": lambda a, b: a >> b,
    "shl": lambda a, b: a << b,
    "and": lambda a, b: a & b,
    "lop3": lambda a, b, c, _table: (a & b) | c,  # its table is 0xEA everywhere
}
NUMBERS: dict[str, Callable[..., torch.Tensor]] = {
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b,
    "fma": lambda a, b, c: a * b + c,
}


def pair(bits: int, dtype: torch.dtype) -> torch.Tensor:
    """The two numbers of a register."""
    return torch.tensor([bits & 0xFFFF, bits >> 16], dtype=torch.int32).to(torch.int16).view(dtype)


def run_ptx(text: str, word: int) -> list[torch.Tensor]:
    """The pairs [2] that the instructions make of a 32-bit register: a reading of the few that ``codes_of`` has."""
    registers, dtype = {"$4": word}, torch.bfloat16 if "bf16" in text else torch.float16
    for kind, operands in re.findall(r"^ +([a-z]\w*)\.\S+ (.*);$", text, re.MULTILINE):
        into, *names = operands.split(", ")
        values = [registers[name] if name in registers else int(name, 0) for name in names]
        if kind in BITS:
            registers[into] = BITS[kind](*values) & 0xFFFFFFFF
        else:
            found = NUMBERS[kind](*(pair(value, dtype).double() for value in values)).to(dtype)
            low, high = (int(number) & 0xFFFF for number in found.view(torch.int16))
            registers[into] = low | high << 16
    return [pair(registers[f"${place}"], dtype) for place in range(4)]


@pytest.mark.parametrize("name", ["_INT4_TO_BF16", "_INT4_TO_FP16", "_FP4_TO_BF16", "_FP4_TO_FP16"])
def test_the_instructions_widen_every_code_exactly(name: str) -> None:
    """Which no device has run yet; the interpreter takes Triton's own conversions."""
    pytest.importorskip("triton", reason="triton is not installed")
    from paceline.kernels.gpu import four_bit_kernels

    text = getattr(four_bit_kernels, name).value
    exact = torch.arange(16) - 8 if "INT4" in name else torch.tensor([*FP4, *(-number for number in FP4)])
    for code in range(16):
        codes = [(code + 5 * place) % 16 for place in range(8)]
        word = sum(code << (4 * place) for place, code in enumerate(codes))
        for place, found in enumerate(run_ptx(text, word)):
            assert found.tolist() == [exact[codes[place]], exact[codes[place + 4]]]
