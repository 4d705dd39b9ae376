"""Objects with per-slot state receive the events of rows: join, move and leave."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

State = TypeVar("State")


class RowKeeper:
    """Owner of per-slot state. It may be attached while rows run, so rows without state are normal."""

    def join(self, row: int) -> None:
        """Handle a new sequence in slot ``row``."""

    def move(self, source: int, destination: int) -> None:
        """Handle that the sequence of slot ``source`` continues in slot ``destination``, whose own has ended."""

    def leave(self, row: int) -> None:
        """Handle that the sequence in slot ``row`` has ended."""


class RowKeepers(RowKeeper):
    """Row keeper that forwards events to several others."""

    @property
    def keepers(self) -> Iterable[RowKeeper]:
        """The row keepers that receive the events."""
        raise NotImplementedError

    def join(self, row: int) -> None:
        for keeper in self.keepers:
            keeper.join(row)

    def move(self, source: int, destination: int) -> None:
        for keeper in self.keepers:
            keeper.move(source, destination)

    def leave(self, row: int) -> None:
        for keeper in self.keepers:
            keeper.leave(row)


class PerRow(RowKeeper, dict[int, State]):
    """Mapping from slot to the state of its sequence. A new sequence has no entry."""

    def join(self, row: int) -> None:
        self.pop(row, None)

    def move(self, source: int, destination: int) -> None:
        self.pop(destination, None)
        if source in self:
            self[destination] = self.pop(source)

    def leave(self, row: int) -> None:
        self.pop(row, None)
