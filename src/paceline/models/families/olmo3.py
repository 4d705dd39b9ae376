"""OLMo 3: OLMo 2 with windows in three of four layers, and rotary positions by kind of layer."""

from __future__ import annotations

from transformers import PretrainedConfig

from paceline.models.description.spec import DecoderSpec
from paceline.models.description.weight_names import WeightNames
from paceline.models.families.base import LLAMA_NAMES, NORMS_AFTER, Family, attention_of, dense_decoder_of, windows_of
from paceline.models.families.rotary import rotary_of


def _describe(config: PretrainedConfig) -> DecoderSpec | None:
    windows, biased = windows_of(config), bool(config.attention_bias)
    if windows is None:
        return None
    rotaries = [rotary_of(config, kind) for kind in config.layer_types]
    if None in rotaries:
        return None
    attentions = [
        attention_of(config, rotary=rotary, window=window, qk_norm="all", bias=biased, output_bias=biased)
        for rotary, window in zip(rotaries, windows, strict=True)
    ]
    return dense_decoder_of(config, attentions, "after")


FAMILY = Family("olmo3", _describe, WeightNames({**LLAMA_NAMES, **NORMS_AFTER}, prefixes=("model.",)))
