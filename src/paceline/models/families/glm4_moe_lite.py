"""GLM-4.7-Flash: DeepSeek-V3's layers, which the configuration tells one by one whether they have experts."""

from __future__ import annotations

from transformers import PretrainedConfig

from paceline.models.description.spec import DecoderSpec
from paceline.models.description.weight_names import WeightNames, ignoring
from paceline.models.families.base import Family
from paceline.models.families.latent import ROUTED_NAMES, latent_decoder_of, sigmoid_routing


def _describe(config: PretrainedConfig) -> DecoderSpec | None:
    sparse = [kind == "sparse" for kind in config.mlp_layer_types]
    routing = sigmoid_routing(config)
    return latent_decoder_of(config, interleaved=bool(config.rope_interleave), sparse=sparse, **routing)


FAMILY = Family(
    "glm4_moe_lite",
    _describe,
    WeightNames(ROUTED_NAMES, prefixes=("model.",), ignored=ignoring(r"model\.layers\.47\..*")),
)
