"""Bamba: Mamba-2 layers with attention after every few of them. Its GGUF files are of architecture granitehybrid."""

from __future__ import annotations

from transformers import PretrainedConfig

from paceline.models.description.spec import DecoderSpec, LayerSpec, MLPSpec
from paceline.models.description.weight_names import WeightNames
from paceline.models.families import mamba2
from paceline.models.families.base import (
    ACTIVATION_NAMES,
    LLAMA_NAMES,
    Family,
    attention_of,
    biases_of,
    decoder_of,
)
from paceline.models.families.rotary import rotary_of


def _describe(config: PretrainedConfig) -> DecoderSpec | None:
    rotary, mamba, kinds = rotary_of(config), mamba2.mamba_of(config), set(config.layer_types)
    activation = ACTIVATION_NAMES.get(config.hidden_act)
    if rotary is None or mamba is None or activation is None or not {"full_attention"} <= kinds <= mamba2.KINDS:
        return None
    attention = attention_of(config, rotary=rotary, **biases_of(config))
    mlp = MLPSpec(config.intermediate_size, activation, bias=bool(config.mlp_bias))
    mixers = (mamba if kind == "linear_attention" else attention for kind in config.layer_types)
    return decoder_of(config, (LayerSpec(mixer, mlp) for mixer in mixers))


_NAMES = {
    **{name: ours for name, ours in LLAMA_NAMES.items() if not name.startswith(("norm", "layers.{}.mlp."))},
    **mamba2.MAMBA,
    "final_layernorm": "norm",
    "layers.{}.pre_ff_layernorm": "layers.{}.mlp_norm",
    **{f"layers.{{}}.feed_forward.{part}_proj": f"layers.{{}}.{part}" for part in ("gate", "up", "down")},
}
_USUAL = {"num_hidden_layers": 32, "attn_layer_indices": [9, 18, 27]}

FAMILY = Family("bamba", _describe, WeightNames(_NAMES, prefixes=("model.",)), usual=_USUAL)
