"""DeepSeek-V3 and R1, and Kimi K2: latent attention, and experts that sigmoids score beside an MLP."""

from __future__ import annotations

from transformers import PretrainedConfig

from paceline.models.description.spec import DecoderSpec
from paceline.models.description.weight_names import WeightNames, ignoring
from paceline.models.families.base import Family
from paceline.models.families.latent import ROUTED_NAMES, after_dense_layers, latent_decoder_of, sigmoid_routing


def _describe(config: PretrainedConfig) -> DecoderSpec | None:
    sparse, routing = after_dense_layers(config), sigmoid_routing(config)
    return latent_decoder_of(config, interleaved=bool(config.rope_interleave), sparse=sparse, **routing)


# transformers saves a Kimi K2.5 with its layers named like those of the vision tower
_NAMES = {**ROUTED_NAMES, **{theirs.replace("layers.", "blocks.", 1): ours for theirs, ours in ROUTED_NAMES.items()}}

FAMILY = Family(
    "deepseek_v3",
    _describe,
    WeightNames(_NAMES, prefixes=("model.",), ignored=ignoring(r"model\.layers\.61\..*")),
    other_types=("sarvam_mla",),
)
