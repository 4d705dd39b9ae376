"""``paceline serve --replicas 2``: 200 streams, one replica killed by SIGKILL; then a drain, after which nothing is
left.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from polling import wait_until
from server_support import save_model

pytestmark = pytest.mark.slow
STREAMS, AT_ONCE, READY = 200, 24, 240.0
FLAGS = ("--replicas", "2", "--threads", "1", "--attention", "native", "--max-batch-size", "4", "-k", "4")
client = httpx.Client(timeout=120, limits=httpx.Limits(max_connections=AT_ONCE + 4), trust_env=False)


class Replicated:
    def __init__(self, model: str, log: Path) -> None:
        command = [sys.executable, "-m", "paceline.cli.main", "serve", model, "--port", "0", *FLAGS]
        self._log = log
        with log.open("w") as file:
            self.process = subprocess.Popen([*command, "--served-model-name", "tiny"], stderr=file, stdout=file)
        self.url = ""
        wait_until(lambda: self._health() == 2 or self.process.poll() is not None, "not ready", READY)
        assert self.process.poll() is None, log.read_text()

    def _health(self) -> int:
        found = re.search(r"listening on (http://[\d.]+:\d+)", self._log.read_text())
        if found is None:
            return 0
        self.url = found[1]
        return int(client.get(f"{self.url}/health").json()["replicas"])

    def wait_for_both(self) -> None:
        wait_until(lambda: self._health() == 2, "the killed one was not replaced", READY)

    def workers(self) -> list[psutil.Process]:
        tree = psutil.Process(self.process.pid).children(recursive=True)
        return [each for each in tree if "ServeReplica" in " ".join(each.cmdline())]

    def post(self, body: dict[str, Any]) -> httpx.Response:
        return client.post(f"{self.url}/v1/completions", json=body)

    def metrics(self) -> str:
        return client.get(f"{self.url}/metrics").text


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Replicated]:
    pytest.importorskip("ray", reason="needs the extra [ray]")
    server = Replicated(save_model(tmp_path / "model"), tmp_path / "log")
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()


def asked(number: int) -> dict[str, Any]:
    return {"prompt": f"Row {number} {'x' * (number % 7)}: ", "max_tokens": 60, "seed": number, "ignore_eos": True}


def streamed(served: Replicated, number: int) -> tuple[str, str, str]:
    """The text, the replica that sent it, and how it ended: "done", an error's code, or "silence"."""
    text, end = "", "silence"
    with client.stream("POST", f"{served.url}/v1/completions", json={**asked(number), "stream": True}) as reply:
        replica = reply.headers.get("x-paceline-replica", "")
        if reply.status_code != 200:
            return "", replica, json.loads(reply.read())["error"]["code"]
        for line in reply.iter_lines():
            if line == "data: [DONE]":
                end = "done" if end == "silence" else end
            elif line.startswith("data: "):
                event = json.loads(line[6:])
                end = event["error"]["code"] if "error" in event else end
                text += event["choices"][0]["text"] if event.get("choices") else ""
    return text, replica, end


def test_a_killed_replica_loses_only_its_own_streams_with_an_error(served: Replicated) -> None:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        plain = list(pool.map(lambda number: served.post(asked(number)), range(STREAMS)))
        expected = [reply.json()["choices"][0]["text"] for reply in plain]
        replicas = {reply.headers["x-paceline-replica"] for reply in plain}
        assert len(replicas) == 2, "both answer"
        assert all(f'replica="{name}"' in served.metrics() for name in replicas)
        futures = [pool.submit(streamed, served, number) for number in range(STREAMS)]
        wait_until(lambda: sum(each.done() for each in futures) > STREAMS // 4)
        victim = served.workers()[0]
        victim.send_signal(signal.SIGKILL)
        found = [each.result() for each in futures]
    lost = [number for number, (_, _, end) in enumerate(found) if end == "replica_lost"]
    whole = [number for number in range(STREAMS) if number not in lost]
    ends = {end for _, _, end in found}
    print(f"streams {STREAMS}, lost with an error {len(lost)}, ends {ends}")
    assert ends <= {"done", "replica_lost"}, "nothing ends in silence, and nothing hangs"
    assert len({found[number][1] for number in lost}) <= 1, "of the one that was killed"
    assert len(lost) <= 4, "what it decoded: no more than its rows"
    assert all(found[number][0] == expected[number] for number in whole), "wrong"
    assert all(expected[number].startswith(found[number][0]) for number in lost), "what it sent was right"
    served.wait_for_both()
    check_the_end(served)


def check_the_end(served: Replicated) -> None:
    """A drain finishes the running stream; afterwards nothing of Ray is left."""
    started = psutil.Process(served.process.pid).children(recursive=True)
    with client.stream(
        "POST", f"{served.url}/v1/completions", json={**asked(1), "max_tokens": 400, "stream": True}
    ) as s:
        lines = s.iter_lines()
        next(lines)
        served.process.send_signal(signal.SIGTERM)
        assert list(lines)[-2] == "data: [DONE]"
    assert served.process.wait(READY) == 0
    wait_until(lambda: not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in started))
