"""Mellum 2: Qwen3's attention with windows and rotary positions by kind of layer, and experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from paceline.models.description.spec import DecoderSpec
from paceline.models.description.weight_names import OWN_HEAD, WeightNames
from paceline.models.families.base import (
    EXPERTS,
    GGUF_EXPERTS,
    GGUF_JOINED_EXPERTS,
    LLAMA_GGUF_NAMES,
    LLAMA_NAMES,
    Family,
    GGUFForm,
    biases_of,
    by_kind_of_layer,
    gguf_expert_fields,
    mtp_names,
    with_experts,
)


def _describe(config: PretrainedConfig) -> DecoderSpec | None:
    spec = by_kind_of_layer(config, qk_norm="head", **biases_of(config))
    sizes = config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size
    sparse = [kind == "sparse" for kind in config.mlp_layer_types]
    return spec and with_experts(spec, sizes, sparse=sparse, normalised=bool(config.norm_topk_prob))


def _fields(metadata: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return the kinds of layers, their rotary positions, and the experts from GGUF metadata."""
    layers, window = metadata["block_count"], metadata.get("attention.sliding_window")
    pattern = metadata.get("attention.sliding_window_pattern", 4)  # of every layer, or full layers are this far apart
    near = pattern if isinstance(pattern, list) else [(index + 1) % pattern != 0 for index in range(layers)]
    base = metadata.get("rope.freq_base_swa", rope["rope_theta"])
    return {
        **gguf_expert_fields(metadata, rope),
        "moe_intermediate_size": metadata["expert_feed_forward_length"],
        "norm_topk_prob": True,
        "sliding_window": window,
        "layer_types": ["sliding_attention" if window and is_near else "full_attention" for is_near in near],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": base},
            "full_attention": dict(rope),
        },
    }


_NAMES = WeightNames({**LLAMA_NAMES, **EXPERTS}, prefixes=("model.",), ignored=OWN_HEAD)

FAMILY = Family(
    "mellum",
    _describe,
    _NAMES,
    GGUFForm(
        ("mellum",),
        WeightNames({**LLAMA_GGUF_NAMES, **GGUF_EXPERTS, **GGUF_JOINED_EXPERTS}),
        fields=_fields,
        reads=frozenset({"expert_count", "attention.sliding_window"}),
    ),
    mtp_names(_NAMES),
)
