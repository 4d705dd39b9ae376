"""A replica: the whole server without its network, as an actor of Ray Serve. Requests are ASGI scopes with bodies."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, ExitStack, aclosing
from typing import Any, TypedDict

from starlette.types import ASGIApp, Message

from paceline.config import ServerConfig
from paceline.integrations.ray.cluster import Recipe
from paceline.server import logs
from paceline.server.app import make_app
from paceline.server.context import Context

_TICK = 0.02


class ReplicaStatus(TypedDict):
    """A replica's status. stats: as ``/stats``; load: as ``/load``; metrics: as ``/metrics``."""

    name: str
    state: str
    load: int
    stats: dict[str, Any]
    metrics: str


class Replica:
    """The actor; loads the model when it is created. Ray calls its health check and its ``stream``."""

    def __init__(self, config: ServerConfig, recipe: Recipe) -> None:
        from ray import serve

        self._name = str(serve.get_replica_context().replica_id.unique_id)
        ExitStack().enter_context(logs.to_stderr("text"))  # Ray forwards it
        llm = recipe.load()
        self._app = make_app(config, lambda: llm)
        self._context: Context = self._app.state.context
        self._life = AsyncExitStack()
        self._begun: asyncio.Task[None] | None = None

    async def _begin(self) -> None:
        """Warm up, once."""
        if self._begun is None:
            self._begun = asyncio.ensure_future(self._warm_up())
        await asyncio.shield(self._begun)

    async def _warm_up(self) -> None:
        await self._life.enter_async_context(self._app.router.lifespan_context(self._app))
        while self._context.service.is_loading:
            await asyncio.sleep(_TICK)

    async def check_health(self) -> None:
        """Ray Serve calls this before the first request, and then regularly; it replaces an actor that raises."""
        await self._begin()
        state = self._context.service.health
        if state != "ready":
            raise RuntimeError(f"the engine is {state}")

    async def status(self) -> ReplicaStatus:
        """The current status."""
        context = self._context
        return {
            "name": self._name,
            "state": context.service.health,
            "load": context.dispatcher.admission.inside,
            "stats": json.loads(context.meter.stats().model_dump_json()),
            "metrics": context.metrics().decode(),
        }

    async def stream(self, flight: str, blocks: list[bytes], scope: dict[str, Any], body: bytes) -> AsyncIterator[Any]:
        """Yield the replica's name, then lists of ASGI messages as they come. flight, blocks: for the router."""
        await self._begin()
        yield self._name
        async with aclosing(run_request(self._app, scope, body)) as messages:
            async for some in messages:
                yield some


async def run_request(app: ASGIApp, scope: dict[str, Any], body: bytes) -> AsyncGenerator[list[Message], None]:
    """Yield the app's messages, in lists of those that have arrived. Closing the generator disconnects the client."""
    sent: asyncio.Queue[Message | None] = asyncio.Queue()
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    gone = asyncio.Event()

    async def receive() -> Message:
        if pending:
            return pending.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.put_nowait(message)

    task = asyncio.ensure_future(app(scope, receive, send))
    task.add_done_callback(lambda _: sent.put_nowait(None))
    try:
        while (some := await _all_of(sent))[0] is not None:
            yield [message for message in some if message is not None]
            if some[-1] is None:
                break
        await task  # raises its exception
    finally:
        gone.set()
        await asyncio.wait({task})


async def _all_of(queue: asyncio.Queue[Message | None]) -> list[Message | None]:
    """Wait for one message; return it with those that have arrived."""
    some = [await queue.get()]
    while not queue.empty():
        some.append(queue.get_nowait())
    return some
