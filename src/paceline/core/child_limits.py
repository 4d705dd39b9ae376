"""Limits on child processes that run untrusted work, on systems whose kernel does not enforce them.

On Linux a child limits itself with setrlimit(2), and the kernel keeps the limits exactly. macOS refuses a limit of
address space below what every process has from the start, and Windows has no such limits. There the parent looks at
the child's memory and CPU time, so a child may exceed a limit by what it takes between two looks.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Literal, Self

if TYPE_CHECKING:
    import psutil

Child = subprocess.Popen[str] | subprocess.Popen[bytes]

BY_KERNEL = sys.platform == "linux"
_PAUSE = 0.02  # seconds between two looks, which take 0.1 ms: a process writes at most some 100 MB in the meantime


class Watch:
    """Context manager that kills a child process once it exceeds a limit. Does nothing where the kernel has the limits.

    additional_bytes, cpu_seconds: what the process may take beyond its use at the start.
    exceeded: the limit that was exceeded; empty if none was.
    """

    def __init__(self, process: Child, additional_bytes: int, cpu_seconds: float) -> None:
        self.exceeded: Literal["", "memory", "time"] = ""
        self._process, self._additional_bytes, self._cpu_seconds = process, additional_bytes, cpu_seconds
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="limits of a child process", daemon=True)

    def __enter__(self) -> Self:
        if not BY_KERNEL:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        if not BY_KERNEL:
            self._thread.join()

    def _watch(self) -> None:
        import psutil

        try:
            child = psutil.Process(self._process.pid)
            most_bytes = child.memory_info().rss + self._additional_bytes
            most_seconds = _cpu_seconds(child) + self._cpu_seconds
            while not self._is_over.wait(_PAUSE):
                if child.memory_info().rss > most_bytes:
                    self.exceeded = "memory"
                elif _cpu_seconds(child) > most_seconds:
                    self.exceeded = "time"
                if self.exceeded:
                    break
            else:
                return
        except psutil.Error:  # it has ended, or cannot be looked at, in which case it must not run
            pass
        self._process.kill()


def _cpu_seconds(child: psutil.Process) -> float:
    times = child.cpu_times()
    return float(times.user + times.system)


def was_ended_by(process: Child, *signals: str) -> bool:
    """Whether one of these signals ended a process, by name: Windows does not have most of them."""
    status = process.returncode
    return status is not None and -status in {getattr(signal, name, None) for name in signals}
