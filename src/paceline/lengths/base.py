"""What a length policy is, and what it may be made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol, cast, runtime_checkable

from paceline.batch import Batch, Draft, Verdict
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


@runtime_checkable
class Selective(Protocol):
    """A length policy that looks at the guesses before it decides which of them are verified."""

    def select(self, batch: Batch, draft: Draft) -> Draft:
        """The draft with only the first guesses of each row: as many as are worth it, perhaps none."""
        ...


@runtime_checkable
class Foreseeing(Protocol):
    """A length policy that knows when draft models will not be asked."""

    def hopeful(self, rows: int) -> bool:
        """Whether so many rows may be asked for guesses soon, so that draft models had better read their prompts."""
        ...


def selected(policy: LengthPolicy, batch: Batch, draft: Draft) -> Draft:
    """What of a draft is verified under this policy."""
    return cast(Selective, policy).select(batch, draft) if draft.k > 0 and _selective(type(policy)) else draft


@cache
def _selective(policy: type[LengthPolicy]) -> bool:
    """Asked once a class: the answer takes longer than many a round's decision."""
    return issubclass(policy, Selective)


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
