"""Packed 4-bit weights against the numbers that they were made of."""

from __future__ import annotations

import pytest
import torch

from kernels.gpu.four_bit_support import grouped, mxfp4
from paceline.kernels.gpu.four_bit import FourBitWeight, Grid, empty, pack, stack
from paceline.kernels.pack import Fp4Weight, Int4Weight, dequantise, fp4_numbers, quantise


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
    expected = dequantise(turned, 256)
    assert torch.equal(pack(turned, 256).widened()[:, order], expected)
