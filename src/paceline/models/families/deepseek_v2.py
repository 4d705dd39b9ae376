"""DeepSeek-V2: latent attention, and experts that a softmax scores beside an MLP behind the first dense layers."""

from __future__ import annotations

from transformers import PretrainedConfig

from paceline.models.description.spec import DecoderSpec
from paceline.models.description.weight_names import WeightNames
from paceline.models.families.base import Family
from paceline.models.families.latent import LATENT_NAMES, latent_decoder_of, with_softmax_experts
from paceline.models.families.latent_gguf import DEEPSEEK2
from paceline.models.families.routed import ROUTED


def _describe(config: PretrainedConfig) -> DecoderSpec | None:
    groups = {
        "greedy": {},
        "group_limited_greedy": {"groups": config.n_group, "used_groups": config.topk_group, "group_best": 1},
    }.get(config.topk_method)
    if groups is None:
        return None
    return with_softmax_experts(config, latent_decoder_of(config, interleaved=True), **groups)


FAMILY = Family(
    "deepseek_v2",
    _describe,
    WeightNames({**LATENT_NAMES, **ROUTED}, prefixes=("model.",)),
    DEEPSEEK2,
    usual={"num_experts_per_tok": 6},
)
