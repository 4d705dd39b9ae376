"""What a request brings along may fail; no other request may notice."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from paceline.rows import Constraint


class Guarded:
    """A constraint whose fault waits until its row is judged; from then on anything may follow.

    Masks are made in the middle of a round that all rows share: an exception there would end every request.
    """

    def __init__(self, constraint: Constraint) -> None:
        self._constraint = constraint
        self._fault: Exception | None = None

    def mask(self, logits: Tensor, guesses: Sequence[int], first: int) -> None:
        self._attempt(lambda: self._constraint.mask(logits, guesses, first))

    def advance(self, tokens: Sequence[int]) -> None:
        self._attempt(lambda: self._constraint.advance(tokens))

    def _attempt(self, work: Callable[[], None]) -> None:
        if self._fault is not None:
            return
        try:
            work()
        except Exception as error:  # noqa: BLE001 (of whatever kind: it is kept and raised where it ends one request)
            self._fault = error

    def check(self) -> None:
        """Raise what went wrong in the round that was just played; what its row gained means nothing then."""
        if self._fault is not None:
            raise self._fault
