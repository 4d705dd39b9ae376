"""Messages as chat templates take them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.chat.families import ToolFormat
from paceline.chat.values import ToolDefinition
from paceline.errors import RequestError

Message = Mapping[str, Any]


def for_template(
    messages: Sequence[Message], tools: Sequence[ToolDefinition], form: ToolFormat | None, chat_template: str
) -> tuple[list[Message], list[dict[str, Any]]]:
    """Return messages and tools for a chat template. form: the syntax of calls, chosen by the caller or known.

    Calls in messages get their arguments as objects, as templates expect them; those that are no object only stay text
    if the template tests for text. Templates that have no tools get them, calls and results as text. Raises
    RequestError if that is not possible.
    """
    if re.search(r"(?<!\w)tools(?!\w)", chat_template) is not None:
        takes_text = re.search(r"arguments\W{0,2} is (not )?string", chat_template) is not None
        return [_with_objects(message, takes_text) for message in messages], [tool.as_openai() for tool in tools]
    has_calls = any(message.get("tool_calls") or message.get("role") == "tool" for message in messages)
    if not tools and not has_calls:
        return list(messages), []
    if form is None or form.instructions is None:
        raise RequestError(
            "the model's chat template has no tools; choose a tool parser (json or hermes) to use it anyway"
        )
    converted = [_as_text(message, form) for message in messages]
    return (_instructed(converted, form.instructions(tools)) if tools else converted), []


def _with_objects(message: Message, takes_text: bool) -> Message:
    calls = [
        {**call, "function": {**call["function"], "arguments": _object(call["function"]["arguments"], takes_text)}}
        for call in message.get("tool_calls") or ()
    ]
    return {**message, "tool_calls": calls} if calls else message


def _object(arguments: object, takes_text: bool) -> object:
    """Arguments as an object. Text that spells none stays text if the template takes text, or else becomes a member."""
    if isinstance(arguments, dict):
        return arguments
    text = _text(arguments)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, dict):
        return value
    return text if takes_text else {"INVALID_JSON": text}


def _text(arguments: object) -> str:
    """Arguments as the model wrote them, blank ones as {}."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return text if text.strip() else "{}"


def _as_text(message: Message, form: ToolFormat) -> Message:
    """A message whose calls, or whose result of a call, are text."""
    if message.get("role") == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return message
    written = [form.writes(call["function"]["name"], _text(call["function"]["arguments"])) for call in calls]
    return {"role": message["role"], "content": "\n".join(filter(None, [message["content"], *written]))}


def _instructed(messages: list[Message], instructions: str) -> list[Message]:
    """The messages with instructions at the end of the system message, which is added if there is none."""
    if messages and messages[0].get("role") == "system":
        system = {**messages[0], "content": f"{messages[0]['content']}\n\n{instructions}"}
        return [system, *messages[1:]]
    return [{"role": "system", "content": instructions}, *messages]
