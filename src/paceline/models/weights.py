"""Weights of a model: their names in checkpoint files, and how they are assembled into fused matrices."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from tqdm import tqdm

from paceline.core.recurrent_state import StateShape
from paceline.errors import ModelFormatError
from paceline.models.config import ModelConfig


class StoredTensor(Protocol):
    """A weight in a file or in another model, not read yet."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def unpack_into(self, destination: Tensor) -> None:
        """Write the values into ``destination``, which has this tensor's shape, in its dtype."""
        ...


@dataclass(frozen=True)
class LoadedTensor:
    """A weight of a model in memory. It is shared with that model if dtype, device and layout allow."""

    tensor: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def unpack_into(self, destination: Tensor) -> None:
        destination.copy_(self.tensor)


@dataclass(frozen=True)
class Slot:
    """Destination of a weight: rows ``first`` ... of the fused tensor ``target``."""

    target: str
    shape: tuple[int, ...]  # of the weight
    first: int = 0
    total: int = 0  # rows of the whole target


@dataclass(frozen=True)
class WeightNames:
    """WeightNames of the weights in one kind of checkpoint. ``{}`` stands for the layer index.

    parts: the checkpoint's name without ".weight" or ".bias" -> paceline's name.
    prefixes: prefixes of the checkpoint's names; the first that matches is removed.
    ignored: names of buffers that are no weights.
    transposed: paceline's names of matrices that are stored [in, out] (gpt2's Conv1D).
    """

    parts: Mapping[str, str]
    prefixes: tuple[str, ...] = ()
    ignored: re.Pattern[str] = field(default=re.compile(r".*rotary_emb\.inv_freq$"))
    transposed: frozenset[str] = frozenset()

    def ours(self, name: str) -> str | None:
        """Translate a checkpoint's name into paceline's, such as "layers.3.q.weight"; None if it is unknown."""
        stem, _, suffix = name.rpartition(".")
        stem = next((stem.removeprefix(prefix) for prefix in self.prefixes if stem.startswith(prefix)), stem)
        layer = re.search(r"(?<=\.)\d+(?=\.)|(?<=^h\.)\d+", stem)
        if layer is None:
            part = self.parts.get(stem)
        else:
            part = self.parts.get(f"{stem[: layer.start()]}{{}}{stem[layer.end() :]}")
        return None if part is None else f"{part.format(layer[0] if layer else '')}.{suffix}"


_LLAMA = WeightNames(
    {
        "embed_tokens": "embed",
        "norm": "norm",
        "lm_head": "head",
        "layers.{}.input_layernorm": "layers.{}.attn_norm",
        "layers.{}.self_attn.q_proj": "layers.{}.q",
        "layers.{}.self_attn.k_proj": "layers.{}.k",
        "layers.{}.self_attn.v_proj": "layers.{}.v",
        "layers.{}.self_attn.o_proj": "layers.{}.o",
        "layers.{}.self_attn.q_norm": "layers.{}.q_norm",
        "layers.{}.self_attn.k_norm": "layers.{}.k_norm",
        "layers.{}.post_attention_layernorm": "layers.{}.mlp_norm",
        "layers.{}.mlp.gate_proj": "layers.{}.gate",
        "layers.{}.mlp.up_proj": "layers.{}.up",
        "layers.{}.mlp.down_proj": "layers.{}.down",
    },
    prefixes=("model.",),
)

_QWEN3_5 = WeightNames(
    {
        **_LLAMA.parts,
        "layers.{}.linear_attn.in_proj_qkv": "layers.{}.qkv",
        "layers.{}.linear_attn.in_proj_z": "layers.{}.z",
        "layers.{}.linear_attn.in_proj_b": "layers.{}.beta",
        "layers.{}.linear_attn.in_proj_a": "layers.{}.decay",
        "layers.{}.linear_attn.conv1d": "layers.{}.conv",
        "layers.{}.linear_attn": "layers.{}.delta",
        "layers.{}.linear_attn.norm": "layers.{}.delta_norm",
        "layers.{}.linear_attn.out_proj": "layers.{}.o",
    },
    prefixes=("model.language_model.", "model."),
    ignored=re.compile(r"(mtp|model\.visual)\..*|.*rotary_emb\.inv_freq"),
)

_OPT = WeightNames(
    {
        "embed_tokens": "embed",
        "embed_positions": "positions",
        "project_in": "project_in",
        "project_out": "project_out",
        "final_layer_norm": "norm",
        "lm_head": "head",
        "layers.{}.self_attn_layer_norm": "layers.{}.attn_norm",
        "layers.{}.self_attn.q_proj": "layers.{}.q",
        "layers.{}.self_attn.k_proj": "layers.{}.k",
        "layers.{}.self_attn.v_proj": "layers.{}.v",
        "layers.{}.self_attn.out_proj": "layers.{}.o",
        "layers.{}.final_layer_norm": "layers.{}.mlp_norm",
        "layers.{}.fc1": "layers.{}.up",
        "layers.{}.fc2": "layers.{}.down",
    },
    prefixes=("model.decoder.", "decoder."),
)

_GPT2 = WeightNames(
    {
        "wte": "embed",
        "wpe": "positions",
        "ln_f": "norm",
        "lm_head": "head",
        "h.{}.ln_1": "layers.{}.attn_norm",
        "h.{}.attn.c_attn": "layers.{}.qkv",
        "h.{}.attn.c_proj": "layers.{}.o",
        "h.{}.ln_2": "layers.{}.mlp_norm",
        "h.{}.mlp.c_fc": "layers.{}.up",
        "h.{}.mlp.c_proj": "layers.{}.down",
    },
    prefixes=("transformer.",),
    ignored=re.compile(r".*\.attn\.(masked_)?bias$"),
    transposed=frozenset({"qkv", "o", "up", "down"}),
)

HUGGINGFACE: dict[str, WeightNames] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "qwen3_5": _QWEN3_5,
    "qwen3_5_text": _QWEN3_5,
    "opt": _OPT,
    "gpt2": _GPT2,
}

GGUF = WeightNames(
    {
        "token_embd": "embed",
        "output_norm": "norm",
        "output": "head",
        "blk.{}.attn_norm": "layers.{}.attn_norm",
        "blk.{}.attn_q": "layers.{}.q",
        "blk.{}.attn_k": "layers.{}.k",
        "blk.{}.attn_v": "layers.{}.v",
        "blk.{}.attn_output": "layers.{}.o",
        "blk.{}.attn_q_norm": "layers.{}.q_norm",
        "blk.{}.attn_k_norm": "layers.{}.k_norm",
        "blk.{}.ffn_norm": "layers.{}.mlp_norm",
        "blk.{}.ffn_gate": "layers.{}.gate",
        "blk.{}.ffn_up": "layers.{}.up",
        "blk.{}.ffn_down": "layers.{}.down",
    },
    ignored=re.compile(r"rope_freqs\.weight$"),  # read by loading.py into the configuration
)


def _norm_slots(config: ModelConfig, name: str) -> Iterator[tuple[str, Slot]]:
    suffixes = ("weight", "bias") if config.norm == "layer" else ("weight",)
    for suffix in suffixes if config.norm_affine else ():
        yield f"{name}.{suffix}", Slot(f"{name}.{suffix}", (config.width,), total=config.width)


def _linear_slots(
    target: str, parts: Mapping[str, int], width: int, bias: bool, layer: str = ""
) -> Iterator[tuple[str, Slot]]:
    """Yield the slots of ``parts`` (name -> rows), stacked by rows into one matrix."""
    total, first = sum(parts.values()), 0
    for name, rows in parts.items():
        yield f"{layer}{name}.weight", Slot(f"{layer}{target}.weight", (rows, width), first, total)
        if bias:
            yield f"{layer}{name}.bias", Slot(f"{layer}{target}.bias", (rows,), first, total)
        first += rows


def _attention_slots(config: ModelConfig, layer: str) -> Iterator[tuple[str, Slot]]:
    q, kv = config.query_width, config.kv_width
    fused = config.family == "gpt2"
    gated = 2 * q if config.output_gate else q  # a head's gate lies behind its query
    qkv = {"qkv": q + 2 * kv} if fused else {"q": gated, "k": kv, "v": kv}
    yield from _linear_slots("qkv", qkv, config.width, config.qkv_bias, layer)
    yield from _linear_slots("o", {"o": config.width}, q, config.output_bias, layer)
    for norm in ("q_norm", "k_norm") if config.qk_norm else ():
        name = f"{layer}{norm}.weight"
        yield name, Slot(name, (config.head_dim,), total=config.head_dim)


def _delta_slots(config: ModelConfig, shape: StateShape, layer: str) -> Iterator[tuple[str, Slot]]:
    """Yield the slots of a gated delta net."""
    heads, values = shape.value_heads, shape.value_heads * shape.value_dim
    yield from _linear_slots("qkv", {"qkv": shape.channels, "z": values}, config.width, False, layer)
    yield from _linear_slots("beta_decay", {"beta": heads, "decay": heads}, config.width, False, layer)
    yield from _linear_slots("o", {"o": config.width}, values, False, layer)
    sizes: dict[str, tuple[int, ...]] = {
        "conv.weight": (shape.channels, 1, shape.taps),
        "delta.A_log": (heads,),
        "delta.dt_bias": (heads,),
        "delta_norm.weight": (shape.value_dim,),
    }
    for name, size in sizes.items():
        yield f"{layer}{name}", Slot(f"{layer}{name}", size, total=size[0])


def _layer_slots(config: ModelConfig, index: int) -> Iterator[tuple[str, Slot]]:
    layer, mlp = f"layers.{index}.", config.mlp_width
    if config.delta is not None and index in config.delta_layers:
        yield from _delta_slots(config, config.delta, layer)
    else:
        yield from _attention_slots(config, layer)
    if config.gated:
        yield from _linear_slots("gate_up", {"gate": mlp, "up": mlp}, config.width, config.mlp_bias, layer)
    else:
        yield from _linear_slots("up", {"up": mlp}, config.width, config.mlp_bias, layer)
    yield from _linear_slots("down", {"down": config.width}, mlp, config.mlp_bias, layer)
    yield from _norm_slots(config, f"{layer}attn_norm")
    yield from _norm_slots(config, f"{layer}mlp_norm")


def slots(config: ModelConfig) -> dict[str, Slot]:
    """Return the slot of every weight that a model of this configuration has, by paceline's name."""
    vocab, embed, width = config.vocab_size, config.embed_width, config.width
    found = dict(_linear_slots("embed", {"embed": vocab}, embed, False))
    if config.rotary is None:
        found |= _linear_slots("positions", {"positions": config.max_positions + config.position_offset}, width, False)
    if embed != width:
        found |= _linear_slots("project_in", {"project_in": width}, embed, False)
        found |= _linear_slots("project_out", {"project_out": embed}, width, False)
    if config.final_norm:
        found |= _norm_slots(config, "norm")
    if not config.tied:
        found |= _linear_slots("head", {"head": vocab}, embed, False)
    for layer in range(config.layers):
        found |= _layer_slots(config, layer)
    return found


def shapes(config: ModelConfig) -> dict[str, Tensor]:
    """Return the tensors that ``assemble`` would make for this configuration, on device "meta"."""
    return {slot.target: torch.empty((slot.total, *slot.shape[1:]), device="meta") for slot in slots(config).values()}


@dataclass(frozen=True)
class Placement:
    """A stored tensor and its destination. transposed: whether it is stored [in, out]."""

    slot: Slot
    stored: StoredTensor
    transposed: bool


def place(config: ModelConfig, names: WeightNames, stored: Mapping[str, StoredTensor], where: str) -> list[Placement]:
    """Pair every stored tensor with its slot. where: path of the checkpoint, for messages.

    Raises ModelFormatError if a weight is missing, unknown or of a wrong shape.
    """
    ours = {name: names.ours(name) for name in stored if not names.ignored.fullmatch(name)}
    if config.tied:
        ours = _tie(ours)
    free = slots(config)
    _refuse(config, where, "has no use for", [name for name, our in ours.items() if our not in free])
    _refuse(config, where, "misses", sorted(free.keys() - ours.values()))
    return [_place(free[our], names, stored[name], f"{where}: {name}") for name, our in ours.items() if our]


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


def _refuse(config: ModelConfig, where: str, problem: str, names: list[str]) -> None:
    """Raise ModelFormatError if there are any names. problem: a verb such as "misses"."""
    if names:
        others = f" and {len(names) - 4} more" if len(names) > 4 else ""
        raise ModelFormatError(
            f"{where}: a {config.family} model {problem} the weights {', '.join(names[:4])}{others}; the files are "
            "incomplete or belong to another kind of model"
        )


def _place(slot: Slot, names: WeightNames, stored: StoredTensor, where: str) -> Placement:
    transposed = slot.target.endswith(".weight") and slot.target.split(".")[-2] in names.transposed
    wanted = slot.shape[::-1] if transposed else slot.shape
    if tuple(stored.shape) != wanted:
        raise ModelFormatError(f"{where} has the shape {tuple(stored.shape)}, the configuration asks for {wanted}")
    return Placement(slot, stored, transposed)


def assemble(
    placements: Sequence[Placement], dtype: torch.dtype, device: torch.device, *, progress: bool = False
) -> dict[str, Tensor]:
    """Return the model's tensors by name. Each stored tensor is read once, directly into its destination."""
    shared = {p.slot.target: _shareable(p, dtype, device) for p in placements}
    tensors = {name: tensor for name, tensor in shared.items() if tensor is not None}
    copied = [p for p in placements if p.slot.target not in tensors]
    for p in copied:
        if p.slot.target not in tensors:
            shape = (p.slot.total, *p.slot.shape[1:])
            tensors[p.slot.target] = torch.empty(shape, dtype=dtype, device=device)
    with ThreadPoolExecutor(max(1, torch.get_num_threads())) as pool:
        jobs = pool.map(lambda p: _fill(p, tensors[p.slot.target]), copied)
        deque(tqdm(jobs, "loading", len(copied), unit=" tensors", disable=not progress), maxlen=0)
    return tensors


def _shareable(placement: Placement, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """Return a loaded tensor that the model can use without a copy; None if there is none."""
    stored, slot = placement.stored, placement.slot
    if not isinstance(stored, LoadedTensor) or placement.transposed or slot.total != slot.shape[0]:
        return None
    return stored.tensor if stored.tensor.dtype == dtype and stored.tensor.device == device else None


def _fill(placement: Placement, target: Tensor) -> None:
    slot = placement.slot
    rows = target[slot.first : slot.first + slot.shape[0]]
    placement.stored.unpack_into(rows.t() if placement.transposed else rows)
    if rows.dtype == torch.float16 and not bool(rows.isfinite().all()):
        problem = "has values beyond float16's largest, 65504"
        raise ModelFormatError(f"{slot.target} {problem}: use dtype='float32' or 'bfloat16'")
