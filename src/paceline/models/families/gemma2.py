"""Gemma 2: capped scores and logits, windows in turn, four norms a layer, GELU, scaled embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from transformers import PretrainedConfig

from paceline.models.description.spec import DecoderSpec, LayerSpec, MLPSpec, NormPlaces
from paceline.models.description.weight_names import WeightNames
from paceline.models.families.base import (
    ACTIVATION_NAMES,
    GGUF_NORMS_AFTER,
    LLAMA_GGUF_NAMES,
    LLAMA_NAMES,
    NORMS_AFTER,
    Family,
    GGUFForm,
    attention_of,
    biases_of,
    decoder_of,
    windows_of,
)
from paceline.models.families.rotary import rotary_of

_LAYERS_OF_27B = 46  # this size alone scales scores by width / heads instead of the head's width


def _describe(config: PretrainedConfig) -> DecoderSpec | None:
    return None if config.use_bidirectional_attention else describe(config, "both")


def describe(config: PretrainedConfig, norms: NormPlaces) -> DecoderSpec | None:
    """Describe a Gemma 2 with norms in these places."""
    windows, rotary, activation = windows_of(config), rotary_of(config), ACTIVATION_NAMES.get(config.hidden_activation)
    if windows is None or rotary is None or activation is None:
        return None
    scale, cap = config.query_pre_attn_scalar**-0.5, config.attn_logit_softcapping
    attention = attention_of(config, rotary=rotary, scale=scale, cap=cap, **biases_of(config))
    mlp = MLPSpec(config.intermediate_size, activation)
    layers = (LayerSpec(replace(attention, window=window), mlp, norms) for window in windows)
    return decoder_of(config, layers, embed_scale=config.hidden_size**0.5, logits_cap=config.final_logit_softcapping)


def _fields(metadata: Mapping[str, Any], _: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that a GGUF file leaves out because llama.cpp knows them."""
    layers, width, heads = (metadata[key] for key in ("block_count", "embedding_length", "attention.head_count"))
    width_of_head = metadata.get("attention.key_length", width // heads)
    return {
        "query_pre_attn_scalar": width // heads if layers == _LAYERS_OF_27B else width_of_head,
        "sliding_window": metadata.get("attention.sliding_window", 4096),
        "attn_logit_softcapping": metadata.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.get("final_logit_softcapping", 30.0),
    }


PLUS_ONE = frozenset({"norm", "attn_norm", "attn_out_norm", "mlp_norm", "mlp_out_norm"})
NORM_BEFORE_MLP = {"layers.{}.pre_feedforward_layernorm": "layers.{}.mlp_norm"}

FAMILY = Family(
    "gemma2",
    _describe,
    WeightNames({**LLAMA_NAMES, **NORMS_AFTER, **NORM_BEFORE_MLP}, prefixes=("model.",), plus_one=PLUS_ONE),
    GGUFForm(
        ("gemma2",),
        WeightNames({**LLAMA_GGUF_NAMES, **GGUF_NORMS_AFTER}),
        fields=_fields,
        reads=frozenset({"attention.sliding_window", "attn_logit_softcapping", "final_logit_softcapping"}),
    ),
)
