"""Jais 2: Llama with layer norms, biases, and an MLP without a gate behind the square of ReLU."""

from __future__ import annotations

from transformers import PretrainedConfig

from paceline.models.description.spec import DecoderSpec, NormSpec
from paceline.models.description.weight_names import WeightNames
from paceline.models.families.base import LLAMA_GGUF_NAMES, LLAMA_NAMES, Family, GGUFForm, biases_of, plain_like


def _describe(config: PretrainedConfig) -> DecoderSpec | None:
    return plain_like(config, norm=NormSpec("layer", config.layer_norm_eps), **biases_of(config))


FAMILY = Family(
    "jais2",
    _describe,
    WeightNames(LLAMA_NAMES, prefixes=("model.",)),
    GGUFForm(("jais2",), WeightNames(LLAMA_GGUF_NAMES)),
)
