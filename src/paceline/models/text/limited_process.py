"""A subprocess for untrusted work of a checkpoint, such as its chat template, within limits of time and memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.core import child_limits
from paceline.core.child_limits import CREATION_FLAGS, Watch, was_ended_by, watch

SECONDS = 5  # CPU time for one exchange
WALL_SECONDS = 60.0  # elapsed time for one exchange; more than SECONDS because the machine may be busy
MEMORY = 512 << 20  # bytes in addition to those of the idle process


class LimitedProcess:
    """Answers JSON lines in a subprocess, which starts with the first line and ends with this object. Thread-safe.

    program: a script beside this module that calls ``limited_program.serve``. settings: what its work is made of.
    """

    def __init__(self, program: str, settings: Mapping[str, Any]) -> None:
        limits = {"seconds": SECONDS, "memory": MEMORY, "limits_itself": child_limits.BY_KERNEL}
        self._program, self._settings = Path(__file__).parent / program, json.dumps({**settings, **limits})
        self._lock = threading.Lock()
        self.child: subprocess.Popen[str] | None = None
        self._watch = Watch()

    def exchange(self, line: str) -> dict[str, Any]:
        """Return the answer to a line of JSON: an object, with "error" alone if the work failed or exceeds a limit."""
        with self._lock:
            return self._exchange(line)

    def _exchange(self, line: str) -> dict[str, Any]:
        known = self.child
        process = self.child = known if known is not None and known.poll() is None else self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(WALL_SECONDS, process.kill)
        timer.start()
        try:
            with self._watch:
                process.stdin.write(line + "\n")
                process.stdin.flush()
                reply = process.stdout.readline()
        except OSError:  # the process has exited
            reply = ""
        except BaseException:  # an interrupt: the next line must not get this one's answer
            self.child = None
            _end(process)
            raise
        finally:
            timer.cancel()
        if reply.endswith("\n"):
            return dict(json.loads(reply))
        self.child = None
        return {"error": self._exit_reason(process)}

    def _start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-P", str(self._program)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            creationflags=CREATION_FLAGS,
        )
        weakref.finalize(self, _end, process)
        self._watch = watch(process, MEMORY, SECONDS)
        assert process.stdin is not None
        process.stdin.write(self._settings + "\n")
        return process

    def _exit_reason(self, process: subprocess.Popen[str]) -> str:
        with suppress(subprocess.TimeoutExpired):
            process.wait(1)
        _end(process)
        if self._watch.exceeded == "memory":
            return f"it needs more than {MEMORY >> 20} MiB"
        if self._watch.exceeded == "time" or was_ended_by(process, "SIGXCPU", "SIGKILL"):
            return f"it takes more than {SECONDS} seconds"
        return f"the process that runs it ended with status {process.returncode}"


def _end(process: subprocess.Popen[str]) -> None:
    """Kill the process and close its pipes."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        try:
            pipe.close()
        except OSError:  # buffered input can no longer be written
            continue
