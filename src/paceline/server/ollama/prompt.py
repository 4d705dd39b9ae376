"""Conversations of Ollama's API in the form of OpenAI's messages, which chat templates expect."""

from __future__ import annotations

from typing import Any

from pydantic_core import to_json

from paceline.chat.options import ChatOptions
from paceline.server.ollama.protocol import (
    AnswerRequest,
    ChatMessage,
    MadeCall,
    OllamaChatRequest,
    OllamaGenerateRequest,
)


def messages_of(body: OllamaChatRequest | OllamaGenerateRequest) -> list[dict[str, Any]]:
    """Return the messages of a request. Those of /api/generate are a system message and a question."""
    if isinstance(body, OllamaChatRequest):
        return [_plain(message) for message in body.messages]
    system = [{"role": "system", "content": body.system}] if body.system else []
    return [*system, {"role": "user", "content": body.prompt}]


def _plain(message: ChatMessage) -> dict[str, Any]:
    fields = {
        "role": message.role,
        "content": message.content or "",
        "reasoning_content": message.thinking,
        "tool_calls": [_call(call) for call in message.tool_calls or ()] or None,
        "name": message.tool_name,
        "tool_call_id": message.tool_call_id,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _call(call: MadeCall) -> dict[str, Any]:
    own = {} if call.id is None else {"id": call.id}
    function = {"name": call.function.name, "arguments": to_json(call.function.arguments).decode()}
    return {**own, "type": "function", "function": function}


def options_of(body: AnswerRequest) -> ChatOptions:
    """Return the options of the conversation. Raises ParameterError."""
    tools = [tool.plain() for tool in body.tools or ()] if isinstance(body, OllamaChatRequest) else []
    return ChatOptions.of({"tools": tools, "reasoning_effort": body.reasoning_effort})
