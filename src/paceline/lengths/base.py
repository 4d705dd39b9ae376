"""What a length policy is, and what it may be made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.batch import Batch, Verdict
from paceline.decoder import Decoder
from paceline.lengths.cost import CostTable
from paceline.lengths.profile import Profile


class LengthPolicy(Protocol):
    """Chooses how far to speculate in the next round."""

    name: str

    def choose(self, batch: Batch) -> int:
        """The speculation length k for the whole batch; 0 is plain decoding.

        A policy that treats rows differently also sets ``batch.caps`` for this round: most guesses, row by row.
        """
        ...

    def observe(self, batch: Batch, verdict: Verdict) -> None:
        """Learn from a round."""
        ...


@dataclass(frozen=True)
class Means:
    """What a policy can be made of; nothing is measured or read before a policy asks for it.

    costs: from the profile, or a calibration of a few seconds. profile: raises ParameterError if none was given.
    decoders: the drafter's.
    """

    costs: Callable[[], CostTable]
    profile: Callable[[], Profile]
    decoders: Sequence[Decoder] = ()
