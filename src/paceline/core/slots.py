"""Slots: where rows keep their state in caches and tables, from their first token to their last."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.core.uploads import uploaded


class Slots:
    """Slots of B rows, in ascending order: their places in tables [R, ...] of R slots.

    index: [B] int64, on the tables' device.
    live: [1] int64, number of rows that are not idle, which are the first ones; None: all.
    numbers: the same on the host; None where only the device knows them, in programs that are captured.
    where: what selects the rows' entries of a table, ``table[slots.where]``: a slice if the slots are consecutive.
    """

    def __init__(self, index: Tensor, numbers: Sequence[int] | None = None, live: Tensor | None = None) -> None:
        self.index, self.numbers, self.live = index, numbers, live
        self.where: slice | Tensor = index if (consecutive := _as_range(numbers)) is None else consecutive

    @property
    def first(self) -> int | None:
        """The first slot if the slots are consecutive, else None."""
        return int(self.where.start) if isinstance(self.where, slice) else None

    @staticmethod
    def listed(numbers: Sequence[int], device: torch.device) -> Slots:
        """Slots known to the host."""
        return Slots(uploaded(numbers, device), numbers)

    def __len__(self) -> int:
        return len(self.index)

    def part(self, first: int, stop: int) -> Slots:
        """The slots of rows ``first`` to ``stop`` - 1."""
        return Slots(self.index[first:stop].clone(), None if self.numbers is None else self.numbers[first:stop])

    def of(self, table: Tensor) -> Tensor:
        """The rows' entries of a table [R, ...]: [B, ...]. A view if the slots are consecutive, else a copy."""
        return table[self.where] if isinstance(self.where, slice) else table.index_select(0, self.index)


def _as_range(numbers: Sequence[int] | None) -> slice | None:
    """Consecutive numbers as a slice; None if they are not consecutive, or unknown."""
    if not numbers or list(numbers) != list(range(numbers[0], numbers[0] + len(numbers))):
        return None
    return slice(numbers[0], numbers[0] + len(numbers))
