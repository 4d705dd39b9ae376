"""Mixtral: Mistral with experts. Its GGUF files are of architecture llama."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from paceline.models.description.spec import DecoderSpec
from paceline.models.description.weight_names import WeightNames
from paceline.models.families.base import (
    EXPERTS,
    GGUF_EXPERTS,
    LLAMA_GGUF_NAMES,
    LLAMA_NAMES,
    W_EXPERTS,
    Family,
    GGUFForm,
    llama_like,
    with_experts,
)


def _describe(config: PretrainedConfig) -> DecoderSpec | None:
    spec = llama_like(config)
    sizes = config.num_local_experts, config.num_experts_per_tok, config.intermediate_size
    return spec and with_experts(spec, sizes, normalised=True)


def _fields(metadata: Mapping[str, Any], _: Mapping[str, Any]) -> dict[str, Any]:
    used = metadata["expert_used_count"]
    return {"num_local_experts": metadata["expert_count"], "num_experts_per_tok": used, "sliding_window": None}


FAMILY = Family(
    "mixtral",
    _describe,
    WeightNames({**LLAMA_NAMES, **EXPERTS, **W_EXPERTS}, prefixes=("model.",)),
    GGUFForm(
        ("llama",),
        WeightNames({**LLAMA_GGUF_NAMES, **GGUF_EXPERTS}),
        fields=_fields,
        reads=frozenset({"expert_count"}),
        paired=True,
        mixture=True,
    ),
)
