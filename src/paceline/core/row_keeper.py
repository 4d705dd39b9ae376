"""Objects with per-slot state, which are told when a sequence joins a slot and when it leaves."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import ClassVar, TypeVar

State = TypeVar("State")


class RowKeeper:
    """Owner of per-slot state. A sequence keeps its slot for life. Slots without state are normal.

    retired: names that earlier versions read from subclasses, and what to use instead. A subclass that defines one
        causes a warning.
    """

    retired: ClassVar[Mapping[str, str]] = {"move": "sequences keep their slots (Batch.slots)"}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name, successor in cls.retired.items():
            if name in vars(cls):
                where = f"{cls.__module__}.{cls.__qualname__}.{name}"
                warnings.warn(f"paceline does not use {where} any more: {successor}", FutureWarning, stacklevel=2)

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
