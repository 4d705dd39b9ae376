"""The workers' processes: started on demand, stopped (SIGSTOP) while others are measured, ended if memory is short."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

END_SECONDS = 10.0


class WorkerError(Exception):
    """A worker could not be started, did not answer in time, ended, or answered with an error."""


class WorkerLostError(WorkerError):
    """The process is gone; the next call starts a new one."""


@dataclass(frozen=True)
class WorkerSpec:
    """How to start a worker. key: its name in logs. need_gib: free memory needed to start it."""

    key: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    need_gib: float = 0.0


class Worker:
    """A process in its own group that answers JSON lines, and that is stopped between calls."""

    def __init__(self, spec: WorkerSpec, log: Path, start_seconds: float) -> None:
        self.spec, self.log = spec, log
        self._answers: queue.Queue[str | None] = queue.Queue()
        self._process = self._start()
        threading.Thread(target=self._read, daemon=True).start()
        try:
            self.info = self._answer(start_seconds)
        except WorkerError:
            self.end()
            raise
        self.pause()

    def _start(self) -> subprocess.Popen[str]:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("a", encoding="utf-8") as log:
            return subprocess.Popen(
                self.spec.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, **self.spec.environment},
                start_new_session=True,
            )

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put(None)

    def call(self, request: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Resume the worker, send a request, wait for the answer, and stop the worker.

        Raises WorkerError if the answer is an error, WorkerLostError if the process has ended.
        """
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            self.end()
            raise WorkerLostError(self._obituary()) from error
        try:
            return self._answer(seconds)
        except WorkerLostError:
            self.end()
            raise
        finally:
            self.pause()

    def _answer(self, seconds: float) -> dict[str, Any]:
        try:
            line = self._answers.get(timeout=seconds)
        except queue.Empty:
            raise WorkerLostError(f"no answer within {seconds:g} s") from None
        if line is None:
            raise WorkerLostError(self._obituary())
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise WorkerError(answer["error"])
        return answer

    def _obituary(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        return f"the process ended with status {self._process.returncode}: {_last_line(self.log)}"

    def pause(self) -> None:
        """Stop the whole group, so that no polling thread disturbs the others."""
        self._signal(signal.SIGSTOP)

    def end(self) -> None:
        """End the whole group."""
        self._signal(signal.SIGCONT)
        self._signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS / 5)
        self._signal(signal.SIGKILL)
        self._process.wait(END_SECONDS)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # what was not sent is of no use any more
                    pipe.close()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)


def _last_line(log: Path) -> str:
    with contextlib.suppress(OSError):
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else ""
    return ""


class Pool:
    """Workers by key. ``started`` is called with each new one, before it is first stopped."""

    def __init__(self, logs: Path, start_seconds: float, say: Callable[[str], None]) -> None:
        self._logs, self._start_seconds, self._say = logs, start_seconds, say
        self._workers: dict[str, Worker] = {}  # least recently used first
        self._refused: dict[str, str] = {}

    def get(self, spec: WorkerSpec) -> tuple[Worker, bool]:
        """The worker and whether it is new. Raises WorkerError for one that failed to load; it is not tried again."""
        if spec.key in self._refused:
            raise WorkerError(self._refused[spec.key])
        worker = self._workers.pop(spec.key, None)
        fresh = worker is None
        if worker is None:
            worker = self._load(spec)
        self._workers[spec.key] = worker
        return worker, fresh

    def _load(self, spec: WorkerSpec) -> Worker:
        self._make_room(spec.need_gib)
        self._say(f"loading {spec.key}")
        try:
            return Worker(spec, self._logs / f"{spec.key}.log", self._start_seconds)
        except (WorkerError, OSError) as error:
            self._refused[spec.key] = str(error)
            raise WorkerError(str(error)) from error

    def _make_room(self, need_gib: float) -> None:
        while self._workers and psutil.virtual_memory().available < need_gib * 2**30:
            key = next(iter(self._workers))
            self._say(f"ending {key}: {need_gib:.1f} GiB are needed for the next worker")
            self.drop(key)

    def drop(self, key: str) -> None:
        """End a worker; the next ``get`` starts a new one."""
        if (worker := self._workers.pop(key, None)) is not None:
            worker.end()

    def close(self) -> None:
        for key in list(self._workers):
            self.drop(key)
