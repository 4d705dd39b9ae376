"""A source of draft tokens for ``auto``, a draft model or the search for n-gram drafts: its speed and acceptance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.core.draft import Draft, Verdict
from paceline.lengths.scores import PRIOR_ACCEPTANCE, ROUND_FADE, SLOW_FADE, JudgedToken, ScoreCalibration, judge

PRIOR_ROUNDS = 2.0  # rounds that a source's assumed speed counts as
# Plain rounds that a source may lose in all before anything is known of it, and in proportion to run time later: the
# bound on what wrong hopes cost.
CREDIT = 1.0
CREDIT_SHARE = 0.0075
# Draft tokens. Weight of the prior acceptance, and longest first draft: longer ones need accepted tokens. Drafts of 16
# from the start ran at 0.993 (docs/log.md).
FIRST_DRAFT = 4
TRUST_PRIOR = 8.0  # accepted tokens that were expected of n-gram drafts, and came, before any was verified


@dataclass
class _Rounds:
    """Recent rounds with a source, fading: tokens per row, time and drafting time in ms, and their number.

    prior: rounds that the assumed speed counts as; it fades to half, so that what costs next to nothing goes on.

    The milliseconds are those of a machine of the table's speed: later it may be faster or slower.
    """

    tokens: float = 0.0
    ms: float = 0.0
    drafting_ms: float = 0.0
    count: float = 0.0
    prior: float = PRIOR_ROUNDS

    def learn(self, tokens: float, ms: float, drafting_ms: float) -> None:
        """Add a round."""
        self.tokens, self.ms = self.tokens * ROUND_FADE + tokens, self.ms * ROUND_FADE + ms
        self.drafting_ms, self.count = self.drafting_ms * ROUND_FADE + drafting_ms, self.count * ROUND_FADE + 1
        self.prior = max(PRIOR_ROUNDS / 2, self.prior * SLOW_FADE)


class DraftSource:
    """Record of one kind of draft tokens: the draft model's, or n-gram drafts.

    Its speed is tokens per row over plain rounds of time, in its recent rounds; plain decoding has 1.

    prior_speed, plain_ms: from the number of rows to the speed that is assumed before the first round, and to the
        milliseconds of a plain round.
    calibration: from scores to probabilities. judged, right: recent draft tokens, fading.
    expected, came: accepted tokens of recent verified drafts, as they were expected and as they came.
    credit: plain rounds that may yet be lost by using the source although it looks slower than plain decoding.
    """

    def __init__(self, prior_speed: Callable[[int], float], plain_ms: Callable[[int], float]) -> None:
        self.calibration, self.credit = ScoreCalibration(), CREDIT
        self._prior_speed, self._plain_ms = prior_speed, plain_ms
        self.judged = self.right = 0.0
        self.expected = self.came = TRUST_PRIOR
        self._rounds: dict[int, _Rounds] = {}  # by batch size: 1, 2, 3-4, 5-8, ... rows

    @property
    def acceptance(self) -> float:
        """Probability that a draft token is right, without its score or position."""
        return (self.right + FIRST_DRAFT * PRIOR_ACCEPTANCE) / (self.judged + FIRST_DRAFT)

    @property
    def trust(self) -> float:
        """Factor on the expected tokens of n-gram drafts: of what was expected recently, the share that came."""
        return min(1.0, self.came / self.expected)

    @property
    def first_depth(self) -> int:
        """Longest draft that the record supports: it grows with the number of right draft tokens."""
        return FIRST_DRAFT + int(self.right)

    def _recent(self, rows: int) -> _Rounds:
        return self._rounds.setdefault((rows - 1).bit_length(), _Rounds())

    def speed(self, rows: int) -> float:
        """Tokens per row and plain round of time."""
        recent = self._recent(rows)
        tokens, rounds = recent.tokens, recent.ms / self._plain_ms(rows)
        return (tokens + recent.prior * self._prior_speed(rows)) / (rounds + recent.prior)

    def is_known(self, rows: int) -> bool:
        """Whether real rounds count more than the assumed speed."""
        return self._recent(rows).count > PRIOR_ROUNDS

    def drafting_ms(self, rows: int) -> float:
        """Milliseconds that drafting takes in a round."""
        recent = self._recent(rows)
        return recent.drafting_ms / recent.count if recent.count else 0.0

    def learn_speed(self, rows: int, tokens: float, ms: float, drafting_ms: float) -> None:
        """Add a round of ``rows`` rows: tokens per row, and its time and its drafting time in milliseconds."""
        self._recent(rows).learn(tokens, ms, drafting_ms)

    def learn_trust(self, expected: float, came: float) -> None:
        """Add a round's verified drafts: accepted tokens, expected without ``trust`` and real."""
        self.expected = TRUST_PRIOR + (self.expected - TRUST_PRIOR) * ROUND_FADE + expected
        self.came = TRUST_PRIOR + (self.came - TRUST_PRIOR) * ROUND_FADE + came

    def accrue(self, rounds: float) -> None:
        """Change the credit by so many plain rounds: below 0 for a loss, above 0 for a gain."""
        self.credit = min(CREDIT, self.credit + rounds)

    def learn(self, judged: Sequence[Sequence[JudgedToken]], slots: Sequence[int]) -> None:
        """Learn from the draft tokens of a round, as ``ScoreCalibration.learn`` does."""
        self.calibration.learn(judged, slots)
        self.judged = self.judged * SLOW_FADE + sum(map(len, judged))
        self.right = self.right * SLOW_FADE + sum([right for line in judged for _, right in line])

    def learn_draft(self, draft: Draft, bins: Sequence[Sequence[int]], verdict: Verdict, slots: Sequence[int]) -> None:
        """Learn what the verdict says about a draft of the same round, even if none of its tokens was verified.

        bins: of each row's draft tokens; rows without any are not learned from.
        """
        lines = zip(bins, judge(draft, verdict), strict=True)
        self.learn([[(line[place], right) for place, right in known] if line else [] for line, known in lines], slots)
