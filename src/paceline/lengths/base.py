"""What a length policy is, and what it may be made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.batch import Batch, Draft, Verdict
from paceline.decoder import Decoder
from paceline.lengths.cost import CostTable
from paceline.lengths.profile import Profile


class LengthPolicy:
    """Chooses how far to speculate in the next round.

    selects: whether it looks at the guesses before it says which of them are verified: then the host plays the rounds.
    times: whether it learns from how long rounds take: then each is settled before the next is chosen.
    """

    name: str
    selects = False
    times = False

    def choose(self, batch: Batch) -> int:
        """The speculation length k for the whole batch; 0 is plain decoding.

        A policy that treats rows differently also sets ``batch.caps`` for this round: most guesses, row by row.
        """
        raise NotImplementedError

    def select(self, batch: Batch, draft: Draft) -> Draft:
        """The draft, of at least one guess, with only the first guesses of each row: as many as are worth it."""
        return draft

    def hopeful(self, rows: int) -> bool:
        """Whether so many rows may be asked for guesses soon, so that draft models had better read their prompts."""
        return True

    def observe(self, batch: Batch, verdict: Verdict) -> None:
        """Learn from a round."""


@dataclass(frozen=True)
class Means:
    """What a policy can be made of; nothing is measured or read before a policy asks for it.

    costs: from the profile, or a calibration of a few seconds. profile: raises ParameterError if none was given.
    decoders: the drafter's. ragged: whether verification takes as long as the tokens in flight, however they are spread
    over the rows. copies: whether the drafter has guesses for nothing, besides its decoders'.
    """

    costs: Callable[[], CostTable]
    profile: Callable[[], Profile]
    decoders: Sequence[Decoder] = ()
    ragged: bool = False
    copies: bool = False
