"""How llama.cpp stores models with latent attention: architecture deepseek2, and names that others share.

Newer files have the matrix of all keys and values as one of each head's keys, transposed, and one of its values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.models.description.latent import latent_of
from paceline.models.description.spec import AttentionSpec, DecoderSpec
from paceline.models.description.weight_names import WeightNames
from paceline.models.description.weights import StoredTensor
from paceline.models.families.base import LLAMA_GGUF_NAMES, GGUFForm, gguf_mtp_names
from paceline.models.families.routed import GGUF_ROUTED, routed_fields, without_head

LATENT_GGUF_NAMES: Mapping[str, str] = {
    **{
        theirs: ours for theirs, ours in LLAMA_GGUF_NAMES.items() if ".attn_k" not in theirs and ".attn_v" not in theirs
    },
    "blk.{}.attn_q_a": "layers.{}.q_a",
    "blk.{}.attn_q_a_norm": "layers.{}.q_a_norm",
    "blk.{}.attn_q_b": "layers.{}.q_b",
    "blk.{}.attn_kv_a_mqa": "layers.{}.kv_a",
    "blk.{}.attn_kv_a_norm": "layers.{}.kv_a_norm",
    "blk.{}.attn_kv_b": "layers.{}.kv_b",
}

_SOFTMAX, _SIGMOID = 1, 2  # llama.cpp's numbers of the functions that score experts
_FLASH_VOCABULARY = 154880  # of GLM-4.7-Flash, whose first files do not name its function


@dataclass(frozen=True)
class _KeysAndValues:
    """The matrix of all keys and values, stored as keys [heads, rank, key] and values [heads, value, rank]."""

    keys: StoredTensor
    values: StoredTensor

    @property
    def shape(self) -> tuple[int, ...]:
        heads, rank, key = self.keys.shape
        return heads * (key + self.values.shape[1]), rank

    def unpack_into(self, destination: Tensor) -> None:
        keys, values = (torch.empty(part.shape, dtype=torch.float32) for part in (self.keys, self.values))
        self.keys.unpack_into(keys)
        self.values.unpack_into(values)
        destination.copy_(torch.cat([keys.mT, values], 1).flatten(0, 1))


def _joined(tensors: Mapping[str, StoredTensor], spec: DecoderSpec) -> Mapping[str, StoredTensor]:
    """Return the tensors of the layers, keys and values joined."""
    joined = without_head(tensors, spec)
    for index, layer in enumerate(spec.layers):
        joined = _block_joined(joined, index, layer.attention)
    return joined


def _head_joined(tensors: Mapping[str, StoredTensor], spec: DecoderSpec) -> Mapping[str, StoredTensor]:
    """Return the tensors of a draft head, keys and values joined."""
    block = next(name.split(".")[1] for name in tensors)
    return _block_joined(tensors, int(block), spec.layers[0].attention)


def _block_joined(
    tensors: Mapping[str, StoredTensor], block: int, attention: AttentionSpec
) -> Mapping[str, StoredTensor]:
    joined, heads, latent = dict(tensors), attention.heads, latent_of(attention)
    parts = {"k": (heads, latent.rank, latent.key_dim), "v": (heads, latent.value_dim, latent.rank)}
    named = {f"blk.{block}.attn_{part}_b.weight": shape for part, shape in parts.items()}
    if all(name in joined and tuple(joined[name].shape) == shape for name, shape in named.items()):
        joined[f"blk.{block}.attn_kv_b.weight"] = _KeysAndValues(*(joined.pop(name) for name in named))
    return joined


def latent_fields(metadata: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of latent attention."""
    turned = metadata["rope.dimension_count"]
    return {
        "num_key_value_heads": metadata["attention.head_count"],
        "head_dim": turned,
        "qk_rope_head_dim": turned,
        "kv_lora_rank": metadata["attention.kv_lora_rank"],
        "q_lora_rank": metadata.get("attention.q_lora_rank"),
        "qk_nope_head_dim": metadata.get("attention.key_length_mla", metadata["attention.key_length"]) - turned,
        "rope_parameters": {name: value for name, value in rope.items() if name != "partial_rotary_factor"},
    }


def _sigmoid(metadata: Mapping[str, Any]) -> bool:
    usual = _SIGMOID if metadata.get("vocab_size") == _FLASH_VOCABULARY else _SOFTMAX
    return bool(metadata.get("expert_gating_func", usual) == _SIGMOID)


def _kind(metadata: Mapping[str, Any]) -> str:
    """Return the model_type: llama.cpp has one architecture for all that have this attention."""
    if not metadata.get("expert_count"):
        return "youtu"
    return "deepseek_v3" if _sigmoid(metadata) else "deepseek_v2"


def _fields(metadata: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    fields = latent_fields(metadata, rope)
    fields["v_head_dim"] = metadata.get("attention.value_length_mla", metadata["attention.value_length"])
    if (scaling := metadata.get("rope.scaling.yarn_log_multiplier")) is not None:  # a tenth of it, in this architecture
        fields["rope_parameters"] |= {"mscale": 10 * scaling, "mscale_all_dim": 10 * scaling}
    fields["num_hidden_layers"] = metadata["block_count"] - metadata.get("nextn_predict_layers", 0)
    if not metadata.get("expert_count"):
        return fields
    metadata = {**metadata, "expert_gating_func": _SIGMOID}  # the kind of model tells
    method = "greedy" if metadata.get("expert_group_count", 1) == 1 else "group_limited_greedy"
    return fields | routed_fields(metadata, rope) | {"topk_method": method}


_NAMES = WeightNames({**LATENT_GGUF_NAMES, **GGUF_ROUTED})
DEEPSEEK2 = GGUFForm(
    ("deepseek2",),
    _NAMES,
    fields=_fields,
    reads=frozenset({"expert_count", "rope.scaling.yarn_log_multiplier"}),
    adapt=_joined,
    head=gguf_mtp_names(_NAMES),
    adapt_head=_head_joined,
    kind=_kind,
)
