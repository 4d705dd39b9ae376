"""Bodies of the Responses API: what is read, what has no effect, what is refused by name; the prompts they make."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.chat.values import ToolChoice
from paceline.config import StructuredOutputs
from paceline.server import errors
from paceline.server.bodies import checked
from paceline.server.responses.prompt import messages_of, options_of
from paceline.server.responses.protocol import ResponsesRequest

USER: dict[str, Any] = {"role": "user", "content": "hi"}
FUNCTION: dict[str, Any] = {"type": "function", "name": "shell", "parameters": {"type": "object"}, "strict": False}


def read(**fields: Any) -> ResponsesRequest:
    return checked(ResponsesRequest, {"model": "m", "input": "hi", **fields})


def said(role: str, text: str, kind: str = "input_text") -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


def test_a_text_is_a_message_of_the_user() -> None:
    assert messages_of(read()) == [USER]
    system = {"role": "system", "content": "Be brief."}
    assert messages_of(read(instructions="Be brief.", input=[USER])) == [system, USER]


def test_an_agents_transcript_becomes_messages() -> None:
    call = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "shell", "arguments": '{"a": 1}'}
    items = [
        said("developer", "Sandboxed."),
        said("user", "Fix it."),
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "First look."}],
        },
        said("assistant", "I look.", "output_text") | {"id": "msg_1", "status": "completed"},
        call,
        call | {"call_id": "c2", "status": "completed"},
        {"type": "function_call_output", "call_id": "c1", "output": "one"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "two"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Done?"}], "encrypted_content": "x"},
        said("assistant", "Done.", "output_text"),
        USER,
    ]
    system, asked, first, one, two, second, last = messages_of(read(instructions="You code.", input=items))
    assert system == {"role": "system", "content": "You code.\n\nSandboxed."}
    assert asked == {"role": "user", "content": "Fix it."}
    assert (first["content"], first["reasoning_content"]) == ("I look.", "First look.")
    assert [each["id"] for each in first["tool_calls"]] == ["c1", "c2"]
    assert one == {"role": "tool", "tool_call_id": "c1", "content": "one"}
    assert two == {"role": "tool", "tool_call_id": "c2", "content": "two"}
    assert second == {"role": "assistant", "content": "Done.", "reasoning_content": "Done?"}
    assert last == USER


def test_calls_of_custom_tools_become_calls_with_a_text() -> None:
    """As Codex sends back what it patched."""
    patch = {"type": "custom_tool_call", "id": "x", "call_id": "c1", "name": "apply_patch", "input": '*** "Begin"'}
    result = {"type": "custom_tool_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "Done"}]}
    _, called, returned = messages_of(read(input=[USER, patch | {"status": "completed"}, result]))
    (call,) = called["tool_calls"]
    assert (call["id"], call["function"]["name"]) == ("c1", "apply_patch")
    assert json.loads(call["function"]["arguments"]) == {"input": '*** "Begin"'}
    assert returned == {"role": "tool", "tool_call_id": "c1", "content": "Done"}


def test_no_items_are_an_empty_text() -> None:
    """As Codex asks whether a server is there."""
    assert messages_of(read(input=[])) == messages_of(read(input="")) == [{"role": "user", "content": ""}]


def test_items_of_the_user_in_a_row_are_one_message() -> None:
    """As Codex sends instructions, surroundings and task. Some chat templates demand that roles alternate."""
    items = [said("developer", "Sandboxed."), said("user", "AGENTS.md"), said("user", "Linux"), USER]
    items += [said("assistant", "Yes.", "output_text"), USER]
    messages = messages_of(read(input=items))
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user"]
    assert messages[1]["content"] == "AGENTS.md\n\nLinux\n\nhi"


def test_only_functions_are_offered() -> None:
    others = [{"type": "web_search"}, {"type": "namespace", "tools": []}, {"type": "image_generation"}]
    options = options_of(read(tools=[FUNCTION, *others], tool_choice={"type": "function", "name": "shell"}))
    assert [tool.name for tool in options.tools] == ["shell"]
    assert options.tool_choice == ToolChoice("required", "shell")
    assert options_of(read(reasoning={"effort": "high", "summary": "auto"})).reasoning_effort == "high"


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_the_choice_among_some_of_the_tools(mode: str) -> None:
    allowed = [{"type": "function", "name": "shell"}, {"type": "web_search"}]
    choice = {"type": "allowed_tools", "mode": mode, "tools": allowed}
    wanted = ToolChoice(mode, allowed=("shell",))  # type: ignore[arg-type]
    assert options_of(read(tools=[FUNCTION], tool_choice=choice)).tool_choice == wanted


def test_the_form_of_the_text() -> None:
    schema = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    assert read(text={"format": schema, "verbosity": "low"}).structure == StructuredOutputs(json={"type": "object"})
    assert read(text={"format": {"type": "json_object"}}).structure == StructuredOutputs(json_object=True)
    assert read(text={"format": {"type": "text"}}).structure is read().structure is None


@pytest.mark.parametrize(
    "fields",
    [
        {
            "store": True,
            "metadata": {},
            "prompt_cache_key": "k",
            "safety_identifier": "s",
            "client_metadata": {"a": "b"},
        },
        {"service_tier": "priority", "include": ["reasoning.encrypted_content"], "background": False},
        {"truncation": "disabled", "top_logprobs": 0, "previous_response_id": None},
    ],
)
def test_fields_that_cannot_change_the_answer_are_accepted(fields: Any) -> None:
    assert messages_of(read(**fields)) == [USER]


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "stores no answers"),
        ({"conversation": "c"}, "conversation", "stores no answers"),
        ({"background": True}, "background", "at once"),
        ({"truncation": "auto"}, "truncation", "never cut"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "item_reference"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input", "input_image"),
        ({"input": [{"type": "dream"}]}, "input", "input.0: type 'dream' is not one of 'message', "),
        ({"colour": "red"}, "colour", "colour"),
        ({"top_logprobs": 2}, "top_logprobs", "needs include"),
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens"),
        ({"stream_options": {}}, "stream_options", "stream"),
    ],
)
def test_everything_else_is_refused_by_name(fields: Any, param: str, says: str) -> None:
    with pytest.raises(errors.ApiError, match=says) as caught:
        read(**fields)
    assert caught.value.param == param
