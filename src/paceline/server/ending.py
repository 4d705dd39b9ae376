"""Shutdown on signals, in bounded time even if a thread hangs."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Callable

from paceline.server import logs

log = logging.getLogger("paceline.server")

EXIT_AT_ONCE = 130  # after a second signal
EXIT_STUCK = 70  # shutdown exceeded its time limit
_ALARM = 3  # seconds after the limit until the kernel's alarm
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def watch_signals(limit: float, is_loading: Callable[[], bool]) -> None:
    """End the process ``limit`` seconds after the first signal at the latest, or at once after a second signal.

    The first signal ends the process at once while the model is loading: no request is waiting yet. The signals' other
    handlers still run. Those run in the main thread, which may hang, so this watches in a thread of its own.
    Call it in the main thread.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.detach(), warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(reader, limit, is_loading), name="signals", daemon=True).start()


def _watch(reader: socket.socket, limit: float, is_loading: Callable[[], bool]) -> None:
    _next_signal(reader)
    if hasattr(signal, "setitimer"):  # not on Windows
        signal.setitimer(
            signal.ITIMER_REAL, limit + _ALARM
        )  # set in the kernel: it works even if no Python thread runs
    if is_loading():
        log.info("ended while loading")
        _end(0)
    reader.settimeout(limit)
    try:
        _next_signal(reader)
    except TimeoutError:
        log.error("shutdown took more than %g s: some thread hangs; exiting now", limit)
        _end(EXIT_STUCK)
    _end(EXIT_AT_ONCE)


def _next_signal(reader: socket.socket) -> None:
    while reader.recv(1)[0] not in _SIGNALS:
        pass


def _end(code: int) -> None:
    logs.flush()
    os._exit(code)
