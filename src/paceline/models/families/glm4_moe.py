"""GLM-4.5 to 4.7: experts routed by sigmoids beside an MLP, and a rotation of half of each head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from paceline.models.description.spec import DecoderSpec
from paceline.models.description.weight_names import WeightNames, ignoring
from paceline.models.families.base import (
    LLAMA_GGUF_NAMES,
    LLAMA_NAMES,
    Family,
    GGUFForm,
    gguf_mtp_names,
    llama_like,
    mtp_layer_names,
)
from paceline.models.families.routed import (
    GGUF_ROUTED,
    ROUTED,
    after_dense_layers,
    routed_fields,
    with_routed_experts,
    without_head,
)


def describe(config: PretrainedConfig) -> DecoderSpec | None:
    """Describe a GLM-4.5, or another decoder with its layers."""
    spec = llama_like(
        config, bias=bool(config.attention_bias), qk_norm="head" if getattr(config, "use_qk_norm", False) else None
    )
    return spec and with_routed_experts(config, spec, after_dense_layers(config))


def _fields(metadata: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    return {**routed_fields(metadata, rope), "use_qk_norm": True}  # the tensors tell


_NAMES = WeightNames(
    {**LLAMA_NAMES, **ROUTED},
    prefixes=("model.",),
    ignored=ignoring(r"model\.language_model\.layers\.(46|92)\..*"),  # the draft head of a multimodal model
)

_GGUF_NAMES = WeightNames({**LLAMA_GGUF_NAMES, **GGUF_ROUTED, "blk.{}.post_attention_norm": "layers.{}.mlp_norm"})

FAMILY = Family(
    "glm4_moe",
    describe,
    _NAMES,
    GGUFForm(
        ("glm4moe",),
        _GGUF_NAMES,
        fields=_fields,
        reads=frozenset({"expert_count"}),
        adapt=without_head,
        head=gguf_mtp_names(_GGUF_NAMES),
    ),
    mtp_layer_names(_NAMES),
    other_types=("glm4v_moe_text",),
)
