"""Tool calls of Mistral: [TOOL_CALLS]NAME[ARGS]{...}; of older models [TOOL_CALLS][{"name": ..., "arguments": ...}]."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from paceline.chat.calls import read_array, read_call
from paceline.chat.grammars import json_schema, literal, special
from paceline.chat.parser import MessageWriter, Reader
from paceline.chat.reading import NAME_STOP, SPACE, MalformedError, Markers, Reading, Source, json_value
from paceline.chat.strict import StrictTools
from paceline.chat.values import ToolDefinition

BEGIN, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
HEAD = '[{"name": "'  # what a grammar of the older form writes behind BEGIN
_BEGIN = Markers(BEGIN)


def mistral_call_id() -> str:
    """An id of nine letters and digits: Mistral's chat templates refuse others."""
    return secrets.token_hex(5)[:9]


def reads_mistral(tools: Sequence[ToolDefinition], in_array: bool) -> Reader:
    """Return a reader of answers with calls in either form. in_array: whether a grammar writes the older one."""
    strict = StrictTools(tools)

    def read(source: Source, writer: MessageWriter) -> Reading[None]:
        while (yield from _BEGIN.read(source, writer.text)) is not None:
            spaced = (yield from source.available()) and source.peek(1) in SPACE
            unled = None if in_array and (yield from source.is_at(HEAD)) else strict
            source.record()
            yield from source.skip_space()
            if (yield from source.accept("[")):
                called = yield from read_array(source, writer, strict, unled)
            elif (yield from source.is_at("{")):
                called = yield from read_call(source, writer, strict=strict)
            else:
                called = yield from _named(source, writer, strict, led=not (in_array or spaced))
            if not called:
                writer.text(BEGIN + source.recorded())

    return read


def _named(source: Source, writer: MessageWriter, strict: StrictTools, *, led: bool) -> Reading[bool]:
    """Read a name and its arguments. Returns False if it is no such call. led: whether a grammar may lead it."""
    name = yield from source.take_while(NAME_STOP)
    try:
        led = led and (yield from source.is_at(ARGS + "{"))
        if (yield from source.accept(CALL_ID)):
            yield from source.take_while(NAME_STOP)
        if not (yield from source.is_at("{")):
            yield from source.expect(ARGS)
        yield from source.skip_space()
    except MalformedError:
        return False
    if not name or not (yield from source.available()):
        return False
    if name in strict and not led:
        pieces: list[str] = []
        if not (yield from json_value(source, pieces.append)) or not strict.obeys(name, "".join(pieces)):
            return False
        source.recorded()
        writer.whole_call(name, "".join(pieces))
        return True
    source.recorded()
    writer.begin_call(name)
    writer.end_call((yield from json_value(source, writer.arguments)))
    return True


def write_named_call(tool: ToolDefinition) -> str:
    """The rest of a call after its begin marker, as a grammar."""
    return f"{literal(tool.name)} {special(ARGS)} {json_schema(dict(tool.parameters))}"


def write_call(tool: ToolDefinition) -> str:
    """A call in the older form, as a grammar: an array of one."""
    head = f'{HEAD}{tool.name}", "arguments": '
    return f"{literal(head)} {json_schema(dict(tool.parameters))} {literal('}]')}"
