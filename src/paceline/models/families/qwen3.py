"""Qwen3, dense: norms of queries and keys."""

from __future__ import annotations

from transformers import PretrainedConfig

from paceline.models.description import DecoderSpec
from paceline.models.families.base import LLAMA_GGUF_NAMES, LLAMA_NAMES, Family, GGUFForm, llama_like
from paceline.models.weight_names import WeightNames


def _describe(config: PretrainedConfig) -> DecoderSpec | None:
    biased = bool(config.attention_bias)
    return llama_like(config, bias=biased, output_bias=biased, qk_norm="head")


FAMILY = Family(
    "qwen3",
    _describe,
    WeightNames(LLAMA_NAMES, prefixes=("model.",)),
    GGUFForm("qwen3", WeightNames(LLAMA_GGUF_NAMES)),
)
