"""OLMoE: experts in every layer, and norms of queries and keys over all heads together."""

from __future__ import annotations

from transformers import PretrainedConfig

from paceline.models.description.spec import DecoderSpec
from paceline.models.description.weight_names import WeightNames
from paceline.models.families.base import (
    EXPERTS,
    GGUF_EXPERTS,
    LLAMA_GGUF_NAMES,
    LLAMA_NAMES,
    Family,
    GGUFForm,
    biases_of,
    gguf_expert_fields,
    llama_like,
    with_experts,
)


def _describe(config: PretrainedConfig) -> DecoderSpec | None:
    spec = llama_like(config, qk_norm="all", **biases_of(config))
    if spec is None or config.clip_qkv is not None:
        return None
    sizes = config.num_experts, config.num_experts_per_tok, config.intermediate_size
    return with_experts(spec, sizes, normalised=bool(config.norm_topk_prob))


FAMILY = Family(
    "olmoe",
    _describe,
    WeightNames({**LLAMA_NAMES, **EXPERTS}, prefixes=("model.",)),
    GGUFForm(
        ("olmoe",),
        WeightNames({**LLAMA_GGUF_NAMES, **GGUF_EXPERTS}),
        fields=gguf_expert_fields,
        reads=frozenset({"expert_count"}),
    ),
)
