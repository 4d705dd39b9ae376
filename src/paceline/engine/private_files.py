"""Files of one user in a directory of that user: opened without following links, written whole or not at all."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from io import BufferedReader
from pathlib import Path

from paceline.engine.tensor_file import DamagedFileError
from paceline.errors import ParameterError

UNFINISHED = ".part"  # suffix of a file that is being written


def check_directory(option: str, path: Path) -> None:
    """Make a directory for its owner alone if there is none. Raises ParameterError for one that others may write to."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.stat()
    except OSError as error:
        raise ParameterError(option, str(path), f"a directory that can be made and written to ({error})") from None
    if hasattr(os, "getuid") and (found.st_uid != os.getuid() or found.st_mode & 0o022):
        raise ParameterError(option, str(path), "a directory of this user, to which nobody else may write")


def opened(path: Path) -> BufferedReader:
    """Open a regular file, and no link, for reading. Raises OSError."""
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    return os.fdopen(os.open(path, flags), "rb")


def content_of(path: Path, most: int) -> bytearray:
    """Return a file's bytes. Raises DamagedFileError if it is no file of at most ``most`` bytes."""
    with opened(path) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_size > most:
            raise DamagedFileError("its size is wrong")
        data = bytearray(found.st_size)
        if file.readinto(data) != len(data):
            raise DamagedFileError("it became shorter")
        return data


def store(directory: Path, name: str, parts: Sequence[memoryview], used: float) -> None:
    """Write a file that is whole or not there, for the owner alone. used: its time stamp, seconds of time.time."""
    unfinished = directory / (name + UNFINISHED)
    try:
        with os.fdopen(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            for part in parts:
                file.write(part)
        os.utime(unfinished, (used, used))
        unfinished.replace(directory / name)
    except OSError:
        remove(unfinished)
        raise


def remove(path: Path) -> None:
    """Remove a file if there is one that can be removed."""
    with suppress(OSError):
        path.unlink()
