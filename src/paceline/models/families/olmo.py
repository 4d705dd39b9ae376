"""OLMo 1: Llama with layer norms that have no weights."""

from __future__ import annotations

from transformers import PretrainedConfig

from paceline.models.description.spec import DecoderSpec, NormSpec
from paceline.models.description.weight_names import WeightNames
from paceline.models.families.base import LLAMA_GGUF_NAMES, LLAMA_NAMES, Family, GGUFForm, biases_of, llama_like


def _describe(config: PretrainedConfig) -> DecoderSpec | None:
    if config.clip_qkv is not None:
        return None
    return llama_like(config, norm=NormSpec("layer", 1e-5, affine=False), **biases_of(config))


FAMILY = Family(
    "olmo",
    _describe,
    WeightNames(LLAMA_NAMES, prefixes=("model.",)),
    GGUFForm(("olmo",), WeightNames(LLAMA_GGUF_NAMES), paired=True),
)
