"""DeepSeek-V3 and R1, and Kimi K2: latent attention, and experts that sigmoids score beside an MLP."""

from __future__ import annotations

from transformers import PretrainedConfig

from paceline.models.description.spec import DecoderSpec
from paceline.models.description.weight_names import WeightNames
from paceline.models.families.base import Family, mtp_layer_names
from paceline.models.families.latent import LATENT_NAMES, latent_decoder_of
from paceline.models.families.latent_gguf import DEEPSEEK2
from paceline.models.families.routed import ROUTED, after_dense_layers, with_routed_experts


def _describe(config: PretrainedConfig) -> DecoderSpec | None:
    spec = latent_decoder_of(config, interleaved=bool(config.rope_interleave))
    return spec and with_routed_experts(config, spec, after_dense_layers(config))


_NAMES = {**LATENT_NAMES, **ROUTED}
# transformers saves a Kimi K2.5 with its layers named like those of the vision tower
_NAMES |= {theirs.replace("layers.", "blocks.", 1): ours for theirs, ours in _NAMES.items()}

FAMILY = Family(
    "deepseek_v3",
    _describe,
    WeightNames(_NAMES, prefixes=("model.",)),
    DEEPSEEK2,
    mtp_layer_names(WeightNames(_NAMES)),
    other_types=("sarvam_mla",),
)
