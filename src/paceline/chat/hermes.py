"""Tool calls of Hermes, Qwen2.5 and Qwen3: <tool_call>{"name": ..., "arguments": ...}</tool_call>."""

from __future__ import annotations

from collections.abc import Collection

from paceline.chat.calls import read_call
from paceline.chat.parser import MessageWriter, Reader
from paceline.chat.plain_json import reads_json
from paceline.chat.reading import Markers, Reading, Source

BEGIN, END = "<tool_call>", "</tool_call>"
_BEGIN = Markers(BEGIN)


def reads_hermes(names: Collection[str]) -> Reader:
    """Return a reader of answers with calls between markers.

    Qwen2.5-Coder often leaves the markers out: an answer that begins with the JSON of a call of one of these functions
    is a call, too.
    """
    without_markers = reads_json(names)

    def read(source: Source, writer: MessageWriter) -> Reading[None]:
        yield from without_markers(source, writer)
        while (yield from _BEGIN.read(source, writer.text)) is not None:
            source.record()
            yield from source.skip_space()
            if (yield from read_call(source, writer)):
                yield from source.skip_space()
                yield from source.accept(END)
            else:
                writer.text(BEGIN + source.recorded())

    return read
