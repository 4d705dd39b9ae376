"""Llama 1 to 3, and the many models that use its configuration."""

from __future__ import annotations

import re

from transformers import PretrainedConfig

from paceline.models.description import DecoderSpec
from paceline.models.families.base import LLAMA_GGUF_NAMES, LLAMA_NAMES, Family, GGUFForm, llama_like
from paceline.models.weight_names import WeightNames


def _describe(config: PretrainedConfig) -> DecoderSpec | None:
    biased = bool(config.attention_bias)
    return llama_like(config, bias=biased, output_bias=biased)


FAMILY = Family(
    "llama",
    _describe,
    WeightNames(LLAMA_NAMES, prefixes=("model.",)),
    GGUFForm(
        "llama",
        # rope_freqs: read by gguf_config.py into the description.
        WeightNames(LLAMA_GGUF_NAMES, ignored=re.compile(r"rope_freqs\.weight$")),
        paired=True,
    ),
)
