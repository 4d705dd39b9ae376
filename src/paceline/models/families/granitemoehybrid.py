"""Granite 4 without experts: Mamba-2 layers with attention after every few of them, or attention alone."""

from __future__ import annotations

from transformers import PretrainedConfig

from paceline.models.description.spec import DecoderSpec, LayerSpec, Mamba2Spec, MLPSpec, Rotary, without_residual_scale
from paceline.models.description.weight_names import WeightNames
from paceline.models.families.base import ACTIVATION_NAMES, LLAMA_NAMES, Family, attention_of, biases_of, decoder_of
from paceline.models.families.rotary import head_dim, plain_rotary, rotary_of, without_positions

_KINDS = {"full_attention", "linear_attention"}
_NO_LIMIT = (0.0, float("inf"))


def _rotary(config: PretrainedConfig) -> Rotary | None:
    """Return the rotary positions; of frequency zero where the model has none."""
    if config.position_embedding_type == "rope":
        return rotary_of(config)
    return without_positions(plain_rotary(1.0, head_dim(config)))


def _mamba(config: PretrainedConfig) -> Mamba2Spec:
    sizes = config.mamba_n_heads, config.mamba_d_head, config.mamba_n_groups, config.mamba_d_state, config.mamba_d_conv
    return Mamba2Spec(*sizes, conv_bias=bool(config.mamba_conv_bias), norm_eps=config.rms_norm_eps)


def _describe(config: PretrainedConfig) -> DecoderSpec | None:
    """Describe a model without experts; None for others, and for one whose steps are limited."""
    rotary, kinds = _rotary(config), set(config.layer_types)
    plain = not config.mamba_proj_bias and config.time_step_limit in (None, _NO_LIMIT)
    if rotary is None or not plain or config.num_local_experts or not {"full_attention"} <= kinds <= _KINDS:
        return None
    if ACTIVATION_NAMES.get(config.hidden_act) != "silu":
        return None
    attention = attention_of(config, rotary=rotary, scale=float(config.attention_multiplier), **biases_of(config))
    mamba, mlp = _mamba(config), MLPSpec(config.shared_intermediate_size)
    mixers = (mamba if kind == "linear_attention" else attention for kind in config.layer_types)
    scales = {"embed_scale": float(config.embedding_multiplier), "logits_scale": 1.0 / float(config.logits_scaling)}
    spec = decoder_of(config, (LayerSpec(mixer, mlp) for mixer in mixers), **scales)
    return without_residual_scale(spec, float(config.residual_multiplier))


_NAMES = {
    **LLAMA_NAMES,
    "layers.{}.mamba.in_proj": "layers.{}.in_proj",
    "layers.{}.mamba.conv1d": "layers.{}.conv",
    "layers.{}.mamba.A_log": "layers.{}.decay_rate.weight",
    "layers.{}.mamba.dt_bias": "layers.{}.step_bias.weight",
    "layers.{}.mamba.D": "layers.{}.skip.weight",
    "layers.{}.mamba.norm": "layers.{}.mamba_norm",
    "layers.{}.mamba.out_proj": "layers.{}.o",
    "layers.{}.shared_mlp.input_linear": "layers.{}.gate_up",
    "layers.{}.shared_mlp.output_linear": "layers.{}.down",
}

_USUAL = {"num_local_experts": 0, "layer_types": [*["linear_attention"] * 31, "full_attention"]}

FAMILY = Family("granitemoehybrid", _describe, WeightNames(_NAMES, prefixes=("model.",)), usual=_USUAL)
