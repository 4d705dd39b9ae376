"""``/v1/messages`` against a live server: streamed and whole, with and without speculation, errors, keys and quotas."""

from __future__ import annotations

import json
from typing import Any

import pytest

from server.messages.test_replies import joined
from server_support import Live

pytestmark = pytest.mark.usefixtures("one_thread")

USER: dict[str, Any] = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
TOOL: dict[str, Any] = {"name": "read", "description": "Reads.", "input_schema": SCHEMA}
BODY: dict[str, Any] = {"model": "tiny", "max_tokens": 40, "messages": [USER], "seed": 7}
FORCED: dict[str, Any] = {"tools": [TOOL], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}


def ask(live: Live, **changes: Any) -> dict[str, Any]:
    reply = live.post("/v1/messages", {**BODY, **changes})
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def stream(live: Live, **changes: Any) -> list[dict[str, Any]]:
    reply = live.post("/v1/messages", {**BODY, **changes, "stream": True})
    assert reply.status_code == 200, reply.text
    events = [block.split("\n", 1) for block in reply.text.strip().split("\n\n")]
    documents = [json.loads(data.removeprefix("data: ")) for _, data in events]
    assert [name.removeprefix("event: ") for name, _ in events] == [document["type"] for document in documents]
    return documents


@pytest.mark.parametrize("changes", [{}, FORCED], ids=["text", "call"])
def test_a_stream_makes_the_whole_message_with_and_without_speculation(live: Live, changes: dict[str, Any]) -> None:
    whole = ask(live, **changes)
    for k in (0, 4):
        events = stream(live, **changes, num_speculative_tokens=k)
        assert events[0]["message"]["content"] == []
        found = joined(events)
        for block, wanted in zip(found, whole["content"], strict=True):
            assert block | {"id": ""} == wanted | {"id": ""}, "ids of calls are new each time"
        (last,) = (event for event in events if event["type"] == "message_delta")
        assert last["delta"] == {"stop_reason": whole["stop_reason"], "stop_sequence": None}
        assert last["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


def test_a_forced_call_follows_its_schema(live: Live) -> None:
    (call,) = ask(live, **FORCED, max_tokens=80)["content"]
    assert (call["type"], call["name"]) == ("tool_use", "read")
    assert call["input"] in ({"n": 1}, {"n": 2}, {"INVALID_JSON": call["input"].get("INVALID_JSON")})


@pytest.mark.parametrize("tools", [None, [TOOL]], ids=["alone", "beside tools"])
def test_a_text_follows_the_schema_of_its_format(live: Live, tools: list[dict[str, Any]] | None) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"], "additionalProperties": False}
    more = {"output_config": {"format": {"type": "json_schema", "schema": schema}}} | (
        {"tools": tools} if tools else {}
    )
    (block,) = ask(live, **more, max_tokens=60)["content"]
    if block["type"] == "text":
        assert json.loads(block["text"]) == {"a": "x"}
    else:
        assert (tools, block["name"]) == ([TOOL], "read")
    (streamed,) = joined(stream(live, **more, max_tokens=60))
    assert streamed | {"id": ""} == block | {"id": ""}


def test_tokens_are_counted_and_come_from_the_cache_when_only_the_billing_line_changes(live: Live) -> None:
    def body(count: int) -> dict[str, Any]:
        system = [
            {"type": "text", "text": f"x-anthropic-billing-header: cc_version=1; cch={count};"},
            {"type": "text", "text": "You are a careful engineer who reads before writing."},
        ]
        return {"model": "tiny", "messages": [USER], "system": system}

    (counted,) = {live.post("/v1/messages/count_tokens", body(n)).json()["input_tokens"] for n in (1, 2)}
    ask(live, **body(1))
    usage = ask(live, **body(2))["usage"]
    assert usage["input_tokens"] == 1, "the last token is always read"
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == counted


def test_stop_sequences_end_the_message(live: Live) -> None:
    text = ask(live)["content"][0]["text"]
    stop = next(letter for letter in text[4:] if letter.isascii())
    reply = ask(live, stop_sequences=[stop])
    assert (reply["stop_reason"], reply["stop_sequence"]) == ("stop_sequence", stop)
    assert reply["content"][0]["text"] == text[: text.index(stop)].rstrip()


@pytest.mark.parametrize(
    ("changes", "status", "kind"),
    [
        ({"model": "other"}, 404, "not_found_error"),
        ({"messages": [{"role": "user", "content": "x" * 600}]}, 400, "invalid_request_error"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}}, 400, "invalid_request_error"),
        ({"messages": 3}, 400, "invalid_request_error"),
        ({"timeout": 1e-6}, 504, "timeout_error"),
    ],
)
def test_errors_have_the_apis_form(live: Live, changes: dict[str, Any], status: int, kind: str) -> None:
    reply = live.post("/v1/messages", {**BODY, **changes})
    assert (reply.status_code, reply.json()["type"], reply.json()["error"]["type"]) == (status, "error", kind)
    live.wait_until_idle()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tools": [{"name": "loose", "input_schema": {"not": {}}, "strict": True}]}, "tools: tool loose: "),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "output_config.format: "),
    ],
    ids=["tool", "text"],
)
def test_a_schema_that_cannot_be_enforced_is_named_by_its_field(live: Live, changes: dict[str, Any], says: str) -> None:
    """Anthropic's errors have no field of their own for it."""
    reply = live.post("/v1/messages", {**BODY, **changes})
    assert reply.status_code == 400
    assert reply.json()["error"]["message"].startswith(says)


def test_an_error_in_a_stream_is_an_event(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("out of order")

    monkeypatch.setattr(live.context.llm.engine.rounds, "step", broken)
    events = stream(live)
    monkeypatch.undo()
    assert [event["type"] for event in events] == ["message_start", "ping", "error"]
    assert events[-1]["error"]["type"] == "api_error"
    ask(live)


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_keys_are_taken_from_either_header(keyed: Live, path: str) -> None:
    body = {"model": "tiny", "messages": [USER]} | ({"max_tokens": 4} if path == "/v1/messages" else {})
    for headers, status in (({}, 401), ({"x-api-key": "free"}, 200), ({"authorization": "Bearer free"}, 200)):
        reply = keyed.post(path, body, headers=headers)
        assert reply.status_code == status, reply.text
    assert keyed.post(path, body, headers={"x-api-key": "wrong"}).json()["error"]["type"] == "authentication_error"


def test_quotas_hold_for_a_key_in_either_header(keyed: Live) -> None:
    body = {**BODY, "max_tokens": 400}
    first = keyed.post("/v1/messages", body, headers={"x-api-key": "few"})
    second = keyed.post("/v1/messages", body, headers={"authorization": "Bearer few"})
    assert (first.status_code, second.status_code) == (200, 429)
    assert second.json()["error"]["type"] == "rate_limit_error"
