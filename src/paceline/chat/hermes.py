"""Tool calls of Hermes, Qwen2.5 and Qwen3: <tool_call>{"name": ..., "arguments": ...}</tool_call>."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.chat.calls import read_call
from paceline.chat.parser import MessageWriter, Reader
from paceline.chat.plain_json import reads_json
from paceline.chat.reading import Markers, Reading, Source
from paceline.chat.strict import StrictTools
from paceline.chat.values import ToolDefinition

BEGIN, END = "<tool_call>", "</tool_call>"
HEAD = '\n{"name": "'  # what a grammar writes behind BEGIN
_BEGIN = Markers(BEGIN)


def reads_hermes(tools: Sequence[ToolDefinition]) -> Reader:
    """Return a reader of answers with calls between markers.

    Qwen2.5-Coder often leaves the markers out: an answer that begins with the JSON of a call of one of these functions
    is a call, too.
    """
    without_markers, strict = reads_json(tools), StrictTools(tools)

    def read(source: Source, writer: MessageWriter) -> Reading[None]:
        yield from without_markers(source, writer)
        while (yield from _BEGIN.read(source, writer.text)) is not None:
            unled = None if (yield from source.is_at(HEAD)) else strict
            source.record()
            yield from source.skip_space()
            if (yield from read_call(source, writer, strict=unled)):
                yield from source.skip_space()
                yield from source.accept(END)
            else:
                writer.text(BEGIN + source.recorded())

    return read
