"""GLM-4 (9B, 2024): neighbours turn together in half of each head, and gate and up are one matrix."""

from __future__ import annotations

from transformers import PretrainedConfig

from paceline.models.description.spec import DecoderSpec
from paceline.models.description.weight_names import WeightNames
from paceline.models.families.base import LLAMA_GGUF_NAMES, LLAMA_NAMES, Family, GGUFForm, llama_like


def _describe(config: PretrainedConfig) -> DecoderSpec | None:
    return llama_like(config, interleaved=True, bias=bool(config.attention_bias))


FUSED = {"layers.{}.mlp.gate_up_proj": "layers.{}.gate_up"}
GGUF_FUSED = {"blk.{}.attn_qkv": "layers.{}.qkv", "blk.{}.ffn_up": "layers.{}.gate_up"}

FAMILY = Family(
    "glm",
    _describe,
    WeightNames({**LLAMA_NAMES, **FUSED}, prefixes=("model.",)),
    GGUFForm(("chatglm",), WeightNames({**LLAMA_GGUF_NAMES, **GGUF_FUSED})),
)
