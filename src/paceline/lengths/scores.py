"""From the scores of draft tokens, or their positions, to probabilities that they are accepted.

Draft tokens count whether or not they were verified: the tokens that the row gained show which were right. All
estimates are Python numbers on the host: a round has few draft tokens, and a numpy call takes longer than their
arithmetic.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import TypeAlias

from paceline.core.draft import MAX_KINDS, Draft, Verdict
from paceline.core.row_keeper import PerRow

JudgedToken: TypeAlias = tuple[int, bool]  # (bin or position of a draft token, whether it is right)

ROUND_FADE = 0.9  # weight of earlier rounds after one more, where things change fast: about the last ten count
SLOW_FADE = 0.97  # the same where they change slowly: about the last 33 rounds count
LONGEST_AUTO = 16  # draft tokens per row: the most that auto considers
BIN_WIDTH = 0.75  # log-odds that one bin of scores spans
BINS = 9
PRIOR_ACCEPTANCE = 0.7  # probability of a draft token without a score, before any was judged
SCORE_PRIOR = 3.0  # draft tokens that the score itself counts as in its bin
ROW_PRIOR = 2.0  # misses, and right draft tokens, that a row's record begins with, both observed and expected
TOKEN_MEMORY = 100.0  # draft tokens of one bin after which a token's weight has fallen to 1 / e
ROW_MEMORY = 25.0  # the same for the draft tokens of one row

_LOWEST_EDGE = -2 * BIN_WIDTH  # log-odds at the upper edge of the first bin
_EDGES = tuple(1 / (1 + math.exp(-(_LOWEST_EDGE + BIN_WIDTH * edge))) for edge in range(BINS - 1))
_CENTRES = tuple(1 / (1 + math.exp(-(_LOWEST_EDGE + BIN_WIDTH * (place - 0.5)))) for place in range(BINS))
# The bins of each kind come in two groups: first draft tokens of a row, then those whose parent is a draft token. A
# parent that was right is evidence by itself. Behind them is one bin per position, for draft tokens without a score.
POSITION_BINS = 2 * BINS * MAX_KINDS  # index of the first of these
_PRIORS = (*_CENTRES * 2 * MAX_KINDS, *[PRIOR_ACCEPTANCE] * LONGEST_AUTO)  # [bins]: probability before any observation
_TOKEN_FADE = math.exp(-1 / TOKEN_MEMORY)


class ScoreCalibration:
    """Turns the scores of draft tokens into probabilities of being right, given that their ancestors are.

    tried, kept: [bins], recent draft tokens by bin, and those that were right. The score is the prior.
    rows: by slot, (number, misses, expected misses) of recent draft tokens. The odds of a miss in that row are those of
        the bin times the odds of its misses over those of the expected ones.
    """

    def __init__(self) -> None:
        self.tried, self.kept = [0.0] * len(_PRIORS), [0.0] * len(_PRIORS)
        self.rows: PerRow[tuple[float, float, float]] = PerRow()

    def _miss(self, bin_: int) -> float:
        """Probability of a miss in this bin, before the row's factor."""
        tried = self.tried[bin_]
        return (tried - self.kept[bin_] + SCORE_PRIOR * (1 - _PRIORS[bin_])) / (tried + SCORE_PRIOR)

    def chance(self, slot: int, bin_: int) -> float:
        """Probability that a draft token in this bin and slot is right if its ancestors are."""
        count, missed, expected = self.rows.get(slot, (0.0, 0.0, 0.0))
        miss = self._miss(bin_)
        right = (count - missed + ROW_PRIOR) * (expected + ROW_PRIOR) * (1 - miss)
        return right / (right + (missed + ROW_PRIOR) * (count - expected + ROW_PRIOR) * miss)

    def survivals(self, slot: int, bins: Sequence[int], parents: Sequence[int] | None = None) -> list[float]:
        """Probability of each draft token of a row that it and all its ancestors are right.

        bins: one per draft token. parents: index of each one's parent, -1 for none; None: a chain.
        """
        chances = {bin_: self.chance(slot, bin_) for bin_ in set(bins)}
        survivals: list[float] = []
        for place, bin_ in enumerate(bins):
            parent = place - 1 if parents is None else parents[place]
            survivals.append(chances[bin_] * (survivals[parent] if parent >= 0 else 1.0))
        return survivals

    def learn(self, judged: Sequence[Sequence[JudgedToken]], slots: Sequence[int]) -> None:
        """Learn from a round of the rows in ``slots``.

        judged: for each row, its draft tokens whose correctness is known, with their bins.
        """
        for slot, line in zip(slots, judged, strict=True):
            if line:
                fade = math.exp(-len(line) / ROW_MEMORY)
                count, missed, expected = self.rows.get(slot, (0.0, 0.0, 0.0))
                missed = missed * fade + sum([not right for _, right in line])
                expected = expected * fade + sum([self._miss(bin_) for bin_, _ in line])
                self.rows[slot] = count * fade + len(line), missed, expected
        for line in judged:
            for bin_, right in line:
                self.tried[bin_] = self.tried[bin_] * _TOKEN_FADE + 1
                self.kept[bin_] = self.kept[bin_] * _TOKEN_FADE + right


def bins_of(
    count: int,
    scores: Sequence[float] | None = None,
    parents: Sequence[int] | None = None,
    kinds: Sequence[int] | None = None,
) -> list[int]:
    """Bins of a row's first ``count`` draft tokens: by score, or by position if ``scores`` is None.

    scores, parents, kinds: at least ``count`` entries each, as in ``Draft``. parents None: a chain. kinds None: all 0.
    """
    if scores is None:
        return [POSITION_BINS + min(place, LONGEST_AUTO - 1) for place in range(count)]
    bins = []
    for place in range(count):
        first = place == 0 if parents is None else parents[place] < 0
        kind = 0 if kinds is None else 2 * BINS * kinds[place]
        bins.append(bisect_left(_EDGES, scores[place]) + (0 if first else BINS) + kind)
    return bins


def bins_of_draft(draft: Draft) -> list[list[int]]:
    """Bins of the draft tokens, row by row."""
    nothing = [None] * len(draft.draft_tokens)
    scores, parents, kinds = draft.confidence or nothing, draft.parents or nothing, draft.kinds or nothing
    rows = zip(draft.draft_tokens, scores, parents, kinds, strict=True)
    return [bins_of(len(draft_tokens), score, tree, kind) for draft_tokens, score, tree, kind in rows]


def judge(draft: Draft, verdict: Verdict) -> list[list[JudgedToken]]:
    """Compare each row's draft tokens, verified or not, with the tokens that the row gained.

    Returns (position, whether right) for those that can be judged: their ancestors are all right, and the gained
    tokens reach as far. Of equal siblings only the first is right.
    """
    judged = []
    for row, (draft_tokens, gained) in enumerate(zip(draft.draft_tokens, verdict.tokens, strict=True)):
        parents = range(-1, len(draft_tokens) - 1) if draft.parents is None else draft.parents[row]
        line: list[JudgedToken] = []
        next_gained = {-1: 0}  # index in ``gained`` of the token after each draft token that is right so far
        continued = set()  # parents that have a right child
        for place, draft_token in enumerate(draft_tokens):
            at = next_gained.get(parent := parents[place], len(gained))
            if at < len(gained):
                right = draft_token == gained[at] and parent not in continued
                line.append((place, right))
                if right:
                    next_gained[place] = at + 1
                    continued.add(parent)
        judged.append(line)
    return judged
