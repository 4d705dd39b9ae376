"""KV cache of all rows, in tensors that are allocated once and never move."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.core.eight_bits import stored, stored_width
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


class KVCache(RowTables):
    """Keys and values of every layer that has some.

    Layers of one shape lie together in a table [layer, row, head, position, dim] of keys and one of values. With a
    dtype of 8 bits, ``dim`` is the stored width of a vector with its scale (``core.eight_bits``).
    layers: the heads of each layer.
    shapes: of the tables, in the order in which layers first have them. layer_counts: number of layers of each shape.
    places: each layer's table, and place in it.
    of_shapes: the tables of each shape: keys and values, which may be a part of the keys.
    keys, values: the tables of the first layer's shape.
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
    ) -> None:
        least = min((each.heads for each in layers), default=1)
        for name, value in (("layers", len(layers)), ("rows", rows), ("heads", least), ("positions", positions)):
            if value < 1:
                raise ParameterError(name, value, "at least 1")
        self.layer_counts = Counter(layers)
        self.shapes = tuple(self.layer_counts)
        self.places = table_places(layers)
        tables = [
            (count, shape.heads, stored_width(width, dtype))
            for shape, count in self.layer_counts.items()
            for width in shape.stored
        ]
        super().__init__(tables, rows, positions, dtype, torch.device(device))
        self.of_shapes = self._keys_and_values()
        self.keys, self.values = self.of_shapes[0]
        self.adapter_of = torch.zeros(rows, dtype=torch.int32, device=device)

    def _keys_and_values(self) -> list[tuple[Tensor, Tensor]]:
        tables, found = iter(self.tables), []
        for shape in self.shapes:
            keys = next(tables)
            width = stored_width(shape.value_width, keys.dtype)
            found.append((keys, keys[..., -width:] if shape.values_in_keys else next(tables)))
        return found

    @staticmethod
    def bytes_for(layers: Sequence[KVHeads], rows: int, positions: int, dtype: torch.dtype) -> int:
        """Bytes that such a cache takes on devices where all memory is allocated at once."""
        width = sum(shape.heads * stored_width(each, dtype) for shape in layers for each in shape.stored)
        return width * rows * (positions + 1) * dtype.itemsize

    @classmethod
    def growing_bytes(cls, layers: Sequence[KVHeads], positions: int, dtype: torch.dtype) -> int:
        """Bytes that a row of ``positions`` tokens takes where rows grow."""
        tables = [(1, shape.heads, stored_width(width, dtype)) for shape in layers for width in shape.stored]
        return sum(cls.row_bytes(1, table, positions, dtype) for table in tables)

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, [row, head, position, dim] each."""
        table, place = self.places[layer]
        keys, values = self.of_shapes[table]
        return keys[place], values[place]

    def write_index(self, rows: Tensor, positions: Tensor, table: int = 0) -> list[Tensor]:
        """Flat indices of the slots ``positions`` [B, L] of ``rows`` [B] in keys and values: [B * heads * L] int64.

        There is none for values that are a part of the keys. The indices are the same for every layer of a table, so
        they are computed once per forward pass. Positions beyond a row's end map to its trash slot.
        """
        heads = self.shapes[table].heads
        head = torch.arange(heads, device=positions.device)
        line = rows[:, None, None] * heads + head[None, :, None]
        slot = self.within(rows[:, None], positions)[:, None, :]
        stored = self.of_shapes[table][: len(self.shapes[table].stored)]
        of_width = {width: (line * width + slot).flatten() for width in {tensor.shape[3] for tensor in stored}}
        return [of_width[tensor.shape[3]] for tensor in stored]

    def write(self, layer: int, indices: Sequence[Tensor], k: Tensor, v: Tensor) -> None:
        """Store k and v, [B, heads, L, dim] each, of one layer at ``indices`` (from ``write_index`` of its table)."""
        for table, new, index in zip(self.layer(layer), (k, v), indices, strict=False):  # v may be a part of k
            vectors = stored(new, table.dtype)
            lines, vectors = (each.reshape(-1, each.shape[-1]) for each in (table, vectors))
            if table.dtype.itemsize == 1:
                lines, vectors = lines.view(torch.int8), vectors.view(torch.int8)  # torch copies no float8 by index
            lines.index_copy_(0, index, vectors)


def table_places(layers: Sequence[KVHeads]) -> tuple[tuple[int, int], ...]:
    """Each layer's table, and its place in it: layers of one shape share a table."""
    tables = {shape: table for table, shape in enumerate(dict.fromkeys(layers))}
    free = {shape: count() for shape in tables}
    return tuple((tables[shape], next(free[shape])) for shape in layers)
