"""Events of an assistant's message in the form of OpenAI's chats."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from paceline.chat.values import (
    AssistantMessage,
    MessageEvent,
    ReasoningDelta,
    TextDelta,
    ToolCallArgumentsDelta,
    ToolCallStart,
)
from paceline.server.delta import Delta
from paceline.server.replies import (
    CalledFunctionDelta,
    ChatDelta,
    ChatMessage,
    ChatToolCall,
    ChatToolCallDelta,
    ReplyFunction,
)
from paceline.server.turns import AnswerReader


@dataclass
class AnswerStream:
    """One answer in the making. begun: whether a chunk of it was sent. calls: tool calls so far."""

    reader: AnswerReader
    begun: bool = False
    calls: int = 0

    def deltas(self, delta: Delta) -> list[ChatDelta]:
        """Return what the client gets for new text of the answer."""
        events = self.reader.feed(delta)
        self.calls += sum(isinstance(event, ToolCallStart) for event in events)
        return _deltas(events)


def _deltas(events: Iterable[MessageEvent]) -> list[ChatDelta]:
    """One delta for consecutive events of a kind, so that clients that read a delta in any order keep the order."""
    found: list[ChatDelta] = []
    for event in events:
        last = found[-1] if found else ChatDelta()
        if isinstance(event, TextDelta):
            if last.content is None:
                found.append(last := ChatDelta(content=""))
            last.content = (last.content or "") + event.text
        elif isinstance(event, ReasoningDelta):
            if last.reasoning_content is None:
                found.append(last := ChatDelta(reasoning_content=""))
            last.reasoning_content = (last.reasoning_content or "") + event.text
        elif isinstance(event, ToolCallStart):
            function = CalledFunctionDelta(name=event.name, arguments="")
            call = ChatToolCallDelta(index=event.index, id=event.id, type="function", function=function)
            found.append(ChatDelta(tool_calls=[call]))
        elif isinstance(event, ToolCallArgumentsDelta):
            if last.tool_calls is None:
                call = ChatToolCallDelta(index=event.index, function=CalledFunctionDelta(arguments=""))
                found.append(last := ChatDelta(tool_calls=[call]))
            assert last.tool_calls is not None
            last.tool_calls[0].function.arguments += event.text
    return found


def whole_message(message: AssistantMessage) -> ChatMessage:
    """Return a complete answer as a message. Fields that it does not need are left out."""
    calls = [
        ChatToolCall(id=call.id, type="function", function=ReplyFunction(name=call.name, arguments=call.arguments))
        for call in message.tool_calls
    ]
    found = ChatMessage(role="assistant", content=message.text or (None if calls else ""), refusal=None)
    if message.reasoning is not None:
        found.reasoning_content = message.reasoning
    if calls:
        found.tool_calls = calls
    return found
