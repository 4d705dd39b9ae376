"""ERNIE 4.5, dense: Llama with neighbours that turn together."""

from __future__ import annotations

from transformers import PretrainedConfig

from paceline.models.description.spec import DecoderSpec, MLPSpec
from paceline.models.description.weight_names import WeightNames
from paceline.models.families.base import LLAMA_GGUF_NAMES, LLAMA_NAMES, Family, GGUFForm, llama_like


def describe(config: PretrainedConfig) -> DecoderSpec | None:
    """Describe a dense ERNIE; also the part that one with experts shares with it."""
    if config.hidden_act != "silu":
        return None
    biased = bool(config.use_bias)
    mlp = MLPSpec(config.intermediate_size, config.hidden_act, bias=biased)
    return llama_like(config, mlp=mlp, interleaved=True, bias=biased, output_bias=biased)


FAMILY = Family(
    "ernie4_5",
    describe,
    WeightNames(LLAMA_NAMES, prefixes=("model.",)),
    GGUFForm(("ernie4_5",), WeightNames(LLAMA_GGUF_NAMES)),
)
