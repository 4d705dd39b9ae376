"""Checkpoints and their configurations, from a name, a directory, a GGUF file or a loaded Hugging Face model."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig

from paceline.errors import ModelFormatError, ParameterError
from paceline.models.base import Model
from paceline.models.description import shards, weights
from paceline.models.description.checkpoint import Checkpoint, as_stored
from paceline.models.description.shards import ModelShard
from paceline.models.description.spec import DecoderSpec
from paceline.models.description.weight_names import WeightNames
from paceline.models.families import FAMILIES, as_described, describe, family_of, gguf_config, names_of
from paceline.models.families.rotary import configured_length, longest_sequence, why_shorter
from paceline.models.files.boundary import ResolvedSource, brief, is_loaded, name_of, reading, reads_model
from paceline.models.files.boundary import Source as Source
from paceline.models.files.gguf import GGUFFile
from paceline.models.files.gguf_names import parts
from paceline.models.files.json_files import read_configuration, read_object
from paceline.models.files.quantised import Scheme, matrices, scheme_of
from paceline.models.files.safetensors import stored_tensors, weight_files
from paceline.models.torch.transformer import Transformer

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@reads_model
def open_checkpoint(source: ResolvedSource) -> Checkpoint | None:
    """Find the weights of ``source``, without reading them; None if only transformers' own code runs the model.

    Raises ModelNotFoundError if there is no such model, ModelFormatError if its files are damaged, incomplete or
    pickled, or the model is not supported.
    """
    if is_loaded(source):
        if (spec := describe(_unpacked_config(source))) is None:
            return None
        stored = {name: weights.LoadedTensor(tensor.detach()) for name, tensor in source.state_dict().items()}
        spec = replace(spec, headless=lacks_head(source))
        return Checkpoint.of(name_of(source), spec, names_of(source.config), as_described(source.config, stored))
    spec, names, tensors = _opened(source)
    return None if spec is None else Checkpoint.of(str(source), spec, names, tensors)


@reads_model
def load_model(source: ResolvedSource, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> Model:
    """Load the model of ``source`` in torch, in ``dtype`` (float32, bfloat16 or float16).

    Families in ``families.FAMILIES`` run through ``Transformer``, others through transformers' own code. The
    weights of a loaded Hugging Face model are shared if dtype and layout allow.
    Raises the errors of ``open_checkpoint``.
    """
    return in_torch(source, open_checkpoint(source), dtype, torch.device(device))


def in_torch(source: ResolvedSource, checkpoint: Checkpoint | None, dtype: torch.dtype, device: torch.device) -> Model:
    """Read a checkpoint and run it in torch; None: run ``source`` by transformers' own code."""
    if checkpoint is None:
        return _in_transformers(source, dtype, device)
    return Transformer(checkpoint.spec, checkpoint.tensors(dtype, device), checkpoint.name)


def _in_transformers(source: ResolvedSource, dtype: torch.dtype, device: torch.device) -> Model:
    from paceline.models.torch.huggingface import HuggingFaceModel  # importing it takes as long as importing torch
    from paceline.models.torch.pretrained import load_pretrained
    from paceline.models.torch.whole_texts import WholeTextModel

    if not is_loaded(source):
        model = load_pretrained(source, dtype=dtype, device=device)
    elif source.dtype == dtype and source.device == device:
        model = source
    else:
        model = copy.deepcopy(source).to(device=device, dtype=dtype)
    try:
        return HuggingFaceModel(model)
    except ModelFormatError as error:
        reason = str(error).removeprefix(f"{name_of(model)} cannot be run: ")
    return WholeTextModel(model, reason)


@reads_model
def load_shard(
    source: ResolvedSource, shard: ModelShard, *, dtype: torch.dtype, device: torch.device
) -> tuple[DecoderSpec, dict[str, Tensor]]:
    """Load a rank's shard of a model: the description of the whole model, and the shard's weights by name.

    Raises the errors of ``open_checkpoint``, and ParameterError if the model cannot be split over the ranks.
    """
    whole = open_checkpoint(check_shardable(source, shard))
    assert whole is not None, "check_shardable refuses other families"
    return whole.spec, shards.cut(whole, shard).tensors(dtype, device)


@reads_model
def check_shardable(source: ResolvedSource, shard: ModelShard) -> Path:
    """Check that a model can be split over the ranks, without loading it; return its path.

    Raises the errors of ``load_shard``.
    """
    if is_loaded(source):
        allowed = f"1 with {name_of(source)}, which is loaded already: give its directory, from which each rank reads"
        raise ParameterError("tensor_parallel", shard.ranks, f"{allowed} a part")
    spec = description_of(source)
    if spec is None:
        allowed = f"1 with {source}: only models of the families {', '.join(FAMILIES)} can be split"
        raise ParameterError("tensor_parallel", shard.ranks, allowed)
    shard.local(spec)
    return source


@reads_model
def load_config(source: ResolvedSource) -> PretrainedConfig:
    """Return the Hugging Face configuration of ``source``; for a GGUF file it is made from the metadata.

    Raises the errors of ``load_model``.
    """
    if is_loaded(source):
        return source.config
    return gguf_config.huggingface_config(GGUFFile(source)) if source.is_file() else _directory_config(source)


def description_of(path: Path) -> DecoderSpec | None:
    """Return the description of the checkpoint at ``path``; None if its family is not native.

    ``tied`` is that of the configuration file; see ``weights.truly_tied``. Raises the errors of ``load_model``.
    """
    with reading(path):
        if path.is_file():
            return gguf_config.describe(GGUFFile(path))
        return describe(_unquantised_config(path)[0])


@reads_model
def describe_source(source: ResolvedSource) -> DecoderSpec | None:
    """Return the description of any model; see ``description_of``."""
    return describe(source.config) if is_loaded(source) else description_of(source)


def files(path: Path) -> list[Path]:
    """Return the files of the checkpoint at ``path``. Raises the errors of ``load_model``."""
    with reading(path):
        return parts(path) if path.is_file() else [path / "config.json", *weight_files(path)]


def head_tensors(path: Path, spec: DecoderSpec | None = None) -> tuple[WeightNames, Mapping[str, weights.StoredTensor]]:
    """Return the tensors of a checkpoint's own draft head, not read yet, and their names; none if it has no head.

    spec: the head's layer; None: GGUF files' tensors are as they are stored. Raises the errors of ``load_model``.
    """
    if path.is_file():
        return gguf_config.head_tensors(GGUFFile(path), spec)
    if not (path / "config.json").is_file():
        return WeightNames({}), {}
    config, scheme = _unquantised_config(path)
    family = family_of(config)
    if family is None or family.head is None:
        return WeightNames({}), {}
    names = family.head.behind(config.get_text_config().num_hidden_layers)
    stored = _stored(path, scheme).items()
    return names, {name: tensor for name, tensor in stored if name.startswith(names.prefixes)}


@reads_model
def load_embedding(source: ResolvedSource, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """Load only the token embedding [vocab_size, width] of a model. Raises the errors of ``load_model``."""
    if is_loaded(source):
        return cast(Tensor, source.get_input_embeddings().weight).detach().to(device, dtype)
    return _first_stored(source, ("embed.weight", "head.weight"), dtype, device)  # if tied, either may be stored


@reads_model
def lacks_head(source: ResolvedSource) -> bool:
    """Whether a model has no output head, as many for embeddings: its texts cannot be continued.

    Raises the errors of ``load_model``.
    """
    if not is_loaded(source):
        spec = description_of(source)
        if spec is None or not spec.headless:
            return False
        spec, names, stored = _opened(source)
        return spec is not None and as_stored(spec, names, stored).headless
    return source.get_output_embeddings() is None and not source.config.get_text_config().tie_word_embeddings


@reads_model
def load_output(source: ResolvedSource, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """Load only the weight [vocab_size, width] of a model's output head.

    Raises the errors of ``load_model``, and ModelFormatError if it has none.
    """
    if lacks_head(source):
        raise ModelFormatError(f"{name_of(source)} has no output head")
    if is_loaded(source):
        return cast(Tensor, source.get_output_embeddings().weight).detach().to(device, dtype)
    return _first_stored(source, ("head.weight", "embed.weight"), dtype, device)


def _first_stored(source: Path, parts: Sequence[str], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Load the first of ``parts`` (paceline's names) that is stored. Raises ModelFormatError if none is."""
    _, names, stored = _opened(source)
    for part in parts:
        for name, tensor in stored.items():
            if names.ours(name) == part:
                found = torch.empty(tensor.shape, dtype=dtype)
                tensor.unpack_into(found)
                return found.to(device)
    raise ModelFormatError(f"{source} has no token embedding under a known name")


def _opened(path: Path) -> tuple[DecoderSpec | None, WeightNames, Mapping[str, weights.StoredTensor]]:
    """Return what the files of a model have: its description, None outside of native families; names; tensors."""
    if path.is_file():
        file = GGUFFile(path)
        spec = gguf_config.describe(file)
        return spec, gguf_config.form(file).names, gguf_config.tensors(file, spec)
    config, scheme = _unquantised_config(path)
    stored = as_described(config, _stored(path, scheme))
    described = describe(config)
    if described is None and scheme is not None:
        raise ModelFormatError(
            f"{path} is a quantised model ({scheme.name}) of the type {config.model_type!r}, of which only original "
            f"weights can be run; quantised ones are read for {', '.join(FAMILIES)}"
        )
    return described, names_of(config), stored


@reads_model
def max_positions(source: ResolvedSource) -> int:
    """Return the longest sequence in tokens that a model supports. Raises the errors of ``load_model``."""
    return longest_sequence(load_config(source).get_text_config())


@reads_model
def check_source(source: ResolvedSource, max_model_len: int | None) -> None:
    """Check a source before its large files are read.

    Raises ModelFormatError for a directory without a model, and ParameterError if ``max_model_len`` is more than
    ``longest_sequence``.
    """
    if not is_loaded(source) and source.is_file():
        return
    config = (source.config if is_loaded(source) else _directory_config(source)).get_text_config()
    configured = configured_length(config)
    if max_model_len is None or configured is None or longest_sequence(config) == configured:
        return
    if longest_sequence(config) < max_model_len <= configured:
        allowed = (
            f"at most {longest_sequence(config)} with {name_of(source)} (configured for {configured}): beyond that, "
            f"{why_shorter(config)}"
        )
        raise ParameterError("max_model_len", max_model_len, allowed)


@reads_model
def eos_token_ids(source: ResolvedSource) -> tuple[int, ...]:
    """Return the tokens that end a text: from generation_config, else config, or from a GGUF file's metadata.

    Raises the errors of ``load_model``.
    """
    if is_loaded(source):
        generation = getattr(source, "generation_config", None)  # none in a class without an output head
        eos = generation.eos_token_id if generation else None
        return _token_ids(_eos(source.config) if eos is None else eos)
    if source.is_file():
        return gguf_config.eos_token_ids(GGUFFile(source))
    generation = read_object(source / "generation_config.json").get("eos_token_id")
    return _token_ids(_eos(_directory_config(source)) if generation is None else generation)


def _eos(config: PretrainedConfig) -> Any:
    """Return eos_token_id of a configuration, or of its text model's in a multimodal one."""
    found = getattr(config, "eos_token_id", None)
    return getattr(config.get_text_config(), "eos_token_id", None) if found is None else found


def _token_ids(value: Any) -> tuple[int, ...]:
    """Convert the value of eos_token_id, which is None, a token or a list of tokens. Raises ModelFormatError."""
    tokens = value if isinstance(value, list) else [] if value is None else [value]
    invalid = [token for token in tokens if not isinstance(token, int) or token < 0]
    if invalid:
        raise ModelFormatError(f"eos_token_id must have integers from 0 on, not {brief(repr(invalid[0]))}")
    return tuple(tokens)


def _directory_config(path: Path) -> PretrainedConfig:
    if not (path / "config.json").is_file():
        raise ModelFormatError(f"{path} has no config.json, so it is not a Hugging Face model directory")
    read_configuration(path / "config.json")
    with reading(path / "config.json"):
        return AutoConfig.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)


def _unquantised_config(path: Path) -> tuple[PretrainedConfig, Scheme | None]:
    """Return a directory's configuration as of its model before it was quantised, and how it was.

    Raises ModelFormatError for a scheme that is not read.
    """
    config = _directory_config(path)
    scheme = scheme_of(read_configuration(path / "config.json"), path)
    if scheme is not None:
        config.quantization_config = None
    return config, scheme


def _stored(path: Path, scheme: Scheme | None) -> Mapping[str, weights.StoredTensor]:
    stored = stored_tensors(path)
    return stored if scheme is None else matrices(stored, scheme)


def _unpacked_config(model: PreTrainedModel) -> PretrainedConfig:
    """The configuration; without its quantisation where transformers has made plain weights of a GGUF file's."""
    scheme = getattr(getattr(model.config, "quantization_config", None), "quant_method", None)
    plain = (torch.float32, torch.bfloat16, torch.float16)
    if scheme != "gguf" or any(tensor.dtype not in plain for tensor in model.state_dict().values()):
        return model.config
    config = copy.copy(model.config)
    config.quantization_config = None
    return config
