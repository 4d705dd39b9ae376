"""Trinity (AFMoE): gated attention, four norms a layer, and experts routed by sigmoids beside an MLP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from transformers import PretrainedConfig

from paceline.models.description.spec import DecoderSpec
from paceline.models.description.weight_names import WeightNames
from paceline.models.families.base import (
    GGUF_NORMS_AFTER,
    LLAMA_GGUF_NAMES,
    LLAMA_NAMES,
    Family,
    GGUFForm,
    biases_of,
    llama_like,
    with_experts,
)
from paceline.models.families.routed import GGUF_ROUTED, ROUTED, check_sigmoid


def _describe(config: PretrainedConfig) -> DecoderSpec | None:
    near = [kind == "sliding_attention" for kind in config.layer_types]
    spec = llama_like(config, "both", near, qk_norm="head", gated=True, gates_apart=True, **biases_of(config))
    if spec is None:
        return None
    mixed = with_experts(
        spec,
        (config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size),
        beside=config.moe_intermediate_size * config.num_shared_experts,
        sparse=[index >= config.num_dense_layers for index in range(config.num_hidden_layers)],
        normalised=True,
        sigmoid=True,
        correction=True,
        output_scale=float(config.route_scale),
    )
    return replace(mixed, embed_scale=config.hidden_size**0.5) if config.mup_enabled else mixed


def _fields(metadata: Mapping[str, Any], _: Mapping[str, Any]) -> dict[str, Any]:
    check_sigmoid(metadata)
    return {
        "num_experts": metadata["expert_count"],
        "num_experts_per_tok": metadata["expert_used_count"],
        "moe_intermediate_size": metadata["expert_feed_forward_length"],
        "num_shared_experts": metadata.get("expert_shared_count", 0),
        "num_dense_layers": metadata.get("leading_dense_block_count", 0),
        "route_scale": metadata.get("expert_weights_scale", 1.0),
        "sliding_window": metadata["attention.sliding_window"],
        "mup_enabled": True,
    }


_NAMES = {
    "layers.{}.self_attn.gate_proj": "layers.{}.attn_gate",
    "layers.{}.post_attention_layernorm": "layers.{}.attn_out_norm",
    "layers.{}.pre_mlp_layernorm": "layers.{}.mlp_norm",
    "layers.{}.post_mlp_layernorm": "layers.{}.mlp_out_norm",
    "layers.{}.mlp.router.gate": "layers.{}.router",
    "layers.{}.mlp.expert_bias": "layers.{}.router_correction.weight",
}

FAMILY = Family(
    "afmoe",
    _describe,
    WeightNames({**LLAMA_NAMES, **ROUTED, **_NAMES}, prefixes=("model.",)),
    GGUFForm(
        ("afmoe",),
        WeightNames({**LLAMA_GGUF_NAMES, **GGUF_ROUTED, **GGUF_NORMS_AFTER, "blk.{}.attn_gate": "layers.{}.attn_gate"}),
        fields=_fields,
        reads=frozenset({"expert_count", "attention.sliding_window"}),
    ),
)
