"""Granite 3 with experts: Granite's multipliers, a softmax over the chosen experts, and perhaps an MLP beside them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from paceline.models.description.spec import DecoderSpec
from paceline.models.description.weight_names import WeightNames
from paceline.models.families import granite
from paceline.models.families.base import (
    GGUF_EXPERTS,
    GGUF_MLP_BESIDE,
    LLAMA_GGUF_NAMES,
    LLAMA_NAMES,
    Family,
    GGUFForm,
    with_experts,
)


def _describe(config: PretrainedConfig) -> DecoderSpec | None:
    return mixed(config, granite.describe(config))


def mixed(config: PretrainedConfig, spec: DecoderSpec | None) -> DecoderSpec | None:
    """Return a dense Granite with experts in place of its MLPs."""
    sizes = config.num_local_experts, config.num_experts_per_tok, config.intermediate_size
    beside = getattr(config, "shared_intermediate_size", 0)
    return spec and with_experts(spec, sizes, beside=beside, normalised=True)


def _fields(metadata: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **granite.fields(metadata, rope),
        "num_local_experts": metadata["expert_count"],
        "num_experts_per_tok": metadata["expert_used_count"],
        "shared_intermediate_size": metadata.get("expert_shared_feed_forward_length", 0),
    }


MIXED_NAMES = {
    "layers.{}.block_sparse_moe.router.layer": "layers.{}.router",
    "layers.{}.block_sparse_moe.router": "layers.{}.router",
    "layers.{}.block_sparse_moe.input_linear": "layers.{}.experts_gate_up",
    "layers.{}.block_sparse_moe.output_linear": "layers.{}.experts_down",
    "layers.{}.block_sparse_moe.experts.gate_up_proj": "layers.{}.experts_gate_up.weight",
    "layers.{}.block_sparse_moe.experts.down_proj": "layers.{}.experts_down.weight",
    "layers.{}.shared_mlp.input_linear": "layers.{}.gate_up",
    "layers.{}.shared_mlp.output_linear": "layers.{}.down",
}

FAMILY = Family(
    "granitemoe",
    _describe,
    WeightNames({**LLAMA_NAMES, **MIXED_NAMES}, prefixes=("model.",)),
    GGUFForm(
        ("granitemoe",),
        WeightNames({**LLAMA_GGUF_NAMES, **GGUF_EXPERTS, **GGUF_MLP_BESIDE}),
        fields=_fields,
        reads=frozenset({"expert_count", *granite.MULTIPLIERS}),
        paired=True,
    ),
    other_types=("granitemoeshared",),
)
