"""Replies of the Messages API: the whole message, and the events of a stream."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel, JsonValue

from paceline.chat.values import (
    AssistantMessage,
    MessageEvent,
    ReasoningDelta,
    TextDelta,
    ToolCallArgumentsDelta,
    ToolCallEnd,
    ToolCallStart,
)
from paceline.core.outputs import CompletionOutput, RequestOutput
from paceline.server.turns import arguments_of

StopReason: TypeAlias = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
StreamEvent: TypeAlias = dict[str, Any]  # its name is the value of "type"


class MessageTokensDetails(BaseModel):
    """thinking_tokens: tokens of the thoughts."""

    thinking_tokens: int


class MessageUsage(BaseModel):
    """Token counts. input_tokens: prompt tokens that were not copied from cached prefixes."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: MessageTokensDetails

    @staticmethod
    def of(output: RequestOutput, thinking_tokens: int) -> MessageUsage:
        cached, prompt = output.cached_tokens, len(output.prompt_token_ids)
        made = sum(answer.metrics.output_tokens for answer in output.candidates)
        return MessageUsage(
            input_tokens=prompt - cached,
            cache_creation_input_tokens=0,
            cache_read_input_tokens=cached,
            output_tokens=made,
            output_tokens_details=MessageTokensDetails(thinking_tokens=thinking_tokens),
        )


class ContentBlock(BaseModel):
    """A block of the message; the fields depend on its type."""

    type: Literal["text", "thinking", "tool_use"]
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, JsonValue] | None = None


class MessageReply(BaseModel):
    """Response of ``/v1/messages``."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(BaseModel):
    """Response of ``/v1/messages/count_tokens``."""

    input_tokens: int


def content_of(message: AssistantMessage) -> list[ContentBlock]:
    """Return the blocks of a message: thoughts, text, calls."""
    blocks = []
    if message.reasoning is not None:
        blocks.append(ContentBlock(type="thinking", thinking=message.reasoning, signature=""))
    if message.text or not (message.tool_calls or blocks):
        blocks.append(ContentBlock(type="text", text=message.text))
    calls = message.tool_calls
    return blocks + [
        ContentBlock(type="tool_use", id=call.id, name=call.name, input=arguments_of(call.arguments)) for call in calls
    ]


def stop_of(answer: CompletionOutput, calls: int) -> tuple[StopReason, str | None]:
    """Return why the answer ended, and the stop sequence if it was one. calls: number of its tool calls."""
    if answer.finish_reason != "stop":
        return "max_tokens", None
    if isinstance(answer.stop_reason, str):
        return "stop_sequence", answer.stop_reason
    return ("tool_use" if calls else "end_turn"), None


class MessageStream:
    """Turns the events of one answer into those of a stream, block by block."""

    def __init__(self, message: MessageReply) -> None:
        self._message = message
        self._index = -1
        self._open: str | None = None  # type of the block that is open
        self.calls = 0

    def start(self) -> list[StreamEvent]:
        """Events before the first token."""
        return [{"type": "message_start", "message": self._message.model_dump(exclude_unset=True)}, {"type": "ping"}]

    def feed(self, events: Iterable[MessageEvent]) -> list[StreamEvent]:
        """Events of more of the answer."""
        return [found for event in events for found in self._of(event)]

    def end(self, stop_reason: StopReason, stop_sequence: str | None, usage: MessageUsage) -> list[StreamEvent]:
        """Events of the answer's end."""
        delta = {"stop_reason": stop_reason, "stop_sequence": stop_sequence}
        empty = [] if self._index >= 0 else list(self._within("text", {"type": "text", "text": ""}))
        return [
            *empty,
            *self._close(),
            {"type": "message_delta", "delta": delta, "usage": usage.model_dump()},
            {"type": "message_stop"},
        ]

    def _of(self, event: MessageEvent) -> Iterator[StreamEvent]:
        if isinstance(event, TextDelta):
            yield from self._within("text", {"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": event.text})
        elif isinstance(event, ReasoningDelta):
            yield from self._within("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            yield self._delta({"type": "thinking_delta", "thinking": event.text})
        elif isinstance(event, ToolCallStart):
            self.calls += 1
            yield from self._close()
            yield from self._within("tool_use", {"type": "tool_use", "id": event.id, "name": event.name, "input": {}})
        elif isinstance(event, ToolCallArgumentsDelta):
            yield self._delta({"type": "input_json_delta", "partial_json": event.text})
        else:
            assert isinstance(event, ToolCallEnd)
            yield from self._close()

    def _within(self, kind: str, block: dict[str, Any]) -> Iterator[StreamEvent]:
        """Open a block of a type unless one is open."""
        if self._open != kind:
            yield from self._close()
            self._index, self._open = self._index + 1, kind
            yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _close(self) -> Iterator[StreamEvent]:
        if self._open is not None:
            self._open = None
            yield {"type": "content_block_stop", "index": self._index}

    def _delta(self, delta: dict[str, Any]) -> StreamEvent:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}
