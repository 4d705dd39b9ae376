"""Youtu-LLM: DeepSeek-V3's latent attention with dense MLPs."""

from __future__ import annotations

from transformers import PretrainedConfig

from paceline.models.description.spec import DecoderSpec
from paceline.models.description.weight_names import WeightNames
from paceline.models.families.base import Family
from paceline.models.families.latent import LATENT_NAMES, latent_decoder_of
from paceline.models.families.latent_gguf import DEEPSEEK2


def _describe(config: PretrainedConfig) -> DecoderSpec | None:
    return latent_decoder_of(config, interleaved=bool(config.rope_interleave))


FAMILY = Family("youtu", _describe, WeightNames(LATENT_NAMES, prefixes=("model.",)), DEEPSEEK2)
