"""Falcon-H1: attention and Mamba-2 side by side in every layer, and constants that multiply most matrices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from paceline.models.description.spec import DecoderSpec, LayerSpec, MLPSpec
from paceline.models.description.weight_names import WeightNames
from paceline.models.description.weights import BESIDE
from paceline.models.families import mamba2
from paceline.models.families.base import (
    LLAMA_GGUF_NAMES,
    LLAMA_NAMES,
    Family,
    GGUFForm,
    attention_of,
    decoder_of,
)
from paceline.models.families.rotary import rotary_of


def _describe(config: PretrainedConfig) -> DecoderSpec | None:
    """Describe a model; None for one with biases of matrices, or with the norm of Mamba-2 before its gate."""
    rotary, mamba = rotary_of(config), mamba2.mamba_of(config)
    biased = config.attention_bias or config.mlp_bias or config.projectors_bias
    norm_first = config.mamba_rms_norm and config.mamba_norm_before_gate
    if rotary is None or mamba is None or biased or norm_first or config.hidden_act != "silu":
        return None
    layer = LayerSpec(attention_of(config, rotary=rotary), MLPSpec(config.intermediate_size), beside=mamba)
    scales = {"embed_scale": float(config.embedding_multiplier), "logits_scale": float(config.lm_head_multiplier)}
    return decoder_of(config, [layer] * config.num_hidden_layers, **scales)


def _factors(config: PretrainedConfig) -> dict[str, Tensor]:
    """Return the factors of the matrices in safetensors files; GGUF files have matrices that are multiplied."""
    own, shared = config.mamba_n_heads * config.mamba_d_head, config.mamba_n_groups * config.mamba_d_state
    rows = torch.tensor([own, own, shared, shared, config.mamba_n_heads])  # gates, x, B, C and steps
    gate, down = config.mlp_multipliers
    numbers = {
        "q": config.attention_in_multiplier,
        "k": config.attention_in_multiplier * config.key_multiplier,
        "v": config.attention_in_multiplier,
        "o": config.attention_out_multiplier,
        f"{BESIDE}o": config.ssm_out_multiplier,
        "gate": gate,
        "down": down,
    }
    in_proj = torch.tensor(config.ssm_multipliers).repeat_interleave(rows) * config.ssm_in_multiplier
    return {name: torch.tensor([float(number)]) for name, number in numbers.items()} | {f"{BESIDE}in_proj": in_proj}


def _beside(names: Mapping[str, str]) -> dict[str, str]:
    return {theirs: ours.replace("layers.{}.", f"layers.{{}}.{BESIDE}") for theirs, ours in names.items()}


_NAMES = {
    **{name: ours for name, ours in LLAMA_NAMES.items() if not name.startswith(("norm", "layers.{}.mlp."))},
    **_beside(mamba2.MAMBA),
    "final_layernorm": "norm",
    "layers.{}.pre_ff_layernorm": "layers.{}.mlp_norm",
    **{f"layers.{{}}.feed_forward.{part}_proj": f"layers.{{}}.{part}" for part in ("gate", "up", "down")},
}


def _fields(metadata: Mapping[str, Any], _: Mapping[str, Any]) -> dict[str, Any]:
    return mamba2.gguf_sizes(metadata) | {"mamba_d_ssm": metadata["ssm.inner_size"], "mamba_norm_before_gate": False}


_GGUF_NAMES = {**_beside(mamba2.GGUF_STATES), **LLAMA_GGUF_NAMES}
_FORM = GGUFForm(("falcon-h1",), WeightNames(_GGUF_NAMES), fields=_fields, adapt=mamba2.gguf_adapt)

FAMILY = Family("falcon_h1", _describe, WeightNames(_NAMES, prefixes=("model.",)), _FORM, factors=_factors)
