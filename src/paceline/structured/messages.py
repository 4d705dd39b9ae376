"""What the engine and the processes that follow grammars say to each other: JSON documents, with bytes behind them."""

from __future__ import annotations

import json
import socket
import struct
import time
from typing import Any

_SIZES = struct.Struct("<II")  # of the document and of the bytes
_PIECE = 2**18


def send(connection: socket.socket, document: object, body: bytes = b"", deadline: float | None = None) -> None:
    """Raises OSError where nobody listens; TimeoutError is one."""
    text = json.dumps(document, separators=(",", ":")).encode()
    _wait_until(connection, deadline)
    connection.sendall(_SIZES.pack(len(text), len(body)) + text + body)


def receive(connection: socket.socket, deadline: float | None = None) -> tuple[Any, bytearray]:
    """The next message. Raises EOFError where the other end is gone, TimeoutError at the deadline (time.monotonic)."""
    document, body = _SIZES.unpack(receive_exactly(connection, _SIZES.size, deadline))
    text = receive_exactly(connection, document, deadline)
    return json.loads(text), receive_exactly(connection, body, deadline)


def receive_exactly(connection: socket.socket, size: int, deadline: float | None = None) -> bytearray:
    """So many bytes."""
    data = bytearray(size)
    view, have = memoryview(data), 0
    while have < size:
        _wait_until(connection, deadline)
        try:
            count = connection.recv_into(view[have : have + _PIECE])
        except ConnectionError:
            count = 0
        if count == 0:
            raise EOFError("the other end is gone")
        have += count
    return data


def _wait_until(connection: socket.socket, deadline: float | None) -> None:
    if deadline is not None:  # what is there already is taken even when it has passed
        connection.settimeout(max(0.001, deadline - time.monotonic()))
