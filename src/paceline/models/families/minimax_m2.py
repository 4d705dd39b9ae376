"""MiniMax M2: experts routed by sigmoids, and norms of queries and keys over all heads together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from paceline.models.description.spec import DecoderSpec
from paceline.models.description.weight_names import WeightNames
from paceline.models.families.base import (
    LLAMA_GGUF_NAMES,
    LLAMA_NAMES,
    W_EXPERTS,
    Family,
    GGUFForm,
    llama_like,
    with_experts,
)
from paceline.models.families.routed import GGUF_ROUTED, ROUTED, check_sigmoid


def _describe(config: PretrainedConfig) -> DecoderSpec | None:
    spec = llama_like(config, qk_norm="all")
    sizes = config.num_local_experts, config.num_experts_per_tok, config.intermediate_size
    return spec and with_experts(spec, sizes, normalised=True, sigmoid=True, correction=True)


def _fields(metadata: Mapping[str, Any], _: Mapping[str, Any]) -> dict[str, Any]:
    check_sigmoid(metadata)
    return {
        "num_local_experts": metadata["expert_count"],
        "num_experts_per_tok": metadata["expert_used_count"],
        "intermediate_size": metadata["expert_feed_forward_length"],
    }


_CORRECTION = {"layers.{}.block_sparse_moe.e_score_correction_bias": "layers.{}.router_correction.weight"}

FAMILY = Family(
    "minimax_m2",
    _describe,
    WeightNames({**LLAMA_NAMES, **ROUTED, **W_EXPERTS, **_CORRECTION}, prefixes=("model.",)),
    GGUFForm(
        ("minimax-m2",),
        WeightNames({**LLAMA_GGUF_NAMES, **GGUF_ROUTED}),
        fields=_fields,
        reads=frozenset({"expert_count"}),
    ),
)
