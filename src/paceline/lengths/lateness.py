"""What a token of each row is worth.

Tokens per millisecond are the goal while other requests wait or may come: all tokens are worth the same. A batch that
only drains has ended when its slowest row has, which gains nothing when the others hurry on at its expense. There a
token counts by how late its row will end.
"""

from __future__ import annotations

from paceline.batch import Batch


def worth_of_tokens(batch: Batch) -> list[float]:
    """[B], 1 on average: what a token does for an early end of all is (when its row ends) / (the row's pace)."""
    if not batch.draining or batch.rows == 1:
        return [1.0] * batch.rows
    paces = [batch.pace.tokens(row) for row in range(batch.rows)]
    worth = [(batch.limits[row] - batch.lengths[row]) / pace**2 for row, pace in enumerate(paces)]
    total = sum(worth)
    return [batch.rows * each / total for each in worth]
