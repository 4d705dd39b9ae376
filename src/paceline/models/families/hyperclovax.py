"""HyperCLOVA X SEED: Granite's multipliers, also of logits, which Granite divides, and norms after each part, too."""

from __future__ import annotations

from dataclasses import replace

from transformers import PretrainedConfig

from paceline.models.description.spec import DecoderSpec
from paceline.models.description.weight_names import WeightNames
from paceline.models.families import granite
from paceline.models.families.base import LLAMA_NAMES, Family


def _describe(config: PretrainedConfig) -> DecoderSpec | None:
    spec = granite.describe(config)
    if spec is None:
        return None
    spec = replace(spec, logits_scale=float(config.logits_scaling))
    if not config.use_post_norm:
        return spec
    if config.residual_multiplier != 1.0:  # the norms' epsilon hides what a factor behind them changes
        return None
    return replace(spec, layers=tuple(replace(layer, norms="both") for layer in spec.layers))


_NORMS = {"layers.{}.post_norm1": "layers.{}.attn_out_norm", "layers.{}.post_norm2": "layers.{}.mlp_out_norm"}

FAMILY = Family("hyperclovax", _describe, WeightNames({**LLAMA_NAMES, **_NORMS}, prefixes=("model.",)))
