"""Tool calls of Mistral: [TOOL_CALLS]NAME[ARGS]{...}; of older models [TOOL_CALLS][{"name": ..., "arguments": ...}]."""

from __future__ import annotations

import secrets

from paceline.chat.calls import read_call
from paceline.chat.grammars import json_schema, literal, special
from paceline.chat.parser import MessageWriter
from paceline.chat.reading import NAME_STOP, MalformedError, Markers, Reading, Source, json_value
from paceline.chat.values import ToolDefinition

BEGIN, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_BEGIN = Markers(BEGIN)


def mistral_call_id() -> str:
    """An id of nine letters and digits: Mistral's chat templates refuse others."""
    return secrets.token_hex(5)[:9]


def read_mistral(source: Source, writer: MessageWriter) -> Reading[None]:
    """Read an answer with calls in either form."""
    while (yield from _BEGIN.read(source, writer.text)) is not None:
        source.record()
        yield from source.skip_space()
        if (yield from source.accept("[")):
            called = yield from _array(source, writer)
        elif (yield from source.is_at("{")):
            called = yield from read_call(source, writer)
        else:
            called = yield from _named(source, writer)
        if not called:
            writer.text(BEGIN + source.recorded())


def _array(source: Source, writer: MessageWriter) -> Reading[bool]:
    """Read calls up to the closing bracket. Returns False if the first is none; what follows the calls is text."""
    yield from source.skip_space()
    if not (yield from read_call(source, writer)):
        return False
    while True:
        source.record()
        yield from source.skip_space()
        if (yield from source.accept(",")):
            yield from source.skip_space()
            if (yield from read_call(source, writer)):
                continue
        elif (yield from source.accept("]")):
            source.recorded()
            return True
        writer.text(source.recorded().lstrip())
        return True


def _named(source: Source, writer: MessageWriter) -> Reading[bool]:
    """Read a name and its arguments. Returns False if it is no such call."""
    name = yield from source.take_while(NAME_STOP)
    try:
        if (yield from source.accept(CALL_ID)):
            yield from source.take_while(NAME_STOP)
        if not (yield from source.is_at("{")):
            yield from source.expect(ARGS)
        yield from source.skip_space()
    except MalformedError:
        return False
    if not name or not (yield from source.available()):
        return False
    source.recorded()
    writer.begin_call(name)
    writer.end_call((yield from json_value(source, writer.arguments)))
    return True


def write_named_call(tool: ToolDefinition) -> str:
    """The rest of a call after its begin marker, as a grammar."""
    return f"{literal(tool.name)} {special(ARGS)} {json_schema(dict(tool.parameters))}"


def write_call(tool: ToolDefinition) -> str:
    """A call in the older form, as a grammar: an array of one."""
    head = f'[{{"name": "{tool.name}", "arguments": '
    return f"{literal(head)} {json_schema(dict(tool.parameters))} {literal('}]')}"
