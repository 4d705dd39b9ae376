"""A decoder as the kernels' reference implementation runs it, in the interface of models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from kernels.reference import ReferenceDecoder
from paceline.core.cache import KVCache
from paceline.core.nodes import Nodes
from paceline.kernels.spec import NativeSpec
from paceline.models.base import HiddenStates, check_taps
from paceline.models.native.model import HEAD_FORMAT, LAYER_FORMAT, Quantization


class ReferenceModel:
    """Rounds weights and inputs as ``NativeModel`` does with the same quantization; "fp32" rounds nothing.

    Implements ``FlatModel``.
    """

    kernels, quantization = "reference", None

    def __init__(self, spec: NativeSpec, name: str, *, quantization: Quantization | Literal["fp32"] | None) -> None:
        self.name = name
        self.vocab_size, self.layers, self.width = spec.vocab_size, len(spec.layers), spec.width
        self.state_shape, self.kv_layers = spec.states, spec.kv_layers
        self.kv_heads, self.head_dim, self.max_positions = spec.kv_heads, spec.head_dim, spec.max_positions
        self.device = torch.device("cpu")
        if quantization == "fp32":
            self.dtype, self._decoder = torch.float32, ReferenceDecoder(spec, "fp32", "fp32")
        else:
            formats = LAYER_FORMAT[quantization], HEAD_FORMAT[quantization]
            self.dtype, self._decoder = torch.bfloat16, ReferenceDecoder(spec, *formats)

    def forward(self, nodes: Nodes, cache: KVCache, taps: Sequence[int] = ()) -> HiddenStates:
        check_taps(taps, self.layers + 1)
        return HiddenStates(*self._decoder.forward(nodes, cache, taps))

    def fill(self, nodes: Nodes, cache: KVCache, taps: Sequence[int] = ()) -> Tensor | None:
        check_taps(taps, self.layers + 1)
        return self._decoder.forward(nodes, cache, taps, text=True)[1]

    def logits(self, hidden: Tensor) -> Tensor:
        return self._decoder.logits(hidden.reshape(-1, self.width)).view(*hidden.shape[:-1], self.vocab_size)

    def weight_bytes(self) -> int:
        return 0
