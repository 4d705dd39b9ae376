"""The output file of a batch: each line is written once, even if the process is killed at any time."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any

from paceline.config.files import lock
from paceline.errors import PacelineError, ParameterError
from paceline.server.batch.disk import full_disk_named
from paceline.server.batch.lines import InputLine, parse_name


class OutputFile:
    """Appends whole lines; they are on disk when ``append`` returns. ``with`` closes the file.

    done: digest of each input line that has output, by index, as found when the file is opened. A last line that was
    cut off by a crash is removed. failed: how many of these lines are errors. lines: lines in the file now. The file is
    locked against other processes. Raises ParameterError if it cannot be written or is locked, PacelineError if it
    holds something else, ApiError (507) if the disk is full.
    """

    def __init__(self, option: str, path: Path) -> None:
        self._path = path
        try:
            with full_disk_named():
                self._file = path.open("ab+")
        except (OSError, ValueError) as error:
            raise ParameterError(option, str(path), f"a file in a writable directory ({error})") from error
        self.done: dict[int, str] = {}
        self.failed = 0
        try:
            lock(self._file, option, path, "a file that no other process writes")
            _sync_directory(path.parent)
            self._read()
        except BaseException:
            self._file.close()
            raise
        self.lines = len(self.done)

    def __enter__(self) -> OutputFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with full_disk_named():
            self._file.close()

    def append(self, lines: bytes) -> None:
        """Append lines, each with its line break.

        Raises ApiError (507) if the disk is full; reopen the file to continue.
        """
        with full_disk_named():
            self._file.write(lines)
            self._file.flush()
            os.fsync(self._file.fileno())
        self.lines += lines.count(b"\n")

    @property
    def size(self) -> int:
        """Size of the file in bytes."""
        return os.fstat(self._file.fileno()).st_size

    def has(self, line: InputLine) -> bool:
        """Return whether the line has output. Raises ParameterError if that output is for another line."""
        digest = self.done.get(line.index)
        if digest is not None and digest != line.digest:
            allowed = f"the input file that {self._path.name} was made for: {line.where} has changed"
            raise ParameterError("--resume", str(self._path), allowed)
        return digest is not None

    def _read(self) -> None:
        complete_bytes = 0
        self._file.seek(0)
        for line in self._file:
            if not line.endswith(b"\n"):
                break
            complete_bytes += len(line)
            try:
                document = json.loads(line)
                index, digest = parse_name(document["id"])
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise PacelineError(f"{self._path} is not the output of a batch: choose another file") from error
            self.done[index] = digest
            self.failed += _is_failure(document)
        self._file.truncate(complete_bytes)


def _is_failure(document: dict[str, Any]) -> bool:
    """Return whether an output line of either format reports an error."""
    response = document.get("response")
    return document.get("error") is not None or (isinstance(response, dict) and response.get("status_code") != 200)


def _sync_directory(path: Path) -> None:
    """Flush the directory, so that a new file survives a crash of the machine."""
    if not hasattr(os, "O_DIRECTORY"):  # Windows opens no directories
        return
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
