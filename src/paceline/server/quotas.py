"""Limits per client: of what all clients share, and of API keys (concurrent requests, tokens per minute)."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from math import ceil

from paceline.config.limits import MAX_COUNT
from paceline.errors import ParameterError
from paceline.server import errors
from paceline.server.clients import key_name

LIMITS = ("max_requests", "max_tokens_per_minute")
_LIMIT = re.compile(rf"({'|'.join(LIMITS)})=([1-9][0-9]{{0,9}})", re.ASCII)


class SharedLimit:
    """A limit over all clients with a lower one per client, so that no client can use up everything.

    It counts units (requests or bytes). Not thread-safe: call it from the event loop only.
    """

    def __init__(self, total: int, per_client: int) -> None:
        self._total, self._per_client = total, per_client
        self.taken = 0
        self._by_client: Counter[str] = Counter()

    def take(self, client: str, units: int = 1) -> errors.Full | None:
        """Take ``units``, or return which limit prevents it."""
        if self.taken + units > self._total:
            return "server"
        if self._by_client[client] + units > self._per_client:
            return "client"
        self.taken += units
        self._by_client[client] += units
        return None

    def give(self, client: str, units: int = 1) -> None:
        """Return units that were taken."""
        self.taken -= units
        self._by_client[client] -= units
        if not self._by_client[client]:
            del self._by_client[client]


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


class _Account:
    """A key's running requests and its token bucket, which refills continuously up to one minute's tokens."""

    def __init__(self, key: ApiKey, clock: Callable[[], float]) -> None:
        self._key, self._clock = key, clock
        self._requests, self._at = 0, clock()
        self._left = float(key.max_tokens_per_minute or 0)

    @contextmanager
    def hold(self, tokens: int) -> Iterator[None]:
        self._check(tokens)
        self._requests += 1
        self._left -= tokens
        try:
            yield
        finally:
            self._requests -= 1
            self._left += tokens

    def charge(self, tokens: int) -> None:
        self._left -= tokens

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
    def hold(self, client: str, tokens: int) -> Iterator[None]:
        """Count a request of the client's key, and reserve ``tokens`` of it, for the block.

        The block charges those that were used. Raises ApiError (429) if the key is at its limit.
        """
        account = self._accounts.get(client)
        with nullcontext() if account is None else account.hold(tokens):
            yield

    def charge(self, client: str, tokens: int) -> None:
        """Count used tokens of the client's key."""
        if client in self._accounts:
            self._accounts[client].charge(tokens)
