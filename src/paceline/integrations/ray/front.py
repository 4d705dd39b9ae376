"""The front of several replicas: it listens, admits requests, sends each to a replica and relays the answer."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from paceline.config import ServerConfig
from paceline.integrations.ray.replica import ReplicaStatus
from paceline.integrations.ray.routing import AFFINITY, blocks_of
from paceline.server import errors
from paceline.server.app import PROMETHEUS
from paceline.server.bodies import parsed
from paceline.server.clients import client_of, prefix_owner
from paceline.server.generation import ClientGoneError, while_connected
from paceline.server.http_heads import REQUEST_ID, Tracing
from paceline.server.logs import request_id
from paceline.server.metrics import Meter
from paceline.server.security import Gate
from paceline.server.streaming import ENDING, EventStream, last_events, sampled
from paceline.server.sums import labelled, together

log = logging.getLogger("paceline.server")

REPLICA = b"x-paceline-replica"
_ATTEMPTS = 2  # attempts while the client has received nothing; a bad request must not take down a third replica
_ACCEPT_TIMEOUT = 30.0  # seconds until a replica has accepted the request
_STATUS_TIMEOUT = 2.0  # seconds that replicas may take to report their status


class ReplicaLostError(Exception):
    """A replica died, or cannot be reached."""


class Front:
    """An ASGI application in front of replicas.

    deploy: starts the replicas and returns Ray Serve's handle to them; called in a thread of its own.
    on_end: called if that fails; ``failure`` holds the error.
    lost: the exceptions by which Ray reports that a replica is gone.
    """

    def __init__(
        self,
        config: ServerConfig,
        deploy: Callable[[], Any],
        on_end: Callable[[], None],
        lost: tuple[type[Exception], ...],
    ) -> None:
        self._config, self._deploy, self._on_end, self._lost = config, deploy, on_end, lost
        self.failure: BaseException | None = None
        self._meter = Meter(config.log_interval)
        self._handle: Any = None
        self._final_error: errors.ApiError | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    def app(self) -> Starlette:
        """The ASGI app: a few routes of its own; all others go to the replicas."""
        own: dict[str, Callable[[Request], Awaitable[Response]]] = {
            "/health": self._health,
            "/ping": self._health,
            "/metrics": self._metrics,
            "/load": self._load,
            "/stats": self._stats,
            "/stats/stream": self._live_stats,
        }
        app = Starlette(
            routes=[Route(path, answer) for path, answer in own.items()],
            lifespan=self._lifespan,
            exception_handlers={HTTPException: _refused},
            middleware=[Middleware(Tracing), Middleware(Gate, config=self._config, meter=self._meter)],
        )
        app.router.default = self._forward
        return app

    @asynccontextmanager
    async def _lifespan(self, _: object) -> AsyncIterator[None]:
        threading.Thread(target=self._start, args=(asyncio.get_running_loop(),), daemon=True, name="replicas").start()
        yield

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            self._handle = self._deploy()
            log.info("ready")
        except Exception as error:  # noqa: BLE001 (whatever Ray says; it is told to the user)
            if not loop.is_closed():  # otherwise the server was stopped meanwhile
                self.failure = error
                self._on_end()

    def give_up(self, error: errors.ApiError) -> None:
        """End all requests with this error."""
        self._final_error = error
        for task in self._tasks:
            task.cancel()

    # --- routes of the front -----------------------------------------------------

    async def _statuses(self) -> list[ReplicaStatus]:
        """The status of every replica that answers."""
        if self._handle is None:
            return []
        try:
            statuses = await self._handle.broadcast("status").results_async(
                timeout_s=_STATUS_TIMEOUT, return_exceptions=True
            )
        except TimeoutError:
            return []
        return [cast(ReplicaStatus, each) for each in statuses if isinstance(each, dict)]

    async def _health(self, _: Request) -> Response:
        """200 while any replica is ready."""
        statuses = await self._statuses()
        ready = [status["state"] for status in statuses].count("ready")
        return JSONResponse({"status": _state(statuses), "replicas": ready}, 200 if ready else 503)

    async def _metrics(self, _: Request) -> Response:
        texts = {status["name"]: status["metrics"] for status in await self._statuses()}
        return Response(labelled(texts, "replica", self._meter.exposition().decode()), media_type=PROMETHEUS)

    async def _load(self, _: Request) -> Response:
        return JSONResponse({"server_load": sum(status["load"] for status in await self._statuses())})

    async def _stats(self, _: Request) -> Response:
        return JSONResponse(together([status["stats"] for status in await self._statuses()]))

    async def _live_stats(self, request: Request) -> Response:
        async def look() -> bytes:
            statuses = await self._statuses()
            stats = together([status["stats"] for status in statuses])
            return json.dumps({"status": _state(statuses), "stats": stats}).encode()

        return EventStream(sampled(look, request.scope.get(ENDING)), self._meter, done=b"")

    # --- routes of the replicas --------------------------------------------------

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = (await receive()).get("body", b"")  # the gate has read the whole body
        relay = Relay(scope, receive, send)
        task = asyncio.ensure_future(self._answer(scope, body, relay))
        self._tasks.add(task)
        try:
            await while_connected(receive, task)
        except ClientGoneError:
            if self._final_error is not None:
                await self._fail(relay, self._final_error)
            elif not relay.ended:
                log.info("a client disconnected")
        except errors.ApiError as error:
            await self._fail(relay, error)
        finally:
            self._tasks.discard(task)
            task.cancel()

    async def _fail(self, relay: Relay, error: errors.ApiError) -> None:
        self._meter.refused(error)
        await relay.end_with(error)

    async def _answer(self, scope: Scope, body: bytes, relay: Relay) -> None:
        """Relay a replica's answer. Raises ApiError if no replica could give one."""
        if self._handle is None:
            raise errors.unavailable("the server is loading", "not_ready")
        owner = prefix_owner(self._config, client_of(scope, bool(self._config.api_keys)))
        blocks = await asyncio.to_thread(_blocks, body, owner)
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                await self._try_replica(_plain_scope(scope), body, blocks, relay)
                return
            except ReplicaLostError as error:
                log.warning("a replica was lost while it ran a request: %s", error)
                if relay.ended:  # the replica died after its last message
                    return
                if relay.begun or attempt == _ATTEMPTS:
                    message = "the replica that ran this request was lost; the answer ends here"
                    raise errors.ApiError(502, "server_error", message, code="replica_lost") from error

    async def _try_replica(self, scope: dict[str, Any], body: bytes, blocks: Sequence[bytes], relay: Relay) -> None:
        """Let one replica answer. Raises ReplicaLostError, or ApiError if no replica accepts the request."""
        flight = secrets.token_hex(8)
        answer = self._handle.options(stream=True).stream.remote(flight, blocks, scope, body)
        try:
            async with asyncio.timeout(_ACCEPT_TIMEOUT):
                relay.replica = await anext(answer)
            async for some in answer:
                for message in some:
                    await relay.put(message)
        except TimeoutError as error:
            raise errors.unavailable("no replica has room, or none is ready", "not_ready") from error
        except self._lost as error:
            raise ReplicaLostError(str(error).partition("\n")[0]) from error
        except Exception as error:
            log.exception("a replica failed on a request")
            raise errors.ApiError(500, "server_error", "an error in a replica; see the log") from error
        finally:
            AFFINITY.end(flight)
            answer.cancel()  # no effect after the end


def _state(statuses: Sequence[ReplicaStatus]) -> str:
    """The state of all replicas together: ready if one is."""
    states = [status["state"] for status in statuses]
    return "ready" if "ready" in states else states[0] if states else "loading"


async def _refused(request: Request, error: Exception) -> Response:
    """An HTTP error of the front's own routes, in the API's format."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    return errors.ApiError(error.status_code, errors.INVALID, message).response(request.url.path)


class Relay:
    """Passes a replica's messages on to the client. begun: the client has received some; ended: all."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._asgi = (scope, receive)
        self._path: str = scope["path"]
        self._send = send
        self._start: Message | None = None
        self.replica = ""
        self.begun = self.ended = False

    async def put(self, message: Message) -> None:
        """Send a message. The start is held back until the body begins: until then another replica may answer."""
        if message["type"] == "http.response.start":
            headers = [(name, value) for name, value in message["headers"] if name != REQUEST_ID]
            self._start = {**message, "headers": [*headers, (REPLICA, self.replica.encode())]}
            return
        if not self.begun:
            assert self._start is not None, "ASGI"
            self.begun = True
            await self._send(self._start)
        self.ended = not message.get("more_body", False)
        await self._send(message)

    async def end_with(self, error: errors.ApiError) -> None:
        """Report an error: as a response, or as the last event of a stream; otherwise the connection breaks."""
        if self.ended:
            return
        if not self.begun:
            await error.response(self._path)(*self._asgi, self._send)
            return
        assert self._start is not None
        if (b"content-type", b"text/event-stream; charset=utf-8") in self._start["headers"]:
            last = last_events(error, self._path)
            await self._send({"type": "http.response.body", "body": last, "more_body": False})


def _blocks(body: bytes, owner: str) -> list[bytes]:
    """The body's blocks for the router; none for an invalid body, which the replica will reject."""
    try:
        return blocks_of(parsed(body), owner) if body else []
    except errors.ApiError:
        return []


def _plain_scope(scope: Scope) -> dict[str, Any]:
    """The parts of the scope that can be sent to another process, with the request's id for the logs."""
    name = (request_id.get() or "").encode()
    kept = ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "client", "server")
    headers = [*((key, value) for key, value in scope["headers"] if key != REQUEST_ID), (REQUEST_ID, name)]
    return {key: scope[key] for key in kept if key in scope} | {"root_path": "", "headers": headers}
