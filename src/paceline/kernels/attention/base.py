"""The protocol of attention backends.

Shapes: B rows, L new tokens per row, R rows of the cache, H heads, G key/value heads, P positions, D width of a query
and key, V width of a value.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Protocol, TypeGuard, runtime_checkable

import torch
from torch import Tensor

from paceline.core.recurrent_state import RowsPass
from paceline.core.slots import Slots
from paceline.kernels.gpu.state import PackedHeads


@dataclass
class Plan:
    """What attention needs to know about one forward pass: computed once, used by every layer.

    positions: [B, L] int64, the position of every query. A key is visible to a query if and only if its position is not
        greater than the query's (and, with a sliding window w, greater than the query's minus w).
    longest: number of cache slots that any query can see (a host integer); keys at ``longest`` and beyond are hidden.
    ancestors: [B, L, L] bool, for trees: whether a query (second dimension) sees a new token (third), itself included.
        The new keys lie side by side from the root's slot ``positions[:, 0]`` on; every query of the row sees all keys
        before it. None: the new tokens are a chain, and every key's slot is its position.
    looks_ahead: whether a query may see new tokens behind it, as in a block; else all of its ancestors are before it.
    cache_rows: the rows' places in the cache; None: row i of the cache for row i.
    pages: [R, blocks] int32, the page of each block of positions of the cache's rows. Keys and values are then
        [pages, G, positions of a page, D]; see ``core.pages``. None: they are [R, G, P, D].
    """

    positions: Tensor
    longest: int
    ancestors: Tensor | None = None
    looks_ahead: bool = False
    cache_rows: Slots | None = None
    pages: Tensor | None = None
    masks: dict[tuple[int | None, int], Tensor] = field(default_factory=dict)  # by window, and query heads per key head
    rows: list[Plan] = field(default_factory=list)  # one plan per row, for backends that go row by row

    @cached_property
    def slots(self) -> Tensor:
        """[B, L]: the cache slots of the new keys."""
        if self.ancestors is None:
            return self.positions
        return self.positions[:, :1] + torch.arange(self.positions.shape[1], device=self.positions.device)

    @cached_property
    def paths(self) -> Tensor:
        """[B, L, L] int32, for trees: indices of the new tokens on the path to each token, itself last, then L as
        padding.
        """
        assert self.ancestors is not None
        order = torch.arange(self.ancestors.shape[2], dtype=torch.int32, device=self.ancestors.device)
        return torch.where(self.ancestors, order, len(order)).sort(2).values

    def of_rows(self, table: Tensor) -> Tensor:
        """The rows' keys or values at the first ``longest`` positions, [B, G, longest, D].

        table: those of the whole cache. Pages are gathered into a copy.
        """
        rows, pages = self.cache_rows, self.pages
        if pages is None:
            seen = table[:, :, : self.longest]
            return seen if rows is None else rows.of(seen)
        blocks = (pages if rows is None else rows.of(pages))[:, : -(-self.longest // table.shape[2])]
        vectors = table.view(torch.int8) if table.dtype.itemsize == 1 else table  # torch copies no float8 by index
        found = vectors[blocks.long()].view(table.dtype).transpose(1, 2).flatten(2, 3)
        return found[:, :, : self.longest]

    def hidden(self, window: int | None) -> Tensor:
        """[B, L, longest] bool: True where a query must not see a key."""
        query = self.positions[:, :, None]
        key = torch.arange(self.longest, device=query.device)
        # Padding beyond ``longest`` still sees a key: no softmax over nothing, no NaN in the cache.
        first = None if window is None else query.clamp(max=self.longest - 1) - window
        if self.ancestors is None:
            hidden = key > query
            return hidden if first is None else hidden | (key <= first)
        seen, at = self._tree_keys(self.ancestors)
        return ~seen if first is None else ~(seen & (at > first))

    def _tree_keys(self, ancestors: Tensor) -> tuple[Tensor, Tensor]:
        """Whether each query sees a key [B, L, longest], and the keys' positions [B, 1, longest]."""
        rows, length = self.positions.shape
        key = torch.arange(self.longest + length, device=self.positions.device)  # new keys may lie beyond ``longest``
        slots = self.slots.clamp(max=len(key) - 1)[:, None]  # idle rows' lie anywhere, and nothing of them is used
        seen = (key < self.positions[:, :1, None]).repeat(1, length, 1)
        seen.scatter_(2, slots.expand(-1, length, -1), ancestors)
        at = key.repeat(rows, 1, 1).scatter_(2, slots, self.positions[:, None])
        return seen[..., : self.longest], at[..., : self.longest]


@dataclass(frozen=True, eq=False)
class AttentionTerms:
    """How a layer's queries and keys give weights.

    scale: factor of the scores; None: D ** -0.5. window: positions that a query sees, its own the last; None: all.
    cap: the scores are cap * tanh(scores / cap); None: they are not capped.
    sinks: [H], one more score of each head, without a value and never capped; None: there are none.
    balance: [G, D], what keys are divided by in caches of 8 bits (``eight_bits.key_balance``); None: nothing.
    """

    scale: float | None = None
    window: int | None = None
    cap: float | None = None
    sinks: Tensor | None = None
    balance: Tensor | None = None

    def scale_of(self, dim: int) -> float:
        """Factor of the scores of heads of this width."""
        return float(dim**-0.5) if self.scale is None else self.scale


PLAIN = AttentionTerms()


class AttentionBackend(Protocol):
    """Attention of L new tokens per row over each row's own cached prefix."""

    name: str

    def plan(self, positions: Tensor, longest: int, ancestors: Tensor | None = None) -> Plan:
        """Prepare one forward pass."""
        ...

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: Plan, terms: AttentionTerms = PLAIN) -> Tensor:
        """q [B, H, L, D] over k_cache [R, G, P, D], v_cache [R, G, P, V] (new keys written) -> [B, H, L, V].

        If the plan has pages, the caches are [pages, G, positions of a page, D] and [..., V]. Caches of 8 bits have
        stored vectors (``core.eight_bits``), which are wider than D and V.
        """
        ...


class Attend(Protocol):
    """The call that a model makes once per layer: write the new keys and values, then attend over the row's prefix.

    layer: of the cache. q [B, H, L, D], k [B, G, L, D] (rotary already applied), v [B, G, L, V] -> [B, H, L, V].
    """

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, terms: AttentionTerms = PLAIN) -> Tensor: ...


@runtime_checkable
class AttendAgain(Protocol):
    """An ``Attend`` whose keys and values can be read once more, by another layer of the model."""

    def again(self, layer: int, q: Tensor, terms: AttentionTerms = PLAIN) -> Tensor:
        """Attention of q [B, H, L, D] over what this forward pass has written to the cache's layer -> [B, H, L, V]."""
        ...


@runtime_checkable
class HasCache(Protocol):
    """An ``Attend`` whose cache can be used without attention. P: ``Plan.longest``."""

    plan: Plan

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store the new k [B, G, L, D] and v [B, G, L, V] of the cache's layer."""
        ...

    def stored(self, layer: int) -> Tensor:
        """Return the keys [B, G, P, D] of the pass's rows in the cache's layer."""
        ...


@runtime_checkable
class HasStates(Protocol):
    """An ``Attend`` of a forward pass that may run recurrent layers, too."""

    @property
    def states(self) -> RowsPass | None:
        """The pass over the rows' recurrent states; None if the model has none."""
        ...


@runtime_checkable
class AttendPacked(Protocol):
    """An ``Attend`` that takes a layer's heads before norm and rotary, and does both together with the cache write."""

    def packed(self, layer: int, heads: PackedHeads, terms: AttentionTerms = PLAIN) -> Tensor:
        """Attention of the packed heads -> [B, H, L, D]."""
        ...


def takes_packed(attend: Attend) -> TypeGuard[AttendPacked]:
    """Whether an ``Attend`` is an ``AttendPacked``."""
    return _takes_packed(type(attend))


@cache
def _takes_packed(kind: type[Attend]) -> bool:  # kept, because the check of a protocol takes 20 us
    return issubclass(kind, AttendPacked)
