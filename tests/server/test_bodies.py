"""Hostile request bodies: refused quickly, with a short message that names the client's own field."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from pydantic import BaseModel

from paceline.config import SamplingParams
from paceline.errors import ParameterError
from paceline.server import errors, limits
from paceline.server.bodies import read
from paceline.server.chat_protocol import ChatRequest
from paceline.server.protocol import CompletionRequest, DetokenizeRequest
from server_support import Live
from web import client

pytestmark = pytest.mark.usefixtures("one_thread")

MANY = 200_000  # invalid items, each of which pydantic reports


def refusal(body: bytes, model: type[BaseModel] = CompletionRequest) -> tuple[str, str | None]:
    with pytest.raises(errors.ApiError) as caught:
        read(model, body)
    assert caught.value.status == 400
    error = caught.value.body["error"]
    assert len(json.dumps(error)) < 2 * limits.MAX_MESSAGE
    return error["message"], error["param"]


WRONG: dict[str, Any] = {
    "prompt": {"prompt": [None] * MANY},
    "prompts": {"prompt": [["a"]] * 20_000},
    "stop": {"prompt": "a", "stop": [1] * MANY},
    "stop_token_ids": {"prompt": "a", "stop_token_ids": ["a"] * MANY},
    "logit_bias": {"prompt": "a", "logit_bias": {str(n): "x" for n in range(20_000)}},
    "unknown": {"prompt": "a", **{f"x{n}": n for n in range(20_000)}},
    "messages": {"messages": [{"role": 1, "content": 2, "x": 3}] * 5_000},
    "too many messages": {"messages": [{"role": "user", "content": "a"}] * 5_000},
    "parts": {"messages": [{"role": "user", "content": [{"type": "x" * 1000, "text": 1}] * 4_000}]},
    "calls": {"messages": [{"role": "user", "content": "a", "tool_calls": [1] * MANY}]},
    "long names": {"messages": [{"role": "user", "content": "a", **{f"{n}" + "x" * 1000: 1 for n in range(90)}}]},
    "user": {"prompt": "a", "user": "x" * 2**22},
    "number": {"prompt": "a", "n": "x" * 2**22},
    "role": {"messages": [{"role": "x" * 2**22, "content": "a"}]},
}


@pytest.mark.parametrize("case", WRONG)
def test_many_invalid_items_give_a_short_message(case: str) -> None:
    body = json.dumps(WRONG[case]).encode()
    message, _ = refusal(body, ChatRequest if "messages" in WRONG[case] else CompletionRequest)
    assert message.count(";") < limits.MAX_FAULTS + 1
    assert "x" * (limits.MAX_SHOWN + 1) not in message


@pytest.mark.parametrize(
    ("body", "model", "param"),
    [
        ({"prompt": [1, 2, "a"]}, CompletionRequest, "prompt"),
        ({"prompt": "a", "stop": [1]}, CompletionRequest, "stop"),
        ({"prompt": "a", "stop": ["a", 1]}, CompletionRequest, "stop"),
        ({"prompt": "a", "logit_bias": {"3": "x"}}, CompletionRequest, "logit_bias.3"),
        ({"prompt": "a", "user": 3}, CompletionRequest, "user"),
        ({}, CompletionRequest, "prompt"),
        ([], CompletionRequest, None),
        ({"messages": [{"role": "user", "content": 3}]}, ChatRequest, "messages.0.content"),
        ({"messages": [{"content": "a"}]}, ChatRequest, "messages.0.role"),
        (
            {"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "json_schema"}},
            ChatRequest,
            "response_format.json_schema",
        ),
        (
            {
                "messages": [{"role": "user", "content": "a"}],
                "response_format": {"type": "json_schema", "json_schema": {"name": 1, "schema": {}}},
            },
            ChatRequest,
            "response_format.json_schema.name",
        ),
        ({"tokens": [1, -1]}, DetokenizeRequest, "tokens.1"),
    ],
)
def test_param_names_the_field_as_the_client_wrote_it(body: Any, model: type[BaseModel], param: str | None) -> None:
    message, found = refusal(json.dumps(body).encode(), model)
    assert found == param
    for internal in ("function-", "list[", "[key]", ".str", "constrained"):
        assert internal not in message


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 2**22,
        b"[" * 5000 + b"]" * 5000,
        b'{"prompt":' * 5000 + b"1" + b"}" * 5000,
        b'{"prompt": "a", "seed": ' + b"9" * 4000 + b"}",
        b'{"prompt": "a", "seed": ' + b"9" * 2**20 + b"}",
        b'{"prompt": "a", "temperature": 1e400}',
        b'{"prompt": "a", "temperature": ' + b"9" * 400 + b"}",
        b'{"prompt": "a", "temperature": -Infinity}',
        b'{"prompt": "a", "timeout": 1e999}',
        b'{"prompt": "a", "logit_bias": {"1": 1e400}}',
        b'{"prompt": [' + b"9" * 30 + b"]}",
        b'{"prompt": "\\ud800"}',
        b'{"\\udfff": 1}',
        b'{"prompt": "\xff\xfe"}',
        b"\xef\xbb\xbf{}",
        '{"prompt": "a"}'.encode("utf-16"),
        b'{"prompt": "a"',
        b'{"prompt": "a"} {}',
        b"",
        b"null",
        b"[" + b"[]," * 2**20 + b"1]",
        b"[" + b'"",' * 2**20 + b"1]",
        b"{" + b'"a":1,' * 2**19 + b'"a":1}',
    ],
    ids=lambda body: repr(body[:30]),
)
def test_unusual_json_is_refused(body: bytes) -> None:
    with pytest.raises((errors.ApiError, ParameterError)) as caught:
        read(CompletionRequest, body).sampling(SamplingParams(), 1)  # checks the ranges of numbers
    refused = errors.from_paceline(caught.value)
    assert refused.status == 400
    assert len(str(refused.body)) < 2 * limits.MAX_MESSAGE


def test_brackets_inside_of_strings_do_not_count() -> None:
    text = '[{:,"\\' * 100_000
    assert read(CompletionRequest, json.dumps({"prompt": text}).encode()).prompts == [text]


def test_the_content_type_must_be_json(live: Live) -> None:
    for kind in (None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "\xff;;="):
        headers = {} if kind is None else {"content-type": kind}
        raw = {name: value.encode("latin-1") for name, value in headers.items()}
        reply = client.post(f"{live.url}/v1/completions", content=b'{"prompt": "a"}', headers=raw)
        assert reply.status_code == 415, kind
        assert "application/json" in reply.json()["error"]["message"]
    json_headers = {"content-type": "application/json; charset=utf-8"}
    assert client.post(f"{live.url}/v1/completions", content=b'{"prompt": "a"}', headers=json_headers).is_success


def test_without_a_batch_directory_the_error_names_the_flag(live: Live) -> None:
    for reply in (live.get("/v1/files"), live.get("/v1/batches"), live.post("/v1/files", {})):
        assert reply.status_code == 404
        assert "--batch-dir" in reply.json()["error"]["message"]


def test_random_bodies_never_cause_a_server_error(live: Live) -> None:
    """200 bodies that are cut, spliced and scrambled: each gets a response below 500."""
    draw = random.Random(15)
    whole = json.dumps({"prompt": "ab", "max_tokens": 2, "stop": ["x"], "logit_bias": {"1": 2}, "seed": 3}).encode()
    for _ in range(200):
        body = bytearray(whole[: draw.randrange(1, len(whole) + 1)])
        for _ in range(draw.randrange(4)):
            body[draw.randrange(len(body))] = draw.randrange(256)
        reply = client.post(
            f"{live.url}/v1/completions", content=bytes(body), headers={"content-type": "application/json"}
        )
        assert reply.status_code in (200, 400), (bytes(body), reply.text)
        assert len(reply.content) < 5000
    live.wait_until_idle()
