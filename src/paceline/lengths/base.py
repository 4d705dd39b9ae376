"""What a length policy is."""

from __future__ import annotations

from typing import Protocol

from paceline.batch import Batch, Verdict


class LengthPolicy(Protocol):
    """Chooses how far to speculate in the next round."""

    name: str

    def choose(self, batch: Batch) -> int:
        """The speculation length k for the whole batch; 0 is plain decoding."""
        ...

    def observe(self, batch: Batch, verdict: Verdict) -> None:
        """Learn from a round."""
        ...
