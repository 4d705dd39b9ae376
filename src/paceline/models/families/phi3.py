"""Phi-3 and Phi-4-mini: Llama's layers, with fused matrices and, in Phi-4-mini, a partial rotation."""

from __future__ import annotations

from transformers import PretrainedConfig

from paceline.models.description import DecoderSpec
from paceline.models.families.base import LLAMA_GGUF_NAMES, LLAMA_NAMES, Family, GGUFForm, llama_like
from paceline.models.weight_names import WeightNames


def _describe(config: PretrainedConfig) -> DecoderSpec | None:
    return llama_like(config)


_FUSED = {
    "layers.{}.self_attn.qkv_proj": "layers.{}.qkv",
    "layers.{}.mlp.gate_up_proj": "layers.{}.gate_up",
}
_GGUF_FUSED = {"blk.{}.attn_qkv": "layers.{}.qkv", "blk.{}.ffn_up": "layers.{}.gate_up"}

FAMILY = Family(
    "phi3",
    _describe,
    WeightNames({**LLAMA_NAMES, **_FUSED}, prefixes=("model.",)),
    GGUFForm(
        "phi3",
        WeightNames({**LLAMA_GGUF_NAMES, **_GGUF_FUSED}),
        fields=lambda metadata, _: {"sliding_window": metadata.get("attention.sliding_window")},
        reads=frozenset({"attention.sliding_window"}),
    ),
)
