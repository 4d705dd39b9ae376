"""The time of rounds, for length policies."""

from __future__ import annotations

import time

from paceline.core.draft import RoundTiming


class RoundTimer:
    """Times rounds that the host runs. What learning from one takes is counted with the next one of its kind."""

    def __init__(self) -> None:
        self._ended: float | None = None  # None: the last round is not timed
        self._drafts = False
        self._learning = {True: 0.0, False: 0.0}  # seconds after the last round with draft tokens asked for, or without

    def ended(self, began: float, drafted_at: float | None, *, drafts: bool) -> RoundTiming | None:
        """Return the time of a round that has just ended; None if it is not timed.

        began: seconds of time.perf_counter. drafted_at: the same, when its draft was made; None if that is not known.
        drafts: whether draft tokens were asked for.
        """
        self._ended, self._drafts = None, drafts
        if drafted_at is None:
            return None
        self._ended = time.perf_counter()
        drafting = drafted_at - began + self._learning[drafts]
        return RoundTiming(1000 * drafting, 1000 * (self._ended - drafted_at))

    def learned(self) -> None:
        """Note that the drafter and the policy have learned from the round."""
        if self._ended is not None:
            self._learning[self._drafts] = time.perf_counter() - self._ended
