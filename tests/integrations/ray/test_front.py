"""The front without Ray: fake replicas, one of which may die at any message."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from paceline.config import ServerConfig
from paceline.integrations.ray.front import Front
from paceline.integrations.ray.replica import run_request
from paceline.integrations.ray.routing import BLOCK
from paceline.server import errors
from paceline.server.metrics import Meter
from paceline.server.streaming import EventStream
from paceline.server.sums import labelled, together

STREAM = "/v1/completions"
UNKEYED = ServerConfig()
BODY = json.dumps({"prompt": "a" * BLOCK}).encode()


class Died(Exception):  # noqa: N818 (Ray's are not ours)
    """Stands for Ray's exception."""


class Answer:
    """The handle's answer: an iterator that can be cancelled."""

    def __init__(self, messages: AsyncIterator[Any]) -> None:
        self._messages = messages

    def __aiter__(self) -> Answer:
        return self

    async def __anext__(self) -> Any:
        return await anext(self._messages)

    def cancel(self) -> None: ...


class Handle:
    """Replicas in this process. dies_after: lists of messages in each request's first attempt; None: never."""

    def __init__(self, dies_after: int | None = None, tries: int = 1) -> None:
        self._dies_after, self._left = dies_after, tries
        self.asked: list[dict[str, Any]] = []
        self.blocks: list[list[bytes]] = []
        self.stream = self

    def options(self, **_: Any) -> Handle:
        return self

    def remote(self, flight: str, blocks: list[bytes], scope: dict[str, Any], body: bytes) -> Answer:
        self.asked.append(scope)
        self.blocks.append(blocks)
        self._left -= 1
        return Answer(self._play(scope, body, self._dies_after if self._left >= 0 else None))

    async def _play(self, scope: dict[str, Any], body: bytes, dies_after: int | None) -> AsyncIterator[Any]:
        yield f"replica {len(self.asked)}"
        number = 0
        async for some in run_request(app, scope, body):
            for message in some:
                if number == dies_after:
                    raise Died("killed")
                number += 1
                yield [message]


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    message = await receive()
    answer: Response = JSONResponse({"body": message["body"].decode(), "path": scope["path"]})
    if scope["path"] == STREAM:
        answer = EventStream(events(), Meter(1.0))
    await answer(scope, receive, send)


async def events() -> Any:
    for number in range(3):
        await asyncio.sleep(0)
        yield b"data: %d\n\n" % number


def ask(
    handle: Handle | None,
    path: str,
    meanwhile: Callable[[Front], None] = lambda _: None,
    method: str = "POST",
    config: ServerConfig = UNKEYED,
    key: str = "none",
) -> httpx.Response:
    async def run() -> httpx.Response:
        front = Front(config, lambda: handle, lambda: None, (Died,))
        front._handle = handle
        transport = httpx.ASGITransport(app=front.app())
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            headers = {"authorization": f"Bearer {key}"}
            asking = asyncio.ensure_future(client.request(method, path, content=BODY, headers=headers))
            await asyncio.sleep(0)
            meanwhile(front)
            return await asking

    return asyncio.run(run())


def test_a_replicas_answer_is_relayed_with_its_name() -> None:
    handle = Handle()
    reply = ask(handle, "/any/path")
    assert reply.json() == {"body": BODY.decode(), "path": "/any/path"}
    assert reply.headers["x-paceline-replica"] == "replica 1"
    assert dict(handle.asked[0]["headers"])[b"x-request-id"] == reply.headers["x-request-id"].encode(), "one name"
    assert ask(Handle(), STREAM).text == "data: 0\n\ndata: 1\n\ndata: 2\n\ndata: [DONE]\n\n"


@pytest.mark.parametrize("shared", [False, True])
def test_the_replica_that_answers_does_not_tell_what_another_key_has_sent(shared: bool) -> None:
    handle, config = Handle(), ServerConfig(api_keys=("one", "two"), share_prefixes=shared)
    for key in ("one", "two", "one"):
        assert ask(handle, "/any/path", config=config, key=key).status_code == 200
    one, two, again = map(tuple, handle.blocks)
    assert one == again != ()
    assert (one == two) is shared


@pytest.mark.parametrize("dies_after", [0, 1])
def test_a_request_without_output_is_retried(dies_after: int) -> None:
    reply = ask(Handle(dies_after), STREAM)
    assert reply.headers["x-paceline-replica"] == "replica 2"
    assert reply.text.endswith("data: 2\n\ndata: [DONE]\n\n")


def test_a_stream_whose_replica_dies_ends_with_an_error() -> None:
    *before, error, done, _ = ask(Handle(dies_after=2), STREAM).text.split("\n\n")
    assert before == ["data: 0"]
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "replica_lost"
    assert done == "data: [DONE]"


def test_a_stream_in_which_a_replica_fails_ends_with_an_error() -> None:
    class Broken(Handle):
        async def _play(self, *given: Any) -> AsyncIterator[Any]:
            async for some in super()._play(*given):
                yield some
                if some[0] == {"type": "http.response.body", "body": b"data: 0\n\n", "more_body": True}:
                    raise ValueError("a bug")

    *_, error, done, _ = ask(Broken(), STREAM).text.split("\n\n")
    assert json.loads(error.removeprefix("data: "))["error"]["type"] == "server_error"
    assert done == "data: [DONE]"


def test_a_request_that_killed_two_replicas_is_not_tried_on_a_third() -> None:
    handle = Handle(dies_after=0, tries=9)
    reply = ask(handle, "/any/path")
    assert (reply.status_code, reply.json()["error"]["code"], len(handle.asked)) == (502, "replica_lost", 2)


def test_requests_beyond_the_drain_time_end_with_the_given_error() -> None:
    class Slow(Handle):
        async def _play(self, *_: Any) -> AsyncIterator[Any]:
            yield "replica"
            await asyncio.Event().wait()

    async def end(front: Front) -> None:
        while not front._tasks:
            await asyncio.sleep(0.001)
        front.give_up(errors.unavailable("the server is shutting down", "shutting_down"))

    ends: list[asyncio.Task[None]] = []
    reply = ask(Slow(), STREAM, lambda front: ends.append(asyncio.ensure_future(end(front))))
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "shutting_down")


def test_requests_before_replicas_are_ready_are_refused() -> None:
    assert ask(None, "/any/path").json()["error"]["code"] == "not_ready"
    assert ask(None, "/health", method="GET").json() == {"status": "loading", "replicas": 0}
    assert ask(None, "/health").json()["error"]["message"] == "POST /health: Method Not Allowed"


def test_metrics_have_the_replica_s_name() -> None:
    meters = [Meter(1.0) for _ in range(2)]
    meters[0]._generation_tokens.inc(3)
    meters[1]._generation_tokens.inc(4)
    texts = {name: meter.exposition().decode() for name, meter in zip("ab", meters, strict=True)}
    front = Meter(1.0)
    front.refused(errors.unauthorized())
    text = labelled(texts, "replica", front.exposition().decode()).decode()
    assert 'paceline:generation_tokens_total{replica="a"} 3.0' in text
    assert 'paceline:generation_tokens_total{replica="b"} 4.0' in text
    assert text.count("# TYPE paceline:generation_tokens_total counter") == 1
    assert 'replica="front",status="401"' in text
    assert 'generation_tokens_total{replica="front"}' not in text


def test_stats_are_sums_and_means() -> None:
    stats = Meter(1.0).stats().model_dump()
    one, two = stats | {"running": 2, "acceptance_rate": 0.5}, stats | {"running": 1, "num_speculative_tokens": 4}
    found = together([one, two])
    assert (found["running"], found["acceptance_rate"], found["num_speculative_tokens"]) == (3, 0.5, 4)
    assert together([]).keys() == stats.keys()
