"""The end of the process, in bounded time whatever hangs."""

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
EXIT_STUCK = 70  # something did not end within its limit
_ALARM = 3  # seconds after the limit
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def watch_signals(limit: float, is_loading: Callable[[], bool]) -> None:
    """End the process ``limit`` seconds after the first signal if it has not ended by then, at once after a second.

    While the model is loaded the first one ends it: nobody waits for anything. The signals' ordinary handlers run, too;
    this is a thread of its own because they run in the main thread, which may be what hangs. Call it there.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.detach(), warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(reader, limit, is_loading), name="signals", daemon=True).start()


def _watch(reader: socket.socket, limit: float, is_loading: Callable[[], bool]) -> None:
    _next_signal(reader)
    signal.setitimer(signal.ITIMER_REAL, limit + _ALARM)  # the kernel's, should even this thread not run any more
    if is_loading():
        log.info("ended while loading")
        _end(0)
    reader.settimeout(limit)
    try:
        _next_signal(reader)
    except TimeoutError:
        log.error("not ended within %g s: something hangs, and is cut off", limit)
        _end(EXIT_STUCK)
    _end(EXIT_AT_ONCE)


def _next_signal(reader: socket.socket) -> None:
    while reader.recv(1)[0] not in _SIGNALS:
        pass


def _end(code: int) -> None:
    logs.flush()
    os._exit(code)
