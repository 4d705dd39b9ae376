"""Rounded matrices of GPUs on disk: the first load writes each matrix as it is rounded, later loads read it.

A file has the codes and tables of all matrices that a checkpoint's tensors are rounded to in 8 or 4 bits, one behind
the other, before they are put into the order of a GPU's kernels. Other tensors are read from the checkpoint each time.
A matrix is read into pinned memory of the host, and from there it is copied to the device, so that loading takes the
finished model and one matrix.
"""

from __future__ import annotations

import json
import logging
import math
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from io import BufferedWriter
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

from paceline.errors import ModelFormatError
from paceline.kernels.pack import (
    LAYOUT_VERSION,
    Float8Weight,
    Format,
    Fp4Weight,
    Int4Weight,
    Int8Weight,
    Weight,
    round_up,
)
from paceline.kernels.spec import ReadMatrix
from paceline.models.files import hub
from paceline.models.files.boundary import ResolvedSource, reading
from paceline.models.load.kept_matrices import KeptMatrix
from paceline.models.load.packed_copy import TENSOR, PackedCopy, check_room, checksums_of, path_of, read_into
from paceline.models.native.matrices import Outcome, numbers_in

log = logging.getLogger("paceline")

_LAYOUT = 1  # raise it whenever the order of a file's bytes changes
_ALIGNED = 16  # bytes: each tensor begins at a multiple of it
_MATRIX_HEADER_BYTES = 1024  # room in the header, which is written last, for one matrix; it takes about 300
_WEIGHTS: dict[str, type[Weight]] = {each.__name__: each for each in (Int8Weight, Int4Weight, Fp4Weight, Float8Weight)}
_IN_PAIRS = (Int4Weight, Fp4Weight)  # whose codes of 4 bits are stored two a byte
_STORED = (torch.uint8, torch.int8, torch.int64, torch.float16, torch.float32, torch.float8_e4m3fn)
_DTYPES = {str(dtype): dtype for dtype in _STORED}
Description: TypeAlias = "tuple[str, int | None, dict[str, tuple[str, list[int]]], list[int]]"
"""A weight in a file: its class, its group (int4), the dtype and shape of each tensor, and checksums."""


def packed_matrices(source: ResolvedSource, quantization: Format | None) -> PackedCopy | None:
    """Return the file of a checkpoint's matrices for GPUs; None if it has none, see ``path_of``."""
    path = path_of(source)
    if path is None or quantization is None:
        return None
    return PackedCopy(path, f"{quantization}-gpu", "gpu", ["gpu", _LAYOUT, LAYOUT_VERSION, quantization])


@contextmanager
def through_copy(
    copy: PackedCopy | None, matrices: Mapping[str, KeptMatrix], outcome: Outcome
) -> Iterator[Mapping[str, ReadMatrix]]:
    """Context in which a model is made from a checkpoint's matrices: read from its copy, or written to one.

    copy: None for neither. outcome: counts the matrices; those of a copy as when it was written.
    Raises no error for a copy that cannot be read or written, which is logged.
    """
    reader = None if copy is None else copy.read(lambda metadata: MatrixReader(copy, metadata, outcome))
    if copy is None:
        yield matrices
    elif reader is not None:
        log.info("matrices of %s are read from %s", copy.source, copy.path)
        yield {name: StoredOnce(name, matrix, reader.get) for name, matrix in matrices.items()}
    else:
        with MatrixWriter(copy, matrices.values(), outcome) as writer:
            yield {name: StoredOnce(name, matrix, writer.get) for name, matrix in matrices.items()}


@dataclass(frozen=True)
class StoredOnce:
    """A matrix that is read from a packed copy, or written to one; implements ``ReadMatrix``.

    name: of the matrix, with the number of an expert. get: ``MatrixReader.get`` or ``MatrixWriter.get``.
    """

    name: str
    matrix: KeptMatrix
    get: Callable[[str, KeptMatrix, Format], Weight]

    @property
    def ordered(self) -> bool:
        """See ``ReadMatrix``."""
        return self.matrix.ordered

    def __call__(self, to: Format) -> Weight:
        return self.get(self.name, self.matrix, to)

    def of_expert(self, expert: int) -> StoredOnce:
        """See ``ReadMatrix``."""
        return replace(self, name=f"{self.name}[{expert}]", matrix=self.matrix.of_expert(expert))


class MatrixReader:
    """Reads the matrices of a packed copy. If it is damaged, it is deleted, and the checkpoint is read instead."""

    def __init__(self, copy: PackedCopy, metadata: Mapping[str, str], outcome: Outcome) -> None:
        """Raises an error of any kind for a damaged header."""
        self._copy = copy
        kept, rounded, matrices = (json.loads(metadata[name]) for name in ("kept", "rounded", "matrices"))
        sizes = {name: _nbytes(description) for name, description in matrices.items()}
        ends = accumulate(sizes.values(), initial=copy.path.stat().st_size - sum(sizes.values()))
        self._places = {name: (start, matrices[name]) for name, start in zip(matrices, ends, strict=False)}
        outcome.kept, outcome.rounded = Counter(kept), Counter(rounded)

    def get(self, name: str, matrix: KeptMatrix, to: Format) -> Weight:
        """Return a matrix in a format, on its device. Raises the errors of ``KeptMatrix``."""
        weight = self._weight(name, matrix.device) if self._places else None
        if weight is None:
            weight = replace(matrix, outcome=Outcome(total=1))(to)  # it is counted already
        matrix.outcome.add(numbers_in(matrix.parts))
        return weight

    def _weight(self, name: str, device: torch.device | None) -> Weight | None:
        """Return a matrix of the copy; None if that is damaged, which is logged once."""
        try:
            with reading(self._copy.path):
                start, description = self._places[name]
                is_pinned = device is not None and device.type == "cuda"
                memory = torch.empty(_nbytes(description), dtype=torch.uint8, pin_memory=is_pinned)
                read_into(memory, self._copy.path, description[-1], start)
                return _weight_in(memory.to(device), description)
        except ModelFormatError as error:
            self._places = {}
            self._copy.warn_unusable(error)
            self._copy.delete()
            return None


class MatrixWriter:
    """Writes matrices to a packed copy as they are rounded. An error of the disk ends that with a warning."""

    def __init__(self, copy: PackedCopy, matrices: Iterable[KeptMatrix], outcome: Outcome) -> None:
        """matrices: those that may be written."""
        self._copy, self._outcome, self._work = copy, outcome, ExitStack()
        self._file: BufferedWriter | None = None  # None: nothing is written, or nothing any more
        self._failed = False
        self._header_bytes = _MATRIX_HEADER_BYTES * sum(map(_count, matrices)) + len(json.dumps(copy.origin))
        self._written: dict[str, Description] = {}
        self._nbytes = 0

    def __enter__(self) -> Self:
        with self._giving_up():
            work = self._work.enter_context(hub.work_directory(self._copy.path.parent))
            check_room(work, self._outcome.total)  # at most a byte a number, but for scales
            file = self._work.enter_context((work / self._copy.path.name).open("wb"))
            file.seek(8 + self._header_bytes)
            self._file = file
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Move the file into its place if all matrices were read, and delete what is not there."""
        if self._file is not None and error is None:
            with self._giving_up():
                self._finish(self._file)
        with self._giving_up():
            self._work.close()

    def get(self, name: str, matrix: KeptMatrix, to: Format) -> Weight:
        """Read a matrix in a format, and write it. Raises the errors of ``KeptMatrix``."""
        weight = matrix(to)
        if self._file is not None and name not in self._written:
            memory, description = _described(weight)
            with self._giving_up():
                self._file.write(memory.numpy().data)
                self._written[name] = description
                self._nbytes += memory.nbytes
        return weight

    @contextmanager
    def _giving_up(self) -> Iterator[None]:
        """Context in which an error of the disk is logged and ends the file."""
        try:
            yield
        except OSError as error:
            if not self._failed:
                self._copy.warn_unwritable(error)
            self._file, self._failed = None, True

    def _finish(self, file: BufferedWriter) -> None:
        counts = {"kept": self._outcome.kept, "rounded": self._outcome.rounded, "matrices": self._written}
        metadata = self._copy.origin | {name: json.dumps(value) for name, value in counts.items()}
        tensor = {"dtype": "U8", "shape": [self._nbytes], "data_offsets": [0, self._nbytes]}
        header = json.dumps({"__metadata__": metadata, TENSOR: tensor}).encode()
        assert len(header) <= self._header_bytes, "the header has room for every matrix"
        file.seek(0)
        file.write(struct.pack("<Q", self._header_bytes) + header.ljust(self._header_bytes))
        file.close()
        self._copy.publish(Path(file.name))
        log.info("matrices of %s cached in %s", self._copy.source, self._copy.path)


def _count(matrix: KeptMatrix) -> int:
    """Return how many matrices are read one by one: those of all experts, or one."""
    shape = matrix.parts[0].slot.target_shape
    return shape[0] if len(shape) > 2 else 1


def _described(weight: Weight) -> tuple[Tensor, Description]:
    """Return a weight's bytes in memory of the host, and their description."""
    tensors = {name: tensor for name, tensor in vars(weight).items() if isinstance(tensor, Tensor)}
    if isinstance(weight, _IN_PAIRS):
        tensors["values"] = weight.values[:, ::2] | weight.values[:, 1::2] << 4
    parts = [tensor.contiguous().flatten().view(torch.uint8).cpu() for tensor in tensors.values()]
    memory = torch.cat([pad(part, (0, -part.nbytes % _ALIGNED)) for part in parts])
    shapes = {name: (str(tensor.dtype), list(tensor.shape)) for name, tensor in tensors.items()}
    group = weight.group if isinstance(weight, Int4Weight) else None
    return memory, (type(weight).__name__, group, shapes, checksums_of(memory))


def _nbytes(description: Description) -> int:
    """Return the bytes of a weight in a file."""
    return sum(round_up(_size(*tensor), _ALIGNED) for tensor in description[2].values())


def _size(dtype: str, shape: list[int]) -> int:
    return math.prod(shape) * _DTYPES[dtype].itemsize


def _weight_in(memory: Tensor, description: Description) -> Weight:
    """Return the weight of these bytes, uint8, in the same memory but for codes of 4 bits."""
    kind, group, shapes, _ = description
    tables: dict[str, Any] = {} if group is None else {"group": group}
    at = 0
    for name, (dtype, shape) in shapes.items():
        size = _size(dtype, shape)
        tables[name] = memory[at : at + size].view(_DTYPES[dtype]).view(shape)
        at += round_up(size, _ALIGNED)
    weight = _WEIGHTS[kind](**tables)
    if not isinstance(weight, _IN_PAIRS):
        return weight
    return replace(weight, values=torch.stack((weight.values & 15, weight.values >> 4), 2).flatten(1))
