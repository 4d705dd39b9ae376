"""Qwen3 with experts in every layer (30B-A3B, 235B-A22B)."""

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


def _describe(config: PretrainedConfig) -> DecoderSpec | None:
    spec = llama_like(config, qk_norm="head", **biases_of(config))
    if spec is None or config.mlp_only_layers or getattr(config, "decoder_sparse_step", 1) != 1:
        return None
    sizes = config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size
    return with_experts(spec, *sizes, normalised=bool(getattr(config, "norm_topk_prob", True)))  # Qwen3-VL always does


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
