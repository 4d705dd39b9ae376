"""nanochat: norms without weights, heads that turn backwards, a norm behind the embedding, and capped logits."""

from __future__ import annotations

from dataclasses import replace

from transformers import PretrainedConfig

from paceline.models.description.spec import DecoderSpec, NormSpec
from paceline.models.description.weight_names import WeightNames
from paceline.models.families.base import LLAMA_NAMES, Family, biases_of, plain_like
from paceline.models.families.rotary import backwards


def _describe(config: PretrainedConfig) -> DecoderSpec | None:
    norm = NormSpec("rms", config.rms_norm_eps, affine=False)
    spec = plain_like(config, norm=norm, qk_norm="head", qk_affine=False, **biases_of(config))
    if spec is None:
        return None
    layers = tuple(replace(layer, mixer=backwards(layer.attention)) for layer in spec.layers)
    return replace(spec, layers=layers, embed_norm=True, logits_cap=config.final_logit_softcapping)


_MLP = {"layers.{}.mlp.fc1": "layers.{}.up", "layers.{}.mlp.fc2": "layers.{}.down"}

FAMILY = Family("nanochat", _describe, WeightNames({**LLAMA_NAMES, **_MLP}, prefixes=("model.",)))
