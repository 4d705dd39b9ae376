"""GPT-J: attention and an MLP without a gate side by side behind one layer norm; neighbours turn together."""

from __future__ import annotations

from transformers import PretrainedConfig

from paceline.models.description.spec import AttentionSpec, DecoderSpec, LayerSpec, MLPSpec, NormSpec
from paceline.models.description.weight_names import WeightNames, ignoring
from paceline.models.families.base import ACTIVATION_NAMES, Family
from paceline.models.families.rotary import plain_rotary


def _describe(config: PretrainedConfig) -> DecoderSpec | None:
    activation, heads = ACTIVATION_NAMES.get(config.activation_function), config.n_head
    if activation is None:
        return None
    width = config.n_embd // heads
    rotary = plain_rotary(10000.0, config.rotary_dim or width)
    attention = AttentionSpec(heads, heads, width, rotary=rotary, interleaved=True)
    mlp = MLPSpec(config.n_inner or 4 * config.n_embd, activation, gated=False, bias=True)
    return DecoderSpec(
        family="gptj",
        vocab_size=config.vocab_size,
        width=config.n_embd,
        max_positions=config.n_positions,
        layers=(LayerSpec(attention, mlp, "parallel", one_norm=True),) * config.n_layer,
        norm=NormSpec("layer", config.layer_norm_epsilon),
        embed_width=config.n_embd,
        head_bias=True,
        tied=bool(config.tie_word_embeddings),
    )


_NAMES = WeightNames(
    {
        "wte": "embed",
        "ln_f": "norm",
        "lm_head": "head",
        "h.{}.ln_1": "layers.{}.attn_norm",
        **{f"h.{{}}.attn.{part}_proj": f"layers.{{}}.{part}" for part in ("q", "k", "v")},
        "h.{}.attn.out_proj": "layers.{}.o",
        "h.{}.mlp.fc_in": "layers.{}.up",
        "h.{}.mlp.fc_out": "layers.{}.down",
    },
    prefixes=("transformer.",),
    ignored=ignoring(r".*\.attn\.(masked_)?bias"),
)

FAMILY = Family("gptj", _describe, _NAMES)
