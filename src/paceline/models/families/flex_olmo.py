"""FlexOlmo: OLMo 2 with experts in every layer."""

from __future__ import annotations

from transformers import PretrainedConfig

from paceline.models.description.spec import DecoderSpec
from paceline.models.description.weight_names import WeightNames
from paceline.models.families.base import (
    EXPERTS,
    LLAMA_NAMES,
    NORMS_AFTER,
    Family,
    biases_of,
    llama_like,
    with_experts,
)


def _describe(config: PretrainedConfig) -> DecoderSpec | None:
    spec = llama_like(config, "after", qk_norm="all", **biases_of(config))
    sizes = config.num_experts, config.num_experts_per_tok, config.intermediate_size
    return spec and with_experts(spec, sizes, normalised=bool(config.norm_topk_prob))


FAMILY = Family("flex_olmo", _describe, WeightNames({**LLAMA_NAMES, **EXPERTS, **NORMS_AFTER}, prefixes=("model.",)))
