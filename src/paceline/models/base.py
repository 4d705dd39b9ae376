"""What the rest of paceline needs to know of a model, whoever runs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from paceline.config import QuantizationName
from paceline.core.cache import KVCache
from paceline.core.nodes import Nodes
from paceline.errors import ParameterError
from paceline.kernels.attention.base import Attend
from paceline.kernels.gpu.graphs import Fellows


class Streams(NamedTuple):
    """What a forward pass gives of every token.

    hidden [..., width]: its last hidden state, after the final norm.
    features [..., taps, inner width]: the residual stream that enters each tapped layer, in the order of the taps; None
        without taps. In float32 from the CPU kernels, else in the model's own precision.
    """

    hidden: Tensor
    features: Tensor | None = None


def check_taps(taps: Sequence[int], layers: int) -> None:
    """Raise ParameterError unless every tap is a layer."""
    if not all(0 <= tap < layers for tap in taps):
        raise ParameterError("taps", tuple(taps), f"layers, from 0 to {layers - 1}")


class AnyModel(Protocol):
    """What any model tells of itself, and its head."""

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


class Model(AnyModel, Protocol):
    """A causal language model whose keys, values and attention are somebody else's."""

    def streams(self, tokens: Tensor, positions: Tensor, attend: Attend, taps: Sequence[int] = ()) -> Streams:
        """tokens, positions [B, L] int64 -> hidden [B, L, width] and the features of the tapped layers.

        Calls ``attend`` exactly once a layer, with the layer's index.
        """
        ...


@runtime_checkable
class FlatModel(AnyModel, Protocol):
    """A model that runs its own attention over our cache, for any set of tokens: no padding, no backend."""

    kernels: str  # what it runs on, for the start line
    quantization: QuantizationName | None

    def forward(self, nodes: Nodes, cache: KVCache, taps: Sequence[int] = ()) -> Streams:
        """N nodes -> hidden [N, width] and the features of the tapped layers. Writes the nodes' keys and values."""
        ...

    def fill(self, nodes: Nodes, cache: KVCache, taps: Sequence[int] = ()) -> Tensor | None:
        """Write the nodes' keys and values -> the features, None without taps. Nothing is drawn after these tokens."""
        ...


@runtime_checkable
class SharedModel(AnyModel, Fellows, Protocol):
    """A model that other ranks have parts of, of its caches and of the programs that it runs in, too."""

    def new_cache(self, rows: int, positions: int) -> KVCache:
        """One on every rank."""
        ...

    def when_a_rank_ends(self, call: Callable[[], None]) -> None:
        """``call`` is called, by a thread of somebody's, when a rank has ended by itself."""
        ...

    def check(self) -> None:
        """Raise RankError if a rank has ended."""
        ...

    def close(self) -> None:
        """The other ranks end; closing it again does nothing."""
        ...


@runtime_checkable
class Counted(Protocol):
    """A model that knows how much it multiplies."""

    def multiply_adds(self) -> int:
        """Of its matrices for one token, the head included, attention over the cache not."""
        ...
