"""Failures: clients that disconnect, a full queue, API keys, long bodies, exceptions in a round."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from paceline.config import ServerConfig
from paceline.core.batch import RowStart
from paceline.engine.request import Intake
from paceline.errors import ParameterError
from paceline.server.clients import client_of, key_name
from paceline.server.security import KeyRing, read_keys
from polling import wait_until
from server_support import Live, start
from web import client

pytestmark = pytest.mark.usefixtures("one_thread")

LONG = {"prompt": "abc", "max_tokens": 400, "ignore_eos": True, "seed": 1}


def leave_early(live: Live, **more: Any) -> None:
    with client.stream("POST", f"{live.url}/v1/completions", json={**LONG, **more, "stream": True}) as reply:
        next(reply.iter_lines())


@pytest.mark.usefixtures("unhurried")
def test_a_client_that_disconnects_frees_its_row(live: Live) -> None:
    ended, plain = live.metric("request_success_total"), {"num_speculative_tokens": 0}
    for _ in range(3):
        leave_early(live, **plain)
    live.wait_until_idle()
    with live.asking("/v1/completions", LONG | plain):
        wait_until(lambda: live.context.llm.engine.scheduler.running)
    live.wait_until_idle()
    assert live.metric("request_success_total") == ended, "no answer finished by itself"


def test_an_exception_in_a_round_fails_its_requests_and_the_server_continues(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = live.context.llm.engine.parts

    def broken(*_: Any) -> Any:
        monkeypatch.undo()
        raise RuntimeError("as planned")

    monkeypatch.setattr(parts, "accept", broken)
    reply = live.post("/v1/completions", LONG)
    assert reply.status_code == 500
    assert reply.json()["error"]["code"] == "engine_error"
    assert live.post("/v1/completions", {"prompt": "abc"}).status_code == 200
    live.wait_until_idle()


def test_waiting_requests_survive_an_exception_in_a_round(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = live.context.llm.engine
    original = engine.parts.accept

    def broken(*arguments: Any) -> Any:
        if len(engine.scheduler.waiting) < 3:
            return original(*arguments)
        monkeypatch.undo()
        raise RuntimeError("as planned")

    monkeypatch.setattr(engine.parts, "accept", broken)
    with ThreadPoolExecutor(8) as pool:
        with live.held():
            asked = [pool.submit(live.post, "/v1/completions", LONG) for _ in range(8)]
            wait_until(lambda: live.waiting == 8)
        codes = Counter(each.result().status_code for each in asked)
    assert codes[500] >= 1
    assert codes[200] >= 3
    assert codes.total() == 8
    live.wait_until_idle()


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_in_one_request_fails_only_that_request(
    live: Live, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    engine = live.context.llm.engine
    original = engine.batch.set_row

    def broken(row: int, start: RowStart) -> None:
        if start.params.seed == 666:
            raise OverflowError("as planned")
        original(row, start)

    monkeypatch.setattr(engine.batch, "set_row", broken)
    bodies = [LONG, LONG, {**LONG, "seed": 666, "n": 2, "stream": stream}, LONG]
    with ThreadPoolExecutor(4) as pool:
        replies = list(pool.map(lambda body: live.post("/v1/completions", body), bodies))
    assert [reply.status_code for reply in replies] == [200, 200, 500, 200]
    assert "engine_error" in replies[2].text
    live.wait_until_idle()


def test_a_request_that_the_engine_refuses_fails_alone(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise MemoryError("as planned")

    monkeypatch.setattr(Intake, "begin", broken)
    assert live.post("/v1/completions", LONG).status_code == 500
    monkeypatch.undo()
    assert live.post("/v1/completions", LONG).status_code == 200
    live.wait_until_idle()


@pytest.mark.parametrize("where", ["scheduler.Scheduler._start", "prefill.collect", "scoring.token_logprobs"])
def test_failed_scoring_fails_its_prompts_and_the_next_are_scored(
    live: Live, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def broken(*_: Any) -> Any:
        raise MemoryError("as planned")

    scored = {"prompt": ["abc", "abcd"], "max_tokens": 0, "echo": True, "logprobs": 1}
    monkeypatch.setattr(f"paceline.engine.{where}", broken)
    assert live.post("/v1/completions", scored).status_code == 500
    monkeypatch.undo()
    live.wait_until_idle()
    assert live.post("/v1/completions", scored).status_code == 200
    live.wait_until_idle()


def one_request(live: Live, number: int) -> tuple[str, int]:
    """One request: one in ten is invalid, three in ten disconnect in mid-stream, some prompts are far too long."""
    if number % 10 == 0:
        return "invalid", live.post("/v1/completions", {"prompt": "a", "n": "many"}).status_code
    if number % 10 in (1, 2, 3):
        leave_early(live)
        return "left", 0
    if number % 10 == 4:
        return "oversized", live.post("/v1/completions", {"prompt": "a" * 5000}).status_code
    body = {"prompt": f"number {number}", "max_tokens": 16, "seed": number, "ignore_eos": True}
    reply = live.post("/v1/completions", body)
    if reply.status_code == 200:
        assert reply.json()["usage"]["completion_tokens"] == 16
    return "good", reply.status_code


def hammer(live: Live, requests: int, clients: int = 32) -> Counter[tuple[str, int]]:
    """Count the outcomes, while /health must respond."""
    with ThreadPoolExecutor(clients) as pool:
        outcomes = [pool.submit(one_request, live, number) for number in range(requests)]
        wait_until(
            lambda: live.get("/health").status_code != 200 or all(outcome.done() for outcome in outcomes), seconds=240
        )
        assert live.get("/health").status_code == 200
    return Counter(outcome.result() for outcome in outcomes)


@pytest.mark.parametrize("requests", [150, pytest.param(1000, marks=pytest.mark.slow)])
def test_under_abuse_every_request_gets_a_response_and_nothing_leaks(live: Live, requests: int) -> None:
    outcomes = hammer(live, requests)
    assert {status for kind, status in outcomes if kind in ("invalid", "oversized")} == {400}
    assert {status for kind, status in outcomes if kind == "good"} <= {200, 429}
    assert outcomes["good", 200] > 0
    live.wait_until_idle()


def test_a_full_queue_sends_retry_after(live: Live) -> None:
    with ThreadPoolExecutor(32) as pool:
        with live.held():
            asked = [pool.submit(live.post, "/v1/completions", {**LONG, "max_tokens": 4}) for _ in range(32)]
            wait_until(lambda: sum(each.done() for each in asked) == 16)
        replies = [each.result() for each in asked]
    assert Counter(reply.status_code for reply in replies) == {200: 16, 429: 16}
    assert all(int(reply.headers["retry-after"]) >= 1 for reply in replies if reply.status_code == 429)
    live.wait_until_idle()


@pytest.fixture(scope="module")
def guarded(tiny: str) -> Iterator[Live]:
    yield from start(ServerConfig(port=0, api_keys=("first", "dritté"), max_body_bytes=1000), tiny)


@pytest.mark.parametrize(("key", "status"), [(None, 401), ("wrong", 401), ("first", 200), ("dritté", 200)])
def test_only_valid_keys_are_admitted(guarded: Live, key: str | None, status: int) -> None:
    headers = {} if key is None else {b"Authorization": f"Bearer {key}".encode()}
    assert guarded.get("/v1/models", headers=headers).status_code == status
    assert guarded.get("/health").status_code == 200


def test_a_too_large_body_is_refused(guarded: Live) -> None:
    reply = guarded.post("/v1/completions", {"prompt": "a" * 2000}, headers={"Authorization": "Bearer first"})
    assert reply.status_code == 413


def test_without_keys_any_authorization_is_admitted() -> None:
    assert KeyRing(()).admits(b"")
    assert not KeyRing(("a",)).admits(b"Basic a")


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
def test_a_key_beyond_ascii_is_admitted_in_either_encoding(encoding: str) -> None:
    key = "schlüssel-à"  # its last byte in UTF-8 is a space in Latin-1
    sent, ring = key.encode(encoding), KeyRing([f"{key} max_requests=1"])
    assert ring.admits(b"Bearer " + sent)
    assert ring.admits(b"", sent)
    assert not ring.admits(b"Bearer schl\xfcssel-a")
    for name, value in ((b"authorization", b"Bearer " + sent), (b"x-api-key", sent)):
        assert client_of({"type": "http", "headers": [(name, value)]}, has_keys=True) == key_name(key)


@pytest.mark.parametrize("sent", [b"\xff\xfe", b"\xc3", b"\xed\xa0\x80", bytes(range(128, 256)), b"\xa0"])
def test_bytes_that_are_no_key_are_refused(guarded: Live, sent: bytes) -> None:
    for headers in ({b"authorization": b"Bearer " + sent}, {b"x-api-key": sent}):
        assert guarded.get("/v1/models", headers=headers).status_code == 401


def test_keys_never_appear_in_errors(tmp_path: Path) -> None:
    assert "secret" not in repr(ServerConfig(api_keys=("secret",)))
    (tmp_path / "keys").write_text("# ours\n\none\ntwo\n")
    assert read_keys(tmp_path / "keys") == ["one", "two"]
    with pytest.raises(ParameterError, match="api_key_file"):
        read_keys(tmp_path / "none")
