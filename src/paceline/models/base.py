"""Interfaces of models: what the engine and the drafters use of a model, however it is run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from paceline.config import QuantizationName
from paceline.core.cache import KVCache, KVHeads
from paceline.core.nodes import Nodes
from paceline.core.recurrent_state import StatefulCache, StateShape
from paceline.errors import ParameterError
from paceline.kernels.attention.base import Attend
from paceline.kernels.gpu.graphs import OtherRanks


class HiddenStates(NamedTuple):
    """Hidden states that a forward pass returns for each token.

    hidden [..., width]: the last hidden state, after the final norm.
    features [..., taps, inner width]: the residual stream entering each tapped layer, in the order of the taps. None
        without taps. float32 from the CPU kernels, otherwise in the model's dtype.
    """

    hidden: Tensor
    features: Tensor | None = None


def check_taps(taps: Sequence[int], layers: int) -> None:
    """Raise ParameterError unless every tap is a layer index below ``layers``."""
    if not all(0 <= tap < layers for tap in taps):
        raise ParameterError("taps", tuple(taps), f"layers, from 0 to {layers - 1}")


class RowAdapters(Protocol):
    """The adapters that a model was loaded with, and which of them each row of a forward pass has."""

    @property
    def names(self) -> tuple[str, ...]:
        """The adapters in the order of their numbers."""
        ...

    def number(self, name: str | None) -> int:
        """Return the number of an adapter, from 1 on; 0 for None."""
        ...

    def use(self, numbers: Tensor | None) -> None:
        """Set the adapters of the rows of the forward passes that this thread runs from now on.

        numbers: int32 [B] on the model's device, 0 for none; None: no row has one.
        """
        ...


class AnyModel(Protocol):
    """Attributes common to all models, and the output head."""

    name: str
    vocab_size: int
    layers: int
    kv_heads: int
    head_dim: int
    max_positions: int  # the longest sequence the model was made for
    dtype: torch.dtype  # of its keys and values, unless a cache of another dtype is asked for
    device: torch.device

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [..., vocab_size], float32, of hidden states [..., width]."""
        ...

    def weight_bytes(self) -> int:
        """Return the bytes of all weights, adapters included. Tied weights are counted once."""
        ...


@runtime_checkable
class OwnKVLayers(AnyModel, Protocol):
    """A model whose layers may have different key heads, or none of their own.

    kv_layers: of the layers that have some, in the order of the cache's layers.
    """

    kv_layers: Sequence[KVHeads]


class Model(AnyModel, Protocol):
    """A causal language model whose KV cache and attention are provided by the caller."""

    def hidden_states(
        self, tokens: Tensor, positions: Tensor, attend: Attend, taps: Sequence[int] = ()
    ) -> HiddenStates:
        """Run tokens, positions [B, L] int64 -> hidden [B, L, width], features [B, L, taps, inner width].

        Calls ``attend`` exactly once per layer, with the number of the cache's layer.
        """
        ...


@runtime_checkable
class FlatModel(AnyModel, Protocol):
    """A model that runs its own attention over a ``KVCache``, for a flat list of tokens without padding."""

    kernels: str  # name of the kernels, shown in the start line
    quantization: QuantizationName | None

    def forward(self, nodes: Nodes, cache: KVCache, taps: Sequence[int] = ()) -> HiddenStates:
        """Run N nodes -> hidden [N - text, width], features [N, taps, inner width]. Writes their keys and values."""
        ...

    def fill(self, nodes: Nodes, cache: KVCache, taps: Sequence[int] = ()) -> Tensor | None:
        """Write the keys and values of N nodes whose logits are not needed.

        Returns the features [N, taps, inner width], or None without taps.
        """
        ...


@runtime_checkable
class SharedModel(AnyModel, OtherRanks, Protocol):
    """A model that is split over several ranks, together with its KV caches."""

    def new_cache(self, rows: int, positions: int) -> KVCache:
        """Allocate a cache of ``rows`` times ``positions`` tokens on every rank."""
        ...

    def when_a_rank_ends(self, call: Callable[[], None]) -> None:
        """Register ``call``, which a background thread calls when a rank exits unexpectedly."""
        ...

    def check(self) -> None:
        """Raise RankError if a rank has exited."""
        ...

    def close(self) -> None:
        """End the other ranks. Closing a closed model does nothing."""
        ...


@runtime_checkable
class Counted(Protocol):
    """A model that can count its multiply-adds."""

    def multiply_adds(self) -> int:
        """Return the multiply-adds of all weight matrices for one token.

        The head is included; attention over the cache is not.
        """
        ...


class ShortHead(Protocol):
    """An output head over S tokens, in places that can be filled anew. size: S."""

    size: int

    def put(self, places: Tensor, tokens: Tensor) -> None:
        """Score tokens [N] int64 of the vocabulary at places [N] int64 from now on."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [N, S] float32 of hidden states [N, width]."""
        ...


@dataclass(frozen=True)
class PassBytes:
    """Bytes of weights that a forward pass reads: of the layers, and of the output head for each token of V.

    Of a mixture, those of one token's experts.
    """

    layers: int
    token: int


@runtime_checkable
class Shortenable(AnyModel, Protocol):
    """A model that can score a part of its vocabulary, unless ``pass_bytes`` is None."""

    @property
    def pass_bytes(self) -> PassBytes | None:
        """What a forward pass reads; None if the model scores its whole vocabulary only."""
        ...

    def short_head(self, size: int) -> ShortHead:
        """Return a head over ``size`` tokens, whose places are not filled yet."""
        ...


@runtime_checkable
class Recurrent(AnyModel, Protocol):
    """A model that may have recurrent layers, which have no keys and values but a state for each slot."""

    state_shape: StateShape | None  # None: all of its layers are attention


@runtime_checkable
class Paged(AnyModel, Protocol):
    """A model that may read and write keys and values by pages, which rows share (``core.pages``)."""

    @property
    def paged(self) -> bool:
        """Whether it does."""
        ...


def state_shape_of(model: AnyModel) -> StateShape | None:
    """Return the shape of a model's recurrent states; None if it has none."""
    return model.state_shape if isinstance(model, Recurrent) else None


def kv_layers_of(model: AnyModel) -> Sequence[KVHeads]:
    """Return the key heads of a model's layers that have keys and values of their own."""
    one = KVHeads(model.kv_heads, model.head_dim)
    return model.kv_layers if isinstance(model, OwnKVLayers) else [one] * model.layers


def is_paged(model: AnyModel) -> bool:
    """Return whether a model reads and writes keys and values by pages."""
    return isinstance(model, Paged) and model.paged


def cache_of(
    model: AnyModel, rows: int, positions: int, dtype: torch.dtype | None = None, pool: int | None = None
) -> KVCache:
    """Allocate the keys and values of a model, and its recurrent states.

    dtype: of keys and values; None: its own. pool: pages that a model has which ragged attention reads; None: a row's
        keys and values lie side by side, unless the model itself reads pages.
    """
    sizes = kv_layers_of(model), rows, positions, model.dtype if dtype is None else dtype, model.device
    paged = is_paged(model) or pool is not None
    shape = state_shape_of(model)
    if shape is None:
        return KVCache(*sizes, paged=paged, pool=pool)
    return StatefulCache(shape, *sizes, paged=paged, pool=pool)
