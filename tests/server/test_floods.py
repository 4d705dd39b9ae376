"""``paceline serve`` in a process of its own under floods of connections and bodies: it answers and does not grow."""

from __future__ import annotations

import contextlib
import json
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

from served import HealthProbe, Served, check_health, resident
from web import client as web

pytestmark = pytest.mark.slow

SECONDS = 8.0
HALF = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
KEY = {"Authorization": "Bearer secret"}


@pytest.fixture
def served(tiny: str, tmp_path: Path) -> Iterator[Served]:
    """As most systems start it: with 1,024 open files, unless it asks for more."""
    server = Served(tiny, tmp_path / "log", "--api-key", "secret")
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (1024, hard))
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.end()


def address(served: Served) -> tuple[str, int]:
    host, port = served.url.removeprefix("http://").split(":")
    return host, int(port)


class Timer:
    """How long /health took for new connections, and the most memory that the server had, while something goes on."""

    def __init__(self, served: Served) -> None:
        self._served, self._probe = served, HealthProbe(served)
        self._before = self._most = resident(served)
        self._over = threading.Event()
        self._memory = threading.Thread(target=self._follow)
        self._memory.start()

    def _follow(self) -> None:
        while not self._over.wait(0.02):
            self._most = max(self._most, resident(self._served))

    def figures(self) -> dict[str, float]:
        """Milliseconds and shares."""
        found = self._probe.figures()
        self._over.set()
        self._memory.join()
        found |= {"resident_mib": self._before / 2**20, "grown": self._most / self._before - 1}
        print(json.dumps(found))
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
    check_health(figures)
    assert figures["grown"] < grown


@contextmanager
def clients(served: Served, count: int, sent: bytes) -> Iterator[Callable[[], None]]:
    """Connections that send a beginning and no more; whoever is closed comes again when ``renew`` is called."""
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
def test_half_requests_lock_nobody_out(served: Served, count: int) -> None:
    """As many come again as are closed."""
    warm_up(served)
    watch = Timer(served)
    end = time.monotonic() + SECONDS
    with clients(served, count, HALF) as renew:
        while time.monotonic() < end:
            renew()
            time.sleep(0.025)  # 4,000 new connections a second at most
        still_serves(served)
    check(watch.figures())


def test_half_requests_that_keep_still_lock_nobody_out(served: Served) -> None:
    warm_up(served)
    watch = Timer(served)
    with clients(served, 1070, HALF) as renew:
        for _ in range(50):
            renew()
    with clients(served, 1070, b"") as _:
        time.sleep(SECONDS)  # of two hundred answers the slowest two may be those of the moment in which all came
        still_serves(served)
    check(watch.figures())


def flood(served: Served, path: str, headers: str, end: float) -> int:
    """Bodies without end, one after the other; the bytes that were taken."""
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
def test_bodies_without_a_key_cost_nothing(served: Served, headers: str) -> None:
    """Half of them to open paths."""
    check(flooded(served, ["/health", "/", "/playground/main.js", "/v1/completions"] * 8, headers))


def held(served: Served, path: str, headers: str) -> dict[str, float]:
    """Bodies that come to a halt just before their end, 400 MiB in all."""
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
def test_bodies_that_halt_cost_nothing_without_a_key(served: Served, path: str) -> None:
    check(held(served, path, ""))


def test_bodies_with_a_key_have_a_limit_together(served: Served) -> None:
    """32 MiB are one address's share; joining a body's pieces takes it twice."""
    figures = held(served, "/v1/completions", "Authorization: Bearer secret\r\n")
    check(figures, grown=64 / figures["resident_mib"] + 0.1)
