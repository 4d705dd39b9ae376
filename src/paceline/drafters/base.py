"""What a drafter is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from paceline.batch import Batch, Wish
from paceline.decoder import Decoder
from paceline.draft import Draft, Verdict


class Drafter(Protocol):
    """Guesses the next tokens of every row.

    decoders: the models it runs (none, for n-gram); the engine prefills and copies their caches with the target's.
    """

    name: str

    @property
    def decoders(self) -> Sequence[Decoder]: ...

    def propose(self, batch: Batch, wish: Wish) -> Draft:
        """At most wish.k guesses for every row; wish.k >= 1."""
        ...

    def observe(self, batch: Batch, verdict: Verdict) -> None:
        """Learn what became of the guesses; called after every round, also those without guesses (k = 0)."""
        ...
