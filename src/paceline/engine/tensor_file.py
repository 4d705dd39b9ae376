"""A file of tensors, of a cached prefix or of answers: a safetensors file whose metadata has a checksum of its data.

https://github.com/huggingface/safetensors describes the format: 8 bytes of length, a JSON header, raw tensors. Files
may be damaged or hostile: everything is checked before it is used, and nothing in a file is run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any, NoReturn

import torch
from torch import Tensor

MAX_HEADER = 1 << 20  # bytes
_LENGTH = 8  # bytes of the header's length, little-endian
_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "I32": torch.int32,
    "I64": torch.int64,
    "I8": torch.int8,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class DamagedFileError(Exception):
    """A file is not what was written."""


@dataclass(frozen=True)
class TensorPlace:
    """Where a tensor lies: its dtype, shape, and the first and last byte of the file's data, as [start, stop)."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int

    def of(self, data: memoryview) -> Tensor:
        """The tensor, in the memory of ``data``, which must be writable and have all of it."""
        if self.start == self.stop:
            return torch.empty(self.shape, dtype=self.dtype)
        part = torch.frombuffer(data[self.start : self.stop], dtype=torch.uint8)
        aligned = part if part.data_ptr() % self.dtype.itemsize == 0 else part.clone()
        return aligned.view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class Header:
    """What a file says before its data. size: bytes up to the data."""

    metadata: Mapping[str, str]
    places: Mapping[str, TensorPlace]
    size: int

    @property
    def data_bytes(self) -> int:
        return max((place.stop for place in self.places.values()), default=0)


def encoded(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> list[memoryview]:
    """Return the parts of a file in their order. Tensors must be contiguous, on the CPU."""
    parts, header, at, digest = [], dict[str, Any](), 0, hashlib.sha256()
    for name, tensor in tensors.items():
        part = tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else memoryview(b"")
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + part.nbytes],
        }
        at += part.nbytes
        parts.append(part)
        digest.update(part)
    header["__metadata__"] = {**metadata, "sha256": digest.hexdigest()}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return [memoryview(len(text).to_bytes(_LENGTH, "little") + text), *parts]


def read_header(data: bytes) -> Header:
    """Return the header that ``data`` begins with. Raises DamagedFileError."""
    size = int.from_bytes(data[:_LENGTH], "little")
    if len(data) < _LENGTH + size or size > MAX_HEADER:
        _damaged("it ends in its header")
    try:
        found = json.loads(data[_LENGTH : _LENGTH + size])
        metadata = found.pop("__metadata__")
        texts = [*metadata.keys(), *metadata.values()]
        places = {name: _place(said) for name, said in found.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
        raise DamagedFileError("its header cannot be read") from error
    if not all(isinstance(text, str) for text in texts):
        _damaged("its metadata is no text")
    ends = sorted((place.start, place.stop) for place in places.values())
    if any(stop != start for (_, stop), (start, _) in pairwise(ends)) or (ends and ends[0][0] != 0):
        _damaged("its tensors overlap")
    return Header(metadata, places, _LENGTH + size)


def _place(said: Any) -> TensorPlace:
    """Return where a tensor lies by its entry in the header. Raises ValueError, TypeError or KeyError."""
    dtype, shape, (start, stop) = _DTYPES[said["dtype"]], tuple(said["shape"]), said["data_offsets"]
    whole = (*shape, start, stop)
    if not all(type(number) is int and 0 <= number < 1 << 62 for number in whole):
        raise ValueError("sizes are whole numbers")
    if stop - start != prod(shape) * dtype.itemsize:
        raise ValueError("the data has another size")
    return TensorPlace(dtype, shape, start, stop)


def decoded(data: bytearray) -> tuple[Header, dict[str, Tensor]]:
    """Return the tensors of a whole file, in its memory. Raises DamagedFileError unless its checksum is right."""
    header = read_header(bytes(data[: _LENGTH + MAX_HEADER]))
    body = memoryview(data)[header.size :]
    if len(body) != header.data_bytes:
        _damaged("its size is wrong")
    if hashlib.sha256(body).hexdigest() != header.metadata.get("sha256"):
        _damaged("its checksum is wrong")
    return header, {name: place.of(body) for name, place in header.places.items()}


def _damaged(why: str) -> NoReturn:
    raise DamagedFileError(why)
