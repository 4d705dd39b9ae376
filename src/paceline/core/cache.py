"""KV cache of all rows, in tensors that are allocated once and never move."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.core.eight_bits import stored, stored_width
from paceline.core.paged_tables import PagedTables
from paceline.core.pages import PagedVectors
from paceline.core.row_tables import RowTables
from paceline.errors import ParameterError


class KVHeads(NamedTuple):
    """Key and value heads of a layer.

    heads: number of key heads, and of value heads. dim: width of a key head.
    value_dim: width of a value head where it differs from ``dim``.
    values_in_keys: whether a value is the last ``value_dim`` elements of its key, so that none is stored.
    """

    heads: int
    dim: int
    value_dim: int | None = None
    values_in_keys: bool = False

    @property
    def value_width(self) -> int:
        """Width of a value head."""
        return self.dim if self.value_dim is None else self.value_dim

    @property
    def stored(self) -> tuple[int, ...]:
        """Widths of the stored vectors of a head and token: the key's, and the value's unless the key has it."""
        return (self.dim,) if self.values_in_keys else (self.dim, self.value_width)


class KVCache:
    """Keys and values of every layer that has some.

    Layers of one shape lie together in a table of keys and one of values: [layer, row, head, position, dim], or by
    pages (``PagedTables``) if the CPU kernels or ragged attention on a device read them. With a dtype of 8 bits,
    ``dim`` is the stored width of a vector with its scale (``core.eight_bits``).

    layers: the heads of each layer. paged: whether by pages. pool: number of pages; None: those of all rows.
    storage: what holds the tables.
    shapes: of the tables, in the order in which layers first have them. layer_counts: number of layers of each shape.
    places: each layer's table, and place in it.
    of_shapes: the tables of each shape: keys and values, which may be a part of the keys.
    adapter_of: number of each row's adapter (``models.load.adapters``), int32 [rows] on the device; 0: none.

    The position dimension is larger than ``positions``: one trash slot, and on a CPU padding to whole pages. Raises
    ParameterError if a size is below 1.
    """

    def __init__(
        self,
        layers: Sequence[KVHeads],
        rows: int,
        positions: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        *,
        paged: bool = False,
        pool: int | None = None,
    ) -> None:
        least = min((each.heads for each in layers), default=1)
        for name, value in (("layers", len(layers)), ("rows", rows), ("heads", least), ("positions", positions)):
            if value < 1:
                raise ParameterError(name, value, "at least 1")
        self.layer_counts = Counter(layers)
        self.shapes = tuple(self.layer_counts)
        self.places = table_places(layers)
        tables = _tables_of(self.layer_counts, dtype)
        sizes = tables, rows, positions, dtype, torch.device(device)
        self.storage = PagedTables(*sizes, pool) if paged else RowTables(*sizes)
        self.rows, self.positions, self.dtype, self.device = rows, positions, dtype, torch.device(device)
        self.of_shapes = self._keys_and_values()
        self.adapter_of = torch.zeros(rows, dtype=torch.int32, device=device)

    def _keys_and_values(self) -> list[tuple[Tensor, Tensor]]:
        tables, found = iter(self.tables), []
        for shape in self.shapes:
            keys = next(tables)
            width = stored_width(shape.value_width, keys.dtype)
            found.append((keys, keys[..., -width:] if shape.values_in_keys else next(tables)))
        return found

    @property
    def grows(self) -> bool:
        """Whether rows take only the memory that they use."""
        return self.storage.grows

    @property
    def pages(self) -> Tensor | None:
        """Page of each block of each row, [rows, blocks] int32 on the device; None if rows lie side by side."""
        return self.storage.pages

    @property
    def page_bytes(self) -> int:
        """Bytes of a page in all tables; 0 without pages."""
        return self.storage.page_bytes

    @property
    def has_pool(self) -> bool:
        """Whether its memory is a fixed number of pages."""
        return self.storage.has_pool

    @property
    def sizes(self) -> list[int]:
        """Positions that each row may have."""
        return self.storage.sizes

    @property
    def tables(self) -> list[Tensor]:
        """The storage's tables."""
        return self.storage.tables

    @property
    def keys(self) -> Tensor:
        """Keys of the layers of the first shape, [layer, row, head, position, dim]. A copy if they are in pages."""
        return self.storage.by_row(self.of_shapes[0][0])

    @property
    def values(self) -> Tensor:
        """Values likewise."""
        return self.storage.by_row(self.of_shapes[0][1])

    @staticmethod
    def bytes_for(layers: Sequence[KVHeads], rows: int, positions: int, dtype: torch.dtype) -> int:
        """Bytes that such a cache takes on devices where all memory is allocated at once."""
        width = sum(shape.heads * stored_width(each, dtype) for shape in layers for each in shape.stored)
        return width * rows * (positions + 1) * dtype.itemsize

    @staticmethod
    def growing_bytes(layers: Sequence[KVHeads], positions: int, dtype: torch.dtype, *, paged: bool = False) -> int:
        """Bytes that a row of ``positions`` tokens takes where rows grow, or are in pages that they do not share."""
        row_bytes = (PagedTables if paged else RowTables).row_bytes
        return sum(row_bytes(table, positions, dtype) for table in _tables_of(Counter(layers), dtype))

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, [row, head, position, dim] each. Copies if they are in pages."""
        table, place = self.places[layer]
        keys, values = self.of_shapes[table]
        return self.storage.layer(keys, place), self.storage.layer(values, place)

    def in_place(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer as they lie in memory: as ``layer`` has them, or [page, head, place, dim]."""
        table, place = self.places[layer]
        keys, values = self.of_shapes[table]
        return self.storage.of_layer(keys, place), self.storage.of_layer(values, place)

    def write_index(self, rows: Tensor, positions: Tensor, table: int = 0) -> list[Tensor]:
        """Flat indices of the slots ``positions`` [B, L] of ``rows`` [B] in keys and values: [B * heads * L] int64.

        There is none for values that are a part of the keys. The indices are the same for every layer of a table, so
        they are computed once per forward pass. Positions beyond a row's end map to its trash slot.
        """
        stored = self.of_shapes[table][: len(self.shapes[table].stored)]
        of_width = {tensor.shape[3]: tensor for tensor in stored}
        index = {width: self.storage.vector_index(tensor, rows, positions) for width, tensor in of_width.items()}
        return [index[tensor.shape[3]] for tensor in stored]

    def write(self, layer: int, indices: Sequence[Tensor], k: Tensor, v: Tensor) -> None:
        """Store k and v, [B, heads, L, dim] each, of one layer at ``indices`` (from ``write_index`` of its table)."""
        number, place = self.places[layer]
        for table, new, index in zip(self.of_shapes[number], (k, v), indices, strict=False):  # v may be a part of k
            self.storage.write(table, place, index, stored(new, table.dtype))

    def paged(self, table: int) -> PagedVectors:
        """A table as the CPU kernels read it."""
        return self.storage.paged(table)

    def cover(self, rows: Sequence[int], firsts: Sequence[int], stops: Sequence[int]) -> None:
        """Prepare for writes at the positions firsts[i] to stops[i] - 1 of rows[i]."""
        self.storage.cover(rows, firsts, stops)

    def keep(self, rows: Tensor, text: Tensor, paths: Tensor) -> None:
        """Move the keys and values of accepted nodes behind their rows' texts; see ``RowTables.keep``."""
        self.storage.keep(rows, text, paths)

    def copy_row(self, source: int, destination: int, length: int) -> None:
        """Let a row begin with the first ``length`` positions of another one."""
        self.storage.copy_row(source, destination, length)

    def cut(self, row: int, length: int) -> None:
        """Forget what a row has behind its first ``length`` positions."""
        self.storage.cut(row, length)

    def erase_row(self, row: int) -> None:
        """Set a row to zeros, which keeps a failed text's NaN out of the next one."""
        self.storage.erase_row(row)

    def repeated_bytes(self, rows: Collection[int]) -> int:
        """Return the bytes that these rows share, without their first time."""
        return self.storage.repeated_bytes(rows)

    def shared_bytes_behind(self, row: int, positions: int) -> int:
        """Return the bytes that a row shares with others and would no longer if it kept ``positions`` alone."""
        return self.storage.shared_bytes_behind(row, positions)

    def shareable_bytes(self, positions: int) -> int:
        """Return the bytes that a row shares which begins with the first ``positions`` of another one."""
        return self.storage.shareable_bytes(positions)

    def row(self, row: int, length: int) -> list[Tensor]:
        """Return a copy of the first ``length`` positions of a row in each table: [layer, head, length, dim]."""
        return self.storage.row(row, length)

    def is_row(self, tensors: Sequence[Tensor], length: int) -> bool:
        """Whether these are what ``row`` returns for ``length`` positions of such a cache."""
        return self.storage.is_row(tensors, length)

    def set_row(self, row: int, tensors: Sequence[Tensor], length: int) -> None:
        """Write the first ``length`` positions of a row from what ``row`` returned, which may be longer."""
        self.storage.set_row(row, tensors, length)

    def check_integrity(self) -> None:
        """Raise AssertionError if a page is lost, or counted wrongly."""
        self.storage.check_integrity()

    def randomise(self, rows: int, positions: int, generator: torch.Generator) -> None:
        """Fill the first positions of the first rows with random numbers."""
        self.storage.randomise(rows, positions, generator)

    def resize(self, row: int, positions: int) -> None:
        """Set the positions that a row may have; the memory of those beyond is freed."""
        self.storage.resize(row, positions)


def _tables_of(layer_counts: Mapping[KVHeads, int], dtype: torch.dtype) -> list[tuple[int, int, int]]:
    """Layers, heads and stored width of the tables of each shape."""
    return [
        (count, shape.heads, stored_width(width, dtype))
        for shape, count in layer_counts.items()
        for width in shape.stored
    ]


def table_places(layers: Sequence[KVHeads]) -> tuple[tuple[int, int], ...]:
    """Each layer's table, and its place in it: layers of one shape share a table."""
    tables = {shape: table for table, shape in enumerate(dict.fromkeys(layers))}
    free = {shape: count() for shape in tables}
    return tuple((tables[shape], next(free[shape])) for shape in layers)
