"""Servers as processes: start, wait until ready, stop."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

READY_WITHIN = 600  # seconds; vLLM compiles when it starts
ENDED_WITHIN = 30  # seconds


class ServerError(Exception):
    """A server did not start; the text is its last line."""


def free_port() -> int:
    """A free TCP port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def running(
    command: Sequence[str], port: int, log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[str]:
    """The address of the server that ``command`` starts on ``port``. Its output goes to ``log``. Raises ServerError."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env={**os.environ, **(environment or {})}
        )
        try:
            yield _ready(process, f"http://127.0.0.1:{port}", log)
        finally:
            _end(process)


def _ready(process: subprocess.Popen[bytes], url: str, log: Path) -> str:
    end = time.monotonic() + READY_WITHIN
    while time.monotonic() < end and process.poll() is None:
        if _healthy(url):
            return url
        time.sleep(0.2)
    raise ServerError(last_line(log) or f"not ready within {READY_WITHIN} s")


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(ENDED_WITHIN)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def last_line(log: Path) -> str:
    """The last line of a log, preferring one that looks like an error."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or [""])[-1][:400]
