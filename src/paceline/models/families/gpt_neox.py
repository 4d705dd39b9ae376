"""GPT-NeoX and Pythia: attention and an MLP without a gate side by side behind a layer norm each, and biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from paceline.models.description.spec import DecoderSpec, NormPlaces, NormSpec
from paceline.models.description.weight_names import WeightNames, ignoring
from paceline.models.families.base import LLAMA_GGUF_NAMES, Family, GGUFForm, biases_of, llama_like, plain_mlp


def _describe(config: PretrainedConfig) -> DecoderSpec | None:
    mlp, norm = plain_mlp(config, config.hidden_act, bias=True), NormSpec("layer", config.layer_norm_eps)
    places: NormPlaces = "parallel" if config.use_parallel_residual else "before"
    return None if mlp is None else llama_like(config, places, norm=norm, mlp=mlp, **biases_of(config))


def _fields(metadata: Mapping[str, Any], _: Mapping[str, Any]) -> dict[str, Any]:
    return {"use_parallel_residual": metadata.get("use_parallel_residual", True)}


_NAMES = WeightNames(
    {
        "embed_in": "embed",
        "final_layer_norm": "norm",
        "lm_head": "head",
        "embed_out": "head",
        "layers.{}.input_layernorm": "layers.{}.attn_norm",
        "layers.{}.post_attention_layernorm": "layers.{}.mlp_norm",
        "layers.{}.attention.query_key_value": "layers.{}.qkv",
        "layers.{}.attention.dense": "layers.{}.o",
        "layers.{}.mlp.dense_h_to_4h": "layers.{}.up",
        "layers.{}.mlp.dense_4h_to_h": "layers.{}.down",
    },
    prefixes=("gpt_neox.",),
    ignored=ignoring(r".*\.attention\.(masked_)?bias"),
    by_head=frozenset({"qkv"}),
)

FAMILY = Family(
    "gpt_neox",
    _describe,
    _NAMES,
    GGUFForm(("gptneox",), WeightNames({**LLAMA_GGUF_NAMES, "blk.{}.attn_qkv": "layers.{}.qkv"}), fields=_fields),
)
