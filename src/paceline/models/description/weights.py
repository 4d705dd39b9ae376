"""Weights of a model: which ones its description asks for, and how they are assembled into fused matrices."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from paceline.errors import ModelFormatError
from paceline.kernels.pack import Coding, Weight
from paceline.models.description.spec import (
    AttentionSpec,
    DecoderSpec,
    DeltaNetSpec,
    ExpertsSpec,
    LatentSpec,
    LayerSpec,
    Mamba2Spec,
    MixerSpec,
    MLPSpec,
    NormPlaces,
    ShortConvSpec,
)
from paceline.models.description.weight_names import WeightNames
from paceline.models.files.boundary import brief


class StoredTensor(Protocol):
    """A weight in a file or in another model, not read yet."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def unpack_into(self, destination: Tensor) -> None:
        """Write the values into ``destination``, which has this tensor's shape, in its dtype."""
        ...


@runtime_checkable
class StackedTensor(Protocol):
    """A stored tensor of three dimensions: several matrices, such as one of each expert."""

    def matrix(self, index: int) -> StoredTensor:
        """Return one of the matrices, not read yet."""
        ...


@runtime_checkable
class CodedTensor(Protocol):
    """A stored tensor whose numbers are codes. stored_as: name of the encoding, for messages."""

    @property
    def stored_as(self) -> str: ...

    def codes(self, to: Coding) -> Weight | None:
        """Return the codes as a weight of this format; None if the format cannot hold them."""
        ...


@runtime_checkable
class HasInputOrder(Protocol):
    """A stored tensor whose codes of 4 bits may have inputs in an order."""

    @property
    def ordered(self) -> bool: ...


@dataclass(frozen=True)
class LoadedTensor:
    """A weight of a model in memory. It is shared with that model if dtype, device and layout allow."""

    tensor: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def exact_dtype(self) -> torch.dtype:
        """The smallest dtype that holds the numbers, for packing."""
        return torch.bfloat16 if self.tensor.dtype == torch.bfloat16 else torch.float32

    def unpack_into(self, destination: Tensor) -> None:
        destination.copy_(self.tensor)

    def matrix(self, index: int) -> LoadedTensor:
        return LoadedTensor(self.tensor[index])


@dataclass(frozen=True)
class Slot:
    """Destination of a weight: rows ``first`` ... of the fused tensor ``target``.

    shape: of the weight. total: rows of the whole target.
    experts: number of matrices that the target has side by side; 0: it is one matrix. expert: the one that the weight
        belongs to; None: it has rows of all.
    source: name of the weight that is stored for this one, too; None: its own.
    order: takes the weight's rows of the stored ones, in their order here; None: they are as stored.
    stored: shape of the stored tensor; None: the weight's.
    """

    target: str
    shape: tuple[int, ...]
    first: int = 0
    total: int = 0
    experts: int = 0
    expert: int | None = None
    source: str | None = None
    order: Callable[[Tensor], Tensor] | None = None
    stored: tuple[int, ...] | None = None

    @property
    def target_shape(self) -> tuple[int, ...]:
        """Shape of the whole target."""
        if not self.experts:
            return self.total, *self.shape[1:]
        return (self.experts, self.total) if self._is_bias else (self.experts, self.total, self.shape[-1])

    @property
    def _is_bias(self) -> bool:
        """Whether the weight is the biases [experts, rows] of all experts."""
        return self.expert is None and len(self.shape) == 2

    def within(self, target: Tensor) -> Tensor:
        """Return the weight's place in its target."""
        if not self.experts:
            return target[self.first : self.first + self.shape[0]]
        rows = target[:, self.first : self.first + self.shape[-1 if self._is_bias else -2]]
        return rows if self.expert is None else rows[self.expert]


Slots: TypeAlias = Iterator[tuple[str, Slot]]


def _vector(name: str, width: int) -> Slots:
    yield name, Slot(name, (width,), total=width)


def _norm_slots(spec: DecoderSpec, name: str) -> Slots:
    suffixes = ("weight", "bias") if spec.norm.kind == "layer" and spec.norm.bias else ("weight",)
    for suffix in suffixes if spec.norm.affine else ():
        yield from _vector(f"{name}.{suffix}", spec.width)


def _linear_slots(target: str, parts: Mapping[str, int], width: int, bias: bool, layer: str = "") -> Slots:
    """Yield the slots of ``parts`` (name -> rows), stacked by rows into one matrix."""
    total, first = sum(parts.values()), 0
    for name, rows in parts.items():
        yield f"{layer}{name}.weight", Slot(f"{layer}{target}.weight", (rows, width), first, total)
        if bias:
            yield f"{layer}{name}.bias", Slot(f"{layer}{target}.bias", (rows,), first, total)
        first += rows


def _stacked(target: str, parts: Mapping[str, int], stored: Collection[str], layer: str) -> Mapping[str, int]:
    """Return the stored parts of a stacked matrix: the whole if the checkpoint has it so, else each part."""
    return {target: sum(parts.values())} if f"{layer}{target}.weight" in stored else parts


def _latent_slots(spec: AttentionSpec, latent: LatentSpec, width: int, layer: str) -> Slots:
    queries = spec.heads * latent.query_dim
    first = {"q": queries} if latent.query_rank is None else {"q_a": latent.query_rank}
    yield from _linear_slots("qkv", {**first, "kv_a": latent.rank + latent.rotary_dim}, width, spec.bias, layer)
    if latent.query_rank is not None:
        yield from _vector(f"{layer}q_a_norm.weight", latent.query_rank)
        yield from _linear_slots("q_b", {"q_b": queries}, latent.query_rank, False, layer)
    yield from _vector(f"{layer}kv_a_norm.weight", latent.rank)
    both = spec.heads * (latent.key_dim + latent.value_dim)
    yield from _linear_slots("kv_b", {"kv_b": both}, latent.rank, False, layer)
    yield from _linear_slots("o", {"o": width}, spec.heads * latent.value_dim, spec.output_bias, layer)


def _attention_slots(spec: AttentionSpec, width: int, layer: str, stored: Collection[str]) -> Slots:
    if spec.latent is not None:
        yield from _latent_slots(spec, spec.latent, width, layer)
        return
    queries = spec.query_width * (2 if spec.gated and not spec.gates_apart else 1)  # a head's gate behind its query
    own = {"k": spec.kv_width, "v": spec.kv_heads * spec.value_width} if spec.reads_layer is None else {}
    gates = {"attn_gate": spec.query_width} if spec.gates_apart else {}
    for name, slot in _linear_slots(
        "qkv", _stacked("qkv", {"q": queries, **own, **gates}, stored, layer), width, spec.bias, layer
    ):
        if spec.gates_by_head and name.startswith(f"{layer}attn_gate."):
            slot = replace(slot, order=_repeated(spec.head_dim), stored=(spec.heads, *slot.shape[1:]))
        copied = spec.keys_as_values and name.startswith(f"{layer}v.")
        yield name, replace(slot, source=name.replace(f"{layer}v.", f"{layer}k.")) if copied else slot
    yield from _linear_slots("o", {"o": width}, spec.heads * spec.value_width, spec.output_bias, layer)
    if spec.sinks:
        yield from _vector(f"{layer}sinks.weight", spec.heads)
    if spec.qk_norm is not None and spec.qk_affine:
        whole = spec.qk_norm == "all"
        yield from _vector(f"{layer}q_norm.weight", spec.query_width if whole else spec.head_dim)
        if own:
            yield from _vector(f"{layer}k_norm.weight", spec.kv_width if whole else spec.head_dim)


def _repeated(times: int) -> Callable[[Tensor], Tensor]:
    """Return what repeats each row."""
    return lambda rows: rows.repeat_interleave(times, 0)


def _delta_slots(spec: DeltaNetSpec, width: int, layer: str, stored: Collection[str]) -> Slots:
    heads, values, shared = spec.value_heads, spec.value_heads * spec.value_dim, spec.value_heads // spec.key_heads
    of_values = shared * spec.value_dim
    if f"{layer}in_qkvz.weight" in stored:
        yield _by_key_head(
            f"{layer}in_qkvz", f"{layer}qkv", (spec.key_dim, spec.key_dim, of_values, of_values), spec, width
        )
    else:
        yield from _linear_slots("qkv", {"in_qkv": spec.channels, "out_gate": values}, width, False, layer)
    if f"{layer}beta_decay.weight" in stored:
        yield _by_key_head(f"{layer}beta_decay", f"{layer}beta_decay", (shared, shared), spec, width)
    else:
        yield from _linear_slots("beta_decay", {"beta": heads, "decay": heads}, width, False, layer)
    yield from _linear_slots("o", {"o": width}, values, False, layer)
    yield from _conv_slots(spec.channels, spec.taps, layer)
    for name, size in {"decay_rate": heads, "decay_bias": heads, "delta_norm": spec.value_dim}.items():
        yield from _vector(f"{layer}{name}.weight", size)


def _by_key_head(name: str, target: str, parts: Sequence[int], spec: DeltaNetSpec, width: int) -> tuple[str, Slot]:
    """Return the slot of a matrix whose rows are stored key head by key head (Qwen3-Next).

    parts: rows of a key head in each part of the matrix, which are apart in the target.
    """
    total = spec.key_heads * sum(parts)

    def order(rows: Tensor) -> Tensor:
        by_head = rows.reshape(spec.key_heads, sum(parts), *rows.shape[1:])
        return torch.cat([part.flatten(0, 1) for part in by_head.split_with_sizes(list(parts), 1)])

    return f"{name}.weight", Slot(f"{target}.weight", (total, width), total=total, order=order)


def _conv_slots(channels: int, taps: int, layer: str, bias: bool = False) -> Slots:
    yield f"{layer}conv.weight", Slot(f"{layer}conv.weight", (channels, 1, taps), total=channels)
    if bias:
        yield from _vector(f"{layer}conv.bias", channels)


def _mamba2_slots(spec: Mamba2Spec, width: int, layer: str) -> Slots:
    yield from _in_proj_slots(spec, width, layer)
    yield from _linear_slots("o", {"o": width}, spec.width, False, layer)
    yield from _conv_slots(spec.channels, spec.taps, layer, spec.conv_bias)
    sizes = dict.fromkeys(("decay_rate", "step_bias", "skip"), spec.heads)
    for name, size in (sizes | ({"mamba_norm": spec.width} if spec.normed else {})).items():
        yield from _vector(f"{layer}{name}.weight", size)


def _in_proj_slots(spec: Mamba2Spec, width: int, layer: str) -> Slots:
    """Yield the slots of one stored matrix: gates of the output, channels and steps, in another order than here."""
    inner, channels, whole = spec.width, spec.channels, (spec.width + spec.channels + spec.heads, width)

    def rows(target: str, chosen: slice, first: int, total: int) -> Slot:
        shape, source = (chosen.stop - chosen.start, width), f"{layer}in_proj.weight"
        return Slot(
            f"{layer}{target}.weight", shape, first, total, source=source, order=lambda x: x[chosen], stored=whole
        )

    yield f"{layer}in_qkv.weight", rows("qkv", slice(inner, inner + channels), 0, inner + channels)
    yield f"{layer}out_gate.weight", rows("qkv", slice(0, inner), channels, inner + channels)
    yield f"{layer}step.weight", rows("step", slice(inner + channels, whole[0]), 0, spec.heads)


def _short_conv_slots(spec: ShortConvSpec, width: int, layer: str) -> Slots:
    yield from _linear_slots("qkv", {"qkv": 3 * width}, width, False, layer)
    yield from _linear_slots("o", {"o": width}, width, False, layer)
    yield from _conv_slots(width, spec.taps, layer)


def _mixer_slots(spec: MixerSpec, width: int, layer: str, stored: Collection[str]) -> Slots:
    if isinstance(spec, DeltaNetSpec):
        return _delta_slots(spec, width, layer, stored)
    if isinstance(spec, Mamba2Spec):
        return _mamba2_slots(spec, width, layer)
    if isinstance(spec, ShortConvSpec):
        return _short_conv_slots(spec, width, layer)
    return _attention_slots(spec, width, layer, stored)


def _mlp_slots(spec: MLPSpec, width: int, layer: str, stored: Collection[str]) -> Slots:
    if spec.gated:
        parts = _stacked("gate_up", {"gate": spec.width, "up": spec.width}, stored, layer)
        yield from _linear_slots("gate_up", parts, width, spec.bias, layer)
    else:
        yield from _linear_slots("up", {"up": spec.width}, width, spec.bias, layer)
    if spec.activation == "xielu":
        for place, name in enumerate(XIELU):
            yield f"{layer}{name}.weight", Slot(f"{layer}xielu.weight", (1,), place, len(XIELU))
    yield from _linear_slots("down", {"down": width}, spec.width, spec.bias, layer)


# Numbers of the activation xIELU (arXiv 2411.13010); those of alpha before their softplus
XIELU = ("alpha_p", "alpha_n", "beta", "eps")

_MATRICES = 3  # dimensions of the matrices of all experts
_EXACT = frozenset({"router_correction"})  # whose small differences choose experts, so they are never rounded

# Of a mixture and the MLP beside it, in the order of ``kernels.spec.ExpertsNorms``
EXPERTS_NORMS = ("router_norm", "experts_norm", "experts_out_norm", "shared_out_norm")


def _experts_slots(spec: ExpertsSpec, width: int, layer: str, stored: Collection[str]) -> Slots:
    inner, outer = spec.expert.width, spec.latent or width
    yield from _linear_slots("router", {"router": spec.count}, width, spec.router_bias, layer)
    if spec.correction:
        yield from _vector(f"{layer}router_correction.weight", spec.count)
    first = "experts_gate_up" if spec.expert.gated else "experts_up"
    parts = {"experts_gate": inner, "experts_up": inner} if spec.expert.gated else {first: inner}
    gate_up = _stacked(first, parts, stored, layer)
    yield from _of_all_experts(spec.count, first, gate_up, outer, layer, stored)
    yield from _of_all_experts(spec.count, "experts_down", {"experts_down": outer}, inner, layer, stored)
    if spec.expert.bias:
        yield from _expert_biases(spec.count, first, gate_up, layer)
        yield from _expert_biases(spec.count, "experts_down", {"experts_down": outer}, layer)
    if spec.latent is not None:
        yield from _linear_slots("latent_in", {"latent_in": outer}, width, False, layer)
        yield from _linear_slots("latent_out", {"latent_out": width}, outer, False, layer)
    if spec.shared is not None:
        yield from _mlp_slots(spec.shared, width, layer, stored)
    if spec.shared_gate:
        yield from _linear_slots("shared_gate", {"shared_gate": 1}, width, False, layer)
    if spec.scaled:
        yield from _vector(f"{layer}experts_scale.weight", spec.count)
    for norm in EXPERTS_NORMS if spec.own_norms else ():
        yield from _vector(f"{layer}{norm}.weight", width)


def _of_all_experts(
    count: int, target: str, parts: Mapping[str, int], width: int, layer: str, stored: Collection[str]
) -> Slots:
    """Yield the slots of a matrix of all experts: of whole parts, or of each expert's where they are stored apart."""
    first, total = 0, sum(parts.values())
    for name, rows in parts.items():
        own = f"{layer}expert.{{}}.{name.removeprefix('experts_')}.weight"
        if own.format(0) in stored:
            for expert in range(count):
                _check_expert(own.format(expert), count, stored)
                slot = Slot(f"{layer}{target}.weight", (rows, width), first, total, count, expert)
                yield own.format(expert), slot
        else:
            yield f"{layer}{name}.weight", Slot(f"{layer}{target}.weight", (count, rows, width), first, total, count)
        first += rows


def _expert_biases(count: int, target: str, parts: Mapping[str, int], layer: str) -> Slots:
    """Yield the slots of a matrix's biases of all experts, in the parts that the matrix is stored in."""
    first, total = 0, sum(parts.values())
    for name, rows in parts.items():
        yield f"{layer}{name}.bias", Slot(f"{layer}{target}.bias", (count, rows), first, total, count)
        first += rows


def _check_expert(name: str, count: int, stored: Collection[str]) -> None:
    """Raise ModelFormatError for a missing expert, before memory is spent on the names of all that are announced."""
    if name not in stored:
        raise ModelFormatError(f"the weight {name} is missing; the configuration asks for {count} experts")


BESIDE = "beside."  # before the names of a recurrent layer's weights where it stands beside attention

NORMS: dict[NormPlaces, tuple[str, ...]] = {
    "before": ("attn_norm", "mlp_norm"),
    "after_sum": ("attn_norm", "mlp_norm"),
    "after": ("attn_out_norm", "mlp_out_norm"),
    "parallel": ("attn_norm", "mlp_norm"),
    "both": ("attn_norm", "attn_out_norm", "mlp_norm", "mlp_out_norm"),
    "one_part": ("attn_norm",),
}


def _layer_slots(spec: DecoderSpec, layer: LayerSpec, name: str, stored: Collection[str]) -> Slots:
    if layer.mixer is not None:
        yield from _mixer_slots(layer.mixer, spec.width, name, stored)
    if layer.beside is not None:
        yield from _mixer_slots(layer.beside, spec.width, f"{name}{BESIDE}", stored)
    if isinstance(layer.mlp, ExpertsSpec):
        yield from _experts_slots(layer.mlp, spec.width, name, stored)
    elif layer.mlp is not None:
        yield from _mlp_slots(layer.mlp, spec.width, name, stored)
    for norm in NORMS[layer.norms]:
        for own, slot in _norm_slots(spec, f"{name}{norm}"):
            shared = layer.one_norm and norm == "mlp_norm"
            yield own, replace(slot, source=own.replace("mlp_norm", "attn_norm")) if shared else slot
    if layer.scaled:
        yield from _vector(f"{name}scale.weight", 1)
    if spec.token_inputs is not None:
        yield from _linear_slots("input_gate", {"input_gate": spec.token_inputs.width}, spec.width, False, name)
        yield from _linear_slots("input_out", {"input_out": spec.width}, spec.token_inputs.width, False, name)
        yield from _norm_slots(spec, f"{name}input_out_norm")


def _mtp_slots(spec: DecoderSpec) -> Slots:
    yield from _linear_slots("mtp.fc", {"mtp.fc": spec.width}, 2 * spec.width, False)
    for norm in ("mtp.embedding_norm", "mtp.hidden_norm"):
        yield from _norm_slots(spec, norm)


def slots(spec: DecoderSpec, stored: Collection[str] = ()) -> dict[str, Slot]:
    """Return the slot of every weight that a model has, by paceline's name.

    stored: names that a checkpoint has; they tell which stacked matrices it has whole and which in parts.
    """
    vocab, embed, width = spec.vocab_size, spec.embed_width, spec.width
    found = dict(_mtp_slots(spec) if spec.mtp else _linear_slots("embed", {"embed": vocab}, embed, False))
    if spec.learned_positions:
        found |= _linear_slots("positions", {"positions": spec.max_positions + spec.position_offset}, width, False)
    if embed != width:
        found |= _linear_slots("project_in", {"project_in": width}, embed, False)
        found |= _linear_slots("project_out", {"project_out": embed}, width, False)
    for norm, present in (("embed_norm", spec.embed_norm), ("norm", spec.final_norm)):
        found |= _norm_slots(spec, norm) if present else ()
    if not spec.tied and not spec.mtp:
        found |= _linear_slots("head", {"head": vocab}, embed, spec.head_bias)
    if spec.token_inputs is not None:
        inputs = len(spec.layers) * spec.token_inputs.width
        found |= _linear_slots("input_table", {"input_table": vocab}, inputs, False)
        found |= _linear_slots("input_project", {"input_project": inputs}, width, False)
        found |= _vector("input_norm.weight", spec.token_inputs.width)
    for index, layer in enumerate(spec.layers):
        found |= _layer_slots(spec, layer, f"layers.{index}.", stored)
    return found


def shapes(spec: DecoderSpec) -> dict[str, Tensor]:
    """Return the tensors that ``assemble`` would make for this description, on device "meta"."""
    tensors = {}
    for slot in slots(spec).values():
        try:
            tensors[slot.target] = torch.empty(slot.target_shape, device="meta")
        except RuntimeError as error:  # a size below 0, or of more bytes than there are addresses
            message = f"the weight {slot.target} has the shape {tuple(slot.target_shape)} by the configuration"
            raise ModelFormatError(f"{message}, which is impossible") from error
    return tensors


@dataclass(frozen=True)
class Placement:
    """A stored tensor and its destination.

    transposed: whether it is stored [in, out]. plus_one: whether one is added to the stored values.
    alternating: number of parts whose outputs alternate, and of the outputs of one part in a row; None: they do not.
    name: file and tensor, for messages.
    """

    slot: Slot
    stored: StoredTensor
    name: str
    transposed: bool = False
    plus_one: bool = False
    alternating: tuple[int, int] | None = None

    def read_into(self, destination: Tensor) -> None:
        """Write the stored values into ``destination``, [..., out, in], or [..., out] of a bias."""
        turned = destination.mT if self.transposed else destination
        if self.slot.order is not None:
            whole = torch.empty(self.stored.shape, dtype=turned.dtype, device=turned.device)
            self.stored.unpack_into(whole)
            turned.copy_(self.slot.order(whole))
            return None
        turned = turned if turned.shape == self.stored.shape else turned.view(self.stored.shape)
        if self.alternating is None:
            return self.stored.unpack_into(turned)
        stored = torch.empty_like(turned)
        self.stored.unpack_into(stored)
        outputs = stored.dim() - (1 if self.slot.target.endswith(".bias") or self.transposed else 2)
        in_parts = stored.unflatten(outputs, (-1, *self.alternating))  # type: ignore[no-untyped-call]
        turned.copy_(in_parts.transpose(outputs, outputs + 1).flatten(outputs, outputs + 2))
        return None

    def of_expert(self, expert: int) -> Placement | None:
        """Return the placement of one expert's rows; None if this tensor has none."""
        if self.slot.expert is not None:
            return self if self.slot.expert == expert else None
        assert isinstance(self.stored, StackedTensor), "every class of stored tensors of three dimensions has matrices"
        return replace(self, slot=replace(self.slot, shape=self.slot.shape[1:]), stored=self.stored.matrix(expert))


def place(spec: DecoderSpec, names: WeightNames, stored: Mapping[str, StoredTensor], where: str) -> list[Placement]:
    """Pair every stored tensor with its slot. where: path of the checkpoint, for messages.

    Raises ModelFormatError if a weight is missing, unknown or of a wrong shape.
    """
    ours = {name: names.ours(name) for name in stored if not names.ignored.fullmatch(name)}
    if spec.tied:
        ours = _tie(ours)
    ours = {name: our for name, our in ours.items() if our not in _unread(spec)}
    check_named_once({name: our for name, our in ours.items() if our is not None}, where)
    free = slots(spec, {our for our in ours.values() if our is not None})
    theirs = {our: name for name, our in ours.items()}
    sources = {our: slot.source or our for our, slot in free.items()}
    unused = [name for name, our in ours.items() if our not in sources.values()]
    _refuse(spec, where, "has no use for", [name for name in unused if not _is_zero_bias(ours[name], stored[name])])
    _refuse(spec, where, "misses", sorted(set(sources.values()) - theirs.keys()))
    from_where = {our: theirs[source] for our, source in sources.items()}
    dim = spec.attentions[0].head_dim if spec.attentions else 0
    return [_place(free[our], names, stored[name], f"{where}: {name}", dim) for our, name in from_where.items()]


def check_named_once(ours: Mapping[str, str], where: str) -> None:
    """Raise ModelFormatError if two names of a file stand for one weight. ours: paceline's name by the file's."""
    names: dict[str, str] = {}
    for name, our in ours.items():
        if (other := names.setdefault(our, name)) != name:
            raise ModelFormatError(
                f"{where}: {brief(other)} and {brief(name)} are the same weight under two names, so one would be "
                "ignored; remove the one that does not belong to the model"
            )


def _is_zero_bias(name: str | None, tensor: StoredTensor) -> bool:
    """Whether a tensor is a bias of zeros, which some programs that quantise add to every matrix."""
    if name is None or not name.endswith(".bias") or len(tensor.shape) != 1:
        return False
    values = torch.empty(tensor.shape, dtype=torch.float32)
    tensor.unpack_into(values)
    return not values.any()


def _unread(spec: DecoderSpec) -> set[str]:
    """Return the names of weights that files may have for layers that read an earlier layer's keys and values."""
    layers = enumerate(spec.layers)
    sharing = (i for i, at in layers if isinstance(at.mixer, AttentionSpec) and at.mixer.reads_layer is not None)
    return {f"layers.{i}.{part}.weight" for i in sharing for part in ("k", "v", "k_norm")}


def _tie(ours: dict[str, str | None]) -> dict[str, str | None]:
    """Drop the head, since the embedding is used for it. If only the head is stored, use it as the embedding."""
    if "embed.weight" not in ours.values():
        return {name: "embed.weight" if our == "head.weight" else our for name, our in ours.items()}
    return {name: our for name, our in ours.items() if our != "head.weight"}


def truly_tied(names: WeightNames, stored: Mapping[str, StoredTensor]) -> bool:
    """Whether embedding and head are one matrix. They are not if both are stored and differ."""
    both = [stored[name] for name in stored if names.ours(name) in ("embed.weight", "head.weight")]
    if len(both) < 2 or both[0].shape != both[1].shape:
        return True
    embed, head = (torch.empty(tensor.shape, dtype=torch.float32) for tensor in both)
    both[0].unpack_into(embed)
    both[1].unpack_into(head)
    return torch.equal(embed, head)


def _refuse(spec: DecoderSpec, where: str, problem: str, names: list[str]) -> None:
    """Raise ModelFormatError if there are any names. problem: a verb such as "misses"."""
    if names:
        others = f" and {len(names) - 4} more" if len(names) > 4 else ""
        kind = "draft head" if spec.mtp else "model"
        raise ModelFormatError(
            f"{where}: a {spec.family} {kind} {problem} the weights {', '.join(names[:4])}{others}; the files are "
            "incomplete or belong to another kind of model"
        )


def _place(slot: Slot, names: WeightNames, stored: StoredTensor, where: str, dim: int) -> Placement:
    """dim: width of a head."""
    part, suffix = slot.target.split(".")[-2:]
    transposed = suffix == "weight" and part in names.transposed
    shape = slot.stored or slot.shape
    wanted = (*shape[:-2], *shape[:-3:-1]) if transposed else shape
    if _without_ones(tuple(stored.shape)) != _without_ones(wanted):
        raise ModelFormatError(f"{where} has the shape {tuple(stored.shape)}, the configuration asks for {wanted}")
    plus_one = suffix == "weight" and part in names.plus_one
    alternating = (2, 1) if part in names.interleaved else (3, dim) if part in names.by_head else None
    return Placement(slot, stored, where, transposed, plus_one, alternating)


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape without dimensions of one: numbers and vectors may be stored with some."""
    return tuple(size for size in shape if size != 1) if len(shape) < _MATRICES else shape


def assemble(placements: Sequence[Placement], dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Return the model's tensors by name. Each stored tensor is read once, directly into its destination."""
    shared = {p.slot.target: _shareable(p, _dtype_of(p, dtype), device) for p in placements}
    tensors = {name: tensor for name, tensor in shared.items() if tensor is not None}
    copied = [p for p in placements if p.slot.target not in tensors]
    for p in copied:
        if p.slot.target not in tensors:
            tensors[p.slot.target] = torch.empty(p.slot.target_shape, dtype=_dtype_of(p, dtype), device=device)
    with ThreadPoolExecutor(max(1, torch.get_num_threads())) as pool:
        deque(pool.map(lambda p: _fill(p, tensors[p.slot.target]), copied), maxlen=0)
    return tensors


def _dtype_of(placement: Placement, usual: torch.dtype) -> torch.dtype:
    return torch.float32 if placement.slot.target.split(".")[-2] in _EXACT else usual


def _shareable(placement: Placement, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """Return a loaded tensor that the model can use without a copy; None if there is none."""
    stored, slot = placement.stored, placement.slot
    moved = placement.transposed or placement.alternating is not None or slot.order is not None
    changed = moved or placement.plus_one or slot.target_shape != tuple(stored.shape)
    if not isinstance(stored, LoadedTensor) or changed:
        return None
    return stored.tensor if stored.tensor.dtype == dtype and stored.tensor.device == device else None


def _fill(placement: Placement, target: Tensor) -> None:
    slot = placement.slot
    place = slot.within(target)
    if placement.plus_one or not place.is_contiguous():  # a file's tensor is unpacked into whole memory
        exact = torch.empty(place.shape, dtype=torch.float32 if placement.plus_one else place.dtype)
        placement.read_into(exact)
        place.copy_(exact + 1.0 if placement.plus_one else exact)  # rounded once, after the sum
    else:
        placement.read_into(place)
    check_finite(place, placement.name)


def check_finite(numbers: Tensor, name: str) -> None:
    """Raise ModelFormatError for numbers that are infinite or NaN. name: file and tensor.

    A sum, which reads the numbers once, is finite in most cases, and then they all are.
    """
    if bool(numbers.sum().isfinite()) or bool(numbers.isfinite().all()):
        return
    if numbers.dtype == torch.float16:
        problem = "has values beyond float16's largest, 65504, or NaN: use dtype='float32' or 'bfloat16'"
        raise ModelFormatError(f"{name} {problem}")
    raise ModelFormatError(f"{name} has values that are not finite")
