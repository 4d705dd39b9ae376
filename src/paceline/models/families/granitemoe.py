"""Granite 3 with experts: Granite's multipliers, and a softmax over the chosen experts."""

from __future__ import annotations

from transformers import PretrainedConfig

from paceline.models.description.spec import DecoderSpec
from paceline.models.description.weight_names import WeightNames
from paceline.models.families import granite
from paceline.models.families.base import LLAMA_NAMES, Family, with_experts


def _describe(config: PretrainedConfig) -> DecoderSpec | None:
    spec = granite.describe(config)
    if spec is None:
        return None
    sizes = config.num_local_experts, config.num_experts_per_tok, config.intermediate_size
    return with_experts(spec, *sizes, normalised=True)


EXPERTS = {
    "layers.{}.block_sparse_moe.router.layer": "layers.{}.router",
    "layers.{}.block_sparse_moe.router": "layers.{}.router",
    "layers.{}.block_sparse_moe.input_linear": "layers.{}.experts_gate_up",
    "layers.{}.block_sparse_moe.output_linear": "layers.{}.experts_down",
    "layers.{}.block_sparse_moe.experts.gate_up_proj": "layers.{}.experts_gate_up.weight",
    "layers.{}.block_sparse_moe.experts.down_proj": "layers.{}.experts_down.weight",
}

FAMILY = Family("granitemoe", _describe, WeightNames({**LLAMA_NAMES, **EXPERTS}, prefixes=("model.",)))
