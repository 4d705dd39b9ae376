"""Keys with large biases keep their precision in 8 bits, by torch and by the CPU kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from model_support import NATIVE, tiny
from paceline.core.eight_bits import key_balance
from paceline.core.nodes import Nodes
from paceline.kernels import native
from paceline.kernels.attention import BACKENDS
from paceline.models.base import FlatModel, cache_of
from paceline.models.decoding.decoder import Decoder
from paceline.models.load.prepare import ModelOptions, load
from paceline.models.torch.transformer import Transformer

CPU = torch.device("cpu")
TOKENS = torch.arange(40) % 61


def biased() -> Any:
    """Qwen2 whose keys have a bias of 100 in a pair of channels, and otherwise numbers of about 1, as their biases."""
    model = tiny("qwen2", {**NATIVE["qwen2"][1], "hidden_size": 64, "head_dim": 16})
    random = torch.Generator().manual_seed(0)
    for layer in model.model.layers:
        bias = layer.self_attn.k_proj.bias.data.normal_(generator=random).view(-1, 16)
        bias[:, 3] = bias[:, 11] = 100.0
        layer.self_attn.k_proj.weight.data *= 0.2
        layer.self_attn.q_proj.weight.data *= 0.05
    return model


def torch_logits(model: Transformer, kv_dtype: torch.dtype | None) -> Tensor:
    decoder = Decoder(model, BACKENDS["padded"](), 1, len(TOKENS), kv_dtype=kv_dtype)
    with torch.no_grad():
        return decoder.logits(decoder.forward(TOKENS[None], torch.zeros(1, dtype=torch.int64), len(TOKENS))[0])


def native_logits(model: FlatModel, kv_dtype: torch.dtype) -> Tensor:
    nodes = Nodes(TOKENS, torch.zeros_like(TOKENS), torch.arange(len(TOKENS)))
    return model.logits(model.forward(nodes, cache_of(model, 1, len(TOKENS), kv_dtype)).hidden)


def test_divisors_are_powers_of_two_that_rotated_pairs_share() -> None:
    bias = torch.tensor([[100.0, 1, 3, 0, 0.5, 1, -2, 0, 40, 1]])
    assert key_balance(bias, 8).tolist() == [[32, 1, 1, 1, 32, 1, 1, 1, 8, 1]]
    assert len(key_balance(torch.zeros(2, 4), 4).unique()) == 1


def test_large_biases_do_not_cost_the_other_channels_their_bits() -> None:
    model = load(biased(), ModelOptions(torch.float32, CPU, "padded"))
    assert isinstance(model, Transformer)
    exact, balanced = (torch_logits(model, dtype) for dtype in (None, torch.int8))
    for block in model._blocks:
        block.attention.terms = replace(block.attention.terms, balance=None)
    unbalanced = torch_logits(model, torch.int8)
    assert torch.equal(torch_logits(model, None), exact), "caches of 16 bits are not balanced"
    errors = [float((found - exact).norm() / exact.norm()) for found in (balanced, unbalanced)]
    assert errors[0] < 0.02
    assert errors[1] > 2 * errors[0]


@pytest.mark.skipif(not native.available(), reason=f"needs the CPU kernels: {native.why_none()}")
def test_the_kernels_balance_keys() -> None:
    model = load(biased(), ModelOptions(torch.bfloat16, CPU, "native"))
    assert isinstance(model, FlatModel)
    exact, found = (native_logits(model, dtype) for dtype in (torch.float32, torch.int8))
    assert 0 < float((found - exact).norm() / exact.norm()) < 0.02
