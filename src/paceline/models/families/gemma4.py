"""Gemma 4, the text model: two head widths in turn, vectors by token, keys shared by last layers, experts in 26B-A4B.

The mixture stands beside the MLP of every layer, each between norms of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from transformers import PretrainedConfig

from paceline.models.description.spec import (
    AttentionSpec,
    DecoderSpec,
    ExpertsSpec,
    LayerSpec,
    MLPSpec,
    TokenInputsSpec,
    check,
)
from paceline.models.description.weight_names import WeightNames
from paceline.models.description.weights import StoredTensor
from paceline.models.families.base import (
    ACTIVATION_NAMES,
    GGUF_EXPERTS,
    GGUF_JOINED_EXPERTS,
    GGUF_NORMS_AFTER,
    LLAMA_GGUF_NAMES,
    LLAMA_NAMES,
    NORMS_AFTER,
    Family,
    GGUFForm,
    attention_of,
    biases_of,
    decoder_of,
)
from paceline.models.families.rotary import rotary_of


def _describe(config: PretrainedConfig) -> DecoderSpec | None:
    activation = ACTIVATION_NAMES.get(config.hidden_activation)
    attentions = _attentions(config)
    if activation is None or attentions is None or _asks_for_more(config):
        return None
    layers = (
        LayerSpec(attention, _mlp(config, attention, activation), "both", scaled=True) for attention in attentions
    )
    return decoder_of(
        config,
        layers,
        embed_scale=config.hidden_size**0.5,
        logits_cap=config.final_logit_softcapping,
        token_inputs=_token_inputs(config, activation),
    )


def _attentions(config: PretrainedConfig) -> list[AttentionSpec] | None:
    """Return the attention of every layer; None if a kind of layers or positions is unknown."""
    kinds = {kind: config.per_layer_config[config.layer_types.index(kind)] for kind in set(config.layer_types)}
    rotaries = {kind: rotary_of(of_kind, kind) for kind, of_kind in kinds.items()}
    if None in rotaries.values() or not kinds.keys() <= {"full_attention", "sliding_attention"}:
        return None
    of_kinds = {
        kind: attention_of(
            of_kind,
            rotary=rotaries[kind],
            window=config.sliding_window if kind == "sliding_attention" else None,
            scale=1.0,
            qk_norm="head",
            v_norm=True,
            keys_as_values=config.attention_k_eq_v and kind == "full_attention",
            **biases_of(config),
        )
        for kind, of_kind in kinds.items()
    }
    shared = config.num_kv_shared_layers
    own = config.num_hidden_layers - shared
    last = {kind: layer for layer, kind in enumerate(config.layer_types[:own])}  # whose keys the others read
    all_owned = shared >= 0 and own > 0 and last.keys() == kinds.keys()
    check(all_owned, f"num_kv_shared_layers={shared} of num_hidden_layers={config.num_hidden_layers}")
    return [
        replace(of_kinds[kind], reads_layer=None if layer < own else last[kind])
        for layer, kind in enumerate(config.layer_types)
    ]


def _mlp(config: PretrainedConfig, attention: AttentionSpec, activation: str) -> MLPSpec | ExpertsSpec:
    double = config.use_double_wide_mlp and attention.reads_layer is not None
    mlp = MLPSpec(config.intermediate_size * (2 if double else 1), activation)
    if not getattr(config, "enable_moe_block", False):  # the unified configuration has neither these nor token inputs
        return mlp
    return ExpertsSpec(
        config.num_experts,
        config.top_k_experts,
        MLPSpec(config.moe_intermediate_size, activation),
        normalised=True,
        shared=mlp,
        scores_scale=config.hidden_size**-0.5,
        scaled=True,
        own_norms=True,
    )


def _token_inputs(config: PretrainedConfig, activation: str) -> TokenInputsSpec | None:
    width = getattr(config, "hidden_size_per_layer_input", 0)
    if not width:
        return None
    return TokenInputsSpec(width, activation, width**0.5, config.hidden_size**-0.5, 2.0**-0.5)


def _asks_for_more(config: PretrainedConfig) -> bool:
    tables = getattr(config, "hidden_size_per_layer_input", 0)
    other_tokens = tables and config.vocab_size_per_layer_input != config.vocab_size
    return bool(config.use_bidirectional_attention == "all" or other_tokens)


def _fields(metadata: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields whose values in GGUF metadata are lists by layer, or of layers with windows apart.

    Wide layers turn a part of each head. ``rope_freqs.weight`` has which, so their positions are plain here.
    """
    near, layers = metadata["attention.sliding_window_pattern"], metadata["block_count"]
    by_layer = isinstance(near, list) and len(near) == layers
    check(by_layer, f"attention.sliding_window_pattern={near}, not one for each of {layers} layers")
    kv_heads = _by_layer(metadata.get("attention.head_count_kv", metadata["attention.head_count"]), layers)
    mlps = _by_layer(metadata["feed_forward_length"], layers)
    experts = metadata.get("expert_count", 0)
    widths = [metadata["attention.key_length_swa" if is_near else "attention.key_length"] for is_near in near]
    return {
        "layer_types": ["sliding_attention" if is_near else "full_attention" for is_near in near],
        "head_dim": metadata["attention.key_length_swa"],
        "num_key_value_heads": kv_heads[0],
        "per_layer_config": {
            layer: {"head_dim": width, "num_key_value_heads": heads}
            for layer, (width, heads) in enumerate(zip(widths, kv_heads, strict=True))
        },
        "intermediate_size": mlps[0],
        "use_double_wide_mlp": mlps[-1] != mlps[0],
        "enable_moe_block": experts > 0,
        "num_experts": experts or None,
        "top_k_experts": metadata["expert_used_count"] if experts else None,
        "moe_intermediate_size": metadata["expert_feed_forward_length"] if experts else None,
        "num_kv_shared_layers": metadata.get("attention.shared_kv_layers", 0),
        "hidden_size_per_layer_input": metadata.get("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": metadata["vocab_size"],
        "sliding_window": metadata["attention.sliding_window"],
        "final_logit_softcapping": metadata.get("final_logit_softcapping") or None,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": metadata.get("rope.freq_base_swa", 10000.0)},
            "full_attention": {"rope_type": "default", "rope_theta": rope["rope_theta"]},
        },
    }


def _by_layer(value: Any, layers: int) -> list[Any]:
    return list(value) if isinstance(value, list) else [value] * layers


def _adapt(tensors: Mapping[str, StoredTensor], _: DecoderSpec) -> Mapping[str, StoredTensor]:
    """Add the values' projections of layers that use that of their keys, which files have once."""
    keys = {name: name.replace(".attn_k.", ".attn_v.") for name in tensors if ".attn_k." in name}
    return {**{value: tensors[key] for key, value in keys.items()}, **tensors}


_GGUF_NAMES = {
    **LLAMA_GGUF_NAMES,
    **GGUF_NORMS_AFTER,
    **GGUF_EXPERTS,
    **GGUF_JOINED_EXPERTS,
    "blk.{}.ffn_down_exps.scale": "layers.{}.experts_scale.weight",
    "blk.{}.ffn_gate_inp.scale": "layers.{}.router_norm.weight",
    "blk.{}.pre_ffw_norm_2": "layers.{}.experts_norm",
    "blk.{}.post_ffw_norm_1": "layers.{}.shared_out_norm",
    "blk.{}.post_ffw_norm_2": "layers.{}.experts_out_norm",
    "blk.{}.layer_output_scale": "layers.{}.scale",
    "blk.{}.inp_gate": "layers.{}.input_gate",
    "blk.{}.proj": "layers.{}.input_out",
    "blk.{}.post_norm": "layers.{}.input_out_norm",
    "per_layer_token_embd": "input_table",
    "per_layer_model_proj": "input_project",
    "per_layer_proj_norm": "input_norm",
}

ASSISTANT = "gemma4_assistant"
"""Hugging Face's name of the configuration of a decoder that drafts for this family from its keys and values."""


def describe_assistant(config: PretrainedConfig) -> DecoderSpec | None:
    """Describe an assistant's decoder, whose layers read the target's keys; None if it is unknown.

    Its window ends with the last key that the target has computed, and includes one position more.
    """
    text = copy.deepcopy(config.get_text_config())
    text.num_kv_shared_layers = 0
    spec = _describe(text)
    if spec is None:
        return None
    layers = (
        replace(layer, mixer=replace(at, reads_layer=0, window=None if at.window is None else at.window + 1))
        for layer, at in zip(spec.layers, spec.attentions, strict=True)
    )
    return replace(spec, layers=tuple(layers), tied=True)


_NAMES = {
    **LLAMA_NAMES,
    **NORMS_AFTER,
    "layers.{}.pre_feedforward_layernorm": "layers.{}.mlp_norm",
    "layers.{}.router.proj": "layers.{}.router",
    "layers.{}.router.scale": "layers.{}.router_norm.weight",
    "layers.{}.router.per_expert_scale": "layers.{}.experts_scale.weight",
    "layers.{}.experts.gate_up_proj": "layers.{}.experts_gate_up.weight",
    "layers.{}.experts.down_proj": "layers.{}.experts_down.weight",
    "layers.{}.pre_feedforward_layernorm_2": "layers.{}.experts_norm",
    "layers.{}.post_feedforward_layernorm_1": "layers.{}.shared_out_norm",
    "layers.{}.post_feedforward_layernorm_2": "layers.{}.experts_out_norm",
    "layers.{}.layer_scalar": "layers.{}.scale.weight",
    "layers.{}.per_layer_input_gate": "layers.{}.input_gate",
    "layers.{}.per_layer_projection": "layers.{}.input_out",
    "layers.{}.post_per_layer_input_norm": "layers.{}.input_out_norm",
    "embed_tokens_per_layer": "input_table",
    "per_layer_model_projection": "input_project",
    "per_layer_projection_norm": "input_norm",
}

ASSISTANT_NAMES = WeightNames(_NAMES, prefixes=("model.",))

FAMILY = Family(
    "gemma4_text",
    _describe,
    WeightNames(_NAMES, prefixes=("model.",)),
    GGUFForm(
        ("gemma4",),
        WeightNames(_GGUF_NAMES),
        fields=_fields,
        reads=frozenset({"attention.sliding_window", "final_logit_softcapping", "expert_count"}),
        adapt=_adapt,
    ),
    other_types=("gemma4_unified_text",),
)
