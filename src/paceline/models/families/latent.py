"""What families with latent attention (MLA) have in common: DeepSeek's names and fields."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from paceline.models.description.spec import AttentionSpec, DecoderSpec, LatentSpec
from paceline.models.families.base import LLAMA_NAMES, dense_decoder_of, with_experts
from paceline.models.families.rotary import rotary_of
from paceline.models.families.routed import after_dense_layers

NORM_EPS = 1e-6  # of the norms within attention, whatever the configuration gives for the others

LATENT_NAMES: Mapping[str, str] = {
    **{theirs: ours for theirs, ours in LLAMA_NAMES.items() if not theirs.endswith(("k_proj", "v_proj", "_norm"))},
    "layers.{}.self_attn.q_a_proj": "layers.{}.q_a",
    "layers.{}.self_attn.q_a_layernorm": "layers.{}.q_a_norm",
    "layers.{}.self_attn.q_b_proj": "layers.{}.q_b",
    "layers.{}.self_attn.kv_a_proj_with_mqa": "layers.{}.kv_a",
    "layers.{}.self_attn.kv_a_layernorm": "layers.{}.kv_a_norm",
    "layers.{}.self_attn.kv_b_proj": "layers.{}.kv_b",
}
"""Names of a decoder with latent attention and dense MLPs."""


def latent_decoder_of(config: PretrainedConfig, *, interleaved: bool) -> DecoderSpec | None:
    """Describe a decoder with latent attention and dense MLPs; None if a part of it is not supported.

    interleaved: see ``AttentionSpec``.
    """
    attention = _attention_of(config, interleaved=interleaved)
    return None if attention is None else dense_decoder_of(config, [attention] * config.num_hidden_layers)


def with_softmax_experts(config: PretrainedConfig, spec: DecoderSpec | None, **routing: Any) -> DecoderSpec | None:
    """Return the decoder with experts that a softmax scores behind the first dense layers, beside an MLP.

    routing: fields of ``ExpertsSpec``.
    """
    sizes = config.n_routed_experts, config.num_experts_per_tok, config.moe_intermediate_size
    beside, scale = config.moe_intermediate_size * config.n_shared_experts, float(config.routed_scaling_factor)
    sparse = after_dense_layers(config)
    return spec and with_experts(spec, sizes, beside=beside, sparse=sparse, output_scale=scale, **routing)


def _attention_of(config: PretrainedConfig, *, interleaved: bool) -> AttentionSpec | None:
    """Describe the attention of every layer; None if its positions or biases are not supported."""
    rotary = rotary_of(config)
    if rotary is None or (config.attention_bias and config.q_lora_rank is None):  # then a part of a matrix has a bias
        return None
    latent = LatentSpec(
        rank=config.kv_lora_rank,
        rotary_dim=config.qk_rope_head_dim,
        key_dim=config.qk_nope_head_dim,
        value_dim=config.v_head_dim,
        query_rank=config.q_lora_rank,
        norm_eps=NORM_EPS,
    )
    return AttentionSpec(
        config.num_attention_heads,
        1,
        latent.rotary_dim + latent.rank,
        rotary=rotary,
        scale=latent.query_dim**-0.5 * _yarn_scale(config),
        bias=bool(config.attention_bias),
        output_bias=bool(config.attention_bias),
        interleaved=interleaved,
        latent=latent,
    )


def _yarn_scale(config: PretrainedConfig) -> float:
    """Factor of the scores with rotary scaling: the square of yarn's ``mscale`` with ``mscale_all_dim``."""
    rope = config.rope_parameters
    if rope.get("rope_type", "default") == "default" or not rope.get("mscale_all_dim") or rope["factor"] <= 1:
        return 1.0
    return float((0.1 * rope["mscale_all_dim"] * math.log(rope["factor"]) + 1.0) ** 2)
