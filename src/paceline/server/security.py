"""The gate in front of all routes: keys, and how long a body may be."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Sequence
from pathlib import Path

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.errors import ParameterError
from paceline.params import ServerConfig
from paceline.server import errors
from paceline.server.metrics import Meter

OPEN_PATHS = frozenset({"/", "/health"})  # what a load balancer and a browser need before there is a key
OPEN_TREE = "/playground/"  # the page's scripts and styles


class KeyRing:
    """The keys that are good. Only their digests are kept; comparing takes the same time for any key."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def admits(self, authorization: bytes) -> bool:
        """Whether an Authorization header carries a good key; always, if there are no keys."""
        scheme, _, key = authorization.decode("latin-1").partition(" ")
        digest = _digest(key.strip())
        matches = [hmac.compare_digest(digest, good) for good in self._digests]  # all of them, whichever matches
        return not self._digests or (scheme.lower() == "bearer" and any(matches))


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def read_keys(path: Path) -> list[str]:
    """One key a line; empty lines and those that begin with # are skipped. Raises ParameterError."""
    try:
        lines = [line.strip() for line in path.read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ParameterError("api_key_file", str(path), f"a text file with one key a line: {error}") from error
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ParameterError("api_key_file", str(path), "a text file with one key a line; it has none")
    return keys


class Gate:
    """Refuses requests without a good key (401) and bodies that are too long (413) or too slow (408)."""

    def __init__(self, app: ASGIApp, config: ServerConfig, meter: Meter) -> None:
        self._app, self._config, self._meter = app, config, meter
        self._keys = KeyRing(config.api_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check_key(scope)
            body = await self._body(scope, receive)
        except errors.ApiError as error:
            self._meter.refused(error.status)
            await error.response()(scope, receive, send)
            return
        await self._app(scope, _replay(body, receive), send)

    def _check_key(self, scope: Scope) -> None:
        path = scope["path"]
        if path in OPEN_PATHS or path.startswith(OPEN_TREE):
            return
        if not self._keys.admits(_header(scope, b"authorization")):
            raise errors.unauthorized()

    async def _body(self, scope: Scope, receive: Receive) -> list[Message]:
        limit, announced = self._config.max_body_bytes, _header(scope, b"content-length")
        if announced.isdigit() and int(announced) > limit:
            raise errors.too_large(limit)
        try:
            async with asyncio.timeout(self._config.body_timeout):
                return await _read(receive, limit)
        except TimeoutError:
            message = f"the request's body did not arrive within {self._config.body_timeout:g} s"
            raise errors.ApiError(408, errors.INVALID, message, code="body_timeout") from None


async def _read(receive: Receive, limit: int) -> list[Message]:
    messages, size, more = [], 0, True
    while more:
        message = await receive()
        messages.append(message)
        size += len(message.get("body", b""))
        if size > limit:
            raise errors.too_large(limit)
        more = bool(message.get("more_body", False))
    return messages


def _replay(messages: list[Message], receive: Receive) -> Receive:
    """The messages that were read, then whatever comes."""
    left = iter(messages)

    async def next_message() -> Message:
        return next(left, None) or await receive()

    return next_message


def _header(scope: Scope, name: bytes) -> bytes:
    return next((bytes(value) for key, value in scope["headers"] if key == name), b"")
