"""LFM2, dense: gated short convolutions, and attention after every few of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PretrainedConfig

from paceline.models.description.spec import (
    AttentionSpec,
    DecoderSpec,
    ExpertsSpec,
    LayerSpec,
    MLPSpec,
    NormSpec,
    ShortConvSpec,
    check,
)
from paceline.models.description.weight_names import WeightNames
from paceline.models.families.base import LLAMA_GGUF_NAMES, LLAMA_NAMES, Family, GGUFForm, decoder_of
from paceline.models.families.rotary import head_dim, rotary_of

_KINDS = {"full_attention", "conv"}


def _inner_width(config: PretrainedConfig) -> int:
    """Inner width of the MLP, which the configuration may give before it is cut to 2/3 and rounded up."""
    width, multiple = int(config.intermediate_size), int(config.block_multiple_of)
    if not config.block_auto_adjust_ff_dim:
        return width
    width = int(2 * width / 3)
    if config.block_ffn_dim_multiplier is None:
        return width
    return -(-int(config.block_ffn_dim_multiplier * width) // multiple) * multiple


def _describe(config: PretrainedConfig) -> DecoderSpec | None:
    return describe(config, [MLPSpec(_inner_width(config))] * len(config.layer_types))


def describe(config: PretrainedConfig, mlps: Sequence[MLPSpec | ExpertsSpec]) -> DecoderSpec | None:
    """Describe a model with the MLPs of its layers; None if a configuration asks for more."""
    rotary, eps = rotary_of(config), config.norm_eps
    if rotary is None or config.conv_bias or not {"full_attention"} <= set(config.layer_types) <= _KINDS:
        return None
    heads = config.num_attention_heads, config.num_key_value_heads, head_dim(config)
    attention = AttentionSpec(*heads, rotary=rotary, qk_norm="head", qk_norm_eps=eps)
    conv = ShortConvSpec(config.conv_L_cache)
    mixers = (conv if kind == "conv" else attention for kind in config.layer_types)
    return decoder_of(config, map(LayerSpec, mixers, mlps), norm=NormSpec("rms", eps))


NAMES = {
    "embed_tokens": LLAMA_NAMES["embed_tokens"],
    "lm_head": LLAMA_NAMES["lm_head"],
    "embedding_norm": "norm",
    "layers.{}.operator_norm": "layers.{}.attn_norm",
    "layers.{}.ffn_norm": "layers.{}.mlp_norm",
    **{f"layers.{{}}.self_attn.{part}_proj": f"layers.{{}}.{part}" for part in "qkv"},
    "layers.{}.self_attn.out_proj": "layers.{}.o",
    "layers.{}.self_attn.q_layernorm": "layers.{}.q_norm",
    "layers.{}.self_attn.k_layernorm": "layers.{}.k_norm",
    "layers.{}.conv.in_proj": "layers.{}.qkv",
    "layers.{}.conv.conv": "layers.{}.conv",
    "layers.{}.conv.out_proj": "layers.{}.o",
    "layers.{}.feed_forward.w1": "layers.{}.gate",
    "layers.{}.feed_forward.w3": "layers.{}.up",
    "layers.{}.feed_forward.w2": "layers.{}.down",
}


def gguf_fields(metadata: Mapping[str, Any], _: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the layers: those without key heads are convolutions. The width of the MLP is final."""
    counts = metadata["attention.head_count_kv"]
    check(isinstance(counts, list), f"attention.head_count_kv={counts!r}, which must tell the kinds of the layers")
    heads = [int(count) for count in counts]
    return {
        "num_key_value_heads": max(heads),
        "layer_types": ["full_attention" if count else "conv" for count in heads],
        "conv_L_cache": int(metadata["shortconv.l_cache"]),
        "norm_eps": metadata["attention.layer_norm_rms_epsilon"],
        "block_auto_adjust_ff_dim": False,
    }


GGUF_NAMES = {
    **LLAMA_GGUF_NAMES,
    "token_embd_norm": "norm",
    "blk.{}.shortconv.in_proj": "layers.{}.qkv",
    "blk.{}.shortconv.conv": "layers.{}.conv",
    "blk.{}.shortconv.out_proj": "layers.{}.o",
}
_FORM = GGUFForm(("lfm2",), WeightNames(GGUF_NAMES), fields=gguf_fields)
_USUAL = {"num_hidden_layers": 16, "full_attn_idxs": [2, 5, 8, 10, 12, 14]}  # of 350M to 1.2B parameters

FAMILY = Family("lfm2", _describe, WeightNames(NAMES, prefixes=("model.",)), _FORM, usual=_USUAL)
