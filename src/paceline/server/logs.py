"""Log lines as text or JSON. A slow or blocked reader of stderr never delays the server."""

from __future__ import annotations

import io
import json
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from paceline.config.limits import LogFormat, LogLevel

LOGGERS = ("paceline", "uvicorn")
REFUSALS = "paceline.server.refusals"
CLIENT_LOGGERS = (REFUSALS, "uvicorn.error")  # loggers whose lines clients can cause
POLLED = frozenset({"/health", "/ping", "/stats", "/stats/stream", "/metrics", "/load"})
_TEXT = "%(asctime)s %(levelname)-7s %(message)s"


_MAX_LINES = 4096  # queued; further lines are dropped
_MAX_CHARACTERS = 16384  # of a line
_BURST, _PER_SECOND = 50, 10  # lines that clients can cause: at once, and per second after that
_STDERR = 2

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)  # of the HTTP request being served


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    """Fields passed as extra={"fields": {...}}, plus the id of the HTTP request."""
    fields: dict[str, Any] = getattr(record, "fields", {})
    found = request_id.get()
    return fields if found is None else {**fields, "request_id": found}


class JsonFormatter(logging.Formatter):
    """One JSON object per line. extra={"fields": {...}} adds fields to it."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage()[:_MAX_CHARACTERS],
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextFormatter(logging.Formatter):
    """Time, level and message, then the fields as name=value.

    A message is one line of printable text: clients choose parts of it, which must not move a terminal's cursor or
    look like other lines. An exception keeps its lines.
    """

    def __init__(self) -> None:
        super().__init__(_TEXT, "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  (logging's own name)
        tail = "".join(f" {name}={_short(value)}" for name, value in _fields(record).items() if value is not None)
        return _printable(super().formatMessage(record)[:_MAX_CHARACTERS] + tail)

    def format(self, record: logging.LogRecord) -> str:
        return _printable(super().format(record), "\n\t")


def _printable(text: str, kept: str = "") -> str:
    """The text with all characters that are not printable as escapes, except those in ``kept``."""
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() or letter in kept else letter.encode("unicode_escape").decode()
        for letter in text
    )


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else json.dumps(value, default=str)


class LogWriter(logging.Handler):
    """Writes lines to a file descriptor in its own thread.

    Lines queue while the descriptor blocks; when the queue is full, new lines are dropped. Lines that cannot be
    written, for example on a full disk, are lost. The next line reports how many were dropped.
    """

    def __init__(self, descriptor: int = _STDERR) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._lines: deque[str] = deque()
        self._changed = threading.Condition()
        self._dropped = 0
        self._writing = False
        threading.Thread(target=self._run, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        self.put(f"{self.format(record)}\n")

    def put(self, text: str) -> None:
        """Queue ``text`` to be written unchanged."""
        with self._changed:
            if len(self._lines) >= _MAX_LINES:
                self._dropped += 1
                return
            if self._dropped:
                self._lines.append(self._report_dropped())
            self._lines.append(text)
            self._changed.notify_all()

    def _report_dropped(self) -> str:
        dropped, self._dropped = self._dropped, 0
        text = f"{dropped} log lines were dropped: stderr was blocked or full"
        record = logging.LogRecord("paceline.server", logging.WARNING, "", 0, text, (), None)
        return f"{self.format(record)}\n"

    def _run(self) -> None:
        while True:
            with self._changed:
                self._writing = False
                self._changed.notify_all()
                while not self._lines:
                    self._changed.wait()
                line, self._writing = self._lines.popleft(), True
            self._write(line.encode("utf-8", "backslashreplace"))

    def _write(self, rest: bytes) -> None:
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except BlockingIOError:  # another process set the descriptor to non-blocking
            self._count_dropped()
            time.sleep(0.01)
        except OSError:
            self._count_dropped()

    def _count_dropped(self) -> None:
        with self._changed:
            self._dropped += 1

    def wait_until_written(self, seconds: float) -> bool:
        """Wait at most ``seconds``; return whether all lines are written."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._lines and not self._writing, seconds)


class Throttle(logging.Filter):
    """Rate limit for lines that clients can cause: a burst, then a fixed number per second, separately per kind.

    A kind is a message before formatting together with an HTTP status. The next line of the kind reports how many were
    left out.
    """

    def __init__(self) -> None:
        super().__init__()
        # per kind: time of the last line, lines still allowed, lines left out
        self._state: dict[object, tuple[float, float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info:
            return True
        kind = str(record.msg), getattr(record, "fields", {}).get("status")
        at, tokens, left_out = self._state.get(kind, (record.created, float(_BURST), 0))
        tokens = min(_BURST, tokens + max(0.0, record.created - at) * _PER_SECOND)
        if tokens < 1:
            self._state[kind] = record.created, tokens, left_out + 1
            return False
        self._state[kind] = record.created, tokens - 1, 0
        if left_out:
            record.fields = {**getattr(record, "fields", {}), "left_out": left_out}
        return True


class WithoutPolling(logging.Filter):
    """Leaves out access lines of requests that monitors repeat all the time, unless the answer is unusual.

    A record's arguments are uvicorn's: client, method, target, HTTP version and status. 503 is what /health answers
    while the model loads.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        _, method, target, _, status = record.args if isinstance(record.args, tuple) else (None,) * 5
        path = str(target).partition("?")[0]
        return method not in ("GET", "HEAD") or path not in POLLED or status not in (200, 503)


class StderrStream(io.TextIOBase):
    """Replacement of ``sys.stderr``: sends what libraries print (warnings, progress bars) through the log's writer."""

    def __init__(self, writer: LogWriter) -> None:
        self._writer = writer

    def write(self, text: str) -> int:
        self._writer.put(text)
        return len(text)

    def isatty(self) -> bool:
        return os.isatty(_STDERR)

    def fileno(self) -> int:
        return _STDERR

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"


@contextmanager
def to_stderr(log_format: LogFormat, log_level: LogLevel = "info") -> Iterator[None]:
    """Send the lines of paceline and uvicorn, and everything printed to stderr, through one writer to stderr."""
    handler, before = LogWriter(), sys.stderr
    _configure(handler, log_format, log_level)
    sys.stderr = StderrStream(handler)
    try:
        yield
    finally:
        sys.stderr = before
        flush()


def _configure(handler: LogWriter, log_format: LogFormat, log_level: LogLevel) -> None:
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(log_level.upper() if name == LOGGERS[0] else logging.INFO)
    for name in CLIENT_LOGGERS:
        logging.getLogger(name).filters = [Throttle()]
    logging.getLogger("uvicorn.access").filters = [WithoutPolling()]


def flush() -> None:
    """Wait up to one second until the queued lines are written."""
    for handler in logging.getLogger(LOGGERS[0]).handlers:
        if isinstance(handler, LogWriter):
            handler.wait_until_written(1.0)
