"""Qwen3, dense: norms of queries and keys."""

from __future__ import annotations

from transformers import PretrainedConfig

from paceline.models.description.spec import DecoderSpec
from paceline.models.description.weight_names import WeightNames
from paceline.models.families.base import LLAMA_GGUF_NAMES, LLAMA_NAMES, Family, GGUFForm, biases_of, llama_like


def _describe(config: PretrainedConfig) -> DecoderSpec | None:
    return llama_like(config, qk_norm="head", **biases_of(config))


FAMILY = Family(
    "qwen3",
    _describe,
    WeightNames(LLAMA_NAMES, prefixes=("model.",)),
    GGUFForm(("qwen3", "qwen3vl"), WeightNames(LLAMA_GGUF_NAMES)),
    other_types=("qwen3_vl_text",),
)
