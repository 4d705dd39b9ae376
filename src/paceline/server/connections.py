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
_FIRST_PROBE, _LONGEST_PROBE = 0.05, 1.0  # seconds between two interim answers; each is twice the one before
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
    """uvicorn's, with limits on the time for headers and on what is read unasked; clients may close their side."""

    def __init__(self, lobby: Lobby, **options: Any) -> None:
        super().__init__(**options)
        self._lobby, self._limits = lobby, lobby.config
        self.inside = True
        self.peer = ""
        self._phase: Phase = "beginning"
        self._deadline: asyncio.TimerHandle | None = None
        self._half_closed = False  # the client has said all that it wants to say
        self._probe: asyncio.TimerHandle | None = None
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
        self._end_probes()
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

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whether the connection stays open: if a whole request is in hand, of a version that has interim answers."""
        whole = self._phase == "working" and self.conn.their_state is not h11.SEND_BODY
        self._half_closed = whole and self.scope["http_version"] == "1.1"
        if self._half_closed:
            self._is_there(_FIRST_PROBE)
        return self._half_closed

    def on_response_complete(self) -> None:
        self._thrown_away = self._crumbs = 0
        self.cycle.body = bytearray()  # what nobody asked for
        super().on_response_complete()
        self._look()
        if self._half_closed:
            self._go_on_half_closed()

    # --- what is new -------------------------------------------------------------

    def drop(self) -> None:
        """Close at once, whatever is still to be read or written."""
        self.transport.abort()

    def _look(self) -> None:
        """After every step: whether there is a request in hand, and until when there must be news."""
        if self.transport.is_closing():
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

    def _go_on_half_closed(self) -> None:
        """With the next request that has come before the end, if there is one."""
        self._end_probes()
        if self._phase == "working":
            self._is_there(_FIRST_PROBE)
        else:
            self.transport.close()

    def _is_there(self, pause: float) -> None:
        """Say that an answer is to come, again and again until it begins.

        A client that has closed its side alone waits for the answer. One that has hung up looks the same from here, but
        its machine resets the connection when something is sent, and the next sending finds that out.
        """
        if self.cycle.response_started or self.transport.is_closing():
            return
        interim = h11.InformationalResponse(status_code=102, headers=[], reason=b"Processing")
        self.transport.write(self.conn.send(interim) or b"")
        self._probe = self.loop.call_later(pause, self._is_there, min(2 * pause, _LONGEST_PROBE))

    def _end_probes(self) -> None:
        if self._probe is not None:
            self._probe.cancel()
            self._probe = None
