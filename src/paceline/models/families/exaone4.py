"""EXAONE 4: norms after each part, norms of queries and keys; with windows, full layers have no positions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from paceline.models.description import DecoderSpec
from paceline.models.families.base import (
    GGUF_NORMS_AFTER,
    LLAMA_GGUF_NAMES,
    LLAMA_NAMES,
    NORMS_AFTER,
    Family,
    GGUFForm,
    attention_of,
    decoder_of,
    windows_of,
)
from paceline.models.families.rotary import rotary_of, without_positions
from paceline.models.weight_names import WeightNames


def _describe(config: PretrainedConfig) -> DecoderSpec | None:
    rotary, windows = rotary_of(config), windows_of(config)
    if rotary is None or windows is None:
        return None
    rotated = [config.sliding_window is None or window is not None for window in windows]
    attentions = [
        attention_of(config, rotary=rotary if turns else without_positions(rotary), window=window, qk_norm="head")
        for turns, window in zip(rotated, windows, strict=True)
    ]
    return decoder_of(config, attentions, "after")


def _fields(metadata: Mapping[str, Any], _: Mapping[str, Any]) -> dict[str, Any]:
    return {"sliding_window": metadata.get("attention.sliding_window")}


FAMILY = Family(
    "exaone4",
    _describe,
    WeightNames({**LLAMA_NAMES, **NORMS_AFTER}, prefixes=("model.",)),
    GGUFForm(
        "exaone4",
        WeightNames({**LLAMA_GGUF_NAMES, **GGUF_NORMS_AFTER}, ignored=re.compile(r"rope_freqs\.weight$")),
        fields=_fields,
        reads=frozenset({"attention.sliding_window"}),
    ),
)
