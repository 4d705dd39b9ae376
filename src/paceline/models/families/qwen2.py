"""Qwen2 and Qwen2.5: biases on queries, keys and values."""

from __future__ import annotations

from transformers import PretrainedConfig

from paceline.models.description.spec import DecoderSpec
from paceline.models.description.weight_names import WeightNames
from paceline.models.families.base import LLAMA_GGUF_NAMES, LLAMA_NAMES, Family, GGUFForm, llama_like


def _describe(config: PretrainedConfig) -> DecoderSpec | None:
    return llama_like(config, bias=True)


FAMILY = Family(
    "qwen2",
    _describe,
    WeightNames(LLAMA_NAMES, prefixes=("model.",)),
    GGUFForm(("qwen2", "qwen2vl"), WeightNames(LLAMA_GGUF_NAMES)),
    other_types=("qwen2_vl_text", "qwen2_5_vl_text"),
)
