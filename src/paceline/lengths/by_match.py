"""The choice between n-gram drafts and a model's, before either is seen: by the length of the match.

In rounds on a device both are made in one program. It takes a row's n-gram draft if its match has at least as many
tokens as the host has said, for which more tokens are expected of it than of the model's. Drafting and verification
cost the same for both, so this is the value of ``auto``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from paceline.core.draft import Verdict
from paceline.core.row_keeper import RowKeeper
from paceline.drafters.lookup import LONGEST_SUFFIX
from paceline.drafters.ngram import CONFIDENCE
from paceline.lengths.scores import ScoreCalibration, bins_of


class ChoiceByMatch:
    """Calibrations of both kinds of draft tokens: the model's by position, n-gram drafts by their score."""

    def __init__(self) -> None:
        self.model, self.ngram = ScoreCalibration(), ScoreCalibration()

    @property
    def keepers(self) -> tuple[RowKeeper, ...]:
        return self.model.rows, self.ngram.rows

    def least_matches(self, slots: Sequence[int], k: int) -> list[int]:
        """Return the fewest matched tokens for which each row's n-gram draft of k tokens is worth more, [B].

        ``LONGEST_SUFFIX`` + 1 where none is.
        """
        return [self._least(slot, k) for slot in slots]

    def _least(self, slot: int, k: int) -> int:
        expected = sum(self.model.survivals(slot, bins_of(k)))
        worth = partial(self._is_worth_more, slot, k, expected)
        low, high = 1, LONGEST_SUFFIX + 1
        while low < high:  # a longer match is worth more
            middle = (low + high) // 2
            low, high = (low, middle) if worth(middle) else (middle + 1, high)
        return low

    def _is_worth_more(self, slot: int, k: int, expected: float, matched: int) -> bool:
        return sum(self.ngram.survivals(slot, bins_of(k, CONFIDENCE[matched]))) > expected

    def learn(self, verdict: Verdict, slots: Sequence[int]) -> None:
        """Learn from a round, whose rows are in ``slots``, with the calibration of each row's kind of draft tokens."""
        for calibration, of_ngram in ((self.model, False), (self.ngram, True)):
            judged = []
            rows = zip(verdict.accepted, verdict.drafted, verdict.matched or [], strict=True)
            for accepted, drafted, matched in rows:
                known = min(accepted + 1, drafted) if (matched > 0) == of_ngram else 0
                bins = bins_of(known, CONFIDENCE[matched] if of_ngram else None)
                judged.append([(bin_, place < accepted) for place, bin_ in enumerate(bins)])
            calibration.learn(judged, slots)
