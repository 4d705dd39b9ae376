"""Solar Open: experts routed by sigmoids beside an MLP in every layer. Its GGUF files are of architecture glm4moe."""

from __future__ import annotations

from transformers import PretrainedConfig

from paceline.models.description.spec import DecoderSpec
from paceline.models.description.weight_names import WeightNames
from paceline.models.families.base import LLAMA_NAMES, Family, llama_like
from paceline.models.families.routed import ROUTED, with_routed_experts


def _describe(config: PretrainedConfig) -> DecoderSpec | None:
    spec = llama_like(config, bias=bool(config.attention_bias))
    return spec and with_routed_experts(config, spec, [True] * config.num_hidden_layers)


FAMILY = Family("solar_open", _describe, WeightNames({**LLAMA_NAMES, **ROUTED}, prefixes=("model.",)))
