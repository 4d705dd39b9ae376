"""Write a layer's new keys and values into the cache, then attend over it."""

from __future__ import annotations

from functools import cached_property

from torch import Tensor

from paceline.core.cache import KVCache
from paceline.core.slots import Slots
from paceline.kernels.attention.base import AttentionBackend, Plan
from paceline.kernels.gpu.state import PackedHeads


class CachedAttend:
    """An ``Attend`` over the rows of a cache in ``rows``, for one forward pass."""

    def __init__(self, cache: KVCache, backend: AttentionBackend, plan: Plan, rows: Slots) -> None:
        self.cache, self.backend, self.plan, self.rows = cache, backend, plan, rows
        plan.cache_rows = rows

    @cached_property
    def _index(self) -> Tensor:
        return self.cache.write_index(self.rows.index, self.plan.slots)

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, window: int | None = None
    ) -> Tensor:
        self.cache.write(layer, self._index, k, v)
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        return self.backend.attend(q, keys, values, self.plan, scale=scale, window=window)


class PackedCachedAttend(CachedAttend):
    """A ``CachedAttend`` that is an ``AttendPacked``: norm, rotation and cache write in one launch. Needs triton."""

    def packed(self, layer: int, heads: PackedHeads, *, scale: float | None, window: int | None) -> Tensor:
        from paceline.kernels.gpu.rotary import turn_and_store

        keys, values = self.cache.keys[layer], self.cache.values[layer]
        q = turn_and_store(heads, self.plan.slots, keys, values, self.rows.index)
        return self.backend.attend(q, keys, values, self.plan, scale=scale, window=window)
