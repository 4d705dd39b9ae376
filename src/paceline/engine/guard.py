"""Isolates faults of a request's constraint, so that other requests do not notice them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor

from paceline.core.rows import Constraint

T = TypeVar("T")


class FaultIsolatedConstraint:
    """A constraint whose exception is held until ``check``; after a fault it allows every token.

    Masks are made in the middle of a round that all rows share: an exception there would end every request.
    """

    def __init__(self, constraint: Constraint) -> None:
        self._constraint = constraint
        self._fault: Exception | None = None

    def mask(self, draft_tokens: Sequence[int], first: int, logits: Tensor) -> None:
        self.attempt(lambda: self._constraint.mask(draft_tokens, first, logits))

    def advance(self, tokens: Sequence[int]) -> None:
        self.attempt(lambda: self._constraint.advance(tokens))

    def is_free(self, draft_tokens: Sequence[int]) -> bool:
        return bool(self.attempt(lambda: self._constraint.is_free(draft_tokens)))

    @property
    def reads_logits(self) -> bool:
        return self._constraint.reads_logits

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
