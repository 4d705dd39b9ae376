"""Packed weights kept on disk: the second load of a model reads them, where the first had to round and pack them.

They lie in ``packed`` of the cache directory, one safetensors file for a checkpoint in a precision; it is replaced when
the checkpoint changes and goes when that is gone. ``PACELINE_PACKED_CACHE=off`` does without. What cannot be read or
written costs a warning and the time to pack, no more.
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

from paceline.config import AttentionName, QuantizationName
from paceline.errors import ModelFormatError
from paceline.kernels import native
from paceline.kernels.pack import LAYOUT_VERSION
from paceline.models import hub, loading
from paceline.models.boundary import reading
from paceline.models.kept import is_on
from paceline.models.native import NativeModel, Quantization, spec_of
from paceline.models.weights import shapes
from paceline.version import __version__

log = logging.getLogger("paceline")
VARIABLE = "PACELINE_PACKED_CACHE"
_TENSOR = "weights"
_BLOCK = 64 << 20  # bytes with a checksum of their own, for one thread
_AT_ONCE = 1 << 20  # bytes read and summed together: they stay in the processor's cache
_SAMPLES, _SAMPLE = 64, 4096  # places in a checkpoint's file, bytes at each


def find_packed(
    source: loading.Source,
    dtype: torch.dtype,
    device: torch.device,
    attention: AttentionName,
    quantization: QuantizationName | None,
) -> PackedFile | None:
    """The file for packed weights of a model that the native kernels would run; None if there is none to be."""
    if device.type != "cpu" or attention not in ("auto", "native") or quantization == "fp8":
        return None
    if native.select() is None or (quantization is None and dtype != torch.bfloat16):
        return None
    return packed_file(source, dtype, quantization)


def packed_file(source: loading.Source, dtype: torch.dtype, quantization: Quantization | None) -> PackedFile | None:
    """Where the packed weights of ``source`` are or will be; None for a loaded model, or if VARIABLE says "off".

    dtype: what the checkpoint is loaded in before it is packed. Raises as ``load_model``, and ParameterError.
    """
    if not is_on(VARIABLE) or not isinstance(source, (str, os.PathLike)):
        return None
    return PackedFile(hub.resolve(source), dtype, quantization)


@dataclass(frozen=True)
class PackedFile:
    """The packed weights of a checkpoint in one precision, on disk (perhaps not yet)."""

    source: Path
    dtype: torch.dtype
    quantization: Quantization | None

    @cached_property
    def path(self) -> Path:
        """One for a place and a precision, whatever lies there: so a new checkpoint replaces the old one's weights."""
        precision = self.quantization or "bf16"
        place = self.source.resolve()
        digest = hashlib.sha256(f"{place} {self.dtype}".encode()).hexdigest()[:12]
        name = place.name.removesuffix(".gguf")
        return hub.cache_directory() / "packed" / f"{name}-{precision}-{digest}.safetensors"

    @cached_property
    def _origin(self) -> str:
        """All that the packed bytes depend on."""
        files = [_fingerprint(file) for file in loading.files(self.source)]
        return json.dumps([__version__, LAYOUT_VERSION, str(self.dtype), self.quantization, files])

    def load(self) -> NativeModel | None:
        """The model from disk; None if it is not there, or not usable (then with a warning)."""
        started = time.perf_counter()
        if not self._is_there():
            return None
        try:
            with reading(self.path):
                model = self._read()
        except ModelFormatError as error:
            log.warning("%s; packing %s anew", error, self.source)
            return None
        log.info("packed weights of %s read from %s in %.1f s", self.source, self.path, time.perf_counter() - started)
        return model

    def _is_there(self) -> bool:
        try:
            return self.path.exists()
        except OSError:  # a directory that may not be looked into
            return True

    def save(self, model: NativeModel) -> None:
        """Keep a model's packed weights; warns if that is not possible."""
        memory = model.packed()
        if memory is None:
            return
        try:
            with hub.work_directory(self.path.parent) as work:
                _check_room(work, memory.nbytes)
                part = work / self.path.name
                save_file({_TENSOR: memory}, part, self._metadata(model, memory))
                part.replace(self.path)  # atomic: nobody ever sees half a file
            _remove_orphans(self.path.parent)
        except (OSError, SafetensorError) as error:
            log.warning("the packed weights of %s are not kept in %s: %s", self.source, self.path, error)
        else:
            log.info("packed weights of %s kept in %s", self.source, self.path)

    def _metadata(self, model: NativeModel, memory: Tensor) -> dict[str, str]:
        with _threads() as pool:
            checksums = list(pool.map(lambda block: zlib.crc32(block.numpy()), torch.split(memory, _BLOCK)))
        said = {"origin": self._origin, "source": str(self.source.resolve())}
        return said | {"tied": json.dumps(model.tied), "crc32": json.dumps(checksums)}

    def _read(self) -> NativeModel:
        with safe_open(str(self.path), framework="pt") as file:
            said = file.metadata() or {}
        if said.get("origin") != self._origin:
            raise ModelFormatError("it is of another checkpoint or version")
        config = loading.native_config(self.source)
        if config is None:
            raise ModelFormatError("the model is of no native family")
        tied, checksums = _header(said)
        config = dataclasses.replace(config, tied=tied)

        def contents(memory: Tensor) -> None:
            _read_into(memory, self.path, checksums)

        spec = spec_of(config, shapes(config))
        return NativeModel(spec, str(self.source), quantization=self.quantization, contents=contents)


def _header(said: Mapping[str, str]) -> tuple[bool, list[int]]:
    """Whether embedding and head are tied, and the blocks' checksums."""
    try:
        tied, checksums = (json.loads(said[name]) for name in ("tied", "crc32"))
    except (KeyError, ValueError, RecursionError) as error:
        raise ModelFormatError("its header is damaged") from error
    if not isinstance(tied, bool) or not isinstance(checksums, list) or {type(sum_) for sum_ in checksums} - {int}:
        raise ModelFormatError("its header is damaged")
    return tied, checksums


def _fingerprint(file: Path) -> list[str | int]:
    """Name, size, time and samples: a copy may keep the old time, and a new model the old one's size."""
    stat = file.stat()
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        for place in (*range(0, stat.st_size, max(_SAMPLE, stat.st_size // _SAMPLES)), stat.st_size - _SAMPLE):
            opened.seek(max(0, place))
            digest.update(opened.read(_SAMPLE))
    return [file.name, stat.st_size, stat.st_mtime_ns, digest.hexdigest()]


def _read_into(memory: Tensor, path: Path, checksums: Sequence[int]) -> None:
    """Read, not mapped: so weights lie in huge pages, count as memory in use, and stay what was checked."""
    with path.open("rb") as file, _threads() as pool:
        start = os.fstat(file.fileno()).st_size - memory.nbytes  # the only tensor is the file's end
        blocks = torch.split(memory, _BLOCK)
        places = range(start, start + memory.nbytes, _BLOCK)
        found = list(pool.map(lambda block, place: _read_block(block, file.fileno(), place), blocks, places))
    if found != checksums:
        raise ModelFormatError("its checksums are wrong")


def _read_block(block: Tensor, file: int, place: int) -> int:
    """Fill the block from there on; returns its checksum."""
    checksum = 0
    for part in torch.split(block, _AT_ONCE):
        view = part.numpy().data
        if place < 0 or os.preadv(file, [view], place) < len(view):
            raise ModelFormatError("its size is wrong")
        checksum, place = zlib.crc32(view, checksum), place + len(view)
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
    """Whether it holds the packed weights of a checkpoint that is gone."""
    try:
        with safe_open(str(path), framework="pt") as file:
            return not Path((file.metadata() or {})["source"]).exists()
    except (OSError, SafetensorError, KeyError):  # broken, or not ours to look at
        return False
