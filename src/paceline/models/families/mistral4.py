"""Mistral Small 4: DeepSeek's latent attention, and experts that a softmax scores beside an MLP.

Queries grow with the position beyond the original length, where texts end here.
"""

from __future__ import annotations

from transformers import PretrainedConfig

from paceline.models.description.spec import DecoderSpec
from paceline.models.description.weight_names import WeightNames
from paceline.models.families.base import Family
from paceline.models.families.latent import LATENT_NAMES, latent_decoder_of, with_softmax_experts
from paceline.models.families.routed import ROUTED


def _describe(config: PretrainedConfig) -> DecoderSpec | None:
    if (config.n_group or 1) > 1:
        return None
    spec = latent_decoder_of(config, interleaved=bool(config.rope_interleave))
    return with_softmax_experts(config, spec, normalised=bool(config.norm_topk_prob))


FAMILY = Family("mistral4", _describe, WeightNames({**LATENT_NAMES, **ROUTED}, prefixes=("model.",)))
