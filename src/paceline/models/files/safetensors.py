"""Safetensors files of a model's directory, memory-mapped. Pickled weights, which can run any code, are refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from paceline.errors import ModelFormatError
from paceline.models.files.boundary import brief
from paceline.models.files.hub import check_regular
from paceline.models.files.json_files import FETCH_AGAIN, read_object

_INDEX = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth")


@dataclass(frozen=True)
class FileTensor:
    """A tensor of a memory-mapped safetensors file, or one entry of its first dimensions.

    dtype: its name in the file, such as "BF16". indices: of the entry; none for the whole.
    """

    path: Path
    file: Any  # safetensors' safe_open
    name: str
    shape: tuple[int, ...]
    dtype: str
    indices: tuple[int, ...] = ()

    @property
    def exact_dtype(self) -> torch.dtype:
        """The smallest dtype that holds the numbers, as ``matrices`` asks for it."""
        return torch.bfloat16 if self.dtype == "BF16" else torch.float32

    def load(self) -> Tensor:
        if not self.indices:
            return cast(Tensor, self.file.get_tensor(self.name))
        return cast(Tensor, self.file.get_slice(self.name)[self.indices])

    def check_floats(self) -> None:
        """Raise ModelFormatError for integers: they are codes of a quantised model, without their scales."""
        if not self.dtype.startswith(("F", "BF")):
            raise ModelFormatError(f"{self.path}: {self.name} is {self.dtype}, no floating-point numbers")

    def matrix(self, index: int) -> FileTensor:
        """Return one entry of the first dimension, not read yet."""
        return dataclasses.replace(self, shape=self.shape[1:], indices=(*self.indices, index))

    def unpack_into(self, destination: Tensor) -> None:
        self.check_floats()
        destination.copy_(self.load())


def weight_files(path: Path) -> list[Path]:
    """Return the safetensors files of a directory: model.safetensors, else those in its index, else its only one.

    An index beside model.safetensors is left over from an upload in shards; transformers does not read it either.
    Raises ModelFormatError if there is none, or several without an index.
    """
    index, single = path / _INDEX, path / "model.safetensors"
    if index.is_file() and not single.is_file():
        return _indexed(index)
    files = [single] if single.is_file() else sorted(path.glob("*.safetensors"))
    if not files:
        raise ModelFormatError(_no_weights(path))
    if len(files) > 1:
        raise ModelFormatError(
            f"{path} has {len(files)} safetensors files ({_some(files)}) and no {index.name} that lists the model's: "
            f"fetch that file, or rename the right one to {single.name}"
        )
    return files


def _indexed(index: Path) -> list[Path]:
    """Return the files in an index, which must lie in its directory. Raises ModelFormatError."""
    names = set(_weight_map(index).values())
    outside = [name for name in names if not name or Path(name).name != name]
    if not names or outside:
        problem = f"names {brief(outside[0])!r}, which is no file of its directory" if outside else "has no weight_map"
        raise ModelFormatError(f"{index} is broken: it {problem}; {FETCH_AGAIN}")
    files = [index.parent / name for name in sorted(names)]
    if missing := [file for file in files if not file.is_file()]:
        raise ModelFormatError(f"{index.parent} misses {_some(missing)}, which {index.name} names; fetch them")
    return files


def _weight_map(index: Path) -> dict[str, str]:
    """Return the file of each tensor, as an index lists them; empty if it lists none. Raises ModelFormatError."""
    weight_map = read_object(index).get("weight_map")
    return weight_map if isinstance(weight_map, dict) and _are_strings(weight_map.values()) else {}


def _are_strings(values: Iterable[Any]) -> bool:
    return all(isinstance(value, str) for value in values)


def _some(files: Sequence[Path]) -> str:
    others = f" and {len(files) - 4} more" if len(files) > 4 else ""
    return ", ".join(file.name for file in files[:4]) + others


def stored_tensors(path: Path) -> dict[str, FileTensor]:
    """Return the tensors of the safetensors files in directory ``path``, not read yet.

    One that two files have is read from that in the index. Raises ModelFormatError if the index does not list it in one
    of them, if a file lacks a tensor listed in it, or if there are no files or broken ones.
    """
    files = {file: open_safetensors(file) for file in weight_files(path)}
    found = {name: tensor for tensors in files.values() for name, tensor in tensors.items()}
    if len(found) == sum(map(len, files.values())):
        return found
    listed = _weight_map(path / _INDEX)
    for file, tensors in files.items():
        for name in sorted(name for name, owner in listed.items() if owner == file.name):
            if name not in tensors:
                problem = f"the tensor {brief(name)}, which {_INDEX} lists in it, is missing; {FETCH_AGAIN}"
                raise ModelFormatError(f"{file}: {problem}")
            found[name] = tensors[name]
        for name in sorted(tensors.keys() - listed.keys()):
            if found[name].path != file:
                problem = (
                    f"the tensor {brief(name)} is also in {found[name].path.name}, and not one that {_INDEX} lists"
                )
                raise ModelFormatError(f"{file}: {problem}; {FETCH_AGAIN}")
    return found


def _no_weights(path: Path) -> str:
    if any(next(path.glob(pattern), None) for pattern in PICKLES):
        return (
            f"{path} has only pickled weights, which can run any code and are not loaded. If you trust them, convert "
            "them: AutoModelForCausalLM.from_pretrained(DIRECTORY).save_pretrained(NEW_DIRECTORY)"
        )
    return f"{path} has no *.safetensors file"


def open_safetensors(path: Path) -> dict[str, FileTensor]:
    """Return the tensors of one file, not read yet. Raises ModelFormatError."""
    check_regular(path)
    try:
        file: Any = safe_open(str(path), framework="pt")
        names: list[str] = file.keys()
        return {name: _safe_tensor(path, file, name) for name in names}
    except (SafetensorError, OSError) as error:
        broken = f"{path}: broken or truncated safetensors file ({brief(error)}); {FETCH_AGAIN}"
        raise ModelFormatError(broken) from error


def _safe_tensor(path: Path, file: Any, name: str) -> FileTensor:
    view = file.get_slice(name)
    return FileTensor(path, file, name, tuple(view.get_shape()), view.get_dtype())
