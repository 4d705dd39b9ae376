"""Runs batches behind all interactive requests. After a restart it resumes unfinished batches."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import logging
import os
import secrets
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from paceline.config.limits import MAX_SECONDS
from paceline.errors import PacelineError
from paceline.server import errors, limits
from paceline.server.batch.answers import BatchContext, is_the_end, read_task, unanswered
from paceline.server.batch.disk import full_disk_named, is_full
from paceline.server.batch.documents import (
    BatchCounts,
    BatchFault,
    BatchFaults,
    BatchObject,
    BatchRequest,
    Status,
    StoredBatch,
)
from paceline.server.batch.lines import BatchLine, CustomIds, Endpoint, InputLine, lines_of
from paceline.server.batch.output import OutputFile
from paceline.server.batch.store import BatchStore, is_open, new_id
from paceline.server.batch.window import LineResult, LineWriter, run_all
from paceline.server.bodies import checked, parsed
from paceline.server.clients import key_name
from paceline.server.context import Context
from paceline.server.quotas import read_key

log = logging.getLogger("paceline.server")
SHARED_OWNER = "anybody"  # owner of all files of a server without keys
BATCH_PRIORITY = 2**31  # added to a line's priority; larger than any that requests can set
_WINDOW = 86400
_LINES_PER_ROW = 2
_KINDS = ("output", "error")
_PAUSE = 0.05  # seconds between two checks for free capacity
_FIRST_WAIT, _LONGEST_WAIT = 1.0, 60.0  # seconds between retries on a full disk; the pause doubles
_GIVE_UP = 86400  # seconds of retries on a full disk, the longest that a batch may take


class BatchRunner:
    """Runs one batch per owner at a time, oldest first. Not thread-safe: call it from the event loop only."""

    def __init__(self, context: Context, store: BatchStore) -> None:
        self._context, self.store = context, store
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def start(self) -> None:
        """Resume all unfinished batches, except those of keys that are no longer valid."""
        keys = self._context.config.api_keys
        owners = {key_name(read_key(key).secret) for key in keys} if keys else {SHARED_OWNER}
        for stored in self.store.batches.values():
            if is_open(stored) and stored.owner in owners:
                self._begin(stored)

    async def stop(self) -> None:
        """Stop and leave batches as they are; the next ``start`` resumes them."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.store.close()

    def _begin(self, stored: StoredBatch) -> None:
        name = stored.document.id
        task = self._tasks[name] = asyncio.create_task(self._run(stored), name=name)
        task.add_done_callback(lambda _: self._tasks.pop(name, None))

    # --- called by routes --------------------------------------------------------

    async def create(self, owner: str, request: BatchRequest) -> BatchObject:
        """Create and start a batch. Raises ApiError."""
        self.store.file(owner, request.input_file_id)
        now = int(time.time())
        document = BatchObject(
            id=new_id("batch_"),
            endpoint=request.endpoint,
            input_file_id=request.input_file_id,
            completion_window=request.completion_window,
            created_at=now,
            expires_at=now + _WINDOW,
            request_counts=BatchCounts(),
            metadata=request.metadata,
        )
        seed = secrets.randbits(63) if request.seed is None or request.seed == -1 else request.seed
        stored = StoredBatch(owner=owner, made=time.time_ns(), seed=seed, document=document)
        await self.store.add_batch(stored)
        self._begin(stored)
        return document

    async def cancel(self, owner: str, name: str) -> BatchObject:
        """Cancel a batch. Finished lines keep their responses. Raises ApiError."""
        stored = self.store.batch(owner, name)
        document = stored.document
        if document.status in ("validating", "in_progress"):
            _set_status(document, "cancelling")
            if (task := self._tasks.get(name)) is not None:
                task.cancel()
            await self.store.save(stored)
        elif document.status not in ("cancelling", "cancelled"):
            raise errors.invalid(f"the batch is {document.status} and cannot be cancelled", "batch_id")
        return document

    # --- the life of a batch -----------------------------------------------------

    async def _run(self, stored: StoredBatch) -> None:
        try:
            with suppress(OSError):  # it is counted again before it runs
                await self._count(stored)  # now, because its turn may come late
            async with self._turns[stored.owner]:
                await self._end(stored)
        except asyncio.CancelledError:
            if stored.document.status != "cancelling":
                raise  # the server shuts down
            await self._end(stored)

    async def _end(self, stored: StoredBatch) -> None:
        """Take the batch through all its steps. An error fails the batch, unless the engine has stopped."""
        try:
            while is_open(stored):
                await self._step_with_space(stored)
        except Exception as error:
            if isinstance(error, errors.ApiError) and is_the_end(error):
                return
            log.exception("batch %s failed", stored.document.id)
            _set_error(stored.document, error)
            _set_status(stored.document, "failed")
            with suppress(OSError, PacelineError):  # the batch stays open on disk, and the next start retries it
                await self._save(stored)

    async def _step_with_space(self, stored: StoredBatch) -> None:
        """Run a step; retry while the disk is full, and show that in the batch's errors meanwhile."""
        pause, since = _FIRST_WAIT, time.monotonic()
        while True:
            try:
                await self._step(stored)
                return
            except errors.ApiError as error:
                if not is_full(error) or time.monotonic() - since > _GIVE_UP:
                    raise
                log.warning("batch %s waits %g s: %s", stored.document.id, pause, error)
                faults = stored.document.errors  # the step may have found some
                _set_error(stored.document, error)
            try:
                await asyncio.sleep(pause)
            finally:
                stored.document.errors = faults
            pause = min(2 * pause, _LONGEST_WAIT)

    async def _step(self, stored: StoredBatch) -> None:
        """Advance to the next status and save it.

        Raises ApiError if the engine stops or the disk is full, OSError for other errors of the disk.
        """
        document = stored.document
        if document.status == "validating":
            await self._validate(stored)
        elif document.status == "in_progress":
            await self._run_pending(stored)
        else:
            await self._finish(stored)
        await self._save(stored)

    async def _save(self, stored: StoredBatch) -> None:
        await self.store.save(stored)
        if not is_open(stored):
            self.store.answers(stored.document.id).unlink(missing_ok=True)

    async def _validate(self, stored: StoredBatch) -> None:
        document = stored.document
        path, limit = self.store.content(document.input_file_id), self._context.config.max_body_bytes
        total, faults = await asyncio.to_thread(_validate_file, path, document.endpoint, limit)
        document.request_counts.total = total
        if faults:
            document.errors = BatchFaults(data=faults)
        _set_status(document, "finalizing" if faults else "in_progress")

    async def _run_pending(self, stored: StoredBatch) -> None:
        """Run the lines without output until all have some or the batch expires.

        Raises ApiError if the engine stops or the disk is full.
        """
        document = stored.document
        await self._wait_until_ready()
        try:
            async with asyncio.timeout(document.expires_at - time.time()):
                await self._run_file(stored)
        except TimeoutError:
            document.expired_at = int(time.time())
        except Exception as error:
            if isinstance(error, errors.ApiError) and (is_the_end(error) or is_full(error)):
                raise
            log.exception("batch %s failed", document.id)
            _set_error(document, error)
        _set_status(document, "finalizing")

    async def _run_file(self, stored: StoredBatch) -> None:
        document, answers = stored.document, self.store.answers(stored.document.id)
        with self.store.content(document.input_file_id).open("rb") as lines, OutputFile("batch_dir", answers) as output:
            await self._count(stored)
            await self._run_lines(stored, lines, output)

    async def _count(self, stored: StoredBatch) -> None:
        """Count the lines with output, including those of an earlier run."""
        answers, counts = self.store.answers(stored.document.id), stored.document.request_counts
        if answers.exists():
            counts.completed, counts.failed = await asyncio.to_thread(_count_output, answers)

    async def _run_lines(self, stored: StoredBatch, lines: BinaryIO, output: OutputFile) -> None:
        context, counts = self._context, stored.document.request_counts
        batch = BatchContext(context, stored.seed, stored.owner, BATCH_PRIORITY, self._wait_for_capacity, MAX_SECONDS)
        read = functools.partial(read_task, batch, CustomIds())

        def on_result(result: LineResult) -> None:
            counts.failed += result.failed
            counts.completed += not result.failed
            if output.size > limits.MAX_FILES_BYTES:
                raise errors.invalid(f"the output exceeds {limits.MAX_FILES_BYTES} bytes", code="too_long")

        await run_all(
            unanswered(lines_of(lines, context.config.max_body_bytes), read, output),
            LineWriter(output.append),
            window=_LINES_PER_ROW * context.dispatcher.limits.answers,
            on_result=on_result,
        )

    async def _wait_until_ready(self) -> None:
        while self._context.service.is_loading:
            await asyncio.sleep(_PAUSE)

    async def _wait_for_capacity(self) -> None:
        """Wait until less than half of the queue is taken: the other half is left to interactive requests."""
        dispatcher, places = self._context.dispatcher, self._context.config.max_waiting // 2
        while dispatcher.admission.inside >= dispatcher.limits.answers + places:
            await asyncio.sleep(_PAUSE)

    async def _finish(self, stored: StoredBatch) -> None:
        """Turn the output into files: one with responses, one with errors."""
        document = stored.document
        if self.store.answers(document.id).exists():
            names = [_file_id(document.id, kind) for kind in _KINDS]
            parts = [self.store.part(name) for name in names]
            try:
                await self._make_files(stored, names, parts)
            finally:
                for part in parts:  # a file without lines, or one that did not fit on the disk
                    part.unlink(missing_ok=True)
        _set_status(document, _final_status(document))

    async def _make_files(self, stored: StoredBatch, names: list[str], parts: list[Path]) -> None:
        """Write the file of responses and the file of errors, each if it has lines. Raises ApiError (507)."""
        document = stored.document
        counts = await asyncio.to_thread(_split_output, self.store.answers(document.id), *parts)
        document.request_counts.completed, document.request_counts.failed = counts
        for count, name, part, kind in zip(counts, names, parts, _KINDS, strict=True):
            if count:
                await self.store.adopt(stored.owner, name, f"{document.id}_{kind}.jsonl", part)
        document.output_file_id, document.error_file_id = (
            name if count else None for count, name in zip(counts, names, strict=True)
        )


def _final_status(document: BatchObject) -> Status:
    if document.cancelling_at is not None:
        return "cancelled"
    if document.errors is not None:
        return "failed"
    return "completed" if document.expired_at is None else "expired"


def _set_status(document: BatchObject, status: Status) -> None:
    document.status = status
    setattr(document, f"{status}_at", int(time.time()))


def _set_error(document: BatchObject, error: Exception) -> None:
    """Set the batch's error: why it failed, or why it waits."""
    if isinstance(error, errors.ApiError) and is_full(error):
        fault = BatchFault(code="disk_full", message=str(error))
    elif isinstance(error, PacelineError):
        fault = BatchFault(code="batch_failed", message=str(error))
    elif isinstance(error, OSError):
        fault = BatchFault(code="batch_failed", message=f"error of the server's disk: {error.strerror}")
    else:
        fault = BatchFault(code="batch_failed", message="internal error; see the server's log")
    document.errors = BatchFaults(data=[fault])


def _validate_file(path: Path, endpoint: Endpoint, limit: int) -> tuple[int, list[BatchFault]]:
    """Validate an input file. Returns its number of lines and the first errors; all lines must use one endpoint."""
    total, names, faults = 0, CustomIds(), list[BatchFault]()
    with path.open("rb") as file:
        for line in lines_of(file, limit):
            total += 1
            if total > limits.MAX_BATCH_LINES or len(faults) >= limits.MAX_FAULTS:
                break
            try:
                _validate_line(line, names, endpoint)
            except errors.ApiError as error:
                code = error.code or "invalid_line"
                faults.append(BatchFault(code=code, message=str(error), param=error.param, line=line.number))
    if not total:
        faults.append(BatchFault(code="empty_file", message="the file has no lines"))
    if total > limits.MAX_BATCH_LINES:
        faults.append(BatchFault(code="too_many_lines", message=f"at most {limits.MAX_BATCH_LINES} lines"))
    return total, faults


def _validate_line(line: InputLine, names: CustomIds, endpoint: Endpoint) -> None:
    """Validate one line. Raises ApiError."""
    request = checked(BatchLine, parsed(line.text()))
    names.take(request.custom_id)
    if request.url != endpoint:
        raise errors.invalid(f"the batch is for {endpoint}", "url", "mismatched_url")


def _file_id(batch: str, kind: str) -> str:
    """Return the file's id, which is the same whenever the batch is finished again."""
    return "file-" + hashlib.blake2b(f"{batch} {kind}".encode(), digest_size=12).hexdigest()


def _is_good(line: bytes) -> bool:
    """Return whether a line that ``ApiTask`` wrote is a response.

    The searched text has bare quotes, which are escaped inside of JSON strings, so no generated text can contain it.
    """
    return b',"response":{"status_code":200,' in line


def _count_output(answers: Path) -> tuple[int, int]:
    """Count responses and errors. A last line that was cut off counts as neither."""
    with answers.open("rb") as file:
        good = [_is_good(line) for line in file if line.endswith(b"\n")]
    return sum(good), len(good) - sum(good)


def _split_output(answers: Path, good: Path, bad: Path) -> tuple[int, int]:
    """Copy responses and errors to two files on disk. Returns the number of each."""
    counts = [0, 0]
    with OutputFile("batch_dir", answers):  # removes a last line that was cut off
        pass
    with full_disk_named(), answers.open("rb") as file, good.open("wb") as output, bad.open("wb") as faults:
        for line in file:
            failed = not _is_good(line)
            counts[failed] += 1
            (faults if failed else output).write(line)
        for copy in (output, faults):
            copy.flush()
            os.fsync(copy.fileno())
    return counts[0], counts[1]
