"""What the rest of paceline needs to know of a model, whoever runs it."""

from __future__ import annotations

from typing import Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from paceline.attention.base import Attend
from paceline.cache import KVCache
from paceline.params import QuantizationName


class _AnyModel(Protocol):
    name: str
    vocab_size: int
    layers: int
    kv_heads: int
    head_dim: int
    max_positions: int  # the longest sequence the model was made for
    dtype: torch.dtype  # of its keys and values
    device: torch.device

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [..., width] -> logits [..., vocab_size] in float32."""
        ...

    def weight_bytes(self) -> int:
        """Memory of the weights, each counted once (tied ones too), in bytes."""
        ...


class Model(_AnyModel, Protocol):
    """A causal language model whose keys, values and attention are somebody else's."""

    def hidden(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """tokens, positions [B, L] int64 -> last hidden states [B, L, width], after the final norm.

        Calls ``attend`` exactly once a layer, with the layer's index.
        """
        ...


@runtime_checkable
class FlatModel(_AnyModel, Protocol):
    """A model that runs its own attention over our cache, for any set of tokens: no padding, no backend."""

    kernels: str  # what it runs on, for the start line
    quantization: QuantizationName | None

    def forward_flat(self, tokens: Tensor, rows: Tensor, positions: Tensor, cache: KVCache) -> Tensor:
        """tokens, their cache rows and positions, each [N] int64 -> hidden [N, width] after the final norm.

        The tokens of a row are consecutive and their positions ascend. Writes their keys and values.
        """
        ...


AnyModel: TypeAlias = Model | FlatModel
