"""Which prompts are fed between two rounds, and how much of them: no row that decodes waits for long."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol

_STEP = 512  # positions that are taken to cost the same: a token attends to all before it
_DRAFT = 0.003  # seconds a token, before anything is known
_LEARN = 0.5  # how much of a surprise is believed: one stall of the machine is not its speed
_AIM = 0.8  # of a pause is what a chunk and a round should take: some take longer than others
_LEAST = 0.25  # of a pause is left to prompts, however long rounds, and passes of whatever size, take themselves
_SMALL = 4  # times smaller than the chunks that rates are known from: such a one tells what a pass takes at least
_ALONE = 5  # pauses long may a chunk be when no row decodes: a short prompt that arrives waits for it
_ROUNDS = 8  # lately, from which the time of the next one is known
_OLDEST = 4  # every so many chunks begin with the prompt that came first, so that short ones never starve it


class PrefillPrompt(Protocol):
    """A prompt of which ``prefilled`` tokens are cached; prefill ends at ``prefill_stop``.

    waits: for another to read what they share. feeding_order: its priority, the tokens that remain, and perhaps what
    decides between equals.
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
    """Times a chunk."""

    def seconds(self) -> float | None:
        """That a chunk took; None: it is not over."""
        ...


@dataclass(frozen=True)
class PromptSlice:
    """Tokens start .. stop - 1 of the prompt number ``place``."""

    place: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


class PrefillSpeed:
    """Seconds that a prompt's token takes at its position, learned from the chunks that were fed.

    A pass reads all weights however few its tokens are. Were small chunks to teach what a token takes, that would grow
    as they shrink, and they shrink as it grows, down to a token a pass. So they teach ``per_pass``: the seconds of any.
    One that takes less than its tokens were believed to shows that these take less.
    """

    def __init__(self) -> None:
        self.per_pass = 0.0
        self._rates: dict[int, float] = {}
        self._usual = 0  # tokens of the largest chunk

    def seconds_per_token(self, position: int) -> float:
        """Of the nearest position that is known."""
        step = position // _STEP
        if step in self._rates or not self._rates:
            return self._rates.get(step, _DRAFT)
        return self._rates[min(self._rates, key=lambda known: abs(known - step))]

    def learn(self, parts: Sequence[PromptSlice], seconds: float) -> None:
        """A chunk took so long."""
        tokens = sum(part.size for part in parts)
        if not self._rates:
            self._rates[parts[0].start // _STEP] = seconds / tokens
        before = [self.seconds_per_token(part.start) for part in parts]
        expected = sum(part.size * rate for part, rate in zip(parts, before, strict=True))
        if tokens * _SMALL <= self._usual and seconds > expected:
            self.per_pass += _LEARN * (max(0.0, seconds - expected) - self.per_pass)
            return
        self._usual = max(self._usual, tokens)
        surprise = 1 + _LEARN * (max(seconds - self.per_pass, seconds / _SMALL) / expected - 1)
        for part, rate in zip(parts, before, strict=True):
            self._rates[part.start // _STEP] = rate * surprise


class RoundSeconds:
    """Seconds that a round takes, by its rows: 1, 2-3, 4-7, ...; the median of those lately, for one may be a stall.

    last: of the last round.
    """

    def __init__(self) -> None:
        self.last = 0.0
        self._lately: dict[int, deque[float]] = {}

    def learn(self, rows: int, seconds: float) -> None:
        """A round of so many rows took so long."""
        self.last = seconds
        self._lately.setdefault(rows.bit_length(), deque(maxlen=_ROUNDS)).append(seconds)

    def expected(self, rows: int) -> float:
        """For so many rows, or the nearest number that is known; 0 before any round."""
        return median(self._nearest(rows) or [0.0])

    def doubt(self, rows: int) -> None:
        """Forget the slowest of the rounds that say how long the next one takes."""
        if lately := self._nearest(rows):
            lately.remove(max(lately))

    def _nearest(self, rows: int) -> deque[float] | None:
        size = rows.bit_length()
        known = [other for other, lately in self._lately.items() if lately]
        return self._lately[min(known, key=lambda other: abs(other - size))] if known else None


class PrefillChunker:
    """Chooses what is fed: the shortest remaining prompts first, as many tokens as the pause that they make allows.

    most: tokens of a chunk, all rows together and padded to the longest. pause: seconds between two tokens of a row
    that decodes, which is a chunk and a round; None: a chunk may take as long as it likes. awaited: whether anybody
    notices a pause; else a chunk may take as long as it likes, too.
    """

    def __init__(self, most: int, pause: float | None) -> None:
        self._most, self._pause = most, pause
        self.awaited = True
        self._chosen = 0
        self._watched: deque[tuple[Sequence[PromptSlice], Timer]] = deque()
        self.speed = PrefillSpeed()
        self.rounds = RoundSeconds()

    def choose(self, prompts: Sequence[PrefillPrompt], decoding: bool, left: float = math.inf) -> list[PromptSlice]:
        """The next chunk, by place among ``prompts``, of which one at least is not prefilled.

        left: seconds until it must have ended; it has a token at least.
        """
        self._learn()
        parts: list[PromptSlice] = []
        seconds, widest = min(self._seconds(decoding), left - self.speed.per_pass), 0
        for place in self._order(prompts):
            start, rate = prompts[place].prefilled, self.speed.seconds_per_token(prompts[place].prefilled)
            size = int(min(max(0.0, seconds) / rate, prompts[place].prefill_stop - start, self._most))
            widest = max(widest, size)
            if parts and (size < 1 or widest * (len(parts) + 1) > self._most):
                break
            parts.append(PromptSlice(place, start, start + max(1, size)))
            seconds -= parts[-1].size * rate
        return parts

    def least_seconds(self, position: int) -> float:
        """What the smallest chunk takes, from a position on."""
        return self.speed.per_pass + self.speed.seconds_per_token(position)

    def watch(self, parts: Sequence[PromptSlice], watch: Timer) -> None:
        """Learn from a chunk, as soon as it is known how long it took."""
        self._watched.append((parts, watch))

    def _learn(self) -> None:
        while self._watched and (seconds := self._watched[0][1].seconds()) is not None:
            self.speed.learn(self._watched.popleft()[0], seconds)

    def _seconds(self, decoding: bool) -> float:
        """That the chunk's tokens may take."""
        if self._pause is None or not self.awaited:
            return math.inf
        pause = _AIM * self._pause - self.rounds.last if decoding else _ALONE * self._pause
        return max(pause - self.speed.per_pass, _LEAST * self._pause)

    def _order(self, prompts: Sequence[PrefillPrompt]) -> list[int]:
        """The places of those to feed: the shortest remaining first, now and then the oldest."""
        self._chosen += 1
        fed = [place for place, prompt in enumerate(prompts) if not prompt.waits]
        order = sorted(fed, key=lambda place: prompts[place].feeding_order)
        if self._chosen % _OLDEST == 0:
            oldest = min(order, key=lambda place: (prompts[place].priority, prompts[place].arrival_time))
            order.remove(oldest)
            order.insert(0, oldest)
        return order
