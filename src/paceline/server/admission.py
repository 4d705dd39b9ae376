"""Admission control: a bounded queue of sequences and tokens, and the Retry-After value when it is full."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from paceline.engine.engine import Request
from paceline.server import errors

_REMEMBERED = 32  # finished sequences from whose times the queue's speed is estimated
_MAX_RETRY_AFTER_S = 60


class AdmissionLimits(NamedTuple):
    """Capacity of the engine's KV cache, allocated at the start: sequences, and tokens over all of them."""

    answers: int
    tokens: int


@dataclass
class _Units:
    """Amount of one resource (sequences or tokens) that is admitted now, in total and per client."""

    name: str
    inside: int = 0
    of_client: Counter[str] = field(default_factory=Counter)

    def change(self, client: str, units: int) -> None:
        self.inside += units
        self.of_client[client] += units
        if not self.of_client[client]:
            del self.of_client[client]

    def fits(self, client: str, units: int, limit: int, spare: int) -> bool:
        """Return whether ``units`` more fit.

        Up to ``limit`` any client is admitted. The ``spare`` units beyond it are for clients below an even share.
        """
        after = self.inside + units
        share = limit / len(self.of_client.keys() | {client})
        return after <= limit or (after <= limit + spare and self.of_client[client] + units <= share)


class AdmissionTicket:
    """Upper bound of what one prompt costs the engine, for which it is admitted.

    It is released sequence by sequence as the engine finishes them, the prompt's own tokens with the last sequence.

    answers: sequences sampled for the prompt. made: maximum of new tokens per sequence. read: prompt tokens to prefill.
    """

    def __init__(self, answers: int, made: int, read: int) -> None:
        self.answers, self.made, self.read = answers, made, read
        self._inside = 0  # sequences that are admitted
        self._release: Callable[[int, int], None]  # set by ``begin``

    @classmethod
    def of(cls, request: Request, max_model_len: int) -> AdmissionTicket:
        """The cost of a request. max_model_len: the engine's, in tokens."""
        params, size = request.params, len(request.prompt_token_ids)
        made = 0 if request.only_read else min(params.max_tokens, max_model_len - size)
        return cls(params.answers, made, size if made or request.reading else 0)

    @property
    def tokens(self) -> int:
        return self.read + self.answers * self.made

    def begin(self, release: Callable[[int, int], None]) -> None:
        """Mark the whole cost as admitted. release: called with numbers of sequences and tokens that have ended."""
        self._release, self._inside = release, self.answers

    def end(self, answers: int) -> None:
        """Release ``answers`` finished sequences."""
        done = min(self._inside, answers)
        self._inside -= done
        if done:
            self._release(done, done * self.made + (0 if self._inside else self.read))

    def close(self) -> None:
        """Release everything that is still admitted."""
        self.end(self._inside)


class Admission:
    """Counts sequences and tokens from a request's arrival until the engine is done with them.

    Requests that fit into the engine's rows only need a free row. Beyond those, ``max_waiting`` sequences and
    ``max_waiting_tokens`` tokens may queue (None: enough tokens for ``max_waiting`` sequences of full length).
    When the queue is full, another quarter of it is reserved for clients that hold less than an even share.
    One client can therefore fill the queue while it is alone, but cannot lock others out.
    Not thread-safe: call it from the event loop only.
    """

    def __init__(self, max_waiting: int, max_waiting_tokens: int | None = None) -> None:
        self._max_waiting, self._max_tokens = max_waiting, max_waiting_tokens
        self._ended: deque[float] = deque(maxlen=_REMEMBERED)
        self._answers, self._tokens = _Units("answers"), _Units("tokens")

    @property
    def inside(self) -> int:
        """Sequences that run or wait."""
        return self._answers.inside

    def check(self, answers: int, limits: AdmissionLimits) -> None:
        """Raise ApiError (400) if a request has more sequences than this server can ever admit."""
        self._check_possible(answers, limits.answers + self._max_waiting, "answers")

    def enter(self, client: str, tickets: Sequence[AdmissionTicket], limits: AdmissionLimits) -> None:
        """Admit all prompts of one request, or none.

        Raises ApiError: 429 if they do not fit now, 400 if they could never fit.
        """
        longest = math.ceil(limits.tokens / limits.answers)
        waiting_tokens = self._max_waiting * longest if self._max_tokens is None else self._max_tokens
        for units, wanted, rows, waiting in (
            (self._answers, sum(ticket.answers for ticket in tickets), limits.answers, self._max_waiting),
            (self._tokens, sum(ticket.tokens for ticket in tickets), limits.tokens, waiting_tokens),
        ):
            self._check_possible(wanted, rows + waiting, units.name)
            if not units.fits(client, wanted, rows + waiting, waiting // 4):
                message = f"the queue is full: {units.inside} {units.name} run or wait; try again later"
                raise errors.overloaded(message, self._retry_after())
        for ticket in tickets:
            self._answers.change(client, ticket.answers)
            self._tokens.change(client, ticket.tokens)
            ticket.begin(partial(self._leave, client))

    def _leave(self, client: str, answers: int, tokens: int) -> None:
        self._answers.change(client, -answers)
        self._tokens.change(client, -tokens)
        self._ended.extend([time.monotonic()] * min(answers, _REMEMBERED))

    def _check_possible(self, wanted: int, limit: int, name: str) -> None:
        if wanted > limit:
            message = f"one request asks for {wanted} {name}; this server takes at most {limit}"
            raise errors.invalid(message)

    def _retry_after(self) -> int:
        """Seconds until a quarter of the admitted sequences will have finished at the recent rate; at least 1."""
        if len(self._ended) < 2:
            return 1
        seconds = time.monotonic() - self._ended[0]
        return max(1, min(_MAX_RETRY_AFTER_S, math.ceil(self.inside / 4 * seconds / len(self._ended))))
