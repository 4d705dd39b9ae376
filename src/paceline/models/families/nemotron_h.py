"""Nemotron-H, Nemotron 3 Nano and Super: layers are Mamba-2, attention without positions, an MLP, or experts alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from paceline.models.description.spec import (
    AttentionSpec,
    DecoderSpec,
    ExpertsSpec,
    LayerSpec,
    Mamba2Spec,
    MLPSpec,
    NormSpec,
    check,
)
from paceline.models.description.weight_names import OWN_HEAD, WeightNames
from paceline.models.description.weights import StoredTensor
from paceline.models.families import mamba2
from paceline.models.families.base import Family, GGUFForm, decoder_of
from paceline.models.families.rotary import plain_rotary, without_positions
from paceline.models.families.routed import without_head

_ACTIVATION = "relu2"


def _layers_of(config: PretrainedConfig) -> dict[str, LayerSpec]:
    """Return what a layer of each kind is."""
    eps, bias = config.layer_norm_epsilon, bool(config.mlp_bias)
    sizes = config.mamba_num_heads, config.mamba_head_dim, config.n_groups, config.ssm_state_size, config.conv_kernel
    least = float(config.time_step_min)
    mamba = Mamba2Spec(*sizes, conv_bias=bool(config.use_conv_bias), norm_eps=eps, least_step=least)
    rotary = without_positions(plain_rotary(1.0, config.head_dim))
    attention = AttentionSpec(config.num_attention_heads, config.num_key_value_heads, config.head_dim, rotary=rotary)
    experts = ExpertsSpec(
        config.n_routed_experts,
        config.num_experts_per_tok,
        MLPSpec(config.moe_intermediate_size, _ACTIVATION, gated=False),
        normalised=config.norm_topk_prob,
        sigmoid=True,
        groups=config.n_group,
        used_groups=config.topk_group,
        correction=True,
        output_scale=float(config.routed_scaling_factor),
        latent=config.moe_latent_size,
        shared=MLPSpec(config.moe_shared_expert_intermediate_size, _ACTIVATION, gated=False, bias=bias),
    )
    dense = MLPSpec(config.intermediate_size, _ACTIVATION, gated=False, bias=bias)
    return {
        "linear_attention": LayerSpec(mamba, None, "one_part"),
        "full_attention": LayerSpec(attention, None, "one_part"),
        "mlp": LayerSpec(None, dense, "one_part"),
        "moe": LayerSpec(None, experts, "one_part"),
    }


def _describe(config: PretrainedConfig) -> DecoderSpec | None:
    """Describe a model; None for one with biases of matrices, or another activation."""
    plain = config.mlp_hidden_act == _ACTIVATION and config.mamba_hidden_act == "silu" and not config.use_bias
    biased = config.mlp_bias and config.moe_latent_size is not None
    if not plain or biased or "full_attention" not in config.layer_types:
        return None
    of_kind = _layers_of(config)
    norm = NormSpec("rms", config.layer_norm_epsilon)
    return decoder_of(config, (of_kind[kind] for kind in config.layer_types), norm=norm)


_MIXER = {name.replace("mamba.", "mixer."): ours for name, ours in mamba2.MAMBA.items()}
_NAMES = {
    "embeddings": "embed",
    "embed_tokens": "embed",
    "norm_f": "norm",
    "lm_head": "head",
    "layers.{}.norm": "layers.{}.attn_norm",
    **_MIXER,
    **{f"layers.{{}}.mixer.{part}_proj": f"layers.{{}}.{part}" for part in ("q", "k", "v", "o", "up", "down")},
    "layers.{}.mixer.gate": "layers.{}.router",
    "layers.{}.mixer.gate.e_score_correction_bias": "layers.{}.router_correction.weight",
    "layers.{}.mixer.experts.{}.up_proj": "layers.{}.expert.{}.up",
    "layers.{}.mixer.experts.{}.down_proj": "layers.{}.expert.{}.down",
    "layers.{}.mixer.experts.up_proj": "layers.{}.experts_up.weight",
    "layers.{}.mixer.experts.down_proj": "layers.{}.experts_down.weight",
    "layers.{}.mixer.fc1_latent_proj": "layers.{}.latent_in",
    "layers.{}.mixer.fc2_latent_proj": "layers.{}.latent_out",
    "layers.{}.mixer.shared_experts.up_proj": "layers.{}.up",
    "layers.{}.mixer.shared_experts.down_proj": "layers.{}.down",
}


def _fields(metadata: Mapping[str, Any], _: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of layers: those without key heads and without an inner width are Mamba-2."""
    keys, inner = metadata["attention.head_count_kv"], metadata["feed_forward_length"]
    lists = isinstance(keys, list) and isinstance(inner, list)
    check(lists, "attention.head_count_kv and feed_forward_length must tell the kinds of the layers")
    layers = metadata["block_count"] - metadata.get("nextn_predict_layers", 0)
    keys, inner = keys[:layers], inner[:layers]  # lists go on with the draft head
    mlp = "moe" if metadata.get("expert_count") else "mlp"
    states = mamba2.gguf_fields(metadata)
    own = {
        "num_hidden_layers": layers,
        "num_key_value_heads": states["num_key_value_heads"],
        "layers_block_type": [
            "full_attention" if heads else mlp if width else "linear_attention"
            for heads, width in zip(keys, inner, strict=True)
        ],
        "intermediate_size": max(int(width) for width in inner),
        "layer_norm_epsilon": metadata["attention.layer_norm_rms_epsilon"],
        "mamba_num_heads": states["mamba_n_heads"],
        "mamba_head_dim": states["mamba_d_head"],
        "n_groups": states["mamba_n_groups"],
        "ssm_state_size": states["mamba_d_state"],
        "conv_kernel": states["mamba_d_conv"],
    }
    return own | (_expert_fields(metadata) if mlp == "moe" else {})


def _expert_fields(metadata: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "n_routed_experts": metadata["expert_count"],
        "num_experts_per_tok": metadata["expert_used_count"],
        "moe_intermediate_size": metadata["expert_feed_forward_length"],
        "moe_shared_expert_intermediate_size": metadata["expert_shared_feed_forward_length"],
        "norm_topk_prob": metadata.get("expert_weights_norm", True),
        "routed_scaling_factor": metadata.get("expert_weights_scale", 1.0),
        "n_group": metadata.get("expert_group_count", 1),
        "moe_latent_size": metadata.get("moe_latent_size"),
    }


def _adapt(tensors: Mapping[str, StoredTensor], spec: DecoderSpec) -> Mapping[str, StoredTensor]:
    return mamba2.gguf_adapt(without_head(tensors, spec), spec)


_GGUF_NAMES = {
    **mamba2.GGUF_NAMES,
    "blk.{}.ffn_gate_inp": "layers.{}.router",
    "blk.{}.exp_probs_b.bias": "layers.{}.router_correction.weight",
    "blk.{}.ffn_up_exps": "layers.{}.experts_up",
    "blk.{}.ffn_down_exps": "layers.{}.experts_down",
    "blk.{}.ffn_latent_down": "layers.{}.latent_in",
    "blk.{}.ffn_latent_up": "layers.{}.latent_out",
    "blk.{}.ffn_up_shexp": "layers.{}.up",
    "blk.{}.ffn_down_shexp": "layers.{}.down",
}
_FORM = GGUFForm(
    ("nemotron_h", "nemotron_h_moe"),
    WeightNames(_GGUF_NAMES),
    fields=_fields,
    reads=frozenset({"expert_count"}),
    paired=True,
    adapt=_adapt,
)
FAMILY = Family("nemotron_h", _describe, WeightNames(_NAMES, prefixes=("model.", "backbone."), ignored=OWN_HEAD), _FORM)
