"""Apertus: norms of queries and keys, and an MLP without a gate behind xIELU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PretrainedConfig

from paceline.models.description.spec import DecoderSpec
from paceline.models.description.weight_names import WeightNames
from paceline.models.description.weights import XIELU, LoadedTensor, StoredTensor
from paceline.models.families.base import (
    LLAMA_GGUF_NAMES,
    LLAMA_NAMES,
    Family,
    GGUFForm,
    biases_of,
    plain_like,
)


def _describe(config: PretrainedConfig) -> DecoderSpec | None:
    return plain_like(config, qk_norm="head", **biases_of(config))


def _constants(metadata: Mapping[str, Any], spec: DecoderSpec) -> dict[str, StoredTensor]:
    """Return the numbers of the activation, which files have as metadata, one for each layer."""
    numbers = {name: torch.tensor(metadata[f"xielu.{name}"]).view(-1, 1) for name in XIELU}
    layers = range(len(spec.layers))
    return {
        f"blk.{layer}.{name}.weight": LoadedTensor(each[layer]) for name, each in numbers.items() for layer in layers
    }


_NAMES = {
    "layers.{}.attention_layernorm": "layers.{}.attn_norm",
    "layers.{}.feedforward_layernorm": "layers.{}.mlp_norm",
    **{f"layers.{{}}.mlp.act_fn.{name}": f"layers.{{}}.{name}.weight" for name in XIELU},
}

FAMILY = Family(
    "apertus",
    _describe,
    WeightNames({**LLAMA_NAMES, **_NAMES}, prefixes=("model.",)),
    GGUFForm(
        ("apertus",),
        WeightNames({**LLAMA_GGUF_NAMES, **{f"blk.{{}}.{name}": f"layers.{{}}.{name}" for name in XIELU}}),
        constants=_constants,
    ),
)
