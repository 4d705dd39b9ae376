"""The parser of one answer, and the writer of its events."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import TypeAlias

from paceline.chat.reading import Reading, Source
from paceline.chat.values import (
    MessageEvent,
    ReasoningDelta,
    TextDelta,
    ToolCallArgumentsDelta,
    ToolCallEnd,
    ToolCallStart,
)


def openai_call_id() -> str:
    """An id of a tool call as OpenAI's."""
    return f"call_{secrets.token_hex(12)}"


class MessageWriter:
    """Collects events. Newlines between text, thoughts and calls belong to the syntax and are left out.

    new_id: makes the id of a call.
    """

    def __init__(self, new_id: Callable[[], str] = openai_call_id) -> None:
        self._new_id = new_id
        self._events: list[MessageEvent] = []
        self._space = ""  # white space at the end of the text, which is dropped if a call follows
        self._trims = False  # whether leading newlines of text are part of the syntax before
        self._calls = 0
        self._ids: set[str] = set()

    def text(self, text: str) -> None:
        """Add text of the message."""
        if self._trims:
            text = text.lstrip("\n")
            self._trims = not text
        whole = self._space + text
        kept = whole.rstrip()
        self._space = whole[len(kept) :]
        if kept:
            self._events.append(TextDelta(kept))

    def reasoning(self, text: str) -> None:
        """Add text of the model's thoughts."""
        if text:
            self._events.append(ReasoningDelta(text))

    def end_reasoning(self) -> None:
        """End the thoughts: newlines before the text that follows are left out."""
        self._trims = True

    def begin_call(self, name: str, call_id: str | None = None) -> None:
        """Begin a call. Every call is ended before something else is added.

        call_id: as the model wrote it, unless another call of the message has it; None makes a new one.
        """
        self._space = ""
        if call_id is None or call_id in self._ids:
            call_id = self._new_id()
        self._ids.add(call_id)
        self._events.append(ToolCallStart(self._calls, call_id, name))

    def arguments(self, text: str) -> None:
        """Add to the arguments of the call that is open."""
        if text:
            self._events.append(ToolCallArgumentsDelta(self._calls, text))

    def end_call(self, complete: bool = True) -> None:
        """End the call that is open."""
        self._events.append(ToolCallEnd(self._calls, complete))
        self._calls += 1

    def whole_call(self, name: str, arguments: str, call_id: str | None = None) -> None:
        """Add a complete call."""
        self.begin_call(name, call_id)
        self.arguments(arguments)
        self.end_call()

    def close(self) -> None:
        """End the message: white space at its end is text, unless a call was the last."""
        if self._space and not self._calls:
            self._events.append(TextDelta(self._space))
        self._space = ""

    def take(self) -> list[MessageEvent]:
        """Return the events since the last call of this method."""
        events, self._events = self._events, []
        return events


Reader: TypeAlias = Callable[[Source, MessageWriter], Reading[None]]
"""Reads an answer to its end and writes its events."""


class OutputParser:
    """Splits the text of one answer into the events of a message: runs a reader as text arrives."""

    def __init__(self, reader: Reader, new_id: Callable[[], str] = openai_call_id) -> None:
        self._source, self._writer = Source(), MessageWriter(new_id)
        self._reading = self._read(reader)

    def _read(self, reader: Reader) -> Reading[None]:
        yield from reader(self._source, self._writer)
        yield from read_text(self._source, self._writer)

    def feed(self, text: str) -> list[MessageEvent]:
        """Take more of the answer; return the events that are certain now."""
        if text:
            self._source.add(text)
            next(self._reading, None)
        return self._writer.take()

    def finish(self) -> list[MessageEvent]:
        """End the answer; return the remaining events."""
        self._source.ended = True
        for _ in self._reading:
            raise AssertionError("a reader waits for text after the answer's end")
        self._writer.close()
        return self._writer.take()


def reads_calls_or_text(begin: str, calls: Reader) -> Reader:
    """Return a reader of an answer that is calls alone, read by ``calls``, or text alone. begin: what begins calls."""

    def read(source: Source, writer: MessageWriter) -> Reading[None]:
        source.record()
        yield from source.skip_space()
        is_call = yield from source.is_at(begin)
        writer.text(source.recorded())
        yield from (calls if is_call else read_text)(source, writer)

    return read


def read_text(source: Source, writer: MessageWriter) -> Reading[None]:
    """Read an answer that is text alone."""
    while (yield from source.available()):
        writer.text(source.take(source.left))
