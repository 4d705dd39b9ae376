"""Who knows something of each row is told when rows begin, move and end."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

Known = TypeVar("Known")


class RowKeeper:
    """Owns what it knows of rows. It may take over while rows run, of which it was not told."""

    def join(self, row: int) -> None:
        """A new text begins in this row."""

    def move(self, source: int, destination: int) -> None:
        """The text of the row ``source`` goes on in the place of ``destination``, whose own has ended."""

    def leave(self, row: int) -> None:
        """The text of this row has ended."""


class RowKeepers(RowKeeper):
    """Tells several."""

    @property
    def keepers(self) -> Iterable[RowKeeper]:
        """Whom."""
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


class PerRow(RowKeeper, dict[int, Known]):
    """What is known of some rows, by row; nothing of a row that begins."""

    def join(self, row: int) -> None:
        self.pop(row, None)

    def move(self, source: int, destination: int) -> None:
        self.pop(destination, None)
        if source in self:
            self[destination] = self.pop(source)

    def leave(self, row: int) -> None:
        self.pop(row, None)
