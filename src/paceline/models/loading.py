"""From a name, a directory, a GGUF file or a loaded Hugging Face model to a ``Model``."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from paceline.errors import ModelFormatError
from paceline.models import gguf_config, weights
from paceline.models.base import Model
from paceline.models.config import ModelConfig, longest_sequence
from paceline.models.gguf import GGUFFile
from paceline.models.hub import resolve
from paceline.models.huggingface import HuggingFaceModel
from paceline.models.transformer import Transformer

Source: TypeAlias = str | os.PathLike[str] | PreTrainedModel
"""A directory, a .gguf file, an embedded or hub name, or a loaded Hugging Face model."""

PICKLES = ("*.bin", "*.pt", "*.pth")
FETCH_AGAIN = "fetch it again and compare its size"


def load_model(
    source: Source, *, dtype: torch.dtype, device: torch.device | str = "cpu", progress: bool = False
) -> Model:
    """The model of ``source`` in ``dtype`` (float32 or bfloat16), ready to run.

    Families of ``config.NATIVE_FAMILIES`` run through ``Transformer``, others through transformers' own code. A loaded
    model lends its weights where dtype and layout allow.

    Raises ModelNotFoundError if there is nothing of that name, ModelFormatError if its files are broken, incomplete,
    pickled or of a kind that cannot be run.
    """
    device = torch.device(device)
    if isinstance(source, PreTrainedModel):
        return _from_loaded(source, dtype, device)
    path = resolve(source)
    load = _from_gguf if path.is_file() else _from_directory
    return load(path, dtype, device, progress)


def load_config(source: Source) -> PretrainedConfig:
    """The Hugging Face configuration of ``source``, from the metadata for a GGUF file. Raises as ``load_model``."""
    if isinstance(source, PreTrainedModel):
        return source.config
    path = resolve(source)
    return gguf_config.huggingface_config(GGUFFile(path)) if path.is_file() else _directory_config(path)


def native_config(path: Path) -> ModelConfig | None:
    """The configuration of the checkpoint at ``path`` for ``Transformer``; None if its family is no native one.

    Whether embedding and head are tied is what it says, see ``weights.truly_tied``. Raises as ``load_model``.
    """
    if path.is_file():
        return gguf_config.native_config(GGUFFile(path))
    return ModelConfig.from_huggingface(_directory_config(path))


def files(path: Path) -> list[Path]:
    """The files that make the checkpoint at ``path``. Raises as ``load_model``."""
    return [path] if path.is_file() else [path / "config.json", *_weight_files(path)]


def max_positions(source: Source) -> int:
    """The longest sequence that the model of ``source`` was made for."""
    return longest_sequence(load_config(source).get_text_config())


def eos_token_ids(source: Source) -> tuple[int, ...]:
    """The tokens that end a text: from generation_config, else config, or from a GGUF file's metadata."""
    if isinstance(source, PreTrainedModel):
        generation = source.generation_config.eos_token_id if source.generation_config else None
        return _token_ids(source.config.eos_token_id if generation is None else generation)
    path = resolve(source)
    if path.is_file():
        return gguf_config.eos_token_ids(GGUFFile(path))
    generation = _read_json(path / "generation_config.json").get("eos_token_id")
    return _token_ids(_directory_config(path).eos_token_id if generation is None else generation)


def _token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


# Directories


@dataclass(frozen=True)
class _SafeTensor:
    """A tensor of a memory-mapped safetensors file."""

    file: Any  # safetensors' safe_open
    name: str
    shape: tuple[int, ...]

    def unpack_into(self, destination: Tensor) -> None:
        destination.copy_(self.file.get_tensor(self.name))


def _from_directory(path: Path, dtype: torch.dtype, device: torch.device, progress: bool) -> Model:
    config = _directory_config(path)
    stored = {name: tensor for file in _weight_files(path) for name, tensor in _open_safetensors(file).items()}
    native = ModelConfig.from_huggingface(config)
    if native is None:
        return HuggingFaceModel.from_directory(path, dtype=dtype, device=device)
    return _transformer(native, weights.HUGGINGFACE[native.family], stored, str(path), dtype, device, progress)


def _directory_config(path: Path) -> PretrainedConfig:
    if not (path / "config.json").is_file():
        raise ModelFormatError(f"{path} has no config.json: it is no model directory of Hugging Face's kind")
    _read_json(path / "config.json")
    try:
        return AutoConfig.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds for a bad or unknown configuration
        raise ModelFormatError(f"{path / 'config.json'} cannot be used: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    """The file's object; empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text())
    except (ValueError, OSError) as error:
        raise ModelFormatError(f"{path} is broken ({error}); {FETCH_AGAIN}") from error
    return found if isinstance(found, dict) else {}


def _weight_files(path: Path) -> list[Path]:
    """The safetensors files of a directory: those its index names, or its only one."""
    index = path / "model.safetensors.index.json"
    if index.is_file():
        files = [path / name for name in sorted(set(_read_json(index).get("weight_map", {}).values()))]
    else:
        files = sorted(path.glob("*.safetensors"))
    gone = [file.name for file in files if not file.is_file()]
    if gone:
        raise ModelFormatError(f"{path} misses {', '.join(gone)}, which {index.name} names; fetch them")
    if not files:
        raise ModelFormatError(_no_weights(path))
    return files


def _no_weights(path: Path) -> str:
    if any(next(path.glob(pattern), None) for pattern in PICKLES):
        return (
            f"{path} has only pickled weights, which can run any code and are not loaded. Convert them where you trust "
            "them: AutoModelForCausalLM.from_pretrained(DIRECTORY).save_pretrained(NEW_DIRECTORY)"
        )
    return f"{path} has no *.safetensors file"


def _open_safetensors(path: Path) -> dict[str, _SafeTensor]:
    try:
        file: Any = safe_open(str(path), framework="pt")
        names: list[str] = file.keys()
        return {name: _SafeTensor(file, name, tuple(file.get_slice(name).get_shape())) for name in names}
    except (SafetensorError, OSError) as error:
        raise ModelFormatError(f"{path}: broken or truncated safetensors file ({error}); {FETCH_AGAIN}") from error


# GGUF files and loaded models


def _from_gguf(path: Path, dtype: torch.dtype, device: torch.device, progress: bool) -> Model:
    file = GGUFFile(path)
    config = gguf_config.native_config(file)
    stored = gguf_config.tensors(file, config)
    try:
        return _transformer(config, weights.GGUF, stored, str(path), dtype, device, progress)
    except ModelFormatError as error:
        raise error if path.name in str(error) else ModelFormatError(f"{path}: {error}") from error


def _from_loaded(model: PreTrainedModel, dtype: torch.dtype, device: torch.device) -> Model:
    native = ModelConfig.from_huggingface(model.config)
    if native is None:
        fits = model.dtype == dtype and model.device == device
        return HuggingFaceModel(model if fits else copy.deepcopy(model).to(device=device, dtype=dtype))
    stored = {name: weights.LoadedTensor(tensor.detach()) for name, tensor in model.state_dict().items()}
    where = model.config.name_or_path or type(model).__name__
    return _transformer(native, weights.HUGGINGFACE[native.family], stored, where, dtype, device, progress=False)


def _transformer(
    config: ModelConfig,
    names: weights.Names,
    stored: Mapping[str, weights.StoredTensor],
    where: str,
    dtype: torch.dtype,
    device: torch.device,
    progress: bool,
) -> Transformer:
    if config.tied and not weights.truly_tied(names, stored):
        config = dataclasses.replace(config, tied=False)
    placements = weights.place(config, names, stored, where)
    return Transformer(config, weights.assemble(placements, dtype, device, progress=progress), where)
