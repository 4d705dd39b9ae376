"""Ministral 3: Mistral's layers; queries grow with the position beyond the original length, where texts end here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from paceline.models.description.spec import DecoderSpec
from paceline.models.description.weight_names import WeightNames
from paceline.models.families.base import LLAMA_GGUF_NAMES, LLAMA_NAMES, Family, GGUFForm, llama_like


def _describe(config: PretrainedConfig) -> DecoderSpec | None:
    return llama_like(config)


def _fields(metadata: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    growth = metadata.get("attention.temperature_scale")
    scaling = metadata.get("rope.scaling.yarn_log_multiplier")
    named = {"llama_4_scaling_beta": growth, "mscale_all_dim": scaling, "mscale": scaling and 1.0}
    return {"rope_parameters": {**rope, **{name: value for name, value in named.items() if value is not None}}}


FAMILY = Family(
    "ministral3",
    _describe,
    WeightNames(LLAMA_NAMES, prefixes=("model.",)),
    GGUFForm(
        ("mistral3",),
        WeightNames(LLAMA_GGUF_NAMES),
        fields=_fields,
        reads=frozenset({"attention.temperature_scale", "rope.scaling.yarn_log_multiplier"}),
        paired=True,
    ),
)
