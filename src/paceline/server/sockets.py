"""Listening sockets, opened before the model loads, and the limit on open files."""

from __future__ import annotations

import errno
import math
import socket
import sys
from typing import Any

from paceline.config import ServerConfig
from paceline.errors import ParameterError

ACCEPTED_AT_ONCE = 64  # new connections per loop iteration, so that existing ones are not starved
_BACKLOG = 2048  # connections that the kernel queues
_OTHER_FILES = 256  # open files of the model, the log and libraries
_LONGEST_MS = 2**31 - 1  # the option is a C int


def listen(config: ServerConfig) -> list[socket.socket]:
    """Open one socket per address of the configured host.

    On Linux the kernel closes a connection whose client has acknowledged nothing for ``send_timeout`` seconds.
    Raises ParameterError if the port is in use or the host is not an address of this machine.
    """
    _allow_open_files(config.max_connections + ACCEPTED_AT_ONCE + _OTHER_FILES)
    sockets: list[socket.socket] = []
    port = config.port
    for family, address in _addresses(config):
        try:
            sockets.append(_bind(family, (address[0], port, *address[2:])))
            _limit_sending(sockets[-1], config.send_timeout)
        except OSError as error:
            for opened in sockets:
                opened.close()
            raise _explain(error, config) from error
        port = sockets[0].getsockname()[1]  # port 0 means any free one, the same for all addresses
    return sockets


def enlarge_backlog(sockets: list[socket.socket]) -> None:
    """Enlarge the kernel's queue of new connections."""
    for listening in sockets:
        listening.listen(_BACKLOG)


def _addresses(config: ServerConfig) -> list[tuple[socket.AddressFamily, tuple[Any, ...]]]:
    try:
        found = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ParameterError("host", config.host, f"a name or address of this machine: {error}") from error
    return [(family, address) for family, _, _, _, address in dict.fromkeys(found)]


def _bind(family: socket.AddressFamily, address: tuple[Any, ...]) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        # SO_REUSEADDR lets a restarted server listen at once; on Windows it would let another process take the port.
        made.setsockopt(socket.SOL_SOCKET, getattr(socket, "SO_EXCLUSIVEADDRUSE", socket.SO_REUSEADDR), 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind(address)
        made.listen(ACCEPTED_AT_ONCE)  # binding a used port fails only if its socket listens
        made.setblocking(False)
    except OSError:
        made.close()
        raise
    return made


def _limit_sending(listening: socket.socket, seconds: float) -> None:
    """Set the send timeout. Accepted connections inherit it."""
    if sys.platform == "linux":
        milliseconds = min(math.ceil(1000 * seconds), _LONGEST_MS)
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)


def _explain(error: OSError, config: ServerConfig) -> ParameterError:
    if error.errno == errno.EADDRINUSE:
        return ParameterError("port", config.port, f"a free port: another process listens on {config.host} there")
    if error.errno == errno.EACCES:
        return ParameterError("port", config.port, "a port that this user may listen on, 1024 or above")
    return ParameterError("host", config.host, f"an address of this machine: {error.strerror}")


def _allow_open_files(needed: int) -> None:
    """Raise the process's limit of open files if necessary. Raises ParameterError if that is not allowed."""
    try:
        import resource
    except ImportError:  # Windows limits no process's open sockets
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        overhead = ACCEPTED_AT_ONCE + _OTHER_FILES
        allowed = f"at most {hard - overhead}: this process may open {hard} files (ulimit -n)"
        raise ParameterError("max_connections", needed - overhead, allowed)
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
