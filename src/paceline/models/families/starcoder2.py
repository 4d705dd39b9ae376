"""StarCoder 2: layer norms, biases, and an MLP without a gate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from paceline.models.description.spec import DecoderSpec, NormSpec
from paceline.models.description.weight_names import WeightNames
from paceline.models.families.base import (
    LLAMA_GGUF_NAMES,
    LLAMA_NAMES,
    Family,
    GGUFForm,
    llama_like,
    plain_mlp,
)


def _describe(config: PretrainedConfig) -> DecoderSpec | None:
    biased = bool(config.use_bias)
    mlp = plain_mlp(config, config.hidden_act, bias=biased)
    norm = NormSpec("layer", config.norm_epsilon)
    return None if mlp is None else llama_like(config, norm=norm, mlp=mlp, bias=biased, output_bias=biased)


def _fields(metadata: Mapping[str, Any], _: Mapping[str, Any]) -> dict[str, Any]:
    window = metadata.get("attention.sliding_window") or None
    return {"norm_epsilon": metadata["attention.layer_norm_epsilon"], "sliding_window": window}


_MLP = {"layers.{}.mlp.c_fc": "layers.{}.up", "layers.{}.mlp.c_proj": "layers.{}.down"}

FAMILY = Family(
    "starcoder2",
    _describe,
    WeightNames({**LLAMA_NAMES, **_MLP}, prefixes=("model.",)),
    GGUFForm(
        ("starcoder2",),
        WeightNames(LLAMA_GGUF_NAMES),
        fields=_fields,
        reads=frozenset({"attention.sliding_window"}),
    ),
)
