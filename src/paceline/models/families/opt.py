"""OPT: learned positions, layer norms, a plain MLP."""

from __future__ import annotations

from transformers import PretrainedConfig

from paceline.models.description.spec import AttentionSpec, DecoderSpec, LayerSpec, MLPSpec, NormSpec
from paceline.models.description.weight_names import WeightNames
from paceline.models.families.base import ACTIVATION_NAMES, Family


def _describe(config: PretrainedConfig) -> DecoderSpec | None:
    activation = ACTIVATION_NAMES.get(config.activation_function)
    if activation is None:
        return None
    first, biased = bool(config.do_layer_norm_before), bool(config.enable_bias)
    heads = config.num_attention_heads
    attention = AttentionSpec(heads, heads, config.hidden_size // heads, bias=biased, output_bias=biased)
    mlp = MLPSpec(config.ffn_dim, activation, gated=False, bias=biased)
    return DecoderSpec(
        family="opt",
        vocab_size=config.vocab_size,
        width=config.hidden_size,
        max_positions=config.max_position_embeddings,
        layers=(LayerSpec(attention, mlp, "before" if first else "after_sum"),) * config.num_hidden_layers,
        norm=NormSpec("layer", 1e-5, affine=bool(config.layer_norm_elementwise_affine)),
        embed_width=config.word_embed_proj_dim,
        final_norm=first and not config._remove_final_layer_norm,
        learned_positions=True,
        position_offset=2,
        tied=bool(config.tie_word_embeddings),
    )


_NAMES = WeightNames(
    {
        "embed_tokens": "embed",
        "embed_positions": "positions",
        "project_in": "project_in",
        "project_out": "project_out",
        "final_layer_norm": "norm",
        "lm_head": "head",
        "layers.{}.self_attn_layer_norm": "layers.{}.attn_norm",
        "layers.{}.self_attn.q_proj": "layers.{}.q",
        "layers.{}.self_attn.k_proj": "layers.{}.k",
        "layers.{}.self_attn.v_proj": "layers.{}.v",
        "layers.{}.self_attn.out_proj": "layers.{}.o",
        "layers.{}.final_layer_norm": "layers.{}.mlp_norm",
        "layers.{}.fc1": "layers.{}.up",
        "layers.{}.fc2": "layers.{}.down",
    },
    prefixes=("model.decoder.", "decoder."),
)

FAMILY = Family("opt", _describe, _NAMES)
