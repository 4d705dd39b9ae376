"""Code World Model: Llama with windows in three of four layers."""

from __future__ import annotations

from transformers import PretrainedConfig

from paceline.models.description.spec import DecoderSpec
from paceline.models.description.weight_names import WeightNames
from paceline.models.families.base import LLAMA_NAMES, Family, llama_like


def _describe(config: PretrainedConfig) -> DecoderSpec | None:
    return llama_like(config)


FAMILY = Family("cwm", _describe, WeightNames(LLAMA_NAMES, prefixes=("model.",)))
