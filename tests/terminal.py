"""A terminal for commands that run in this process: a pseudo-terminal, and a screen that shows what was written."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import sys
import termios
import threading
import time
import tty
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

import pyte
import pytest

from paceline.cli.main import app

_ROWS = 400  # so many that nothing scrolls away
_PATIENCE = 15.0  # seconds until an expected text must have come


class Terminal:
    """A terminal of some width. seen: all bytes written to it."""

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self.seen = b""
        self._screen = pyte.Screen(columns, _ROWS)
        self._stream = pyte.ByteStream(self._screen)
        self._master, self.slave = pty.openpty()
        tty.setraw(self._master)
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", _ROWS, columns, 0, 0))
        modes = termios.tcgetattr(self.slave)
        modes[0] |= termios.ICRNL  # as a shell sets them
        modes[1] |= termios.OPOST | termios.ONLCR
        modes[3] |= termios.ICANON | termios.ISIG | termios.ECHO
        termios.tcsetattr(self.slave, termios.TCSANOW, modes)
        self._ended = threading.Event()

    @property
    def lines(self) -> list[str]:
        """The screen's lines that are not empty, without blanks at their ends."""
        return [line.rstrip() for line in self._screen.display if line.strip()]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def play(self, script: Sequence[tuple[str, str]]) -> None:
        """Show what is written until ``end``. Each step of the script waits for a text and types keys."""
        steps = list(script)
        since = 0
        began = time.monotonic()
        while not self._ended.is_set() or select.select([self._master], [], [], 0)[0]:
            if not select.select([self._master], [], [], 0.02)[0]:
                continue
            data = os.read(self._master, 65536)
            self.seen += data
            self._stream.feed(data)
            while steps and (found := self.seen.find(steps[0][0].encode(), since)) >= 0:
                awaited, keys = steps.pop(0)
                since, began = found + len(awaited), time.monotonic()
                os.write(self._master, keys.encode())
            if steps and time.monotonic() > began + _PATIENCE:
                os.write(self._master, b"\x04")  # the end of the input

    def end(self) -> None:
        """Let ``play`` return once all is shown."""
        self._ended.set()

    def close(self) -> None:
        for end in (self._master, self.slave):
            os.close(end)


@contextmanager
def _streams(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    files: list[TextIO] = [os.fdopen(os.dup(terminal.slave), mode, encoding="utf-8") for mode in ("r", "w", "w")]
    with monkeypatch.context() as patch:
        for name, file in zip(("stdin", "stdout", "stderr"), files, strict=True):
            patch.setattr(sys, name, file)
        patch.setenv("COLUMNS", str(terminal.columns))
        patch.setenv("TERM", "xterm-256color")
        patch.setenv("PROMPT_TOOLKIT_NO_CPR", "1")  # this terminal does not tell where its cursor is
        try:
            yield
        finally:
            for file in files:
                file.close()


def run(
    monkeypatch: pytest.MonkeyPatch, *command: str, columns: int = 80, script: Sequence[tuple[str, str]] = ()
) -> tuple[int, Terminal]:
    """Run paceline on a terminal; return its exit code and the terminal as it was left.

    script: texts to wait for, each with the keys that are typed when it was written.
    """
    terminal = Terminal(columns)
    reader = threading.Thread(target=terminal.play, args=(script,))
    reader.start()
    try:
        with _streams(terminal, monkeypatch), pytest.raises(SystemExit) as ended:
            app([*command])
    finally:
        terminal.end()
        reader.join()
        terminal.close()
    return int(ended.value.code or 0), terminal
