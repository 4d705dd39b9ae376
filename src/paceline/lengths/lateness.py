"""What a token of each row is worth.

Tokens per millisecond are the goal while other requests wait or may come: all tokens are worth the same. A batch that
only drains has ended when its slowest row has, which gains nothing when the others hurry on at its expense. There a
token counts by how late its row will end.
"""

from __future__ import annotations

from paceline.batch import Batch

LATEST = 2  # the power of a row's expected end that its tokens weigh in a batch that drains


def worth_of_tokens(batch: Batch) -> list[float]:
    """[B], 1 on average: a token does (when its row ends) ** LATEST / the row's pace for an early end of all."""
    if not batch.draining:
        return [1.0] * batch.rows
    paces = [batch.pace.tokens(row) for row in range(batch.rows)]
    ends = [(batch.limits[row] - batch.lengths[row]) / pace for row, pace in enumerate(paces)]
    last = max(ends)
    worth = [(end / last) ** LATEST / pace for end, pace in zip(ends, paces, strict=True)]
    total = sum(worth)
    return [batch.rows * each / total for each in worth]
