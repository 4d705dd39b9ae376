"""Rotary positions in torch. Shapes: B rows, L new tokens per row."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.models.description.spec import Rotary

Rotation = tuple[Tensor, Tensor]  # cos and signed sin, each [B, L, 1, R]: the first R of a head's D elements turn


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate the pairs (i, i + R/2) of x [B, L, heads, D] -> the same shape. The sine includes the sign."""
    cos, sin = rotation
    rotated = cos.shape[-1]
    if rotated < x.shape[-1]:
        return torch.cat((rotate(x[..., :rotated], rotation), x[..., rotated:]), -1)
    return torch.addcmul(x * cos, x.roll(rotated // 2, -1), sin)


class RotaryAngles:
    """Computes cos and sin of the rotary angles: positions [B, L] -> two tensors [B, L, 1, R]."""

    def __init__(self, rotary: Rotary, dtype: torch.dtype, device: torch.device) -> None:
        frequencies = torch.tensor(rotary.inverse_frequencies, dtype=torch.float32, device=device)
        self._frequencies = torch.cat((-frequencies, frequencies))  # sin is odd: this gives the signs of rotate-half
        self._scaling, self._dtype = rotary.scaling, dtype

    def __call__(self, positions: Tensor) -> Rotation:
        angles = positions[:, :, None, None] * self._frequencies
        cos, sin = angles.cos(), angles.sin()
        if self._scaling != 1.0:
            cos, sin = cos * self._scaling, sin * self._scaling
        return cos.to(self._dtype), sin.to(self._dtype)
