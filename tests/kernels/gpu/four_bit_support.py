"""Random 4-bit weights."""

from __future__ import annotations

import torch

from paceline.kernels.pack import Fp4Weight, Int4Weight


def grouped(outputs: int, inputs: int, group: int, *, symmetric: bool = False) -> Int4Weight:
    """Random codes whose scales and lows are the same in ``group`` inputs, told by groups of 32."""
    repeats, groups = group // 32, -(-inputs // group)
    scales, lows = (
        part.half().repeat_interleave(repeats, 1)[:, : -(-inputs // 32)]
        for part in (torch.rand(outputs, groups) * 0.01, torch.randn(outputs, groups) * 0.05)
    )
    codes = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8)
    return Int4Weight(codes, scales, -8 * scales if symmetric else lows, 32)


def mxfp4(outputs: int, inputs: int) -> Fp4Weight:
    exponents = torch.randint(118, 124, (outputs, inputs // 32), dtype=torch.uint8)
    return Fp4Weight(torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8), exponents)
