"""Gemma 1: Llama's layers with GELU, scaled embeddings, and norms stored less one."""

from __future__ import annotations

from dataclasses import replace

from transformers import PretrainedConfig

from paceline.models.description.spec import DecoderSpec
from paceline.models.description.weight_names import WeightNames
from paceline.models.families.base import LLAMA_GGUF_NAMES, LLAMA_NAMES, Family, GGUFForm, biases_of, llama_like


def _describe(config: PretrainedConfig) -> DecoderSpec | None:
    if config.use_bidirectional_attention:
        return None
    spec = llama_like(config, **biases_of(config))
    return spec and replace(spec, embed_scale=config.hidden_size**0.5)


FAMILY = Family(
    "gemma",
    _describe,
    WeightNames(LLAMA_NAMES, prefixes=("model.",), plus_one=frozenset({"norm", "attn_norm", "mlp_norm"})),
    GGUFForm(("gemma",), WeightNames(LLAMA_GGUF_NAMES)),
)
