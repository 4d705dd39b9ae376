"""Listening, and how it ends: one signal lets running requests finish within a limit, a second one ends at once."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn
from fastapi import FastAPI

from paceline.params import ServerConfig
from paceline.server import errors, logs
from paceline.server.app import make_app
from paceline.server.context import Context

if TYPE_CHECKING:
    from paceline.llm import LLM

log = logging.getLogger("paceline.server")

EXIT_AT_ONCE = 130
_LAST_WORDS = 2  # seconds for the answers that say "given up" to leave
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


class Server(uvicorn.Server):
    """uvicorn, ending as ``ServerConfig.shutdown_timeout`` says."""

    def __init__(self, app: FastAPI, config: ServerConfig) -> None:
        patience = int(config.shutdown_timeout) + _LAST_WORDS
        super().__init__(
            uvicorn.Config(
                app,
                host=config.host,
                port=config.port,
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=patience,
            )
        )
        self._context: Context = app.state.context
        self._limit = config.shutdown_timeout

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal is a request, the second an order."""
        if self.should_exit:
            os._exit(EXIT_AT_ONCE)
        log.info("ending: requests may run for %g s more; a second signal ends at once", self._limit)
        self.should_exit = True

    async def shutdown(self, sockets: list[asyncio.base_events.socket.socket] | None = None) -> None:  # type: ignore[name-defined]
        gone = errors.unavailable("the server is shutting down", "shutting_down")
        asyncio.get_running_loop().call_later(self._limit, self._context.service.fail_all, gone)
        await super().shutdown(sockets)


def serve(config: ServerConfig, load: Callable[[], LLM]) -> None:
    """Serve until a signal comes. Raises what ``load`` raises."""
    logs.configure(config.log_format)
    _warn_if_exposed(config)
    servers: list[Server] = []

    def end() -> None:
        servers[0].should_exit = True

    app = make_app(config, load, end)
    servers.append(Server(app, config))
    servers[0].run()
    failure = app.state.context.service.failure
    if failure is not None:
        raise failure


def _warn_if_exposed(config: ServerConfig) -> None:
    if config.host not in _LOOPBACK and not config.api_keys:
        log.warning("listening on %s without an API key: everybody who reaches it may use it", config.host)
