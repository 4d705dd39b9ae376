"""Server-sent events."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from paceline.errors import PacelineError
from paceline.server import errors
from paceline.server.documents import event, named_event
from paceline.server.errors import OLLAMA
from paceline.server.generation import ClientGoneError, while_connected
from paceline.server.metrics import Meter

log = logging.getLogger("paceline.server")
DONE = b"data: [DONE]\n\n"
_UNNAMED = ("/v1/completions", "/v1/chat/completions")  # paths whose events have no names
ENDING = "paceline.ending"  # in the scope of a request: an event that is set when the server begins to end
SAMPLE_SECONDS = 0.25
Events = AsyncGenerator[bytes, None]


def last_events(error: errors.ApiError, path: str) -> bytes:
    """Return what ends a stream of a path after an error: an event, and in OpenAI's older APIs ``DONE``."""
    body = json.dumps(error.body_for(path)).encode()
    if path.startswith(OLLAMA):
        return body + b"\n"
    return event(body) + DONE if path.startswith(_UNNAMED) else named_event("error", body)


async def sampled(look: Callable[[], Awaitable[bytes]], ending: asyncio.Event | None) -> Events:
    """Yield a document as a server-sent event at every ``SAMPLE_SECONDS``, until the server ends.

    ending: set when it does; None: the stream ends with its client.
    """
    while ending is None or not ending.is_set():
        yield event(await look())
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait() if ending is None else ending.wait(), SAMPLE_SECONDS)


class EventStream(Response):
    """Streams events as they are produced. The generator is closed as soon as the client disconnects.

    An error before the first event is a response with its own status. A later error is an event.

    done: what ends a complete stream. on_error: what ends one after an error; None for that of the path.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: Events,
        meter: Meter,
        *,
        done: bytes = DONE,
        on_error: Callable[[errors.ApiError], bytes] | None = None,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events, self._meter, self._done, self._on_error = events, meter, done, on_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._run(scope, receive, send))
        except ClientGoneError:
            log.info("the client disconnected")

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False
        async with aclosing(self._events) as events:
            try:
                async for chunk in events:
                    if chunk and not begun:
                        await self._begin(send)
                        begun = True
                    await _send(send, chunk)
            except PacelineError as raised:
                error = errors.from_paceline(raised)
                self._meter.refused(error)
                if not begun:
                    await error.response(scope["path"])(scope, receive, send)
                    return
                last = last_events(error, scope["path"]) if self._on_error is None else self._on_error(error)
                await _send(send, last, more=False)
                return
        if not begun:
            await self._begin(send)
        await _send(send, self._done, more=False)

    async def _begin(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})


class LineStream(EventStream):
    """Streams lines of JSON, as Ollama's API does; see ``EventStream``."""

    media_type = "application/x-ndjson"

    def __init__(self, lines: Events, meter: Meter) -> None:
        super().__init__(lines, meter, done=b"")


async def _send(send: Send, body: bytes, more: bool = True) -> None:
    if body or not more:
        await send({"type": "http.response.body", "body": body, "more_body": more})
