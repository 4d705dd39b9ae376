"""Replies of Ollama's API: whole, or the lines of a stream. Durations are in nanoseconds."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

from pydantic import BaseModel, JsonValue

from paceline.chat.values import (
    MessageEvent,
    ReasoningDelta,
    TextDelta,
    ToolCallArgumentsDelta,
    ToolCallEnd,
    ToolCallStart,
)
from paceline.core.outputs import Metrics, RequestOutput
from paceline.server.replies import ChatLogprob
from paceline.server.turns import arguments_of

DoneReason = Literal["stop", "length", "load", "unload"]


class CalledFunction(BaseModel):
    """A function to call. arguments that are no JSON object are the text in {"INVALID_JSON": text}."""

    index: int
    name: str
    arguments: dict[str, JsonValue]


class Call(BaseModel):
    """A call of a function."""

    id: str
    function: CalledFunction


class ReplyMessage(BaseModel):
    """The message, or what a line adds to it."""

    role: Literal["assistant"] = "assistant"
    content: str = ""
    thinking: str | None = None
    tool_calls: list[Call] | None = None


class OllamaReply(BaseModel):
    """Response of ``/api/chat`` and ``/api/generate``, or a line of its stream.

    The last line has the counts and durations. message: of /api/chat. response, thinking: of /api/generate.
    """

    model: str
    created_at: str
    message: ReplyMessage | None = None
    response: str | None = None
    thinking: str | None = None
    logprobs: list[ChatLogprob] | None = None
    done: bool
    done_reason: DoneReason | None = None
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None


class OllamaEmbeddings(BaseModel):
    """Response of ``/api/embed``."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbedding(BaseModel):
    """Response of ``/api/embeddings``."""

    embedding: list[float]


class OllamaStatus(BaseModel):
    """A line of ``/api/pull``."""

    status: str


class OllamaDetails(BaseModel):
    """What a model's files say of it; empty for a model whose files are not on this machine."""

    parent_model: str = ""
    format: str = ""
    family: str = ""
    families: list[str] = []
    parameter_size: str = ""
    quantization_level: str = ""


class OllamaModel(BaseModel):
    """A model in a list. size: bytes of its files; in /api/ps bytes of memory.

    expires_at, size_vram, context_length: in /api/ps.
    """

    name: str
    model: str
    modified_at: str | None = None
    size: int
    digest: str
    details: OllamaDetails
    expires_at: str | None = None
    size_vram: int | None = None
    context_length: int | None = None


class OllamaModelList(BaseModel):
    """Response of ``/api/tags`` and ``/api/ps``."""

    models: list[OllamaModel]


class OllamaModelFacts(BaseModel):
    """Response of ``/api/show``. parameters: the sampling that the model's files recommend."""

    modelfile: str
    parameters: str
    template: str
    license: str
    details: OllamaDetails
    model_info: dict[str, JsonValue]
    capabilities: list[str]
    modified_at: str


class OllamaVersion(BaseModel):
    """Response of ``/api/version``. version: the one of Ollama whose API this is, which clients compare."""

    version: str
    paceline: str


def timestamp(seconds: float | None = None) -> str:
    """A time as RFC 3339 writes it. seconds: since the epoch; None: now."""
    at = time.time() if seconds is None else seconds
    return datetime.fromtimestamp(at, UTC).isoformat().replace("+00:00", "Z")


def nanoseconds(seconds: float) -> int:
    """Whole nanoseconds, at least 0."""
    return max(0, round(seconds * 1e9))


def durations(output: RequestOutput, load_seconds: float) -> dict[str, int]:
    """The counts and durations of a finished answer. load_seconds: until the model was there."""
    metrics: Metrics = output.candidates[0].metrics
    end = time.monotonic() if metrics.finished is None else metrics.finished
    begun = metrics.arrival_time if metrics.first_scheduled is None else metrics.first_scheduled
    first = end if metrics.first_token is None else metrics.first_token
    return {
        "total_duration": nanoseconds(end - metrics.arrival_time + load_seconds),
        "load_duration": nanoseconds(load_seconds),
        "prompt_eval_count": len(output.prompt_token_ids),
        "prompt_eval_duration": nanoseconds(first - begun),
        "eval_count": metrics.output_tokens,
        "eval_duration": nanoseconds(end - first),
    }


@dataclass
class Pieces:
    """Collects what an answer gains until it is sent: texts, thoughts, and calls that are complete."""

    text: str = ""
    thoughts: str = ""
    calls: list[Call] = field(default_factory=list)
    _open: dict[int, tuple[str, str, str]] = field(default_factory=dict)  # id, name and arguments by index

    def feed(self, events: Iterable[MessageEvent]) -> None:
        """Add events."""
        for event in events:
            if isinstance(event, TextDelta):
                self.text += event.text
            elif isinstance(event, ReasoningDelta):
                self.thoughts += event.text
            elif isinstance(event, ToolCallStart):
                self._open[event.index] = (event.id, event.name, "")
            elif isinstance(event, ToolCallArgumentsDelta):
                name, function, arguments = self._open[event.index]
                self._open[event.index] = (name, function, arguments + event.text)
            elif isinstance(event, ToolCallEnd):
                self._end(event.index, *self._open.pop(event.index))

    def _end(self, index: int, name: str, function: str, arguments: str) -> None:
        called = CalledFunction(index=index, name=function, arguments=arguments_of(arguments))
        self.calls.append(Call(id=name, function=called))

    def take(self) -> Iterator[dict[str, Any]]:
        """What is there, as fields of one reply if there is anything; then nothing is."""
        fields: dict[str, Any] = {"content": self.text}
        if self.thoughts:
            fields["thinking"] = self.thoughts
        if self.calls:
            fields["tool_calls"] = self.calls
        if self.text or len(fields) > 1:
            yield fields
        self.text, self.thoughts, self.calls = "", "", []
