"""Granite with windows (SWA): Granite's multipliers, attention sinks, and rotary bases by layer."""

from __future__ import annotations

from dataclasses import replace

from transformers import PretrainedConfig

from paceline.models.description.spec import DecoderSpec
from paceline.models.description.weight_names import WeightNames
from paceline.models.families import granite
from paceline.models.families.base import LLAMA_NAMES, Family
from paceline.models.families.rotary import rotary_of, with_rope


def describe(config: PretrainedConfig) -> DecoderSpec | None:
    """Describe a dense Granite with windows; also the part that one with experts shares with it."""
    spec, rope = granite.describe(config), config.rope_parameters
    if spec is None:
        return None
    rotaries = {
        base: rotary_of(with_rope(config, **{**rope, "rope_theta": base})) if base else None
        for base in config.layer_rope_theta
    }
    layers = (
        replace(layer, mixer=replace(layer.attention, sinks=True, rotary=rotaries[base]))
        for layer, base in zip(spec.layers, config.layer_rope_theta, strict=True)
    )
    return replace(spec, layers=tuple(layers))


SINKS = {"layers.{}.self_attn.sinks": "layers.{}.sinks.weight"}

FAMILY = Family("granite_swa", describe, WeightNames({**LLAMA_NAMES, **SINKS}, prefixes=("model.",)))
