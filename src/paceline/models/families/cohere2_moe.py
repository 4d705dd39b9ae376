"""Command A with experts: Command R7B's layers with experts beside attention."""

from __future__ import annotations

from dataclasses import replace

from transformers import PretrainedConfig

from paceline.models.description.spec import DecoderSpec, NormSpec
from paceline.models.description.weight_names import WeightNames
from paceline.models.families.base import EXPERTS, LLAMA_NAMES, Family, mlp_beside, with_experts
from paceline.models.families.cohere import describe


def _describe(config: PretrainedConfig) -> DecoderSpec | None:
    sparse = [kind == "sparse" for kind in config.mlp_layer_types]
    dense_turn = config.prefix_dense_sliding_window_pattern == 1
    rotated = [
        kind == "sliding_attention" or (dense_turn and not has)
        for kind, has in zip(config.layer_types, sparse, strict=True)
    ]
    spec, shared = describe(config, rotated), config.num_shared_experts
    if spec is None:
        return None
    half = 0.5 if shared and config.shared_expert_combination_strategy == "average" else 1.0
    dense = replace(spec.layers[0].dense, width=config.prefix_dense_intermediate_size)
    layers = tuple(layer if has else replace(layer, mlp=dense) for layer, has in zip(spec.layers, sparse, strict=True))
    by_softmax = config.expert_selection_fn == "softmax"
    mixed = with_experts(
        replace(spec, layers=layers),
        (config.num_experts, config.num_experts_per_tok, config.intermediate_size),
        beside=config.intermediate_size * shared,
        sparse=sparse,
        normalised=by_softmax or bool(config.norm_topk_prob),
        sigmoid=not by_softmax,
        output_scale=half,
        shared_scale=half,
    )
    return mixed if config.rms_norm_eps is None else replace(mixed, norm=NormSpec("rms", config.rms_norm_eps))


FAMILY = Family(
    "cohere2_moe",
    _describe,
    WeightNames({**LLAMA_NAMES, **EXPERTS, **mlp_beside("shared_experts")}, prefixes=("model.",)),
)
