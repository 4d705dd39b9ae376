"""Tiny random Gemma 4 models with all kinds of layers, with heads that the CPU kernels take."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from model_support import tiny
from paceline.models.loading import load_model
from paceline.models.native import NativeModel, Quantization
from paceline.models.transformer import Transformer
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
SIZES: dict[str, dict[str, Any]] = {  # of a model; like E2B, like the dense 31B, and with the true widths of heads
    "all kinds": {},
    "keys as values": {"kinds": "sf", "shared": 0, **WITHOUT_VECTORS},
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
    return NativeModel.from_transformer(tiny_gemma4_torch(seed, **sizes), quantization=quantization, threads=1)
