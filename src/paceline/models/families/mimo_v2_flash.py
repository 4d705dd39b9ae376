"""MiMo-V2-Flash: values narrower than keys, windows with sinks and more key heads in most layers, and experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from paceline.models.description.spec import AttentionSpec, DecoderSpec, check
from paceline.models.description.weight_names import WeightNames, ignoring
from paceline.models.families.base import (
    LLAMA_GGUF_NAMES,
    LLAMA_NAMES,
    Family,
    GGUFForm,
    attention_of,
    dense_decoder_of,
    windows_of,
)
from paceline.models.families.rotary import rotary_of
from paceline.models.families.routed import GGUF_ROUTED, ROUTED, routed_fields, with_routed_experts, without_head


def _attention(config: PretrainedConfig, kind: str, window: int | None) -> AttentionSpec | None:
    """Describe the attention of a layer. kind: of ``layer_types``; those with a window have sinks."""
    rotary, has_window = rotary_of(config, kind), window is not None
    if rotary is None:
        return None
    own = {"rotary": rotary, "window": window, "sinks": has_window, "bias": bool(config.attention_bias)}
    value_dim = None if config.v_head_dim == config.head_dim else config.v_head_dim
    attention = attention_of(config, **own, value_dim=value_dim)
    return replace(attention, kv_heads=2 * attention.kv_heads) if has_window else attention


def _describe(config: PretrainedConfig) -> DecoderSpec | None:
    windows = windows_of(config)
    if windows is None:
        return None
    layers = zip(config.layer_types, windows, strict=True)
    attentions = [attention for kind, window in layers if (attention := _attention(config, kind, window)) is not None]
    spec = dense_decoder_of(config, attentions) if len(attentions) == len(windows) else None
    return spec and with_routed_experts(config, spec, [kind == "sparse" for kind in config.mlp_layer_types])


def _factors(config: PretrainedConfig) -> Mapping[str, Tensor]:
    """Return the factor of the values, which the output projection may have as well."""
    scale = config.attention_value_scale
    return {} if scale is None else {"o": torch.tensor([float(scale)])}


def _fields(metadata: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a configuration. Files do not tell which layers have experts: all but the first."""
    fields = routed_fields(metadata, rope)
    layers = fields["num_hidden_layers"]  # lists go on with the draft heads
    near, keys = (metadata[f"attention.{key}"][:layers] for key in ("sliding_window_pattern", "head_count_kv"))
    of_full = min(keys)
    doubled = keys == [2 * of_full if has_window else of_full for has_window in near]
    check(doubled, "attention.head_count_kv must be twice as large in layers with a window as in the others")
    full = {"partial_rotary_factor": 1.0, **rope}
    base = metadata.get("rope.freq_base_swa", full["rope_theta"])
    scale = metadata.get("attention.value_scale")  # older files lack it, and need that of V2-Flash: the default
    return {
        **fields,
        "norm_topk_prob": True,
        "num_key_value_heads": of_full,
        "v_head_dim": metadata["attention.value_length"],
        "sliding_window": metadata["attention.sliding_window"] + 1,  # files count the tokens before a query
        "layer_types": ["sliding_attention" if has_window else "full_attention" for has_window in near],
        "rope_parameters": {
            "full_attention": full,
            "sliding_attention": {**full, "rope_type": "default", "rope_theta": base},
        },
        **({} if scale is None else {"attention_value_scale": scale}),
    }


_SINKS = dict.fromkeys(
    ("layers.{}.self_attn.attention_sink_bias", "layers.{}.self_attn.sinks"), "layers.{}.sinks.weight"
)
_NAMES = WeightNames(
    {**LLAMA_NAMES, **ROUTED, **_SINKS},
    prefixes=("model.",),
    ignored=ignoring(r"model\.mtp\..*"),  # three draft heads, which transformers does not run either
)
_GGUF_NAMES = {
    **LLAMA_GGUF_NAMES,
    **GGUF_ROUTED,
    "blk.{}.attn_qkv": "layers.{}.qkv",
    "blk.{}.attn_sinks": "layers.{}.sinks",
}
_FORM = GGUFForm(
    ("mimo2",),
    WeightNames(_GGUF_NAMES),
    fields=_fields,
    reads=frozenset({"expert_count", "attention.sliding_window"}),
    adapt=without_head,
    factors=_factors,
)
FAMILY = Family("mimo_v2_flash", _describe, _NAMES, _FORM, factors=_factors)
