"""What the rest of paceline needs to know of a model, whoever runs it."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from paceline.attention.base import Attend


class Model(Protocol):
    """A causal language model whose keys and values are kept by somebody else."""

    name: str
    vocab_size: int
    layers: int
    kv_heads: int
    head_dim: int
    max_positions: int  # the longest sequence the model was made for
    dtype: torch.dtype
    device: torch.device

    def hidden(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """tokens, positions [B, L] int64 -> last hidden states [B, L, width], after the final norm.

        Calls ``attend`` exactly once a layer, with the layer's index.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [..., width] -> logits [..., vocab_size] in float32."""
        ...

    def weight_bytes(self) -> int:
        """Memory of the weights, each counted once (tied ones too), in bytes."""
        ...
