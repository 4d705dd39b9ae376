"""Tiny random Gemma 4 models with all kinds of layers, with heads that the CPU kernels take."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import gguf
import torch
from torch import Tensor
from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4TextConfig, PreTrainedModel

from gguf_support import finish
from model_support import packed, tiny
from paceline.drafters.heads.assistant import Assistant, Centroids
from paceline.drafters.heads.assistant_loading import cache_places
from paceline.models.base import AnyModel
from paceline.models.description.spec import DecoderSpec
from paceline.models.description.weights import shapes
from paceline.models.families import FAMILIES, describe
from paceline.models.families.gemma4 import describe_assistant
from paceline.models.load.loading import load_model
from paceline.models.native.layers import NativeLayers
from paceline.models.native.model import NativeModel, Quantization
from paceline.models.torch.transformer import Transformer
from toy import VOCAB

KINDS = {"s": "sliding_attention", "f": "full_attention"}


def gemma4_fields(kinds: str = "sfssf", shared: int = 2, **changes: Any) -> dict[str, Any]:
    """Configuration with a layer for each letter of ``kinds``: s has a window, f has none and wider heads.

    shared: number of the last layers, which read the keys and values of earlier ones.
    """
    return {
        "vocab_size": VOCAB,
        "hidden_size": 40,
        "intermediate_size": 80,
        "num_hidden_layers": len(kinds),
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "global_head_dim": 32,
        "sliding_window": 8,
        "layer_types": [KINDS[kind] for kind in kinds],
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": shared > 0,
        "final_logit_softcapping": 5.0,
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 16,
        "max_position_embeddings": 128,
        **changes,
    }


WITHOUT_VECTORS = {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1}
EXPERTS: dict[str, Any] = {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 32}
EXPERTS |= {"hidden_size": 64}
# of a model; like E2B, like the dense 31B, like 26B-A4B, and with the true widths of heads
SIZES: dict[str, dict[str, Any]] = {
    "all kinds": {},
    "keys as values": {"kinds": "sf", "shared": 0, **WITHOUT_VECTORS},
    "experts": {"kinds": "sf", "shared": 0, **WITHOUT_VECTORS, **EXPERTS},
    "experts and vectors": {"kinds": "sfs", "shared": 1, **EXPERTS},
    "wide heads": {"kinds": "sfsf", "head_dim": 256, "global_head_dim": 512, "num_key_value_heads": 1},
}


def tiny_gemma4(seed: int = 0, **sizes: Any) -> PreTrainedModel:
    """A random model of transformers."""
    return tiny("gemma4_text", gemma4_fields(**sizes), seed=seed)


def tiny_gemma4_torch(seed: int = 0, **sizes: Any) -> Transformer:
    """The same model, in torch."""
    model = load_model(tiny_gemma4(seed, **sizes), dtype=torch.float32)
    assert isinstance(model, Transformer)
    return model


def tiny_native_gemma4(seed: int = 0, quantization: Quantization | None = "int8", **sizes: Any) -> NativeModel:
    """The same model on the CPU kernels."""
    return packed(tiny_gemma4(seed, **sizes), quantization, threads=1)


OF_ASSISTANT: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 32,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "use_double_wide_mlp": False,
    "final_logit_softcapping": None,
}

GROUPS = {"use_ordered_embeddings": True, "num_centroids": 6, "centroid_intermediate_top_k": 2}


@contextmanager
def assistants_may_be_made() -> Iterator[None]:
    """Let transformers 5.23 make a decoder without keys of its own, which every assistant is; else it refuses."""
    usual = Gemma4TextConfig.kv_sharing_modes

    def modes(config: Gemma4TextConfig) -> list[str | None]:
        if config.num_kv_shared_layers == config.num_hidden_layers:
            return ["reuse"] * config.num_hidden_layers
        return usual.fget(config)  # type: ignore[no-any-return]

    with mock.patch.object(Gemma4TextConfig, "kv_sharing_modes", property(modes)):
        yield


def save_assistant(path: Path, seed: int = 0, *, width: int = 40, **more: Any) -> Gemma4AssistantForCausalLM:
    """A random assistant of four layers for ``tiny_gemma4``."""
    fields = gemma4_fields("sssf", 4, **OF_ASSISTANT, **more.pop("text", {}))
    config = Gemma4AssistantConfig(text_config=fields, backbone_hidden_size=width, **more)
    with assistants_may_be_made():
        model = Gemma4AssistantForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.state_dict(keep_vars=True).items():
            if name.endswith("token_ordering"):
                weight.copy_(torch.randperm(len(weight), generator=generator))
            else:
                noise = torch.randn(weight.shape, generator=generator)
                weight.copy_(noise * 0.3 if weight.dim() > 1 else 1 + noise * 0.2)
    model.save_pretrained(path)
    return model


def _noise(dtype: torch.dtype, generator: torch.Generator, *shape: int) -> Tensor:
    values = torch.randn(shape, generator=generator) * 0.3
    return (values if len(shape) > 1 else 1 + values).to(dtype)


def assistant_tensors(spec: DecoderSpec, dtype: torch.dtype, generator: torch.Generator) -> dict[str, Tensor]:
    """Random weights of an assistant's layers."""
    return {name: _noise(dtype, generator, *like.shape) for name, like in shapes(spec).items()}


def tiny_assistant(target: AnyModel, seed: int = 0) -> Assistant:
    """A random assistant of four layers for ``tiny_gemma4``, with a head over groups of tokens."""
    own = {"hidden_size": 24, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    fields = gemma4_fields("sssf", 4, **own, use_double_wide_mlp=False)
    spec = describe_assistant(Gemma4AssistantConfig(text_config=fields, backbone_hidden_size=40))
    whole = describe({"model_type": "gemma4_text", **gemma4_fields()})
    assert spec is not None
    assert whole is not None
    generator = torch.Generator().manual_seed(seed)
    noise = partial(_noise, target.dtype, generator)
    tensors = assistant_tensors(spec, target.dtype, generator)
    places = cache_places(spec, whole)
    decoder, layers = Transformer(spec, tensors, "tiny assistant", places=places), None
    if isinstance(target, NativeModel):
        layers = NativeLayers(spec, tensors, places, target, target.quantization)  # type: ignore[arg-type]
        decoder.drop_layers()
    groups = Centroids(noise(6, 24), torch.randperm(VOCAB, generator=generator).view(6, -1), 3)
    return Assistant(decoder, target, noise(VOCAB, 40), noise(24, 80), noise(40, 24), groups, layers)


def write_gguf(path: Path, model: PreTrainedModel) -> Path:
    """Write a file like llama.cpp: lists by layer, and factors of the positions of layers without a window."""
    config, family = model.config, FAMILIES["gemma4_text"]
    assert family.gguf is not None
    of_layers = [config.per_layer_config[layer] for layer in range(config.num_hidden_layers)]
    widths = [layer.head_dim for layer in of_layers]
    narrow, wide = min(widths), max(widths)
    own = config.num_hidden_layers - config.num_kv_shared_layers
    writer = gguf.GGUFWriter(path, "gemma4")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    double = 2 if config.use_double_wide_mlp else 1
    writer.add_feed_forward_length(
        [config.intermediate_size * (1 if layer < own else double) for layer in range(config.num_hidden_layers)]
    )
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv([layer.num_key_value_heads for layer in of_layers])
    writer.add_key_length(wide)
    writer.add_uint32("gemma4.attention.key_length_swa", narrow)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["full_attention"]["rope_theta"])
    writer.add_float32("gemma4.rope.freq_base_swa", config.rope_parameters["sliding_attention"]["rope_theta"])
    writer.add_rope_dimension_count(wide)
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    if config.enable_moe_block:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.top_k_experts)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_uint32("gemma4.embedding_length_per_layer_input", config.hidden_size_per_layer_input)
    writer.add_float32("gemma4.final_logit_softcapping", config.final_logit_softcapping)
    rotated = int(wide * config.rope_parameters["full_attention"]["partial_rotary_factor"] / 2)
    factors = [1.0] * rotated + [1e30] * (wide // 2 - rotated)
    writer.add_tensor("rope_freqs.weight", torch.tensor(factors).numpy())
    theirs_of = {ours: name for name, ours in family.gguf.names.parts.items()}
    for name, tensor in model.state_dict().items():
        ours = family.safetensors.ours(name)
        if name == "lm_head.weight" or ours is None:  # tied
            continue
        numbers = [part for part in ours.split(".") if part.isdigit()]
        general = ".".join("{}" if part.isdigit() else part for part in ours.split("."))
        stem, suffix = general.rsplit(".", 1)
        place = theirs_of[general] if general in theirs_of else f"{theirs_of[stem]}.{suffix}"
        writer.add_tensor(place.format(*numbers), tensor.contiguous().numpy())
    finish(writer)
    return path
