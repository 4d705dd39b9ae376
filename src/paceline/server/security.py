"""Middleware in front of all routes: host names, API keys, concurrent requests and sizes of bodies."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.config import ServerConfig
from paceline.errors import ParameterError
from paceline.server import errors
from paceline.server.clients import address_of, key_in
from paceline.server.connections import max_concurrent_requests
from paceline.server.generation import ClientGoneError
from paceline.server.http_heads import checked_head, header
from paceline.server.metrics import Meter
from paceline.server.quotas import SharedLimit, read_key

OPEN_PATHS = frozenset({"/", "/chat", "/docs", "/health", "/ping"})  # without a key: for load balancers and browsers
UPLOADS = "/v1/files"  # input files of batches
OPEN_TREE = "/playground/"  # the playground's scripts and styles


class KeyRing:
    """The valid API keys, stored as digests. A comparison takes the same time for any key."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [_digest(read_key(line).secret) for line in keys]

    def admits(self, authorization: bytes, x_api_key: bytes = b"") -> bool:
        """Return whether one of these headers carries a valid key; always true if there are no keys."""
        digest = _digest(key_in(authorization, x_api_key))
        # Compare with all keys, even after a match, to take constant time.
        matches = [hmac.compare_digest(digest, good) for good in self._digests]
        return not self._digests or any(matches)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def read_keys(path: Path) -> list[str]:
    """Read one key per line, with its limits. Skips empty lines and comments (#). Raises ParameterError."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ParameterError("api_key_file", str(path), f"a text file with one key a line: {error}") from error
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ParameterError("api_key_file", str(path), "a text file with one key a line; the file has none")
    return keys


class AllowedHosts:
    """The host names that requests may use, as protection against DNS rebinding.

    A foreign web page can let its own domain resolve to this machine, and browsers then treat this server as part of
    that site. Such requests still carry the foreign name in the Host header. Numeric addresses cannot be rebound.
    """

    def __init__(self, config: ServerConfig) -> None:
        names = config.allowed_hosts
        self._any = "*" in names or (bool(config.api_keys) and not names)  # a foreign page does not know a key
        self._names = {"localhost", config.host.lower(), *(name.lower().rstrip(".") for name in names)}

    def check(self, header: bytes) -> None:
        """Raise ApiError (421) for a Host header with another name.

        Every browser sends the header, so it may be absent.
        """
        name = _host_name(header.decode("latin-1"))
        if not (self._any or not name or name in self._names or address_of(name) is not None):
            raise errors.misdirected(name)


def _host_name(header: str) -> str:
    """Return a Host header's name without the port."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0].lower().rstrip(".")


class Gate:
    """ASGI middleware that refuses bad requests before it reads their bodies.

    It refuses ambiguous heads (400), unknown host names (421), missing or wrong keys (401), too many concurrent
    requests (429 per address, 503 in total) and encoded bodies (415). While it reads a body it refuses those that are
    too large (413), too slow (408) or exceed the memory for all bodies (429 per address, 503 in total). Open paths skip
    these checks, and their bodies are not read.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig, meter: Meter) -> None:
        self._app, self._config, self._meter = app, config, meter
        self._keys, self._hosts = KeyRing(config.api_keys), AllowedHosts(config)
        self._requests = SharedLimit(
            max_concurrent_requests(config.max_connections), max_concurrent_requests(config.max_connections_per_client)
        )
        self._bytes = SharedLimit(config.max_bodies_bytes, config.max_bodies_bytes // 2)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            scope = checked_head(scope)
        except errors.ApiError as error:
            await self._refuse(error, scope, receive, send)
            return
        if scope["path"] in OPEN_PATHS or scope["path"].startswith(OPEN_TREE):
            await self._app(scope, _replay(b"", receive), send)
        else:
            await self._guarded(scope, receive, send)

    async def _guarded(self, scope: Scope, receive: Receive, send: Send) -> None:
        client = _client(scope)
        try:
            self._check(scope)
            _take(self._requests, client, 1, "requests")
        except errors.ApiError as error:
            await self._refuse(error, scope, receive, send)
            return
        try:
            await self._with_body(client, scope, receive, send)
        finally:
            self._requests.give(client)

    def _check(self, scope: Scope) -> None:
        self._hosts.check(header(scope, b"host"))
        if not self._keys.admits(header(scope, b"authorization"), header(scope, b"x-api-key")):
            raise errors.unauthorized()
        if header(scope, b"content-encoding").lower() not in (b"", b"identity"):
            raise errors.encoded()
        announced = header(scope, b"content-length")
        limit = self._config.max_upload_bytes if self._is_upload(scope) else self._config.max_body_bytes
        if announced.isdigit() and int(announced) > limit:
            raise errors.too_large(limit)

    def _is_upload(self, scope: Scope) -> bool:
        """Return whether the body is a file, which is streamed to disk instead of held in memory."""
        keeps = self._config.batch_dir is not None
        return keeps and scope["method"] == "POST" and scope["path"] == UPLOADS

    async def _with_body(self, client: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body and call the application.

        The body counts towards the memory limits until the response is complete, because the request may keep it that
        long.
        """
        if self._is_upload(scope):
            await self._app(scope, UploadReceiver(self._config, receive).next_message, send)
            return
        body = _Body(self._bytes, client, self._config.max_body_bytes)
        try:
            if scope["method"] == "POST":  # bodies of other methods have no meaning
                async with _in_time(self._config.body_timeout):
                    await body.read(receive)
        except ClientGoneError:
            return
        except errors.ApiError as error:
            await self._refuse(error, scope, receive, send)
        else:
            await self._app(scope, _replay(bytes(body.data), receive), send)
        finally:
            body.give_back()

    async def _refuse(self, error: errors.ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        self._meter.refused(error)
        await error.response(scope["path"])(scope, receive, send)


class _Body:
    """A body that is being received. Its bytes count towards the memory limits."""

    def __init__(self, shares: SharedLimit, client: str, limit: int) -> None:
        self._shares, self._client, self._limit = shares, client, limit
        self._charged = 0
        self.data = bytearray()

    async def read(self, receive: Receive) -> None:
        """Receive the whole body. Raises ApiError or ClientGoneError."""
        has_more = True
        while has_more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            has_more = bool(message.get("more_body", False))
            self._add(message.get("body", b""))

    def _add(self, chunk: bytes) -> None:
        if len(self.data) + len(chunk) > self._limit:
            raise errors.too_large(self._limit)
        _take(self._shares, self._client, len(chunk), "bytes of bodies")
        self._charged += len(chunk)
        self.data += chunk

    def give_back(self) -> None:
        """Release the body's bytes from the limits."""
        self._shares.give(self._client, self._charged)


class UploadReceiver:
    """An uploaded file that the application receives piece by piece, within limits of size and time."""

    def __init__(self, config: ServerConfig, receive: Receive) -> None:
        self._config, self._receive = config, receive
        self._began, self._received = time.monotonic(), 0
        self._complete = False

    async def next_message(self) -> Message:
        """Return the next ASGI message. Raises ApiError: 413 (too large), 408 (too slow).

        After the body it waits for the client's disconnect.
        """
        if self._complete:
            return await self._receive()
        config = self._config
        seconds = config.body_timeout * (1 + self._received / config.max_body_bytes)
        async with _in_time(seconds, since=self._began):
            message = await self._receive()
        self._received += len(message.get("body", b""))
        if self._received > config.max_upload_bytes:
            raise errors.too_large(config.max_upload_bytes)
        self._complete = not message.get("more_body", False)
        return message


@asynccontextmanager
async def _in_time(seconds: float, since: float | None = None) -> AsyncIterator[None]:
    """Raise ApiError (408) if the block takes longer than ``seconds``.

    since: start on the clock of ``time.monotonic``; None means now.
    """
    passed = 0.0 if since is None else time.monotonic() - since
    try:
        async with asyncio.timeout(seconds - passed):
            yield
    except TimeoutError:
        message = f"the request's body did not arrive within {seconds:g} s"
        raise errors.ApiError(408, errors.INVALID, message, code=errors.BODY_TIMEOUT) from None


def _take(shares: SharedLimit, client: str, units: int, name: str) -> None:
    """Take ``units`` of a limit. Raises ApiError: 503 if all clients together are at it, 429 if this one is."""
    full = shares.take(client, units)
    if full is not None:
        raise errors.busy(name, full)


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return an ASGI receive function that yields the body, then waits for the client's disconnect."""
    left: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_message() -> Message:
        return left.pop() if left else await receive()

    return next_message


def _client(scope: Scope) -> str:
    """Return the address that a request came from, or an empty string."""
    return str(scope["client"][0]) if scope.get("client") else ""
