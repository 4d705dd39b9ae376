"""What a length policy is, what one may be made of, and those that need no clock: fixed, ``bass``, ``profiled``."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from paceline.config import MAX_SPECULATION_LENGTH
from paceline.core.batch import Batch, SpeculationPlan
from paceline.core.draft import Draft, Verdict
from paceline.core.row_keeper import RowKeeper
from paceline.lengths.cost import CostTable
from paceline.lengths.profile import Profile
from paceline.models.decoder import Decoder

FIRST = 7  # draft tokens that ``bass`` begins with
INCREMENT = 2
SHRINK = 10  # a round that no row kept whole takes away ceil(l / SHRINK), and one more if the round before did so too


class LengthPolicy(RowKeeper):
    """Chooses how far to speculate, round by round: ``choose``, perhaps ``select``, ``observe``.

    A policy owns what it knows about rows, and is told when they begin, move and end (``RowKeeper``).

    needs_profile: whether it cannot do without a profile; reads_profile: whether it makes use of one.
    max_draft_tokens: that it asks for, of a row in a round.
    times: whether it measures the time from ``choose`` to ``observe``, so that each round must end before the next.
    selects: whether it looks at draft tokens before they are verified, which only rounds of the host can show it.
    """

    name: str
    needs_profile = False
    reads_profile = False
    max_draft_tokens = MAX_SPECULATION_LENGTH
    times = False
    selects = False

    def __init_subclass__(cls) -> None:
        """Policies written for version 0.1 name their longest draft ``most_guesses``."""
        super().__init_subclass__()
        if "most_guesses" in vars(cls):
            cls.max_draft_tokens = vars(cls)["most_guesses"]

    @classmethod
    def build(cls, means: PolicyInputs, /) -> LengthPolicy:  # noqa: ARG003
        """One for an engine. Raises ParameterError where it has not got what it needs."""
        return cls()

    def choose(self, batch: Batch) -> SpeculationPlan:
        """What to ask of the drafter for the next round."""
        return SpeculationPlan(self.length_for(batch.rows))

    def select(self, batch: Batch, draft: Draft) -> Draft:
        """The draft with only the first draft tokens of each row: as many as are worth verifying, perhaps none."""
        return draft

    def observe(self, batch: Batch, verdict: Verdict) -> None:
        """Learn from a round."""

    def lost(self) -> None:
        """The oldest round that was chosen and not observed will not be: nobody is left whom it was for."""

    def expects_to_draft(self, rows: int) -> bool:
        """Whether so many rows may be asked for draft tokens soon, so that draft models had better read their
        prompts.
        """
        return True

    def describe(self) -> str:
        """For the line that says what runs."""
        return self.name

    def length_for(self, rows: int) -> int:
        """Draft tokens of most rounds of so many rows: lengths about this one are made ready first where that takes
        time.
        """
        return 0


class FixedLength(LengthPolicy):
    """k draft tokens for every row, every round."""

    def __init__(self, k: int) -> None:
        self.k = self.max_draft_tokens = k
        self.name = f"fixed({k})"

    def length_for(self, rows: int) -> int:
        return self.k


class BassLength(LengthPolicy):
    """BASS (2404.15778, Algorithm 1): one length l for all, up while some row keeps everything, down when none does.

    It is driven by x_i = draft tokens that row i kept. Finished rows are not in the batch.
    """

    name = "bass"

    def __init__(self) -> None:
        self.k = FIRST
        self._shrank = 0

    def length_for(self, rows: int) -> int:
        return self.k

    def observe(self, batch: Batch, verdict: Verdict) -> None:
        if max(verdict.host.drafted) > 0:  # nothing drafted is no evidence
            self.update(verdict.host.accepted, max(verdict.host.drafted))

    def update(self, kept: list[int], drafted: int) -> None:
        """One step of Algorithm 1. drafted: the length of the round just played (the engine may have cut it short)."""
        if max(kept) == drafted:
            self.k, self._shrank = min(self.k + INCREMENT, MAX_SPECULATION_LENGTH), 0
        else:
            self.k, self._shrank = max(1, max(kept), self.k - math.ceil(self.k / SHRINK) - self._shrank), 1


class ProfiledLength(LengthPolicy):
    """Synergy (2310.18813): a table, measured beforehand, from the batch size to the best length.

    Sizes between two entries are rounded up to the next; beyond the largest entry, the largest counts.
    """

    name = "profiled"
    needs_profile = reads_profile = True

    def __init__(self, best: Mapping[int, int]) -> None:
        self._sizes = sorted(best)
        self._lengths = [best[size] for size in self._sizes]
        self.max_draft_tokens = max(self._lengths)

    @classmethod
    def build(cls, means: PolicyInputs, /) -> ProfiledLength:
        return cls(means.profile().best)

    def length_for(self, rows: int) -> int:
        return self._lengths[min(bisect_left(self._sizes, rows), len(self._sizes) - 1)]


@dataclass(frozen=True)
class PolicyInputs:
    """What a policy can be made of; nothing is measured or read before a policy asks for it.

    costs: from the profile, or a calibration of a few seconds. profile: raises ParameterError if none was given.
    decoders: the drafter's. ragged: whether verification takes as long as the tokens in flight, however they are spread
    over the rows. copies: whether the drafter has draft tokens for nothing (beside its decoders', if it has any).
    overlaps: whether a device plays rounds that are chosen before the one before is observed; costs are of such rounds.
    paying_rows: most rows at which what the decoders draft was measured to pay; None: that was not measured.
    """

    costs: Callable[[], CostTable]
    profile: Callable[[], Profile]
    decoders: Sequence[Decoder] = ()
    ragged: bool = False
    copies: bool = False
    overlaps: bool = False
    paying_rows: int | None = None
