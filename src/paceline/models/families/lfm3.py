"""LFM3: LFM2's layers with norms after each part, too, gates of attention heads, and windows beside full attention."""

from __future__ import annotations

from transformers import PretrainedConfig

from paceline.models.description.spec import DecoderSpec, LayerSpec, MixerSpec, MLPSpec, NormPlaces, ShortConvSpec
from paceline.models.description.weight_names import WeightNames
from paceline.models.families import lfm2
from paceline.models.families.base import Family, attention_of, biases_of, decoder_of
from paceline.models.families.rotary import rotary_of

_ATTENTION = {"full_attention", "sliding_attention"}


def _describe(config: PretrainedConfig) -> DecoderSpec | None:
    kinds: list[str] = config.layer_types
    rotaries = {kind: rotary_of(config, kind) for kind in _ATTENTION & set(kinds)}
    if config.conv_bias or not rotaries or None in rotaries.values() or not set(kinds) <= _ATTENTION | {"conv"}:
        return None
    gates = dict.fromkeys(("gated", "gates_apart", "gates_by_head"), bool(config.use_attention_gate))

    def mixer(kind: str) -> MixerSpec:
        if kind == "conv":
            return ShortConvSpec(config.conv_L_cache)
        window = config.sliding_window if kind == "sliding_attention" else None
        fields = {"rotary": rotaries[kind], "window": window, "qk_norm": "head", **gates, **biases_of(config)}
        return attention_of(config, **fields)

    norms: NormPlaces = "both" if config.use_sandwich_norm else "before"
    return decoder_of(config, (LayerSpec(mixer(kind), MLPSpec(config.intermediate_size), norms) for kind in kinds))


_NAMES = {
    "layers.{}.post_operator_norm": "layers.{}.attn_out_norm",
    "layers.{}.post_ffn_norm": "layers.{}.mlp_out_norm",
    "layers.{}.self_attn.o_proj": "layers.{}.o",
    "layers.{}.self_attn.q_norm": "layers.{}.q_norm",
    "layers.{}.self_attn.k_norm": "layers.{}.k_norm",
    "layers.{}.self_attn.gate_proj": "layers.{}.attn_gate",  # in files
    "layers.{}.self_attn.g_proj": "layers.{}.attn_gate",  # of loaded models
}

FAMILY = Family("lfm3", _describe, WeightNames({**lfm2.NAMES, **_NAMES}, prefixes=("model.",)))
