"""Qwen3.5, dense: gated delta nets, and a gated full attention after every few of them. Only the text part is read."""

from __future__ import annotations

import re

from transformers import PretrainedConfig

from paceline.models.description.spec import AttentionSpec, DecoderSpec, DeltaNetSpec, ExpertsSpec, LayerSpec, MLPSpec
from paceline.models.description.weight_names import WeightNames
from paceline.models.families.base import ACTIVATION_NAMES, LLAMA_NAMES, Family, decoder_of
from paceline.models.families.qwen3_5_gguf import FORM
from paceline.models.families.rotary import head_dim, rotary_of

_KINDS = {"full_attention", "linear_attention"}
_NORMS = frozenset({"attn_norm", "mlp_norm", "q_norm", "k_norm", "norm"})  # stored around 0; delta_norm is around 1


def _describe(config: PretrainedConfig) -> DecoderSpec | None:
    return describe(config, MLPSpec(config.get_text_config().intermediate_size))


def describe(config: PretrainedConfig, mlp: MLPSpec | ExpertsSpec) -> DecoderSpec | None:
    """Describe a model with this MLP in every layer; None if a configuration asks for more."""
    text = config.get_text_config()
    rotary = rotary_of(text)
    if rotary is None or text.attention_bias or not {"full_attention"} <= set(text.layer_types) <= _KINDS:
        return None
    if ACTIVATION_NAMES.get(text.hidden_act) != "silu":
        return None
    heads = text.num_attention_heads, text.num_key_value_heads, head_dim(text)
    eps = text.rms_norm_eps
    attention = AttentionSpec(*heads, rotary=rotary, qk_norm="head", qk_norm_eps=eps, gated=True)
    delta = DeltaNetSpec(
        text.linear_num_key_heads,
        text.linear_num_value_heads,
        text.linear_key_head_dim,
        text.linear_value_head_dim,
        text.linear_conv_kernel_dim,
        eps,
    )
    mixers = (delta if kind == "linear_attention" else attention for kind in text.layer_types)
    tied = bool(config.tie_word_embeddings or text.tie_word_embeddings)  # a head that differs is found in the files
    family = config.model_type.removesuffix("_text")
    return decoder_of(text, (LayerSpec(mixer, mlp) for mixer in mixers), family=family, tied=tied)


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
    prefixes=("model.language_model.", "model."),
    ignored=re.compile(r"(mtp|model\.visual)\..*|.*rotary_emb\.inv_freq"),
    plus_one=_NORMS,
)

TEXT_FAMILY = Family("qwen3_5_text", _describe, NAMES, FORM, has_head=True)
FAMILY = Family("qwen3_5", _describe, NAMES, has_head=True)
