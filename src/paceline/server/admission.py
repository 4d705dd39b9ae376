"""Who may wait: a bounded queue of answers and of tokens, and when to try again."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from paceline.server import errors

_REMEMBERED = 32  # answers whose ends say how fast the queue moves
_LONGEST_WAIT = 60


class Work(NamedTuple):
    """What a prompt asks of the engine: ``answers`` of at most ``made`` tokens each, and ``read`` tokens to read.

    scored: beside its answers, its own tokens are scored.
    """

    answers: int
    made: int
    read: int
    scored: bool = False

    @property
    def tokens(self) -> int:
        return self.read + self.answers * self.made


class Room(NamedTuple):
    """What the engine's rows hold: the memory for it is there since the start."""

    answers: int
    tokens: int


@dataclass
class _Units:
    """Answers, or tokens: how many are inside, and whose they are."""

    name: str
    inside: int = 0
    of_client: Counter[str] = field(default_factory=Counter)

    def change(self, client: str, units: int) -> None:
        self.inside += units
        self.of_client[client] += units
        if not self.of_client[client]:
            del self.of_client[client]

    def has_room(self, client: str, units: int, limit: int, spare: int) -> bool:
        """Up to the limit for everybody; beyond it, ``spare`` more for those who would not have an even share of it."""
        after = self.inside + units
        share = limit / len(self.of_client.keys() | {client})
        return after <= limit or (after <= limit + spare and self.of_client[client] + units <= share)


class Place:
    """Room for the answers to a prompt, given back one by one as the engine is done with them.

    The last one takes the prompt along, once that is scored.
    """

    def __init__(self, admission: Admission, client: str, work: Work) -> None:
        self._admission, self._client, self._work = admission, client, work
        self._running = self._inside = work.answers
        self._unscored = work.scored

    def end(self, answers: int) -> None:
        """So many more have ended."""
        self._running = max(0, self._running - answers)
        self._give_back()

    def scored(self) -> None:
        """The prompt is."""
        self._unscored = False
        self._give_back()

    def close(self) -> None:
        """All is done."""
        self._running, self._unscored = 0, False
        self._give_back()

    def _give_back(self) -> None:
        inside = max(self._running, int(self._unscored))
        done, self._inside = self._inside - inside, inside
        if done:
            self._admission.leave(self._client, done, done * self._work.made + (0 if inside else self._work.read))


class Admission:
    """Counts answers and tokens from a request's arrival until the engine is done with them.

    What fits into the engine's rows needs no more than a row to be free; ``max_waiting`` answers and
    ``max_waiting_tokens`` tokens more may wait (None: as many tokens as so many answers can have). When all that is
    taken, a quarter more is there for clients that hold less than an even share: one client can fill the queue while it
    is alone, and still keeps nobody out. For the event loop only.
    """

    def __init__(
        self, max_waiting: int, max_waiting_tokens: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_waiting, self._max_tokens, self._clock = max_waiting, max_waiting_tokens, clock
        self._ended: deque[float] = deque(maxlen=_REMEMBERED)
        self._answers, self._tokens = _Units("answers"), _Units("tokens")

    @property
    def inside(self) -> int:
        """Answers that run or wait."""
        return self._answers.inside

    def check(self, answers: int, room: Room) -> None:
        """Raises ApiError (400) for a request with more answers than could ever be inside."""
        self._check_possible(answers, room.answers + self._max_waiting, "answers")

    def enter(self, client: str, works: Sequence[Work], room: Room) -> list[Place]:
        """Room for all prompts of one request, or for none. Raises ApiError: 429, or 400 if it could never be had."""
        longest = math.ceil(room.tokens / room.answers)
        waiting_tokens = self._max_waiting * longest if self._max_tokens is None else self._max_tokens
        for units, wanted, rows, waiting in (
            (self._answers, sum(work.answers for work in works), room.answers, self._max_waiting),
            (self._tokens, sum(work.tokens for work in works), room.tokens, waiting_tokens),
        ):
            self._check_possible(wanted, rows + waiting, units.name)
            if not units.has_room(client, wanted, rows + waiting, waiting // 4):
                message = f"{units.inside} {units.name} run or wait already; try again later"
                raise errors.overloaded(message, self._retry_after())
        for work in works:
            self._answers.change(client, work.answers)
            self._tokens.change(client, work.tokens)
        return [Place(self, client, work) for work in works]

    def leave(self, client: str, answers: int, tokens: int) -> None:
        """Places say so."""
        self._answers.change(client, -answers)
        self._tokens.change(client, -tokens)
        self._ended.extend([self._clock()] * min(answers, _REMEMBERED))

    def _check_possible(self, wanted: int, limit: int, name: str) -> None:
        if wanted > limit:
            message = f"{wanted} {name} were asked for in one request; this server takes at most {limit}"
            raise errors.invalid(message)

    def _retry_after(self) -> int:
        """Seconds in which, at the recent pace, a quarter of those inside will have ended; at least one."""
        if len(self._ended) < 2:
            return 1
        seconds = self._clock() - self._ended[0]
        return max(1, min(_LONGEST_WAIT, math.ceil(self.inside / 4 * seconds / len(self._ended))))
