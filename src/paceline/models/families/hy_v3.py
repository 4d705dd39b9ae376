"""Hunyuan 3: norms of queries and keys, and experts routed by sigmoids beside an MLP."""

from __future__ import annotations

from transformers import PretrainedConfig

from paceline.models.description.spec import DecoderSpec
from paceline.models.description.weight_names import WeightNames, ignoring
from paceline.models.families.base import LLAMA_NAMES, Family, biases_of, llama_like, mlp_beside, with_experts
from paceline.models.families.routed import ROUTED


def _describe(config: PretrainedConfig) -> DecoderSpec | None:
    spec = llama_like(config, qk_norm="head", **biases_of(config))
    return spec and with_experts(
        spec,
        (config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size),
        beside=config.moe_intermediate_size * config.num_shared_experts,
        sparse=[kind == "sparse" for kind in config.mlp_layer_types],
        normalised=True,
        sigmoid=True,
        correction=True,
        output_scale=float(config.router_scaling_factor),
    )


_IN_FILES = {
    **mlp_beside("shared_mlp"),
    "layers.{}.mlp.router.gate": "layers.{}.router",
    "layers.{}.mlp.expert_bias": "layers.{}.router_correction.weight",
}

FAMILY = Family(
    "hy_v3",
    _describe,
    # the published files of 80 layers have a draft head in the place of one more
    WeightNames(
        {**LLAMA_NAMES, **ROUTED, **_IN_FILES}, prefixes=("model.",), ignored=ignoring(r"model\.layers\.80\..*")
    ),
)
