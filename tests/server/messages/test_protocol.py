"""Bodies of the Messages API: what is read, what has no effect, what is refused by name; the prompts they make."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.chat.values import ToolChoice
from paceline.server import errors
from paceline.server.bodies import checked
from paceline.server.messages.prompt import messages_of, options_of
from paceline.server.messages.protocol import MessagesRequest

USER: dict[str, Any] = {"role": "user", "content": "hi"}
TOOL: dict[str, Any] = {"name": "read", "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}}}


def read(**fields: Any) -> MessagesRequest:
    return checked(MessagesRequest, {"model": "m", "max_tokens": 8, "messages": [USER], **fields})


def text(said: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": said, **fields}


BILLING = "x-anthropic-billing-header: cc_version=1; cch=91b7f;"


@pytest.mark.parametrize(
    "system",
    [
        [text(BILLING), text("Be brief.", cache_control={"type": "ephemeral"}), text("Read first.")],
        f"{BILLING}\nBe brief.\nRead first.",
    ],
)
def test_the_billing_line_of_the_system_is_left_out(system: Any) -> None:
    assert messages_of(read(system=system)) == [{"role": "system", "content": "Be brief.\nRead first."}, USER]
    assert messages_of(read(system=[text(BILLING)])) == [USER]


def test_a_conversation_with_tools_and_thoughts() -> None:
    conversation = [
        {"role": "user", "content": [text("Fix it."), text("Now.")]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "First look.", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                text("I look."),
                {"type": "tool_use", "id": "t1", "name": "read", "input": {"path": "ä.py"}},
                {"type": "tool_use", "id": "t2", "name": "read", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [text("a"), text("b")]},
                {"type": "tool_result", "tool_use_id": "t2", "is_error": True},
                text("Go on."),
            ],
        },
    ]
    asked, said, first, second, last = messages_of(read(messages=conversation))
    assert asked == {"role": "user", "content": "Fix it.\nNow."}
    assert (said["content"], said["reasoning_content"]) == ("I look.", "First look.")
    assert [call["id"] for call in said["tool_calls"]] == ["t1", "t2"]
    assert json.loads(said["tool_calls"][0]["function"]["arguments"]) == {"path": "ä.py"}
    assert first == {"role": "tool", "tool_call_id": "t1", "content": "ab"}
    assert second == {"role": "tool", "tool_call_id": "t2", "content": "Error"}
    assert last == {"role": "user", "content": "Go on."}


def said(role: str, *blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": role, "content": list(blocks)}


def document(data: Any, kind: str = "text", **fields: Any) -> dict[str, Any]:
    source = {"type": kind, "media_type": "text/plain", "data": data} if kind == "text" else {"type": kind, **data}
    return {"type": "document", "source": source, **fields}


@pytest.mark.parametrize(
    ("block", "wanted"),
    [
        (document("One."), "One."),
        (document("One.", title="A", context="old", citations={"enabled": False}, cache_control={}), "A\nold\nOne."),
        (document({"content": "One."}, "content"), "One."),
        (document({"content": [text("One."), text("Two.")]}, "content"), "One.Two."),
        ({"type": "search_result", "source": "s", "title": "A", "content": [text("One.")]}, "A\ns\nOne."),
    ],
)
def test_documents_with_a_text_are_read_as_text(block: dict[str, Any], wanted: str) -> None:
    result = {"type": "tool_result", "tool_use_id": "t", "content": [block]}
    (asked,) = messages_of(read(messages=[said("user", text("Read."), block)]))
    assert asked == {"role": "user", "content": f"Read.\n{wanted}"}
    (returned,) = messages_of(read(messages=[said("user", result)]))
    assert returned == {"role": "tool", "tool_call_id": "t", "content": wanted}


def test_tools_that_a_search_found_are_named_in_its_result() -> None:
    found = [{"type": "tool_reference", "tool_name": name} for name in ("read", "write")]
    (result,) = messages_of(
        read(messages=[said("user", {"type": "tool_result", "tool_use_id": "t", "content": found})])
    )
    assert result == {"role": "tool", "tool_call_id": "t", "content": "[tool read][tool write]"}


def test_neighbouring_messages_of_one_role_are_one() -> None:
    """Mistral's and Gemma's chat templates demand that roles alternate."""
    thought, call = (
        {"type": "thinking", "thinking": "Hm."},
        {"type": "tool_use", "id": "t", "name": "read", "input": {}},
    )
    result = {"type": "tool_result", "tool_use_id": "t", "content": "a"}
    conversation = [USER, USER, said("assistant", thought), said("assistant", text("I look."))]
    conversation += [said("assistant", text("Now."), call), said("assistant", text("So.")), said("user", result), USER]
    asked, first, second, answer, last = messages_of(read(messages=[*conversation, USER]))
    assert asked == {"role": "user", "content": "hi\n\nhi"}
    assert (first["content"], first["reasoning_content"]) == ("I look.\n\nNow.", "Hm.")
    assert [each["id"] for each in first["tool_calls"]] == ["t"]
    assert second == {"role": "assistant", "content": "So."}
    assert answer == {"role": "tool", "tool_call_id": "t", "content": "a"}
    assert last == asked


@pytest.mark.parametrize(
    ("choice", "wanted"),
    [
        ({"type": "any"}, (ToolChoice("required"), True)),
        ({"type": "auto", "disable_parallel_tool_use": True}, (ToolChoice("auto"), False)),
        ({"type": "none"}, (ToolChoice("none"), True)),
        ({"type": "tool", "name": "read"}, (ToolChoice("required", "read"), True)),
    ],
)
def test_tools_and_the_choice_among_them(choice: Any, wanted: tuple[Any, bool]) -> None:
    options = options_of(read(tools=[TOOL], tool_choice=choice))
    assert (options.tool_choice, options.parallel_tool_calls) == wanted
    (tool,) = options.tools
    assert tool.sent is not None
    assert tool.sent["function"] == {"name": "read", "parameters": TOOL["input_schema"]}


@pytest.mark.parametrize(
    ("fields", "effort", "budget"),
    [
        ({}, None, None),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "medium", 1024),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}}, "high", None),
        ({"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}}, "none", None),
        ({"output_config": {"effort": "low"}}, "low", None),
    ],
)
def test_thinking(fields: Any, effort: str | None, budget: int | None) -> None:
    options = options_of(read(**fields))
    assert (options.reasoning_effort, options.max_thinking_tokens) == (effort, budget)


@pytest.mark.parametrize(
    "fields",
    [
        {"metadata": {"user_id": "u"}},
        {"service_tier": "standard_only"},
        {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
        {"mcp_servers": [], "thread": None},
        {"tools": [TOOL | {"type": "custom", "cache_control": {"type": "ephemeral"}, "eager_input_streaming": True}]},
    ],
)
def test_fields_that_cannot_change_the_answer_are_accepted(fields: Any) -> None:
    assert messages_of(read(**fields)) == [USER]


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
RESULT = {"type": "tool_result", "tool_use_id": "a", "content": [IMAGE]}


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages.0.content", "type image"),
        ({"messages": [{"role": "user", "content": [RESULT]}]}, "messages.0.content", "type image"),
        ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "messages.0.content", "video"),
        (
            {"messages": [said("user", document({"media_type": "application/pdf", "data": ""}, "base64"))]},
            "messages.0.content",
            "type base64 are not supported: this server reads text only",
        ),
        (
            {"messages": [said("user", document("a", citations={"enabled": True}))]},
            "messages.0.content",
            "citations.enabled: Input should be False",
        ),
        ({"messages": [{"role": "assistant", "content": "So"}]}, "messages", "cannot continue"),
        ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": ""}]}]}, "messages.0", "thinking"),
        ({"messages": []}, "messages", "at least 1"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0.type", "custom"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice", "a name belongs"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management", "not supp"),
        ({"container": "c"}, "container", "not supported"),
        ({"colour": "red"}, "colour", "colour"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens"),
    ],
)
def test_everything_else_is_refused_by_name(fields: Any, param: str, says: str) -> None:
    with pytest.raises(errors.ApiError, match=says) as caught:
        read(**fields)
    assert caught.value.param == param
    assert caught.value.body_for("/v1/messages")["error"]["type"] == "invalid_request_error"


def test_a_thread_is_refused_so_that_the_client_goes_on_without_one() -> None:
    """The tool runner of Anthropic's client begins threads, and reads from the details that this server has none."""
    with pytest.raises(errors.ApiError, match="thread is not supported: this server stores no conversations") as caught:
        read(thread={"type": "create"})
    error = caught.value.body_for("/v1/messages")["error"]
    assert error["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
