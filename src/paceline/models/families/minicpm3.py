"""MiniCPM3: latent attention and dense MLPs, with factors of the embedding, the branches and the logits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from transformers import PretrainedConfig

from paceline.models.description.spec import DecoderSpec, without_residual_scale
from paceline.models.description.weight_names import WeightNames
from paceline.models.families.base import Family, GGUFForm
from paceline.models.families.latent import LATENT_NAMES, latent_decoder_of
from paceline.models.families.latent_gguf import LATENT_GGUF_NAMES, latent_fields


def _describe(config: PretrainedConfig) -> DecoderSpec | None:
    spec = latent_decoder_of(config, interleaved=False)
    if spec is None:
        return None
    scaled = replace(spec, embed_scale=float(config.scale_emb), logits_scale=config.dim_model_base / config.hidden_size)
    return without_residual_scale(scaled, config.scale_depth / math.sqrt(config.num_hidden_layers))


def _fields(metadata: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a configuration, with the factors that llama.cpp has for this architecture."""
    usual = metadata["embedding_length"] // metadata["attention.head_count"]
    factors = {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256}
    return latent_fields(metadata, rope) | factors | {"v_head_dim": metadata.get("attention.value_length", usual)}


FAMILY = Family(
    "minicpm3",
    _describe,
    WeightNames(LATENT_NAMES, prefixes=("model.",)),
    GGUFForm(("minicpm3",), WeightNames(LATENT_GGUF_NAMES), fields=_fields),
)
