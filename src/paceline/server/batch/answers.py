"""What a line comes to: the same answer as over HTTP, or the same refusal."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from pydantic_core import to_json

from paceline.errors import PacelineError
from paceline.server import errors
from paceline.server.batch.lines import BatchLine, Line, Names, seed_of
from paceline.server.batch.output import OutputFile
from paceline.server.batch.window import Chore, Outcome
from paceline.server.bodies import checked, parsed
from paceline.server.chat import ChatJob
from paceline.server.completions import CompletionJob
from paceline.server.context import Context
from paceline.server.limits import MAX_LABEL
from paceline.server.protocol import ChatRequest, CompletionRequest, GenerationRequest

log = logging.getLogger("paceline.server")
T = TypeVar("T")
R = TypeVar("R", bound=GenerationRequest)
_LATER = 429


async def _at_once() -> None:
    """There is room."""


@dataclass(frozen=True)
class Batch:
    """What the lines of a batch have in common.

    seed: from it and a line's custom_id comes the seed of a line that has none. client: whose lines they are. priority:
    added to that of each line; higher values wait while lower ones do. room: waits until a line may be begun. timeout:
    seconds, of lines that do not say it; None: the server's.
    """

    context: Context
    seed: int
    client: str = "batch"
    priority: int = 0
    room: Callable[[], Awaitable[None]] = _at_once
    timeout: float | None = None


@dataclass(frozen=True)
class Refused:
    """A line that could not even be read; custom_id: if that much is known."""

    line: Line
    error: errors.ApiError
    custom_id: str | None = None

    async def play(self) -> Outcome:
        message = f"{self.line.where}: {self.error}"
        fault = {"code": self.error.code or "invalid_line", "message": message, "param": self.error.param}
        document = {"id": self.line.name, "custom_id": self.custom_id, "response": None, "error": fault}
        return Outcome(to_json(document), failed=True)


@dataclass(frozen=True)
class ApiChore:
    """A line in OpenAI's form."""

    batch: Batch
    line: Line
    request: BatchLine

    async def play(self) -> Outcome:
        try:
            request_id, reply = await answered(self._answer)
        except errors.ApiError as error:
            if is_the_end(error):
                raise
            request_id = self.batch.context.new_id("req")
            return Outcome(self._document(error.status, request_id, to_json(error.body)), failed=True)
        return Outcome(self._document(200, request_id, reply), failed=False)

    async def _answer(self) -> tuple[str, bytes]:
        """The answer's id and the answer. Raises ApiError."""
        context = self.batch.context
        await self.batch.room()
        prepare = _PREPARE[self.request.url]
        job = await prepare(context, self.request.body, self._settle, self.batch.client)
        return job.id, await job.answer()

    def _settle(self, body: GenerationRequest) -> None:
        """What a batch decides for its lines. Raises ApiError."""
        if body.stream:
            raise errors.invalid("lines of a batch are answered whole; leave stream out", "stream")
        if body.seed in (None, -1):
            body.seed = seed_of(self.batch.seed, f"id {self.request.custom_id}")
        if body.timeout is None:
            body.timeout = self.batch.timeout
        body.priority = (body.priority or 0) + self.batch.priority

    def _document(self, status: int, request_id: str, body: bytes) -> bytes:
        fields = {"id": self.line.name, "custom_id": self.request.custom_id}
        response = b'{"status_code":%d,"request_id":%s,"body":%s}' % (status, to_json(request_id), body)
        return b'%s,"response":%s,"error":null}' % (to_json(fields)[:-1], response)


Settle = Callable[[GenerationRequest], None]


async def _read(context: Context, kind: type[R], data: object, settle: Settle) -> R:
    body = await asyncio.get_running_loop().run_in_executor(context.bodies, checked, kind, data)
    settle(body)
    return body


async def _completion(context: Context, data: object, settle: Settle, client: str) -> CompletionJob | ChatJob:
    return await CompletionJob.prepare(context, await _read(context, CompletionRequest, data, settle), client)


async def _chat(context: Context, data: object, settle: Settle, client: str) -> CompletionJob | ChatJob:
    return await ChatJob.prepare(context, await _read(context, ChatRequest, data, settle), client)


_PREPARE = {"/v1/completions": _completion, "/v1/chat/completions": _chat}


def read_chore(batch: Batch, names: Names, line: Line, data: object) -> ApiChore:
    """A line that said ``data``. Raises ApiError."""
    request = checked(BatchLine, data)
    names.take(request.custom_id)
    return ApiChore(batch, line, request)


async def unanswered(
    lines: Iterator[Line], read: Callable[[Line, object], Chore], output: OutputFile
) -> AsyncIterator[Chore]:
    """What is left to do, read line by line. All lines are read: each must know the names of those before it."""

    def following() -> tuple[Line, Chore] | None:
        line = next(lines, None)
        return None if line is None else (line, read_line(read, line))

    while (found := await asyncio.to_thread(following)) is not None:
        line, chore = found
        if not output.has(line):
            yield chore


def read_line(read: Callable[[Line, object], Chore], line: Line) -> Chore:
    """What is to be done for a line, a refusal if it says nothing that can be."""
    data = None
    try:
        data = parsed(line.text())
        return read(line, data)
    except errors.ApiError as error:
        custom_id = data.get("custom_id") if isinstance(data, dict) else None
        return Refused(line, error, errors.shortened(custom_id, MAX_LABEL) if isinstance(custom_id, str) else None)


def is_the_end(error: errors.ApiError) -> bool:
    """Whether the engine has stopped, or is about to: nothing is answered any more, and no line is at fault."""
    return error.status == 503


async def answered(work: Callable[[], Awaitable[T]]) -> T:
    """What it gives, tried again and again while there is no room for it now. Raises ApiError, whatever goes wrong."""
    while True:
        try:
            return await work()
        except PacelineError as error:
            refusal = errors.from_paceline(error)
            if refusal.status != _LATER:
                raise refusal from error
            await asyncio.sleep(refusal.retry_after or 1)
        except Exception as error:
            log.exception("a line of a batch failed")
            raise errors.ApiError(500, "server_error", "an error in paceline; its log says more") from error
