"""Phi 1 to 2: attention and an MLP without a gate side by side behind one layer norm, and biases everywhere."""

from __future__ import annotations

from dataclasses import replace

from transformers import PretrainedConfig

from paceline.models.description.spec import DecoderSpec, NormSpec
from paceline.models.description.weight_names import WeightNames
from paceline.models.families.base import (
    LLAMA_GGUF_NAMES,
    LLAMA_NAMES,
    Family,
    GGUFForm,
    llama_like,
    plain_mlp,
    with_one_norm,
)


def _describe(config: PretrainedConfig) -> DecoderSpec | None:
    mlp = plain_mlp(config, config.hidden_act, bias=True)
    if mlp is None or config.qk_layernorm:
        return None
    norm = NormSpec("layer", config.layer_norm_eps)
    spec = with_one_norm(llama_like(config, norm=norm, mlp=mlp, bias=True, output_bias=True))
    return spec and replace(spec, head_bias=True)


_NAMES = {
    "layers.{}.self_attn.dense": "layers.{}.o",
    "layers.{}.mlp.fc1": "layers.{}.up",
    "layers.{}.mlp.fc2": "layers.{}.down",
    "final_layernorm": "norm",
}

FAMILY = Family(
    "phi",
    _describe,
    WeightNames({**LLAMA_NAMES, **_NAMES}, prefixes=("model.",)),
    GGUFForm(("phi2",), WeightNames({**LLAMA_GGUF_NAMES, "blk.{}.attn_qkv": "layers.{}.qkv"})),
)
