"""Phi-3.5-MoE: layer norms, and two experts a token, each weighed among those that come close to it."""

from __future__ import annotations

from dataclasses import replace

from transformers import PretrainedConfig

from paceline.models.description.spec import DecoderSpec, NormSpec
from paceline.models.description.weight_names import WeightNames
from paceline.models.families.base import (
    EXPERTS,
    LLAMA_NAMES,
    W_EXPERTS,
    Family,
    biases_of,
    llama_like,
    with_experts,
)

_USED = 2  # whatever num_experts_per_tok says


def _describe(config: PretrainedConfig) -> DecoderSpec | None:
    spec = llama_like(config, norm=NormSpec("layer", config.rms_norm_eps), **biases_of(config))
    if spec is None:
        return None
    spec = replace(spec, head_bias=bool(config.lm_head_bias))
    if config.rope_parameters["rope_type"] != "default":  # the length of heads is scaled by a number of its own
        rotary = spec.attentions[0].rotary
        assert rotary is not None, "llama_like has read it"
        scaled = replace(rotary, scaling=float(config.rope_parameters["short_mscale"]))
        layers = (replace(layer, mixer=replace(layer.attention, rotary=scaled)) for layer in spec.layers)
        spec = replace(spec, layers=tuple(layers))
    sizes = config.num_local_experts, _USED, config.intermediate_size
    return with_experts(spec, sizes, margin=2 * config.router_jitter_noise)


_ROUTER = {"layers.{}.mlp.router": "layers.{}.router"}

FAMILY = Family(
    "phimoe", _describe, WeightNames({**LLAMA_NAMES, **EXPERTS, **W_EXPERTS, **_ROUTER}, prefixes=("model.",))
)
