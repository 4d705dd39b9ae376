"""Limits on TCP connections: their number, the time for headers, and which to close when there are too many."""

from __future__ import annotations

import asyncio
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from paceline.config import ServerConfig

MAX_HEADER_BYTES = 32 * 2**10
_CHUNK = 32 * 2**10  # bytes read at a time, and so the buffer of a connection without a request
_TINY_CHUNK = re.compile(rb"\r\n0*[0-9a-fA-F]{1,2}[;\r]")  # start of a chunk of fewer than 256 bytes
_MAX_TINY_CHUNKS = 1000  # per body
_INTERIM = b"HTTP/1.1 102 Processing\r\n\r\n"
_FIRST_PROBE, _LONGEST_PROBE = 0.05, 1.0  # seconds between two interim responses; the pause doubles
_KEY = "connection"  # of a request's state, by ASGI
_SHARE_OF_REQUESTS = 0.75  # of all connections; the others are kept for clients that have not sent a request yet


def max_concurrent_requests(connections: int) -> int:
    """Return the maximum of concurrent requests for ``connections`` connections.

    The remaining connections stay available, so that new clients can always send a request.
    """
    return int(connections * _SHARE_OF_REQUESTS)


class ConnectionTable:
    """All open connections, and those without a request in progress.

    A new connection is always accepted. If that exceeds a limit, the connection that has waited longest is closed.
    A client that sends its request at once is therefore served, however many idle connections others hold.
    Not thread-safe: call it from the event loop only.
    """

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.inside = 0
        self._inside_by_client: Counter[str] = Counter()
        self._waiting: dict[Connection, None] = {}  # in the order in which they began to wait
        self._waiting_by_client: defaultdict[str, dict[Connection, None]] = defaultdict(dict)

    def enter(self, connection: Connection) -> None:
        """Add a new connection, without a request. May close another connection."""
        host = connection.peer
        self.inside += 1
        self._inside_by_client[host] += 1
        self.wait(connection)
        if self._inside_by_client[host] > self.config.max_connections_per_client:
            self._close_oldest(self._waiting_by_client[host])
        elif self.inside > self.config.max_connections:
            self._close_oldest(self._waiting)

    def _close_oldest(self, waiting: dict[Connection, None]) -> None:
        oldest = next(iter(waiting))
        self.leave(oldest)
        oldest.drop()

    def wait(self, connection: Connection) -> None:
        """Mark a connection as without a request: it may be closed to make room."""
        self._waiting.setdefault(connection)
        self._waiting_by_client[connection.peer].setdefault(connection)

    def work(self, connection: Connection) -> None:
        """Mark a connection as serving a request: it is not closed to make room."""
        self._waiting.pop(connection, None)
        self._waiting_by_client[connection.peer].pop(connection, None)

    def leave(self, connection: Connection) -> None:
        """Remove a closed connection. Calling it again has no effect."""
        if not connection.inside:
            return
        connection.inside = False
        self.work(connection)
        self.inside -= 1
        self._inside_by_client[connection.peer] -= 1
        if not self._inside_by_client[connection.peer]:
            del self._inside_by_client[connection.peer], self._waiting_by_client[connection.peer]


@dataclass
class _Exchange:
    """A request that the application serves. body_complete: whether it has got all of the body, or there is none."""

    http_version: str
    is_chunked: bool
    body_complete: bool
    response_begun: bool = False

    @staticmethod
    def of(scope: Scope) -> _Exchange:
        headers = dict(scope["headers"])
        is_chunked = b"transfer-encoding" in headers
        return _Exchange(
            scope["http_version"], is_chunked, not is_chunked and not headers.get(b"content-length", b"").strip(b"0")
        )


class Connection(H11Protocol):
    """uvicorn's HTTP/1.1 protocol with header timeouts, read limits and half-closed connections.

    What asyncio calls tells it what arrives. Where its requests are it learns from ``with_connections``: uvicorn calls
    the application in a task that runs before anything more is read.
    """

    def __init__(self, table: ConnectionTable, *, app_state: Mapping[str, Any], **options: Any) -> None:
        super().__init__(app_state={**app_state, _KEY: self}, **options)
        self._table, self._limits = table, table.config
        self.inside = True
        self.peer = ""
        self._exchange: _Exchange | None = None
        self._is_idle = False  # a request is complete, and nothing of the next one has arrived
        self._is_unread = False  # a request is answered without all of its body
        self._deadline: asyncio.TimerHandle | None = None
        self._half_closed = False  # the client has shut down its sending side
        self._interim_timer: asyncio.TimerHandle | None = None
        self._tiny_chunks = 0  # tiny chunks in the current body
        self._discarded_bytes = 0  # bytes that arrived after the response to a request that is not read

    # --- called by asyncio -------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.max_size = _CHUNK  # type: ignore[attr-defined]  # asyncio's attribute; the default is 256 KiB
        peer = transport.get_extra_info("peername")
        self.peer = str(peer[0]) if peer else ""
        self._table.enter(self)
        if self.inside:
            self._limit_time(self._limits.header_timeout)

    def connection_lost(self, exc: Exception | None) -> None:
        self._limit_time(None)
        self._stop_interim()
        self._table.leave(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_unread:
            self._discarded_bytes += len(data)
            if self._discarded_bytes > self._limits.max_body_bytes:
                self.drop()
                return
        else:
            self._count_tiny_chunks(data)
            if self._tiny_chunks > _MAX_TINY_CHUNKS:
                self._refuse_tiny_chunks()
                return
        super().data_received(data)
        exchange = self._exchange
        if exchange is not None and not exchange.body_complete:
            self.transport.pause_reading()  # resumes when the application reads the body
        elif exchange is None and self._is_idle:
            self._is_idle = False
            self._limit_time(self._limits.header_timeout)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Return whether the connection stays open.

        It does if a complete HTTP/1.1 request is in progress: that version has interim responses.
        """
        exchange = self._exchange
        self._half_closed = exchange is not None and exchange.body_complete and exchange.http_version == "1.1"
        if self._half_closed:
            self._send_interim(_FIRST_PROBE)
        return self._half_closed

    # --- called by uvicorn and the application -----------------------------------

    def begin(self, scope: Scope, receive: Receive, send: Send) -> tuple[Receive, Send]:
        """Note that the application serves a request. Returns what it has to receive and send with.

        Reading pauses until the application asks for the body. It resumes just before uvicorn's own code runs, which
        may pause it, too.
        """
        exchange = self._exchange = _Exchange.of(scope)
        self._is_idle = self._is_unread = False
        self._discarded_bytes = 0
        self._table.work(self)
        self._limit_time(None)
        if not exchange.body_complete:
            self.transport.pause_reading()

        async def receive_and_note() -> Message:
            if self._exchange is exchange:
                self.transport.resume_reading()
            message = await receive()
            exchange.body_complete = not message.get("more_body", False)
            return message

        async def send_and_note(message: Message) -> None:
            exchange.response_begun = True
            await send(message)

        return receive_and_note, send_and_note

    def on_response_complete(self) -> None:
        """Wait for the next request, or for the rest of a body that was not read."""
        exchange, self._exchange = self._exchange, None
        self._tiny_chunks = 0
        self.transport.resume_reading()
        super().on_response_complete()
        if self.transport.is_closing():
            return
        self._is_unread = exchange is not None and not exchange.body_complete
        self._is_idle = not self._is_unread
        self._table.wait(self)
        self._limit_time(self._limits.keep_alive_timeout if self._is_idle else self._limits.header_timeout)
        if self._half_closed:
            self._stop_interim()
            asyncio.get_running_loop().call_soon(self._continue_half_closed)  # a pipelined request begins before

    # --- limits ------------------------------------------------------------------

    def drop(self) -> None:
        """Close at once and discard unsent data."""
        self.transport.abort()

    def _count_tiny_chunks(self, data: bytes) -> None:
        """Count the tiny chunks of a body. Parsing very many of them would block the event loop."""
        if self._exchange is not None and not self._exchange.body_complete:
            in_chunks = self._exchange.is_chunked
        else:
            in_chunks = b"chunked" in data.lower()  # the chunk may include the request's head
        if in_chunks:
            self._tiny_chunks += len(_TINY_CHUNK.findall(data))

    def _refuse_tiny_chunks(self) -> None:
        if self._exchange is not None and self._exchange.response_begun:
            self.drop()
        else:
            self.send_400_response("the body has too many chunks of a few bytes: send larger ones")

    def _limit_time(self, seconds: float | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if seconds is None else asyncio.get_running_loop().call_later(seconds, self.drop)

    def _continue_half_closed(self) -> None:
        """Continue with the next pipelined request, or close."""
        if self._exchange is None:
            self.transport.close()
        else:
            self._send_interim(_FIRST_PROBE)

    def _send_interim(self, pause: float) -> None:
        """Send an interim response (102) repeatedly until the response begins.

        A client that only shut down its sending side waits for the response. A client that is gone looks the same, but
        its host answers data with a reset, which the next write detects.
        """
        if self._exchange is None or self._exchange.response_begun or self.transport.is_closing():
            return
        self.transport.write(_INTERIM)
        loop = asyncio.get_running_loop()
        self._interim_timer = loop.call_later(pause, self._send_interim, min(2 * pause, _LONGEST_PROBE))

    def _stop_interim(self) -> None:
        if self._interim_timer is not None:
            self._interim_timer.cancel()
            self._interim_timer = None


def with_connections(app: ASGIApp) -> ASGIApp:
    """Return the application, whose requests the connections on which they came follow."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            connection: Connection = scope["state"].pop(_KEY)
            receive, send = connection.begin(scope, receive, send)
        await app(scope, receive, send)

    return serve
