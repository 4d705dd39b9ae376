"""Files and batches in a directory: what was said to be kept is there after any end of the process.

DIR/files/ID.data is a file's content, DIR/files/ID.json and DIR/batches/ID.json are documents, each written whole.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from io import BytesIO
from pathlib import Path
from typing import BinaryIO, TypeVar

from pydantic import ValidationError

from paceline.errors import ParameterError
from paceline.server import errors, limits
from paceline.server.batch.disk import full_disk_named
from paceline.server.batch.documents import OPEN, BatchObject, FileObject, KeptBatch, KeptFile, Purpose

K = TypeVar("K", KeptFile, KeptBatch)
D = TypeVar("D", FileObject, BatchObject)
T = TypeVar("T")
_ID = re.compile(r"(file-|batch_)[0-9a-f]{24}")
_LONGEST_NAME = 255
_PLURALS = {"file": "files", "batch": "batches"}
_PART = ".part"


class Store:
    """One directory, for one server at a time; an owner sees his own. For the event loop: a thread touches the disk.

    Raises ParameterError if the directory cannot be used.
    """

    def __init__(self, path: Path) -> None:
        self._files_at, self._batches_at = path / "files", path / "batches"
        try:
            for each in (self._files_at, self._batches_at):
                each.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = (path / "lock").open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ParameterError("batch_dir", str(path), "a directory that no other server uses") from error
        except OSError as error:
            raise ParameterError("batch_dir", str(path), f"a directory that can be written ({error})") from error
        self._disk = ThreadPoolExecutor(
            1, thread_name_prefix="batch files"
        )  # one: documents are written in their order
        self._tidy()
        self.arrivals: dict[str, Arrival] = {}
        self.files = _loaded(self._files_at, KeptFile)
        self.batches = _loaded(self._batches_at, KeptBatch)

    def _tidy(self) -> None:
        """What was begun and is not part of anything."""
        for path in [*self._files_at.iterdir(), *self._batches_at.iterdir()]:
            if path.suffix == _PART or (path.suffix == ".data" and not path.with_suffix(".json").exists()):
                path.unlink()
        for path in self._files_at.glob("*.json"):  # it was being deleted
            if not path.with_suffix(".data").exists():
                path.unlink()

    def close(self) -> None:
        """Another server may have the directory."""
        self._disk.shutdown()
        self._lock.close()

    async def work(self, work: Callable[[], T]) -> T:
        """On the disk, after everything that was asked for before. Raises ApiError (507) if that is full."""
        with full_disk_named():
            return await asyncio.get_running_loop().run_in_executor(self._disk, work)

    # --- files -------------------------------------------------------------------

    def file(self, owner: str, name: str) -> FileObject:
        """Raises ApiError (404) if he has no such file."""
        return _found(self.files, owner, name, "file").document

    def content(self, name: str) -> Path:
        """Where a file's content is. name: of one that is kept."""
        assert _ID.fullmatch(name)
        return self._files_at / f"{name}.data"

    @asynccontextmanager
    async def arriving(self, owner: str) -> AsyncIterator[Arrival]:
        """A file that comes piece by piece. What has not been kept at the end of the block is gone."""
        self.check_room(owner, files=1)
        arrival = Arrival(_new_id("file-"), owner, self)
        self.arrivals[arrival.name] = arrival  # it counts from now on
        try:
            await self.work(arrival.open)
            yield arrival
        finally:
            del self.arrivals[arrival.name]
            await self.work(arrival.drop)

    async def adopt(self, owner: str, name: str, filename: str, path: Path) -> FileObject:
        """A file that lies beside the others becomes one of them, also if that was begun before."""
        size = (path if path.exists() else self.content(name)).stat().st_size
        kept = KeptFile(owner=owner, document=_file(name, filename, size, "batch_output"))

        def move() -> None:
            if path.exists():
                path.replace(self.content(name))
            self.write_document(kept)

        await self.work(move)
        self.files[name] = kept
        return kept.document

    def part(self, name: str) -> Path:
        """For a file that is being made; it is gone after a restart."""
        return self._files_at / f"{name}{_PART}"

    async def delete(self, owner: str, name: str) -> None:
        """Raises ApiError: 404, or 400 while a batch reads it."""
        self.file(owner, name)
        if any(kept.document.input_file_id == name for kept in self.batches.values() if is_open(kept)):
            raise errors.invalid("a batch that has not ended reads this file; cancel it first", "file_id")
        del self.files[name]
        content = self.content(name)

        def remove() -> None:
            content.with_suffix(".json").unlink(missing_ok=True)
            content.unlink(missing_ok=True)

        await self.work(remove)

    def check_room(self, owner: str, files: int = 0, size: int = 0) -> None:
        """Raise ApiError (400) if an owner has too many files, or too large ones; those that arrive count."""
        mine = [kept.document.bytes for kept in self.files.values() if kept.owner == owner]
        mine += [each.received for each in self.arrivals.values() if each.owner == owner]
        if len(mine) + files > limits.MAX_FILES or sum(mine) + size > limits.MAX_FILES_BYTES:
            message = (
                f"{len(mine)} files with {sum(mine)} bytes are kept, and {limits.MAX_FILES} with "
                f"{limits.MAX_FILES_BYTES} are the most; delete some"
            )
            raise errors.invalid(message, code="too_many_files")

    # --- batches -----------------------------------------------------------------

    def batch(self, owner: str, name: str) -> KeptBatch:
        """Raises ApiError (404) if he has no such batch."""
        return _found(self.batches, owner, name, "batch")

    def answers(self, batch: str) -> Path:
        """Where a batch's answers are until it has ended."""
        assert _ID.fullmatch(batch)
        return self._batches_at / f"{batch}.answers"

    async def add_batch(self, kept: KeptBatch) -> None:
        """Raises ApiError (400) if its owner has too many that have not ended. The oldest that have ended make room."""
        mine = [each for each in self.batches.values() if each.owner == kept.owner]
        if sum(map(is_open, mine)) >= limits.MAX_OPEN_BATCHES:
            message = f"{limits.MAX_OPEN_BATCHES} batches have not ended, as many as there may be; wait for one"
            raise errors.invalid(message, code="too_many_batches")
        ended = [each for each in mine if not is_open(each)]
        self.batches[kept.document.id] = kept
        for old in ended[: max(0, len(mine) + 1 - limits.MAX_BATCHES)]:
            del self.batches[old.document.id]
            path = self._batches_at / f"{old.document.id}.json"
            await self.work(lambda: path.unlink(missing_ok=True))  # noqa: B023 (awaited at once)
        try:
            await self.save(kept)
        except Exception:
            del self.batches[kept.document.id]
            raise

    async def save(self, kept: KeptBatch) -> None:
        """As it is now."""
        text = kept.model_dump_json().encode()
        await self.work(lambda: _write(self._batches_at / f"{kept.document.id}.json", text))

    def write_document(self, kept: KeptFile) -> None:
        """On the disk's thread."""
        _write(self._files_at / f"{kept.document.id}.json", kept.model_dump_json().encode())


class Arrival:
    """A file that is being received. received: bytes so far, which its owner has no room for twice."""

    def __init__(self, name: str, owner: str, store: Store) -> None:
        self.name, self.owner, self.received = name, owner, 0
        self._store, self._path, self._size = store, store.part(name), 0
        self._file: BinaryIO = BytesIO()

    def open(self) -> None:
        """On the disk's thread, as ``write`` and ``drop``."""
        self._file = self._path.open("wb")

    def write(self, content: bytes) -> None:
        """Some of its content."""
        self._file.write(content)
        self._size += len(content)

    def drop(self) -> None:
        """Nothing is left, unless it was kept."""
        with suppress(OSError):  # what could not be written is not wanted any more
            self._file.close()
        self._path.unlink(missing_ok=True)

    async def take(self, work: Callable[[bytes], None], piece: bytes) -> None:
        """``work`` on what has just arrived, on the disk's thread. Raises ApiError if there is no room for it."""
        self._store.check_room(self.owner, size=len(piece))
        self.received += len(piece)
        await self._store.work(lambda: work(piece))

    async def keep(self, filename: str) -> FileObject:
        """It is one of the files."""
        kept = KeptFile(owner=self.owner, document=_file(self.name, filename, self._size, "batch"))

        def move() -> None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._path.replace(self._store.content(self.name))
            self._store.write_document(kept)

        await self._store.work(move)
        self._store.files[self.name] = kept
        return kept.document


def is_open(kept: KeptBatch) -> bool:
    """Whether a batch has not ended."""
    return kept.document.status in OPEN


def new_batch_id() -> str:
    """Nobody can draft token it."""
    return _new_id("batch_")


def page(documents: Sequence[D], limit: int, after: str | None) -> tuple[list[D], bool]:
    """Those after one of them, and whether there are more. Raises ApiError (400) if it is not there."""
    names = [each.id for each in documents]
    if after is not None and after not in names:
        raise errors.invalid("it is not in the list", "after")
    rest = documents[0 if after is None else names.index(after) + 1 :]
    return list(rest[:limit]), len(rest) > limit


def _new_id(kind: str) -> str:
    return kind + secrets.token_hex(12)


def _file(name: str, filename: str, size: int, purpose: Purpose) -> FileObject:
    return FileObject(id=name, bytes=size, created_at=int(time.time()), filename=_clean(filename), purpose=purpose)


def _clean(filename: str) -> str:
    """A label: it names no place on any disk."""
    text = re.sub(r"[\x00-\x1f\x7f/\\]", "_", filename.encode("utf-8", "replace").decode())
    return text[:_LONGEST_NAME].strip(". ") or "file"


def _found(kept: dict[str, K], owner: str, name: str, kind: str) -> K:
    found = kept.get(name)
    if found is None or found.owner != owner:  # the same words: nobody learns what others have
        shown = errors.shortened(name, limits.MAX_SHOWN)
        message = f"there is no {kind} {shown!r}; GET /v1/{_PLURALS[kind]} says which there are"
        raise errors.not_found(message, f"{kind}_id")
    return found


def _write(path: Path, content: bytes) -> None:
    """Whole and on disk, or as it was."""
    part = path.with_name(path.name + _PART)
    try:
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _loaded(path: Path, kind: type[K]) -> dict[str, K]:
    """The oldest first. Raises ParameterError for a document that is none."""
    found: list[K] = []
    for file in path.glob("*.json"):
        try:
            found.append(kind.model_validate_json(file.read_bytes()))
        except (OSError, ValidationError) as error:
            raise ParameterError("batch_dir", str(file), "a document that this server wrote") from error
    return {kept.document.id: kept for kept in sorted(found, key=lambda kept: kept.document.created_at)}
