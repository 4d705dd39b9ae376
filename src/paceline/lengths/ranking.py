"""The guesses of a batch, best first: without sorting them all, for the first that does not pay ends the search."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heapreplace

from paceline.reliability import Reliability


def ranked(
    reliability: Reliability, confidence: Sequence[Sequence[float]], counts: Sequence[int], weights: Sequence[float]
) -> Iterator[tuple[float, float, int]]:
    """Guesses by survival times their row's weight; of equals, the first row's. Gives (that, survival, row).

    confidence [B, K], of which the first counts[i] of row i are guesses. Survival falls along a row, so the best guess
    of the batch is one of the rows' next ones.
    """
    nexts = []
    for row, count in enumerate(counts):
        if count:
            survival = reliability.chance(row, confidence[row][0])
            nexts.append((-survival * weights[row], row, 0, survival))
    heapify(nexts)
    while nexts:
        value, row, place, survival = nexts[0]
        yield -value, survival, row
        place += 1
        if place < counts[row]:
            survival *= reliability.chance(row, confidence[row][place], place)
            heapreplace(nexts, (-survival * weights[row], row, place, survival))
        else:
            heappop(nexts)
