"""KV cache of all rows, in tensors that are allocated once and never move."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.core.row_tables import RowTables
from paceline.errors import ParameterError


class KVHeads(NamedTuple):
    """Number and width of the key heads of a layer, and of its value heads."""

    heads: int
    dim: int


class KVCache(RowTables):
    """Keys and values of every layer that has some.

    Layers of one shape lie together in a table [layer, row, head, position, dim] of keys and one of values.
    heads, dim: of all layers, or of each one.
    shapes: of the tables, in the order in which layers first have them. places: each layer's table, and place in it.
    keys, values: the tables of the first layer's shape.
    adapter_of: number of each row's adapter (``models.load.adapters``), int32 [rows] in the host's memory; 0: none.

    The position dimension is larger than ``positions``: one trash slot, and on a CPU padding to whole pages. Raises
    ParameterError if a size is below 1.
    """

    def __init__(
        self,
        layers: int,
        rows: int,
        heads: int | Sequence[int],
        positions: int,
        dim: int | Sequence[int],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        of_layers = kv_heads(layers, heads, dim)
        least = min((each.heads for each in of_layers), default=1)
        for name, value in (("layers", layers), ("rows", rows), ("heads", least), ("positions", positions)):
            if value < 1:
                raise ParameterError(name, value, "at least 1")
        sizes = Counter(of_layers)
        self.shapes = tuple(sizes)
        self.places = table_places(of_layers)
        twice = [(sizes[shape], *shape) for shape in self.shapes for _ in range(2)]
        super().__init__(twice, rows, positions, dtype, torch.device(device))
        self.keys, self.values = self.tables[:2]
        self.adapter_of = torch.zeros(rows, dtype=torch.int32)

    @staticmethod
    def bytes_for(
        layers: int, rows: int, heads: int | Sequence[int], positions: int, dim: int | Sequence[int], dtype: torch.dtype
    ) -> int:
        """Bytes that such a cache takes on devices where all memory is allocated at once."""
        width = sum(shape.heads * shape.dim for shape in kv_heads(layers, heads, dim))
        return 2 * width * rows * (positions + 1) * dtype.itemsize

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, [row, head, position, dim] each."""
        table, place = self.places[layer]
        return self.tables[2 * table][place], self.tables[2 * table + 1][place]

    def write_index(self, rows: Tensor, positions: Tensor, table: int = 0) -> Tensor:
        """Flat index of the slots ``positions`` [B, L] of ``rows`` [B]: [B * heads * L] int64.

        It is the same for every layer of a table, so it is computed once per forward pass. Positions beyond a row's end
        map to its trash slot.
        """
        _, _, heads, width, _ = self.tables[2 * table].shape
        head = torch.arange(heads, device=positions.device)
        line = rows[:, None, None] * heads + head[None, :, None]
        return (line * width + self.within(rows[:, None], positions)[:, None, :]).flatten()

    def write(self, layer: int, index: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k and v, [B, heads, L, dim] each, of one layer at ``index`` (from ``write_index`` of its table)."""
        dim = k.shape[-1]
        for table, new in zip(self.layer(layer), (k, v), strict=True):
            table.view(-1, dim).index_copy_(0, index, new.reshape(-1, dim).to(table.dtype))


def table_places(layers: Sequence[KVHeads]) -> tuple[tuple[int, int], ...]:
    """Each layer's table, and its place in it: layers of one shape share a table."""
    tables = {shape: table for table, shape in enumerate(dict.fromkeys(layers))}
    free = {shape: count() for shape in tables}
    return tuple((tables[shape], next(free[shape])) for shape in layers)


def kv_heads(layers: int, heads: int | Sequence[int], dim: int | Sequence[int]) -> list[KVHeads]:
    """The key heads of each layer. heads, dim: of all layers, or of each one."""
    heads = [heads] * layers if isinstance(heads, int) else heads
    dim = [dim] * layers if isinstance(dim, int) else dim
    return [KVHeads(*each) for each in zip(heads, dim, strict=True)]
