"""Disk cache of packed weights: the first load of a model quantizes and packs them, later loads read the file.

The files are in ``packed`` of the cache directory, one safetensors file per checkpoint and precision. A file is
replaced when its checkpoint changes and deleted when its checkpoint is gone. ``PACELINE_PACKED_CACHE=off`` disables
the cache. If a file cannot be read or written, the load warns and packs the weights again.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import logging
import os
import shutil
import time
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from paceline.errors import ModelFormatError
from paceline.kernels.pack import LAYOUT_VERSION
from paceline.models.description.weights import shapes
from paceline.models.files import hub
from paceline.models.files.boundary import reading
from paceline.models.files.cached import PACKED, packed_source
from paceline.models.files.kept import is_on
from paceline.models.load import loading
from paceline.models.native.model import NativeModel, Quantization
from paceline.models.native.spec import spec_of
from paceline.version import __version__

log = logging.getLogger("paceline")
VARIABLE = "PACELINE_PACKED_CACHE"
_TENSOR = "weights"
_BLOCK = 64 << 20  # bytes per checksum; one thread reads a block
_READ_BYTES = 1 << 20  # bytes read before they are added to the checksum: few enough to stay in the CPU cache
_SAMPLES, _SAMPLE = 64, 4096  # number of samples of a checkpoint file, and bytes of each


def packed_file(source: loading.Source, dtype: torch.dtype, quantization: Quantization | None) -> PackedFile | None:
    """Return the packed file of ``source``; None for a loaded model, or if VARIABLE is "off".

    dtype: dtype that the checkpoint is loaded in before it is packed.
    Raises the errors of ``load_model``, and ParameterError for a bad value of VARIABLE.
    """
    if not is_on(VARIABLE) or not isinstance(source, (str, os.PathLike)):
        return None
    return PackedFile(hub.resolve(source), dtype, quantization)


@dataclass(frozen=True)
class PackedFile:
    """The file of a checkpoint's packed weights in one precision, which may not exist yet."""

    source: Path
    dtype: torch.dtype
    quantization: Quantization | None

    @cached_property
    def path(self) -> Path:
        """Path that depends on the checkpoint's path and precision only: a new checkpoint replaces the old file."""
        precision = self.quantization or "bf16"
        source = self.source.resolve()
        digest = hashlib.sha256(f"{source} {self.dtype}".encode()).hexdigest()[:12]
        name = source.name.removesuffix(".gguf")
        return hub.cache_directory() / PACKED / f"{name}-{precision}-{digest}.safetensors"

    @cached_property
    def _origin(self) -> str:
        """JSON of everything that the packed bytes depend on."""
        files = [_fingerprint(file) for file in loading.files(self.source)]
        return json.dumps([__version__, LAYOUT_VERSION, str(self.dtype), self.quantization, files])

    def load(self) -> NativeModel | None:
        """Read the model; None if the file does not exist. Warns and returns None if it is not usable."""
        started = time.perf_counter()
        if not self._may_exist():
            return None
        try:
            with reading(self.path):
                model = self._read()
        except ModelFormatError as error:
            log.warning("%s; packing %s again", error, self.source)
            return None
        log.info("packed weights of %s read from %s in %.1f s", self.source, self.path, time.perf_counter() - started)
        return model

    def _may_exist(self) -> bool:
        try:
            return self.path.exists()
        except OSError:  # no permission to read the directory: reading the file gives the error message
            return True

    def save(self, model: NativeModel) -> None:
        """Write a model's packed weights; warns if that is not possible."""
        memory = model.packed()
        try:
            with hub.work_directory(self.path.parent) as work:
                _check_room(work, memory.nbytes)
                part = work / self.path.name
                save_file({_TENSOR: memory}, part, self._metadata(model, memory))
                part.replace(self.path)  # atomic: no process ever reads a partial file
            _remove_orphans(self.path.parent)
        except (OSError, SafetensorError) as error:
            log.warning("the packed weights of %s could not be cached in %s: %s", self.source, self.path, error)
        else:
            log.info("packed weights of %s cached in %s", self.source, self.path)

    def _metadata(self, model: NativeModel, memory: Tensor) -> dict[str, str]:
        with _threads() as pool:
            checksums = list(pool.map(lambda block: zlib.crc32(block.numpy()), torch.split(memory, _BLOCK)))
        origin = {"origin": self._origin, "source": str(self.source.resolve())}
        facts = {"tied": model.tied, "ordered": model.ordered, "crc32": checksums}
        return origin | {name: json.dumps(value) for name, value in facts.items()}

    def _read(self) -> NativeModel:
        with safe_open(str(self.path), framework="pt") as file:
            metadata = file.metadata() or {}
        if metadata.get("origin") != self._origin:
            raise ModelFormatError("it was made from another checkpoint or by another version")
        spec = loading.description_of(self.source)
        if spec is None:
            raise ModelFormatError("the model is not of a native family")
        tied, ordered, checksums = _header(metadata)
        spec = dataclasses.replace(spec, tied=tied)

        def read_packed(memory: Tensor) -> None:
            _read_into(memory, self.path, checksums)

        native_spec = dataclasses.replace(spec_of(spec, shapes(spec)), ordered=ordered)
        return NativeModel(native_spec, str(self.source), quantization=self.quantization, read_packed=read_packed)


def _header(metadata: Mapping[str, str]) -> tuple[bool, bool, list[int]]:
    """Return whether embedding and head are tied, whether inputs may be in an order, and each block's checksum."""
    try:
        tied, ordered, checksums = (json.loads(metadata[name]) for name in ("tied", "ordered", "crc32"))
    except (KeyError, ValueError, RecursionError) as error:
        raise ModelFormatError("its header is damaged") from error
    is_right = isinstance(tied, bool) and isinstance(ordered, bool) and isinstance(checksums, list)
    if not is_right or {type(sum_) for sum_ in checksums} - {int}:
        raise ModelFormatError("its header is damaged")
    return tied, ordered, checksums


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


def _read_into(memory: Tensor, path: Path, checksums: Sequence[int]) -> None:
    """Fill ``memory``, uint8, from the file and verify its checksums. Raises ModelFormatError.

    The file is read instead of mapped: the weights then use huge pages, count as used memory and cannot change later.
    """
    with _threads() as pool:
        start = path.stat().st_size - memory.nbytes  # the only tensor is at the end of the file
        blocks = torch.split(memory, _BLOCK)
        offsets = range(start, start + memory.nbytes, _BLOCK)
        found = list(pool.map(lambda block, offset: _read_block(block, path, offset), blocks, offsets))
    if found != checksums:
        raise ModelFormatError("its checksums are wrong")


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


def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(torch.get_num_threads())


def _check_room(directory: Path, nbytes: int) -> None:
    if (free := shutil.disk_usage(directory).free) < nbytes:
        raise OSError(errno.ENOSPC, f"{nbytes / 1e9:.1f} GB are needed, {free / 1e9:.1f} GB are free", str(directory))


def _remove_orphans(directory: Path) -> None:
    for file in directory.glob("*.safetensors"):
        if _is_orphan(file):
            file.unlink(missing_ok=True)


def _is_orphan(path: Path) -> bool:
    """Whether the file holds the packed weights of a checkpoint that no longer exists."""
    source = packed_source(path)  # None: damaged, or no permission to read it
    return source is not None and not source.exists()
