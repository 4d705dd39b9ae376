"""Files and batches in a directory. What a response has confirmed survives a crash.

DIR/files/ID.data is a file's content. DIR/files/ID.json and DIR/batches/ID.json are documents; each is written
atomically.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from pydantic import ValidationError

from paceline.config.files import lock
from paceline.errors import ParameterError
from paceline.server import errors, limits
from paceline.server.batch.disk import full_disk_named
from paceline.server.batch.documents import OPEN, BatchObject, FileObject, PageQuery, Purpose, StoredBatch, StoredFile

K = TypeVar("K", StoredFile, StoredBatch)
D = TypeVar("D", FileObject, BatchObject)
T = TypeVar("T")
_ID = re.compile(r"(file-|batch_)[0-9a-f]{24}")
_LONGEST_NAME = 255
_PLURALS = {"file": "files", "batch": "batches"}
_PART = ".part"


class BatchStore:
    """One directory, used by one server at a time. Owners see only their own files and batches.

    All writes run in one thread. Call it from the event loop only. Raises ParameterError if the directory cannot be
    used.
    """

    def __init__(self, path: Path) -> None:
        self._files_at, self._batches_at = path / "files", path / "batches"
        try:
            for each in (self._files_at, self._batches_at):
                each.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = (path / "lock").open("w")
        except OSError as error:
            raise ParameterError("batch_dir", str(path), f"a writable directory ({error})") from error
        try:
            lock(self._lock, "batch_dir", path, "a directory that no other server uses")
            self._remove_leftovers()
            self.files = _load(self._files_at, StoredFile)
            self.batches = _load(self._batches_at, StoredBatch)
        except BaseException:
            self._lock.close()
            raise
        self.incoming: dict[str, IncomingFile] = {}
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="batch files")  # a single thread keeps writes in order

    def _remove_leftovers(self) -> None:
        """Remove files that an earlier server left incomplete."""
        for path in [*self._files_at.iterdir(), *self._batches_at.iterdir()]:
            if path.suffix == _PART or (path.suffix == ".data" and not path.with_suffix(".json").exists()):
                path.unlink()
        for path in self._batches_at.glob("*.answers"):
            if not path.with_suffix(".json").exists():
                path.unlink()
        for path in self._files_at.glob("*.json"):  # the content of these was deleted already
            if not path.with_suffix(".data").exists():
                path.unlink()

    def close(self) -> None:
        """Stop the thread and release the directory."""
        self._disk.shutdown()
        self._lock.close()

    async def work(self, work: Callable[[], T]) -> T:
        """Run ``work`` in the disk's thread, in order of the calls. Raises ApiError (507) if the disk is full."""
        with full_disk_named():
            return await asyncio.get_running_loop().run_in_executor(self._disk, work)

    # --- files -------------------------------------------------------------------

    def file(self, owner: str, name: str) -> FileObject:
        """Return a file's document. Raises ApiError (404) if the owner has no such file."""
        return _find(self.files, owner, name, "file").document

    def content(self, name: str) -> Path:
        """Return the path of a stored file's content."""
        assert _ID.fullmatch(name)
        return self._files_at / f"{name}.data"

    @asynccontextmanager
    async def receive_file(self, owner: str) -> AsyncIterator[IncomingFile]:
        """Receive a file piece by piece. It is removed at the end of the block unless ``keep`` was called."""
        self.check_limits(owner, files=1)
        incoming_file = IncomingFile(new_id("file-"), owner, self)
        self.incoming[incoming_file.name] = incoming_file  # counts towards the owner's limits
        try:
            await self.work(incoming_file.open)
            yield incoming_file
        finally:
            del self.incoming[incoming_file.name]
            await self.work(incoming_file.drop)

    async def adopt(self, owner: str, name: str, filename: str, path: Path) -> FileObject:
        """Make an existing file of this directory a stored file. Calling it again after a crash completes the move."""
        size = (path if path.exists() else self.content(name)).stat().st_size
        document = _file(name, filename, size, "batch_output")
        stored = StoredFile(owner=owner, made=time.time_ns(), document=document)

        def move() -> None:
            if path.exists():
                path.replace(self.content(name))
            self.write_document(stored)

        await self.work(move)
        self.files[name] = stored
        return stored.document

    def part(self, name: str) -> Path:
        """Return the path of a temporary file. A restart removes it."""
        return self._files_at / f"{name}{_PART}"

    async def delete(self, owner: str, name: str) -> None:
        """Delete a file. Raises ApiError: 404 if there is none, 400 while a batch reads it."""
        self.file(owner, name)
        if any(stored.document.input_file_id == name for stored in self.batches.values() if is_open(stored)):
            raise errors.invalid("an unfinished batch reads this file; cancel the batch first", "file_id")
        del self.files[name]
        content = self.content(name)

        def remove() -> None:
            content.with_suffix(".json").unlink(missing_ok=True)
            content.unlink(missing_ok=True)

        await self.work(remove)

    def check_limits(self, owner: str, files: int = 0, size: int = 0) -> None:
        """Raise ApiError (400) if the owner's files, including those being received, would exceed the limits."""
        mine = [stored.document.bytes for stored in self.files.values() if stored.owner == owner]
        mine += [each.received for each in self.incoming.values() if each.owner == owner]
        if len(mine) + files > limits.MAX_FILES or sum(mine) + size > limits.MAX_FILES_BYTES:
            message = (
                f"you have {len(mine)} files with {sum(mine)} bytes; the limits are {limits.MAX_FILES} files and "
                f"{limits.MAX_FILES_BYTES} bytes; delete some"
            )
            raise errors.invalid(message, code="too_many_files")

    # --- batches -----------------------------------------------------------------

    def batch(self, owner: str, name: str) -> StoredBatch:
        """Return a stored batch. Raises ApiError (404) if the owner has no such batch."""
        return _find(self.batches, owner, name, "batch")

    def answers(self, batch: str) -> Path:
        """Return the path of an unfinished batch's output."""
        assert _ID.fullmatch(batch)
        return self._batches_at / f"{batch}.answers"

    async def add_batch(self, stored: StoredBatch) -> None:
        """Store a new batch and drop the owner's oldest finished ones beyond the limit.

        Raises ApiError (400) if the owner has too many unfinished batches.
        """
        mine = [each for each in self.batches.values() if each.owner == stored.owner]
        if sum(map(is_open, mine)) >= limits.MAX_OPEN_BATCHES:
            message = f"you have {limits.MAX_OPEN_BATCHES} unfinished batches, the maximum; wait until one ends"
            raise errors.invalid(message, code="too_many_batches")
        ended = [each for each in mine if not is_open(each)]
        self.batches[stored.document.id] = stored
        for old in ended[: max(0, len(mine) + 1 - limits.MAX_BATCHES)]:
            del self.batches[old.document.id]
            path = self._batches_at / f"{old.document.id}.json"
            await self.work(lambda: path.unlink(missing_ok=True))  # noqa: B023 (awaited at once)
        try:
            await self.save(stored)
        except Exception:
            del self.batches[stored.document.id]
            raise

    async def save(self, stored: StoredBatch) -> None:
        """Write the batch's current document to disk."""
        text = stored.model_dump_json().encode()
        await self.work(lambda: _write(self._batches_at / f"{stored.document.id}.json", text))

    def write_document(self, stored: StoredFile) -> None:
        """Write a file's document. Called in the disk's thread."""
        _write(self._files_at / f"{stored.document.id}.json", stored.model_dump_json().encode())


class IncomingFile:
    """A file that is being received. received: bytes so far, which count towards the owner's limit."""

    def __init__(self, name: str, owner: str, store: BatchStore) -> None:
        self.name, self.owner, self.received = name, owner, 0
        self._store, self._path, self._size = store, store.part(name), 0
        self._file: BinaryIO = BytesIO()

    def open(self) -> None:
        """Open the temporary file. Called in the disk's thread, like ``write`` and ``drop``."""
        self._file = self._path.open("wb")

    def write(self, content: bytes) -> None:
        """Append content."""
        self._file.write(content)
        self._size += len(content)

    def drop(self) -> None:
        """Remove the temporary file, unless ``keep`` was called."""
        with suppress(OSError):  # unwritten content is not needed any more
            self._file.close()
        self._path.unlink(missing_ok=True)

    async def take(self, work: Callable[[bytes], None], piece: bytes) -> None:
        """Run ``work`` on a received piece in the disk's thread. Raises ApiError if the owner's limit is reached."""
        self._store.check_limits(self.owner, size=len(piece))
        self.received += len(piece)
        await self._store.work(lambda: work(piece))

    async def keep(self, filename: str) -> FileObject:
        """Make it a stored file and return its document."""
        document = _file(self.name, filename, self._size, "batch")
        stored = StoredFile(owner=self.owner, made=time.time_ns(), document=document)

        def move() -> None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._path.replace(self._store.content(self.name))
            self._store.write_document(stored)

        await self._store.work(move)
        self._store.files[self.name] = stored
        return stored.document


def is_open(stored: StoredBatch) -> bool:
    """Return whether a batch is unfinished."""
    return stored.document.status in OPEN


def page(documents: Sequence[D], query: PageQuery) -> dict[str, Any]:
    """Return the fields of a ``Page`` of the documents. Raises ApiError (400) for an unknown id."""
    names = [each.id for each in documents]
    if query.after is not None and query.after not in names:
        raise errors.invalid("no entry of the list has this id", "after")
    rest = documents[0 if query.after is None else names.index(query.after) + 1 :]
    data = rest[: query.limit]
    first, last = (data[0].id, data[-1].id) if data else (None, None)
    return {"data": data, "first_id": first, "last_id": last, "has_more": len(rest) > query.limit}


def new_id(kind: str) -> str:
    """Return a new id that cannot be predicted."""
    return kind + secrets.token_hex(12)


def _file(name: str, filename: str, size: int, purpose: Purpose) -> FileObject:
    return FileObject(id=name, bytes=size, created_at=int(time.time()), filename=_clean(filename), purpose=purpose)


def _clean(filename: str) -> str:
    """Return the name without control characters and path separators."""
    text = re.sub(r"[\x00-\x1f\x7f/\\]", "_", filename.encode("utf-8", "replace").decode())
    return text[:_LONGEST_NAME].strip(". ") or "file"


def _find(stored: dict[str, K], owner: str, name: str, kind: str) -> K:
    found = stored.get(name)
    if found is None or found.owner != owner:  # the same error: it does not reveal others' files
        shown = errors.shortened(name, limits.MAX_SHOWN)
        message = f"there is no {kind} {shown!r}; GET /v1/{_PLURALS[kind]} lists them"
        raise errors.not_found(message, f"{kind}_id")
    return found


def _write(path: Path, content: bytes) -> None:
    """Write a file atomically and flush it to disk."""
    part = path.with_name(path.name + _PART)
    try:
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _load(path: Path, kind: type[K]) -> dict[str, K]:
    """Load all documents, oldest first. Raises ParameterError for an invalid one."""
    found: list[K] = []
    for file in path.glob("*.json"):
        try:
            found.append(kind.model_validate_json(file.read_bytes()))
        except (OSError, ValidationError) as error:
            raise ParameterError("batch_dir", str(file), "a document that this server wrote") from error
    found.sort(key=lambda stored: (stored.document.created_at, stored.made))
    return {stored.document.id: stored for stored in found}
