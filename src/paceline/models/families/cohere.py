"""Command R: attention and MLP side by side behind one layer norm without bias, and scaled logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from transformers import PretrainedConfig

from paceline.models.description.spec import DecoderSpec, NormSpec
from paceline.models.description.weight_names import WeightNames
from paceline.models.families.base import (
    LLAMA_GGUF_NAMES,
    LLAMA_NAMES,
    Family,
    GGUFForm,
    biases_of,
    llama_like,
    with_one_norm,
)


def _describe(config: PretrainedConfig) -> DecoderSpec | None:
    return None if config.use_qk_norm else describe(config, [True] * config.num_hidden_layers)


def describe(config: PretrainedConfig, rotated: list[bool]) -> DecoderSpec | None:
    """Describe a Command model. rotated: whether each layer has rotary positions."""
    norm = NormSpec("layer", config.layer_norm_eps, bias=False)
    spec = llama_like(config, rotated=rotated, norm=norm, interleaved=True, **biases_of(config))
    spec = with_one_norm(spec)
    return spec and replace(spec, logits_scale=float(config.logit_scale))


def scale_of(metadata: Mapping[str, Any], _: Mapping[str, Any]) -> dict[str, Any]:
    """Return the factor of the logits from GGUF metadata."""
    return {"logit_scale": metadata.get("logit_scale", 1.0)}


FAMILY = Family(
    "cohere",
    _describe,
    WeightNames(LLAMA_NAMES, prefixes=("model.",)),
    GGUFForm(("command-r",), WeightNames(LLAMA_GGUF_NAMES), fields=scale_of, reads=frozenset({"logit_scale"})),
)
