"""Runs one line of a batch file: the same response or error as over HTTP."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from pydantic_core import to_json

from paceline.errors import PacelineError
from paceline.server import errors
from paceline.server.batch.lines import BatchLine, CustomIds, Endpoint, InputLine, seed_of
from paceline.server.batch.output import OutputFile
from paceline.server.batch.window import LineResult, LineTask
from paceline.server.bodies import checked, parsed
from paceline.server.chat import ChatJob
from paceline.server.chat_protocol import ChatRequest
from paceline.server.completions import CompletionJob
from paceline.server.context import Context
from paceline.server.limits import MAX_LABEL
from paceline.server.protocol import CompletionRequest, GenerationRequest

log = logging.getLogger("paceline.server")
T = TypeVar("T")
_QUEUE_FULL = 429


async def _at_once() -> None:
    """Return at once: the default of ``BatchContext.wait_for_capacity``."""


@dataclass(frozen=True)
class BatchContext:
    """Values that all lines of a batch share.

    seed: base of the seeds of lines without one; see ``seed_of``. client: identity for fair queueing. priority: added
    to each line's own; lower values run first. wait_for_capacity: awaited before each line
    starts. timeout: seconds for lines without one (None: the server's default).
    """

    context: Context
    seed: int
    client: str = "batch"
    priority: int = 0
    wait_for_capacity: Callable[[], Awaitable[None]] = _at_once
    timeout: float | None = None


@dataclass(frozen=True)
class RefusedLine:
    """A line that is not a valid request. result: the output that says why."""

    result: LineResult

    async def run(self) -> LineResult:
        return self.result


@dataclass(frozen=True)
class ApiTask:
    """A line in OpenAI's format."""

    batch: BatchContext
    line: InputLine
    request: BatchLine

    async def run(self) -> LineResult:
        try:
            request_id, reply = await answered(self._answer)
        except errors.ApiError as error:
            if is_the_end(error):
                raise
            request_id = self.batch.context.new_id("req")
            return LineResult(self._document(error.status, request_id, to_json(error.body)), failed=True)
        return LineResult(self._document(200, request_id, reply), failed=False)

    async def _answer(self) -> tuple[str, bytes]:
        """Return the response's id and the response as JSON. Raises ApiError."""
        context, (kind, prepare) = self.batch.context, _PREPARE[self.request.url]
        await self.batch.wait_for_capacity()
        body = await context.bodies.run(checked, kind, self.request.body)
        self._apply_defaults(body)
        job = await prepare(context, body, self.batch.client, of_batch=True)
        return job.id, await job.answer()

    def _apply_defaults(self, body: GenerationRequest) -> None:
        """Apply the batch's defaults to a line's request. Raises ApiError."""
        if body.stream:
            raise errors.invalid("lines of a batch cannot be streamed; remove stream", "stream")
        if body.seed in (None, -1):
            body.seed = seed_of(self.batch.seed, f"id {self.request.custom_id}")
        if body.timeout is None:
            body.timeout = self.batch.timeout
        body.priority = (body.priority or 0) + self.batch.priority

    def _document(self, status: int, request_id: str, body: bytes) -> bytes:
        fields = {"id": self.line.name, "custom_id": self.request.custom_id}
        response = b'{"status_code":%d,"request_id":%s,"body":%s}' % (status, to_json(request_id), body)
        return b'%s,"response":%s,"error":null}' % (to_json(fields)[:-1], response)


_PREPARE: Mapping[Endpoint, tuple[type[GenerationRequest], Callable[..., Awaitable[CompletionJob | ChatJob]]]] = {
    "/v1/completions": (CompletionRequest, CompletionJob.prepare),
    "/v1/chat/completions": (ChatRequest, ChatJob.prepare),
}
"""The body of each kind of line, and what prepares it for the engine."""


def read_task(batch: BatchContext, names: CustomIds, line: InputLine, data: object) -> ApiTask:
    """Validate one parsed line. Raises ApiError."""
    request = checked(BatchLine, data)
    names.take(request.custom_id)
    return ApiTask(batch, line, request)


async def unanswered(
    lines: Iterator[InputLine], read: Callable[[InputLine, object], LineTask], output: OutputFile
) -> AsyncIterator[LineTask]:
    """Yield a task for each line that has no output yet.

    Lines that have output are validated too, because ``read`` checks that ids are unique.
    """

    def following() -> tuple[InputLine, LineTask] | None:
        line = next(lines, None)
        return None if line is None else (line, read_line(read, line))

    while (found := await _in_daemon_thread(following)) is not None:
        line, task = found
        if not output.has(line):
            yield task


async def _in_daemon_thread(work: Callable[[], T]) -> T:
    """Run ``work`` in a thread that nothing waits for: an interrupt does not wait for a terminal's next line."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def finish(set_outcome: Callable[[], None]) -> None:
        if not done.cancelled():
            set_outcome()

    def run() -> None:
        try:
            set_outcome = partial(done.set_result, work())
        except BaseException as error:  # noqa: BLE001  (raised again where it is awaited)
            set_outcome = partial(done.set_exception, error)
        with suppress(RuntimeError):  # the loop has been closed
            loop.call_soon_threadsafe(finish, set_outcome)

    threading.Thread(target=run, daemon=True).start()
    return await done


def read_line(read: Callable[[InputLine, object], LineTask], line: InputLine) -> LineTask:
    """Return a task for the line, or ``RefusedLine`` if it is not a valid request."""
    data = None
    try:
        data = parsed(line.text())
        return read(line, data)
    except errors.ApiError as error:
        given = data.get("custom_id") if isinstance(data, dict) else None
        custom_id = errors.shortened(given, MAX_LABEL) if isinstance(given, str) else None
        fault = {"code": error.code or "invalid_line", "message": f"{line.where}: {error}", "param": error.param}
        document = {"id": line.name, "custom_id": custom_id, "response": None, "error": fault}
        return RefusedLine(LineResult(to_json(document), failed=True))


def is_the_end(error: errors.ApiError) -> bool:
    """Return whether the error means that the engine stops: the batch ends, and the line is not at fault."""
    return error.status == 503


async def answered(work: Callable[[], Awaitable[T]]) -> T:
    """Await ``work()`` and return its result; retry while the queue is full. Raises ApiError for any other error."""
    while True:
        try:
            return await work()
        except PacelineError as error:
            refusal = errors.from_paceline(error)
            if refusal.status != _QUEUE_FULL:
                raise refusal from error
            await asyncio.sleep(refusal.retry_after or 1)
        except Exception as error:
            log.exception("a batch line failed")
            raise errors.ApiError(500, "server_error", "internal error; see the log") from error
