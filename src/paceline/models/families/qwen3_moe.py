"""Qwen3 with experts (30B-A3B, 235B-A22B)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from paceline.models.description.spec import DecoderSpec
from paceline.models.description.weight_names import WeightNames
from paceline.models.families.base import (
    EXPERTS,
    GGUF_EXPERTS,
    GGUF_JOINED_EXPERTS,
    LLAMA_GGUF_NAMES,
    LLAMA_NAMES,
    Family,
    GGUFForm,
    biases_of,
    gguf_expert_fields,
    llama_like,
    with_experts,
)
from paceline.models.families.qwen2_moe import sparse_layers


def _describe(config: PretrainedConfig) -> DecoderSpec | None:
    spec = llama_like(config, qk_norm="head", **biases_of(config))
    sizes = config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size
    normalised = bool(getattr(config, "norm_topk_prob", True))  # Qwen3-VL always does
    return spec and with_experts(spec, sizes, sparse=sparse_layers(config), normalised=normalised)


def _fields(metadata: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    width = metadata["expert_feed_forward_length"]
    return gguf_expert_fields(metadata, rope) | {"moe_intermediate_size": width, "norm_topk_prob": True}


FAMILY = Family(
    "qwen3_moe",
    _describe,
    WeightNames({**LLAMA_NAMES, **EXPERTS}, prefixes=("model.",)),
    GGUFForm(
        ("qwen3moe", "qwen3vlmoe"),
        WeightNames({**LLAMA_GGUF_NAMES, **GGUF_EXPERTS, **GGUF_JOINED_EXPERTS}),
        fields=_fields,
        reads=frozenset({"expert_count"}),
    ),
    other_types=("qwen3_vl_moe_text",),
)
