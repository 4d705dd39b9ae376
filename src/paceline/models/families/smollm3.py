"""SmolLM3: Llama without rotary positions in every fourth layer."""

from __future__ import annotations

from transformers import PretrainedConfig

from paceline.models.description.spec import DecoderSpec
from paceline.models.description.weight_names import WeightNames
from paceline.models.families.base import LLAMA_GGUF_NAMES, LLAMA_NAMES, Family, GGUFForm, biases_of, llama_like


def _describe(config: PretrainedConfig) -> DecoderSpec | None:
    if "sliding_attention" in config.layer_types and not config.use_sliding_window:  # a contradiction; no known model
        return None
    return llama_like(config, rotated=list(map(bool, config.no_rope_layers)), **biases_of(config))


FAMILY = Family(
    "smollm3",
    _describe,
    WeightNames(LLAMA_NAMES, prefixes=("model.",)),
    GGUFForm(("smollm3",), WeightNames(LLAMA_GGUF_NAMES), paired=True),
)
