"""Loading of a ``Model`` from a name, a directory, a GGUF file or a loaded Hugging Face model."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig

from paceline.errors import ModelFormatError, ParameterError
from paceline.models.base import Model
from paceline.models.description import shards, weights
from paceline.models.description.shards import ModelShard
from paceline.models.description.spec import DecoderSpec
from paceline.models.description.weight_names import WeightNames
from paceline.models.families import FAMILIES, USUAL_NAMES, describe, family_of, gguf_config
from paceline.models.families.rotary import longest_sequence
from paceline.models.files.boundary import ResolvedSource, brief, is_loaded, name_of, reading, reads_model
from paceline.models.files.boundary import Source as Source
from paceline.models.files.gguf import GGUFFile
from paceline.models.files.gguf_names import parts
from paceline.models.files.hub import check_regular
from paceline.models.files.json_files import FETCH_AGAIN, read_configuration, read_object
from paceline.models.files.quantised import Scheme, matrices, scheme_of
from paceline.models.native.recurrent import RecurrentModel, is_recurrent
from paceline.models.torch.transformer import Transformer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_INDEX = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth")


@reads_model
def load_model(
    source: ResolvedSource, *, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Model | RecurrentModel:
    """Load the model of ``source`` in ``dtype`` (float32, bfloat16 or float16).

    Families in ``families.FAMILIES`` run through ``Transformer``, others through transformers' own code. The
    weights of a loaded Hugging Face model are shared if dtype and layout allow.
    Raises ModelNotFoundError if there is no such model, ModelFormatError if its files are damaged, incomplete or
    pickled, or the model is not supported.
    """
    device = torch.device(device)
    if is_loaded(source):
        return _from_loaded(source, dtype, device)
    load = _from_gguf if source.is_file() else _from_directory
    return load(source, dtype, device)


@reads_model
def load_shard(
    source: ResolvedSource, shard: ModelShard, *, dtype: torch.dtype, device: torch.device
) -> tuple[DecoderSpec, dict[str, Tensor]]:
    """Load a rank's shard of a model: the description of the whole model, and the shard's weights by name.

    Raises the errors of ``load_model``, and ParameterError if the model cannot be split over the ranks.
    """
    path, spec = check_shardable(source, shard)
    spec, placements = placed(path, spec)
    return spec, weights.assemble(shards.cut(placements, spec, shard), dtype, device)


def placed(path: Path, spec: DecoderSpec) -> tuple[DecoderSpec, list[weights.Placement]]:
    """Return the description as the files are (``tied``, ``headless``), and the destination of every stored tensor.

    Raises ModelFormatError if they do not fit.
    """
    stored, names = _stored_of(path)
    spec = _as_stored(spec, names, stored)
    return spec, weights.place(spec, names, stored, str(path))


@reads_model
def check_shardable(source: ResolvedSource, shard: ModelShard) -> tuple[Path, DecoderSpec]:
    """Check that a model can be split over the ranks, without loading it; return its path and description.

    Raises the errors of ``load_shard``.
    """
    if is_loaded(source):
        allowed = f"1 with {name_of(source)}, which is loaded already: give its directory, from which each rank reads"
        raise ParameterError("tensor_parallel", shard.ranks, f"{allowed} a part")
    spec = description_of(source)
    if spec is None:
        allowed = f"1 with {source}: only models of the families {', '.join(FAMILIES)} can be split"
        raise ParameterError("tensor_parallel", shard.ranks, allowed)
    if is_recurrent(spec):
        allowed = f"1 with {source}: recurrent layers are not split over ranks yet"
        raise ParameterError("tensor_parallel", shard.ranks, allowed)
    shard.local(spec)
    return source, spec


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
        return parts(path) if path.is_file() else [path / "config.json", *_weight_files(path)]


def stored_tensors(path: Path) -> dict[str, _SafeTensor]:
    """Return the tensors of the safetensors files in directory ``path``, not read yet.

    Raises the errors of ``load_model``.
    """
    return _stored(path)


def head_tensors(path: Path) -> Mapping[str, weights.StoredTensor]:
    """Return the tensors of a checkpoint's own draft head, named ``mtp.*``, not read yet; none if it has no head.

    Raises the errors of ``load_model``.
    """
    if path.is_file():
        return gguf_config.head_tensors(GGUFFile(path))
    if not (path / "config.json").is_file():
        return {}
    config, scheme = _unquantised_config(path)
    family = FAMILIES.get(config.model_type)
    if family is None or not family.has_head:
        return {}
    stored = _read_by(scheme, stored_tensors(path))
    return {name: tensor for name, tensor in stored.items() if name.startswith("mtp.")}


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
        stored, names = _stored_of(source)
        return _as_stored(spec, names, stored).headless
    return source.get_output_embeddings() is None and not source.config.get_text_config().tie_word_embeddings


@reads_model
def load_output(source: ResolvedSource, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """Load only the weight [vocab_size, width] of a model's output head.

    Raises the errors of ``load_model``, and ModelFormatError if it has none.
    """
    if lacks_head(source):
        raise ModelFormatError(f"{name_of(source) if is_loaded(source) else source} has no output head")
    if is_loaded(source):
        return cast(Tensor, source.get_output_embeddings().weight).detach().to(device, dtype)
    return _first_stored(source, ("head.weight", "embed.weight"), dtype, device)


def _first_stored(source: Path, parts: Sequence[str], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Load the first of ``parts`` (paceline's names) that is stored. Raises ModelFormatError if none is."""
    stored, names = _stored_of(source)
    for part in parts:
        for name, tensor in stored.items():
            if names.ours(name) == part:
                found = torch.empty(tensor.shape, dtype=dtype)
                tensor.unpack_into(found)
                return found.to(device)
    raise ModelFormatError(f"{source} has no token embedding under a known name")


def _stored_of(path: Path) -> tuple[Mapping[str, weights.StoredTensor], WeightNames]:
    if path.is_file():
        file = GGUFFile(path)
        return gguf_config.tensors(file, gguf_config.describe(file)), gguf_config.form(file).names
    config, scheme = _unquantised_config(path)
    return _read_by(scheme, stored_tensors(path)), _names(config)


def _names(config: PretrainedConfig) -> WeightNames:
    family = family_of(config)
    return USUAL_NAMES if family is None else family.safetensors


@reads_model
def max_positions(source: ResolvedSource) -> int:
    """Return the longest sequence in tokens that a model supports. Raises the errors of ``load_model``."""
    return longest_sequence(load_config(source).get_text_config())


@reads_model
def check_source(source: ResolvedSource, max_model_len: int | None) -> None:
    """Check a source before its large files are read.

    Raises ModelFormatError for a directory without a model, and ParameterError if ``max_model_len`` tokens are more
    than the rotary frequencies stay the same for (longrope).
    """
    if not is_loaded(source) and source.is_file():
        return
    config = (source.config if is_loaded(source) else _directory_config(source)).get_text_config()
    configured = getattr(config, "max_position_embeddings", None)
    if max_model_len is None or configured is None or longest_sequence(config) == configured:
        return
    if longest_sequence(config) < max_model_len <= configured:
        name = name_of(source) if is_loaded(source) else str(source)
        allowed = (
            f"at most {longest_sequence(config)} with {name} (configured for {configured}): beyond that, its rotary "
            "frequencies (longrope) depend on the longest text of a batch, so a row's answer would depend on other rows"
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


# Directories


@dataclass(frozen=True)
class _SafeTensor:
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

    def matrix(self, index: int) -> _SafeTensor:
        """Return one entry of the first dimension, not read yet."""
        return dataclasses.replace(self, shape=self.shape[1:], indices=(*self.indices, index))

    def unpack_into(self, destination: Tensor) -> None:
        self.check_floats()
        destination.copy_(self.load())


def _from_directory(path: Path, dtype: torch.dtype, device: torch.device) -> Model | RecurrentModel:
    config, scheme = _unquantised_config(path)
    stored = _read_by(scheme, _stored(path))
    spec = describe(config)
    if spec is None and scheme is not None:
        raise ModelFormatError(
            f"{path} is a quantised model ({scheme.name}) of the type {config.model_type!r}, of which only original "
            f"weights can be run; quantised ones are read for {', '.join(FAMILIES)}"
        )
    if spec is None:
        from paceline.models.torch.huggingface import HuggingFaceModel  # importing it takes as long as importing torch

        return HuggingFaceModel.from_directory(path, dtype=dtype, device=device)
    return _transformer(spec, _names(config), stored, str(path), dtype, device)


def _directory_config(path: Path) -> PretrainedConfig:
    if not (path / "config.json").is_file():
        raise ModelFormatError(f"{path} has no config.json, so it is not a Hugging Face model directory")
    read_configuration(path / "config.json")
    with reading(path / "config.json"):
        return AutoConfig.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)


def _weight_files(path: Path) -> list[Path]:
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


def _stored(path: Path) -> dict[str, _SafeTensor]:
    """Return the tensors of a directory's files, not read yet. One that two files have is read from that in the index.

    Raises ModelFormatError if the index does not list it in one of them, or if a file lacks a tensor listed in it.
    """
    files = {file: open_safetensors(file) for file in _weight_files(path)}
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


def open_safetensors(path: Path) -> dict[str, _SafeTensor]:
    """Return the tensors of one file, not read yet. Raises ModelFormatError."""
    check_regular(path)
    try:
        file: Any = safe_open(str(path), framework="pt")
        names: list[str] = file.keys()
        return {name: _safe_tensor(path, file, name) for name in names}
    except (SafetensorError, OSError) as error:
        broken = f"{path}: broken or truncated safetensors file ({brief(error)}); {FETCH_AGAIN}"
        raise ModelFormatError(broken) from error


def _safe_tensor(path: Path, file: Any, name: str) -> _SafeTensor:
    view = file.get_slice(name)
    return _SafeTensor(path, file, name, tuple(view.get_shape()), view.get_dtype())


def _unquantised_config(path: Path) -> tuple[PretrainedConfig, Scheme | None]:
    """Return a directory's configuration as of its model before it was quantised, and how it was.

    Raises ModelFormatError for a scheme that is not read.
    """
    config = _directory_config(path)
    scheme = scheme_of(read_configuration(path / "config.json"), path)
    if scheme is not None:
        config.quantization_config = None
    return config, scheme


def _read_by(scheme: Scheme | None, stored: Mapping[str, _SafeTensor]) -> Mapping[str, weights.StoredTensor]:
    return stored if scheme is None else matrices(stored, scheme, lambda tensor: tensor.path)


# GGUF files and loaded models


def _from_gguf(path: Path, dtype: torch.dtype, device: torch.device) -> Model | RecurrentModel:
    file = GGUFFile(path)
    spec = gguf_config.describe(file)
    stored = gguf_config.tensors(file, spec)
    return _transformer(spec, gguf_config.form(file).names, stored, str(path), dtype, device)


def _from_loaded(model: PreTrainedModel, dtype: torch.dtype, device: torch.device) -> Model | RecurrentModel:
    spec = describe(_unpacked_config(model))
    if spec is not None:
        spec = dataclasses.replace(spec, headless=lacks_head(model))
    if spec is None:
        from paceline.models.torch.huggingface import HuggingFaceModel

        fits = model.dtype == dtype and model.device == device
        return HuggingFaceModel(model if fits else copy.deepcopy(model).to(device=device, dtype=dtype))
    stored = {name: weights.LoadedTensor(tensor.detach()) for name, tensor in model.state_dict().items()}
    where = name_of(model)
    return _transformer(spec, _names(model.config), stored, where, dtype, device)


def _unpacked_config(model: PreTrainedModel) -> PretrainedConfig:
    """The configuration; without its quantisation where transformers has made plain weights of a GGUF file's."""
    scheme = getattr(getattr(model.config, "quantization_config", None), "quant_method", None)
    plain = (torch.float32, torch.bfloat16, torch.float16)
    if scheme != "gguf" or any(tensor.dtype not in plain for tensor in model.state_dict().values()):
        return model.config
    config = copy.copy(model.config)
    config.quantization_config = None
    return config


def _transformer(
    spec: DecoderSpec,
    names: WeightNames,
    stored: Mapping[str, weights.StoredTensor],
    where: str,
    dtype: torch.dtype,
    device: torch.device,
) -> Model | RecurrentModel:
    spec = _as_stored(spec, names, stored)
    tensors = weights.assemble(weights.place(spec, names, stored, where), dtype, device)
    in_torch = is_recurrent(spec) and device.type == "cpu"  # unrounded, and what the CPU kernels are packed from
    return (RecurrentModel if in_torch else Transformer)(spec, tensors, where)


def _as_stored(spec: DecoderSpec, names: WeightNames, stored: Mapping[str, weights.StoredTensor]) -> DecoderSpec:
    """Set ``tied`` to False if the files have an embedding and a head that differ, and ``headless`` by the files."""
    has_head = spec.tied or any(names.ours(name) == "head.weight" for name in stored)
    headless = spec.headless and not has_head
    return dataclasses.replace(
        spec, tied=headless or (spec.tied and weights.truly_tied(names, stored)), headless=headless
    )
