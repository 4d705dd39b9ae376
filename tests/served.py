"""``paceline serve`` in a process of its own, and what can be seen of it from outside."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil

READY_SECONDS = 120
SMALL_ENGINE = (
    "--dtype", "float32", "--attention", "padded", "-k", "4", "--max-batch-size", "4", "--threads", "1",
)  # fmt: skip


class Served:
    """A server that runs. log: the lines it wrote, one JSON object each."""

    def __init__(self, model: str, log: Path, *flags: str, engine: Sequence[str] = SMALL_ENGINE) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url, self._log = f"http://127.0.0.1:{port}", log
        command = [sys.executable, "-m", "paceline.cli.main", "serve", model, "--port", str(port)]
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [*command, *engine, "--served-model-name", "tiny", "--log-format", "json", *flags], stderr=file
            )

    def wait_until_ready(self) -> None:
        end = time.monotonic() + READY_SECONDS
        while not self._is_ready():
            assert self.process.poll() is None, self._log.read_text()
            assert time.monotonic() < end, "not ready"
            time.sleep(0.05)

    def _is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health").status_code == 200
        except httpx.TransportError:
            return False

    @property
    def log(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._log.read_text().splitlines()]

    def post(self, body: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=120)

    def metric(self, name: str) -> float:
        """The sum of a metric's values over its labels."""
        text = httpx.get(f"{self.url}/metrics").text
        return sum(map(float, re.findall(rf"^paceline:{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE)))

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)


HEALTH_PROBE = """
import json, select, sys, time
import httpx
delays = []
with httpx.Client(timeout=10) as client:
    while not select.select([sys.stdin], [], [], 0.01)[0]:  # until it is closed
        began = time.perf_counter()
        assert client.get(sys.argv[1] + "/health").status_code == 200
        delays.append(time.perf_counter() - began)
print(json.dumps(delays))
"""


def resident(served: Served) -> int:
    return int(psutil.Process(served.process.pid).memory_info().rss)
