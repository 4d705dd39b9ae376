"""Objects with per-slot state, which are told when a sequence joins a slot and when it leaves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

State = TypeVar("State")


class RowKeeper:
    """Owner of per-slot state. A sequence keeps its slot for life. Slots without state are normal."""

    def join(self, slot: int) -> None:
        """Handle a new sequence in ``slot``."""

    def leave(self, slot: int) -> None:
        """Handle that the sequence in ``slot`` has ended."""


class RowKeepers(RowKeeper):
    """Row keeper that forwards events to several others."""

    @property
    def keepers(self) -> Iterable[RowKeeper]:
        """The row keepers that receive the events."""
        raise NotImplementedError

    def join(self, slot: int) -> None:
        for keeper in self.keepers:
            keeper.join(slot)

    def leave(self, slot: int) -> None:
        for keeper in self.keepers:
            keeper.leave(slot)


class PerRow(RowKeeper, dict[int, State]):
    """Mapping from slot (``Batch.slots``) to the state of its sequence. A new sequence has no entry."""

    def join(self, slot: int) -> None:
        self.pop(slot, None)

    def leave(self, slot: int) -> None:
        self.pop(slot, None)
