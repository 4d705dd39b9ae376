"""Records of recent rounds and rows: means, rates, the exploration budget, and each row's progress."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.core.batch import Batch
from paceline.core.row_keeper import PerRow

ROUND_FADE = 0.9  # weight of all earlier rounds after one more round: about the last 10 rounds count
ROW_MEMORY = 24.0  # rounds of a row after which a round's weight has fallen to 1 / e
ROW_FADE = math.exp(-1 / ROW_MEMORY)
EXPLORATION_SHARE = 0.0075  # of run time, for trials: keeps the loss where nothing pays below 1 %
REFRESH_ROUNDS = 16  # rounds for which decisions and corrected times are reused at most: making them takes time, too
PRIOR_ROUNDS = 2.0  # rounds of one token each that a row's progress starts from


class RunningMean:
    """Mean of recent values, older ones fading by ``ROUND_FADE``; the initial value counts as one observation."""

    def __init__(self, initial: float) -> None:
        self.value, self._weight, self._squares = initial, 1.0, 0.0

    @property
    def error(self) -> float:
        """Standard error of ``value``."""
        return math.sqrt(self._squares) / self._weight

    def learn(self, value: float) -> None:
        """Add an observation."""
        known, off = self._weight * ROUND_FADE, value - self.value
        self._weight = known + 1
        self.value += off / self._weight
        self._squares = self._squares * ROUND_FADE + off * off * known / self._weight

    def doubt(self, observations: float) -> None:
        """Limit the record's weight to a number of observations. Value and standard error stay."""
        share = min(1.0, observations / self._weight)
        self._weight, self._squares = self._weight * share, self._squares * share * share


class TokenRate:
    """Tokens per millisecond of recent rounds; 0 before the first.

    Pricing a draft token at the rate reached so far converges to the highest ratio of tokens to time (Dinkelbach 1967).
    """

    def __init__(self) -> None:
        self._tokens = self._ms = 0.0

    @property
    def value(self) -> float:
        return self._tokens / self._ms if self._ms else 0.0

    def learn(self, tokens: float, ms: float) -> None:
        """Add a round."""
        self._tokens = self._tokens * ROUND_FADE + tokens
        self._ms = self._ms * ROUND_FADE + ms


class ExplorationBudget:
    """Milliseconds saved for trials: grows by ``EXPLORATION_SHARE`` of run time, capped at the last price asked for."""

    def __init__(self) -> None:
        self._ms = self._price = 0.0

    def accrue(self, ms: float) -> None:
        """Add the share of a round that took ``ms`` milliseconds."""
        self._ms = min(self._ms + EXPLORATION_SHARE * ms, self._price)

    def rounds_until_affordable(self, ms: float) -> int:
        """Number of rounds of ``ms`` milliseconds each until the last price can be paid."""
        return math.ceil(max(0.0, self._price - self._ms) / (EXPLORATION_SHARE * ms))

    def try_spend(self, price: float) -> bool:
        """Spend ``price`` milliseconds if the budget covers them; whether it did. The price is the new cap."""
        self._price = price
        if self._ms < price:
            return False
        self._ms -= price
        return True


@dataclass
class _Progress:
    """Recent tokens and rounds of one row, with fading weights, and its lead over plain decoding, in plain rounds."""

    tokens: float = PRIOR_ROUNDS
    rounds: float = PRIOR_ROUNDS
    lead: float = 0.0


class RowProgress:
    """Speed of each row, from which the token weights follow.

    While requests wait or may come, the goal is tokens per millisecond, and all tokens weigh the same. A draining batch
    ends with its slowest row, which gains nothing if the others advance at its expense. There a token weighs more the
    later its row will end.
    """

    def __init__(self) -> None:
        self.rows: PerRow[_Progress] = PerRow()

    def learn(self, accepted: Mapping[int, int], took: float) -> None:
        """Add a round.

        accepted: accepted draft tokens of each row in the round, by slot. took: the round's time over a plain round's.
        """
        for slot, kept in accepted.items():
            progress = self.rows.setdefault(slot, _Progress())
            progress.tokens = PRIOR_ROUNDS + (progress.tokens - PRIOR_ROUNDS) * ROW_FADE + kept + 1
            progress.lead += kept + 1 - took
            progress.rounds = PRIOR_ROUNDS + (progress.rounds - PRIOR_ROUNDS) * ROW_FADE + 1

    def token_weights(self, batch: Batch) -> list[float]:
        """Token weight of each row, [B], 1 on average.

        In a draining batch it is proportional to (rounds until the row ends) / (the row's tokens per round).
        """
        if not batch.draining or batch.rows == 1:
            return [1.0] * batch.rows
        rows = zip(batch.slots, batch.limits, batch.lengths, strict=True)
        weights = [(limit - length) * self._rounds_per_token(slot) ** 2 for slot, limit, length in rows]
        total = sum(weights)
        return [batch.rows * weight / total for weight in weights]

    def leads(self, slots: Sequence[int]) -> list[float]:
        """Lead of each row over plain decoding, in plain rounds: tokens gained minus time spent."""
        return [progress.lead if (progress := self.rows.get(slot)) else 0.0 for slot in slots]

    def _rounds_per_token(self, slot: int) -> float:
        progress = self.rows.get(slot)
        return 1.0 if progress is None else progress.rounds / progress.tokens


class Backoff:
    """Plain rounds without a decision, after a decision for a plain round: nothing can change for a while.

    It doubles each time until a source of draft tokens is used, because prices rise while a draft model falls behind.
    """

    def __init__(self) -> None:
        self._left = self._last = self._rows = 0

    def covers(self, rows: int) -> bool:
        """Whether the next round, of ``rows`` rows, needs no decision. A change of the number of rows ends it."""
        return self._left > 0 and rows == self._rows

    def use_up(self) -> None:
        self._left -= 1

    def begin(self, rows: int, rounds: int) -> None:
        self._rows, self._left = rows, min(REFRESH_ROUNDS, max(rounds, 2 * self._last))
        self._last = self._left

    def reset(self) -> None:
        self._left = self._last = 0
