"""The script that counts files and calls of a streamed chat."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from benchmarks.request_trace import REQUESTS, SOURCE, counted, described

from chat_support import save_chat_model
from server_support import load

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_chat_enters_the_server_and_the_engine_and_calls_grow_with_its_tokens(tmp_path: Path) -> None:
    llm = load(save_chat_model(tmp_path / "tiny"))
    path = "/v1/chat/completions"
    longer = asyncio.run(counted(llm, {path: {**REQUESTS[path], "max_tokens": 96}}))
    found = asyncio.run(counted(llm, REQUESTS))
    assert found.keys() == REQUESTS.keys()
    for calls in found.values():
        files = {code.co_filename.removeprefix(SOURCE) for code in calls}
        assert {"server/turns.py", "server/service.py", "engine/engine.py"} <= files
    assert longer[path].total() > 1.5 * found[path].total()
    assert described(path, found[path]).startswith(f"{path}: ")
