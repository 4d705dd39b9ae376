"""One HTTP request in the engine: submission, updates, time limit, and abort when the client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import TypeVar

from starlette.types import Receive

from paceline.core.outputs import RequestOutput
from paceline.engine.engine import Request
from paceline.server import errors
from paceline.server.admission import AdmissionTicket
from paceline.server.delta import Mailbox, Update
from paceline.server.service import EngineService, Submission

T = TypeVar("T")


class ClientGoneError(Exception):
    """The client disconnected before the response was complete."""


class Generation:
    """The prompts of one HTTP request in the engine. Leaving the ``async with`` block aborts those that are unfinished.

    streaming: whether tokens are delivered round by round.
    """

    def __init__(self, service: EngineService, *, streaming: bool) -> None:
        self._service, self._streaming = service, streaming
        self._inbox = Mailbox()
        self._submissions: list[Submission] = []
        self.outputs: dict[int, RequestOutput] = {}

    @property
    def made(self) -> int:
        """Tokens generated so far, over all answers."""
        return sum(submission.made for submission in self._submissions)

    def submit(self, request: Request, ticket: AdmissionTicket | None = None) -> None:
        """Submit one more prompt. ticket: None for a text that is admitted together with others."""
        submission = Submission(len(self._submissions), request, ticket, self._inbox, self._streaming)
        self._submissions.append(submission)
        self._service.submit(submission)

    async def __aenter__(self) -> Generation:
        return self

    async def __aexit__(self, *_: object) -> None:
        for submission in self._submissions:
            if submission.number not in self.outputs:
                assert submission.request.request_id is not None
                self._service.abort(submission.request.request_id)

    async def updates(self) -> AsyncIterator[Update]:
        """Yield updates until all prompts are finished. Raises ApiError if one fails."""
        while len(self.outputs) < len(self._submissions):
            update = await self._inbox.get()
            if isinstance(update, errors.ApiError):
                raise update
            if update.output is not None:
                self.outputs[update.number] = update.output
            yield update

    async def finish(self) -> list[RequestOutput]:
        """Wait for all prompts and return their outputs in order."""
        async for _ in self.updates():
            pass
        return [self.outputs[submission.number] for submission in self._submissions]


@asynccontextmanager
async def time_limit(seconds: float | None) -> AsyncIterator[None]:
    """Raise ApiError (504) after ``seconds``; None means no limit."""
    try:
        async with asyncio.timeout(seconds) as limit:
            yield
    except TimeoutError:
        if limit.expired() and seconds is not None:
            raise errors.timed_out(seconds) from None
        raise


async def while_connected(receive: Receive, work: Awaitable[T]) -> T:
    """Return the result of ``work``. If the client disconnects first, cancel it and raise ClientGoneError."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_hang_up(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done() and not task.cancelled():
            return task.result()
        raise ClientGoneError
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _hang_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
