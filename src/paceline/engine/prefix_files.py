"""Cached prefixes in a directory: those that gave way in memory, and at the end of an engine all of them.

A file has the tokens, keys, values and recurrent states of one prefix. It is found again by its tokens and scope, in
this run or a later one, and only by an engine with the same fingerprint: the models, their precision and the kernels.
Names are random, and scopes are hashed. Files are read and written in threads, so that rounds go on.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import stat
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from threading import Lock

import torch
from torch import Tensor

from paceline.engine.prefixes import PrefixCounts, Scope, common_prefix_length, reusable_tokens
from paceline.engine.private_files import check_directory, content_of, opened, remove, store
from paceline.engine.tensor_file import MAX_HEADER, DamagedFileError, Header, decoded, encoded, read_header

log = logging.getLogger("paceline")

_VERSION = 1  # of the tensors' names and meaning
_SUFFIX, _UNFINISHED = ".prefix", ".part"
_PENDING_BYTES = 1 << 28  # copies of prefixes that wait to be written; beyond, others are dropped without a file
_STALE = 3600.0  # seconds after which an unfinished file is one of a process that has ended
_TOKENS, _POSITIONS = "tokens", "0.positions"  # names of tensors that are read before the others


@dataclass(frozen=True, eq=False)
class PrefixFile:
    """A file of this engine's kind.

    positions: of the recurrent states in it: that after the first [0] tokens, of which up to [1] more can be applied,
        and saved ones; empty without recurrent layers.
    """

    name: str
    scope: str
    tokens: array[int]
    positions: Sequence[int]
    bytes: int

    def reusable(self, tokens: int) -> int:
        """Return how many of the first ``tokens`` tokens another text can start from."""
        if not self.positions:
            return tokens
        base, count, *saved = self.positions
        return min(tokens, base + count) if tokens >= base else max((at for at in saved if at <= tokens), default=0)


@dataclass(frozen=True)
class FileInReading:
    """A file that is read for a prompt. length: tokens of the prompt to take from it.

    tensors: its content once it is read; None if it is gone, or was damaged and is removed.
    """

    file: PrefixFile
    length: int
    tensors: Future[dict[str, Tensor] | None]


class PrefixFiles:
    """The directory of one engine's prefixes.

    path: is made if there is none, for the owner alone. limit: bytes of all files in it, also of other engines; those
        that were used longest ago are removed. fingerprint: what keys and values depend on besides tokens. largest:
        bytes of the largest file that this engine can have written.
    counts: what became of files and prefixes.

    Raises ParameterError if the directory cannot be used, or others may write to it.
    """

    def __init__(self, path: Path, limit: int, fingerprint: str, largest: int) -> None:
        self._path, self._limit, self._largest = path, limit, largest + MAX_HEADER
        self._fingerprint = hashlib.sha256(f"{_VERSION} {fingerprint}".encode()).hexdigest()
        self.counts = PrefixCounts()
        self._lock, self._pending = Lock(), 0
        self._files: dict[str, PrefixFile] = {}
        self._reading: dict[str, Future[dict[str, Tensor] | None]] = {}
        self._reader, self._writer = (ThreadPoolExecutor(1, f"prefix {kind}") for kind in ("reader", "writer"))
        check_directory("prefix_dir", path)
        for file, _ in sorted(self._stats(), key=lambda each: each[1].st_mtime):
            self._index(file)

    @property
    def bytes(self) -> int:
        """Bytes of the files that this engine can read."""
        with self._lock:
            return sum(file.bytes for file in self._files.values())

    def __len__(self) -> int:
        return len(self._files)

    def describe(self) -> str:
        """Say how many files there are, and what became of them."""
        counts = self.counts
        return (
            f"{len(self)} in files ({self.bytes / 2**30:.2f} GiB; {counts.written} written, {counts.read} read back, "
            f"{counts.refused} refused)"
        )

    # --- finding and reading ------------------------------------------------------------------------------------------

    def find(self, prompt: Sequence[int], scope: Scope) -> tuple[PrefixFile | None, int]:
        """Return the file with the longest reusable prefix of the prompt, and its tokens; (None, 0) if none has any."""
        if scope.copies is None:
            return None, 0
        text, hashed = array("i", prompt), _hashed(scope.copies)
        with self._lock:
            files = [file for file in self._files.values() if file.scope == hashed]
        lengths = [file.reusable(reusable_tokens(file.tokens, text, scope.least)) for file in files]
        best = max(range(len(files)), key=lengths.__getitem__, default=-1)
        return (files[best], lengths[best]) if best >= 0 and lengths[best] > 0 else (None, 0)

    def begin_read(self, file: PrefixFile, length: int) -> FileInReading:
        """Read a file in another thread, for a prompt that begins with ``length`` of its tokens."""
        content = self._reading.get(file.name)
        if content is None:  # samples of one request share it
            content = self._reading[file.name] = self._reader.submit(self._read, file)
            content.add_done_callback(lambda _: self._reading.pop(file.name, None))
        return FileInReading(file, length, content)

    def _read(self, file: PrefixFile) -> dict[str, Tensor] | None:
        path = self._path / file.name
        try:
            data = content_of(path, self._largest)
            header, tensors = decoded(data)
            if header.metadata.get("fingerprint") != self._fingerprint or header.metadata.get("scope") != file.scope:
                raise DamagedFileError("it is another file")
            if tensors[_TOKENS].tolist() != file.tokens.tolist():
                raise DamagedFileError("it has other tokens")
        except FileNotFoundError:  # another process has removed it
            self._forget(file.name)
            return None
        except Exception as error:  # noqa: BLE001 (a hostile file may fail in any way: its prompt is read instead)
            self.refuse(file, str(error))
            return None
        with suppress(OSError):
            os.utime(path)  # the least recently used go first
        return tensors

    def refuse(self, file: PrefixFile, why: str) -> None:
        """Remove a file that cannot be used."""
        self._forget(file.name)
        self._remove_damaged(self._path / file.name, why)

    # --- writing ------------------------------------------------------------------------------------------------------

    def begin_write(self, tokens: Sequence[int], scope: Scope, copy: Callable[[], dict[str, Tensor]]) -> None:
        """Write a prefix in another thread, unless too many wait to be written.

        scope: one that keeps prefixes. copy: returns a copy of its tensors; called now, if it is called.
        """
        with self._lock:
            if self._pending > _PENDING_BYTES:
                return
        tensors = copy()
        size = sum(tensor.nbytes for tensor in tensors.values())
        with self._lock:
            self._pending += size

        def write() -> None:
            try:
                self.write(tokens, scope, tensors)
            finally:
                with self._lock:
                    self._pending -= size

        self._writer.submit(write)

    def write(self, tokens: Sequence[int], scope: Scope, tensors: Mapping[str, Tensor], age: float = 0.0) -> None:
        """Write a prefix. A file with its beginning is replaced by it; where one has all of it, nothing is written.

        age: seconds since it was last used. An error of the system is logged.
        """
        assert scope.kept is not None
        text, hashed = array("i", tokens), _hashed(scope.kept)
        positions = tensors[_POSITIONS].tolist() if _POSITIONS in tensors else []
        with self._lock:
            related = [
                file for file in self._files.values() if file.scope == hashed and _is_one_text(file.tokens, text)
            ]
        if any(len(file.tokens) >= len(text) for file in related):
            return
        whole = {**tensors, _TOKENS: torch.tensor(text, dtype=torch.int32)}
        parts = encoded(whole, {"fingerprint": self._fingerprint, "scope": hashed})
        size, name = sum(part.nbytes for part in parts), secrets.token_hex(16) + _SUFFIX
        if size > self._limit:
            return
        try:
            self._make_room(size)
            store(self._path, name, parts, time.time() - age)
        except OSError as error:
            log.warning("a prefix could not be written to %s: %s", self._path, error)
            return
        with self._lock:
            self._files[name] = PrefixFile(name, hashed, text, positions, size)
            self.counts.written += 1
        for file in related:
            self._forget(file.name)
            remove(self._path / file.name)

    def _make_room(self, size: int) -> None:
        """Remove the files used longest ago until ``size`` bytes more fit."""
        files = sorted((found.st_mtime, found.st_size, path) for path, found in self._stats())
        total = sum(each for _, each, _ in files)
        for _, each, path in files:
            if total + size <= self._limit:
                return
            self._forget(path.name)
            remove(path)
            total -= each

    def close(self) -> None:
        """End the threads, once they have written what waits."""
        self._reader.shutdown(cancel_futures=True)
        self._writer.shutdown()

    # --- the directory ------------------------------------------------------------------------------------------------

    def _stats(self) -> Iterator[tuple[Path, os.stat_result]]:
        """Yield the prefix files of all engines. Unfinished ones of processes that have ended are removed."""
        for entry in os.scandir(self._path):
            with suppress(FileNotFoundError):
                found = entry.stat(follow_symlinks=False)
                if entry.name.endswith(_SUFFIX) and stat.S_ISREG(found.st_mode):
                    yield Path(entry.path), found
                elif entry.name.endswith(_UNFINISHED) and time.time() - found.st_mtime > _STALE:
                    remove(Path(entry.path))

    def _index(self, path: Path) -> None:
        """Note what a file has, if this engine can read it; remove it if it is damaged."""
        try:
            with opened(path) as file:
                header = read_header(file.read(MAX_HEADER + 8))
                if header.metadata.get("fingerprint") != self._fingerprint:
                    return
                size = os.fstat(file.fileno()).st_size
                if size > self._largest:  # of an engine with longer rows
                    return
                if size != header.size + header.data_bytes:
                    raise DamagedFileError("its size is wrong")
                tokens = array("i", _numbers(file, header, _TOKENS, torch.int32))
                positions = _numbers(file, header, _POSITIONS, torch.int64) if _POSITIONS in header.places else []
            if positions and (min(positions) < 0 or sum(positions[:2]) != len(tokens)):
                raise DamagedFileError("its states are of another text")
            self._files[path.name] = PrefixFile(path.name, header.metadata["scope"], tokens, positions, size)
        except FileNotFoundError:
            return
        except (OSError, DamagedFileError, KeyError) as error:
            self._remove_damaged(path, str(error))

    def _remove_damaged(self, path: Path, why: str) -> None:
        log.warning("the prefix file %s is not used, and removed: %s", path, why)
        self.counts.refused += 1
        remove(path)

    def _forget(self, name: str) -> None:
        with self._lock:
            self._files.pop(name, None)


def _numbers(file: BufferedReader, header: Header, name: str, dtype: torch.dtype) -> list[int]:
    """Return the whole numbers of a tensor. Raises DamagedFileError, or KeyError if there is no such tensor."""
    place = header.places[name]
    if place.dtype != dtype or len(place.shape) != 1:
        raise DamagedFileError(f"its {name} are no whole numbers")
    file.seek(header.size + place.start)
    return array("i" if dtype == torch.int32 else "q", file.read(place.stop - place.start)).tolist()


def _is_one_text(one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether one text begins with the other."""
    shorter = min(len(one), len(other))
    return common_prefix_length(one, other, shorter) == shorter


def _hashed(scope: str) -> str:
    return hashlib.sha256(scope.encode("utf-8", "surrogatepass")).hexdigest()
