"""Mixtures of experts as DeepSeek-V3 routes them (arXiv 2412.19437, section 2.1.2), and their names and metadata.

Experts are scored by sigmoids, a correction takes part in the choice alone, and an MLP stands beside them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PretrainedConfig

from paceline.errors import ModelFormatError
from paceline.models.description.spec import DecoderSpec
from paceline.models.description.weights import StoredTensor
from paceline.models.families.base import (
    EXPERTS,
    GGUF_CORRECTION,
    GGUF_EXPERTS,
    GGUF_JOINED_EXPERTS,
    GGUF_MLP_BESIDE,
    mlp_beside,
    with_experts,
)

ROUTED = {
    **EXPERTS,
    **mlp_beside("shared_experts"),
    "layers.{}.mlp.gate.e_score_correction_bias": "layers.{}.router_correction.weight",
    "layers.{}.mlp.e_score_correction_bias": "layers.{}.router_correction.weight",
}
GGUF_ROUTED = {**GGUF_EXPERTS, **GGUF_JOINED_EXPERTS, **GGUF_MLP_BESIDE, **GGUF_CORRECTION}

_SIGMOID = 2  # llama.cpp's number of the function that scores experts


def with_routed_experts(config: PretrainedConfig, spec: DecoderSpec, sparse: Sequence[bool]) -> DecoderSpec:
    """Return the decoder with experts in the ``sparse`` layers, by the fields that most configurations have."""
    width, of_exaone = config.moe_intermediate_size, hasattr(config, "num_shared_experts")
    count, beside = (
        (config.num_experts, config.num_shared_experts)
        if of_exaone
        else (config.num_local_experts, getattr(config, "n_shared_experts", 0))
    )
    return with_experts(
        spec,
        (count, config.num_experts_per_tok, width),
        beside=width * (beside or 0),
        sparse=sparse,
        normalised=bool(config.norm_topk_prob),
        sigmoid=True,
        correction=True,
        groups=config.n_group or 1,
        used_groups=config.topk_group or 1,
        output_scale=float(config.routed_scaling_factor),
    )


def after_dense_layers(config: PretrainedConfig) -> list[bool]:
    """Return which layers have experts, where the first ``first_k_dense_replace`` have none."""
    return [index >= config.first_k_dense_replace for index in range(config.num_hidden_layers)]


def check_sigmoid(metadata: Mapping[str, Any]) -> None:
    """Raise ModelFormatError for a GGUF file whose router is another one."""
    if (function := metadata.get("expert_gating_func", _SIGMOID)) != _SIGMOID:
        raise ModelFormatError(f"expert_gating_func={function} is not supported; sigmoids are ({_SIGMOID})")


def routed_fields(metadata: Mapping[str, Any], _: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a configuration from GGUF metadata."""
    check_sigmoid(metadata)
    return {
        "num_hidden_layers": metadata["block_count"] - metadata.get("nextn_predict_layers", 0),
        "n_routed_experts": metadata["expert_count"],
        "num_experts_per_tok": metadata["expert_used_count"],
        "moe_intermediate_size": metadata["expert_feed_forward_length"],
        "n_shared_experts": metadata.get("expert_shared_count", 0),
        "first_k_dense_replace": metadata.get("leading_dense_block_count", 0),
        "norm_topk_prob": metadata.get("expert_weights_norm", False),
        "routed_scaling_factor": metadata.get("expert_weights_scale", 1.0),
        "n_group": metadata.get("expert_group_count", 1),
        "topk_group": metadata.get("expert_group_used_count", 1),
    }


def without_head(tensors: Mapping[str, StoredTensor], spec: DecoderSpec) -> Mapping[str, StoredTensor]:
    """Drop the tensors of blocks behind the decoder's layers, which are a draft head (``nextn``)."""
    layers = len(spec.layers)
    blocks = {name: name.split(".")[1] if name.startswith("blk.") else "0" for name in tensors}
    return {name: tensors[name] for name, block in blocks.items() if not block.isdigit() or int(block) < layers}
