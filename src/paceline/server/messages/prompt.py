"""Conversations of the Messages API in the form of OpenAI's messages, which chat templates expect."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic_core import to_json

from paceline.chat.options import ChatOptions
from paceline.server.messages.protocol import (
    Block,
    InputMessage,
    PromptRequest,
    ReadableBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from paceline.server.protocol import text_of
from paceline.server.turns import with_joined_turns

_BILLING = re.compile(r"^x-anthropic-billing-header:[^\n]*\n?", re.MULTILINE)


def messages_of(body: PromptRequest) -> list[dict[str, Any]]:
    """Return the messages. Results of tools and texts keep their order; neighbours of one role are joined."""
    system = _system(body)
    found = [] if not system else [{"role": "system", "content": system}]
    for message in body.messages:
        found += [_assistant(message.blocks)] if message.role == "assistant" else _others(message)
    return with_joined_turns(found, "user", "assistant")


def _system(body: PromptRequest) -> str:
    """The instructions without the client's billing line: it changes each time, so no prefix would be found again."""
    texts = [body.system] if isinstance(body.system, str) else [block.text for block in body.system or ()]
    kept = [_BILLING.sub("", text) for text in texts]
    return "\n".join(text for text in kept if text)


def _others(message: InputMessage) -> Iterator[dict[str, Any]]:
    texts: list[str] = []
    for block in message.blocks:
        if isinstance(block, ToolResultBlock):
            yield from _joined(message.role, texts)
            texts = []
            said = text_of(block.content or "") or ("Error" if block.is_error else "")
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": said}
        elif isinstance(block, ReadableBlock):
            texts.append(block.text)
    yield from _joined(message.role, texts)


def _joined(role: str, texts: Sequence[str]) -> Iterator[dict[str, Any]]:
    if texts:
        yield {"role": role, "content": "\n".join(texts)}


def _assistant(blocks: Sequence[Block]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant"}
    message["content"] = "".join(block.text for block in blocks if isinstance(block, TextBlock))
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    calls = [_call(block) for block in blocks if isinstance(block, ToolUseBlock)]
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _call(block: ToolUseBlock) -> dict[str, Any]:
    function = {"name": block.name, "arguments": to_json(block.input).decode()}
    return {"id": block.id, "type": "function", "function": function}


def options_of(body: PromptRequest) -> ChatOptions:
    """Return the options of the conversation. Raises ParameterError."""
    fields: dict[str, Any] = {"tools": [tool.as_openai() for tool in body.tools or ()]}
    if body.tool_choice is not None:
        kind, name = body.tool_choice.type, body.tool_choice.name
        named = {"type": "function", "function": {"name": name}}
        fields["tool_choice"] = named if kind == "tool" else {"any": "required"}.get(kind, kind)
        fields["parallel_tool_calls"] = not body.tool_choice.disable_parallel_tool_use
    return ChatOptions.of(fields | _thinking(body))


def _thinking(body: PromptRequest) -> dict[str, Any]:
    effort = None if body.output_config is None else body.output_config.effort
    thinking = body.thinking
    if thinking is None:
        return {"reasoning_effort": effort}
    if thinking.type == "disabled":
        return {"reasoning_effort": "none"}
    return {"reasoning_effort": effort or "medium", "max_thinking_tokens": thinking.budget_tokens}
