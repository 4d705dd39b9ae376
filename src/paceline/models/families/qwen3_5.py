"""Qwen3.5, dense: gated delta nets, and a gated full attention after every few of them. Only the text part is read."""

from __future__ import annotations

import re
from collections.abc import Sequence

from transformers import PretrainedConfig

from paceline.models.description.spec import AttentionSpec, DecoderSpec, DeltaNetSpec, ExpertsSpec, LayerSpec, MLPSpec
from paceline.models.description.weight_names import WeightNames
from paceline.models.families.base import ACTIVATION_NAMES, LLAMA_NAMES, Family, decoder_of, mtp_names
from paceline.models.families.qwen3_5_gguf import FORM
from paceline.models.families.rotary import head_dim, rotary_of

_KINDS = {"full_attention", "linear_attention"}
_NORMS = frozenset({"attn_norm", "mlp_norm", "q_norm", "k_norm", "norm"})  # stored around 0; delta_norm is around 1


def _describe(config: PretrainedConfig) -> DecoderSpec | None:
    return describe(config, [MLPSpec(config.intermediate_size)] * len(config.layer_types))


def describe(config: PretrainedConfig, mlps: Sequence[MLPSpec | ExpertsSpec]) -> DecoderSpec | None:
    """Describe a model with the MLPs of its layers; None if a configuration asks for more."""
    rotary = rotary_of(config)
    if rotary is None or config.attention_bias or not {"full_attention"} <= set(config.layer_types) <= _KINDS:
        return None
    if ACTIVATION_NAMES.get(config.hidden_act) != "silu":
        return None
    heads = config.num_attention_heads, config.num_key_value_heads, head_dim(config)
    eps = config.rms_norm_eps
    attention = AttentionSpec(*heads, rotary=rotary, qk_norm="head", qk_norm_eps=eps, gated=True)
    delta = DeltaNetSpec(
        config.linear_num_key_heads,
        config.linear_num_value_heads,
        config.linear_key_head_dim,
        config.linear_value_head_dim,
        config.linear_conv_kernel_dim,
        eps,
    )
    mixers = (delta if kind == "linear_attention" else attention for kind in config.layer_types)
    tied = bool(config.tie_word_embeddings)  # a head that differs is found in the files
    return decoder_of(config, map(LayerSpec, mixers, mlps), tied=tied)


NAMES = WeightNames(
    {
        **LLAMA_NAMES,
        "layers.{}.linear_attn.in_proj_qkv": "layers.{}.in_qkv",
        "layers.{}.linear_attn.in_proj_z": "layers.{}.out_gate",
        "layers.{}.linear_attn.in_proj_b": "layers.{}.beta",
        "layers.{}.linear_attn.in_proj_a": "layers.{}.decay",
        "layers.{}.linear_attn.conv1d": "layers.{}.conv",
        "layers.{}.linear_attn.A_log": "layers.{}.decay_rate.weight",
        "layers.{}.linear_attn.dt_bias": "layers.{}.decay_bias.weight",
        "layers.{}.linear_attn.norm": "layers.{}.delta_norm",
        "layers.{}.linear_attn.out_proj": "layers.{}.o",
    },
    prefixes=("model.",),
    ignored=re.compile(r"mtp\..*|.*rotary_emb\.inv_freq"),
    plus_one=_NORMS,
)

FAMILY = Family("qwen3_5_text", _describe, NAMES, FORM, mtp_names(NAMES))
