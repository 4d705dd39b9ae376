"""Aria, the text model: Llama with experts, and an MLP beside them."""

from __future__ import annotations

from transformers import PretrainedConfig

from paceline.models.description.spec import DecoderSpec
from paceline.models.description.weight_names import WeightNames
from paceline.models.families.base import LLAMA_NAMES, Family, biases_of, llama_like, mlp_beside, with_experts


def _describe(config: PretrainedConfig) -> DecoderSpec | None:
    spec, width = llama_like(config, **biases_of(config)), config.intermediate_size
    sizes = config.moe_num_experts, config.moe_topk, width
    return spec and with_experts(spec, sizes, beside=width * config.moe_num_shared_experts, normalised=True)


_EXPERTS = {
    "layers.{}.mlp.router": "layers.{}.router",
    **dict.fromkeys(
        ("layers.{}.mlp.experts.gate_up_proj", "layers.{}.mlp.experts.fc1.weight"), "layers.{}.experts_gate_up.weight"
    ),
    **dict.fromkeys(
        ("layers.{}.mlp.experts.down_proj", "layers.{}.mlp.experts.fc2.weight"), "layers.{}.experts_down.weight"
    ),
}

FAMILY = Family(
    "aria_text",
    _describe,
    WeightNames(
        {**LLAMA_NAMES, **_EXPERTS, **mlp_beside("shared_experts")},
        prefixes=("model.",),
        transposed=frozenset({"experts_gate_up", "experts_down"}),
    ),
)
