"""GLM-4.7-Flash: DeepSeek-V3's layers, which the configuration tells one by one whether they have experts."""

from __future__ import annotations

from transformers import PretrainedConfig

from paceline.models.description.spec import DecoderSpec
from paceline.models.description.weight_names import WeightNames
from paceline.models.families.base import Family, mtp_layer_names
from paceline.models.families.latent import LATENT_NAMES, latent_decoder_of
from paceline.models.families.routed import ROUTED, with_routed_experts


def _describe(config: PretrainedConfig) -> DecoderSpec | None:
    spec = latent_decoder_of(config, interleaved=bool(config.rope_interleave))
    return spec and with_routed_experts(config, spec, [kind == "sparse" for kind in config.mlp_layer_types])


_NAMES = WeightNames({**LATENT_NAMES, **ROUTED}, prefixes=("model.",))

FAMILY = Family("glm4_moe_lite", _describe, _NAMES, head=mtp_layer_names(_NAMES))
