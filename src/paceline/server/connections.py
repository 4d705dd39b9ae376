"""Limits on TCP connections: their number, the time for headers, and which to close when there are too many."""

from __future__ import annotations

import asyncio
import re
from collections import Counter, defaultdict
from typing import Any, Literal

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from paceline.config import ServerConfig

MAX_HEADER_BYTES = 32 * 2**10
_CHUNK = 32 * 2**10  # bytes read at a time, and so the buffer of a connection without a request
_TINY_CHUNK = re.compile(rb"\r\n0*[0-9a-fA-F]{1,2}[;\r]")  # start of a chunk of fewer than 256 bytes
_MAX_TINY_CHUNKS = 1000  # per body
_FIRST_PROBE, _LONGEST_PROBE = 0.05, 1.0  # seconds between two interim responses; the pause doubles
_SHARE_OF_REQUESTS = 0.75  # of all connections; the others are kept for clients that have not sent a request yet


def max_concurrent_requests(connections: int) -> int:
    """Return the maximum of concurrent requests for ``connections`` connections.

    The remaining connections stay available, so that new clients can always send a request.
    """
    return int(connections * _SHARE_OF_REQUESTS)


# beginning: headers (or the rest of an unread body) are arriving; working: a request is being served; idle: keep-alive
Phase = Literal["beginning", "working", "idle"]


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


class Connection(H11Protocol):
    """uvicorn's HTTP/1.1 protocol with header timeouts, read limits and half-closed connections.

    It relies on uvicorn's private state: ``flow``, ``cycle``, ``conn``.
    """

    def __init__(self, table: ConnectionTable, **options: Any) -> None:
        super().__init__(**options)
        self._table, self._limits = table, table.config
        self.inside = True
        self.peer = ""
        self._phase: Phase = "beginning"
        self._deadline: asyncio.TimerHandle | None = None
        self._half_closed = False  # the client has shut down its sending side
        self._interim_timer: asyncio.TimerHandle | None = None
        self._tiny_chunks = 0  # tiny chunks in the current body
        self._discarded_bytes = 0  # bytes of a body that arrived after its response

    # --- called by asyncio and uvicorn -------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.max_size = _CHUNK  # type: ignore[attr-defined]  # asyncio's attribute; the default is 256 KiB
        self.peer = self.client[0] if self.client else ""
        self._table.enter(self)
        if self.inside:
            self._limit_time(self._limits.header_timeout)

    def connection_lost(self, exc: Exception | None) -> None:
        self._limit_time(None)
        self._stop_interim()
        self._table.leave(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._answered_early():
            self._discarded_bytes += len(data)
            if self._discarded_bytes > self._limits.max_body_bytes:
                self.drop()
                return
        elif self._has_too_many_tiny_chunks(data):
            self._refuse_tiny_chunks()
            return
        super().data_received(data)
        self._update_phase()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Return whether the connection stays open.

        It does if a complete HTTP/1.1 request is in progress: that version has interim responses.
        """
        is_complete = self._phase == "working" and self.conn.their_state is not h11.SEND_BODY
        self._half_closed = is_complete and self.scope["http_version"] == "1.1"
        if self._half_closed:
            self._send_interim(_FIRST_PROBE)
        return self._half_closed

    def on_response_complete(self) -> None:
        self._discarded_bytes = self._tiny_chunks = 0
        self.cycle.body = bytearray()  # drop what was not read
        super().on_response_complete()
        self._update_phase()
        if self._half_closed:
            self._continue_half_closed()

    # --- limits ------------------------------------------------------------------

    def drop(self) -> None:
        """Close at once and discard unsent data."""
        self.transport.abort()

    def _update_phase(self) -> None:
        """Update the phase after each event, and with it the timeout."""
        if self.transport.is_closing():
            return
        phase = self._find_phase()
        if phase == "working" and self.conn.their_state is h11.SEND_BODY:
            self.flow.pause_reading()  # resumes when the application reads the body
        if phase != self._phase:
            self._phase = phase
            self._enter_phase()

    def _find_phase(self) -> Phase:
        if self._answered_early():
            return "beginning"
        if self.conn.their_state is not h11.IDLE:
            return "working"
        return "beginning" if self.conn.trailing_data[0] else "idle"

    def _enter_phase(self) -> None:
        if self._phase == "working":
            self._table.work(self)
            self._limit_time(None)
            return
        self._table.wait(self)
        idle = self._phase == "idle"
        self._limit_time(self._limits.keep_alive_timeout if idle else self._limits.header_timeout)

    def _answered_early(self) -> bool:
        """Return whether the response is complete but part of the request's body has not arrived."""
        return self.conn.our_state is h11.DONE and self.conn.their_state is h11.SEND_BODY

    def _has_too_many_tiny_chunks(self, data: bytes) -> bool:
        """Return whether the body has too many tiny chunks: parsing them would block the event loop."""
        if self.conn.their_state is h11.SEND_BODY:
            in_chunks = any(name == b"transfer-encoding" for name, _ in self.headers)
        else:
            in_chunks = b"chunked" in data.lower()  # the chunk may include the request's head
        if in_chunks:
            self._tiny_chunks += len(_TINY_CHUNK.findall(data))
        return self._tiny_chunks > _MAX_TINY_CHUNKS

    def _refuse_tiny_chunks(self) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self.send_400_response("the body has too many chunks of a few bytes: send larger ones")
        else:
            self.drop()

    def _limit_time(self, seconds: float | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if seconds is None else self.loop.call_later(seconds, self.drop)

    def _continue_half_closed(self) -> None:
        """Continue with the next pipelined request, or close."""
        self._stop_interim()
        if self._phase == "working":
            self._send_interim(_FIRST_PROBE)
        else:
            self.transport.close()

    def _send_interim(self, pause: float) -> None:
        """Send an interim response (102) repeatedly until the response begins.

        A client that only shut down its sending side waits for the response. A client that is gone looks the same, but
        its host answers data with a reset, which the next write detects.
        """
        if self.cycle.response_started or self.transport.is_closing():
            return
        interim = h11.InformationalResponse(status_code=102, headers=[], reason=b"Processing")
        self.transport.write(self.conn.send(interim) or b"")
        self._interim_timer = self.loop.call_later(pause, self._send_interim, min(2 * pause, _LONGEST_PROBE))

    def _stop_interim(self) -> None:
        if self._interim_timer is not None:
            self._interim_timer.cancel()
            self._interim_timer = None
