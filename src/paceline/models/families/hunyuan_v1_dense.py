"""Hunyuan 1, dense: norms of queries and keys behind the rotation."""

from __future__ import annotations

from transformers import PretrainedConfig

from paceline.models.description.spec import DecoderSpec
from paceline.models.description.weight_names import WeightNames
from paceline.models.families.base import LLAMA_GGUF_NAMES, LLAMA_NAMES, Family, GGUFForm, biases_of, llama_like
from paceline.models.families.rotary import head_dim, with_rope


def describe(config: PretrainedConfig) -> DecoderSpec | None:
    """Describe a dense Hunyuan; also the part that one with experts shares with it."""
    rope, width = config.rope_parameters, head_dim(config)
    if rope.get("rope_type") == "dynamic" and rope.get("alpha"):  # a larger base, at every length
        base = rope["rope_theta"] * rope["alpha"] ** (width / (width - 2))
        config = with_rope(config, rope_type="default", rope_theta=base)
    return llama_like(config, qk_norm="head", norm_after=True, **biases_of(config))


NAMES = {
    **LLAMA_NAMES,
    "layers.{}.self_attn.query_layernorm": "layers.{}.q_norm",
    "layers.{}.self_attn.key_layernorm": "layers.{}.k_norm",
}

FAMILY = Family(
    "hunyuan_v1_dense",
    describe,
    WeightNames(NAMES, prefixes=("model.",)),
    GGUFForm(("hunyuan-dense",), WeightNames(LLAMA_GGUF_NAMES)),
)
