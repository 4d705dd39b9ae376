"""Connections before they are requests: how many there may be, how long they may dawdle, who goes when it gets full."""

from __future__ import annotations

import asyncio
import re
from collections import Counter, defaultdict
from typing import Any, Literal

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from paceline.config import ServerConfig

MAX_HEADER_BYTES = 32 * 2**10
_CHUNK = 32 * 2**10  # bytes read at a time: what a connection may hold before its request has been looked at
_CRUMB = re.compile(rb"\r\n0*[0-9a-fA-F]{1,2}[;\r]")  # where a chunk of less than 256 bytes begins
_MOST_CRUMBS = 1000  # in one body
_SHARE_OF_REQUESTS = 0.75  # of all connections; the others are for those that say what they want


def most_requests(connections: int) -> int:
    """How many of so many connections may hold a request. The rest stays for new ones, so that these are heard."""
    return int(connections * _SHARE_OF_REQUESTS)


Phase = Literal["beginning", "working", "idle"]  # headers (or an unwanted body) are coming; a request in hand; neither


class Lobby:
    """All connections, and which of them have no request in hand.

    There is always room for one more: when a limit is passed, the one that has waited longest is closed. So whoever
    says at once what he wants is heard, however many others hold connections open. For the event loop only.
    """

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.inside = 0
        self._inside_of: Counter[str] = Counter()
        self._waiting: dict[Connection, None] = {}  # in the order in which they began
        self._waiting_of: defaultdict[str, dict[Connection, None]] = defaultdict(dict)

    def enter(self, connection: Connection) -> None:
        """A new connection, which waits. May close another one."""
        host = connection.peer
        self.inside += 1
        self._inside_of[host] += 1
        self.wait(connection)
        if self._inside_of[host] > self.config.max_connections_per_client:
            self._close_oldest(self._waiting_of[host])
        elif self.inside > self.config.max_connections:
            self._close_oldest(self._waiting)

    def _close_oldest(self, waiting: dict[Connection, None]) -> None:
        oldest = next(iter(waiting))
        self.leave(oldest)
        oldest.drop()

    def wait(self, connection: Connection) -> None:
        """It has no request in hand."""
        self._waiting.setdefault(connection)
        self._waiting_of[connection.peer].setdefault(connection)

    def work(self, connection: Connection) -> None:
        """It has a request in hand, and is not closed for the sake of others."""
        self._waiting.pop(connection, None)
        self._waiting_of[connection.peer].pop(connection, None)

    def leave(self, connection: Connection) -> None:
        """It is closed. May be said twice."""
        if not connection.inside:
            return
        connection.inside = False
        self.work(connection)
        self.inside -= 1
        self._inside_of[connection.peer] -= 1
        if not self._inside_of[connection.peer]:
            del self._inside_of[connection.peer], self._waiting_of[connection.peer]


class Connection(H11Protocol):
    """uvicorn's, with a limit on the time for headers, on what is read unasked, and on clients that read nothing."""

    def __init__(self, lobby: Lobby, **options: Any) -> None:
        super().__init__(**options)
        self._lobby, self._limits = lobby, lobby.config
        self.inside = True
        self.peer = ""
        self._phase: Phase = "beginning"
        self._deadline: asyncio.TimerHandle | None = None
        self._reading_deadline: asyncio.TimerHandle | None = None
        self._unsent = 0
        self._crumbs = 0  # chunks of a few bytes in this request's body
        self._thrown_away = 0  # bytes of a body whose request has been answered

    # --- what asyncio and uvicorn call -------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.max_size = _CHUNK  # type: ignore[attr-defined]  # asyncio's own name; 256 KiB otherwise
        self.peer = self.client[0] if self.client else ""
        self._lobby.enter(self)
        if self.inside:
            self._limit_time(self._limits.header_timeout)

    def connection_lost(self, exc: Exception | None) -> None:
        self._limit_time(None)
        self.resume_writing()
        self._lobby.leave(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._answered_early():
            self._thrown_away += len(data)
            if self._thrown_away > self._limits.max_body_bytes:
                self.drop()
                return
        elif self._comes_in_crumbs(data):
            self._refuse_crumbs()
            return
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        self._thrown_away = self._crumbs = 0
        self.cycle.body = bytearray()  # what nobody asked for
        super().on_response_complete()
        self._look()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unsent = self.transport.get_write_buffer_size()
        self._reading_deadline = self.loop.call_later(self._limits.send_timeout, self._check_reader)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._reading_deadline is not None:
            self._reading_deadline.cancel()
            self._reading_deadline = None

    # --- what is new -------------------------------------------------------------

    def drop(self) -> None:
        """Close at once, whatever is still to be read or written."""
        self.transport.abort()

    def _look(self) -> None:
        """After every step: whether there is a request in hand, and until when there must be news."""
        if self.transport.is_closing():
            self._limit_time(self._limits.send_timeout)
            return
        phase = self._find_phase()
        if phase == "working" and self.conn.their_state is h11.SEND_BODY:
            self.flow.pause_reading()  # until somebody asks for the body
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
            self._lobby.work(self)
            self._limit_time(None)
            return
        self._lobby.wait(self)
        idle = self._phase == "idle"
        self._limit_time(self._limits.keep_alive_timeout if idle else self._limits.header_timeout)

    def _answered_early(self) -> bool:
        """Whether the rest of a body is to come that nobody wants."""
        return self.conn.our_state is h11.DONE and self.conn.their_state is h11.SEND_BODY

    def _comes_in_crumbs(self, data: bytes) -> bool:
        """Whether a body comes in so many chunks of a few bytes that taking them apart would hold up everybody."""
        if self.conn.their_state is h11.SEND_BODY:
            in_chunks = any(name == b"transfer-encoding" for name, _ in self.headers)
        else:
            in_chunks = b"chunked" in data.lower()  # as its head may say, which comes with it
        if in_chunks:
            self._crumbs += len(_CRUMB.findall(data))
        return self._crumbs > _MOST_CRUMBS

    def _refuse_crumbs(self) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self.send_400_response("the body comes in chunks of a few bytes: send longer ones")
        else:
            self.drop()

    def _limit_time(self, seconds: float | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if seconds is None else self.loop.call_later(seconds, self.drop)

    def _check_reader(self) -> None:
        """A client that reads something, however slowly, goes on."""
        unsent = self.transport.get_write_buffer_size()
        if unsent >= self._unsent:
            self.drop()
            return
        self._unsent = unsent
        self._reading_deadline = self.loop.call_later(self._limits.send_timeout, self._check_reader)
