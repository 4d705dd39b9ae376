"""ERNIE 4.5 with experts: a correction takes part in the choice of experts, and an MLP stands beside them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from paceline.models.description.spec import DecoderSpec
from paceline.models.description.weight_names import OWN_HEAD, WeightNames
from paceline.models.families.base import LLAMA_GGUF_NAMES, LLAMA_NAMES, Family, GGUFForm, with_experts
from paceline.models.families.ernie4_5 import describe
from paceline.models.families.routed import GGUF_ROUTED, ROUTED


def _describe(config: PretrainedConfig) -> DecoderSpec | None:
    if config.use_bias:
        return None
    spec, width = describe(config), config.moe_intermediate_size
    first, last, step = config.moe_layer_start_index, config.moe_layer_end_index, config.moe_layer_interval
    return spec and with_experts(
        spec,
        (config.moe_num_experts, config.moe_k, width),
        beside=width * (config.moe_num_shared_experts or 0),
        sparse=[first <= index <= last and (index + 1) % step == 0 for index in range(len(spec.layers))],
        normalised=True,
        correction=True,
    )


def _fields(metadata: Mapping[str, Any], _: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "moe_num_experts": metadata["expert_count"],
        "moe_k": metadata["expert_used_count"],
        "moe_intermediate_size": metadata["expert_feed_forward_length"],
        "moe_num_shared_experts": metadata.get("expert_shared_count", 0),
        "moe_layer_start_index": metadata.get("leading_dense_block_count", 0),
        "moe_layer_interval": metadata.get("interleave_moe_layer_step", 1),
    }


_CORRECTION = dict.fromkeys(
    (f"layers.{{}}.mlp.{gate}moe_statics.e_score_correction_bias" for gate in ("gate.", "")),
    "layers.{}.router_correction.weight",
)

FAMILY = Family(
    "ernie4_5_moe",
    _describe,
    WeightNames({**LLAMA_NAMES, **ROUTED, **_CORRECTION}, prefixes=("model.",), ignored=OWN_HEAD),
    GGUFForm(
        ("ernie4_5-moe",),
        WeightNames({**LLAMA_GGUF_NAMES, **GGUF_ROUTED}),
        fields=_fields,
        reads=frozenset({"expert_count"}),
    ),
)
