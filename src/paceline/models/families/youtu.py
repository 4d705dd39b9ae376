"""Youtu-LLM: DeepSeek-V3's latent attention with dense MLPs."""

from __future__ import annotations

from transformers import PretrainedConfig

from paceline.models.description.spec import DecoderSpec
from paceline.models.description.weight_names import WeightNames
from paceline.models.families.base import Family, dense_decoder_of
from paceline.models.families.latent import LATENT_NAMES, latent_attention_of


def _describe(config: PretrainedConfig) -> DecoderSpec | None:
    attention = latent_attention_of(config, interleaved=bool(config.rope_interleave))
    return None if attention is None else dense_decoder_of(config, [attention] * config.num_hidden_layers)


FAMILY = Family("youtu", _describe, WeightNames(LATENT_NAMES, prefixes=("model.",)))
