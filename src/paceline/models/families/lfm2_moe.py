"""LFM2 with experts (8B-A1B): LFM2's layers, all but the first few with a mixture whose router has sigmoids."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from paceline.models.description.spec import DecoderSpec, ExpertsSpec, MLPSpec
from paceline.models.description.weight_names import WeightNames
from paceline.models.families import lfm2
from paceline.models.families.base import GGUF_EXPERTS, Family, GGUFForm, gguf_expert_fields


def _describe(config: PretrainedConfig) -> DecoderSpec | None:
    experts = ExpertsSpec(
        config.num_experts,
        config.num_experts_per_tok,
        MLPSpec(config.moe_intermediate_size),
        normalised=config.norm_topk_prob,
        sigmoid=True,
        correction=config.use_expert_bias,
        output_scale=float(config.routed_scaling_factor),
    )
    dense, layers = MLPSpec(config.intermediate_size), range(len(config.layer_types))
    return lfm2.describe(config, [dense if index < config.num_dense_layers else experts for index in layers])


def _gguf_fields(metadata: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    own = {
        "moe_intermediate_size": metadata["expert_feed_forward_length"],
        "num_dense_layers": metadata["leading_dense_block_count"],
    }
    return lfm2.gguf_fields(metadata, rope) | gguf_expert_fields(metadata, rope) | own


_EXPERTS = {
    "layers.{}.feed_forward.gate": "layers.{}.router",
    "layers.{}.feed_forward.expert_bias": "layers.{}.router_correction.weight",
    "layers.{}.feed_forward.experts.{}.w1": "layers.{}.expert.{}.gate",
    "layers.{}.feed_forward.experts.{}.w3": "layers.{}.expert.{}.up",
    "layers.{}.feed_forward.experts.{}.w2": "layers.{}.expert.{}.down",
    "layers.{}.feed_forward.experts.gate_up_proj": "layers.{}.experts_gate_up.weight",
    "layers.{}.feed_forward.experts.down_proj": "layers.{}.experts_down.weight",
}
_CORRECTION = {"blk.{}.exp_probs_b.bias": "layers.{}.router_correction.weight"}
_FORM = GGUFForm(
    ("lfm2moe",),
    WeightNames({**lfm2.GGUF_NAMES, **GGUF_EXPERTS, **_CORRECTION}),
    fields=_gguf_fields,
    reads=frozenset({"expert_count"}),
)

_KINDS = ["full_attention" if layer in (2, 6, 10, 14, 18, 21) else "conv" for layer in range(24)]
_USUAL = {"num_hidden_layers": 24, "layer_types": _KINDS}

FAMILY = Family(
    "lfm2_moe", _describe, WeightNames({**lfm2.NAMES, **_EXPERTS}, prefixes=("model.",)), _FORM, usual=_USUAL
)
