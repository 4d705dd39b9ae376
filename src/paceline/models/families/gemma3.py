"""Gemma 3, the text model: windows and two rotary bases in turn, four norms a layer, GELU, scaled embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from transformers import PretrainedConfig

from paceline.models.description.spec import DecoderSpec, LayerSpec, MLPSpec
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

_LAYERS_OF_27B = 62  # this size alone scales scores by width / heads instead of the head's width


def _describe(config: PretrainedConfig) -> DecoderSpec | None:
    windows, activation = windows_of(config), ACTIVATION_NAMES.get(config.hidden_activation)
    both = [rotary_of(config, kind) for kind in ("sliding_attention", "full_attention")]
    if windows is None or activation is None or None in both or _asks_for_more(config):
        return None
    near, far = (
        attention_of(
            config, rotary=rotary, scale=config.query_pre_attn_scalar**-0.5, qk_norm="head", **biases_of(config)
        )
        for rotary in both
    )
    near, mlp = replace(near, window=config.sliding_window), MLPSpec(config.intermediate_size, activation)
    layers = (LayerSpec(far if window is None else near, mlp, "both") for window in windows)
    scale, cap = config.hidden_size**0.5, config.final_logit_softcapping
    return decoder_of(config, layers, embed_scale=scale, logits_cap=cap)


def _asks_for_more(config: PretrainedConfig) -> bool:
    return bool(config.attn_logit_softcapping or config.use_bidirectional_attention)


def _fields(metadata: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that a GGUF file leaves out because llama.cpp knows them."""
    layers, width, heads = (metadata[key] for key in ("block_count", "embedding_length", "attention.head_count"))
    width_of_head = metadata.get("attention.key_length", width // heads)
    return {
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": metadata.get("rope.freq_base_swa", 10000.0)},
            "full_attention": dict(rope),
        },
        "query_pre_attn_scalar": width // heads if layers == _LAYERS_OF_27B else width_of_head,
        "sliding_window": metadata["attention.sliding_window"],
        "final_logit_softcapping": metadata.get("final_logit_softcapping") or None,
    }


_NORMS = {**NORMS_AFTER, "layers.{}.pre_feedforward_layernorm": "layers.{}.mlp_norm"}
_PLUS_ONE = frozenset({"norm", "attn_norm", "attn_out_norm", "mlp_norm", "mlp_out_norm", "q_norm", "k_norm"})

FAMILY = Family(
    "gemma3_text",
    _describe,
    WeightNames(
        {**LLAMA_NAMES, **_NORMS},
        prefixes=("model.",),
        plus_one=_PLUS_ONE,
    ),
    GGUFForm(
        ("gemma3",),
        WeightNames({**LLAMA_GGUF_NAMES, **GGUF_NORMS_AFTER}),
        fields=_fields,
        reads=frozenset({"attention.sliding_window", "final_logit_softcapping"}),
    ),
)
