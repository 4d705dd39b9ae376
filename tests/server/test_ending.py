"""Start and shutdown when something hangs: the engine, the model's loading, the log's reader, the disk."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import logging
import os
import signal
import socket
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

import hanging
from forked import Forked
from paceline.cli.main import app
from paceline.config import ServerConfig
from paceline.errors import ParameterError
from paceline.server.ending import EXIT_STUCK
from paceline.server.logs import JsonFormatter, LogWriter, TextFormatter, Throttle, request_id
from paceline.server.sockets import listen
from polling import PATIENCE, wait_until
from server_support import Live, asking, start
from web import client

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_server_that_has_ended_keeps_no_model_in_memory(tiny: str) -> None:
    server = start(ServerConfig(port=0), tiny)
    live = next(server)
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "logprobs": True}
    assert live.post("/v1/chat/completions", chat).status_code == 200
    llm = weakref.ref(live.context.llm)
    tokenizer = weakref.ref(live.context.texts.tokenizer)
    del live
    assert next(server, None) is None
    gc.collect()
    assert (llm(), tokenizer()) == (None, None)


@contextmanager
def serving(model: str, hangs: str, folder: Path, stderr: Path) -> Iterator[tuple[Forked, str]]:
    port = folder / "port"
    process = Forked(hanging.serve, model, hangs, port, stderr=stderr)
    try:
        wait_until(lambda: port.exists() and port.read_text())
        yield process, f"http://127.0.0.1:{port.read_text()}"
    finally:
        process.kill()


def wait_for(process: Forked, url: str, status: str) -> None:
    def is_so() -> bool:
        assert process.poll() is None
        try:
            return bool(client.get(f"{url}/health").json()["status"] == status)
        except httpx.TransportError:
            return False

    wait_until(is_so, f"never {status}", 120)


def full_pipe(path: Path) -> tuple[int, int]:
    """A named pipe whose buffer is full."""
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    full = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        while os.write(full, b"\n" * 64):
            pass
    for end in (reader, full):
        os.set_blocking(end, True)
    return reader, full


def test_a_hanging_engine_and_a_blocked_log_do_not_keep_the_process_alive(tiny: str, tmp_path: Path) -> None:
    unread, full = full_pipe(tmp_path / "log")
    with serving(tiny, "engine", tmp_path, tmp_path / "log") as (process, url):
        wait_for(process, url, "ready")
        with asking(url, "/v1/completions", {"prompt": "a", "max_tokens": hanging.FATAL_TOKENS}):
            wait_for(process, url, "stalled")
        assert client.get(f"{url}/health").status_code == 503
        for _ in range(60):
            assert client.get(f"{url}/nowhere").status_code == 404  # each writes a log line that cannot leave
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == EXIT_STUCK
    os.close(unread)
    os.close(full)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_one_signal_ends_loading_and_a_full_disk_does_not(tiny: str, tmp_path: Path) -> None:
    with serving(tiny, "loading", tmp_path, Path("/dev/full")) as (process, url):
        wait_for(process, url, "loading")
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0


def test_health_reports_a_stalled_engine_until_it_continues(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for live in start(ServerConfig(port=0, stall_timeout=0.1), tiny):
        go_on, engine_step = threading.Event(), live.context.llm.engine.step

        def step(go_on: threading.Event = go_on, engine_step: Any = engine_step) -> Any:
            go_on.wait(2 * PATIENCE)
            return engine_step()

        monkeypatch.setattr(live.context.llm.engine, "step", step)
        asked = threading.Thread(target=live.post, args=("/v1/completions", {"prompt": "a", "max_tokens": 2}))
        asked.start()
        wait_until_health_is(live, "stalled", 503)
        assert live.metric("engine_step_seconds") > 0.1
        go_on.set()
        asked.join(PATIENCE)
        wait_until_health_is(live, "ready", 200)
        wait_until_all_steps_ended(live)


def wait_until_health_is(live: Live, status: str, code: int) -> None:
    wait_until(lambda: live.get("/health").json()["status"] == status)
    assert live.get("/health").status_code == code


def wait_until_all_steps_ended(live: Live) -> None:
    wait_until(lambda: live.metric("engine_step_seconds") == 0)


# --- sockets ----------------------------------------------------------------------------------------------------------


def test_a_port_in_use_is_reported_before_loading() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = ["serve", "no-such-model", "--port", str(port)]
        result = CliRunner().invoke(app, command, env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert f"port={port}" in result.output
    assert "another process listens on 127.0.0.1 there" in result.output


def test_all_addresses_of_a_name_get_the_same_port() -> None:
    sockets = listen(ServerConfig(host="localhost", port=0))
    try:
        assert len({each.getsockname()[1] for each in sockets}) == 1
    finally:
        for each in sockets:
            each.close()


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (ServerConfig(host="no-such-host.invalid", port=0), "host="),
        (ServerConfig(host="203.0.113.7", port=0), "an address of this machine"),
        (ServerConfig(max_connections=2**20, port=0), "max_connections=1048576.*ulimit"),
    ],
)
def test_addresses_that_cannot_be_used_are_reported_in_one_sentence(
    config: ServerConfig, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (1024, 4096))
    monkeypatch.setattr("resource.setrlimit", lambda *_: None)
    with pytest.raises(ParameterError, match=says):
        listen(config)


# --- lines ------------------------------------------------------------------------------------------------------------


def record(text: str = "a line", **fields: Any) -> logging.LogRecord:
    made = logging.LogRecord("paceline.server", logging.INFO, "", 0, text, (), None)
    made.fields = fields
    return made


def test_log_lines_are_dropped_and_counted_while_stderr_blocks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("paceline.server.logs._MAX_LINES", 100)
    reader, full = full_pipe(tmp_path / "log")
    writer = LogWriter(full)
    for number in range(5000):
        writer.emit(record(f"{number} " + 200 * "x"))
    assert not writer.wait_until_written(0.05)
    text = io.StringIO()
    taking = threading.Thread(target=lambda: text.write(read_all(reader)))
    taking.start()
    assert writer.wait_until_written(PATIENCE)
    writer.emit(record("the next"))
    assert writer.wait_until_written(PATIENCE)
    os.close(full)
    taking.join(PATIENCE)
    lines = text.getvalue().strip().splitlines()
    assert lines[-1] == "the next"
    dropped = [
        int(line.split()[0]) for line in lines if line.endswith("log lines were dropped: stderr was blocked or full")
    ]
    assert sum(dropped) + len(lines) - len(dropped) == 5001
    assert sum(dropped) > 0


def read_all(descriptor: int) -> str:
    with open(descriptor) as file:
        return file.read()


def test_log_lines_that_do_not_fit_on_the_disk_are_counted() -> None:
    with Path("/dev/full").open("wb", buffering=0) as full:
        writer = LogWriter(full.fileno())
        writer.emit(record())
        assert writer.wait_until_written(PATIENCE)
        assert writer._dropped == 1


def test_a_flood_of_refusals_logs_few_lines() -> None:
    throttle = Throttle()
    refused = [record("refused", status=401) for _ in range(1000)]
    for number, each in enumerate(refused):
        each.created = 1e9 + number / 1000
    passed = [each for each in refused if throttle.filter(each)]
    assert 50 <= len(passed) <= 61
    assert throttle.filter(record("refused", status=400))  # another kind
    late = record("refused", status=401)
    late.created = 1e9 + 60
    assert throttle.filter(late)
    assert late.fields["left_out"] + len(passed) + sum(e.fields.get("left_out", 0) for e in passed) == 1000  # type: ignore[attr-defined]


def test_log_lines_have_the_request_id() -> None:
    token = request_id.set("req-1")
    line = json.loads(JsonFormatter().format(record("refused", status=400)))
    request_id.reset(token)
    assert (line["request_id"], line["status"], line["message"]) == ("req-1", 400, "refused")
    assert "request_id" not in json.loads(JsonFormatter().format(record()))


def test_an_address_cannot_send_commands_to_the_terminal_that_shows_the_log(
    live: Live, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "uvicorn.access")
    caplog.handler.setFormatter(TextFormatter())
    live.get("/health", headers={"X-Forwarded-For": b"\x1b]0;mine\x07\x9b2J\x7f"})
    wait_until(lambda: "mine" in caplog.text, "the request is not logged")
    (line,) = [line for line in caplog.text.splitlines() if "mine" in line]
    assert r"\x1b]0;mine\x07\x9b2J\x7f" in line
    assert line.isprintable()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\nINFO all is well", r"a\nINFO all is well"),
        ("\r\u2028\u202e\ud800", r"\r\u2028\u202e\ud800"),
        ("größer 好", "größer 好"),
    ],
)
def test_a_line_of_the_text_log_is_one_line_of_printable_text(text: str, shown: str) -> None:
    assert TextFormatter().format(record(text)).endswith(f" {shown}")


def test_only_the_lines_of_an_exception_stay_apart() -> None:
    try:
        raise ValueError("no \x1b[2J\rhere")
    except ValueError:
        failed = record("it failed")
        failed.exc_info = sys.exc_info()
    first, *lines = TextFormatter().format(failed).split("\n")
    assert first.endswith("it failed")
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1] == r"ValueError: no \x1b[2J\rhere"
