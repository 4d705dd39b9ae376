"""How llama.cpp stores Qwen3.5 and Qwen3-Next in GGUF files (architectures qwen35, qwen35moe and qwen3next).

Qwen3.5's value heads are ordered so that those of one key head lie apart; Qwen3-Next's are not, and its rows of beta
and decay lie together by key head. Decays are stored as -exp(A_log), and all norms around 1. The draft head of Qwen3.5
is one more block behind the layers, with tensors named ``nextn``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from paceline.models.description.spec import DecoderSpec, DeltaNetSpec
from paceline.models.description.weight_names import WeightNames
from paceline.models.description.weights import StoredTensor
from paceline.models.families.base import (
    GGUF_EXPERTS,
    GGUF_JOINED_EXPERTS,
    LLAMA_GGUF_NAMES,
    ChangedTensor,
    GGUFForm,
    gguf_expert_fields,
    gguf_mtp_names,
)


def _fields(metadata: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of recurrent layers, and of rotary positions on a part of each head."""
    heads, inner = int(metadata["ssm.time_step_rank"]), int(metadata["ssm.inner_size"])
    layers = int(metadata["block_count"]) - int(metadata.get("nextn_predict_layers", 0))
    every = int(metadata.get("full_attention_interval", 4))
    width = int(metadata["attention.key_length"])
    return {
        "num_hidden_layers": layers,
        "layer_types": ["linear_attention" if (index + 1) % every else "full_attention" for index in range(layers)],
        "linear_num_key_heads": int(metadata["ssm.group_count"]),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": int(metadata["ssm.state_size"]),
        "linear_value_head_dim": inner // heads,
        "linear_conv_kernel_dim": int(metadata["ssm.conv_kernel"]),
        "rope_parameters": {**rope, "partial_rotary_factor": metadata.get("rope.dimension_count", width) / width},
    }


def _grouped(values: Tensor, spec: DeltaNetSpec, dim: int, width: int) -> Tensor:
    """Order value heads of ``width`` elements along ``dim`` by their key heads; stored, they take turns."""
    shared = spec.value_heads // spec.key_heads
    sizes = *values.shape[:dim], shared, spec.key_heads, width, *values.shape[dim + 1 :]
    return values.reshape(sizes).transpose(dim, dim + 1).reshape(values.shape)


_Changes: TypeAlias = Mapping[str, Callable[[Tensor], Tensor]]  # of a recurrent layer's tensors, by their names' ends


def _log_of_decay(_: DeltaNetSpec) -> _Changes:
    return {"ssm_a": lambda values: (-values).log()}


def _changes(spec: DeltaNetSpec) -> _Changes:
    keys, width = 2 * spec.key_heads * spec.key_dim, spec.value_dim

    def behind_keys(values: Tensor) -> Tensor:
        return torch.cat([values[:keys], _grouped(values[keys:], spec, 0, width)])

    def per_head(values: Tensor) -> Tensor:
        return _grouped(values, spec, 0, 1)

    return {
        "attn_qkv.weight": behind_keys,
        "ssm_conv1d.weight": behind_keys,
        "attn_gate.weight": lambda values: _grouped(values, spec, 0, width),
        "ssm_alpha.weight": per_head,
        "ssm_beta.weight": per_head,
        "ssm_dt.bias": per_head,
        "ssm_a": lambda values: (-per_head(values)).log(),
        "ssm_out.weight": lambda values: _grouped(values, spec, 1, width),
    }


def _adapt(
    tensors: Mapping[str, StoredTensor], spec: DecoderSpec, changes: Callable[[DeltaNetSpec], _Changes] = _changes
) -> dict[str, StoredTensor]:
    """Return the decoder's tensors as transformers orders them, without those of the draft head."""
    found: dict[str, StoredTensor] = {}
    for name, stored in tensors.items():
        _, index, part = name.split(".", 2) if name.startswith("blk.") else ("", "-1", name)
        if not index.lstrip("-").isdigit() or int(index) >= len(spec.layers):
            continue
        mixer = spec.layers[int(index)].mixer
        change = changes(mixer).get(part) if isinstance(mixer, DeltaNetSpec) and part != name else None
        found[name] = stored if change is None else ChangedTensor(stored, stored.shape, change)
    return found


def _expert_fields(metadata: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    widths = {
        "moe_intermediate_size": metadata["expert_feed_forward_length"],
        "shared_expert_intermediate_size": metadata["expert_shared_feed_forward_length"],
    }
    return _fields(metadata, rope) | gguf_expert_fields(metadata, rope) | widths


_NAMES = WeightNames(
    {
        **LLAMA_GGUF_NAMES,
        "blk.{}.post_attention_norm": "layers.{}.mlp_norm",
        "blk.{}.attn_qkv": "layers.{}.in_qkv",
        "blk.{}.attn_gate": "layers.{}.out_gate",
        "blk.{}.ssm_beta": "layers.{}.beta",
        "blk.{}.ssm_alpha": "layers.{}.decay",
        "blk.{}.ssm_conv1d": "layers.{}.conv",
        "blk.{}.ssm_a": "layers.{}.decay_rate.weight",
        "blk.{}.ssm_dt.bias": "layers.{}.decay_bias.weight",
        "blk.{}.ssm_norm": "layers.{}.delta_norm",
        "blk.{}.ssm_out": "layers.{}.o",
    }
)
_SHARED_EXPERT = {
    "blk.{}.ffn_gate_inp_shexp": "layers.{}.shared_gate",
    "blk.{}.ffn_gate_shexp": "layers.{}.gate",
    "blk.{}.ffn_up_shexp": "layers.{}.up",
    "blk.{}.ffn_down_shexp": "layers.{}.down",
}
_NAMES_WITH_EXPERTS = WeightNames({**_NAMES.parts, **GGUF_EXPERTS, **GGUF_JOINED_EXPERTS, **_SHARED_EXPERT})

FORM = GGUFForm(("qwen35",), _NAMES, fields=_fields, adapt=_adapt, head=gguf_mtp_names(_NAMES))
FORM_WITH_EXPERTS = GGUFForm(
    ("qwen35moe",),
    _NAMES_WITH_EXPERTS,
    fields=_expert_fields,
    reads=frozenset({"expert_count"}),
    adapt=_adapt,
    head=gguf_mtp_names(_NAMES_WITH_EXPERTS),
)
FORM_BY_KEY_HEAD = GGUFForm(
    ("qwen3next",),
    WeightNames(
        {
            **_NAMES_WITH_EXPERTS.parts,
            "blk.{}.ssm_in": "layers.{}.in_qkvz",  # of files before llama.cpp divided it into attn_qkv and attn_gate
            "blk.{}.ssm_ba": "layers.{}.beta_decay",
        }
    ),
    fields=_expert_fields,
    reads=frozenset({"expert_count"}),
    adapt=partial(_adapt, changes=_log_of_decay),
)
