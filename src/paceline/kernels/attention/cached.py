"""Write a layer's new keys and values into the cache, then attend over it."""

from __future__ import annotations

from functools import cached_property

from torch import Tensor

from paceline.core.cache import KVCache
from paceline.kernels.attention.base import AttentionBackend, Plan
from paceline.kernels.gpu.state import PackedHeads


class CachedAttend:
    """An ``Attend`` over rows first_row, ... of a cache, for one forward pass."""

    def __init__(self, cache: KVCache, backend: AttentionBackend, plan: Plan, first_row: int) -> None:
        self.cache, self.backend, self.plan, self.first_row = cache, backend, plan, first_row
        self.rows = slice(first_row, first_row + plan.positions.shape[0])

    @cached_property
    def _index(self) -> Tensor:
        return self.cache.write_index(self.first_row, self.plan.slots)

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, window: int | None = None
    ) -> Tensor:
        self.cache.write(layer, self._index, k, v)
        keys, values = self.cache.keys[layer, self.rows], self.cache.values[layer, self.rows]
        return self.backend.attend(q, keys, values, self.plan, scale=scale, window=window)


class PackedCachedAttend(CachedAttend):
    """A ``CachedAttend`` that is an ``AttendPacked``: norm, rotation and cache write in one launch. Needs triton."""

    def packed(self, layer: int, heads: PackedHeads, *, scale: float | None, window: int | None) -> Tensor:
        from paceline.kernels.gpu.rotary import turn_and_store

        keys, values = self.cache.keys[layer, self.rows], self.cache.values[layer, self.rows]
        q = turn_and_store(heads, self.plan.slots, keys, values)
        return self.backend.attend(q, keys, values, self.plan, scale=scale, window=window)
