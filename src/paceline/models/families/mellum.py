"""Mellum 2: Qwen3's attention with windows and rotary positions by kind of layer, and experts."""

from __future__ import annotations

from transformers import PretrainedConfig

from paceline.models.description.spec import DecoderSpec
from paceline.models.description.weight_names import OWN_HEAD, WeightNames
from paceline.models.families.base import EXPERTS, LLAMA_NAMES, Family, biases_of, by_kind_of_layer, with_experts


def _describe(config: PretrainedConfig) -> DecoderSpec | None:
    spec = by_kind_of_layer(config, qk_norm="head", **biases_of(config))
    sizes = config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size
    sparse = [kind == "sparse" for kind in config.mlp_layer_types]
    return spec and with_experts(spec, sizes, sparse=sparse, normalised=bool(config.norm_topk_prob))


FAMILY = Family("mellum", _describe, WeightNames({**LLAMA_NAMES, **EXPERTS}, prefixes=("model.",), ignored=OWN_HEAD))
