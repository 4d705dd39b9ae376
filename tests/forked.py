"""Child processes of tests that have torch and paceline from their beginning: forks of one that imports them once."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

FORKS = sys.platform == "linux"
_NEEDED = (  # modules that commands import while they run
    "paceline.cli.main", "paceline.cli.batch", "paceline.server.run", "paceline.server.batch.window", "paceline.llm",
    "transformers.models.llama.configuration_llama",
)  # fmt: skip
_STREAMS = {"stdin": os.O_RDONLY, "stdout": os.O_WRONLY, "stderr": os.O_WRONLY}


class Forked:
    """A process, with the methods of ``subprocess.Popen`` that tests use. Where forks are unsafe, it imports anew.

    program: called with the arguments; a function of a module. streams: files for "stdin", "stdout" and "stderr"; a
    named pipe may be one. The others are those of the test run.
    """

    def __init__(self, program: Callable[..., object], *arguments: Any, **streams: str | Path) -> None:
        context: Any = multiprocessing.get_context("forkserver" if FORKS else "spawn")
        if FORKS:
            _ensure_server(context)
        self._process = context.Process(target=_run, args=(program, arguments, dict(os.environ), streams))
        self._process.start()

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    @property
    def returncode(self) -> int | None:
        code: int | None = self._process.exitcode
        return code

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, seconds: float) -> int:
        """Return the exit code. Fails if the process does not end in time."""
        self._process.join(seconds)
        assert self.returncode is not None, f"the process has not ended within {seconds:g} s"
        return self.returncode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()


def paceline(words: Sequence[str]) -> None:
    """The command of paceline."""
    from paceline.cli.main import app

    app([*words])


def _ensure_server(context: Any) -> None:
    """Start the process to fork, which imports what this one can import."""
    context.set_forkserver_preload([*_NEEDED])
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):
        forkserver.ensure_running()


def _run(
    program: Callable[..., object],
    arguments: Sequence[Any],
    environment: Mapping[str, str],
    streams: Mapping[str, str | Path],
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background may inherit "ignore"
    for number, (name, flags) in enumerate(_STREAMS.items()):
        if name in streams:
            descriptor = os.open(streams[name], flags)
            os.dup2(descriptor, number)
            os.close(descriptor)
    if "stdin" in streams:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115  (multiprocessing replaced it)
    program(*arguments)
