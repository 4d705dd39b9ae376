"""One HTTP request in the engine: submission, updates, time limit, and abort when the client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from starlette.types import Receive

from paceline.core.outputs import RequestOutput
from paceline.engine.engine import Request
from paceline.server import errors
from paceline.server.admission import Place
from paceline.server.delta import Update
from paceline.server.mailbox import Mailbox
from paceline.server.service import EngineService, Ticket

T = TypeVar("T")


class ClientGoneError(Exception):
    """The client disconnected before the response was complete."""


class Generation:
    """The prompts of one request in the engine.

    ``async with`` submits them and aborts what is unfinished when it is left. Raises ApiError if the engine fails them.
    """

    def __init__(self, service: EngineService, asked: Iterable[tuple[Request, Place]], streaming: bool) -> None:
        self._service = service
        self._inbox = Mailbox()
        self._tickets = [Ticket(n, request, place, self._inbox, streaming) for n, (request, place) in enumerate(asked)]
        self._open = {ticket.number: ticket for ticket in self._tickets}
        self.outputs: dict[int, RequestOutput] = {}

    @property
    def made(self) -> int:
        """Tokens generated so far, over all answers."""
        return sum(ticket.made for ticket in self._tickets)

    async def __aenter__(self) -> Generation:
        for ticket in self._tickets:
            self._service.submit(ticket)
        return self

    async def __aexit__(self, *_: object) -> None:
        for ticket in self._open.values():
            assert ticket.request.request_id is not None
            self._service.abort(ticket.request.request_id)

    def scored(self) -> None:
        """Release the admission of scored prompts: their log-probabilities are computed."""
        for ticket in self._tickets:
            ticket.place.scored()

    async def updates(self) -> AsyncIterator[Update]:
        """Yield updates until all prompts are finished. Raises ApiError if one fails."""
        while self._open:
            news = await self._inbox.get()
            if isinstance(news, errors.ApiError):
                raise news
            if news.output is not None:
                del self._open[news.number]
                self.outputs[news.number] = news.output
            yield news

    async def finish(self) -> list[RequestOutput]:
        """Wait for all prompts and return their outputs in order."""
        async for _ in self.updates():
            pass
        return [self.outputs[ticket.number] for ticket in self._tickets]


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


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
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
