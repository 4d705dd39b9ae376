"""Keys and values by pages of a fixed number of positions, as the CPU kernels read them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

PAGE_POSITIONS = 64  # kPagePositions of csrc/kernels.h: a quarter of the keys that attention weighs at once


def blocks_for(positions: int) -> int:
    """Pages of a row's positions and the one behind them, which writes beyond the row's end go to."""
    return positions // PAGE_POSITIONS + 1


class PagedVectors(NamedTuple):
    """Keys or values of the layers of one shape.

    The vector of a layer, row, head and position lies at layer * layer_stride + page * page_stride
    + head * head_stride + (position modulo PAGE_POSITIONS) * dim elements.

    memory: any tensor whose first element is the first vector's, and whose last size is dim.
    pages: int32 [rows, blocks], the page of each block of PAGE_POSITIONS positions.
    """

    memory: Tensor
    pages: Tensor
    layer_stride: int
    page_stride: int
    head_stride: int
