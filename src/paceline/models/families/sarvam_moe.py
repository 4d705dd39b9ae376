"""Sarvam (30B-A3B, 105B-A10B): GLM-4.5's layers under other names in files."""

from __future__ import annotations

from paceline.models.description.weight_names import WeightNames
from paceline.models.families.base import LLAMA_NAMES, Family
from paceline.models.families.glm4_moe import describe
from paceline.models.families.routed import ROUTED

_IN_FILES = {
    "word_embeddings": "embed",
    "layers.{}.attention.query_key_value": "layers.{}.qkv",
    "layers.{}.attention.dense": "layers.{}.o",
    "layers.{}.attention.query_layernorm": "layers.{}.q_norm",
    "layers.{}.attention.key_layernorm": "layers.{}.k_norm",
    "layers.{}.mlp.gate.expert_bias": "layers.{}.router_correction.weight",
}

FAMILY = Family("sarvam_moe", describe, WeightNames({**LLAMA_NAMES, **ROUTED, **_IN_FILES}, prefixes=("model.",)))
