"""Multimodal checkpoints, whose text part is a decoder of a family: the other parts are neither read nor run.

A text without images or sounds has the same position on every rotary axis (``mrope_section``), so it is computed as by
the family itself.
"""

from __future__ import annotations

import re
from dataclasses import replace

from paceline.models.description.weight_names import WeightNames

WRAPPERS = frozenset(
    {
        *("exaone4_5", "gemma3", "gemma4", "gemma4_unified", "granite4_vision", "idefics3", "internvl", "lfm2_vl"),
        *("kimi_k25", "lfm3_vl", "nemotron_h_omni"),
        *(
            "llava",
            "llava_next",
            "llava_onevision",
            "minicpm_ocr",
            "minicpmv4_6",
            "minicpmv4_7",
            "mistral3",
            "qwen2_vl",
            "qwen2_5_vl",
        ),
        *("qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe", "smolvlm"),
        *("got_ocr2", "lighton_ocr", "ovis2", "video_llama_3", "video_llava", "vipllava", "llava_next_video", "aria"),
        *("idefics2", "janus", "deepseek_vl", "deepseek_vl_hybrid", "pp_chart2table", "moss_transcribe_diarize"),
        *("hyperclovax_vision_v2", "glm4v", "glm46v", "glm4v_moe", "glm_ocr"),
    }
)
"""model_type of the configurations whose text part was compared with transformers' own answers to texts."""

_PREFIXES = tuple(
    f"{whole}{part}.{model}"
    for whole in ("model.", "")
    for part in ("language_model", "text_model")
    for model in ("model.", "backbone.", "")
)
_TEXT = "|".join(map(re.escape, _PREFIXES))
_NOT_TEXT = rf"(?!({_TEXT}|lm_head\.|model\.(embed_tokens|layers|norm)\.)).*"


def in_wrapper(names: WeightNames) -> WeightNames:
    """Return the names of a family's weights in multimodal checkpoints, where all other tensors are ignored."""
    ignored = re.compile(f"{_NOT_TEXT}|({_TEXT})?({names.ignored.pattern})")
    return replace(names, prefixes=(*_PREFIXES, *names.prefixes), ignored=ignored)
