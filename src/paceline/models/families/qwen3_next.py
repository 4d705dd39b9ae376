"""Qwen3-Next (80B-A3B, Coder-Next): Qwen3.5's layers with experts, whose matrices are stored by key head."""

from __future__ import annotations

from dataclasses import replace

from transformers import PretrainedConfig

from paceline.models.description.spec import DecoderSpec, MLPSpec
from paceline.models.families import qwen3_5, qwen3_5_moe
from paceline.models.families.base import Family, mtp_names
from paceline.models.families.qwen3_5_gguf import FORM_BY_KEY_HEAD


def _describe(config: PretrainedConfig) -> DecoderSpec | None:
    dense, experts = MLPSpec(config.intermediate_size), qwen3_5_moe.experts_of(config, normalised=config.norm_topk_prob)
    mixed = (
        config.num_experts > 0 and index not in config.mlp_only_layers and not (index + 1) % config.decoder_sparse_step
        for index in range(len(config.layer_types))
    )
    return qwen3_5.describe(config, [experts if mixture else dense for mixture in mixed])


_BY_KEY_HEAD = {
    "layers.{}.linear_attn.in_proj_qkvz": "layers.{}.in_qkvz",
    "layers.{}.linear_attn.in_proj_ba": "layers.{}.beta_decay",
}
_NAMES = replace(qwen3_5_moe.NAMES, parts={**qwen3_5_moe.NAMES.parts, **_BY_KEY_HEAD})

FAMILY = Family("qwen3_next", _describe, _NAMES, FORM_BY_KEY_HEAD, mtp_names(_NAMES))
