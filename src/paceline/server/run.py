"""HTTP server: one signal lets running requests finish within a limit, a second one ends it at once."""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import sys
from collections.abc import Callable, Mapping
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, cast

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from paceline.config import ServerConfig
from paceline.server import errors, logs
from paceline.server.app import make_app
from paceline.server.connections import MAX_HEADER_BYTES, Connection, ConnectionTable, with_connections
from paceline.server.ending import watch_signals
from paceline.server.models import ModelSource
from paceline.server.service import EngineService
from paceline.server.sockets import ACCEPTED_AT_ONCE, enlarge_backlog, listen
from paceline.server.streaming import ENDING

if TYPE_CHECKING:
    from paceline.llm import LLM

log = logging.getLogger("paceline.server")

LAST_WORDS = 2  # seconds to send the last error responses
LAST_STEP = 3  # seconds for the engine to finish its step and for cleanup
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


class Server(uvicorn.Server):
    """uvicorn with paceline's connection limits and shutdown (``ServerConfig.shutdown_timeout``).

    give_up: fails all running requests with the given error.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig, give_up: Callable[[errors.ApiError], None]) -> None:
        self._ending = asyncio.Event()
        super().__init__(
            uvicorn.Config(
                self._told(with_connections(app)),
                loop="asyncio",  # the only tested loop; connections.py relies on it
                http=cast(Any, partial(Connection, ConnectionTable(config))),
                ws="none",
                backlog=ACCEPTED_AT_ONCE,
                h11_max_incomplete_event_size=MAX_HEADER_BYTES,
                timeout_keep_alive=math.ceil(config.keep_alive_timeout),
                log_config=None,
                access_log=True,  # includes the request id from the context variable of ``Tracing``
                server_header=False,
                timeout_graceful_shutdown=int(config.shutdown_timeout) + LAST_WORDS,
            )
        )
        self._give_up, self._settings = give_up, config

    def _told(self, app: ASGIApp) -> ASGIApp:
        """Return the application, whose requests can see that the server ends."""

        async def serve(scope: Scope, receive: Receive, send: Send) -> None:
            scope[ENDING] = self._ending
            await app(scope, receive, send)

        return serve

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve on ``sockets``, or on the configured address. Raises ParameterError."""
        super().run(listen(self._settings) if sockets is None else sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        enlarge_backlog(sockets or [])

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Start the shutdown. ``ending`` enforces its time limit and handles the second signal."""
        if not self.should_exit:
            limit = self._settings.shutdown_timeout
            log.info("shutting down: running requests have %g s to finish; a second signal ends at once", limit)
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._ending.set()
        gone = errors.unavailable("the server is shutting down", "shutting_down")
        limit = self._settings.shutdown_timeout
        asyncio.get_running_loop().call_later(limit, self._give_up, gone)
        await super().shutdown(sockets)


def serve(
    config: ServerConfig,
    load: Callable[[], LLM],
    others: Mapping[str, ModelSource] | None = None,
    memory_limit: int | None = None,
) -> None:
    """Serve until a signal; arguments as in ``make_app``.

    Raises ParameterError if it cannot listen, and what ``load`` raises.
    """
    sockets = listen(config)  # a port in use is reported before the model loads
    with logs.to_stderr(config.log_format, config.log_level):
        service = _serve(config, sockets, partial(make_app, config, load, others=others, memory_limit=memory_limit))
    if service.failure is not None:
        raise service.failure


def _serve(config: ServerConfig, sockets: list[socket.socket], make: Callable[..., FastAPI]) -> EngineService:
    def end() -> None:
        server.should_exit = True

    app = make(on_end=end)
    service: EngineService = app.state.context.service
    server = Server(app, config, app.state.served.fail_all)
    watch_signals(config.shutdown_timeout + LAST_WORDS + LAST_STEP, lambda: service.is_loading)
    say_where(config, sockets)
    server.run(sockets)
    return service


def say_where(config: ServerConfig, sockets: list[socket.socket]) -> None:
    """Log the addresses the server listens on, with warnings if it is exposed."""
    _warn_if_exposed(config)
    if sys.platform != "linux":
        log.warning("send_timeout has no effect on this system: connections of clients that do not read stay open")
    log.info("listening on %s", ", ".join(map(_address, sockets)))


def _address(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _warn_if_exposed(config: ServerConfig) -> None:
    if config.host not in _LOOPBACK and not config.api_keys:
        log.warning("listening on %s without an API key: anyone who can connect may use it", config.host)
