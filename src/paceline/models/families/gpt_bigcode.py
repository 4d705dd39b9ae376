"""GPT-BigCode (StarCoder 1, SantaCoder): GPT-2 with one key head."""

from __future__ import annotations

from dataclasses import replace

from transformers import PretrainedConfig

from paceline.models.description.spec import DecoderSpec
from paceline.models.families.base import Family, GGUFForm
from paceline.models.families.gpt2 import GGUF_NAMES, NAMES, describe, gguf_fields


def _describe(config: PretrainedConfig) -> DecoderSpec | None:
    return describe(config, kv_heads=1) if config.multi_query else None


FAMILY = Family(
    "gpt_bigcode",
    _describe,
    replace(NAMES, transposed=frozenset()),
    GGUFForm(("starcoder",), GGUF_NAMES, fields=gguf_fields),
)
