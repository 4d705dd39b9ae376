"""Structured outputs over HTTP: other requests continue during a compilation, and time limits include it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from paceline.config import StructuredOutputs
from paceline.errors import StructureError
from paceline.structured import grammars
from paceline.structured.trial import GrammarLimitError
from polling import wait_until
from server_support import Live

pytest.importorskip("llguidance", reason="structured outputs need the extra 'structured'")

SLOW = {"type": "string", "pattern": "slow"}


def chat(schema: Any, **extra: Any) -> dict[str, Any]:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5, "response_format": form, **extra}


@pytest.fixture
def compiling(live: Live, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Events of compilations that never end: "begun", then "given up"."""
    told: list[str] = []
    released = threading.Event()
    usual = live.context.llm.requests.structure

    def structure(wanted: StructuredOutputs, stopped: Callable[[], bool]) -> Any:
        if "slow" not in str(wanted.json):
            return usual(wanted, stopped)
        told.append("begun")
        while not (stopped() or released.is_set()):
            time.sleep(0.01)
        told.append("given up")
        raise StructureError("stopped")

    monkeypatch.setattr(live.context.llm.requests, "structure", structure)
    yield told
    released.set()
    wait_until(lambda: told.count("begun") == told.count("given up"))


def test_other_requests_continue_while_a_structure_compiles(live: Live, compiling: list[str]) -> None:
    replies: list[int] = []
    waiting = threading.Thread(
        target=lambda: replies.append(live.post("/v1/chat/completions", chat(SLOW)).status_code), daemon=True
    )
    waiting.start()
    wait_until(lambda: compiling == ["begun"])
    assert live.post("/tokenize", {"prompt": "abc"}).status_code == 200
    assert live.post("/v1/completions", {"prompt": "abc", "max_tokens": 3}).status_code == 200
    assert live.post("/v1/chat/completions", chat({"type": "boolean"})).status_code == 200
    assert waiting.is_alive()
    assert compiling == ["begun"]
    assert replies == []


@pytest.mark.parametrize("stream", [False, True])
def test_timeout_includes_compiling(live: Live, compiling: list[str], stream: bool) -> None:
    timeout = 0.05
    while not compiling:  # it began after the time limit: a loaded machine needs longer to begin
        timeout *= 4
        assert live.post("/v1/chat/completions", chat(SLOW, timeout=timeout, stream=stream)).status_code == 504
    wait_until(lambda: compiling == ["begun", "given up"])


def test_a_disconnect_stops_the_compilation(live: Live, compiling: list[str]) -> None:
    with live.asking("/v1/chat/completions", chat(SLOW)):
        wait_until(lambda: compiling == ["begun"])
    wait_until(lambda: compiling == ["begun", "given up"])


def test_a_constraint_that_gives_up_fails_the_answer_with_its_reason(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = {"type": "string", "pattern": "[a-c]{100}"}

    def fail(_: str) -> None:
        raise GrammarLimitError("a test")

    with monkeypatch.context() as context:
        live.context.llm.requests.structure(StructuredOutputs(json=schema))
        context.setattr(grammars, "check_followed", fail)
        reply = live.post("/v1/chat/completions", chat(schema))
    assert reply.status_code == 400
    assert "too much to follow: a test" in reply.json()["error"]["message"]
    assert live.post("/v1/chat/completions", chat({"type": "boolean"})).status_code == 200
