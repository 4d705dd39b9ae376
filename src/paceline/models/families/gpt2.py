"""GPT-2: learned positions, layer norms, a plain MLP, matrices stored [in, out]."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from paceline.models.description.spec import AttentionSpec, DecoderSpec, LayerSpec, MLPSpec, NormSpec
from paceline.models.description.weight_names import WeightNames
from paceline.models.families.base import ACTIVATION_NAMES, LLAMA_GGUF_NAMES, Family, GGUFForm


def _scale(config: PretrainedConfig, layer: int) -> float | None:
    if getattr(config, "scale_attn_by_inverse_layer_idx", False):
        base = float(config.n_embd // config.n_head) ** -0.5 if config.scale_attn_weights else 1.0
        return base / (layer + 1)
    return None if config.scale_attn_weights else 1.0


def _describe(config: PretrainedConfig) -> DecoderSpec | None:
    return describe(config, kv_heads=config.n_head)


def describe(config: PretrainedConfig, kv_heads: int) -> DecoderSpec | None:
    """Describe a GPT-2, or another decoder with its layers."""
    activation = ACTIVATION_NAMES.get(config.activation_function)
    if activation is None or config.add_cross_attention:
        return None
    heads, dim = config.n_head, config.n_embd // config.n_head
    mlp = MLPSpec(config.n_inner or 4 * config.n_embd, activation, gated=False, bias=True)
    attentions = (
        AttentionSpec(heads, kv_heads, dim, scale=_scale(config, layer), bias=True, output_bias=True)
        for layer in range(config.n_layer)
    )
    return DecoderSpec(
        family=config.model_type,
        vocab_size=config.vocab_size,
        width=config.n_embd,
        max_positions=config.n_positions,
        layers=tuple(LayerSpec(attention, mlp) for attention in attentions),
        norm=NormSpec("layer", config.layer_norm_epsilon),
        embed_width=config.n_embd,
        learned_positions=True,
        tied=bool(config.tie_word_embeddings),
    )


NAMES = WeightNames(
    {
        "wte": "embed",
        "wpe": "positions",
        "ln_f": "norm",
        "lm_head": "head",
        "h.{}.ln_1": "layers.{}.attn_norm",
        "h.{}.attn.c_attn": "layers.{}.qkv",
        "h.{}.attn.c_proj": "layers.{}.o",
        "h.{}.ln_2": "layers.{}.mlp_norm",
        "h.{}.mlp.c_fc": "layers.{}.up",
        "h.{}.mlp.c_proj": "layers.{}.down",
    },
    prefixes=("transformer.",),
    ignored=re.compile(r".*\.attn\.(masked_)?bias$"),
    transposed=frozenset({"qkv", "o", "up", "down"}),
)

GGUF_NAMES = WeightNames({**LLAMA_GGUF_NAMES, "position_embd": "positions", "blk.{}.attn_qkv": "layers.{}.qkv"})


def gguf_fields(metadata: Mapping[str, Any], _: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that have other names here."""
    return {"layer_norm_epsilon": metadata["attention.layer_norm_epsilon"], "n_inner": metadata["feed_forward_length"]}


FAMILY = Family("gpt2", _describe, NAMES, GGUFForm(("gpt2",), GGUF_NAMES, fields=gguf_fields))
