"""Chunked prefill: which prompts are fed between two rounds, and how many of their tokens.

The size of a chunk is limited by time, so that rows that decode never wait long.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol

_STEP = 512  # positions with the same assumed cost per token: attention makes later tokens dearer
_DEFAULT_RATE = 0.003  # seconds per token before anything was measured
_LEARN = 0.5  # weight of a new measurement: one stall of the machine must not set the rate
_AIM = 0.8  # fraction of the pause planned for a chunk and a round: some take longer than expected
_LEAST = 0.25  # fraction of the pause always left to prompts, however long rounds and passes take
_SMALL = 4  # chunks below 1/4 of the largest so far update the per-pass overhead, not the per-token rate
_ALONE = 5  # pauses per chunk while no row decodes: a short prompt that arrives waits for it
_ROUNDS = 8  # recent rounds whose median predicts the next one
_OLDEST = 4  # every 4th chunk starts with the oldest prompt, so that short ones never starve it


class PrefillPrompt(Protocol):
    """A prompt whose first ``prefilled`` tokens are cached; its prefill ends at token ``prefill_stop``.

    waits: whether another prompt is reading their common prefix; it is not fed meanwhile.
    feeding_order: sort key: priority, remaining tokens, and perhaps a tie-breaker.
    arrival_time: seconds on the clock of time.monotonic.
    """

    @property
    def priority(self) -> int: ...

    @property
    def prefilled(self) -> int: ...

    @property
    def prefill_stop(self) -> int: ...

    @property
    def waits(self) -> bool: ...

    @property
    def feeding_order(self) -> tuple[float, ...]: ...

    @property
    def arrival_time(self) -> float: ...


class Timer(Protocol):
    """Times a chunk that may still run on a device."""

    def seconds(self) -> float | None:
        """Return the seconds that the chunk took; None if it has not finished."""
        ...


@dataclass(frozen=True)
class PromptSlice:
    """Tokens start .. stop - 1 of the prompt number ``index``."""

    index: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


class PrefillSpeed:
    """Seconds of prefill per token, by position, learned from the chunks that were fed.

    A pass reads all weights, however few its tokens are. If small chunks set the per-token rate, the rate would rise as
    they shrink, and they would shrink as it rises, down to one token per pass, so small chunks update ``per_pass``, the
    overhead of a pass in seconds. A small chunk that is faster than its tokens should be lowers the rate.
    """

    def __init__(self) -> None:
        self.per_pass = 0.0
        self._rates: dict[int, float] = {}
        self._largest_chunk = 0  # tokens

    def seconds_per_token(self, position: int) -> float:
        """Return the rate at the nearest measured position."""
        step = position // _STEP
        if step in self._rates or not self._rates:
            return self._rates.get(step, _DEFAULT_RATE)
        return self._rates[min(self._rates, key=lambda known: abs(known - step))]

    def learn(self, parts: Sequence[PromptSlice], seconds: float) -> None:
        """Update the rates: the chunk ``parts`` took ``seconds``."""
        tokens = sum(part.size for part in parts)
        if not self._rates:
            self._rates[parts[0].start // _STEP] = seconds / tokens
        rates = [self.seconds_per_token(part.start) for part in parts]
        expected = sum(part.size * rate for part, rate in zip(parts, rates, strict=True))
        if tokens * _SMALL <= self._largest_chunk and seconds > expected:
            self.per_pass += _LEARN * (max(0.0, seconds - expected) - self.per_pass)
            return
        self._largest_chunk = max(self._largest_chunk, tokens)
        surprise = 1 + _LEARN * (max(seconds - self.per_pass, seconds / _SMALL) / expected - 1)
        for part, rate in zip(parts, rates, strict=True):
            self._rates[part.start // _STEP] = rate * surprise


class RoundSeconds:
    """Seconds per round by number of rows (1, 2-3, 4-7, ...): the median of recent rounds ignores a stall.

    last: seconds of the last round.
    """

    def __init__(self) -> None:
        self.last = 0.0
        self._recent: dict[int, deque[float]] = {}

    def learn(self, rows: int, seconds: float) -> None:
        """Record that a round of ``rows`` rows took ``seconds``."""
        self.last = seconds
        self._recent.setdefault(rows.bit_length(), deque(maxlen=_ROUNDS)).append(seconds)

    def expected(self, rows: int) -> float:
        """Return the seconds of a round of ``rows`` rows, or of the nearest measured size; 0 before any round."""
        return median(self._nearest(rows) or [0.0])

    def doubt(self, rows: int) -> None:
        """Forget the slowest of the rounds that predict the next one."""
        if recent := self._nearest(rows):
            recent.remove(max(recent))

    def _nearest(self, rows: int) -> deque[float] | None:
        size = rows.bit_length()
        measured = [other for other, recent in self._recent.items() if recent]
        return self._recent[min(measured, key=lambda other: abs(other - size))] if measured else None


class PrefillChunker:
    """Chooses chunks: the shortest remaining prompts first, with as many tokens as the allowed pause permits.

    max_tokens: limit of a chunk, all rows together and padded to the longest.
    max_pause: seconds between two tokens of a decoding row, that is, for one chunk and one round; None sets no limit.
    awaited: whether a caller notices pauses; if not, there is no limit either.
    """

    def __init__(self, max_tokens: int, max_pause: float | None) -> None:
        self._max_tokens, self._max_pause = max_tokens, max_pause
        self.awaited = True
        self._chosen = 0
        self._timed: deque[tuple[Sequence[PromptSlice], Timer]] = deque()
        self.speed = PrefillSpeed()
        self.rounds = RoundSeconds()

    def choose(self, prompts: Sequence[PrefillPrompt], decoding: bool, left: float = math.inf) -> list[PromptSlice]:
        """Return the next chunk: at least one token. At least one of ``prompts`` must have tokens to feed.

        decoding: whether rows decode, which the chunk delays.
        left: seconds until the chunk must have ended.
        """
        self._learn()
        parts: list[PromptSlice] = []
        budget, widest = min(self._seconds(decoding), left - self.speed.per_pass), 0
        for index in self._order(prompts):
            start, rate = prompts[index].prefilled, self.speed.seconds_per_token(prompts[index].prefilled)
            size = int(min(max(0.0, budget) / rate, prompts[index].prefill_stop - start, self._max_tokens))
            widest = max(widest, size)
            if parts and (size < 1 or widest * (len(parts) + 1) > self._max_tokens):
                break
            parts.append(PromptSlice(index, start, start + max(1, size)))
            budget -= parts[-1].size * rate
        return parts

    def least_seconds(self, position: int) -> float:
        """Return the seconds of the smallest chunk at a position: one token."""
        return self.speed.per_pass + self.speed.seconds_per_token(position)

    def watch(self, parts: Sequence[PromptSlice], timer: Timer) -> None:
        """Learn from a chunk once its time is known."""
        self._timed.append((parts, timer))

    def _learn(self) -> None:
        while self._timed and (seconds := self._timed[0][1].seconds()) is not None:
            self.speed.learn(self._timed.popleft()[0], seconds)

    def _seconds(self, decoding: bool) -> float:
        """Return the seconds that the chunk's tokens may take."""
        if self._max_pause is None or not self.awaited:
            return math.inf
        budget = _AIM * self._max_pause - self.rounds.last if decoding else _ALONE * self._max_pause
        return max(budget - self.speed.per_pass, _LEAST * self._max_pause)

    def _order(self, prompts: Sequence[PrefillPrompt]) -> list[int]:
        """Return the indices of prompts to feed: the shortest remaining first; every 4th time the oldest."""
        self._chosen += 1
        ready = [index for index, prompt in enumerate(prompts) if not prompt.waits]
        order = sorted(ready, key=lambda index: prompts[index].feeding_order)
        if self._chosen % _OLDEST == 0:
            oldest = min(order, key=lambda index: (prompts[index].priority, prompts[index].arrival_time))
            order.remove(oldest)
            order.insert(0, oldest)
        return order
