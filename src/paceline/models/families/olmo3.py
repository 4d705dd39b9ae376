"""OLMo 3: OLMo 2 with windows in three of four layers, and rotary positions by kind of layer."""

from __future__ import annotations

from transformers import PretrainedConfig

from paceline.models.description.spec import DecoderSpec
from paceline.models.description.weight_names import WeightNames
from paceline.models.families.base import LLAMA_NAMES, NORMS_AFTER, Family, biases_of, by_kind_of_layer


def _describe(config: PretrainedConfig) -> DecoderSpec | None:
    return by_kind_of_layer(config, "after", qk_norm="all", **biases_of(config))


FAMILY = Family("olmo3", _describe, WeightNames({**LLAMA_NAMES, **NORMS_AFTER}, prefixes=("model.",)))
