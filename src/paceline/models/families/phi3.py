"""Phi-3 and Phi-4-mini: Llama's layers, with fused matrices and, in Phi-4-mini, a partial rotation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from paceline.models.description.spec import DecoderSpec
from paceline.models.description.weight_names import WeightNames
from paceline.models.families.base import LLAMA_GGUF_NAMES, LLAMA_NAMES, Family, GGUFForm, llama_like


def _describe(config: PretrainedConfig) -> DecoderSpec | None:
    return llama_like(config)


_OLD_WINDOW = 2047  # of the models for 4096 positions, whose older files lack the key: as in llama.cpp


def _fields(metadata: Mapping[str, Any], _: Mapping[str, Any]) -> dict[str, Any]:
    """Return the window. A stored 0 is none: Phi-4, whose files are of this architecture, has full attention."""
    is_short = metadata["block_count"] in (32, 40) and metadata["context_length"] == 4096
    return {"sliding_window": metadata.get("attention.sliding_window", _OLD_WINDOW if is_short else 0) or None}


_FUSED = {"layers.{}.self_attn.qkv_proj": "layers.{}.qkv", "layers.{}.mlp.gate_up_proj": "layers.{}.gate_up"}
_GGUF_FUSED = {"blk.{}.attn_qkv": "layers.{}.qkv", "blk.{}.ffn_up": "layers.{}.gate_up"}

FAMILY = Family(
    "phi3",
    _describe,
    WeightNames({**LLAMA_NAMES, **_FUSED}, prefixes=("model.",)),
    GGUFForm(
        ("phi3",),
        WeightNames({**LLAMA_GGUF_NAMES, **_GGUF_FUSED}),
        fields=_fields,
        reads=frozenset({"attention.sliding_window"}),
        strips=True,
    ),
)
