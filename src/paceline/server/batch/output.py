"""The file of answers: every line is on disk once, whatever ends the process and when."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any

from paceline.errors import PacelineError, ParameterError
from paceline.server.batch.disk import full_disk_named
from paceline.server.batch.lines import Line, parse_name


class OutputFile:
    """Lines are appended whole and are on disk when ``append`` returns. ``with`` closes it.

    done: digests of the input's lines that were answered, by index, as the file says when it is opened. A last line
    that was being written when the process or the machine ended is cut off. One process at a time has the file.
    failed: how many of these lines say that theirs could not be answered. lines: how many the file has by now.
    Raises ParameterError if it cannot be written or another process writes it, PacelineError if it is no such file,
    ApiError (507) if the disk is full.
    """

    def __init__(self, option: str, path: Path) -> None:
        self._path = path
        try:
            with full_disk_named():
                self._file = path.open("ab+")
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ParameterError(option, str(path), "a file that no other process is writing") from error
        except (OSError, ValueError) as error:
            raise ParameterError(option, str(path), f"a file in a directory that can be written ({error})") from error
        _sync_directory(path.parent)
        self.done: dict[int, str] = {}
        self.failed = 0
        self._read()
        self.lines = len(self.done)

    def __enter__(self) -> OutputFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with full_disk_named():
            self._file.close()

    def append(self, lines: bytes) -> None:
        """Whole lines, each with its end. Raises ApiError (507) if the disk is full: open the file again to go on."""
        with full_disk_named():
            self._file.write(lines)
            self._file.flush()
            os.fsync(self._file.fileno())
        self.lines += lines.count(b"\n")

    @property
    def size(self) -> int:
        """Bytes."""
        return os.fstat(self._file.fileno()).st_size

    def has(self, line: Line) -> bool:
        """Whether it was answered. Raises ParameterError if another line stood at its place then."""
        digest = self.done.get(line.index)
        if digest is not None and digest != line.digest:
            allowed = f"the file that the answers in {self._path.name} were made for: {line.where} is another one now"
            raise ParameterError("--resume", str(self._path), allowed)
        return digest is not None

    def _read(self) -> None:
        whole = 0
        self._file.seek(0)
        for line in self._file:
            if not line.endswith(b"\n"):
                break
            whole += len(line)
            try:
                document = json.loads(line)
                index, digest = parse_name(document["id"])
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise PacelineError(f"{self._path} holds no answers of a batch: take another file") from error
            self.done[index] = digest
            self.failed += _is_failure(document)
        self._file.truncate(whole)


def _is_failure(document: dict[str, Any]) -> bool:
    """Whether an output line of either form reports an error instead of an answer."""
    response = document.get("response")
    return document.get("error") is not None or (isinstance(response, dict) and response.get("status_code") != 200)


def _sync_directory(path: Path) -> None:
    """So that the file is there after the machine fails, too."""
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
