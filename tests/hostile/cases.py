"""One damage of a model's files, and how files are changed and loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import gguf_support
from model_support import packed
from paceline.kernels import native
from paceline.models.load.loading import describe_source, load_model
from paceline.models.native.model import Quantization
from paceline.models.native.spec import obstacle_of

Build = Callable[[Path], object]
Damage = Callable[[Path], object]
Load = Callable[[Path], object]
GGUFEdit = Callable[[gguf.GGUFWriter], object]
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Case:
    """One damage. build: writes the whole model into a folder; cached by ``kind``. damage: changes it.

    load: must raise an error whose message has the folder's name and matches ``pattern``; None: may succeed as well.
    """

    kind: str
    what: str
    build: Build
    damage: Damage
    load: tuple[Load, ...]
    pattern: str | None


# Loads


def only(path: Path) -> Path:
    """Return the folder, or the (first) GGUF file in it."""
    return next(iter(sorted(path.glob("*.gguf"))), path)


def in_torch(path: Path) -> None:
    load_model(only(path), dtype=torch.float32)


def in_bf16(path: Path) -> None:
    load_model(only(path), dtype=torch.bfloat16)


def in_int8(path: Path) -> None:
    _packed_or_in_torch(path, "int8")


def in_int4(path: Path) -> None:
    _packed_or_in_torch(path, "int4")


def _packed_or_in_torch(path: Path, quantization: Quantization) -> None:
    spec = describe_source(only(path))
    if spec is None or obstacle_of(spec) is not None:
        in_torch(path)
    else:
        packed(only(path), quantization, dtype=torch.bfloat16)


EVERY: tuple[Load, ...] = (in_torch, in_int8, in_int4) if native.select() is not None else (in_torch,)
TWO = EVERY[:2]


# Changes


def in_bytes(change: Callable[[bytes], bytes], file: str) -> Damage:
    """Change the first file of a pattern."""

    def damage(path: Path) -> None:
        first = sorted(path.glob(file))[0]
        first.write_bytes(change(first.read_bytes()))

    return damage


def in_json(file: str, **fields: Any) -> Damage:
    return lambda path: (path / file).write_text(json.dumps(json.loads((path / file).read_text()) | fields))


def in_tensors(change: Callable[[dict[str, Tensor]], object], file: str = "model.safetensors") -> Damage:
    def damage(path: Path) -> None:
        tensors = {key: tensor.clone() for key, tensor in load_file(path / file).items()}
        change(tensors)
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path / file, {"format": "pt"})

    return damage


def replaced(key: str, make: Callable[[Tensor], Tensor], file: str = "model.safetensors") -> Damage:
    return in_tensors(lambda tensors: tensors.update({key: make(tensors[key])}), file)


def dropped(key: str, file: str = "model.safetensors") -> Damage:
    return in_tensors(lambda tensors: tensors.pop(key), file)


def first_number(value: float) -> Callable[[Tensor], Tensor]:
    def make(tensor: Tensor) -> Tensor:
        tensor.view(-1)[0] = value
        return tensor

    return make


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "half": lambda t: t[: len(t) // 2],
    "empty": lambda t: t[:0],
    "twice": lambda t: torch.cat([t, t]),
    "one dimension more": lambda t: t[None],
    "one dimension less": lambda t: t.flatten() if t.dim() > 1 else t.new_zeros(()),
    "another type": lambda t: t.float().to(torch.int64) if t.is_floating_point() else t.float(),
}


def in_gguf(edit: GGUFEdit, file: str = "*.gguf") -> Damage:
    """Copy a GGUF file with a change of the writer's metadata and tensors."""

    def damage(path: Path) -> None:
        (source,) = path.glob(file)
        reader = gguf.GGUFReader(source)
        writer = gguf.GGUFWriter(source.with_suffix(".new"), reader.fields["general.architecture"].contents())
        for field in reader.fields.values():
            if not field.name.startswith(("GGUF.", "general.architecture")):
                kind, *inner = field.types
                writer.add_key_value(field.name, field.contents(), kind, inner[-1] if inner else None)
        for tensor in reader.tensors:
            writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
        edit(writer)
        gguf_support.finish(writer)
        source.with_suffix(".new").replace(source)

    return damage


def array_set(name: str, make: Callable[[Array], Array]) -> GGUFEdit:
    """Replace a tensor of a GGUF file by one of float32 or int32."""

    def edit(writer: gguf.GGUFWriter) -> None:
        values = np.ascontiguousarray(make(writer.tensors[0].pop(name).tensor))
        kind = gguf.GGMLQuantizationType.I32 if values.dtype == np.int32 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, values, raw_dtype=kind)

    return edit


def _with_nan(values: Array) -> Array:
    values.reshape(-1)[0] = np.nan
    return values


ARRAYS: dict[str, Callable[[Array], Array]] = {
    "half": lambda t: t[: len(t) // 2],
    "turned": lambda t: np.swapaxes(t, -1, -2)[..., :-1],
    "one dimension less": lambda t: t.reshape(-1),
    "words": lambda t: t.astype(np.int32),
    "NaN": _with_nan,
}


def no_number(tensor: Any) -> None:
    """Overwrite a quantised tensor of a GGUF writer, so that its scales are no numbers."""
    tensor.tensor.reshape(-1)[:] = 255
