"""dots.llm1: norms of queries and keys, and experts routed by sigmoids beside an MLP."""

from __future__ import annotations

from transformers import PretrainedConfig

from paceline.models.description.spec import DecoderSpec
from paceline.models.description.weight_names import WeightNames
from paceline.models.families.base import LLAMA_GGUF_NAMES, LLAMA_NAMES, Family, GGUFForm, biases_of, llama_like
from paceline.models.families.routed import GGUF_ROUTED, ROUTED, after_dense_layers, routed_fields, with_routed_experts


def _describe(config: PretrainedConfig) -> DecoderSpec | None:
    spec = llama_like(config, qk_norm="head", **biases_of(config))
    return spec and with_routed_experts(config, spec, after_dense_layers(config))


FAMILY = Family(
    "dots1",
    _describe,
    WeightNames({**LLAMA_NAMES, **ROUTED}, prefixes=("model.",)),
    GGUFForm(
        ("dots1",),
        WeightNames({**LLAMA_GGUF_NAMES, **GGUF_ROUTED}),
        fields=routed_fields,
        reads=frozenset({"expert_count"}),
    ),
    usual={"n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 2},
)
