"""Length policies: the base class, the inputs to build one, and the policies that need no clock."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.config import MAX_SPECULATION_LENGTH
from paceline.core.batch import Batch, SpeculationPlan
from paceline.core.draft import Draft, Verdict
from paceline.core.row_keeper import RowKeeper
from paceline.lengths.cost import CostTable
from paceline.lengths.profile import Profile
from paceline.models.decoding.draft_decoder import DraftDecoder

# Algorithm 1 of BASS (arXiv 2404.15778), with the paper's values:
FIRST = 7  # draft tokens of the first round
INCREMENT = 2  # draft tokens added after a round in which some row accepted everything
SHRINK = 10  # other rounds remove ceil(l / SHRINK) draft tokens, and one more if the round before removed some, too


@dataclass(frozen=True)
class UnreadPrompt:
    """A prompt that draft models have not read.

    tokens: to read. rows: that share it. answer_tokens: that each of them is expected to gain. seconds: until their
    deadline.
    """

    tokens: int
    rows: int
    answer_tokens: float
    seconds: float = math.inf


class LengthPolicy(RowKeeper):
    """Decides how many tokens to draft. Each round calls ``choose``, ``select`` if draft tokens are seen, ``observe``.

    A policy owns its per-slot state: ``join`` and ``leave`` say when sequences begin and end (``RowKeeper``).

    needs_profile: whether it requires a profile. reads_profile: whether it uses one if given.
    max_draft_tokens: the most that it requests per row and round.
    """

    name: str
    needs_profile = False
    reads_profile = False
    max_draft_tokens = MAX_SPECULATION_LENGTH

    @classmethod
    def build(cls, inputs: PolicyInputs, /) -> LengthPolicy:  # noqa: ARG003
        """A policy for one engine. Raises ParameterError if an input that it needs is missing."""
        return cls()

    def choose(self, batch: Batch) -> SpeculationPlan:
        """The plan for the next round."""
        return SpeculationPlan(self.length_for(batch.rows))

    def select(self, batch: Batch, draft: Draft) -> Draft:
        """The draft tokens to verify: the first ones of each row, possibly none."""
        return draft

    def observe(self, batch: Batch, verdict: Verdict) -> None:
        """Learn from the result of a round: ``verdict.note`` is the plan's, ``verdict.timing`` the round's time.

        Rounds whose rows have all ended meanwhile are not observed.
        """

    @property
    def reads_drafts(self) -> bool:
        """Whether draft tokens must be shown to ``select``, which only rounds run by the host can do."""
        return type(self).select is not LengthPolicy.select

    def expects_to_draft(self, rows: int) -> bool:
        """Whether a batch of ``rows`` rows is likely to get draft tokens, so that draft models should read prompts."""
        return True

    def reads_prompt(self, rows: int, prompt: UnreadPrompt) -> bool:
        """Whether draft models should read a prompt before its rows decode, in a batch of ``rows`` rows."""
        return self.expects_to_draft(rows)

    def describe(self) -> str:
        """The policy in words, for the start-up message."""
        return self.name

    def length_for(self, rows: int) -> int:
        """Usual draft tokens per row for ``rows`` rows. Captured rounds near this length are prepared first."""
        return 0

    @property
    def possible_lengths(self) -> Sequence[int]:
        """The draft lengths that rounds may have, those shortened near the rows' ends included; by default all."""
        return range(self.max_draft_tokens + 1)


class FixedLength(LengthPolicy):
    """k draft tokens for every row in every round."""

    def __init__(self, k: int) -> None:
        self.k = self.max_draft_tokens = k
        self.name = f"fixed({k})"

    def length_for(self, rows: int) -> int:
        return self.k


class BassLength(LengthPolicy):
    """BASS (arXiv 2404.15778, Algorithm 1): one length for all rows.

    It grows after a round in which some row accepted its whole draft, and shrinks otherwise.
    """

    name = "bass"

    def __init__(self) -> None:
        self.k = FIRST
        self._shrank = 0

    def length_for(self, rows: int) -> int:
        return self.k

    def observe(self, batch: Batch, verdict: Verdict) -> None:
        if max(verdict.drafted) > 0:  # rounds without draft tokens are no evidence
            self.update(verdict.accepted, max(verdict.drafted))

    def update(self, accepted: list[int], drafted: int) -> None:
        """One step of Algorithm 1.

        accepted: draft tokens accepted per row, x_i in the paper. drafted: the round's longest draft, which the engine
        may have made shorter than ``k``.
        """
        if max(accepted) == drafted:
            self.k, self._shrank = min(self.k + INCREMENT, MAX_SPECULATION_LENGTH), 0
        else:
            self.k, self._shrank = max(1, max(accepted), self.k - math.ceil(self.k / SHRINK) - self._shrank), 1


class ProfiledLength(LengthPolicy):
    """Synergy (arXiv 2310.18813): a measured table from batch size to best length.

    A size between two entries uses the next larger entry. Sizes beyond the table use its last entry.
    """

    name = "profiled"
    needs_profile = reads_profile = True

    def __init__(self, best: Mapping[int, int]) -> None:
        self._sizes = sorted(best)
        self._lengths = [best[size] for size in self._sizes]
        self.max_draft_tokens = max(self._lengths)

    @classmethod
    def build(cls, inputs: PolicyInputs, /) -> ProfiledLength:
        return cls(inputs.profile().best)

    def length_for(self, rows: int) -> int:
        return self._lengths[min(bisect_left(self._sizes, rows), len(self._sizes) - 1)]


class CapturedRounds(Protocol):
    """The rounds of a device, each captured at its first use."""

    @property
    def capture_ms(self) -> float:
        """Milliseconds of the fastest capture so far; infinity before the first."""
        ...

    def is_captured(self, k: int, /) -> bool:
        """Whether rounds of k draft tokens for the batch's rows run without a capture first."""
        ...


@dataclass(frozen=True)
class PolicyInputs:
    """What an engine offers for building a policy. Nothing is measured or read before a policy calls for it.

    costs: returns the cost table, from the profile or from a calibration of a few seconds.
    profile: returns the profile; raises ParameterError if none was given.
    decoders: the drafter's draft models.
    ragged: whether verification time depends on the total number of tokens, however they are spread over the rows.
        Otherwise every row pays for the longest draft.
    copies: whether the drafter has n-gram drafts, which cost nothing.
    device: the captured rounds, where they run on a device and are chosen before the previous one is observed; costs
        are then those of such rounds. None: rounds run on the host.
    paying_rows: largest batch for which the draft model was measured to pay; None: not measured.
    """

    costs: Callable[[], CostTable]
    profile: Callable[[], Profile]
    decoders: Sequence[DraftDecoder] = ()
    ragged: bool = False
    copies: bool = False
    device: CapturedRounds | None = None
    paying_rows: int | None = None
