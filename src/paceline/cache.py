"""The keys and values of all rows, in one place that never moves."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from paceline.errors import ParameterError

_CACHE_LINE = 64  # bytes: a key that straddles two lines costs two loads


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
        # Zeros, not garbage, that may hold NaN: NaN x 0 is NaN, also where attention is masked.
        self.keys = _zeros(shape, dtype, torch.device(device))
        self.values = _zeros(shape, dtype, torch.device(device))

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
        """Where tokens for slots ``positions`` [B, L] of rows first_row, first_row + 1, ... go: flat [B * heads * L].

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

    def keep(self, rows: Tensor, text: Tensor, paths: Tensor) -> None:
        """Move the keys and values of accepted nodes behind their rows' texts.

        rows, text [B]: rows, and the first slot behind each one's text, that of its node 0. paths [B, k]: the nodes to
        be there, one slot after the other, a node's own number where nothing is to move.
        """
        order = torch.arange(paths.shape[1], device=paths.device)
        of_row = rows[:, None]
        source, place = ((text[:, None] + nodes).clamp(max=self.positions) for nodes in (paths, order))
        for table in (self.keys, self.values):
            table[:, of_row, :, place] = table[:, of_row, :, source]

    def copy_row(self, source: int, destination: int, length: int) -> None:
        """Copy the first ``length`` positions of one row over another: to fill a hole, or to share a prefill."""
        self.keys[:, destination, :, :length] = self.keys[:, source, :, :length]
        self.values[:, destination, :, :length] = self.values[:, source, :, :length]

    def swap_rows(self, one: int, other: int, length: int) -> None:
        """Exchange the first ``length`` positions of two rows."""
        for table in (self.keys, self.values):
            held = table[:, one, :, :length].clone()
            table[:, one, :, :length] = table[:, other, :, :length]
            table[:, other, :, :length] = held


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU the pages are taken from the system only when a row grows into them."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    raw = np.zeros(size + _CACHE_LINE, dtype=np.uint8)
    start = -raw.ctypes.data % _CACHE_LINE
    return torch.from_numpy(raw[start : start + size]).view(dtype).view(shape)
