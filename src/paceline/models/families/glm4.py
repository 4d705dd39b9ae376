"""GLM-4 0414 (9B, 32B) and GLM-Z1: GLM-4 with norms after each part, too."""

from __future__ import annotations

from transformers import PretrainedConfig

from paceline.models.description.spec import DecoderSpec
from paceline.models.description.weight_names import WeightNames
from paceline.models.families.base import (
    GGUF_NORMS_AFTER,
    LLAMA_GGUF_NAMES,
    LLAMA_NAMES,
    Family,
    GGUFForm,
    llama_like,
)
from paceline.models.families.glm import FUSED, GGUF_FUSED


def _describe(config: PretrainedConfig) -> DecoderSpec | None:
    has_biases = getattr(config, "attention_bias", config.model_type == "glm4v_text")  # GLM-OCR has none
    return llama_like(config, "both", interleaved=True, bias=bool(has_biases))


NORMS = {
    "layers.{}.post_self_attn_layernorm": "layers.{}.attn_out_norm",
    "layers.{}.post_mlp_layernorm": "layers.{}.mlp_out_norm",
}

FAMILY = Family(
    "glm4",
    _describe,
    WeightNames({**LLAMA_NAMES, **FUSED, **NORMS}, prefixes=("model.",)),
    GGUFForm(("glm4",), WeightNames({**LLAMA_GGUF_NAMES, **GGUF_FUSED, **GGUF_NORMS_AFTER})),
    other_types=("glm4v_text", "glm_ocr_text"),
)
