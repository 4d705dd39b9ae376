"""A model's KV cache by slot, and the number of tokens that each slot holds: for prefixes, joins and ends of rows."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from paceline.core.cache import KVCache
from paceline.core.recurrent_state import CHUNK, StatefulCache
from paceline.models.base import AnyModel, SharedModel, cache_of


class CachedRows:
    """The cache of a model, whose rows are the slots of a batch (``Batch.slots``).

    rows, positions: size of the KV cache, in rows and tokens per row.
    kv_dtype: of its keys and values; None: the model's own. pool: see ``cache_of``.

    num_computed_tokens [rows] int64: number of tokens of each row whose keys and values are in the cache. Between
        rounds it is length - 1 for the target; for a draft model it may be less.
    """

    def __init__(
        self, model: AnyModel, rows: int, positions: int, kv_dtype: torch.dtype | None = None, pool: int | None = None
    ) -> None:
        self.cache = self._new_cache(model, rows, positions, kv_dtype, pool)
        self._recurrent = self.cache.states if isinstance(self.cache, StatefulCache) else None
        self.num_computed_tokens = torch.zeros(rows, dtype=torch.int64, device=model.device)

    def _new_cache(
        self, model: AnyModel, rows: int, positions: int, dtype: torch.dtype | None, pool: int | None
    ) -> KVCache:
        if isinstance(model, SharedModel):
            assert dtype in (None, model.dtype), "EngineConfig refuses others"
            assert pool is None, "the other ranks do not know the pages"
            return model.new_cache(rows, positions)
        return cache_of(model, rows, positions, dtype, pool)

    def num_computed(self, row: int) -> int:
        """Return the number of computed tokens of a row. Synchronises with the device."""
        return int(self.num_computed_tokens[row])

    def copy_row(self, source: int, destination: int, length: int) -> None:
        """Copy the first ``length`` positions of a row to another row."""
        self.cache.copy_row(source, destination, length)
        self.num_computed_tokens[destination] = self.num_computed_tokens[source].clamp(max=length)

    def cut_row(self, row: int, length: int) -> None:
        """Begin a new text in a row, of which at most ``length`` tokens are in the cache already."""
        self.num_computed_tokens[row].clamp_(max=length)
        self.cache.cut(row, length)
        if self._recurrent is not None:
            self._recurrent.cut(row, length)

    def row(self, slot: int, length: int, text: int) -> dict[str, Tensor]:
        """Return a copy of what a slot holds of its first ``length`` tokens, all of which are computed, by name.

        text: tokens that the target has computed. Draft heads hold something of all of them.
        """
        tables = {f"table{index}": table for index, table in enumerate(self.cache.row(slot, length))}
        return tables if self._recurrent is None else {**self._recurrent.row(slot, length), **tables}

    def is_row(self, tensors: Mapping[str, Tensor], length: int, text: int) -> bool:
        """Whether these are what ``row`` returns for ``length`` tokens of a text."""
        states = self._recurrent is None or self._recurrent.is_row(tensors, length)
        return states and self.cache.is_row(_tables(tensors), length)

    def restore_row(self, slot: int, tensors: Mapping[str, Tensor], length: int, text: int) -> None:
        """Begin a new text in a slot with the first ``length`` computed tokens of one that ``row`` copied.

        They must be ``reusable`` there. text: tokens that the target begins with.
        """
        self.cache.set_row(slot, _tables(tensors), length)
        self.num_computed_tokens[slot] = length
        if self._recurrent is not None:
            self._recurrent.set_row(slot, tensors)
        self.cut_row(slot, length)

    def erase_row(self, row: int) -> None:
        """Set the keys, values and states of a row to zeros, as before its first text."""
        self.cache.erase_row(row)

    def resize_row(self, row: int, positions: int) -> None:
        """Set the capacity of a row in tokens; memory beyond it is freed. See ``RowTables``."""
        self.cache.resize(row, positions)

    def capacity_of(self, row: int) -> int:
        """Return the capacity of a row in tokens."""
        return self.cache.sizes[row]

    @property
    def grows(self) -> bool:
        """Whether memory is allocated per row as it grows."""
        return self.cache.grows

    def save_state(self, slot: int, *, apart: int) -> None:
        """Save the recurrent state after a slot's prefilled tokens, unless one was saved less than ``apart`` before.

        Models without recurrent layers need none: their caches can be cut anywhere.
        """
        if self._recurrent is not None:
            self._recurrent.save(slot, apart=apart)

    def limit_saved_states(self, count: int) -> None:
        """Set how many recurrent states may be saved, of all slots together."""
        if self._recurrent is not None:
            self._recurrent.max_saved = count

    @property
    def slots_with_states(self) -> set[int]:
        """The slots that hold a recurrent state; none without recurrent layers."""
        return set() if self._recurrent is None else self._recurrent.held

    @property
    def largest_states(self) -> int:
        """Most bytes of recurrent states that a slot may hold, saved ones included."""
        return 0 if self._recurrent is None else self._recurrent.largest_bytes

    def reusable(self, slot: int, tokens: int) -> int:
        """Return how many of a slot's first ``tokens`` computed tokens another text can start from.

        Keys and values can be cut anywhere; a recurrent state only where it is kept.
        """
        return tokens if self._recurrent is None else self._recurrent.reusable(slot, tokens)

    @property
    def cuts_anywhere(self) -> bool:
        """Whether a slot can be cut at any token; recurrent states cannot."""
        return self._recurrent is None

    @property
    def prefill_step(self) -> int:
        """Tokens at whose multiples prefill pauses, so that a prompt's chunks do not depend on how it is divided."""
        return CHUNK if self._recurrent is not None and self._recurrent.base.is_cuda else 1

    def pretend(self, rows: int, computed: int) -> None:
        """Count ``computed`` tokens of the first slots as computed, whatever their caches hold, to measure times."""
        self.num_computed_tokens[:rows] = computed
        if self._recurrent is not None:
            self._recurrent.pretend(range(rows), computed)


def _tables(tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """Return the tables among the tensors of a slot, in their order."""
    names = (name for name in tensors if name.startswith("table"))
    return [tensors[name] for name in sorted(names, key=lambda name: (len(name), name))]
