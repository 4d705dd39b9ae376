"""Seed-OSS: Llama with biases on queries, keys and values."""

from __future__ import annotations

from transformers import PretrainedConfig

from paceline.models.description.spec import DecoderSpec
from paceline.models.description.weight_names import WeightNames
from paceline.models.families.base import LLAMA_GGUF_NAMES, LLAMA_NAMES, Family, GGUFForm, llama_like


def _describe(config: PretrainedConfig) -> DecoderSpec | None:
    return llama_like(config, bias=bool(config.attention_bias), output_bias=bool(config.attention_out_bias))


FAMILY = Family(
    "seed_oss",
    _describe,
    WeightNames(LLAMA_NAMES, prefixes=("model.",)),
    GGUFForm(("seed_oss",), WeightNames({**LLAMA_GGUF_NAMES, "blk.{}.post_attention_norm": "layers.{}.mlp_norm"})),
)
