"""EXAONE 4: norms after each part, norms of queries and keys; with windows, full layers have no positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from paceline.models.description.spec import DecoderSpec
from paceline.models.description.weight_names import WeightNames
from paceline.models.families.base import (
    GGUF_NORMS_AFTER,
    LLAMA_GGUF_NAMES,
    LLAMA_NAMES,
    NORMS_AFTER,
    Family,
    GGUFForm,
    llama_like,
)


def _describe(config: PretrainedConfig) -> DecoderSpec | None:
    rotated = [config.sliding_window is None or kind == "sliding_attention" for kind in config.layer_types]
    return llama_like(config, "after", rotated, qk_norm="head")


def _fields(metadata: Mapping[str, Any], _: Mapping[str, Any]) -> dict[str, Any]:
    window = metadata.get("attention.sliding_window")
    kinds = {} if window else {"layer_types": ["full_attention"] * metadata["block_count"]}
    return {"sliding_window": window, **kinds}


FAMILY = Family(
    "exaone4",
    _describe,
    WeightNames({**LLAMA_NAMES, **NORMS_AFTER}, prefixes=("model.",)),
    GGUFForm(
        ("exaone4",),
        WeightNames({**LLAMA_GGUF_NAMES, **GGUF_NORMS_AFTER}),
        fields=_fields,
        reads=frozenset({"attention.sliding_window"}),
    ),
)
