"""``paceline serve`` in a separate process, observed from outside."""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import httpx
import psutil

from forked import Forked, paceline
from polling import wait_until
from web import client

READY_SECONDS = 400
SMALL_ENGINE = (
    "--dtype", "float32", "--attention", "padded", "-k", "4", "--max-batch-size", "4", "--threads", "1",
)  # fmt: skip


class Served:
    """A running server. log: its log lines as JSON objects."""

    def __init__(self, model: str, log: Path, *flags: str, engine: Sequence[str] = SMALL_ENGINE) -> None:
        self._log = log
        log.write_text("")
        words = ["serve", model, "--port", "0", *engine, "--served-model-name", "tiny", "--log-format", "json", *flags]
        self.process = Forked(paceline, words, stderr=log)

    def wait_until_ready(self) -> None:
        wait_until(lambda: self._is_ready() or self.process.poll() is not None, "not ready", READY_SECONDS)
        assert self.process.poll() is None, self._log.read_text()

    @contextmanager
    def ready(self) -> Iterator[Self]:
        """Wait until the server is ready, and end it with the block."""
        try:
            self.wait_until_ready()
            yield self
        finally:
            self.end()

    def _is_ready(self) -> bool:
        found = re.search(r"listening on (http://[\d.]+:\d+)", self._log.read_text())
        if found is None:
            return False
        self.url = found[1]
        return client.get(f"{self.url}/health").status_code == 200

    @property
    def log(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._log.read_text().splitlines()]

    def post(self, body: Any) -> httpx.Response:
        return client.post(f"{self.url}/v1/completions", json=body)

    def metric(self, name: str) -> float:
        """Sum of a metric over all labels."""
        text = client.get(f"{self.url}/metrics").text
        return sum(map(float, re.findall(rf"^paceline:{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE)))

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)


# Program that requests /health on a new connection every 10 ms until its stdin is closed.
HEALTH_PROBE = """
import http.client, json, select, sys, time
delays = []
while not select.select([sys.stdin], [], [], 0.01)[0]:
    began = time.perf_counter()
    connection = http.client.HTTPConnection(sys.argv[1], timeout=5)
    try:
        connection.request("GET", "/health")
        good = connection.getresponse().read() == b'{"status":"ready"}'
    except OSError:
        good = False
    delays.append(time.perf_counter() - began if good else 60.0)
    connection.close()
print(json.dumps(delays))
"""
IDLE_SECONDS = 1.5
MOST_MS = 100.0


def slowness(seconds: float = 0.5) -> float:
    """Ratio of wall-clock time to CPU time of a busy loop: 1 if nothing else runs on the machine."""
    began, worked = time.perf_counter(), time.thread_time()
    while time.perf_counter() - began < seconds:
        pass
    return (time.perf_counter() - began) / max(time.thread_time() - worked, 1e-3)


class HealthProbe:
    """Latency of /health under load, compared to its latency when the server is idle.

    Other processes on the machine increase both, and ``slowness`` estimates by how much.
    """

    def __init__(self, served: Served) -> None:
        self._address = served.url.removeprefix("http://")
        self._slowness = slowness()
        idle = self._start()
        time.sleep(IDLE_SECONDS)
        self._idle_delays = self._end(idle)
        self._busy = self._start()

    def _start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", HEALTH_PROBE, self._address]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)

    def _end(self, probe: subprocess.Popen[str]) -> list[float]:
        """End a probe and return its latencies in ms, sorted."""
        return sorted(1000 * seconds for seconds in json.loads(probe.communicate()[0]))

    def figures(self) -> dict[str, float]:
        """End the probe and return its figures."""
        delays, idle = self._end(self._busy), self._idle_delays
        return {
            "health_checks": len(delays),
            "health_ms_p50": round(statistics.median(delays), 1),
            "health_ms_p99": round(_p99(delays), 1),
            "health_ms_max": round(delays[-1], 1),
            "idle_health_ms_p99": round(_p99(idle), 1),
            "slowness": round(self._slowness, 2),
        }


def _p99(ordered: list[float]) -> float:
    return ordered[int(0.99 * len(ordered))]


def check_health(figures: dict[str, float]) -> None:
    """Check that the 99th percentile is below 100 ms, allowing for a slow machine."""
    assert figures["health_checks"] > 20
    assert figures["health_ms_p99"] < MOST_MS * figures["slowness"] + figures["idle_health_ms_p99"], figures


def resident(served: Served) -> int:
    """Resident memory of the server in bytes."""
    return int(psutil.Process(served.process.pid).memory_info().rss)
