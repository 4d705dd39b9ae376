"""Qwen3.5 with experts: its mixers, and in every layer a mixture of experts beside an MLP behind a gate."""

from __future__ import annotations

from dataclasses import replace

from transformers import PretrainedConfig

from paceline.models.description.spec import DecoderSpec, ExpertsSpec, MLPSpec
from paceline.models.families import qwen3_5
from paceline.models.families.base import EXPERTS, Family, mtp_names
from paceline.models.families.qwen3_5_gguf import FORM_WITH_EXPERTS


def experts_of(config: PretrainedConfig, *, normalised: bool = True) -> ExpertsSpec:
    """Describe the mixture of a layer."""
    return ExpertsSpec(
        config.num_experts,
        config.num_experts_per_tok,
        MLPSpec(config.moe_intermediate_size),
        normalised=normalised,
        shared=MLPSpec(config.shared_expert_intermediate_size),
        shared_gate=True,
    )


def _describe(config: PretrainedConfig) -> DecoderSpec | None:
    return qwen3_5.describe(config, [experts_of(config)] * len(config.layer_types))


_SHARED = {
    "layers.{}.mlp.shared_expert.gate_proj": "layers.{}.gate",
    "layers.{}.mlp.shared_expert.up_proj": "layers.{}.up",
    "layers.{}.mlp.shared_expert.down_proj": "layers.{}.down",
    "layers.{}.mlp.shared_expert_gate": "layers.{}.shared_gate",
}
NAMES = replace(qwen3_5.NAMES, parts={**qwen3_5.NAMES.parts, **EXPERTS, **_SHARED})

FAMILY = Family("qwen3_5_moe_text", _describe, NAMES, FORM_WITH_EXPERTS, mtp_names(NAMES))
