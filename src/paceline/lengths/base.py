"""What a length policy is, the simplest one, and what others may be made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.batch import Batch, Wish
from paceline.decoder import Decoder
from paceline.draft import Draft, Verdict
from paceline.lengths.cost import CostTable
from paceline.lengths.profile import Profile
from paceline.params import MAX_SPECULATION_LENGTH
from paceline.row_keeper import RowKeeper


class LengthPolicy(RowKeeper):
    """Chooses how far to speculate, round by round: ``choose``, perhaps ``select``, ``observe``.

    A policy owns what it knows about rows, and is told when they begin, move and end (``RowKeeper``).

    needs_profile: whether it cannot do without a profile; reads_profile: whether it makes use of one.
    most_guesses: that it asks for, of a row in a round.
    times: whether it measures the time from ``choose`` to ``observe``, so that each round must end before the next.
    selects: whether it looks at guesses before they are verified, which only rounds of the host can show it.
    """

    name: str
    needs_profile = False
    reads_profile = False
    most_guesses = MAX_SPECULATION_LENGTH
    times = False
    selects = False

    @classmethod
    def build(cls, means: Means, /) -> LengthPolicy:  # noqa: ARG003
        """One for an engine. Raises ParameterError where it has not got what it needs."""
        return cls()

    def choose(self, batch: Batch) -> Wish:
        """What to ask of the drafter for the next round."""
        raise NotImplementedError

    def select(self, batch: Batch, draft: Draft) -> Draft:
        """The draft with only the first guesses of each row: as many as are worth verifying, perhaps none."""
        return draft

    def observe(self, batch: Batch, verdict: Verdict) -> None:
        """Learn from a round."""

    def lost(self) -> None:
        """The oldest round that was chosen and not observed will not be: nobody is left whom it was for."""

    def hopeful(self, rows: int) -> bool:
        """Whether so many rows may be asked for guesses soon, so that draft models had better read their prompts."""
        return True


class FixedLength(LengthPolicy):
    """k guesses for every row, every round."""

    def __init__(self, k: int) -> None:
        self.k = self.most_guesses = k
        self.name = f"fixed({k})"

    def choose(self, batch: Batch) -> Wish:
        return Wish(self.k)


@dataclass(frozen=True)
class Means:
    """What a policy can be made of; nothing is measured or read before a policy asks for it.

    costs: from the profile, or a calibration of a few seconds. profile: raises ParameterError if none was given.
    decoders: the drafter's. ragged: whether verification takes as long as the tokens in flight, however they are spread
    over the rows. copies: whether the drafter has guesses for nothing (beside its decoders', if it has any).
    overlaps: whether a device plays rounds that are chosen before the one before is observed; costs are of such rounds.
    """

    costs: Callable[[], CostTable]
    profile: Callable[[], Profile]
    decoders: Sequence[Decoder] = ()
    ragged: bool = False
    copies: bool = False
    overlaps: bool = False
