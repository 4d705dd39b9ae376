"""LoRA adapters of a model (2106.09685): low-rank products that are added to its linear layers, by row of a batch.

Files are those of peft: a directory with ``adapter_config.json`` and ``adapter_model.safetensors``.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from paceline.errors import ModelFormatError, ParameterError
from paceline.kernels.low_rank import RANKS, LowRankChanges
from paceline.models.base import AnyModel
from paceline.models.description.mixers import pairs_apart
from paceline.models.description.spec import AttentionSpec, DecoderSpec
from paceline.models.description.weights import Slot, StoredTensor, check_finite, check_named_once, slots
from paceline.models.families import FAMILIES
from paceline.models.families.wrappers import in_wrapper
from paceline.models.files.boundary import brief, reading
from paceline.models.files.json_files import read_configuration
from paceline.models.files.safetensors import open_safetensors
from paceline.models.native.low_rank import LowRank
from paceline.models.native.model import NativeModel
from paceline.models.torch.linear import Linear
from paceline.models.torch.transformer import Transformer

_CONFIGURATION, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_LINEAR = re.compile(r"layers\.\d+\.(q|k|v|qkv|o|gate|up|gate_up|down)\.weight")
_PART = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])\.weight")

# Settings of peft that change the computation and that are not supported, with the value that turns each off.
_REFUSED: Mapping[str, tuple[object, ...]] = {
    "use_dora": (False, None),
    "bias": ("none", None),
    "modules_to_save": (None, []),
    "alpha_pattern": ({}, None),
    "lora_bias": (False, None),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, [], {}),
    "use_qalora": (False, None),
    "alora_invocation_tokens": (None, []),
}


# Initialisations for which peft changes the model's own weights whenever it loads the adapter.
_CHANGES_MODEL = ("pissa", "olora", "corda", "lora_ga", "loftq")


class AdapterRows(threading.local):
    """The adapter of each row in the forward pass that this thread runs.

    numbers: int32 [B] on the model's device, 0 for none; None: no row has one.
    """

    numbers: Tensor | None = None


class AdaptedLinear:
    """A linear layer of a model with the changes of its adapters."""

    __slots__ = ("_base", "_changes", "_model", "_rows")

    def __init__(self, base: Linear, changes: LowRankChanges, rows: AdapterRows, model: Transformer) -> None:
        self._base, self._changes, self._rows, self._model = base, changes, rows, model

    def __call__(self, x: Tensor) -> Tensor:
        y = self._base(x)
        if (numbers := self._rows.numbers) is not None:
            self._model.steps.add_changes(y, x, self._changes, numbers)
        return y

    def tensors(self) -> tuple[Tensor, ...]:
        return *self._base.tensors(), self._changes.down, self._changes.up


@dataclass(frozen=True)
class Adapters:
    """The adapters that a model was loaded with. names: in the order of their numbers, which begin at 1."""

    names: tuple[str, ...]
    rows: AdapterRows

    def use(self, numbers: Tensor | None) -> None:
        """See ``RowAdapters.use``."""
        self.rows.numbers = numbers

    def number(self, name: str | None) -> int:
        """Return the number of an adapter, 0 for None."""
        return 0 if name is None else self.names.index(name) + 1


def attach(model: AnyModel, paths: Mapping[str, Path], spec: DecoderSpec | None) -> None:
    """Load adapters by name and attach them to a model: linear layers in torch are replaced, the kernels get matrices.

    spec: the model's description; None if it has none.
    Raises ModelFormatError for damaged or unsupported files, ParameterError if the model cannot have adapters.
    """
    if spec is None or not isinstance(model, Transformer | NativeModel):
        raise _refusal(model, paths, "runs through transformers' own code")
    if not spec.plain_attention:
        raise _refusal(model, paths, f"has {', '.join(_unchanged_parts(spec))}")
    rows, by_layer = AdapterRows(), dict[str, dict[int, list[LowRank]]]()
    for number, path in enumerate(paths.values(), 1):
        for target, change in _load(path, spec, model):
            by_layer.setdefault(target, {}).setdefault(number, []).append(change)
    adapters = Adapters(tuple(paths), rows)
    if isinstance(model, NativeModel):
        model.adapt(adapters, by_layer)
        return
    for owner, attribute, name in model.layer_linears():
        if name in by_layer:
            changes = _stacked(by_layer[name], len(paths), model.dtype)
            setattr(owner, attribute, AdaptedLinear(getattr(owner, attribute), changes, rows, model))
    model.adapters = adapters


def _refusal(model: AnyModel, paths: Mapping[str, Path], why: str) -> ParameterError:
    instead = "merge the adapter into the model's weights (peft's merge_and_unload)"
    return ParameterError("adapters", list(paths), f"none with {model.name}, which {why}; {instead}")


def _unchanged_parts(spec: DecoderSpec) -> Iterator[str]:
    """Yield what a model has that adapters do not change."""
    if spec.recurrent:
        yield "recurrent layers"
    for name, has in {
        "latent attention": any(attention.latent for attention in spec.attentions),
        "gated attention": any(attention.gated for attention in spec.attentions),
        "attention sinks": any(attention.sinks for attention in spec.attentions),
    }.items():
        if has:
            yield name


def _stacked(changes: Mapping[int, Sequence[LowRank]], count: int, dtype: torch.dtype) -> LowRankChanges:
    """Stack the changes of a layer by ``count`` adapters. changes: by the adapter's number, from 1 on."""
    first = next(iter(changes.values()))[0]
    ranks = [sum(len(change.down) for change in changes.get(number, ())) for number in range(1, count + 1)]
    most, device = -(-max(ranks) // RANKS) * RANKS, first.down.device
    down = torch.zeros(count, most, first.down.shape[1], dtype=dtype, device=device)
    up = torch.zeros(count, first.total, most, dtype=dtype, device=device)
    for number, parts in changes.items():
        begin = 0
        for part in parts:
            of_part = slice(begin, begin := begin + len(part.down))
            down[number - 1, of_part] = part.down.to(dtype)
            up[number - 1, part.first : part.first + len(part.up), of_part] = part.up.to(dtype)
    return LowRankChanges(down, up, torch.tensor(ranks, dtype=torch.int32, device=device))


def _load(path: Path, spec: DecoderSpec, model: AnyModel) -> Iterator[tuple[str, LowRank]]:
    """Yield the layer and the change of every pair of matrices in an adapter's directory."""
    with reading(path):
        alpha, rooted = _settings(path)
        stored = open_safetensors(path / _WEIGHTS)
        names = in_wrapper(FAMILIES[spec.family].safetensors)  # adapters of multimodal models, and of text ones
        pairs = _pairs(stored, path / _WEIGHTS)
        ours = {module: names.ours(f"{module}.weight") or "" for module in pairs}
        check_named_once({module: our for module, our in ours.items() if our}, str(path / _WEIGHTS))
        linears: dict[str, list[Slot]] = {}  # keys that are also a layer's values have two
        for name, slot in slots(spec, set(ours.values())).items():
            if _LINEAR.fullmatch(name):
                linears.setdefault(slot.source or name, []).append(slot)
        for module, sides in pairs.items():
            places = linears.get(ours[module])
            if places is None:
                raise ModelFormatError(f"{path / _WEIGHTS}: {brief(module)} is no linear layer of {model.name}")
            if len(sides) < 2:
                raise ModelFormatError(f"{path / _WEIGHTS}: {brief(module)} has one of lora_A and lora_B alone")
            down, up, slot = sides["A"], sides["B"], places[0]
            rank = down.shape[0] if down.shape else 0
            if rank < 1 or down.shape != (rank, slot.shape[1]) or up.shape != (slot.shape[0], rank):
                raise ModelFormatError(
                    f"{path / _WEIGHTS}: {brief(module)} has matrices of {down.shape} and {up.shape} for a layer of "
                    f"{slot.shape}"
                )
            scale = alpha / (rank**0.5 if rooted else rank)
            where = f"{path / _WEIGHTS}: {brief(module)}"
            matrices = [_read(tensor, where).to(model.device) for tensor in (down, up)]
            for slot in places:
                mixer = spec.layers[int(slot.target.split(".")[1])].mixer
                outputs = matrices[1]
                if slot.target.endswith(".qkv.weight") and isinstance(mixer, AttentionSpec):
                    outputs = pairs_apart(outputs, mixer, slot.first)
                change = LowRank(slot.first, slot.total, matrices[0], outputs * scale)
                yield slot.target.removesuffix(".weight"), change


def _read(tensor: StoredTensor, where: str) -> Tensor:
    numbers = torch.empty(tensor.shape, dtype=torch.float32)
    tensor.unpack_into(numbers)
    check_finite(numbers, where)
    return numbers


def _pairs(stored: Mapping[str, StoredTensor], file: Path) -> dict[str, dict[str, StoredTensor]]:
    """Return the matrices "A" and "B" by module. Raises ModelFormatError for a tensor that is neither, or is twice."""
    pairs: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in stored.items():
        match = _PART.fullmatch(name.removeprefix(_PREFIX))
        if match is None:
            raise ModelFormatError(f"{file}: {brief(name)} is not a matrix of LoRA (lora_A or lora_B of a layer)")
        sides = pairs.setdefault(match["module"], {})
        if match["side"] in sides:
            raise ModelFormatError(f"{file}: {brief(name)} is there under two names, with and without {_PREFIX}")
        sides[match["side"]] = tensor
    return pairs


def _settings(path: Path) -> tuple[float, bool]:
    """Return lora_alpha, and whether it is divided by the root of the rank. Raises ModelFormatError."""
    file = path / _CONFIGURATION
    if not file.is_file():
        raise ModelFormatError(f"{path} has no {_CONFIGURATION}, so it is not a LoRA adapter")
    said = read_configuration(file)
    if said.get("peft_type") != "LORA":
        raise ModelFormatError(f"{file}: peft_type={brief(repr(said.get('peft_type')), 60)}; 'LORA' is supported")
    for key, off in _REFUSED.items():
        if key in said and said[key] not in off:
            raise ModelFormatError(f"{file}: {key}={brief(repr(said[key]), 60)} is not supported; merge the adapter")
    initialised = said.get("init_lora_weights")
    if isinstance(initialised, str) and initialised.lower().startswith(_CHANGES_MODEL):
        raise ModelFormatError(
            f"{file}: init_lora_weights={brief(repr(initialised), 60)} changes the model's own weights; save the "
            "adapter with peft's path_initial_model_for_weight_conversion, or merge it"
        )
    alpha = said.get("lora_alpha")
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not abs(alpha) < 1e6:
        raise ModelFormatError(f"{file}: lora_alpha={brief(repr(alpha), 60)} is not a number")
    return float(alpha), bool(said.get("use_rslora"))
