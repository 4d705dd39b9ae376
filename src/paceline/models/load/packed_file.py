"""Packed weights of the CPU kernels on disk: the first load quantizes and packs them, later loads read the file."""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from paceline.errors import ModelFormatError
from paceline.kernels.pack import LAYOUT_VERSION
from paceline.models.description.weights import shapes
from paceline.models.files import hub
from paceline.models.load import loading
from paceline.models.load.packed_copy import TENSOR, PackedCopy, check_room, checksums_of, path_of, read_into
from paceline.models.native.model import NativeModel, Quantization
from paceline.models.native.spec import spec_of

log = logging.getLogger("paceline")


def packed_file(source: loading.Source, dtype: torch.dtype, quantization: Quantization | None) -> PackedFile | None:
    """Return the packed file of ``source``; None if it has none, see ``path_of``.

    dtype: dtype that the checkpoint is loaded in before it is packed.
    """
    path = path_of(source)
    return None if path is None else PackedFile(path, dtype, quantization)


@dataclass(frozen=True)
class PackedFile:
    """The file of a checkpoint's packed weights in one precision, which may not exist yet."""

    source: Path
    dtype: torch.dtype
    quantization: Quantization | None

    @cached_property
    def _copy(self) -> PackedCopy:
        dtype = str(self.dtype)
        return PackedCopy(self.source, self.quantization or "bf16", dtype, [LAYOUT_VERSION, dtype, self.quantization])

    @property
    def path(self) -> Path:
        """See ``PackedCopy``."""
        return self._copy.path

    def load(self) -> NativeModel | None:
        """Read the model; None if the file does not exist. Warns and returns None if it is not usable."""
        started = time.perf_counter()
        model = self._copy.read(self._model)
        if model is not None:
            took = time.perf_counter() - started
            log.info("packed weights of %s read from %s in %.1f s", self.source, self.path, took)
        return model

    def save(self, model: NativeModel) -> None:
        """Write a model's packed weights; warns if that is not possible."""
        memory = model.packed()
        try:
            with hub.work_directory(self.path.parent) as work:
                check_room(work, memory.nbytes)
                part = work / self.path.name
                save_file({TENSOR: memory}, part, self._metadata(model, memory))
                self._copy.publish(part)
        except (OSError, SafetensorError) as error:
            self._copy.warn_unwritable(error)
        else:
            log.info("packed weights of %s cached in %s", self.source, self.path)

    def _metadata(self, model: NativeModel, memory: Tensor) -> dict[str, str]:
        facts = {"tied": model.tied, "ordered": model.ordered, "crc32": checksums_of(memory)}
        return self._copy.origin | {name: json.dumps(value) for name, value in facts.items()}

    def _model(self, metadata: Mapping[str, str]) -> NativeModel:
        spec = loading.description_of(self.source)
        if spec is None:
            raise ModelFormatError("the model is not of a native family")
        tied, ordered, checksums = _header(metadata)
        spec = dataclasses.replace(spec, tied=tied)

        def read_packed(memory: Tensor) -> None:
            read_into(memory, self.path, checksums, self.path.stat().st_size - memory.nbytes)

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
