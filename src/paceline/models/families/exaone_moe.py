"""K-EXAONE: EXAONE 4's attention with norms before each part, and experts routed by sigmoids beside an MLP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from paceline.models.description.spec import DecoderSpec
from paceline.models.description.weight_names import OWN_HEAD, WeightNames
from paceline.models.families.base import LLAMA_GGUF_NAMES, LLAMA_NAMES, Family, GGUFForm, llama_like
from paceline.models.families.routed import GGUF_ROUTED, ROUTED, routed_fields, with_routed_experts, without_head


def _describe(config: PretrainedConfig) -> DecoderSpec | None:
    rotated = [config.sliding_window is None or kind == "sliding_attention" for kind in config.layer_types]
    spec = llama_like(config, "before", rotated, qk_norm="head")
    return spec and with_routed_experts(config, spec, [kind == "sparse" for kind in config.mlp_layer_types])


def _fields(metadata: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    fields = routed_fields(metadata, rope)
    experts, beside = fields.pop("n_routed_experts"), fields.pop("n_shared_experts")
    window = metadata["attention.sliding_window"]
    return {**fields, "num_experts": experts, "num_shared_experts": beside, "sliding_window": window}


FAMILY = Family(
    "exaone_moe",
    _describe,
    WeightNames({**LLAMA_NAMES, **ROUTED}, prefixes=("model.",), ignored=OWN_HEAD),
    GGUFForm(
        ("exaone-moe",),
        WeightNames({**LLAMA_GGUF_NAMES, **GGUF_ROUTED}),
        fields=_fields,
        reads=frozenset({"expert_count", "attention.sliding_window"}),
        adapt=without_head,
    ),
)
