"""Quantised safetensors checkpoints: what ``quantization_config`` says, and the matrices that its tensors are.

Read are compressed-tensors (4 and 8 bits, float8, MXFP4, NVFP4), GPTQ, AWQ, AutoRound, modelopt (float8, NVFP4), float8
with a scale per block or per matrix, and MXFP4. Others are refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from paceline.errors import ModelFormatError
from paceline.models.files.boundary import brief
from paceline.models.files.json_files import MODELOPT_FILE, read_object
from paceline.models.files.quantised_tensors import (
    AWQTensor,
    CompressedTensor,
    GPTQTensor,
    GroupedTensor,
    MXFP4Tensor,
    NVFP4Tensor,
    Parts,
    SafeTensor,
    ScaledTensor,
)
from paceline.models.files.safetensors import FileTensor

Matrix = GroupedTensor | ScaledTensor | MXFP4Tensor | NVFP4Tensor

READ = "compressed-tensors, GPTQ, AWQ, AutoRound, modelopt, float8 or MXFP4"
INSTEAD = f"use the model's original weights with quantization='int8' or 'int4', or a version of it in {READ}"

# Scales of activations and of the KV cache: ours are rounded by the kernels, row by row, or not at all.
_IGNORED = re.compile(
    r".*\.(input_scale|activation_scale|input_zero_point|output_scale|[kqv]_scale|input_global_scale)"
)


@dataclass(frozen=True)
class Scheme:
    """Storage format of a checkpoint's matrices. name: for messages. mark: the suffix that a matrix is known by.

    suffixes: of all tensors of a matrix. make: the matrix from its tensors.
    """

    name: str
    mark: str
    suffixes: frozenset[str]
    make: Callable[[Parts], Matrix]


def scheme_of(configuration: Mapping[str, Any], where: Path) -> Scheme | None:
    """Return the scheme of a model's config.json; None if the model is not quantised.

    where: the model's directory. Older versions of modelopt tell the scheme in a file of their own beside config.json.
    Raises ModelFormatError for a scheme that is not read.
    """
    said = configuration.get("quantization_config", configuration.get("compression_config"))
    if said is None and (other := read_object(where / MODELOPT_FILE)):
        said = {"quant_method": "modelopt", **other}
    if said is None and configuration.get("quantization") is not None:
        said = {"quant_method": "mlx"}
    if said is None:
        return None
    if not isinstance(said, dict):
        raise ModelFormatError(f"{where}: quantization_config is {brief(repr(said), 60)}, not an object")
    method = str(said.get("quant_method", "mlx" if {"group_size", "bits"} <= said.keys() else "?")).lower()
    reader = _METHODS.get(method)
    if reader is None:
        raise ModelFormatError(f"{where} is quantised by {brief(method, 60)!r}, which is not read: {INSTEAD}")
    try:
        return reader(said)
    except _NotReadError as error:
        raise ModelFormatError(f"{where}: {method} with {error} is not read: {INSTEAD}") from error


class _NotReadError(Exception):
    """A variant of a known method that is not read; the message names it."""


def matrices(stored: Mapping[str, FileTensor], scheme: Scheme) -> dict[str, FileTensor | Matrix]:
    """Join the tensors of quantised matrices; others stay as they are.

    stored: by the checkpoint's names.
    Raises ModelFormatError for a tensor that is missing or of a wrong shape or dtype.
    """
    stems = [name.removesuffix(scheme.mark) for name in stored if name.endswith(scheme.mark)]
    stems = [stem for stem in stems if _is_quantised(stem, stored, scheme)]
    found: dict[str, FileTensor | Matrix] = {}
    taken: set[str] = set()
    for stem in stems:
        names = {suffix: f"{stem}{_joint(scheme)}{suffix}" for suffix in scheme.suffixes}
        tensors: dict[str, SafeTensor] = {suffix: stored[name] for suffix, name in names.items() if name in stored}
        parts = Parts(f"{stored[stem + scheme.mark].path}: {stem}", tensors)
        found[stem if scheme.mark.startswith("_") else f"{stem}.weight"] = scheme.make(parts)
        taken |= set(names.values())
    if not found:
        raise ModelFormatError(f"no tensor ends in {scheme.mark}, although the configuration says {scheme.name}")
    rest = {name: tensor for name, tensor in stored.items() if name not in taken and not _IGNORED.fullmatch(name)}
    if clashing := found.keys() & rest.keys():
        raise ModelFormatError(f"{min(clashing)} is stored twice: quantised and as it is")
    return rest | found


def _joint(scheme: Scheme) -> str:
    return "" if scheme.mark.startswith("_") else "."


def _is_quantised(stem: str, stored: Mapping[str, FileTensor], scheme: Scheme) -> bool:
    """Whether a matrix is quantised. Where it has the name of a plain one, its dtype tells."""
    return scheme.mark != ".weight" or stored[stem + scheme.mark].dtype in ("I8", "U8", "F8_E4M3", "F8_E5M2")


# Methods: quantization_config -> scheme


def _bits(said: Mapping[str, Any], *allowed: int, key: str = "bits") -> int:
    found = said.get(key)
    if type(found) is not int or found not in allowed:
        raise _NotReadError(f"{key}={brief(repr(found), 40)}")
    return found


def _gptq(said: Mapping[str, Any], name: str = "GPTQ") -> Scheme:
    bits = _bits(said, 4, 8)
    kind = said.get("checkpoint_format") or "gptq"
    if kind not in ("gptq", "gptq_v2"):
        raise _NotReadError(f"checkpoint_format={brief(repr(kind), 40)}")
    if said.get("dynamic"):
        raise _NotReadError("'dynamic' settings by module")
    first_zero = 1 if kind == "gptq" else 0
    suffixes = frozenset({"qweight", "qzeros", "scales", "g_idx"})
    needed = ("g_idx",) if said.get("desc_act") else ()
    return Scheme(name, ".qweight", suffixes, partial(GPTQTensor, bits=bits, first_zero=first_zero, needed=needed))


def _awq(said: Mapping[str, Any], name: str = "AWQ") -> Scheme:
    _bits(said, 4)
    version = str(said.get("version", "gemm")).lower()
    if version != "gemm":
        raise _NotReadError(f"the layout {brief(version, 40)!r}")
    suffixes = frozenset({"qweight", "qzeros", "scales"})
    return Scheme(name, ".qweight", suffixes, AWQTensor)


def _auto_round(said: Mapping[str, Any]) -> Scheme:
    packing = str(said.get("packing_format", "auto_round:auto_gptq"))
    by = {"gptq": _gptq, "awq": _awq}.get(packing.removeprefix("auto_round:").removeprefix("auto_"))
    if by is None:
        raise _NotReadError(f"the packing {brief(packing, 40)!r}")
    return by(said, "AutoRound")


def _fp8(said: Mapping[str, Any]) -> Scheme:
    block = said.get("weight_block_size")
    sizes = None if block is None else _block(block)
    suffixes = frozenset({"weight", "weight_scale_inv"})
    return Scheme("float8", ".weight", suffixes, partial(ScaledTensor, scale="weight_scale_inv", block=sizes))


def _block(said: Any) -> tuple[int, int]:
    sizes = said if isinstance(said, list) and len(said) == 2 else [0, 0]
    if not all(type(size) is int and 0 < size < 1 << 20 for size in sizes):
        raise _NotReadError(f"blocks of {brief(repr(said), 40)}")
    return sizes[0], sizes[1]


_MXFP4 = Scheme(
    "MXFP4", "_blocks", frozenset({"_blocks", "_scales"}), partial(MXFP4Tensor, values="_blocks", scales="_scales")
)


def _compressed_tensors(said: Mapping[str, Any]) -> Scheme:
    groups = said.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise _NotReadError("no config_groups")
    sparsity = said.get("sparsity_config")
    if said.get("transform_config"):
        raise _NotReadError("transform_config")
    if sparsity and not (isinstance(sparsity, dict) and sparsity.get("format") == "dense"):  # all zeros are stored
        raise _NotReadError("sparsity_config")
    kinds = {str(_weights_of(group).get("format") or said.get("format")) for group in groups.values()}
    settings = [_weights_of(group)["weights"] for group in groups.values()]
    if len(kinds) > 1 or len({_bits(weights, 4, 8, key="num_bits") for weights in settings}) > 1:
        raise _NotReadError("several formats or numbers of bits")
    return _compressed(kinds.pop(), settings[0])


def _weights_of(group: Any) -> Mapping[str, Any]:
    if not isinstance(group, dict) or not isinstance(group.get("weights"), dict):
        raise _NotReadError("a group of config_groups without weights")
    return group


def _compressed(kind: str, weights: Mapping[str, Any]) -> Scheme:
    name, bits = "compressed-tensors", _bits(weights, 4, 8, key="num_bits")
    packed = {"weight_packed", "weight_scale"}
    if kind == "pack-quantized":
        suffixes = frozenset(packed | {"weight_shape", "weight_zero_point", "weight_g_idx"})
        needed = ["weight_zero_point"] if weights.get("symmetric") is False else []
        if weights.get("actorder") in (True, "group", "dynamic"):  # the others store groups side by side
            needed.append("weight_g_idx")
        return Scheme(name, ".weight_packed", suffixes, partial(CompressedTensor, bits=bits, needed=needed))
    if kind == "mxfp4-pack-quantized":
        make = partial(MXFP4Tensor, values="weight_packed", scales="weight_scale")
        return Scheme(f"{name} MXFP4", ".weight_packed", frozenset(packed), make)
    if kind == "nvfp4-pack-quantized":
        suffixes = frozenset(packed | {"weight_global_scale"})
        make_nvfp4 = partial(NVFP4Tensor, values="weight_packed", of_all="weight_global_scale", divides=True)
        return Scheme(f"{name} NVFP4", ".weight_packed", suffixes, make_nvfp4)
    if kind in ("int-quantized", "float-quantized", "naive-quantized") and bits == 8:
        block = _block(weights.get("block_structure")) if weights.get("strategy") == "block" else None
        suffixes = frozenset({"weight", "weight_scale", "weight_zero_point"})
        return Scheme(name, ".weight", suffixes, partial(ScaledTensor, scale="weight_scale", block=block))
    raise _NotReadError(f"the format {brief(kind, 40)!r} of {bits} bits")


_MODELOPT_READ = frozenset({"FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "W4A16_NVFP4"})


def _modelopt(said: Mapping[str, Any]) -> Scheme:
    """Return the scheme of modelopt: matrices of float8 and of NVFP4, which may lie in one checkpoint."""
    inner = said.get("quantization")
    settings = inner if isinstance(inner, dict) else said
    layers = settings.get("quantized_layers")
    algorithms = {settings.get("quant_algo")}
    if algorithms == {"MIXED_PRECISION"} and isinstance(layers, dict) and layers:
        algorithms = {layer.get("quant_algo") if isinstance(layer, dict) else None for layer in layers.values()}
    for other in sorted(map(str, algorithms - _MODELOPT_READ)):
        raise _NotReadError(f"quant_algo={brief(repr(other), 40)}")
    return Scheme("modelopt", ".weight", frozenset({"weight", "weight_scale", "weight_scale_2"}), _modelopt_matrix)


def _modelopt_matrix(parts: Parts) -> Matrix:
    if parts.tensors["weight"].dtype == "U8":
        return NVFP4Tensor(parts, "weight", "weight_scale_2", divides=False)
    return ScaledTensor(parts, "weight_scale", block=None)


_METHODS: dict[str, Callable[[Mapping[str, Any]], Scheme]] = {
    "compressed-tensors": _compressed_tensors,
    "gptq": _gptq,
    "awq": _awq,
    "auto-round": _auto_round,
    "fp8": _fp8,
    "modelopt": _modelopt,
    "mxfp4": lambda _: _MXFP4,
}
