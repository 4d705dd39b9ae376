"""Command R7B and A: Command R with windows in three of four layers, and no positions in the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from paceline.models.description.spec import DecoderSpec
from paceline.models.description.weight_names import WeightNames
from paceline.models.families.base import LLAMA_GGUF_NAMES, LLAMA_NAMES, Family, GGUFForm
from paceline.models.families.cohere import describe, scale_of


def _describe(config: PretrainedConfig) -> DecoderSpec | None:
    return describe(config, [kind == "sliding_attention" for kind in config.layer_types])


def _fields(metadata: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    return {**scale_of(metadata, rope), "sliding_window": metadata["attention.sliding_window"]}


FAMILY = Family(
    "cohere2",
    _describe,
    WeightNames(LLAMA_NAMES, prefixes=("model.",)),
    GGUFForm(
        ("cohere2",),
        WeightNames(LLAMA_GGUF_NAMES),
        fields=_fields,
        reads=frozenset({"logit_scale", "attention.sliding_window"}),
    ),
)
