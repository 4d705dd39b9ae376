"""Qwen2 with experts (57B-A14B, 1.5-MoE): Qwen2's attention, and an MLP behind a gate beside the experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from paceline.models.description.spec import DecoderSpec
from paceline.models.description.weight_names import WeightNames
from paceline.models.families.base import (
    EXPERTS,
    GGUF_EXPERTS,
    GGUF_MLP_BESIDE,
    LLAMA_GGUF_NAMES,
    LLAMA_NAMES,
    Family,
    GGUFForm,
    gguf_expert_fields,
    llama_like,
    mlp_beside,
    with_experts,
)


def sparse_layers(config: PretrainedConfig) -> list[bool]:
    """Return which layers have experts, by Qwen's fields."""
    step, dense = getattr(config, "decoder_sparse_step", 1), config.mlp_only_layers or ()
    return [
        index not in dense and config.num_experts != 0 and (index + 1) % step == 0
        for index in range(config.num_hidden_layers)
    ]


def _describe(config: PretrainedConfig) -> DecoderSpec | None:
    spec = llama_like(config, bias=bool(config.qkv_bias))
    return spec and with_experts(
        spec,
        (config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size),
        beside=config.shared_expert_intermediate_size,
        sparse=sparse_layers(config),
        normalised=bool(config.norm_topk_prob),
        shared_gate=True,
    )


def _fields(metadata: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **gguf_expert_fields(metadata, rope),
        "moe_intermediate_size": metadata["expert_feed_forward_length"],
        "shared_expert_intermediate_size": metadata["expert_shared_feed_forward_length"],
        "norm_topk_prob": False,
    }


_GATE = {"layers.{}.mlp.shared_expert_gate": "layers.{}.shared_gate"}

FAMILY = Family(
    "qwen2_moe",
    _describe,
    WeightNames({**LLAMA_NAMES, **EXPERTS, **mlp_beside("shared_expert"), **_GATE}, prefixes=("model.",)),
    GGUFForm(
        ("qwen2moe",),
        WeightNames(
            {
                **LLAMA_GGUF_NAMES,
                **GGUF_EXPERTS,
                **GGUF_MLP_BESIDE,
                "blk.{}.ffn_gate_inp_shexp": "layers.{}.shared_gate",
            }
        ),
        fields=_fields,
        reads=frozenset({"expert_count"}),
    ),
)
