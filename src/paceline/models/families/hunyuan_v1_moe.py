"""Hunyuan 1 with experts (A13B): the dense one's attention, and an MLP beside the experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from paceline.models.description.spec import DecoderSpec
from paceline.models.description.weight_names import WeightNames
from paceline.models.families.base import (
    EXPERTS,
    GGUF_EXPERTS,
    GGUF_MLP_BESIDE,
    LLAMA_GGUF_NAMES,
    Family,
    GGUFForm,
    mlp_beside,
    with_experts,
)
from paceline.models.families.hunyuan_v1_dense import NAMES, describe


def _describe(config: PretrainedConfig) -> DecoderSpec | None:
    if not isinstance(config.num_experts, int) or not isinstance(config.moe_topk, int):  # they differ by layer
        return None
    spec, width = describe(config), config.intermediate_size
    return spec and with_experts(spec, (config.num_experts, config.moe_topk, width), beside=width, normalised=True)


def _fields(metadata: Mapping[str, Any], _: Mapping[str, Any]) -> dict[str, Any]:
    used, width = metadata["expert_used_count"], metadata["expert_feed_forward_length"]
    return {"num_experts": metadata["expert_count"], "moe_topk": used, "intermediate_size": width}


_ROUTER = {"layers.{}.mlp.gate.wg": "layers.{}.router"}

FAMILY = Family(
    "hunyuan_v1_moe",
    _describe,
    WeightNames({**NAMES, **EXPERTS, **_ROUTER, **mlp_beside("shared_mlp")}, prefixes=("model.",)),
    GGUFForm(
        ("hunyuan-moe",),
        WeightNames({**LLAMA_GGUF_NAMES, **GGUF_EXPERTS, **GGUF_MLP_BESIDE}),
        fields=_fields,
        reads=frozenset({"expert_count"}),
    ),
)
