"""GGUF files: header, metadata and tensors, memory-mapped.

The header is parsed here because ``gguf.GGUFReader`` takes 7 s for a vocabulary of 150 000 tokens, and this code 0.3 s.
Tensors are dequantized by the ``gguf`` package.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from paceline.errors import ModelFormatError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_ARRAY = 1 << 24  # values in one metadata array; a vocabulary has less than a million tokens
_CHUNK = 1 << 18  # values dequantized at a time: fits the CPU cache and avoids a float32 copy of the whole tensor


@dataclass(frozen=True)
class PackedTensor:
    """A tensor as stored in the file. shape: in torch's order, rows first."""

    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    rows: npt.NDArray[np.uint8]  # [rows, bytes per row]

    def permuted(self, heads: int) -> PackedTensor:
        """Reorder the rows of each head from llama.cpp's rotary pairs (i, i + 1) to Hugging Face's (i, i + D/2)."""
        count, width = self.rows.shape
        pairs = self.rows.reshape(heads, count // heads // 2, 2, width).swapaxes(1, 2)
        return PackedTensor(self.kind, self.shape, pairs.reshape(count, width))

    def unpack_into(self, destination: Tensor) -> None:
        """Dequantize into ``destination``, which has ``shape``, a few rows at a time. Raises ModelFormatError."""
        lines = destination.view(len(self.rows), -1)
        step = max(1, _CHUNK // lines.shape[1])
        for first in range(0, len(self.rows), step):
            lines[first : first + step].copy_(_numbers(self.rows[first : first + step], self.kind))


def _numbers(rows: npt.NDArray[np.uint8], kind: GGMLQuantizationType) -> Tensor:
    """Dequantize packed rows -> float32 [rows, width]."""
    plain = {GGMLQuantizationType.F32: np.float32, GGMLQuantizationType.F16: np.float16}.get(kind)
    try:
        numbers = dequantize(rows, kind) if plain is None else rows.view(plain).astype(np.float32)
    except (NotImplementedError, ValueError, IndexError) as error:
        raise ModelFormatError(f"a tensor of type {kind.name} cannot be dequantized: {error}") from error
    return torch.from_numpy(numbers)


class _Cursor:
    """Reads consecutive little-endian values. at: offset of the next one in bytes."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self.at = data, 0

    def number(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self._data, self.at)
        self.at += struct.calcsize(code)
        return value

    def text(self) -> str:
        length = self.number("Q")
        raw = self._data[self.at : self.at + length]
        if len(raw) < length:
            raise struct.error("a text runs beyond the end of the file")
        self.at += length
        return raw.decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self._array(self.number("I"), self.number("Q"))
        return self.number(_SCALARS[kind])

    def _array(self, kind: int, count: int) -> list[Any]:
        if kind == _ARRAY:
            raise ValueError("the metadata have an array of arrays")
        if count > _MAX_ARRAY:
            raise ValueError(f"the metadata have an array of {count} values")
        if kind not in _SCALARS:
            return [self.value(kind) for _ in range(count)]
        code = f"<{count}{_SCALARS[kind]}"
        values = list(struct.unpack_from(code, self._data, self.at))
        self.at += struct.calcsize(code)
        return values


class GGUFFile:
    """An open GGUF file.

    metadata: values by key, strings decoded, arrays as lists. tensors: by name, not dequantized yet.
    Raises ModelFormatError if the file is no GGUF file, truncated, or of an unknown version or tensor type.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.metadata: dict[str, Any] = {}
        self.tensors: Mapping[str, PackedTensor] = {}
        try:
            self._read()
        except (struct.error, ValueError, TypeError, LookupError, OSError, ArithmeticError) as error:
            raise ModelFormatError(
                f"{self.path}: broken or truncated GGUF file ({error}); fetch it again and compare its size"
            ) from error

    def _read(self) -> None:
        with self.path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        cursor = _Cursor(data)
        if data[:4] != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        cursor.at = 4
        version, tensor_count, key_count = cursor.number("I"), cursor.number("Q"), cursor.number("Q")
        if version not in (2, 3):
            raise ValueError(f"version {version}; versions 2 and 3 little-endian are known")
        self.metadata = {cursor.text(): cursor.value(cursor.number("I")) for _ in range(key_count)}
        infos = [self._tensor_info(cursor) for _ in range(tensor_count)]
        alignment = self.metadata.get("general.alignment", 32)
        start = -(-cursor.at // alignment) * alignment
        whole = np.frombuffer(data, dtype=np.uint8)
        self.tensors = {name: _packed(whole, name, shape, kind, start + at) for name, shape, kind, at in infos}

    @staticmethod
    def _tensor_info(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
        name, dimensions = cursor.text(), cursor.number("I")
        shape = tuple(cursor.number("Q") for _ in range(dimensions))
        return name, shape[::-1], cursor.number("I"), cursor.number("Q")


def _packed(data: npt.NDArray[np.uint8], name: str, shape: tuple[int, ...], number: int, at: int) -> PackedTensor:
    kind = GGMLQuantizationType(number)
    block, size = GGML_QUANT_SIZES[kind]
    lines = (*shape, 1) if block == 1 and len(shape) == 1 else shape  # a bias is one column, so that it can be permuted
    width, height = lines[-1] // block * size, math.prod(lines[:-1])
    if at + width * height > len(data):
        raise ValueError(f"tensor {name} runs beyond the end of the file")
    return PackedTensor(kind, shape, data[at : at + width * height].reshape(height, width))
