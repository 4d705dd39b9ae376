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
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from paceline.errors import ParameterError
from paceline.server import errors, limits
from paceline.server.batch.documents import OPEN, BatchObject, FileObject, KeptBatch, KeptFile, Purpose

K = TypeVar("K", KeptFile, KeptBatch)
D = TypeVar("D", FileObject, BatchObject)
T = TypeVar("T")
_ID = re.compile(r"(file-|batch_)[0-9a-f]{24}")
_LONGEST_NAME = 255
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
        """On the disk, after everything that was asked for before."""
        return await asyncio.get_running_loop().run_in_executor(self._disk, work)

    # --- files -------------------------------------------------------------------

    def file(self, owner: str, name: str) -> FileObject:
        """Raises ApiError (404) if he has no such file."""
        return _found(self.files, owner, name, "file").document

    def content(self, name: str) -> Path:
        """Where a file's content is. name: of one that is kept."""
        assert _ID.fullmatch(name)
        return self._files_at / f"{name}.data"

    async def add(self, owner: str, filename: str, content: bytes) -> FileObject:
        """An upload. Raises ApiError (400) if its owner has too many, or too large ones."""
        self._check_room(owner, len(content))
        kept = KeptFile(owner=owner, document=_file(_new_id("file-"), filename, len(content), "batch"))
        self.files[kept.document.id] = kept  # it counts from now on
        try:
            await self.work(lambda: self._write_file(kept, content))
        except BaseException:
            del self.files[kept.document.id]
            raise
        return kept.document

    def _write_file(self, kept: KeptFile, content: bytes) -> None:
        _write(self.content(kept.document.id), content)
        self._write_document(kept)

    async def adopt(self, owner: str, name: str, filename: str, path: Path) -> FileObject:
        """A file that lies beside the others becomes one of them, also if that was begun before."""
        size = (path if path.exists() else self.content(name)).stat().st_size
        kept = KeptFile(owner=owner, document=_file(name, filename, size, "batch_output"))

        def move() -> None:
            if path.exists():
                path.replace(self.content(name))
            self._write_document(kept)

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

    def _check_room(self, owner: str, size: int) -> None:
        mine = [kept.document.bytes for kept in self.files.values() if kept.owner == owner]
        if len(mine) >= limits.MAX_FILES or sum(mine) + size > limits.MAX_FILES_BYTES:
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
        await self.save(kept)

    async def save(self, kept: KeptBatch) -> None:
        """As it is now."""
        text = kept.model_dump_json().encode()
        await self.work(lambda: _write(self._batches_at / f"{kept.document.id}.json", text))

    def _write_document(self, kept: KeptFile) -> None:
        _write(self._files_at / f"{kept.document.id}.json", kept.model_dump_json().encode())


def is_open(kept: KeptBatch) -> bool:
    """Whether a batch has not ended."""
    return kept.document.status in OPEN


def new_batch_id() -> str:
    """Nobody can guess it."""
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
        message = f"there is no {kind} {errors.shortened(name, limits.MAX_SHOWN)!r}"
        raise errors.not_found(message, f"{kind}_id")
    return found


def _write(path: Path, content: bytes) -> None:
    """Whole and on disk, or as it was."""
    part = path.with_name(path.name + _PART)
    with part.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def _loaded(path: Path, kind: type[K]) -> dict[str, K]:
    """The oldest first. Raises ParameterError for a document that is none."""
    found: list[K] = []
    for file in path.glob("*.json"):
        try:
            found.append(kind.model_validate_json(file.read_bytes()))
        except (OSError, ValidationError) as error:
            raise ParameterError("batch_dir", str(file), "a document that this server wrote") from error
    return {kept.document.id: kept for kept in sorted(found, key=lambda kept: kept.document.created_at)}
