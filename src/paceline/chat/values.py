"""Tools, tool calls and the events of an assistant's message, independent of model families and of HTTP APIs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

ToolMode: TypeAlias = Literal["auto", "none", "required"]


@dataclass(frozen=True)
class ToolDefinition:
    """A function that the model may call.

    parameters: JSON schema of the object of its arguments. strict: whether a schema that cannot be enforced is an
    error; otherwise arguments follow what can be enforced of it. sent: the definition in OpenAI's form as a client
    wrote it, for chat templates; None makes it of the other fields.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})
    strict: bool = False
    sent: Mapping[str, Any] | None = None

    @property
    def properties(self) -> Mapping[str, Any] | None:
        """Schemas of the arguments by name; None if any may be given."""
        without: Mapping[str, Any] | None = {} if self.parameters.get("additionalProperties") is False else None
        found = self.parameters.get("properties", without)
        return found if isinstance(found, Mapping) else None

    def rooted(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        """A schema of the parameters as one of its own: its references are those of the whole."""
        if '"$ref"' not in json.dumps(schema):
            return dict(schema)
        return {**_moved(schema), "$defs": {_ROOT: _moved(self.parameters)}}

    def as_openai(self) -> dict[str, Any]:
        """The definition in OpenAI's form, which chat templates expect."""
        if self.sent is not None:
            return dict(self.sent)
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


_ROOT = "tool"


def _moved(schema: Any) -> Any:
    """The schema with its references to a root that is now a definition."""
    if isinstance(schema, list):
        return [_moved(value) for value in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved = {key: _moved(value) for key, value in schema.items()}
    target = schema.get("$ref")
    if isinstance(target, str) and target.startswith("#"):
        moved["$ref"] = f"#/$defs/{_ROOT}{target[1:]}"
    return moved


@dataclass(frozen=True)
class ToolChoice:
    """The calls that an answer may have.

    name: the only function that may be called, and then has to be. allowed: the only functions that may be called; None
    for all tools.
    """

    mode: ToolMode = "auto"
    name: str | None = None
    allowed: tuple[str, ...] | None = None

    @property
    def forces_call(self) -> bool:
        return self.mode == "required" or self.name is not None


@dataclass(frozen=True)
class ToolCall:
    """A call of a function. arguments: JSON text as the model wrote it, which may be cut or invalid.

    complete: False for a call that the end of the answer has cut.
    """

    id: str
    name: str
    arguments: str
    complete: bool = True

    def as_openai(self) -> dict[str, Any]:
        """The call in the form of OpenAI's messages."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True)
class ReasoningDelta:
    """More text of the model's thoughts."""

    text: str


@dataclass(frozen=True)
class TextDelta:
    """More text of the message."""

    text: str


@dataclass(frozen=True)
class ToolCallStart:
    """A call begins. index: its place among the message's calls, from 0. An end with this index always follows."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class ToolCallArgumentsDelta:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


@dataclass(frozen=True)
class ToolCallEnd:
    """A call ends. complete: False if the answer ended before the call did."""

    index: int
    complete: bool = True


MessageEvent: TypeAlias = ReasoningDelta | TextDelta | ToolCallStart | ToolCallArgumentsDelta | ToolCallEnd


@dataclass(frozen=True)
class AssistantMessage:
    """A parsed answer: thoughts (None if there are none), text and calls."""

    reasoning: str | None
    text: str
    tool_calls: Sequence[ToolCall]


def message_of(events: Iterable[MessageEvent]) -> AssistantMessage:
    """Return the message that the events of one answer make."""
    thoughts: list[str] = []
    text: list[str] = []
    starts: list[ToolCallStart] = []
    arguments: list[list[str]] = []
    complete: list[bool] = []
    for event in events:
        if isinstance(event, ReasoningDelta):
            thoughts.append(event.text)
        elif isinstance(event, TextDelta):
            text.append(event.text)
        elif isinstance(event, ToolCallStart):
            starts.append(event)
            arguments.append([])
            complete.append(False)
        elif isinstance(event, ToolCallArgumentsDelta):
            arguments[event.index].append(event.text)
        else:
            complete[event.index] = event.complete
    calls = [
        ToolCall(start.id, start.name, "".join(pieces), ended)
        for start, pieces, ended in zip(starts, arguments, complete, strict=True)
    ]
    return AssistantMessage("".join(thoughts) or None, "".join(text), calls)
