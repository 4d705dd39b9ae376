"""Hostile requests to the routes of agents: refused by name or answered, never a server error, on each route."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from chat_support import ADD, TEMPLATE, save_chat_model
from paceline.config import ServerConfig
from server_support import Live, start

pytest.importorskip("llguidance", reason="structured outputs need the extra 'structured'")
pytestmark = pytest.mark.usefixtures("one_thread")

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
Case = tuple[str, Mapping[str, Any], int, str]  # name, fields of a chat, status, words of the refusal


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    template = TEMPLATE.replace("{{ c.function.arguments.a }}", "{{ c.function | tojson }}")
    path = save_chat_model(tmp_path_factory.mktemp("attacks") / "tiny", template)
    yield from start(ServerConfig(port=0, served_model_name="tiny"), path)


def nested(depth: int) -> dict[str, Any]:
    """A schema of objects in objects."""
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def tool(parameters: Mapping[str, Any], name: str = "f", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


def values(pattern: str) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": {"type": "string", "pattern": pattern}}, "required": ["a"]}


def called(arguments: str, name: str = "f", id_: str = "c") -> dict[str, Any]:
    """A conversation in which the assistant has made a call."""
    call = {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    return {"messages": [*USER, said, {"role": "tool", "tool_call_id": id_, "content": "r"}]}


def brackets(depth: int) -> str:
    return f'{{"a": {"[" * depth}{"]" * depth}}}'


NO_TEXT = {"model": "tiny", "max_tokens": 5}
USER = [{"role": "user", "content": "go"}]
FORCED = {"tool_choice": "required"}
LONG = "the text has|the prompt has"
CASES: Sequence[Case] = (
    ("schema of 50 levels", {"tools": [tool(nested(50))], **FORCED}, 400, LONG),
    ("schema of 150 levels", {"tools": [tool(nested(150))], **FORCED}, 400, "recursion limit"),
    ("arguments of 150 levels", called(brackets(150)), 200, ""),
    ("arguments of 900 levels", called(brackets(900)), 400, "nested too deeply"),
    ("arguments of 900 levels and a control token", called(brackets(900), name="<|end|>"), 400, "nested too deeply"),
    ("arguments of 100,000 levels", called(brackets(100_000)), 400, LONG),
    ("half a character", called('{"a": "\\ud800"}'), 400, "half characters"),
    ("numbers without end", called(f'{{"a": NaN, "b": 1e999, "c": {"9" * 50}}}'), 200, ""),
    ("no arguments", called(""), 200, ""),
    ("a list of arguments", called("[1]"), 200, ""),
    ("control characters", called("{}", name="\x00\x1b[31m\n", id_="\x00\r\n"), 200, ""),
    ("512 tools", {"tools": [tool({}, f"f{n}") for n in range(512)], **FORCED}, 400, LONG),
    ("513 tools", {"tools": [tool({}, f"f{n}") for n in range(513)]}, 400, "512"),
    ("a name with a newline", {"tools": [tool({}, "f\n")]}, 400, "names of the form"),
    ("a name twice", {"tools": [ADD, ADD]}, 400, "a name of its own"),
    ("a schema that never ends", {"tools": [tool(nested(0) | {"type": "object"})], **FORCED}, 200, ""),
    ("a pattern that explodes", {"tools": [tool(values("^((a|b){1,100}(x|y){1,100}z?){1,16}$"))], **FORCED}, 200, ""),
    ("the same, strict", {"tools": [tool(values("^(((a|b){1,100}){1,100}z?){1,99}$"), strict=True)]}, 400, "tool f"),
    ("an array of arguments", {"tools": [tool({"type": "array"})]}, 400, "an object"),
)


EVERYWHERE = [  # arguments of /v1/messages are objects, whose depth the limit on bodies holds
    (path, case)
    for path in (CHAT, MESSAGES, RESPONSES)
    for case in CASES
    if path != MESSAGES or "messages" not in case[1]
]


def as_messages(fields: Mapping[str, Any]) -> dict[str, Any]:
    """A chat's fields in the Messages API."""
    tools = [
        {"name": each["function"]["name"], "input_schema": each["function"].get("parameters", {})}
        | ({"strict": True} if each["function"].get("strict") else {})
        for each in fields.get("tools", ())
    ]
    choice = {"tool_choice": {"type": "any"}} if "tool_choice" in fields else {}
    return {"model": "tiny", "messages": USER, "tools": tools, "max_tokens": 5} | choice


def as_responses(fields: Mapping[str, Any]) -> dict[str, Any]:
    """A chat's fields in the Responses API."""
    items: list[dict[str, Any]] = []
    for message in fields.get("messages", USER):
        calls = message.get("tool_calls", ())
        items += [{"type": "function_call", "call_id": call["id"], **call["function"]} for call in calls]
        if message["role"] == "tool":
            result = {"call_id": message["tool_call_id"], "output": message["content"]}
            items.append({"type": "function_call_output", **result})
        elif not calls:
            items.append(dict(message))
    tools = [{"type": "function", **each["function"]} for each in fields.get("tools", ())]
    return {"input": items, "tools": tools, "max_output_tokens": 5} | ({**FORCED} if "tool_choice" in fields else {})


@pytest.mark.parametrize(("path", "case"), EVERYWHERE, ids=[f"{case[0]} in {path}" for path, case in EVERYWHERE])
def test_a_hostile_request_is_refused_by_name_or_answered(live: Live, path: str, case: Case) -> None:
    _, fields, status, says = case
    make = {CHAT: lambda chat: {"messages": USER, "max_tokens": 5, **chat}, MESSAGES: as_messages}
    body = make.get(path, as_responses)(fields)
    for stream in (False, True):
        reply = live.post(path, {**body, "stream": stream})
        assert reply.status_code == status, reply.text[:500]
        assert any(words in reply.text for words in says.split("|"))
        assert len(reply.content) < 20_000
    live.wait_until_idle()


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        (RESPONSES, {"input": "x", "previous_response_id": "\x00"}, "previous_response_id"),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input_image"),
        (RESPONSES, {"input": [{"type": "item_reference", "id": "x"}]}, "item_reference"),
        (RESPONSES, {"input": "x", "reasoning": {"effort": "a\nb"}}, "reasoning_effort"),
        (MESSAGES, {**NO_TEXT, "messages": [{"role": "user", "content": []}]}, "at least one"),
        (MESSAGES, {**NO_TEXT, "messages": [{"role": "user", "content": [{"type": "image"}]}]}, "image"),
        (CHAT, {"messages": USER, "tools": [ADD], "n": 10**9}, "n"),
        (CHAT, {"messages": USER, "tools": [ADD], "structured_outputs": {"regex": "a"}}, "json or json_object"),
        (CHAT, {"messages": USER, "chat_template_kwargs": {"__class__": 1}}, "chat_template_kwargs"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(live: Live, path: str, body: Any, says: str) -> None:
    reply = live.post(path, body)
    assert reply.status_code == 400, reply.text
    assert says in json.loads(reply.text)["error"]["message"]
