"""What a token of each row is worth.

Tokens per millisecond are the goal while other requests wait or may come: all tokens are worth the same. A batch that
only drains has ended when its slowest row has, which gains nothing when the others hurry on at its expense. There a
token counts by how late its row will end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.batch import Batch
from paceline.lengths.belief import ROW_FADE
from paceline.row_keeper import PerRow

PRIOR_ROUNDS = 2.0  # of one token, that a row's pace begins with


@dataclass
class _Pace:
    """Of a row lately: tokens and rounds."""

    tokens: float = PRIOR_ROUNDS
    rounds: float = PRIOR_ROUNDS
    ahead: float = 0.0  # plain rounds by which its guesses should have brought it ahead of plain decoding


class Paces:
    """How fast each row comes on."""

    def __init__(self) -> None:
        self.rows: PerRow[_Pace] = PerRow()

    def learn(self, accepted: Sequence[int], expected: Sequence[float], took: float) -> None:
        """From a round: guesses kept and expected to be, and its time over a plain one's. Bad luck is no debt."""
        for row, (kept, promised) in enumerate(zip(accepted, expected, strict=True)):
            pace = self.rows.setdefault(row, _Pace())
            pace.tokens = PRIOR_ROUNDS + (pace.tokens - PRIOR_ROUNDS) * ROW_FADE + kept + 1
            pace.ahead += promised + 1 - took
            pace.rounds = PRIOR_ROUNDS + (pace.rounds - PRIOR_ROUNDS) * ROW_FADE + 1

    def worth_of_tokens(self, batch: Batch) -> list[float]:
        """[B], 1 on average: what a token does for an early end of all is (when its row ends) / (the row's pace)."""
        if not batch.draining or batch.rows == 1:
            return [1.0] * batch.rows
        worth = [(batch.limits[row] - batch.lengths[row]) * self._rounds_a_token(row) ** 2 for row in range(batch.rows)]
        total = sum(worth)
        return [batch.rows * each / total for each in worth]

    def last(self, rows: int) -> tuple[int, float]:
        """The row that is least ahead, and by how many plain rounds that is."""
        ahead = [pace.ahead if (pace := self.rows.get(row)) else 0.0 for row in range(rows)]
        return ahead.index(min(ahead)), min(ahead)

    def _rounds_a_token(self, row: int) -> float:
        pace = self.rows.get(row)
        return 1.0 if pace is None else pace.rounds / pace.tokens
