"""Limits of single keys: how many requests at a time, how many tokens a minute."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil

from paceline.config import MAX_COUNT
from paceline.errors import ParameterError
from paceline.server import errors
from paceline.server.clients import key_name

LIMITS = ("max_requests", "max_tokens_per_minute")
_LIMIT = re.compile(rf"({'|'.join(LIMITS)})=([1-9][0-9]{{0,9}})", re.ASCII)


@dataclass(frozen=True)
class Key:
    """A key and its limits; None: none of its own."""

    secret: str
    max_requests: int | None = None
    max_tokens_per_minute: int | None = None


def read_key(line: str) -> Key:
    """``KEY [max_requests=N] [max_tokens_per_minute=N]``. Raises ParameterError, which does not show the key."""
    secret, *rest = line.split() or [""]
    found = [_LIMIT.fullmatch(word) for word in rest]
    limits = {match[1]: int(match[2]) for match in found if match is not None}
    is_key = bool(secret) and not secret.startswith(tuple(f"{name}=" for name in LIMITS))
    if not is_key or len(limits) < len(rest) or max(limits.values(), default=0) > MAX_COUNT:
        allowed = (
            f"a key without spaces; behind it max_requests=N, max_tokens_per_minute=N or both, N up to {MAX_COUNT}"
        )
        raise ParameterError("api_keys", "...", allowed)
    return Key(secret, **limits)


@dataclass
class Bill:
    """What a request has cost so far, in tokens."""

    used: int = 0


class _Account:
    """A key's requests in hand, and the tokens that it may still use: a minute's at most, filled up all the time."""

    def __init__(self, key: Key, clock: Callable[[], float]) -> None:
        self._key, self._clock = key, clock
        self._requests, self._at = 0, clock()
        self._left = float(key.max_tokens_per_minute or 0)

    @contextmanager
    def hold(self, tokens: int) -> Iterator[Bill]:
        self._check(tokens)
        self._requests += 1
        self._left -= tokens
        bill = Bill()
        try:
            yield bill
        finally:
            self._requests -= 1
            self._left += tokens - bill.used

    def _check(self, tokens: int) -> None:
        most, each_minute = self._key.max_requests, self._key.max_tokens_per_minute
        if most is not None and self._requests >= most:
            raise errors.over_limit(f"this key has {most} requests running or waiting, as many as it may", 1)
        if each_minute is None:
            return
        now = self._clock()
        self._left, self._at = min(each_minute, self._left + (now - self._at) / 60 * each_minute), now
        missing = min(tokens, each_minute) - self._left  # a longer request has all of a minute
        if missing > 0:
            message = f"this key may use {each_minute} tokens a minute, and this request may need {tokens}"
            raise errors.over_limit(message, ceil(60 * missing / each_minute))


class Quotas:
    """The accounts of all keys that have limits. For the event loop only."""

    def __init__(self, lines: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        keys = [read_key(line) for line in lines]
        if len({key.secret for key in keys}) < len(keys):
            raise ParameterError("api_keys", "...", "keys that differ; one is given twice")
        self._accounts = {key_name(key.secret): _Account(key, clock) for key in keys if key != Key(key.secret)}

    @contextmanager
    def hold(self, client: str, tokens: int) -> Iterator[Bill]:
        """While a request is in hand that may need so many tokens; those that it did not use are given back.

        Raises ApiError (429) if the client's key may not have it now.
        """
        account = self._accounts.get(client)
        if account is None:
            yield Bill()
            return
        with account.hold(tokens) as bill:
            yield bill
