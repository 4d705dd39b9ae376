"""SmolLM3: Llama without rotary positions in every fourth layer."""

from __future__ import annotations

import re

from transformers import PretrainedConfig

from paceline.models.description import DecoderSpec
from paceline.models.families.base import (
    LLAMA_GGUF_NAMES,
    LLAMA_NAMES,
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
    biased = bool(config.attention_bias)
    attentions = [
        attention_of(
            config,
            rotary=rotary if rotated else without_positions(rotary),
            window=window if config.use_sliding_window else None,
            bias=biased,
            output_bias=biased,
        )
        for rotated, window in zip(config.no_rope_layers, windows, strict=True)
    ]
    return decoder_of(config, attentions)


FAMILY = Family(
    "smollm3",
    _describe,
    WeightNames(LLAMA_NAMES, prefixes=("model.",)),
    GGUFForm("smollm3", WeightNames(LLAMA_GGUF_NAMES, ignored=re.compile(r"rope_freqs\.weight$")), paired=True),
)
