"""MiMo-V2-Flash: values narrower than keys, windows with sinks and more key heads in most layers, and experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PretrainedConfig

from paceline.models.description.spec import AttentionSpec, DecoderSpec
from paceline.models.description.weight_names import WeightNames, ignoring
from paceline.models.families.base import LLAMA_NAMES, Family, attention_of, dense_decoder_of, windows_of
from paceline.models.families.rotary import rotary_of
from paceline.models.families.routed import ROUTED, with_routed_experts


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


_SINKS = dict.fromkeys(
    ("layers.{}.self_attn.attention_sink_bias", "layers.{}.self_attn.sinks"), "layers.{}.sinks.weight"
)
_NAMES = WeightNames(
    {**LLAMA_NAMES, **ROUTED, **_SINKS},
    prefixes=("model.",),
    ignored=ignoring(r"model\.mtp\..*"),  # three draft heads, which transformers does not run either
)
FAMILY = Family("mimo_v2_flash", _describe, _NAMES, factors=_factors)
