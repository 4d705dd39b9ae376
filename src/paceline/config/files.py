"""Users' files: read as text, checked before the work, written whole or not at all.

An output path is checked before anything is measured: what takes an hour must not end with "no such directory".
"""

from __future__ import annotations

import os
import re
import secrets
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from paceline.errors import ParameterError

_PART = re.compile(r"\.[0-9a-f]{12}\.part(\.\w+)?")
_LEFT_SECONDS = 24 * 3600  # a writer that is alive has written within this time
_LOCKED_BYTE = 2**31 - 2  # on Windows, whose locks keep readers out: far behind the content of any locked file
_READABLE = "a text file that can be read as UTF-8"


def read_text(option: str, path: str | os.PathLike[str]) -> str:
    """A text file, with or without a byte order mark. Raises ParameterError, which names the option."""
    try:
        return Path(path).read_bytes().decode("utf-8-sig")
    except (OSError, ValueError) as error:
        raise ParameterError(option, str(path), f"{_READABLE} ({error})") from error


def read_stdin(option: str) -> str:
    """The text of stdin. Raises ParameterError, which names the option."""
    try:
        return sys.stdin.buffer.read().decode("utf-8-sig")
    except (OSError, ValueError) as error:
        raise ParameterError(option, "-", f"{_READABLE} ({error})") from error


def check_output(option: str, *paths: Path | None) -> None:
    """Raise ParameterError unless all of these can be written and differ from each other. Nothing is changed."""
    outputs = [path for path in paths if path is not None]
    if len({os.path.realpath(path) for path in outputs}) < len(outputs):
        raise ParameterError(option, str(outputs[0]), "a name other than that of the plot, which ends in .png")
    for path in outputs:
        _check_one(option, path)


def check_directory(option: str, directory: Path, names: Iterable[str]) -> None:
    """Make a directory. Raise ParameterError unless files of these names can be written there."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ParameterError(option, str(directory), f"a directory that can be written ({error})") from error
    for name in names:
        check_output(option, directory / name)


def _check_one(option: str, path: Path) -> None:
    try:
        if path.is_dir():
            raise IsADirectoryError("this is a directory")
        if _is_special(path):
            os.close(os.open(path, os.O_WRONLY | getattr(os, "O_NONBLOCK", 0)))
            return
        part = _part_of(path)
        part.open("x").close()
        part.unlink()
    except (OSError, ValueError) as error:
        raise ParameterError(option, str(path), f"a file in a directory that can be written ({error})") from error


def lock(file: IO[Any], option: str, path: Path, allowed: str) -> None:
    """Keep other processes from a file or directory, until the file is closed.

    Raises ParameterError if another one has it, or if the file system has no locks.
    """
    if not try_lock(file, option, path):
        raise ParameterError(option, str(path), allowed)


def try_lock(file: IO[Any], option: str, path: Path) -> bool:
    """The same as ``lock``, but returns False if another process has it."""
    try:
        _take(file)
    except (BlockingIOError, PermissionError):
        return False
    except OSError as error:
        raise ParameterError(option, str(path), f"on a file system that can lock files ({error})") from error
    return True


def _take(file: IO[Any]) -> None:
    """Lock an open file. Raises BlockingIOError, or PermissionError on Windows, if another process has it."""
    try:
        import fcntl
    except ImportError:
        import msvcrt

        descriptor = file.fileno()
        position = os.lseek(descriptor, 0, os.SEEK_CUR)
        os.lseek(descriptor, _LOCKED_BYTE, os.SEEK_SET)
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
        finally:
            os.lseek(descriptor, position, os.SEEK_SET)
    else:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A new file beside ``path`` that takes its place at the end; after an exception ``path`` is as it was."""
    if _is_special(path):
        yield path
        return
    part = _part_of(path)
    _sweep(part.parent)
    try:
        part.touch(exist_ok=False)
        usual = part.stat().st_mode
        yield part
        part.chmod(usual)  # safetensors' own files are for their owner alone
        part.replace(os.path.realpath(path))
    finally:
        part.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """The file whole, in UTF-8, or as it was."""
    with written_whole(path) as part:
        part.write_text(text, encoding="utf-8")


def _part_of(path: Path) -> Path:
    """A new name beside ``path`` with the same suffix, not used by another process."""
    whole = Path(os.path.realpath(path))
    return whole.with_name(f".{secrets.token_hex(6)}.part{whole.suffix}")


def _sweep(directory: Path) -> None:
    """Delete partial files that killed processes left there more than a day ago."""
    with suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            if _PART.fullmatch(entry.name) and entry.stat().st_mtime < time.time() - _LEFT_SECONDS:
                Path(entry).unlink(missing_ok=True)


def _is_special(path: Path) -> bool:
    """Whether it exists and is not a regular file: /dev/null, a pipe."""
    return path.exists() and not path.is_file()
