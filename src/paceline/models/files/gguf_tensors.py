"""Tensors of GGUF files: their types, their numbers, and what becomes of them in the kernels' formats.

Tensors are dequantized by the ``gguf`` package. Three types of 4 bits have groups of 32 values, like int4, so their
codes are taken as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from paceline.errors import ModelFormatError
from paceline.kernels.pack import Coding, Format, Int4Weight, Weight, fp4_of

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
_CHUNK = 1 << 18  # values dequantized at a time: fits the CPU cache and avoids a float32 copy of the whole tensor
_GROUP = 32  # values that share a scale in Q4_0, Q4_1 and Q4_K, and in int4
_PLAIN = {
    GGMLQuantizationType.F64: np.float64,
    GGMLQuantizationType.F32: np.float32,
    GGMLQuantizationType.F16: np.float16,
}

# Types without weights in them: indices, and rounded activations that llama.cpp makes while it runs. Q1_0 is a weight
# that the gguf package does not dequantize yet.
UNREADABLE = frozenset(GGMLQuantizationType[name] for name in ["I8", "I16", "I32", "I64", "Q8_1", "Q8_K", "Q1_0"])
READABLE = tuple(kind for kind in GGMLQuantizationType if kind not in UNREADABLE)

PrecisionLoss = Literal["as stored", "scales rounded", "rounded"]
_EXACT: dict[Format, frozenset[GGMLQuantizationType]] = {
    "bf16": frozenset(GGMLQuantizationType[name] for name in ["BF16", "MXFP4", "NVFP4"]),
    "int8": frozenset(),  # one scale per row, where every GGUF type has one per 16, 32 or 256 values
    "int4": frozenset(GGMLQuantizationType[name] for name in ["Q4_0", "Q4_1", "TQ1_0", "TQ2_0"]),
}


def precision_loss(quant_type: GGMLQuantizationType, weight_format: Format) -> PrecisionLoss:
    """Return what a tensor's numbers lose in a format of the kernels.

    "scales rounded": the codes stay, and products of two scales are rounded to float16.
    """
    if quant_type in _EXACT[weight_format]:
        return "as stored"
    return "scales rounded" if weight_format == "int4" and quant_type in _INT4_GROUPS else "rounded"


@dataclass(frozen=True)
class PackedTensor:
    """A tensor as stored in the file. shape: in torch's order, rows first."""

    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    rows: Bytes  # [rows, bytes per row]

    @property
    def stored_as(self) -> str:
        """Name of the type, for messages."""
        return str(self.kind.name)

    def permuted(self, heads: int) -> PackedTensor:
        """Reorder the rows of each head from llama.cpp's rotary pairs (i, i + 1) to Hugging Face's (i, i + D/2)."""
        count, width = self.rows.shape
        pairs = self.rows.reshape(heads, count // heads // 2, 2, width).swapaxes(1, 2)
        return PackedTensor(self.kind, self.shape, pairs.reshape(count, width))

    def matrix(self, index: int) -> PackedTensor:
        """Return one of the matrices of a tensor of three dimensions."""
        height = self.shape[1]
        return PackedTensor(self.kind, self.shape[1:], self.rows[index * height : (index + 1) * height])

    def unpack_into(self, destination: Tensor) -> None:
        """Dequantize into ``destination``, which has ``shape``, a few rows at a time. Raises ModelFormatError."""
        lines = destination.view(len(self.rows), -1)
        step = max(1, _CHUNK // lines.shape[1])
        for first in range(0, len(self.rows), step):
            lines[first : first + step].copy_(_numbers(self.rows[first : first + step], self.kind))

    def codes(self, to: Coding) -> Weight | None:
        """Return the stored codes as a weight of this format; None if the format cannot hold them."""
        if len(self.shape) != 2:
            return None
        if (to, self.kind) == ("fp4", GGMLQuantizationType.MXFP4):
            blocks = self.rows.reshape(-1, 17)
            codes, exponents = torch.from_numpy(_nibbles(blocks[:, 1:])), torch.from_numpy(blocks[:, 0].copy())
            return fp4_of(codes.view(self.shape), exponents.view(self.shape[0], -1))
        split = _INT4_GROUPS.get(self.kind)
        if to != "int4" or split is None:
            return None
        values, scales, lows = split(self.rows)
        if not np.isfinite(scales).all() or not np.isfinite(lows).all():
            return None  # beyond float16's largest number: rounded like any other tensor
        groups = (self.shape[0], -1)
        return Int4Weight(
            torch.from_numpy(values).view(self.shape),
            torch.from_numpy(scales).view(groups),
            torch.from_numpy(lows).view(groups),
            _GROUP,
        )


def _numbers(rows: Bytes, kind: GGMLQuantizationType) -> Tensor:
    """Dequantize packed rows -> float32 [rows, width]."""
    if kind in UNREADABLE:
        raise ModelFormatError(f"tensors of type {kind.name} cannot be read as weights; convert the model to Q8_0")
    plain = _PLAIN.get(kind)
    try:
        with np.errstate(all="ignore"):  # a damaged scale may be infinite
            numbers = dequantize(rows, kind) if plain is None else rows.view(plain).astype(np.float32)
    except (NotImplementedError, ValueError, IndexError) as error:
        raise ModelFormatError(f"a tensor of type {kind.name} cannot be dequantized: {error}") from error
    return torch.from_numpy(numbers)


# The codes of 4-bit types: bytes [rows, bytes] -> codes uint8 [groups, 32], scales and lows float16 [groups], where a
# number is code * scale + low.

_Groups = tuple[Bytes, npt.NDArray[np.float16], npt.NDArray[np.float16]]


def _q4_0(rows: Bytes) -> _Groups:
    blocks = rows.reshape(-1, 18)
    scales = _halves(blocks, 0)
    return _nibbles(blocks[:, 2:]), scales, _rounded(-8 * scales.astype(np.float32))


def _q4_1(rows: Bytes) -> _Groups:
    blocks = rows.reshape(-1, 20)
    return _nibbles(blocks[:, 4:]), _halves(blocks, 0), _halves(blocks, 2)


def _q4_k(rows: Bytes) -> _Groups:
    """Blocks of 8 groups. The products of a block's float16 and a group's 6 bits are rounded to float16."""
    blocks = rows.reshape(-1, 144)
    scales, minima = _six_bits(blocks[:, 4:16])
    step, least = (_halves(blocks, at).astype(np.float32)[:, None] for at in (0, 2))
    codes = _nibbles(blocks[:, 16:].reshape(-1, 32)).reshape(-1, _GROUP)
    with np.errstate(all="ignore"):
        return codes, _rounded(step * scales).ravel(), _rounded(-least * minima).ravel()


_INT4_GROUPS: dict[GGMLQuantizationType, Callable[[Bytes], _Groups]] = {
    GGMLQuantizationType.Q4_0: _q4_0,
    GGMLQuantizationType.Q4_1: _q4_1,
    GGMLQuantizationType.Q4_K: _q4_k,
}


def _halves(blocks: Bytes, at: int) -> npt.NDArray[np.float16]:
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16)[:, 0]


def _nibbles(packed: Bytes) -> Bytes:
    """Bytes [N, K] -> [N, 2 * K]: first all low halves, then all high ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=1)


def _six_bits(packed: Bytes) -> tuple[Floats, Floats]:
    """Bytes [N, 12] -> scales and minima [N, 8], each of 0..63. The upper bits of the last four lie in the first."""
    low, middle, high = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([low & 63, (high & 15) | (low >> 6 << 4)], axis=1)
    minima = np.concatenate([middle & 63, (high >> 4) | (middle >> 6 << 4)], axis=1)
    return scales.astype(np.float32), minima.astype(np.float32)


def _rounded(numbers: Floats) -> npt.NDArray[np.float16]:
    with np.errstate(over="ignore"):
        return numbers.astype(np.float16)
