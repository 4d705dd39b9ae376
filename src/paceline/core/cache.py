"""KV cache of all rows, in tensors that are allocated once and never move."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.core.row_tables import RowTables
from paceline.errors import ParameterError


class KVCache(RowTables):
    """Keys and values, each [layer, row, head, position, dim].

    The position dimension is larger than ``positions``: one trash slot, and on a CPU padding to whole pages. Raises
    ParameterError if a size is below 1.
    """

    def __init__(
        self,
        layers: int,
        rows: int,
        heads: int,
        positions: int,
        dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        for name, value in (("layers", layers), ("rows", rows), ("heads", heads), ("positions", positions)):
            if value < 1:
                raise ParameterError(name, value, "at least 1")
        super().__init__(2, (layers, rows, heads, positions, dim), dtype, torch.device(device))
        self.keys, self.values = self.tables

    @staticmethod
    def bytes_for(layers: int, rows: int, heads: int, positions: int, dim: int, dtype: torch.dtype) -> int:
        """Bytes that such a cache takes on devices where all memory is allocated at once."""
        return 2 * layers * rows * heads * (positions + 1) * dim * dtype.itemsize

    def write_index(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Flat index of the slots ``positions`` [B, L] of ``rows`` [B]: [B * heads * L] int64.

        It is the same for every layer, so it is computed once per forward pass. Positions beyond a row's end map to its
        trash slot.
        """
        _, _, heads, width, _ = self.keys.shape
        head = torch.arange(heads, device=positions.device)
        line = rows[:, None, None] * heads + head[None, :, None]
        return (line * width + self.within(rows[:, None], positions)[:, None, :]).flatten()

    def write(self, layer: int, index: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k and v, [B, heads, L, dim] each, of one layer at ``index`` (from ``write_index``)."""
        dim = k.shape[-1]
        self.keys[layer].view(-1, dim).index_copy_(0, index, k.reshape(-1, dim).to(self.keys.dtype))
        self.values[layer].view(-1, dim).index_copy_(0, index, v.reshape(-1, dim).to(self.values.dtype))
