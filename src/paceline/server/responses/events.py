"""Events of a streamed response: items open, grow and close, each event with its number."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from paceline.chat.values import (
    MessageEvent,
    ReasoningDelta,
    TextDelta,
    ToolCallArgumentsDelta,
    ToolCallEnd,
    ToolCallStart,
)
from paceline.core.outputs import TokenLogprob
from paceline.server.responses import replies
from paceline.server.responses.replies import Response, Status
from paceline.server.turns import ScoredText

StreamEvent: TypeAlias = dict[str, Any]  # its name is the value of "type"
Kind: TypeAlias = Literal["message", "reasoning", "call"]


@dataclass
class _OpenItem:
    """The item that grows. call: (id, name) of a function call. logprobs: of the tokens of a message's text."""

    kind: Kind
    id: str
    index: int
    call: tuple[str, str] = ("", "")
    pieces: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    def document(self, status: Status) -> dict[str, Any]:
        """The item with the text so far; without content while it is being added."""
        text = "".join(self.pieces)
        if self.kind == "call":
            return replies.call_item(self.id, status, *self.call, text)
        shown = None if status == "in_progress" else text
        if self.kind == "message":
            return replies.message_item(self.id, status, shown, self.logprobs)
        return replies.reasoning_item(self.id, status, shown)

    def part(self) -> dict[str, Any]:
        text = "".join(self.pieces)
        return replies.text_part(text, self.logprobs) if self.kind == "message" else replies.reasoning_part(text)


_PREFIX: dict[Kind, str] = {"message": "msg", "reasoning": "rs", "call": "fc"}
_NAMES: dict[Kind, tuple[str, str]] = {
    "message": ("response.output_text", "text"),
    "reasoning": ("response.reasoning_text", "text"),
    "call": ("response.function_call_arguments", "arguments"),
}


class ResponseStream:
    """Turns the events of one answer into those of a stream, and collects the items.

    new_id: makes the id of an item from its prefix. spelled: spells the log-probabilities of text.
    """

    def __init__(
        self, new_id: Callable[[str], str], spelled: Callable[[Sequence[TokenLogprob]], list[dict[str, Any]]]
    ) -> None:
        self._new_id, self._spelled = new_id, spelled
        self._number = 0
        self._open: _OpenItem | None = None
        self.items: list[dict[str, Any]] = []

    def start(self, response: Response) -> list[StreamEvent]:
        """Events before the first token."""
        return [self._of(f"response.{name}", response=response.model_dump()) for name in ("created", "in_progress")]

    def feed(self, events: Iterable[MessageEvent]) -> list[StreamEvent]:
        """Events of more of the answer."""
        return [found for event in events for found in self._from(event)]

    def close(self, status: Status) -> list[StreamEvent]:
        """Events of the answer's end. An answer without anything has one message without text."""
        found = [] if self._open or self.items else list(self._begin("message"))
        return [*found, *self._end(status)]

    def end(self, response: Response) -> StreamEvent:
        """The last event."""
        return self._of(f"response.{response.status}", response=response.model_dump())

    def _from(self, event: MessageEvent) -> Iterator[StreamEvent]:
        if isinstance(event, TextDelta):
            yield from self._within("message")
            yield self._delta(event.text, self._spelled(event.logprobs) if isinstance(event, ScoredText) else ())
        elif isinstance(event, ReasoningDelta):
            yield from self._within("reasoning")
            yield self._delta(event.text)
        elif isinstance(event, ToolCallStart):
            yield from self._end("completed")
            yield from self._begin("call", (event.id, event.name))
        elif isinstance(event, ToolCallArgumentsDelta):
            yield self._delta(event.text)
        else:
            assert isinstance(event, ToolCallEnd)
            yield from self._end("completed" if event.complete else "incomplete")

    def _within(self, kind: Kind) -> Iterator[StreamEvent]:
        """Open an item of a kind unless one is open."""
        if self._open is None or self._open.kind != kind:
            yield from self._end("completed")
            yield from self._begin(kind)

    def _begin(self, kind: Kind, call: tuple[str, str] = ("", "")) -> Iterator[StreamEvent]:
        item = self._open = _OpenItem(kind, self._new_id(_PREFIX[kind]), len(self.items), call)
        yield self._of("response.output_item.added", output_index=item.index, item=item.document("in_progress"))
        if kind != "call":
            yield self._on_item("response.content_part.added", item, part=item.part())

    def _end(self, status: Status) -> Iterator[StreamEvent]:
        item, self._open = self._open, None
        if item is None:
            return
        name, field_name = _NAMES[item.kind]
        document = item.document(status)
        self.items.append(document)
        extra = {"name": item.call[1]} if item.kind == "call" else self._logprobs(item, item.logprobs)
        yield self._on_item(f"{name}.done", item, **{field_name: "".join(item.pieces)}, **extra)
        if item.kind != "call":
            yield self._on_item("response.content_part.done", item, part=item.part())
        yield self._of("response.output_item.done", output_index=item.index, item=document)

    def _delta(self, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> StreamEvent:
        item = self._open
        assert item is not None
        item.pieces.append(text)
        item.logprobs += logprobs
        return self._on_item(f"{_NAMES[item.kind][0]}.delta", item, delta=text, **self._logprobs(item, logprobs))

    def _logprobs(self, item: _OpenItem, logprobs: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {"logprobs": [*logprobs]} if item.kind == "message" else {}

    def _on_item(self, name: str, item: _OpenItem, /, **fields: Any) -> StreamEvent:
        place = {"item_id": item.id, "output_index": item.index}
        return self._of(name, **place, **({} if item.kind == "call" else {"content_index": 0}), **fields)

    def _of(self, name: str, /, **fields: Any) -> StreamEvent:
        number, self._number = self._number, self._number + 1
        return {"type": name, "sequence_number": number, **fields}
