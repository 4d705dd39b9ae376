"""Mistral. Its GGUF files are of architecture llama."""

from __future__ import annotations

from transformers import PretrainedConfig

from paceline.models.description.spec import DecoderSpec
from paceline.models.description.weight_names import WeightNames
from paceline.models.families.base import LLAMA_NAMES, Family, llama_like


def _describe(config: PretrainedConfig) -> DecoderSpec | None:
    if getattr(config, "layer_types", None):  # transformers' Mistral ignores them, so its own code runs the model
        return None
    return llama_like(config)


FAMILY = Family("mistral", _describe, WeightNames(LLAMA_NAMES, prefixes=("model.",)))
