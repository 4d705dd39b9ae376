"""Answers of gpt-oss: messages in channels, <|channel|>NAME<|message|>TEXT<|end|>, of which some are calls."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from paceline.chat.grammars import json_schema, literal, special
from paceline.chat.parser import MessageWriter, Reader
from paceline.chat.reading import Markers, Reading, Source, is_json, json_value
from paceline.chat.strict import StrictTools, held_call
from paceline.chat.values import ToolDefinition

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
SPECIAL = (START, CHANNEL, CONSTRAIN, MESSAGE, *ENDS)
BEGIN_CALL = f"{CHANNEL}commentary to=functions."
BEGIN_PREAMBLE = f"{CHANNEL}commentary{MESSAGE}"
BEGIN_TEXT = f"{CHANNEL}final{MESSAGE}"
AFTER_THOUGHTS = f"{START}assistant"
_JSON_FOLLOWS = f" {CONSTRAIN}json"  # behind a function's name, where a grammar leads
_HEADER_END = Markers(MESSAGE)
_BODY_END = Markers(*ENDS, START)
_RECIPIENT = re.compile(r"to=functions\.([a-zA-Z0-9_.:/-]+)")


@dataclass(frozen=True)
class _Ends:
    """How messages end. thoughts, text: markers. hides_preambles: whether text of ``commentary`` is among thoughts."""

    thoughts: Markers = _BODY_END
    text: Markers = _BODY_END
    hides_preambles: bool = False


_STRUCTURED = _Ends(Markers(ENDS[0]), Markers(), hides_preambles=True)


class _Messages:
    """Passes the texts of messages on, each in a line of its own."""

    def __init__(self, emit: Callable[[str], None]) -> None:
        self._emit = emit
        self._begun, self._breaks = False, False

    def begin(self) -> None:
        """Begin another message."""
        self._breaks = self._begun

    def add(self, text: str) -> None:
        """Add to the message's text."""
        self._emit("\n" * self._breaks + text)
        self._begun, self._breaks = True, False


def reads_harmony(tools: Sequence[ToolDefinition], structured: bool = False) -> Reader:
    """Return a reader of answers in channels.

    tools: functions that may be called; calls of others are text. structured: whether a grammar has decided the order
    of messages: letters of markers are text then, but for the one that ends thoughts, and what comes before the
    structure or call is thoughts, so that the text is the structure alone.
    """
    ends = _STRUCTURED if structured else _Ends()
    names, strict = {tool.name for tool in tools}, StrictTools(tools)

    def read(source: Source, writer: MessageWriter) -> Reading[None]:
        text, thoughts = _Messages(writer.text), _Messages(writer.reasoning)
        while (yield from source.available()):
            yield from source.skip_space()
            if not (yield from _is_header(source)):
                yield from _body(source, text.add, ends.text)
                continue
            pieces: list[str] = []
            if (yield from _HEADER_END.read(source, pieces.append)) is None:
                writer.text("".join(pieces))
                return
            header = "".join(pieces)
            if (name := _called(header)) in names:
                if name not in strict or header.endswith(f"{BEGIN_CALL}{name}{_JSON_FOLLOWS}"):
                    yield from _call(source, writer, name)
                else:
                    yield from held_call(source, writer, strict, header + MESSAGE, partial(_call, source, name=name))
            elif _is_thoughts(header, ends):
                thoughts.begin()
                yield from _body(source, thoughts.add, ends.thoughts)
            else:
                text.begin()
                if name:
                    text.add(header + MESSAGE)
                yield from _body(source, text.add, ends.text)

    return read


def _is_header(source: Source) -> Reading[bool]:
    return (yield from source.is_at(CHANNEL)) or (yield from source.is_at(START))


def _called(header: str) -> str:
    """The function that a message with this header calls; "" if it is no call."""
    recipient = _RECIPIENT.search(header)
    return recipient[1] if recipient is not None else ""


def _is_thoughts(header: str, ends: _Ends) -> bool:
    channel = header.partition(CHANNEL)[2].split(maxsplit=1)[:1]
    return channel == ["analysis"] or (ends.hides_preambles and channel == ["commentary"] and not _called(header))


def _call(source: Source, writer: MessageWriter, name: str) -> Reading[None]:
    pieces: list[str] = []

    def add(text: str) -> None:
        pieces.append(text)
        writer.arguments(text)

    writer.begin_call(name)
    yield from source.skip_space()
    yield from json_value(source, add)  # its strings may contain the letters of a marker
    yield from _body(source, add)
    writer.end_call(is_json("".join(pieces)))


def _body(source: Source, emit: Callable[[str], None], end: Markers = _BODY_END) -> Reading[None]:
    """Read a message's text and the marker that ends it. A new message's start is read later."""
    if (yield from end.read(source, emit)) == START:
        source.put_back(START)


# --- grammar ---

BEGIN_RULE = f"{special(CHANNEL)} {literal('commentary to=functions.')}"
BEGIN_TEXT_RULE = f'{special(CHANNEL)} "final" {special(MESSAGE)}'


def write_call(tool: ToolDefinition) -> str:
    """The rest of a call, as a grammar. The answer's end is the call's."""
    schema = json_schema(dict(tool.parameters))
    return f'{literal(tool.name + " ")} {special(CONSTRAIN)} "json" {special(MESSAGE)} {schema}'
