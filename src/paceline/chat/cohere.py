"""Tool calls of Cohere's Command R7B and A: a JSON array of calls between <|START_ACTION|> and <|END_ACTION|>."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.chat.calls import read_array
from paceline.chat.grammars import json_schema, literal, special
from paceline.chat.parser import MessageWriter, Reader
from paceline.chat.reading import Markers, Reading, Source
from paceline.chat.strict import StrictTools
from paceline.chat.values import ToolDefinition

BEGIN, END = "<|START_ACTION|>", "<|END_ACTION|>"
HEAD = '[\n    {"tool_call_id": "0", "tool_name": "'  # what a grammar writes behind BEGIN
_TAIL = "}\n]"
_BEGIN = Markers(BEGIN)


def reads_cohere(tools: Sequence[ToolDefinition]) -> Reader:
    """Return a reader of answers with such calls."""
    strict = StrictTools(tools)

    def read(source: Source, writer: MessageWriter) -> Reading[None]:
        while (yield from _BEGIN.read(source, writer.text)) is not None:
            unled = None if (yield from source.is_at(HEAD)) else strict
            source.record()
            yield from source.skip_space()
            if (yield from source.accept("[")) and (yield from read_array(source, writer, strict, unled)):
                yield from source.skip_space()
                yield from source.accept(END)
            else:
                writer.text(BEGIN + source.recorded())

    return read


def write_call(tool: ToolDefinition) -> str:
    """The rest of an array of one call after its begin marker, as a grammar."""
    head = literal(f'{HEAD}{tool.name}", "parameters": ')
    return f"{head} {json_schema(dict(tool.parameters))} {literal(_TAIL)} {special(END)}"
