"""GGUF files: header, metadata and tensors, memory-mapped. A model may be split into several files.

The header is parsed here because ``gguf.GGUFReader`` takes 7 s for a vocabulary of 150 000 tokens. This code takes
0.06 s, and 0.2 s if all texts are read.
What the tensors contain is in ``gguf_tensors``.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any, overload

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from paceline.errors import ModelFormatError
from paceline.models.files.boundary import brief
from paceline.models.files.gguf_names import parts
from paceline.models.files.gguf_tensors import UNREADABLE, PackedTensor

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")  # of a text, in bytes

_TOKEN_TABLE = "d2t"  # a drafter's tokens as ids of its target: the only tensor of whole numbers that is read

# Limits of a header, which bound its memory. Real files are far below them.
_MAX_KEYS = 1 << 14
_MAX_TENSORS = 1 << 18
_MAX_VALUES = 1 << 22  # values in all metadata arrays together; a vocabulary has less than a million tokens
_MAX_DIMENSIONS = 4  # as in llama.cpp

_VERSIONS = 2, 3
_OTHER_FILE = "it was made by a newer program, or is damaged; use a file of the model in another type, such as Q8_0"


class TextArray(Sequence[str]):
    """An array of texts in a header. A text is decoded when it is read: most readers of a file need no vocabulary.

    data: the file. starts: offset in bytes of each text's length, which the text follows.
    """

    def __init__(self, data: mmap.mmap, starts: Sequence[int]) -> None:
        self._data, self._starts = data, starts

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> TextArray: ...

    def __getitem__(self, index: int | slice) -> str | TextArray:
        if isinstance(index, slice):
            return TextArray(self._data, self._starts[index])
        return _text_at(self._data, self._starts[index])

    def __iter__(self) -> Iterator[str]:
        return map(partial(_text_at, self._data), self._starts)


def _text_at(data: mmap.mmap, start: int) -> str:
    (length,) = _LENGTH.unpack_from(data, start)
    first = start + _LENGTH.size
    return str(data[first : first + length], "utf-8", "replace")


class _Cursor:
    """Reads consecutive little-endian values. at: offset of the next one in bytes."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self.at, self._values_left = data, 0, _MAX_VALUES

    def number(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self._data, self.at)
        self.at += struct.calcsize(code)
        return value

    def text(self) -> str:
        return self._texts(1)[0]

    def _texts(self, count: int) -> TextArray:
        """Find texts in a loop without calls of ours: a vocabulary has hundreds of thousands."""
        data, at, starts, unpack, size = self._data, self.at, [], _LENGTH.unpack_from, _LENGTH.size
        for _ in range(count):
            starts.append(at)
            at += size + unpack(data, at)[0]
        if at > len(data):
            raise struct.error("a text runs beyond the end of the file")
        self.at = at
        return TextArray(data, starts)

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self._array(self.number("I"), self.number("Q"))
        return self.number(_SCALARS[kind])

    def _array(self, kind: int, count: int) -> list[Any] | TextArray:
        if kind == _ARRAY:
            raise ValueError("the metadata have an array of arrays")
        self._values_left -= count
        if self._values_left < 0:
            raise ValueError(f"the metadata have an array of {count} values, too many for a header")
        if kind == _STRING:
            return self._texts(count)
        code = f"<{count}{_SCALARS[kind]}"
        values = list(struct.unpack_from(code, self._data, self.at))
        self.at += struct.calcsize(code)
        return values


class GGUFFile:
    """An open GGUF model: one file, or all parts of a split one, of which ``path`` may be any.

    metadata: values by key; arrays of texts as ``TextArray``, others as lists. tensors: by name, not dequantized yet.
    Raises ModelFormatError if a file is no GGUF file, truncated, big-endian, of an unknown version or type, or part of
    another model.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        files = parts(Path(path))
        self.path = files[0]
        self.metadata, first = _read(files[0])
        self.tensors: Mapping[str, PackedTensor] = first
        _check_part(files[0], self.metadata, 0, len(files))
        for number, file in enumerate(files[1:], 1):
            metadata, tensors = _read(file)
            _check_part(file, metadata, number, len(files))
            if duplicates := self.tensors.keys() & tensors.keys():
                raise ModelFormatError(f"{file}: the tensor {min(duplicates)} is also in another part of the model")
            self.tensors = {**self.tensors, **tensors}
        self._check_count()

    def _check_count(self) -> None:
        expected = self.metadata.get("split.tensors.count", len(self.tensors))
        if expected != len(self.tensors):
            raise ModelFormatError(
                f"{self.path}: its parts have {len(self.tensors)} tensors, the first announces {expected!r}; "
                "they belong to different models"
            )


def _check_part(path: Path, metadata: Mapping[str, Any], number: int, count: int) -> None:
    """Raise ModelFormatError if the metadata say another number (from 0) or count of parts than the name."""
    default = 1 if count == 1 else None  # a model in one file need not say so
    found = metadata.get("split.no", 0 if count == 1 else None), metadata.get("split.count", default)
    if found == (number, count) or (count == 1 and found[1] == 0):
        return
    if count == 1:
        raise ModelFormatError(
            f"{path} is a part of a split model (split.count={found[1]!r}): keep the names that end in "
            "-00001-of-0000N.gguf, or join the parts with llama-gguf-split --merge"
        )
    raise ModelFormatError(
        f"{path}: by its name part {number + 1} of {count}, by its metadata split.no={found[0]!r} of "
        f"split.count={found[1]!r}; the parts are mixed up"
    )


_Parsed = tuple[Mapping[str, Any], Mapping[str, PackedTensor]]  # metadata and tensors
_parsed_so_far: ContextVar[dict[Path, _Parsed] | None] = ContextVar("parsed GGUF files", default=None)


@contextmanager
def parse_once() -> Iterator[None]:
    """Parse each file once inside, in this thread: a model's start asks for its header up to nine times.

    Nothing stays mapped or in memory afterwards for this.
    """
    token = _parsed_so_far.set({})
    try:
        yield
    finally:
        _parsed_so_far.reset(token)


def _read(path: Path) -> _Parsed:
    """Return metadata and tensors of one file. Raises ModelFormatError."""
    try:
        if (known := _parsed_so_far.get()) is None:
            return _parsed(path)
        if path not in known:
            known[path] = _parsed(path)
        return known[path]
    except _UnknownError as error:
        raise ModelFormatError(f"{path} {error}") from error
    except (struct.error, ValueError, TypeError, LookupError, OSError, ArithmeticError) as error:
        raise ModelFormatError(
            f"{path}: broken or truncated GGUF file ({error}); fetch it again and compare its size"
        ) from error


class _UnknownError(Exception):
    """A file that is whole, and made by a newer program or for another kind of computer. The message lacks its name."""


def _check_version(version: int) -> None:
    if version in _VERSIONS:
        return
    if int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS:
        raise _UnknownError(
            "is a big-endian GGUF file, for computers such as IBM's s390x, and only little-endian ones are read: fetch "
            "the little-endian file, or convert it with the gguf package (gguf-convert-endian FILE little)"
        )
    raise _UnknownError(f"has GGUF version {version}, which is not known; versions 2 and 3 are: {_OTHER_FILE}")


def _parsed(path: Path) -> _Parsed:
    with path.open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    cursor = _Cursor(data)
    if data[:4] != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    cursor.at = 4
    version, tensor_count, key_count = cursor.number("I"), cursor.number("Q"), cursor.number("Q")
    _check_version(version)
    if tensor_count > _MAX_TENSORS or key_count > _MAX_KEYS:
        raise ValueError(f"the header announces {tensor_count} tensors and {key_count} keys")
    metadata = dict(_key_and_value(cursor) for _ in range(key_count))
    infos = [_tensor_info(cursor) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"general.alignment={alignment!r}")
    start = -(-cursor.at // alignment) * alignment
    return metadata, _tensors(np.frombuffer(data, dtype=np.uint8), infos, start)


def _key_and_value(cursor: _Cursor) -> tuple[str, Any]:
    key, kind = cursor.text(), cursor.number("I")
    if kind not in (_STRING, _ARRAY) and kind not in _SCALARS:
        raise _UnknownError(f"has the metadata {brief(key, 80)} of type {kind}, which is not known: {_OTHER_FILE}")
    return key, cursor.value(kind)


_Info = tuple[str, tuple[int, ...], int, int]  # name, shape, number of the type, offset in bytes


def _tensor_info(cursor: _Cursor) -> _Info:
    name, dimensions = cursor.text(), cursor.number("I")
    if dimensions > _MAX_DIMENSIONS:
        raise ValueError(f"tensor {name} has {dimensions} dimensions")
    shape = tuple(cursor.number("Q") for _ in range(dimensions))
    return name, shape[::-1], cursor.number("I"), cursor.number("Q")


def _tensors(data: npt.NDArray[np.uint8], infos: list[_Info], start: int) -> dict[str, PackedTensor]:
    """Return the tensors by name. start: offset of the first in bytes. Raises ValueError."""
    found: dict[str, PackedTensor] = {}
    end, last = start, "the header"
    for name, shape, number, offset in sorted(infos, key=lambda info: info[3]):
        if name in found:
            raise ValueError(f"tensor {name} is there twice")
        if start + offset < end:
            raise ValueError(f"tensor {name} overlaps {last}")
        found[name] = _packed(data, name, shape, number, start + offset)
        end, last = start + offset + found[name].rows.size, name
    return {name: found[name] for name, *_ in infos}


def _packed(data: npt.NDArray[np.uint8], name: str, shape: tuple[int, ...], number: int, at: int) -> PackedTensor:
    try:
        kind = GGMLQuantizationType(number)
    except ValueError as error:
        problem = f"has the tensor {brief(name, 80)} of type {number}, which is not known"
        raise _UnknownError(f"{problem}: {_OTHER_FILE}") from error
    if kind in UNREADABLE and (kind, name) != (GGMLQuantizationType.I64, _TOKEN_TABLE):
        problem = f"has the tensor {brief(name, 80)} of type {kind.name}, which cannot be read as weights"
        raise _UnknownError(f"{problem}; convert the model to Q8_0")
    block, size = GGML_QUANT_SIZES[kind]
    lines = (*shape, 1) if block == 1 and len(shape) == 1 else shape  # a bias is one column, so that it can be permuted
    if not lines or lines[-1] % block:
        raise ValueError(f"tensor {name} of the shape {shape} has no whole number of {kind.name} blocks of {block}")
    width, height = lines[-1] // block * size, math.prod(lines[:-1])
    if at + width * height > len(data):
        raise ValueError(f"tensor {name} runs beyond the end of the file")
    return PackedTensor(kind, shape, data[at : at + width * height].reshape(height, width))
