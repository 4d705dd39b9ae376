"""Who may wait: a bounded queue of answers, and when to try again."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from paceline.server import errors

_REMEMBERED = 32  # answers whose ends say how fast the queue moves
_LONGEST_WAIT = 60


class Admission:
    """Counts answers from a request's arrival to its end, in the order of arrival.

    The memory of ``rows`` rows is the engine's since its start, so an answer needs no more than a row to be free;
    ``max_waiting`` more may wait for one. For the event loop only.
    """

    def __init__(self, max_waiting: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_waiting, self._clock = max_waiting, clock
        self._ended: deque[float] = deque(maxlen=_REMEMBERED)
        self.inside = 0

    @contextmanager
    def place(self, answers: int, rows: int) -> Iterator[None]:
        """Room for so many answers of one request. Raises ApiError: 429, or 400 if it could never be had."""
        limit = rows + self._max_waiting
        if answers > limit:
            raise errors.invalid(f"{answers} answers were asked for in one request; this server takes at most {limit}")
        if self.inside + answers > limit:
            raise errors.overloaded(f"{self.inside} answers run or wait already; try again later", self._retry_after())
        self.inside += answers
        try:
            yield
        finally:
            self.inside -= answers
            self._ended.extend([self._clock()] * min(answers, _REMEMBERED))

    def _retry_after(self) -> int:
        """Seconds in which, at the recent pace, a quarter of those inside will have ended; at least one."""
        if len(self._ended) < 2:
            return 1
        seconds = self._clock() - self._ended[0]
        return max(1, min(_LONGEST_WAIT, math.ceil(self.inside / 4 * seconds / len(self._ended))))
