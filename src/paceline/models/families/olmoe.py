"""OLMoE: experts in every layer, and norms of queries and keys over all heads together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from paceline.models.description import DecoderSpec
from paceline.models.families.base import (
    EXPERTS,
    GGUF_EXPERTS,
    LLAMA_GGUF_NAMES,
    LLAMA_NAMES,
    Family,
    GGUFForm,
    llama_like,
    with_experts,
)
from paceline.models.weight_names import WeightNames


def _describe(config: PretrainedConfig) -> DecoderSpec | None:
    biased = bool(config.attention_bias)
    spec = llama_like(config, bias=biased, output_bias=biased, qk_norm="all")
    if spec is None or config.clip_qkv is not None:
        return None
    sizes = config.num_experts, config.num_experts_per_tok, config.intermediate_size
    return with_experts(spec, *sizes, normalised=bool(config.norm_topk_prob))


def _fields(metadata: Mapping[str, Any], _: Mapping[str, Any]) -> dict[str, Any]:
    return {"num_experts": metadata["expert_count"], "num_experts_per_tok": metadata["expert_used_count"]}


FAMILY = Family(
    "olmoe",
    _describe,
    WeightNames({**LLAMA_NAMES, **EXPERTS}, prefixes=("model.",)),
    GGUFForm(
        "olmoe",
        WeightNames({**LLAMA_GGUF_NAMES, **GGUF_EXPERTS}),
        fields=_fields,
        reads=frozenset({"expert_count"}),
    ),
)
