"""Keys and values in 8 bits: the form in which a cache stores a vector, and back.

A stored vector is its elements, then its scale as float32 in 4 more bytes of the same table, so that tables are
copied, cut and moved like those of 16 bits, and the last elements of a key stay a vector with its scale. Elements are
int8, rounded to nearest even, or float8 (e4m3); the scale is the largest magnitude over the largest element.

A scale belongs to one vector: one layer, row, head and position. If neighbouring positions shared it, a rejected draft
token would change the bits of the text beside it, and speculation would no longer equal plain decoding. float32 keeps
the scale exact; bfloat16 would save 3 % of the bytes and add its own rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}  # largest element of each dtype of 8 bits
SCALE_BYTES = 4
_TAIL = 4.0  # a bias is constant; the other channels' numbers reach about 4 times their usual size
_SILENT = 1e-30  # vectors below it are stored as zeros: LARGEST / magnitude must stay finite


def stored_width(width: int, dtype: torch.dtype) -> int:
    """Elements of a table of ``dtype`` that a vector of ``width`` numbers takes, its scale included."""
    return width + SCALE_BYTES if dtype in LARGEST else width


def vector_width(table: Tensor) -> int:
    """Width of the vectors in a table [..., stored width]."""
    return table.shape[-1] - (SCALE_BYTES if table.dtype in LARGEST else 0)


def stored(vectors: Tensor, dtype: torch.dtype) -> Tensor:
    """Vectors [..., W] as a table of ``dtype`` stores them: [..., stored width].

    In 8 bits a vector that is not finite gets the scale NaN, so that all that attends to it is NaN.
    """
    if dtype not in LARGEST:
        return vectors.to(dtype)
    exact = vectors.float()
    magnitude = exact.abs().amax(-1, keepdim=True)
    finite = magnitude.isfinite()
    loud = finite & (magnitude > _SILENT)
    scaled = torch.where(loud, exact * (LARGEST[dtype] / magnitude), 0.0)
    elements = scaled.round().to(dtype) if dtype == torch.int8 else scaled.to(dtype)
    scales = torch.where(loud, magnitude / LARGEST[dtype], torch.where(finite, 0.0, torch.nan))
    return torch.cat((elements.view(torch.int8), scales.view(torch.int8)), -1).view(dtype)


def restored(table: Tensor, dtype: torch.dtype) -> Tensor:
    """The vectors [..., W] of a table [..., stored width], in ``dtype``."""
    if table.dtype not in LARGEST:
        return table.to(dtype)
    return (table[..., :-SCALE_BYTES].float() * scales_of(table)[..., None]).to(dtype)


def key_balance(bias: Tensor, rotated: int) -> Tensor:
    """Divisors [G, D] float32 of keys, and factors of the queries on them, for keys with a bias [G, D].

    They are powers of 2, so that scores keep their bits before the keys are rounded. Without them a channel with a
    large bias, such as Qwen2's of up to 158 beside a median of 2, takes the other channels' bits.

    rotated: leading elements that are rotated, in pairs of one of each half, which have one divisor.
    """
    sizes = bias.float().abs()
    pairs = sizes[:, :rotated].view(len(sizes), 2, -1).amax(1)
    sizes = torch.cat((pairs, pairs, sizes[:, rotated:]), 1)
    least = sizes.median().clamp(min=_SILENT)  # smaller biases are lost beside the rest of a key
    return torch.exp2((sizes / _TAIL).clamp(min=least).log2().round())


def scales_of(table: Tensor) -> Tensor:
    """The scales [...] float32 of a table [..., stored width] of 8 bits, whose width must be a multiple of 4."""
    return table[..., -SCALE_BYTES:].view(torch.float32)[..., 0]
