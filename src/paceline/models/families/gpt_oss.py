"""gpt-oss: experts with a clamped gate, attention sinks, and a window in every second layer.

The layers' computations are those of OpenAI's "gpt-oss-120b & gpt-oss-20b model card" (arXiv 2508.10925, section 2).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from transformers import PretrainedConfig

from paceline.models.description.spec import DecoderSpec, MLPSpec
from paceline.models.description.weight_names import WeightNames
from paceline.models.families.base import (
    GGUF_EXPERTS,
    LLAMA_GGUF_NAMES,
    LLAMA_NAMES,
    Family,
    GGUFForm,
    biases_of,
    llama_like,
    with_experts,
)

_GATE = 1.702, 7.0  # slope and limit of "clamped_silu"


def _describe(config: PretrainedConfig) -> DecoderSpec | None:
    if (config.swiglu_alpha, config.swiglu_limit) != _GATE:
        return None
    spec = llama_like(config, sinks=True, **biases_of(config))
    if spec is None:
        return None
    expert = MLPSpec(config.intermediate_size, "clamped_silu", bias=True)
    layers = tuple(replace(layer, mlp=expert) for layer in spec.layers)
    sizes = config.num_local_experts, config.num_experts_per_tok, config.intermediate_size
    return with_experts(replace(spec, layers=layers), sizes, normalised=True, router_bias=True)


_NAMES = {
    "layers.{}.self_attn.sinks": "layers.{}.sinks.weight",
    "layers.{}.mlp.router": "layers.{}.router",
    "layers.{}.mlp.experts.gate_up_proj": "layers.{}.experts_gate_up.weight",
    "layers.{}.mlp.experts.gate_up_proj_bias": "layers.{}.experts_gate_up.bias",
    "layers.{}.mlp.experts.down_proj": "layers.{}.experts_down.weight",
    "layers.{}.mlp.experts.down_proj_bias": "layers.{}.experts_down.bias",
}


def _gguf_fields(metadata: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of experts, the window, and the rotary positions, whose settings llama.cpp has by default."""
    return {
        "num_local_experts": metadata["expert_count"],
        "num_experts_per_tok": metadata["expert_used_count"],
        "intermediate_size": metadata["expert_feed_forward_length"],
        "sliding_window": metadata["attention.sliding_window"],
        "rope_parameters": {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False, **rope},
    }


_GGUF_NAMES = {
    **LLAMA_GGUF_NAMES,
    **GGUF_EXPERTS,
    "blk.{}.post_attention_norm": "layers.{}.mlp_norm",
    "blk.{}.attn_sinks": "layers.{}.sinks",
}
_FORM = GGUFForm(
    ("gpt-oss",),
    WeightNames(_GGUF_NAMES),
    fields=_gguf_fields,
    reads=frozenset({"expert_count", "attention.sliding_window"}),
)

FAMILY = Family(
    "gpt_oss",
    _describe,
    WeightNames(
        {**LLAMA_NAMES, **_NAMES},
        prefixes=("model.",),
        transposed=frozenset({"experts_gate_up", "experts_down"}),
        interleaved=frozenset({"experts_gate_up"}),
    ),
    _FORM,
)
