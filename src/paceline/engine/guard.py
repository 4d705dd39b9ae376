"""What a request brings along may fail; no other request may notice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from paceline.core.rows import Constraint, MaskQuery

T = TypeVar("T")


class FaultIsolatedConstraint:
    """A constraint whose fault waits until its row is judged; from then on anything may follow.

    Masks are made in the middle of a round that all rows share: an exception there would end every request.
    """

    def __init__(self, constraint: Constraint) -> None:
        self._constraint = constraint
        self._fault: Exception | None = None

    def ask(self, draft_tokens: Sequence[int], first: int, places: int) -> MaskQuery:
        return _GuardedAsked(self, self.attempt(lambda: self._constraint.ask(draft_tokens, first, places)))

    def advance(self, tokens: Sequence[int]) -> None:
        self.attempt(lambda: self._constraint.advance(tokens))

    def attempt(self, work: Callable[[], T]) -> T | None:
        """Its result; None after a fault, of this work or of some before it."""
        if self._fault is None:
            try:
                return work()
            except Exception as error:  # noqa: BLE001 (of whatever kind: it is kept and raised where it ends one request)
                self._fault = error
        return None

    def check(self) -> None:
        """Raise what went wrong in the round that was just played; what its row gained means nothing then."""
        if self._fault is not None:
            raise self._fault


@dataclass(frozen=True)
class _GuardedAsked:
    """A question to a guarded constraint; None: it could not even be asked."""

    constraint: FaultIsolatedConstraint
    asked: MaskQuery | None

    def send(self) -> None:
        if self.asked is not None:
            self.constraint.attempt(self.asked.send)

    def mask(self, logits: Tensor) -> None:
        asked = self.asked
        if asked is not None:
            self.constraint.attempt(lambda: asked.mask(logits))
