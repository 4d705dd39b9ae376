"""Granite 3 and 4, dense: Llama's layers with multipliers of embeddings, scores, branches and logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from transformers import PretrainedConfig

from paceline.errors import ModelFormatError
from paceline.models.description.spec import DecoderSpec, without_residual_scale
from paceline.models.description.weight_names import WeightNames
from paceline.models.families.base import LLAMA_GGUF_NAMES, LLAMA_NAMES, Family, GGUFForm, biases_of, llama_like


def describe(config: PretrainedConfig) -> DecoderSpec | None:
    """Describe a dense Granite; also the part that a Granite with experts shares with it."""
    spec = llama_like(config, scale=float(config.attention_multiplier), **biases_of(config))
    if spec is None:
        return None
    scaled = replace(
        spec, embed_scale=float(config.embedding_multiplier), logits_scale=1.0 / float(config.logits_scaling)
    )
    return without_residual_scale(scaled, float(config.residual_multiplier))


MULTIPLIERS = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}


def multipliers_of(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration's multipliers from GGUF metadata."""
    return {ours: metadata[theirs] for theirs, ours in MULTIPLIERS.items() if theirs in metadata}


def fields(metadata: Mapping[str, Any], _: Mapping[str, Any]) -> dict[str, Any]:
    """Return the multipliers from GGUF metadata."""
    if metadata.get("rope.scaling.finetuned") is False:  # llama.cpp's way to say that nothing is rotated
        raise ModelFormatError("rope.scaling.finetuned=false: a Granite without rotary positions")
    return multipliers_of(metadata)


FAMILY = Family(
    "granite",
    describe,
    WeightNames(LLAMA_NAMES, prefixes=("model.",)),
    GGUFForm(("granite",), WeightNames(LLAMA_GGUF_NAMES), fields=fields, reads=frozenset(MULTIPLIERS), paired=True),
    other_types=("granite4_vision_text",),
)
