"""Llama 1 to 3, and the many models that use its configuration."""

from __future__ import annotations

from transformers import PretrainedConfig

from paceline.models.description.spec import DecoderSpec
from paceline.models.description.weight_names import WeightNames
from paceline.models.families.base import LLAMA_GGUF_NAMES, LLAMA_NAMES, Family, GGUFForm, biases_of, llama_like


def _describe(config: PretrainedConfig) -> DecoderSpec | None:
    return llama_like(config, **biases_of(config))


FAMILY = Family(
    "llama",
    _describe,
    WeightNames(LLAMA_NAMES, prefixes=("model.",)),
    GGUFForm(("llama",), WeightNames(LLAMA_GGUF_NAMES), paired=True),
    other_types=("iquestcoder", "internlm3"),
)
