"""The engine's end of the processes that follow grammars (nursery.py says which there are)."""

from __future__ import annotations

import atexit
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from paceline.errors import StructureError
from paceline.structured.messages import receive, receive_exactly, send
from paceline.structured.nursery import END, FORK, PID

_START_WAIT = 60.0  # seconds; usually 2 to 3, of which others may want the processor
_REPLY_WAIT = 5.0
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "MALLOC_ARENA_MAX"), "1")


class Breeder:
    """A process that forks others. May be used by any thread.

    Raises OSError or EOFError where it is gone.
    """

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._turn = threading.Lock()
        self._gone: deque[int] = deque()

    def fork(self) -> tuple[socket.socket, int]:
        """A new process: the connection to it, and its id."""
        ours, theirs = socket.socketpair()
        with theirs, self._turn:
            while self._gone:
                self._ask_to_end(self._gone.popleft())
            self._control.settimeout(_REPLY_WAIT)
            socket.send_fds(self._control, [FORK], [theirs.fileno()])
            return ours, self._reply()

    def end(self, pid: int) -> int:
        """Kill it unless it has ended; its status, as ``os.waitpid`` gives it."""
        with self._turn:
            return self._ask_to_end(pid)

    def forget(self, pid: int) -> None:
        """It ends by itself, for its connection is closed; to be called wherever objects are finalised."""
        self._gone.append(pid)

    def _ask_to_end(self, pid: int) -> int:
        self._control.settimeout(_REPLY_WAIT)
        self._control.sendall(END + PID.pack(pid))
        return self._reply()

    def _reply(self) -> int:
        number: int = PID.unpack(receive_exactly(self._control, PID.size, time.monotonic() + _REPLY_WAIT))[0]
        return number

    def close(self) -> None:
        """It and all its children end."""
        self._control.close()


class _Root:
    """The one process that all nurseries of this one are forked from; started when the first is wanted."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._breeder: Breeder | None = None
        self._owner = 0

    def fork(self) -> tuple[socket.socket, int]:
        """Raises StructureError if it cannot be started."""
        with self._turn:
            if self._breeder is not None and self._owner == os.getpid():
                try:
                    return self._breeder.fork()
                except (OSError, EOFError):  # somebody killed it
                    self._breeder.close()
            self._breeder, self._owner = _start_root(), os.getpid()
            return self._breeder.fork()


def _start_root() -> Breeder:
    ours, theirs = socket.socketpair()
    with theirs:
        places = os.pathsep.join(path for path in sys.path if path)
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "paceline.structured.nursery", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **_ONE_THREAD, "PYTHONPATH": places},
        )
    atexit.register(_stop, process, ours)
    said = hear_ready(ours)
    if said["threads"] != 1:
        raise StructureError(f"the process that follows structures has {said['threads']} threads, and cannot be forked")
    return Breeder(ours)


def _stop(process: subprocess.Popen[bytes], control: socket.socket) -> None:
    """At the end of this process: nothing that it forked may outlive it."""
    control.close()
    process.kill()
    process.wait()


def hear_ready(connection: socket.socket) -> dict[str, Any]:
    """What a process says when it is ready. Raises StructureError if it is not."""
    try:
        said, _ = receive(connection, time.monotonic() + _START_WAIT)
    except (OSError, EOFError) as error:
        raise StructureError("the process that follows structures could not be started") from error
    if "error" in said:
        raise StructureError(f"the process that follows structures could not be started: {said['error']}")
    return dict(said)


class Nursery:
    """Forks a process for each grammar over one vocabulary, itself a process that starts when it is first needed."""

    def __init__(self, vocabulary: Mapping[str, Any]) -> None:
        self._vocabulary = vocabulary
        self._turn = threading.Lock()
        self._breeder: Breeder | None = None

    def fork(self) -> tuple[socket.socket, int, Breeder]:
        """A process to follow a grammar: the connection to it, its id, its parent. Raises StructureError."""
        with self._turn:
            if self._breeder is not None:
                try:
                    return *self._breeder.fork(), self._breeder
                except (OSError, EOFError):  # somebody killed it
                    self._breeder.close()
            self._breeder = self._start()
            return *self._breeder.fork(), self._breeder

    def _start(self) -> Breeder:
        control, _ = ROOT.fork()
        send(control, self._vocabulary, deadline=time.monotonic() + _START_WAIT)
        hear_ready(control)
        return Breeder(control)

    def close(self) -> None:
        """End it and all that it forked."""
        if self._breeder is not None:
            self._breeder.close()


ROOT = _Root()


def how_it_ended(status: int) -> int | None:
    """The signal that ended a process; None if none did."""
    return os.WTERMSIG(status) if status >= 0 and os.WIFSIGNALED(status) else None


TOO_LONG = signal.SIGPROF
KILLED = signal.SIGKILL
