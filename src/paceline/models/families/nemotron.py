"""Nemotron 4 and Minitron: layer norms stored less one, and an MLP without a gate behind the square of ReLU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from paceline.models.description.spec import DecoderSpec, NormSpec
from paceline.models.description.weight_names import WeightNames
from paceline.models.families.base import LLAMA_GGUF_NAMES, LLAMA_NAMES, Family, GGUFForm, biases_of, plain_like


def _describe(config: PretrainedConfig) -> DecoderSpec | None:
    return plain_like(config, norm=NormSpec("layer", config.norm_eps), **biases_of(config))


def _fields(metadata: Mapping[str, Any], _: Mapping[str, Any]) -> dict[str, Any]:
    return {"norm_eps": metadata["attention.layer_norm_epsilon"]}


FAMILY = Family(
    "nemotron",
    _describe,
    WeightNames(LLAMA_NAMES, prefixes=("model.",), plus_one=frozenset({"norm", "attn_norm", "mlp_norm"})),
    GGUFForm(("nemotron",), WeightNames(LLAMA_GGUF_NAMES), fields=_fields),
)
