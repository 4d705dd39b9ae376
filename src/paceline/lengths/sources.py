"""Sources of draft tokens for ``auto``: the record of each, and what a draft model's caches lack."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.core.batch import Batch
from paceline.core.draft import Draft, Verdict
from paceline.lengths.records import ExplorationBudget, RunningMean, TokenRate
from paceline.lengths.scores import PRIOR_ACCEPTANCE, JudgedToken, ScoreCalibration, bins_of_draft, judge
from paceline.models.draft_decoder import DraftDecoder

# Draft tokens. Weight of the prior acceptance, and longest first draft: longer ones need accepted tokens. Drafts of 16
# from the start ran at 0.993 (docs/log.md).
PRIOR_TOKENS = 4
ACCEPTANCE_FADE = 0.98  # weight of the record of all draft tokens after one more round: about the last 50 rounds count


class DraftSource:
    """Record of one kind of draft tokens: the draft model's, or n-gram drafts.

    calibration: from scores to probabilities. judged, right: recent draft tokens, fading.
    rates: by number of rows, tokens per millisecond of rounds that used this source.
    gains: by number of rows, net gain in tokens per row of such a round: gained beyond plain decoding, minus rate times
        the extra time.
    budget: pays for using the source although its gain looks too low.
    allowance: standard errors added to a recent net gain.
    time_cap: extra verification time, as a fraction of a plain round, allowed before any draft token was judged, and
        again for each one per row that was.
    by_rows: whether the net gain depends on the number of rows.
    """

    def __init__(self, allowance: float, time_cap: float = math.inf, by_rows: bool = True) -> None:
        self.allowance, self.time_cap, self.by_rows = allowance, time_cap, by_rows
        self.calibration = ScoreCalibration()
        self.judged = self.right = 0.0
        self.rates: dict[int, TokenRate] = {}
        self.gains: dict[int, RunningMean] = {}
        self.budget = ExplorationBudget()

    @property
    def acceptance(self) -> float:
        """Probability that a draft token is right, without its score or position."""
        return (self.right + PRIOR_TOKENS * PRIOR_ACCEPTANCE) / (self.judged + PRIOR_TOKENS)

    @property
    def first_depth(self) -> int:
        """Longest draft that the record supports: it grows with the number of right draft tokens."""
        return PRIOR_TOKENS + int(self.right)

    def max_extra(self, rows: int) -> float:
        """Extra verification time allowed, as a fraction of a plain round."""
        return self.time_cap * (1 + self.judged / rows)

    def rate(self, rows: int) -> float:
        """Tokens per millisecond of recent rounds with this source; 0 before the first."""
        known = self.rates.get(rows)
        return known.value if known else 0.0

    def learn_rate(self, rows: int, tokens: float, ms: float) -> None:
        """Add a round of ``rows`` rows that gained ``tokens`` tokens in ``ms`` milliseconds."""
        self.rates.setdefault(rows, TokenRate()).learn(tokens, ms)

    def gain(self, rows: int, prior: Callable[[], float]) -> RunningMean:
        """Recent net gain per row of rounds of ``rows`` rows. prior: computes what is assumed before the first."""
        known = self.gains.get(rows if self.by_rows else 0)
        return RunningMean(prior()) if known is None else known

    def learn_gain(self, rows: int, prior: Callable[[], float], gain: float) -> None:
        """Add a round of ``rows`` rows with a net gain of ``gain`` tokens per row. prior: as for ``gain``."""
        known = self.gains[rows if self.by_rows else 0] = self.gain(rows, prior)
        known.learn(gain)

    def learn(self, judged: Sequence[Sequence[JudgedToken]], slots: Sequence[int]) -> None:
        """Learn from a round, as ``ScoreCalibration.learn`` does."""
        self.calibration.learn(judged, slots)
        self.judged = self.judged * ACCEPTANCE_FADE + sum(map(len, judged))
        self.right = self.right * ACCEPTANCE_FADE + sum([right for line in judged for _, right in line])

    def learn_draft(self, draft: Draft, verdict: Verdict, slots: Sequence[int]) -> None:
        """Learn what the verdict says about a draft of the same round, even if none of its tokens was verified."""
        bins = bins_of_draft(draft)
        judged = zip(bins, judge(draft, verdict), strict=True)
        self.learn([[(line[place], right) for place, right in known] for line, known in judged], slots)


@dataclass(frozen=True)
class MissingTokens:
    """Tokens that draft models have to read before a draft, beyond the one that every draft reads.

    by_row: [B]. shared: how many of them are the same for several samples of a request, and read once.
    """

    by_row: list[int]
    shared: int = 0

    @property
    def total(self) -> int:
        return sum(self.by_row) - self.shared


NOTHING_MISSING = MissingTokens([0])


class Backlog(Protocol):
    """Tells what the caches of draft models lack.

    by_row: whether draft models can draft for one row alone at a lower price.
    """

    by_row: bool

    def missing(self, batch: Batch) -> MissingTokens: ...

    def count_round(self, drafted: bool) -> None:
        """Note that a round runs. drafted: whether the draft models may draft in it."""
        ...


class CacheBacklog:
    """What the caches lack, read from them: for rounds run by the host."""

    by_row = True

    def __init__(self, decoders: Sequence[DraftDecoder]) -> None:
        self.decoders = decoders

    def missing(self, batch: Batch) -> MissingTokens:
        missing = [decoder.missing_tokens(batch) for decoder in self.decoders]
        shared = sum(decoder.spared(batch) for decoder in self.decoders)
        return MissingTokens([sum(of_row) - len(missing) for of_row in zip(*missing, strict=True)] or [0], shared)

    def count_round(self, drafted: bool) -> None:
        pass


class CountedBacklog:
    """Estimate for rounds on a device, whose caches the host does not read: each plain round adds a token."""

    by_row = False

    def __init__(self, decoders: int) -> None:
        self._decoders, self._rounds = decoders, 0

    def missing(self, batch: Batch) -> MissingTokens:
        return MissingTokens([self._decoders * self._rounds] * batch.rows)

    def count_round(self, drafted: bool) -> None:
        self._rounds = 0 if drafted else self._rounds + 1
