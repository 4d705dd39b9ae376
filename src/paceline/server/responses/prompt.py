"""Items of the Responses API in the form of OpenAI's messages, which chat templates expect."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from paceline.chat.options import ChatOptions
from paceline.server.protocol import text_of
from paceline.server.responses.protocol import (
    AllowedFunctions,
    CallOutputItem,
    CustomCallItem,
    FunctionCallItem,
    Item,
    MessageItem,
    NamedFunction,
    ReasoningItem,
    ResponsesRequest,
)
from paceline.server.turns import with_joined_turns

Message = dict[str, Any]


def messages_of(body: ResponsesRequest) -> list[Message]:
    """Return the messages. Those of the user in a row are one, as are instructions and the first system messages, and
    the assistant's items.
    """
    first = [] if not body.instructions else [{"role": "system", "content": body.instructions}]
    return _one_system(first + with_joined_turns(_messages(body.items), "user"))


def _messages(items: Iterable[Item]) -> list[Message]:
    found: list[Message] = []
    for item in items:
        if isinstance(item, MessageItem) and item.role != "assistant":
            role = "system" if item.role == "developer" else item.role
            found.append({"role": role, "content": text_of(item.content)})
        elif isinstance(item, CallOutputItem):
            found.append({"role": "tool", "tool_call_id": item.call_id, "content": text_of(item.output)})
        else:
            _add_to_assistant(found, item)
    return found


def _add_to_assistant(found: list[Message], item: Item) -> None:
    """Add an item to the assistant's last message, or begin one."""
    if not found or found[-1]["role"] != "assistant" or _begins_anew(found[-1], item):
        found.append({"role": "assistant", "content": ""})
    message = found[-1]
    if isinstance(item, ReasoningItem):
        if item.text:
            message["reasoning_content"] = message.get("reasoning_content", "") + item.text
    elif isinstance(item, FunctionCallItem | CustomCallItem):
        function = {"name": item.name, "arguments": item.arguments}
        call = {"id": item.call_id, "type": "function", "function": function}
        message["tool_calls"] = [*message.get("tool_calls", ()), call]
    elif isinstance(item, MessageItem):
        message["content"] += text_of(item.content)


def _begins_anew(message: Message, item: Item) -> bool:
    """Whether an item cannot follow what the message has: thoughts after text, or text after calls."""
    if isinstance(item, ReasoningItem):
        return bool(message["content"] or "tool_calls" in message)
    return isinstance(item, MessageItem) and "tool_calls" in message


def _one_system(messages: list[Message]) -> list[Message]:
    """Join the system messages at the beginning: many chat templates take one only."""
    count = next((n for n, message in enumerate(messages) if message["role"] != "system"), len(messages))
    if count < 2:
        return messages
    text = "\n\n".join(message["content"] for message in messages[:count])
    return [{"role": "system", "content": text}, *messages[count:]]


def options_of(body: ResponsesRequest) -> ChatOptions:
    """Return the options of the conversation. Raises ParameterError."""
    fields: dict[str, Any] = {"tools": [tool.as_openai() for tool in body.tools or ()]}
    if body.tool_choice is not None:
        fields["tool_choice"] = _choice(body.tool_choice)
    if body.parallel_tool_calls is not None:
        fields["parallel_tool_calls"] = body.parallel_tool_calls
    effort = None if body.reasoning is None else body.reasoning.effort
    return ChatOptions.of(fields | {"reasoning_effort": effort})


def _choice(choice: str | NamedFunction | AllowedFunctions) -> str | dict[str, Any]:
    """A tool choice in the form of chats."""
    if isinstance(choice, NamedFunction):
        return {"type": "function", "function": {"name": choice.name}}
    if isinstance(choice, AllowedFunctions):
        among = {"mode": choice.mode, "tools": [_choice(tool) for tool in choice.tools]}
        return {"type": "allowed_tools", "allowed_tools": among}
    return choice
