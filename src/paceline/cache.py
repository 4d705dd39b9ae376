"""The keys and values of all rows, in one place that never moves."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.errors import ParameterError


class KVCache:
    """Keys and values, each [layer, row, head, position, dim].

    A row is written only at its own positions and nothing is ever erased: what lies at or beyond a row's length is
    overwritten before anything may look at it. One position more than ``positions`` exists: writes beyond the end (the
    padding at a row's tail) land there, and nothing ever reads it.
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
        shape = (layers, rows, heads, positions + 1, dim)
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)
        # Uninitialised memory may hold NaN, and NaN x 0 is NaN: clear what masked attention multiplies by zero.
        self.keys.zero_()
        self.values.zero_()

    @property
    def rows(self) -> int:
        return self.keys.shape[1]

    @property
    def positions(self) -> int:
        """Usable positions a row (the trash position not counted)."""
        return self.keys.shape[3] - 1

    @staticmethod
    def bytes_for(layers: int, rows: int, heads: int, positions: int, dim: int, dtype: torch.dtype) -> int:
        """Memory that such a cache takes, in bytes, before it is made."""
        return 2 * layers * rows * heads * (positions + 1) * dim * dtype.itemsize

    def write_index(self, first_row: int, positions: Tensor) -> Tensor:
        """Where tokens at ``positions`` [B, L] of rows first_row, first_row + 1, ... go: flat [B * heads * L].

        The same for every layer, so it is computed once a forward pass. Positions beyond the end go to the trash.
        """
        _, _, heads, width, _ = self.keys.shape
        row = torch.arange(first_row, first_row + positions.shape[0], device=positions.device)
        head = torch.arange(heads, device=positions.device)
        line = row[:, None, None] * heads + head[None, :, None]
        return (line * width + positions.clamp(max=width - 1)[:, None, :]).flatten()

    def write(self, layer: int, index: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k and v [B, heads, L, dim] of one layer at ``index`` (from ``write_index``)."""
        dim = k.shape[-1]
        self.keys[layer].view(-1, dim).index_copy_(0, index, k.reshape(-1, dim).to(self.keys.dtype))
        self.values[layer].view(-1, dim).index_copy_(0, index, v.reshape(-1, dim).to(self.values.dtype))

    def copy_row(self, source: int, destination: int, length: int) -> None:
        """Copy the first ``length`` positions of one row over another: to fill a hole, or to share a prefill."""
        self.keys[:, destination, :, :length] = self.keys[:, source, :, :length]
        self.values[:, destination, :, :length] = self.values[:, source, :, :length]
