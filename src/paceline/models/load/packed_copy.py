"""Packed copies of checkpoints on disk: their names and origins, and their bytes with checksums.

The files are in ``packed`` of the cache directory, one safetensors file per checkpoint and precision. A file is
replaced when its checkpoint changes and deleted when its checkpoint is gone. ``PACELINE_PACKED_CACHE=off`` disables
the cache. If a file cannot be read or written, the load warns and packs the weights again.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import shutil
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import safe_open
from torch import Tensor

from paceline.errors import ModelFormatError
from paceline.models.files import hub
from paceline.models.files.boundary import Source, reading
from paceline.models.files.cached import PACKED, packed_source
from paceline.models.files.kept import is_on
from paceline.models.load import loading
from paceline.version import __version__

log = logging.getLogger("paceline")
T = TypeVar("T")
VARIABLE = "PACELINE_PACKED_CACHE"
TENSOR = "weights"  # the only tensor of a file, at its end
_BLOCK = 64 << 20  # bytes per checksum; one thread reads a block
_READ_BYTES = 1 << 20  # bytes read before they are added to the checksum: few enough to stay in the CPU cache
_SAMPLES, _SAMPLE = 64, 4096  # number of samples of a checkpoint file, and bytes of each


def path_of(source: Source) -> Path | None:
    """Return the path of a checkpoint that may have packed copies; None for a loaded model, or if VARIABLE is "off".

    Raises the errors of ``load_model``, and ParameterError for a bad value of VARIABLE.
    """
    return hub.resolve(source) if is_on(VARIABLE) and isinstance(source, (str, os.PathLike)) else None


@dataclass(frozen=True)
class PackedCopy:
    """The file of a checkpoint's packed weights, which may not exist yet.

    precision: word in the file's name. variant: what else its name depends on.
    depends_on: JSON value of what its bytes depend on beside the checkpoint and the version.
    """

    source: Path
    precision: str
    variant: str
    depends_on: Sequence[Any]

    @cached_property
    def path(self) -> Path:
        """Path that depends on the checkpoint's path and precision only: a new checkpoint replaces the old file."""
        source = self.source.resolve()
        digest = hashlib.sha256(f"{source} {self.variant}".encode()).hexdigest()[:12]
        name = source.name.removesuffix(".gguf")
        return hub.cache_directory() / PACKED / f"{name}-{self.precision}-{digest}.safetensors"

    @cached_property
    def origin(self) -> dict[str, str]:
        """The file's metadata that tell whether it is up to date, and what it was made from."""
        files = [_fingerprint(file) for file in loading.files(self.source)]
        depends_on = json.dumps([__version__, *self.depends_on, files])
        return {"origin": depends_on, "source": str(self.source.resolve())}

    def read(self, read: Callable[[Mapping[str, str]], T]) -> T | None:
        """Return what ``read`` makes of the file's metadata; None if there is no file.

        Warns and returns None if it is not usable.
        """
        if not self._may_exist():
            return None
        try:
            with reading(self.path):
                with safe_open(str(self.path), framework="pt") as file:
                    metadata = file.metadata() or {}
                if metadata.get("origin") != self.origin["origin"]:
                    raise ModelFormatError("it was made from another checkpoint or by another version")
                return read(metadata)
        except ModelFormatError as error:
            self.warn_unusable(error)
            return None

    def _may_exist(self) -> bool:
        try:
            return self.path.exists()
        except OSError:  # no permission to read the directory: reading the file gives the error message
            return True

    def publish(self, part: Path) -> None:
        """Move a written file into its place, and delete the copies of checkpoints that no longer exist."""
        part.replace(self.path)  # atomic: no process ever reads a partial file
        for file in self.path.parent.glob("*.safetensors"):
            if _is_orphan(file):
                file.unlink(missing_ok=True)

    def delete(self) -> None:
        """Delete the file. Where that is not allowed it stays, and is found unusable again."""
        with suppress(OSError):
            self.path.unlink(missing_ok=True)

    def warn_unusable(self, error: Exception) -> None:
        log.warning("%s; packing %s again", error, self.source)

    def warn_unwritable(self, error: Exception) -> None:
        log.warning("the packed weights of %s could not be cached in %s: %s", self.source, self.path, error)


def check_room(directory: Path, nbytes: int) -> None:
    """Raise OSError if the disk has no room for so many bytes."""
    if (free := shutil.disk_usage(directory).free) < nbytes:
        raise OSError(errno.ENOSPC, f"{nbytes / 1e9:.1f} GB are needed, {free / 1e9:.1f} GB are free", str(directory))


def checksums_of(memory: Tensor) -> list[int]:
    """Return the CRC-32 of each block of ``memory``, uint8."""
    return _each_block(lambda block, _: zlib.crc32(block.numpy().data), memory)


def read_into(memory: Tensor, path: Path, checksums: Sequence[int], start: int) -> None:
    """Fill ``memory``, uint8, from the file's bytes ``start`` on and verify its checksums. Raises ModelFormatError.

    The file is read instead of mapped: the weights then use huge pages, count as used memory and cannot change later.
    """
    found = _each_block(lambda block, offset: _read_block(block, path, start + offset), memory)
    if found != list(checksums):
        raise ModelFormatError("its checksums are wrong")


def _each_block(compute: Callable[[Tensor, int], int], memory: Tensor) -> list[int]:
    """Return ``compute``'s result for each block and its offset, by several threads."""
    blocks, offsets = torch.split(memory, _BLOCK), range(0, memory.nbytes, _BLOCK)
    if len(blocks) == 1:
        return [compute(blocks[0], 0)]
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        return list(pool.map(compute, blocks, offsets))


def _read_block(block: Tensor, path: Path, offset: int) -> int:
    """Fill the block from the file, starting at ``offset`` bytes; return its CRC-32.

    Threads open the file of their own, because not every system reads at an offset without moving a shared one.
    """
    if offset < 0:
        raise ModelFormatError("its size is wrong")
    checksum = 0
    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        for part in torch.split(block, _READ_BYTES):
            view = part.numpy().data
            if file.readinto(view) < len(view):
                raise ModelFormatError("its size is wrong")
            checksum = zlib.crc32(view, checksum)
    return checksum


def _fingerprint(file: Path) -> list[str | int]:
    """Return name, size, modification time and a hash of samples.

    Size and time alone do not tell a new model from an old one: both may be the same.
    """
    stat = file.stat()
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        for offset in (*range(0, stat.st_size, max(_SAMPLE, stat.st_size // _SAMPLES)), stat.st_size - _SAMPLE):
            opened.seek(max(0, offset))
            digest.update(opened.read(_SAMPLE))
    return [file.name, stat.st_size, stat.st_mtime_ns, digest.hexdigest()]


def _is_orphan(path: Path) -> bool:
    """Whether the file holds the packed weights of a checkpoint that no longer exists."""
    source = packed_source(path)  # None: damaged, or no permission to read it
    return source is not None and not source.exists()
