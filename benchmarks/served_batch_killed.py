"""A batch over HTTP whose server is killed at random and restarted, compared with an unbroken one; and memory use.

    python -m benchmarks.served_batch_killed smollm2-135m --quantization int8 --lines 1000 --kills 3

The file goes through /v1/files and /v1/batches of ``paceline serve``. SIGKILL ends the server in the middle of it, and
the next one on the same directory resumes the batch by itself. Every line must be answered exactly once, with the
answer of the unbroken batch, which has a server and a directory of its own. Memory is reported as in
``benchmarks.batch_killed``.
"""

from __future__ import annotations

import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
from benchmarks.batch_killed import answers, by_tenths, from_command_line, write_lines

READY_SECONDS = 900
LOOK_SECONDS = 0.1
ENDED = ("completed", "failed", "cancelled", "expired")


class Server:
    """``paceline serve`` on a free port, ready. Raises RuntimeError if it ends before it is ready."""

    def __init__(self, model: str, options: list[str], kept: Path) -> None:
        command = [sys.executable, "-m", "paceline.cli.main", "serve", model, "--port", "0", "--batch-dir", str(kept)]
        self._log = kept.with_suffix(".log")
        with self._log.open("w") as log:
            self._process = subprocess.Popen([*command, *options], stderr=log, stdout=log)
        self._http = httpx.Client(trust_env=False, timeout=READY_SECONDS)
        try:
            self._wait()
        except BaseException:
            self.kill()
            raise

    def _wait(self) -> None:
        until = time.monotonic() + READY_SECONDS
        while not self._ready():
            if self._process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"the server is not ready: {self._log.read_text()[-2000:]}")
            time.sleep(LOOK_SECONDS)

    def _ready(self) -> bool:
        """Whether the server answers; its log names the address before it listens there."""
        found = re.search(r"http://127\.0\.0\.1:\d+", self._log.read_text())
        if found is None:
            return False
        self._http.base_url = found[0]
        try:
            return self._http.get("/health").status_code == httpx.codes.OK
        except httpx.ConnectError:
            return False

    def begin(self, source: Path) -> str:
        """Start a batch for a file's lines; returns the batch's name."""
        with source.open("rb") as lines:
            form = {"file": (source.name, lines)}
            file = _good(self._http.post("/v1/files", files=form, data={"purpose": "batch"}))
        asked = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h", "seed": 1}
        return str(_good(self._http.post("/v1/batches", json=asked))["id"])

    def batch(self, name: str) -> dict[str, Any]:
        return _good(self._http.get(f"/v1/batches/{name}"))

    def done(self, name: str) -> int:
        """Number of answered lines."""
        return int(self.batch(name)["request_counts"]["completed"])

    def watch(self, name: str, lines: int) -> list[tuple[int, int]]:
        """Wait until ``lines`` lines are answered or the batch has ended: (lines, resident bytes) each second."""
        memory, looked, resident = list[tuple[int, int]](), 0.0, psutil.Process(self._process.pid)
        while (batch := self.batch(name))["status"] not in ENDED:
            done = int(batch["request_counts"]["completed"])
            if done >= lines:
                break
            if time.monotonic() - looked >= 1:
                looked = time.monotonic()
                memory.append((done, resident.memory_info().rss))
            time.sleep(LOOK_SECONDS)
        return memory

    def output(self, name: str) -> str:
        """All lines of a completed batch. Raises RuntimeError if it is not completed, or if a line failed."""
        batch = self.batch(name)
        if batch["status"] != "completed" or batch["error_file_id"] is not None:
            raise RuntimeError(f"the batch ended badly: {batch}")
        return self._http.get(f"/v1/files/{batch['output_file_id']}/content").raise_for_status().text

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()


def _good(reply: httpx.Response) -> dict[str, Any]:
    document: dict[str, Any] = reply.raise_for_status().json()
    return document


def unbroken(start: Callable[[Path], Server], source: Path, kept: Path, lines: int) -> dict[str, Any]:
    """Run one server from the first line to the last."""
    server = start(kept)
    try:
        begun = time.monotonic()
        name = server.begin(source)
        memory = server.watch(name, lines + 1)
        seconds = time.monotonic() - begun
        return {"output": server.output(name), "seconds": seconds, "memory": by_tenths(memory, lines)}
    finally:
        server.kill()


def broken(start: Callable[[Path], Server], source: Path, kept: Path, lines: int, kills: int) -> dict[str, Any]:
    """Run one server after another; each but the last is killed after some more lines."""
    chance, killed_at, memory, name = random.Random(), list[int](), list[tuple[int, int]](), ""
    for life in range(kills + 1):
        server = start(kept)
        try:
            name = name or server.begin(source)
            if life == kills:
                memory += server.watch(name, lines + 1)
                return {"output": server.output(name), "killed_at": killed_at, "memory": by_tenths(memory, lines)}
            memory += server.watch(name, sum(killed_at[-1:]) + chance.randrange(1, lines // (kills + 1)))
            killed_at.append(server.done(name))
        finally:
            server.kill()
    raise AssertionError("the last life returns")


def measure(model: str, options: list[str], lines: int, kills: int, folder: Path) -> dict[str, Any]:
    """Run both and count the differences."""
    source = folder / "lines.jsonl"
    write_lines(source, lines)

    def start(kept: Path) -> Server:
        return Server(model, options, kept)

    whole = unbroken(start, source, folder / "whole", lines)
    parts = broken(start, source, folder / "broken", lines, kills)
    one, other = answers(whole["output"]), answers(parts["output"])
    return {
        "lines": lines,
        "seconds_unbroken": whole["seconds"],
        "killed_at": parts["killed_at"],
        "answered_unbroken": len(one),
        "answered": len(other),
        "different_answers": sum(other.get(name) != text for name, text in one.items()),
        "resident_bytes_by_tenths": whole["memory"],
        "resident_bytes_by_tenths_killed": parts["memory"],
    }


if __name__ == "__main__":
    from_command_line("served_batch_killed", __doc__, 3, [], measure)
