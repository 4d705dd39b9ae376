"""Tool calls of Hermes, Qwen2.5 and Qwen3: <tool_call>{"name": ..., "arguments": ...}</tool_call>."""

from __future__ import annotations

from paceline.chat.calls import read_call
from paceline.chat.parser import MessageWriter
from paceline.chat.reading import Markers, Reading, Source

BEGIN, END = "<tool_call>", "</tool_call>"
_BEGIN = Markers(BEGIN)


def read_hermes(source: Source, writer: MessageWriter) -> Reading[None]:
    """Read an answer with calls between markers."""
    while (yield from _BEGIN.read(source, writer.text)) is not None:
        source.record()
        yield from source.skip_space()
        if (yield from read_call(source, writer)):
            yield from source.skip_space()
            yield from source.accept(END)
        else:
            writer.text(BEGIN + source.recorded())
