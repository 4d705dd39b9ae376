"""Isolates faults of a request's constraint, so that other requests do not notice them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from paceline.core.rows import Constraint, MaskQuery

T = TypeVar("T")


class FaultIsolatedConstraint:
    """A constraint whose exception is held until ``check``; after a fault it allows every token.

    Masks are made in the middle of a round that all rows share: an exception there would end every request.
    """

    def __init__(self, constraint: Constraint) -> None:
        self._constraint = constraint
        self._fault: Exception | None = None

    def ask(self, draft_tokens: Sequence[int], first: int, places: int) -> MaskQuery:
        return _FaultIsolatedMask(self, self.attempt(lambda: self._constraint.ask(draft_tokens, first, places)))

    def advance(self, tokens: Sequence[int]) -> None:
        self.attempt(lambda: self._constraint.advance(tokens))

    def is_free(self, draft_tokens: Sequence[int]) -> bool:
        return bool(self.attempt(lambda: self._constraint.is_free(draft_tokens)))

    def attempt(self, work: Callable[[], T]) -> T | None:
        """Return the result of ``work``; None if it raises, or if the constraint has failed before."""
        if self._fault is None:
            try:
                return work()
            except Exception as error:  # noqa: BLE001 (any kind: ``check`` raises it where it ends one request)
                self._fault = error
        return None

    def check(self) -> None:
        """Raise the fault of the last round, if there was one; the tokens that its row gained are then invalid."""
        if self._fault is not None:
            raise self._fault


@dataclass(frozen=True)
class _FaultIsolatedMask:
    """A mask query to a fault-isolated constraint. asked: the constraint's own query; None if making it has failed."""

    constraint: FaultIsolatedConstraint
    asked: MaskQuery | None

    def send(self) -> None:
        if self.asked is not None:
            self.constraint.attempt(self.asked.send)

    def mask(self, logits: Tensor) -> None:
        asked = self.asked
        if asked is not None:
            self.constraint.attempt(lambda: asked.mask(logits))
