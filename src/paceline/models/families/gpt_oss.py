"""gpt-oss: experts with a clamped gate, attention sinks, and a window in every second layer.

The layers' computations are those of OpenAI's "gpt-oss-120b & gpt-oss-20b model card" (arXiv 2508.10925, section 2).
"""

from __future__ import annotations

from dataclasses import replace

from transformers import PretrainedConfig

from paceline.models.description import DecoderSpec, MLPSpec
from paceline.models.families.base import LLAMA_NAMES, Family, biases_of, llama_like, with_experts
from paceline.models.weight_names import WeightNames

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
    return with_experts(replace(spec, layers=layers), *sizes, normalised=True, router_bias=True)


_NAMES = {
    "layers.{}.self_attn.sinks": "layers.{}.sinks.weight",
    "layers.{}.mlp.router": "layers.{}.router",
    "layers.{}.mlp.experts.gate_up_proj": "layers.{}.experts_gate_up.weight",
    "layers.{}.mlp.experts.gate_up_proj_bias": "layers.{}.experts_gate_up.bias",
    "layers.{}.mlp.experts.down_proj": "layers.{}.experts_down.weight",
    "layers.{}.mlp.experts.down_proj_bias": "layers.{}.experts_down.bias",
}

FAMILY = Family(
    "gpt_oss",
    _describe,
    WeightNames(
        {**LLAMA_NAMES, **_NAMES},
        prefixes=("model.",),
        transposed=frozenset({"experts_gate_up", "experts_down"}),
        interleaved=frozenset({"experts_gate_up"}),
    ),
)
