"""StableLM 2: Llama with layer norms and a rotation of a quarter of each head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from paceline.models.description.spec import DecoderSpec, NormSpec
from paceline.models.description.weight_names import WeightNames
from paceline.models.families.base import (
    LLAMA_GGUF_NAMES,
    LLAMA_NAMES,
    Family,
    GGUFForm,
    llama_like,
    with_one_norm,
)


def _describe(config: PretrainedConfig) -> DecoderSpec | None:
    if config.qk_layernorm:
        return None
    spec = llama_like(config, norm=NormSpec("layer", config.layer_norm_eps), bias=bool(config.use_qkv_bias))
    return with_one_norm(spec) if config.use_parallel_residual else spec


def _fields(metadata: Mapping[str, Any], _: Mapping[str, Any]) -> dict[str, Any]:
    return {"use_parallel_residual": metadata.get("use_parallel_residual", False)}


FAMILY = Family(
    "stablelm",
    _describe,
    WeightNames(LLAMA_NAMES, prefixes=("model.",)),
    GGUFForm(("stablelm",), WeightNames(LLAMA_GGUF_NAMES), fields=_fields),
)
