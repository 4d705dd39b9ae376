"""Arcee (AFM): Llama with an MLP without a gate, and the square of ReLU."""

from __future__ import annotations

from transformers import PretrainedConfig

from paceline.models.description.spec import DecoderSpec
from paceline.models.description.weight_names import WeightNames
from paceline.models.families.base import (
    LLAMA_GGUF_NAMES,
    LLAMA_NAMES,
    Family,
    GGUFForm,
    biases_of,
    plain_like,
)


def _describe(config: PretrainedConfig) -> DecoderSpec | None:
    return plain_like(config, **biases_of(config))


FAMILY = Family(
    "arcee",
    _describe,
    WeightNames(LLAMA_NAMES, prefixes=("model.",)),
    GGUFForm(("arcee",), WeightNames(LLAMA_GGUF_NAMES), paired=True),
)
