"""The models of one server: the first stays loaded, others are loaded when a request names them.

A model of its own engine gives the same answers whatever else is loaded. Requests to a model that has to be loaded wait
in line. Where memory is short, the model that was used least recently is unloaded first, once its requests have ended.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from paceline.errors import CapacityError, PacelineError
from paceline.server import errors
from paceline.server.context import Context, exposition
from paceline.server.generation import ClientGoneError, while_connected
from paceline.server.metrics import Meter, Stats
from paceline.server.service import EngineService
from paceline.server.sums import labelled, together

if TYPE_CHECKING:
    from paceline.llm import LLM

log = logging.getLogger("paceline.server")
_POLL = 0.02  # seconds between two looks at whether a model is loaded
_LEASES = "paceline.leases"


@dataclass(frozen=True)
class ModelSource:
    """Where a model comes from. model: the name or path of its files.

    load: builds it within a number of bytes; None: within the machine's free memory.
    """

    model: str
    load: Callable[[int | None], LLM]


@dataclass
class Place:
    """One model that is loaded when a request names it.

    unload_after: seconds without a request after which it is unloaded; None: never. context: None while it is not
    loaded. users: requests that use it. used: when the last of them ended, in seconds of time.monotonic.
    """

    name: str
    source: ModelSource
    meter: Meter
    unload_after: float | None
    context: Context | None = None
    users: int = 0
    used: float = 0.0
    timer: asyncio.TimerHandle | None = None

    @property
    def is_ready(self) -> bool:
        return self.context is not None and self.context.service.state == "ready"

    @property
    def expires(self) -> float | None:
        """Seconds until the model is unloaded if no request comes; None: never, or not loaded."""
        if self.unload_after is None or not self.is_ready:
            return None
        return self.unload_after if self.users else self.unload_after - (time.monotonic() - self.used)

    @property
    def bytes(self) -> int:
        """Bytes that the model may take; 0 while it is not loaded."""
        return self.context.llm.engine.memory_bytes if self.is_ready and self.context is not None else 0


class ServedModels:
    """The models of one server. Not thread-safe: call it from the event loop only.

    first: the model that is always loaded. sources: the others by name. memory_limit: bytes for all models together.
    """

    def __init__(self, first: Context, sources: Mapping[str, ModelSource], memory_limit: int | None) -> None:
        self.first, self._memory_limit = first, memory_limit
        interval, after = first.config.log_interval, first.config.unload_after
        self.others = {name: Place(name, source, Meter(interval), after) for name, source in sources.items()}
        self._turn = asyncio.Lock()  # one model is loaded at a time, in the order of requests
        self._room_wanted = False  # a model waits until another one has no requests
        self._released = asyncio.Event()
        self._tasks = set[asyncio.Task[None]]()  # the event loop itself keeps no references to tasks

    @property
    def contexts(self) -> Mapping[str, Context]:
        """The models that are loaded, by name. Raises ApiError (503) until the first one is ready."""
        return {context.model_name: context for context in self._loaded}

    @property
    def _loaded(self) -> list[Context]:
        return [self.first, *(place.context for place in self.others.values() if place.context and place.is_ready)]

    @property
    def inside(self) -> int:
        """Number of sequences that run or wait."""
        return sum(context.dispatcher.admission.inside for context in self._loaded)

    def stats(self) -> Stats:
        """Current figures of all models that are loaded."""
        if not self.others:
            return self.first.meter.stats()
        return Stats(**together([context.meter.stats().model_dump() for context in self._loaded]))

    def metrics(self) -> bytes:
        """All metrics in Prometheus' text format, those of several models labelled with ``model``. Raises ApiError."""
        if not self.others:
            return self.first.metrics()
        texts = {self.first.model_name: self.first.metrics()}
        for name, place in self.others.items():
            texts[name] = exposition(place.meter, self.first.config, lambda name=name: name)  # type: ignore[misc]
        return labelled({name: text.decode() for name, text in texts.items()}, "model")

    async def of(self, request: Request, name: str | None) -> Context:
        """Return the model that a request names, and hold it until the response has been sent. Raises ApiError.

        Raises ClientGoneError if the client disconnects while the model is loaded.
        """
        place = None if name is None else self.others.get(name)
        if place is None:
            return self.first
        await self._acquire(place, request.receive)
        request.scope[_LEASES].callback(self._release, place)
        assert place.context is not None
        return place.context

    async def _acquire(self, place: Place, receive: Receive) -> None:
        """Count one more user of a model, and load it first if it is not loaded."""
        if place.is_ready and not self._room_wanted:
            self._count_user(place)
            return
        connected = True
        task = self._kept(self._load(place, lambda: connected))
        try:
            await while_connected(receive, asyncio.shield(task))
        except ClientGoneError:
            connected = False  # a load that has begun goes on; one that waits in line does not begin
            task.add_done_callback(lambda ended: self._forget(place, ended))
            raise

    def _forget(self, place: Place, ended: asyncio.Task[None]) -> None:
        """Release a model whose client has gone, if it was counted as a user."""
        if not ended.cancelled() and ended.exception() is None:
            self._release(place)

    def _kept(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task, and keep it until it ends or the server does."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _load(self, place: Place, is_wanted: Callable[[], bool]) -> None:
        """Load a model when it is its turn, and count one user. Raises ApiError."""
        async with self._turn:
            while is_wanted() and not place.is_ready:
                await self._begin(place)
            self._count_user(place)

    async def _begin(self, place: Place) -> None:
        """Load a model within the memory that is left, or unload another one to try again. Raises ApiError."""
        await self._end(place)  # of an engine that has failed
        left = None if self._memory_limit is None else self._memory_limit - self._taken()
        try:
            if left is not None and left <= 0:
                raise CapacityError(f"memory_limit={self._memory_limit} leaves no memory for {place.name}")
            place.context = await self._ready(place, left)
        except CapacityError as error:
            if not await self._unload_one():
                raise errors.unavailable(str(error), "no_memory") from error
        else:
            log.info("loaded %s on demand", place.name)

    def _taken(self) -> int:
        return self.first.llm.engine.memory_bytes + sum(place.bytes for place in self.others.values())

    async def _ready(self, place: Place, left: int | None) -> Context:
        """Load a model. Raises CapacityError, or ApiError for any other failure."""
        config = replace(self.first.config, served_model_name=place.name)
        context = Context(config, partial(place.source.load, left), lambda: None, first=self.first, meter=place.meter)
        context.service.start()
        while context.service.is_loading:
            await asyncio.sleep(_POLL)
        if context.service.state == "ready":
            return context
        failure = context.service.failure
        context.close()
        if isinstance(failure, CapacityError):
            raise failure
        known = isinstance(failure, PacelineError)
        why = str(failure) if known else "see the server's log"
        raise errors.ApiError(500, "server_error", f"the model {place.name!r} cannot be loaded: {why}")

    async def _unload_one(self) -> bool:
        """Unload the model that was used least recently, as soon as one has no requests; return whether one was."""
        self._room_wanted = True
        try:
            while loaded := [place for place in self.others.values() if place.is_ready]:
                if idle := [place for place in loaded if place.users == 0]:
                    await self._end(min(idle, key=lambda place: place.used))
                    return True
                self._released.clear()
                await self._released.wait()
        finally:
            self._room_wanted = False
        return False

    def _count_user(self, place: Place) -> None:
        place.users += 1
        place.unload_after = self.first.config.unload_after
        if place.timer is not None:
            place.timer.cancel()
            place.timer = None

    def _release(self, place: Place) -> None:
        place.users -= 1
        place.used = time.monotonic()
        self._released.set()
        self._watch(place)

    def keep(self, place: Place, seconds: float | None) -> None:
        """Set how long a model stays loaded without a request; None: for ever."""
        place.unload_after = seconds
        self._watch(place)

    def _watch(self, place: Place) -> None:
        """Unload a model without users after its time."""
        if place.timer is not None:
            place.timer.cancel()
            place.timer = None
        if place.users == 0 and place.is_ready and place.unload_after is not None:
            place.timer = asyncio.get_running_loop().call_later(place.unload_after, self._begin_expiry, place)

    def _begin_expiry(self, place: Place) -> None:
        self._kept(self._expire(place))

    async def _expire(self, place: Place) -> None:
        async with self._turn:
            if place.users == 0:
                await self._end(place)

    async def _end(self, place: Place) -> None:
        """Unload a model, if it is loaded."""
        context, place.context = place.context, None
        if context is None:
            return
        await context.service.stop()
        context.close()
        place.meter.engine_ended()
        gc.collect()  # engine and model refer to each other
        log.info("unloaded %s", place.name)

    def fail_all(self, error: errors.ApiError) -> None:
        """Fail all unfinished requests with ``error``."""
        for service in self._services():
            service.fail_all(error)

    def _services(self) -> Iterator[EngineService]:
        yield self.first.service
        yield from (place.context.service for place in self.others.values() if place.context is not None)

    async def stop(self) -> None:
        """Unload all models. One that is being loaded is given up."""
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for place in self.others.values():
            if place.timer is not None:
                place.timer.cancel()
            await self._end(place)
        await self.first.service.stop()
        self.first.close()


class Leases:
    """ASGI middleware: what a request holds until its response has been sent."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with AsyncExitStack() as stack:
            scope[_LEASES] = stack
            await self._app(scope, receive, send)
