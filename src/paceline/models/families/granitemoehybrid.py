"""Granite 4: Mamba-2 layers with attention after every few of them, or attention alone; also with experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from paceline.models.description.spec import (
    DecoderSpec,
    ExpertsSpec,
    LayerSpec,
    MLPSpec,
    Rotary,
    without_residual_scale,
)
from paceline.models.description.weight_names import WeightNames
from paceline.models.families import granite, granitemoe, mamba2
from paceline.models.families.base import (
    ACTIVATION_NAMES,
    GGUF_EXPERTS,
    GGUF_MLP_BESIDE,
    LLAMA_NAMES,
    Family,
    GGUFForm,
    attention_of,
    biases_of,
    decoder_of,
)
from paceline.models.families.rotary import head_dim, plain_rotary, rotary_of, without_positions


def _rotary(config: PretrainedConfig) -> Rotary | None:
    """Return the rotary positions; of frequency zero where the model has none."""
    if config.position_embedding_type == "rope":
        return rotary_of(config)
    return without_positions(plain_rotary(1.0, head_dim(config)))


def _mlp(config: PretrainedConfig) -> MLPSpec | ExpertsSpec:
    shared = MLPSpec(config.shared_intermediate_size)
    if not config.num_local_experts:
        return shared
    sizes = config.num_local_experts, config.num_experts_per_tok, MLPSpec(config.intermediate_size)
    return ExpertsSpec(*sizes, normalised=True, shared=shared)


def _describe(config: PretrainedConfig) -> DecoderSpec | None:
    """Describe a model; None for one whose Mamba-2 layers have biases or limited steps."""
    rotary, mamba, kinds = _rotary(config), mamba2.mamba_of(config), set(config.layer_types)
    if rotary is None or mamba is None or not {"full_attention"} <= kinds <= mamba2.KINDS:
        return None
    if ACTIVATION_NAMES.get(config.hidden_act) != "silu":
        return None
    attention = attention_of(config, rotary=rotary, scale=float(config.attention_multiplier), **biases_of(config))
    mixers = (mamba if kind == "linear_attention" else attention for kind in config.layer_types)
    scales = {"embed_scale": float(config.embedding_multiplier), "logits_scale": 1.0 / float(config.logits_scaling)}
    spec = decoder_of(config, (LayerSpec(mixer, _mlp(config)) for mixer in mixers), **scales)
    return without_residual_scale(spec, float(config.residual_multiplier))


_NAMES = {
    **LLAMA_NAMES,
    **mamba2.MAMBA,
    **granitemoe.MIXED_NAMES,
}


def _fields(metadata: Mapping[str, Any], _: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that differ. Bamba has this architecture, too: with rotary positions, without multipliers."""
    width = int(metadata["embedding_length"]) // int(metadata["attention.head_count"])
    own = {
        "position_embedding_type": "rope" if metadata.get("rope.scaling.finetuned", True) else None,
        "shared_intermediate_size": metadata.get("expert_shared_feed_forward_length", metadata["feed_forward_length"]),
        "num_local_experts": metadata.get("expert_count", 0),
        "num_experts_per_tok": metadata.get("expert_used_count", 0),
        "attention_multiplier": width**-0.5,
    }
    return own | mamba2.gguf_fields(metadata) | granite.multipliers_of(metadata)


_FORM = GGUFForm(
    ("granitehybrid",),
    WeightNames({**mamba2.GGUF_NAMES, **GGUF_EXPERTS, **GGUF_MLP_BESIDE}),
    fields=_fields,
    reads=frozenset({"expert_count", *granite.MULTIPLIERS}),
    paired=True,
    adapt=mamba2.gguf_adapt,
)
_USUAL = {"num_local_experts": 0, "layer_types": [*["linear_attention"] * 31, "full_attention"]}

FAMILY = Family("granitemoehybrid", _describe, WeightNames(_NAMES, prefixes=("model.",)), _FORM, usual=_USUAL)
