"""MiniCPM3: latent attention and dense MLPs, with factors of the embedding, the branches and the logits."""

from __future__ import annotations

import math
from dataclasses import replace

from transformers import PretrainedConfig

from paceline.models.description.spec import DecoderSpec, without_residual_scale
from paceline.models.description.weight_names import WeightNames
from paceline.models.families.base import Family
from paceline.models.families.latent import LATENT_NAMES, latent_decoder_of


def _describe(config: PretrainedConfig) -> DecoderSpec | None:
    spec = latent_decoder_of(config, interleaved=False)
    if spec is None:
        return None
    scaled = replace(spec, embed_scale=float(config.scale_emb), logits_scale=config.dim_model_base / config.hidden_size)
    return without_residual_scale(scaled, config.scale_depth / math.sqrt(config.num_hidden_layers))


FAMILY = Family("minicpm3", _describe, WeightNames(LATENT_NAMES, prefixes=("model.",)))
