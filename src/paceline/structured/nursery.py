"""The processes that grammars are compiled and followed in: they may hang, grow or crash, and the engine goes on.

    engine ── root: has imported xgrammar
                └── nursery: knows one model's tokens
                      └── follower: one grammar, and all answers that it holds

Root and nurseries only fork, at once and from a single thread; what a request may ask for happens in followers alone. A
follower that takes more processor time or memory than it is given is ended by the kernel. Who loses its parent, or
whoever it talks to, ends.

This module is a program of its own: ``python -m paceline.structured.nursery FD``.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from paceline.structured.messages import receive, receive_exactly, send

FORK, END = b"+", b"-"
PID = struct.Struct("<q")  # also a status that os.waitpid gave
_PR_SET_PDEATHSIG = 1


def breed(control: socket.socket, work: Callable[[socket.socket], None]) -> None:
    """Fork for every socket that comes along, end whoever is to be ended, until nobody is left to ask for it."""
    children: set[int] = set()
    while True:
        try:
            asked, sockets, _, _ = socket.recv_fds(control, 1, 1)
        except OSError:
            return
        if not asked:
            return
        if asked == FORK:
            pid = _fork(control, sockets[0], work)
            children.add(pid)
            control.sendall(PID.pack(pid))
        else:
            (pid,) = PID.unpack(receive_exactly(control, PID.size))
            control.sendall(PID.pack(_end(pid) if pid in children else -1))
            children.discard(pid)


def _fork(control: socket.socket, handle: int, work: Callable[[socket.socket], None]) -> int:
    parent, pid = os.getpid(), os.fork()
    if pid == 0:
        try:
            control.close()
            die_with(parent)
            work(socket.socket(fileno=handle))
        finally:
            os._exit(0)
    os.close(handle)
    return pid


def _end(pid: int) -> int:
    """Kill a child unless it has ended; its status as ``os.waitpid`` tells it. Until then its id is nobody else's."""
    os.kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


def die_with(parent: int) -> None:
    """The kernel kills this process when its parent ends; elsewhere than on Linux it ends when it looks for work."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


def nurse(connection: socket.socket) -> None:
    """A nursery, once it has been told the tokens."""
    from paceline.structured.following import Vocabulary, follow

    told, _ = receive(connection)
    try:
        vocabulary = Vocabulary(**told)
    except Exception as error:  # noqa: BLE001 - whatever it is, the engine's process is told
        send(connection, {"error": str(error)})
        return
    send(connection, {})
    breed(connection, lambda each: follow(each, vocabulary))


def main() -> NoReturn:
    """Whoever is told to end by a signal of its group still has answers to finish: the engine's end is what counts."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    control = socket.socket(fileno=int(sys.argv[1]))
    try:
        from paceline.structured import following

        said = {"threads": _threads(), "module": following.__name__}
    except Exception as error:  # noqa: BLE001 - whatever it is, the engine's process is told
        said = {"error": f"{type(error).__name__}: {error}"}
    send(control, said)
    breed(control, nurse)
    os._exit(0)


def _threads() -> int:
    """Of this process: with more than one nothing may be forked. 1 where nobody tells."""
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.exists() else 1


if __name__ == "__main__":
    main()
