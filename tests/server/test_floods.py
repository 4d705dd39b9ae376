"""``paceline serve`` in its own process under floods of connections and bodies: it responds and does not grow."""

from __future__ import annotations

import contextlib
import os
import resource
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from honest import HonestClient, check_honest, note
from served import HealthProbe, Served, check_health, resident
from web import client as web

pytestmark = pytest.mark.slow

SECONDS = 8.0
HALF = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
KEY = {"Authorization": "Bearer secret"}


@pytest.fixture
def served(tiny: str, tmp_path: Path) -> Iterator[Served]:
    """Start the server with a limit of 1,024 open files, as on most systems."""
    server = Served(tiny, tmp_path / "log", "--api-key", "secret")
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (1024, hard))
    with server.ready():
        yield server


def address(served: Served) -> tuple[str, int]:
    host, port = served.url.removeprefix("http://").split(":")
    return host, int(port)


class Timer:
    """Measures, in the background, response times of /health and of an honest client, and the server's peak memory."""

    def __init__(self, served: Served) -> None:
        self._served, self._probe, self._honest = served, HealthProbe(served), HonestClient(served.url, KEY)
        self._before = self._most = resident(served)
        self._over = threading.Event()
        self._memory = threading.Thread(target=self._follow)
        self._memory.start()

    def _follow(self) -> None:
        while not self._over.wait(0.02):
            self._most = max(self._most, resident(self._served))

    def figures(self) -> dict[str, float]:
        """Response times in milliseconds, and memory relative to the start."""
        found = self._probe.figures() | self._honest.figures()
        self._over.set()
        self._memory.join()
        found |= {"resident_mib": self._before / 2**20, "grown": self._most / self._before - 1}
        note(os.environ["PYTEST_CURRENT_TEST"].rpartition("::")[2].removesuffix(" (call)"), found)
        return found


def still_serves(served: Served) -> None:
    body = {"prompt": "a", "max_tokens": 2}
    reply = web.post(f"{served.url}/v1/completions", json=body, headers=KEY)
    assert reply.status_code == 200


def warm_up(served: Served) -> None:
    for path in ("/health", "/", "/nowhere"):
        web.get(served.url + path)
    for _ in range(20):
        still_serves(served)


def check(figures: dict[str, float], grown: float = 0.1) -> None:
    check_honest(figures)
    check_health(figures)
    assert figures["grown"] < grown


@contextmanager
def clients(served: Served, count: int, sent: bytes) -> Iterator[Callable[[], None]]:
    """Open connections that send the start of a request only. ``renew`` replaces those that the server closed."""
    chosen = selectors.DefaultSelector()

    def open_one() -> None:
        made = socket.socket()
        made.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            made.connect(address(served))
        chosen.register(made, selectors.EVENT_WRITE)

    def renew() -> None:
        for key, events in chosen.select(0.02)[:100]:
            connection: Any = key.fileobj
            try:
                if events & selectors.EVENT_WRITE:
                    connection.send(sent)
                    chosen.modify(connection, selectors.EVENT_READ)
                elif not connection.recv(4096):
                    raise ConnectionError
            except OSError:
                chosen.unregister(connection)
                connection.close()
                open_one()

    try:
        for _ in range(count):
            open_one()
        yield renew
    finally:
        for key in list(chosen.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]


@pytest.mark.parametrize("count", [1070, 2000])
def test_half_requests_do_not_lock_others_out(served: Served, count: int) -> None:
    """Every closed connection is replaced by a new one."""
    warm_up(served)
    watch = Timer(served)
    end = time.monotonic() + SECONDS
    with clients(served, count, HALF) as renew:
        while time.monotonic() < end:
            renew()
            time.sleep(0.025)  # at most 4,000 new connections per second
        still_serves(served)
    check(watch.figures())


def test_silent_half_requests_do_not_lock_others_out(served: Served) -> None:
    warm_up(served)
    watch = Timer(served)
    with clients(served, 1070, HALF) as renew:
        for _ in range(50):
            renew()
    with clients(served, 1070, b"") as _:
        time.sleep(SECONDS)  # the slowest 1 percent may fall into the moment in which all connect
        still_serves(served)
    check(watch.figures())


def flood(served: Served, path: str, headers: str, end: float) -> int:
    """Send endless bodies one after the other; return the bytes that the server took."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{headers}\r\n\r\n".encode()
    taken, chunk = 0, b" " * 2**16
    while time.monotonic() < end:
        with contextlib.suppress(OSError), socket.create_connection(address(served), timeout=0.5) as client:
            client.sendall(head)
            while time.monotonic() < end:
                client.sendall(chunk)
                taken += len(chunk)
    return taken


ENDLESS = f"Content-Length: {1 << 30}"


def flooded(served: Served, paths: list[str], headers: str) -> dict[str, float]:
    warm_up(served)
    watch = Timer(served)
    end = time.monotonic() + SECONDS
    threads = [threading.Thread(target=flood, args=(served, path, headers, end)) for path in paths]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    still_serves(served)
    return watch.figures()


@pytest.mark.parametrize("headers", [ENDLESS, "Transfer-Encoding: chunked"])
def test_bodies_without_a_key_use_no_memory(served: Served, headers: str) -> None:
    """Half of the bodies go to open paths."""
    check(flooded(served, ["/health", "/", "/playground/main.js", "/v1/completions"] * 8, headers))


def held(served: Served, path: str, headers: str) -> dict[str, float]:
    """Send bodies that stop just before their end, 400 MiB in all."""
    warm_up(served)
    watch = Timer(served)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{headers}Content-Length: {1 << 22}\r\n\r\n".encode()
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            client = stack.enter_context(socket.create_connection(address(served), timeout=1))
            with contextlib.suppress(OSError):
                client.sendall(head + b" " * ((1 << 22) - 1))
        figures = watch.figures()
    still_serves(served)
    return figures


@pytest.mark.parametrize("path", ["/health", "/", "/playground/main.js", "/v1/completions"])
def test_stalled_bodies_without_a_key_use_no_memory(served: Served, path: str) -> None:
    check(held(served, path, ""))


def test_bodies_with_a_key_share_a_memory_limit(served: Served) -> None:
    """One address may use 32 MiB; joining a body's pieces takes twice that."""
    figures = held(served, "/v1/completions", "Authorization: Bearer secret\r\n")
    check(figures, grown=64 / figures["resident_mib"] + 0.1)
