"""The serving experiment over HTTP, against a small fake server that streams like paceline's."""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from benchmarks.traffic import PROMPTS, Load
from benchmarks.traffic_http import MAX_DRAFT_TOKENS, Served, app, compared, draw, measure, served
from typer.testing import CliRunner

from paceline.errors import PacelineError, ParameterError
from polling import PATIENCE

LOAD = Load(requests=4, interval=0.01, cv=1.0, tokens=6, max_batch_size=0)
PAUSE = 0.01  # seconds between two chunks


class Fake(ThreadingHTTPServer):
    """Answers every completion with two chunks of three tokens. refuse: the message of a 429 instead.

    ends: what the stream has after the chunks; "nothing" breaks the connection within a chunk.
    together: the first answer waits until this number of requests has arrived.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.refuse: str | None = None
        self.ends: tuple[str, ...] = ("usage", "[DONE]")
        self.together = threading.Barrier(1)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Fake

    def do_GET(self) -> None:
        self._reply(200, json.dumps({"data": [{"id": "tiny"}]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        self.server.keys.append(self.headers["Authorization"])
        if self.server.refuse is not None:
            self._reply(429, self.server.refuse)
            return
        self.server.together.wait(PATIENCE)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        if "nothing" in self.server.ends:
            self.send_header("Content-Length", "1000000")
        self.end_headers()
        for _ in range(2):
            self._send(json.dumps({"choices": [{"text": "abc"}], "usage": None}))
            time.sleep(PAUSE)
        if "usage" in self.server.ends:
            self._send(json.dumps({"choices": [], "usage": {"completion_tokens": body["max_tokens"]}}))
        if "[DONE]" in self.server.ends:
            self._send("[DONE]")

    def _send(self, data: str) -> None:
        self.wfile.write(f"data: {data}\n\n".encode())
        self.wfile.flush()

    def _reply(self, status: int, text: str) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def answering(server: Fake) -> Iterator[None]:
    threading.Thread(target=server.serve_forever, args=(0.005,), daemon=True).start()
    yield
    server.shutdown()


@pytest.fixture
def fake() -> Iterator[Fake]:
    with Fake() as server, answering(server):
        yield server


def test_every_policy_sends_every_request_with_its_own_limit(fake: Fake, tmp_path: Path) -> None:
    results = list(measure(served([fake.url]), ["steady", "busy"], LOAD, 1, lambda steps: steps, api_key="secret"))
    assert [(r.trace, r.policy) for r in results] == [(t, p) for t in ("steady", "busy") for p in MAX_DRAFT_TOKENS]
    assert [body.get("num_speculative_tokens") for body in fake.bodies] == [0] * 4 + [2] * 4 + [4] * 4 + [None] * 4 + [
        0
    ] * 4 + [2] * 4 + [4] * 4 + [None] * 4
    assert {body["prompt"] for body in fake.bodies} == set(PROMPTS[:4])
    assert all(body["model"] == "tiny" and body["max_tokens"] == 6 and body["stream"] for body in fake.bodies)
    assert set(fake.keys) == {"Bearer secret"}
    for result in results:
        assert result.mean_ttft > 0
        assert result.mean > result.mean_ttft + PAUSE, "the pauses come after the first chunk, however slow the machine"
        assert result.p50 <= result.p99
        assert result.latency is not None
        assert 1000 * PAUSE / (6 - 1) < result.latency.first <= result.latency.all <= result.latency.last
        assert result.tokens_per_second == pytest.approx(4 * 6 / result.seconds)
    draw(results, tmp_path / "http.png", "a fake")
    assert (tmp_path / "http.png").stat().st_size > 1000


def test_each_policy_runs_on_its_server_and_repeats_begin_with_another(fake: Fake) -> None:
    with Fake() as other, answering(other):
        policies = served([f"auto={fake.url}", f"two={other.url}@2"])
        results = list(measure(policies, ["busy"], LOAD, 2, lambda steps: steps))
    assert [(result.policy, len(result.means_of_all)) for result in results] == [("auto", 2), ("two", 2)]
    assert [body.get("num_speculative_tokens") for body in fake.bodies] == [None] * 8
    assert [body.get("num_speculative_tokens") for body in other.bodies] == [2] * 8
    relative = compared(results, "two")["busy"]
    assert relative == {"auto": results[1].mean / results[0].mean, "two": 1.0}


def test_every_repeat_begins_with_another_policy(fake: Fake) -> None:
    list(measure(served([f"a={fake.url}@1", f"b={fake.url}@2"]), ["busy"], LOAD, 2, lambda steps: steps))
    assert [body["num_speculative_tokens"] for body in fake.bodies] == [1] * 4 + [2] * 8 + [1] * 4


def test_addresses_are_policies() -> None:
    assert served(["auto=http://host:1", "http://host:2@4"]) == [
        Served("auto", "http://host:1"),
        Served("at most 4", "http://host:2", 4),
    ]
    assert [policy.most for policy in served(["https://host"])] == list(MAX_DRAFT_TOKENS.values())


@pytest.mark.parametrize("wrong", [["host:8000"], ["auto=ftp://host"], ["http://host@two"], ["http://a", "http://b"]])
def test_other_addresses_are_refused(wrong: list[str]) -> None:
    with pytest.raises(ParameterError, match="NAME=URL"):
        served(wrong)


def test_requests_overlap(fake: Fake) -> None:
    fake.together = threading.Barrier(2)
    assert len(list(measure(served([fake.url]), ["busy"], LOAD, 1, lambda steps: steps))) == 4


def test_latency_includes_waiting_after_the_due_time(fake: Fake) -> None:
    late = Load(requests=2, interval=0.2, cv=0.01, tokens=6, max_batch_size=0)
    (plain,) = measure(served([f"plain={fake.url}@0"]), ["steady"], late, 1, lambda steps: steps)
    assert plain.seconds > 0.4
    assert plain.mean < plain.seconds - 0.25  # about 0.3 s on average before it was due do not count


def test_a_refusal_ends_the_benchmark_with_the_servers_message(fake: Fake) -> None:
    fake.refuse = "too many requests wait"
    with pytest.raises(PacelineError, match=r"429: too many requests wait"):
        list(measure(served([fake.url]), ["busy"], LOAD, 1, lambda steps: steps))


@pytest.mark.parametrize(
    ("ends", "message"),
    [
        (("usage",), "ended a stream without [DONE]"),
        (("[DONE]",), "ended a stream without usage"),
        (("nothing",), "the connection to http://127.0.0.1"),
    ],
)
def test_a_stream_that_is_cut_off_is_no_answer(fake: Fake, ends: tuple[str, ...], message: str) -> None:
    fake.ends = ends
    with pytest.raises(PacelineError, match=re.escape(message)):
        list(measure(served([fake.url]), ["busy"], LOAD, 1, lambda steps: steps))


def test_the_document_does_not_have_the_key(fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "http.json"
    options = ["--traces", "busy", "--requests", "2", "--interval", "0.01", "--output", str(file)]
    for key in (["--api-key", "sk-secret"], ["--api-key=sk-secret"]):
        words = [f"x={fake.url}", *key, *options]
        monkeypatch.setattr(sys, "argv", ["traffic_http.py", *words])
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, result.output
        assert "sk-secret" not in result.stdout + file.read_text()
        assert "--api-key" in json.loads(file.read_text())["command"]
    assert fake.keys[-1] == "Bearer sk-secret"


def test_a_missing_server_is_reported() -> None:
    with pytest.raises(PacelineError, match=r"no OpenAI-compatible server at http://127\.0\.0\.1:9"):
        list(measure(served(["http://127.0.0.1:9"]), ["busy"], LOAD, 1, lambda steps: steps))


def test_the_command_ends_with_one_json_document(fake: Fake, tmp_path: Path) -> None:
    file = tmp_path / "http.json"
    options = ["--traces", "busy", "--requests", "3", "--interval", "0.01", "--output", str(file)]
    result = CliRunner().invoke(app, [fake.url, *options])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout.splitlines()[-1])
    assert document == json.loads(file.read_text())
    assert [r["policy"] for r in document["results"]] == list(MAX_DRAFT_TOKENS)
    assert document["compared"]["policy"] == "the server's"
    assert document["compared"]["mean_latency_over"]["busy"]["the server's"] == 1
    assert all(r["latency"]["first"] > 0 for r in document["results"])
    assert "ms/token of a batch's sequences" in result.stderr
    assert file.with_suffix(".png").is_file()
