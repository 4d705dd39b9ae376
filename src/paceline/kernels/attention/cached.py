"""Write a layer's new keys and values into the cache, then attend over it."""

from __future__ import annotations

from torch import Tensor

from paceline.core.cache import KVCache
from paceline.core.eight_bits import LARGEST
from paceline.core.recurrent_state import RowsPass
from paceline.core.slots import Slots
from paceline.kernels.attention.base import PLAIN, AttentionBackend, AttentionTerms, Plan
from paceline.kernels.gpu.state import PackedHeads


class CachedAttend:
    """An ``Attend`` over the rows of a cache in ``rows``, for one forward pass. states: its recurrent ones, if any."""

    def __init__(
        self, cache: KVCache, backend: AttentionBackend, plan: Plan, rows: Slots, states: RowsPass | None = None
    ) -> None:
        self.cache, self.backend, self.plan, self.rows, self.states = cache, backend, plan, rows, states
        plan.cache_rows, plan.pages = rows, cache.pages
        self._indices: dict[int, list[Tensor]] = {}  # by table of the cache

    def _index(self, layer: int) -> list[Tensor]:
        """The indices of the layer's new keys and values, made once for each table of the cache."""
        table = self.cache.places[layer][0]
        if table not in self._indices:
            self._indices[table] = self.cache.write_index(self.rows.index, self.plan.slots, table)
        return self._indices[table]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, terms: AttentionTerms = PLAIN) -> Tensor:
        if terms.balance is not None and self.cache.dtype in LARGEST:
            k = k / terms.balance[:, None].to(k.dtype)
        self.write(layer, k, v)
        return self.again(layer, q, terms)

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store the new keys and values of a layer."""
        self.cache.write(layer, self._index(layer), k, v)

    def stored(self, layer: int) -> Tensor:
        """Return the keys of the pass's rows at the first ``Plan.longest`` positions, [B, heads, longest, dim]."""
        return self.plan.of_rows(self.cache.in_place(layer)[0])

    def again(self, layer: int, q: Tensor, terms: AttentionTerms = PLAIN) -> Tensor:
        """Attention over the layer's keys and values, which this forward pass has written already."""
        keys, values = self.cache.in_place(layer)
        if terms.balance is not None and keys.dtype in LARGEST:
            q = q * terms.balance.repeat_interleave(q.shape[1] // keys.shape[1], 0)[:, None].to(q.dtype)
        return self.backend.attend(q, keys, values, self.plan, terms)


class PackedCachedAttend(CachedAttend):
    """A ``CachedAttend`` that is an ``AttendPacked``: norm, rotation and cache write in one launch. Needs triton."""

    def packed(self, layer: int, heads: PackedHeads, terms: AttentionTerms = PLAIN) -> Tensor:
        from paceline.kernels.gpu.rotary import turn_and_store

        keys, values = self.cache.in_place(layer)
        q = turn_and_store(heads, self.plan, keys, values)
        return self.backend.attend(q, keys, values, self.plan, terms)
