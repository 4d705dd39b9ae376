"""Mistral Small 4: DeepSeek's latent attention, and experts that a softmax scores beside an MLP.

Queries grow with the position beyond the original length, where texts end here.
"""

from __future__ import annotations

from transformers import PretrainedConfig

from paceline.models.description.spec import DecoderSpec
from paceline.models.description.weight_names import WeightNames
from paceline.models.families.base import Family
from paceline.models.families.latent import ROUTED_NAMES, after_dense_layers, latent_decoder_of


def _describe(config: PretrainedConfig) -> DecoderSpec | None:
    if (config.n_group or 1) > 1:
        return None
    sparse, normalised = after_dense_layers(config), bool(config.norm_topk_prob)
    interleaved = bool(config.rope_interleave)
    return latent_decoder_of(config, interleaved=interleaved, sparse=sparse, normalised=normalised)


FAMILY = Family("mistral4", _describe, WeightNames(ROUTED_NAMES, prefixes=("model.",)))
