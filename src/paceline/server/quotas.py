"""Limits per API key: concurrent requests, and tokens per minute."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil

from paceline.config.limits import MAX_COUNT
from paceline.errors import ParameterError
from paceline.server import errors
from paceline.server.clients import key_name

LIMITS = ("max_requests", "max_tokens_per_minute")
_LIMIT = re.compile(rf"({'|'.join(LIMITS)})=([1-9][0-9]{{0,9}})", re.ASCII)


@dataclass(frozen=True)
class ApiKey:
    """An API key and its limits; None means no limit."""

    secret: str
    max_requests: int | None = None
    max_tokens_per_minute: int | None = None


def read_key(line: str) -> ApiKey:
    """Parse ``KEY [max_requests=N] [max_tokens_per_minute=N]``. Raises ParameterError, which does not show the key."""
    secret, *rest = line.split() or [""]
    found = [_LIMIT.fullmatch(word) for word in rest]
    limits = {match[1]: int(match[2]) for match in found if match is not None}
    is_key = bool(secret) and not secret.startswith(tuple(f"{name}=" for name in LIMITS))
    if not is_key or len(limits) < len(rest) or max(limits.values(), default=0) > MAX_COUNT:
        allowed = (
            "a key without spaces, optionally followed by max_requests=N and max_tokens_per_minute=N, "
            f"N up to {MAX_COUNT}"
        )
        raise ParameterError("api_keys", "...", allowed)
    return ApiKey(secret, **limits)


@dataclass
class TokenUsage:
    """Tokens that a request has used. The request sets it before it ends."""

    used: int = 0


class _Account:
    """A key's running requests and its token bucket, which refills continuously up to one minute's tokens."""

    def __init__(self, key: ApiKey, clock: Callable[[], float]) -> None:
        self._key, self._clock = key, clock
        self._requests, self._at = 0, clock()
        self._left = float(key.max_tokens_per_minute or 0)

    @contextmanager
    def hold(self, tokens: int) -> Iterator[TokenUsage]:
        self._check(tokens)
        self._requests += 1
        self._left -= tokens
        usage = TokenUsage()
        try:
            yield usage
        finally:
            self._requests -= 1
            self._left += tokens - usage.used

    def _check(self, tokens: int) -> None:
        max_requests, per_minute = self._key.max_requests, self._key.max_tokens_per_minute
        if max_requests is not None and self._requests >= max_requests:
            message = f"this key has {max_requests} requests running or waiting, its maximum"
            raise errors.over_limit(message, 1)
        if per_minute is None:
            return
        now = self._clock()
        self._left, self._at = min(per_minute, self._left + (now - self._at) / 60 * per_minute), now
        missing = min(tokens, per_minute) - self._left  # a larger request needs a full bucket
        if missing > 0:
            message = f"this key may use {per_minute} tokens per minute, and this request may need {tokens}"
            raise errors.over_limit(message, ceil(60 * missing / per_minute))


class Quotas:
    """Limits of all keys that have any. Not thread-safe: call it from the event loop only."""

    def __init__(self, lines: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        keys = [read_key(line) for line in lines]
        if len({key.secret for key in keys}) < len(keys):
            raise ParameterError("api_keys", "...", "distinct keys; one occurs twice")
        self._accounts = {key_name(key.secret): _Account(key, clock) for key in keys if key != ApiKey(key.secret)}

    @contextmanager
    def hold(self, client: str, tokens: int) -> Iterator[TokenUsage]:
        """Reserve ``tokens`` of the client's key for the block; return the unused ones at its end.

        Raises ApiError (429) if the key is at its limit.
        """
        account = self._accounts.get(client)
        if account is None:
            yield TokenUsage()
            return
        with account.hold(tokens) as usage:
            yield usage
