"""Tool calls of Qwen3-Coder and Qwen3.5: <tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function>.

Values are plain text. Which of them are JSON strings, and which are numbers or objects, is known from the schemas.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from paceline.chat.grammars import (
    allows,
    any_of,
    arguments_of,
    check_strict,
    enumerated,
    json_schema,
    kinds_of,
    literal,
    special,
    within_limit,
)
from paceline.chat.hermes import BEGIN, END
from paceline.chat.parser import MessageWriter, Reader
from paceline.chat.reading import MalformedError, Markers, Reading, Source, is_json, json_value
from paceline.chat.strict import StrictTools, held_call
from paceline.chat.values import ToolDefinition
from paceline.errors import StructureError

_FUNCTION, _PARAMETER, _END_FUNCTION, _END_PARAMETER = "<function=", "<parameter=", "</function>", "</parameter>"
_KEY_END, _VALUE_END_LINE = ">\n", f"\n{_END_PARAMETER}\n"
_BEGINS = Markers(BEGIN, _FUNCTION)
_NAME_STOP, _KEY_STOP = re.compile(r"[>\s<]"), re.compile(r"[>\n]")
_LENGTH = re.compile(r'"(min|max)Length": \d')  # the keywords, which the grammar does not enforce
_VALUE_END = Markers(_END_PARAMETER)


def reads_qwen_xml(tools: Sequence[ToolDefinition]) -> Reader:
    """Return a reader of answers with such calls."""
    schemas = {tool.name: tool.properties or {} for tool in tools}
    strict = StrictTools(tools)
    unmeasured = strict.have(_LENGTH)

    def call(source: Source, name: str, writer: MessageWriter) -> Reading[None]:
        writer.begin_call(name)
        yield from _call(source, writer, schemas.get(name, {}))

    def read(source: Source, writer: MessageWriter) -> Reading[None]:
        while (marker := (yield from _BEGINS.read(source, writer.text))) is not None:
            source.record()
            if marker == BEGIN:
                yield from source.skip_space()
            try:
                if marker == BEGIN:
                    yield from source.expect(_FUNCTION)
                name = yield from _name(source)
            except MalformedError:
                writer.text(marker + source.recorded())
                continue
            before = marker + source.recorded()
            led = before == f"{BEGIN}\n{_FUNCTION}{name}>" and name not in unmeasured
            if name in strict and not led:
                yield from held_call(source, writer, strict, before, partial(call, source, name))
            else:
                yield from call(source, name, writer)

    return read


def _name(source: Source, stop: re.Pattern[str] = _NAME_STOP) -> Reading[str]:
    name = yield from source.take_while(stop)
    yield from source.expect(">")
    if not name:
        raise MalformedError
    return name


def _call(source: Source, writer: MessageWriter, schemas: Mapping[str, Any]) -> Reading[None]:
    """Read the parameters of a call that was begun, and end it."""
    before = "{"
    while True:
        source.record()
        yield from source.skip_space()
        if not (yield from source.accept(_PARAMETER)):
            break
        try:
            key = yield from _name(source, _KEY_STOP)
        except MalformedError:
            break
        source.recorded()
        writer.arguments(f"{before}{json.dumps(key)}: ")
        before = ", "
        if not (yield from _value(source, writer, schemas.get(key))):
            writer.end_call(complete=False)
            return
    ended = yield from source.accept(_END_FUNCTION)
    rest = source.recorded()
    writer.arguments("{}" if before == "{" else "}")
    writer.end_call(complete=ended)
    if not ended:
        writer.text(rest.lstrip())
        return
    yield from source.skip_space()
    yield from source.accept(END)


def _value(source: Source, writer: MessageWriter, schema: object) -> Reading[bool]:
    """Read a value and write it as JSON. Returns False if the answer ends within it."""
    yield from source.accept("\n")
    if _is_text(schema):
        return (yield from _text_value(source, writer, nullable=_is_nullable(schema)))
    value = yield from _json(source, schema)
    if value is not None:
        writer.arguments(value)
        return True
    pieces: list[str] = []
    marker = yield from _VALUE_END.read(source, pieces.append)
    text = "".join(pieces).removesuffix("\n")
    writer.arguments(text if marker is None else json.dumps(text, ensure_ascii=False))
    return marker is not None


def _json(source: Source, schema: object) -> Reading[str | None]:
    """Read a JSON value, whose strings may contain the end marker, and the marker.

    Returns None if that is not what comes, or is a string by its schema.
    """
    pieces: list[str] = []
    source.record()
    yield from source.skip_space()
    ended = yield from json_value(source, pieces.append)
    yield from source.skip_space()
    ended = ended and (yield from source.accept(_END_PARAMETER))
    text, value = source.recorded(), "".join(pieces)
    if ended and is_json(value) and not (isinstance(schema, Mapping) and _means_string(schema, value)):
        return value
    source.put_back(text)
    return None


def _text_value(source: Source, writer: MessageWriter, *, nullable: bool) -> Reading[bool]:
    """Write a string as it arrives; the newline before the end marker is no part of it.

    nullable: whether the text "null" is no string.
    """
    held, begun = "", False

    def add(text: str, may_be_null: bool = nullable) -> None:
        nonlocal held, begun
        whole = held + text
        if may_be_null and not begun and "null\n".startswith(whole):
            held = whole
            return
        held = "\n" if whole.endswith("\n") else ""
        writer.arguments(("" if begun else '"') + json.dumps(whole.removesuffix("\n"), ensure_ascii=False)[1:-1])
        begun = True

    if not nullable:
        add("")
    marker = yield from _VALUE_END.read(source, add)
    if marker is not None and not begun and held.removesuffix("\n") == "null":
        writer.arguments("null")
        return True
    if not begun:
        add("", may_be_null=False)
    if marker is None:
        return False
    writer.arguments('"')
    return True


def _means_string(schema: Mapping[str, Any], text: str) -> bool:
    """Whether a schema allows a JSON text as a string, and not as what it spells."""
    return allows(schema, text) and not allows(schema, json.loads(text))


def _is_nullable(schema: object) -> bool:
    """Whether the text "null" of a value that is text is null."""
    if not isinstance(schema, Mapping) or "null" not in (kinds_of(schema) or ()):
        return False
    return not _means_string(schema, "null")


def _is_text(schema: object) -> bool:
    """Whether values of a schema are strings, or null in their place. Those of parameters without a schema are, too."""
    if not isinstance(schema, Mapping):
        return True
    values = enumerated(schema)
    if values is not None:
        return all(isinstance(value, str) for value in values)
    kinds = kinds_of(schema)
    if kinds is not None:
        return "string" in kinds
    return not schema.keys() & {"type", "anyOf", "allOf", "oneOf", "$ref"}


# --- grammar ---


def write_call(tool: ToolDefinition) -> str:
    """The rest of a call after its begin marker, as a grammar: parameters in the schema's order, optional ones too.

    Raises StructureError for parameters that cannot be enforced, are too long, or could not be read.
    """
    properties = arguments_of(tool)
    required = set(tool.parameters.get("required", ()))

    def parameter(key: str, schema: object) -> str:
        if not key or _KEY_STOP.search(key):
            raise StructureError(
                f"{key[:100]!r} cannot be the name of a parameter, which ends with > in a line of its own"
            )
        rooted = tool.rooted(schema) if isinstance(schema, Mapping) else schema
        if _is_text(schema):
            check_strict(tool, schema)
        value = f"{literal(_PARAMETER + key + _KEY_END)} {_value_rule(rooted)}"
        return f"({value})" if key in required else f"({value})?"

    parameters = ["any_parameter*"]
    if properties is not None:
        parameters = [*within_limit(parameter(key, schema) for key, schema in properties.items())]
    begin, end = literal(f"\n{_FUNCTION}{tool.name}>\n"), literal(f"{_END_FUNCTION}\n")
    return " ".join([begin, *parameters, end, special(END)])


def _value_rule(schema: object) -> str:
    """A value and its end marker as a grammar. Strings are free unless they are enumerated. Raises StructureError."""
    end = literal(_VALUE_END_LINE)
    if not _is_text(schema):
        return f"{json_schema(schema)} {end}"
    values = [str(value) for value in enumerated(schema) or ()]
    if marked := [value for value in values if _END_PARAMETER in value]:
        raise StructureError(f"{marked[0][:100]!r} contains {_END_PARAMETER}, which ends values of parameters")
    return f"{any_of([literal(value) for value in values])} {end}" if values else "text"


RULES = (
    f'text: text_end "\\n"\n'
    f"text_end[suffix={literal(_END_PARAMETER)}]: /(.|\\n)*/\n"
    f'any_parameter: "{_PARAMETER}" /[a-zA-Z_][a-zA-Z0-9_]{{0,63}}/ ">\\n" text'
)
