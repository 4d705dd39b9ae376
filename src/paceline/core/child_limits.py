"""Limits on child processes that run untrusted work.

On Linux a child limits itself with setrlimit(2), and the kernel keeps the limits exactly. On Windows the parent puts it
into a job object (job_objects.py). macOS refuses a limit of address space below what every process has from the start.
There the parent looks at the child's memory and CPU time, so a child may exceed a limit by what it takes between two
looks.
"""

from __future__ import annotations

import signal
import sys
import threading
from typing import TYPE_CHECKING, Literal, Self, TypeAlias

from paceline.core.job_objects import SUSPENDED, TIME_EXCEEDED, Child, JobObject

if TYPE_CHECKING:
    import psutil

BY_KERNEL = sys.platform == "linux"  # a child limits itself
CREATION_FLAGS = SUSPENDED  # of a child that is given to ``watch``
_PAUSE = 0.02  # seconds between two looks, which take 0.1 ms: a process writes at most some 100 MB in the meantime
_USUAL_BYTES = 64 << 20  # that Python and its modules commit on Windows before any work, with a margin


Limit: TypeAlias = Literal["", "memory", "time"]


class Watch:
    """Context manager within which a child works. This one is for children that limit themselves.

    exceeded: the limit for which the child was ended; empty if it was not.
    """

    @property
    def exceeded(self) -> Limit:
        return ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to end."""


def watch(process: Child, additional_bytes: int, cpu_seconds: float) -> Watch:
    """Return the context manager within which a child that was started with ``CREATION_FLAGS`` works.

    additional_bytes: what it may take beyond its use at the start. cpu_seconds: CPU time within each context.
    Raises OSError on Windows if the system refuses the limits; the child is then killed.
    """
    if sys.platform == "win32":
        return JobWatch(process, additional_bytes, cpu_seconds)
    return Watch() if BY_KERNEL else PollingWatch(process, additional_bytes, cpu_seconds)


class JobWatch(Watch):
    """Watch by a Windows job object, with which the child ends. Too large allocations fail in the child."""

    def __init__(self, process: Child, additional_bytes: int, cpu_seconds: float) -> None:
        self._process, self._cpu_seconds = process, cpu_seconds
        self._job = JobObject(process, _USUAL_BYTES + additional_bytes)

    def __enter__(self) -> Self:
        self._job.limit_time(self._cpu_seconds)
        return self

    @property
    def exceeded(self) -> Limit:
        return "time" if self._process.poll() == TIME_EXCEEDED else ""


class PollingWatch(Watch):
    """Watch that looks at the child and kills it once it exceeds a limit."""

    def __init__(self, process: Child, additional_bytes: int, cpu_seconds: float) -> None:
        self._process, self._additional_bytes, self._cpu_seconds = process, additional_bytes, cpu_seconds
        self._exceeded: Limit = ""

    @property
    def exceeded(self) -> Limit:
        return self._exceeded

    def __enter__(self) -> Self:
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="limits of a child process", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        import psutil

        try:
            child = psutil.Process(self._process.pid)
            most_bytes = child.memory_info().rss + self._additional_bytes
            most_seconds = _cpu_seconds(child) + self._cpu_seconds
            while not self._is_over.wait(_PAUSE):
                if child.memory_info().rss > most_bytes:
                    self._exceeded = "memory"
                elif _cpu_seconds(child) > most_seconds:
                    self._exceeded = "time"
                if self._exceeded:
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
