"""Tool calls with a tag for each parameter, as Qwen3-Coder and Qwen3.5, GLM 4.5 to 4.7 and MiniMax M2 write them.

Qwen: <tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></tool_call>.
GLM: <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>...</tool_call>.
MiniMax: <minimax:tool_call><invoke name="NAME"><parameter name="KEY">VALUE</parameter>...</invoke></minimax:tool_call>.
Values are plain text. Which of them are JSON strings, and which are numbers or objects, is known from the schemas.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
from paceline.chat.parser import MessageWriter, Reader
from paceline.chat.reading import MalformedError, Markers, Reading, Source, is_json, json_value
from paceline.chat.strict import StrictTools, held_call
from paceline.chat.values import ToolDefinition
from paceline.errors import StructureError

_LENGTH = re.compile(r'"(min|max)Length": \d')  # the keywords, which the grammar does not enforce


@dataclass(frozen=True)
class Tags:
    """Texts of a syntax. begin, end: special tokens around calls.

    function, name_end: before and after a function's name; "" before it: nothing. key, key_end: around a parameter's
    name. value, value_end: around its value. end_function: behind the parameters, if there is such a tag.
    lines: whether tags and values are written in lines of their own.
    """

    begin: str
    end: str
    function: str
    name_end: str
    key: str
    key_end: str
    value: str
    value_end: str
    end_function: str
    lines: bool = False

    @property
    def line(self) -> str:
        """What a grammar writes between tags."""
        return "\n" if self.lines else ""

    @property
    def name_stop(self) -> re.Pattern[str]:
        """Characters that end a function's name."""
        return re.compile(rf"[{self.name_end[:1]}\s<]")

    @property
    def key_stop(self) -> re.Pattern[str]:
        """Characters that end a parameter's name."""
        return re.compile(rf"[{self.key_end[:1]}\n]")


QWEN = Tags(
    "<tool_call>", "</tool_call>", "<function=", ">", "<parameter=", ">", "", "</parameter>", "</function>",
    lines=True,
)  # fmt: skip
GLM = Tags("<tool_call>", "</tool_call>", "", "", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "")
MINIMAX = Tags(
    "<minimax:tool_call>", "</minimax:tool_call>", '<invoke name="', '">', '<parameter name="', '">', "",
    "</parameter>", "</invoke>",
)  # fmt: skip


def reads_tagged(tags: Tags, tools: Sequence[ToolDefinition]) -> Reader:
    """Return a reader of answers with such calls."""
    begins = Markers(*filter(None, (tags.begin, tags.function)))  # calls may come without a block around them
    schemas = {tool.name: tool.properties or {} for tool in tools}
    strict = StrictTools(tools)
    unmeasured = strict.have(_LENGTH)

    def call(source: Source, name: str, writer: MessageWriter) -> Reading[None]:
        writer.begin_call(name)
        yield from _call(tags, source, writer, schemas.get(name, {}))

    def read(source: Source, writer: MessageWriter) -> Reading[None]:
        while (marker := (yield from begins.read(source, writer.text))) is not None:
            source.record()
            if marker == tags.begin:
                yield from source.skip_space()
            try:
                if marker == tags.begin:
                    yield from source.expect(tags.function)
                name = yield from _name(source, tags.name_stop, tags.name_end)
                if not tags.name_end:
                    yield from _expect_parameters(tags, source)
            except MalformedError:
                writer.text(marker + source.recorded())
                continue
            before = marker + source.recorded()
            led = before == f"{tags.begin}{tags.line}{tags.function}{name}{tags.name_end}" and name not in unmeasured
            if name in strict and not led:
                yield from held_call(source, writer, strict, before, partial(call, source, name))
            else:
                yield from call(source, name, writer)

    return read


def _name(source: Source, stop: re.Pattern[str], end: str) -> Reading[str]:
    name = yield from source.take_while(stop)
    yield from source.expect(end)
    if not name:
        raise MalformedError
    return name


def _expect_parameters(tags: Tags, source: Source) -> Reading[None]:
    """Read white space before a parameter or the call's end. Raises MalformedError if something else comes next."""
    yield from source.skip_space()
    if not ((yield from source.is_at(tags.key)) or (yield from source.is_at(tags.end))):
        raise MalformedError


def _call(tags: Tags, source: Source, writer: MessageWriter, schemas: Mapping[str, Any]) -> Reading[None]:
    """Read the parameters of a call that was begun, and end it."""
    before = "{"
    while True:
        source.record()
        yield from source.skip_space()
        if not (yield from source.accept(tags.key)):
            break
        try:
            key = yield from _name(source, tags.key_stop, tags.key_end)
            if tags.value:
                yield from source.skip_space()
                yield from source.expect(tags.value)
        except MalformedError:
            break
        source.recorded()
        writer.arguments(f"{before}{json.dumps(key)}: ")
        before = ", "
        if not (yield from _Value(tags, source, writer).read(schemas.get(key))):
            writer.end_call(complete=False)
            return
    ended = yield from source.accept(tags.end_function or tags.end)
    rest = source.recorded()
    writer.arguments("{}" if before == "{" else "}")
    writer.end_call(complete=ended)
    if not ended:
        writer.text(rest.lstrip())
    elif tags.end_function:
        yield from source.skip_space()
        yield from source.accept(tags.end)


class _Value:
    """Reads a value and its end, and writes it as JSON."""

    def __init__(self, tags: Tags, source: Source, writer: MessageWriter) -> None:
        self._tags, self._source, self._writer = tags, source, writer
        self._end, self._line = Markers(tags.value_end), tags.line

    def read(self, schema: object) -> Reading[bool]:
        """Read a value. Returns False if the answer ends within it."""
        if self._line:
            yield from self._source.accept(self._line)
        if _is_text(schema):
            return (yield from self._text(nullable=_is_nullable(schema)))
        value = yield from self._json(schema)
        if value is not None:
            self._writer.arguments(value)
            return True
        pieces: list[str] = []
        marker = yield from self._end.read(self._source, pieces.append)
        text = "".join(pieces).removesuffix("\n")
        self._writer.arguments(text if marker is None else json.dumps(text, ensure_ascii=False))
        return marker is not None

    def _json(self, schema: object) -> Reading[str | None]:
        """Read a JSON value, whose strings may contain the end marker, and the marker.

        Returns None if that is not what comes, or is a string by its schema.
        """
        source = self._source
        pieces: list[str] = []
        source.record()
        yield from source.skip_space()
        ended = yield from json_value(source, pieces.append)
        yield from source.skip_space()
        ended = ended and (yield from source.accept(self._tags.value_end))
        text, value = source.recorded(), "".join(pieces)
        if ended and is_json(value) and not (isinstance(schema, Mapping) and _means_string(schema, value)):
            return value
        source.put_back(text)
        return None

    def _text(self, *, nullable: bool) -> Reading[bool]:
        """Write a string as it arrives; the line's end before the end marker is no part of it.

        nullable: whether the text "null" is no string.
        """
        held, begun, line = "", False, self._line

        def add(text: str, may_be_null: bool = nullable) -> None:
            nonlocal held, begun
            whole = held + text
            if may_be_null and not begun and f"null{line}".startswith(whole):
                held = whole
                return
            held = line if line and whole.endswith(line) else ""
            shown = json.dumps(whole.removesuffix(line), ensure_ascii=False)[1:-1]
            self._writer.arguments(("" if begun else '"') + shown)
            begun = True

        if not nullable:
            add("")
        marker = yield from self._end.read(self._source, add)
        if marker is not None and not begun and held.removesuffix(line) == "null":
            self._writer.arguments("null")
            return True
        if not begun:
            add("", may_be_null=False)
        if marker is None:
            return False
        self._writer.arguments('"')
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


def writes_tagged(tags: Tags) -> Callable[[ToolDefinition], str]:
    """Return what writes the rest of a call after its begin marker as a grammar."""
    return partial(_write_call, tags)


def _write_call(tags: Tags, tool: ToolDefinition) -> str:
    """The rest of a call: parameters in the schema's order, optional ones too.

    Raises StructureError for parameters that cannot be enforced, are too long, or could not be read.
    """
    properties = arguments_of(tool)
    required, line = set(tool.parameters.get("required", ())), tags.line

    def parameter(key: str, schema: object) -> str:
        if not key or tags.key_stop.search(key):
            raise StructureError(f"{key[:100]!r} cannot be the name of a parameter, which ends with {tags.key_end}")
        rooted = tool.rooted(schema) if isinstance(schema, Mapping) else schema
        if _is_text(schema):
            check_strict(tool, schema)
        value = f"{literal(f'{tags.key}{key}{tags.key_end}{tags.value}{line}')} {_value_rule(tags, rooted)}"
        return f"({value})" if key in required else f"({value})?"

    parameters = ["any_parameter*"]
    if properties is not None:
        parameters = [*within_limit(parameter(key, schema) for key, schema in properties.items())]
    begin = literal(f"{line}{tags.function}{tool.name}{tags.name_end}{line}")
    end = [literal(f"{tags.end_function}{line}")] if tags.end_function else []
    return " ".join([begin, *parameters, *end, special(tags.end)])


def _value_rule(tags: Tags, schema: object) -> str:
    """A value and its end marker as a grammar. Strings are free unless they are enumerated. Raises StructureError."""
    end = literal(f"{tags.line}{tags.value_end}{tags.line}")
    if not _is_text(schema):
        return f"{json_schema(schema)} {end}"
    values = [str(value) for value in enumerated(schema) or ()]
    if marked := [value for value in values if tags.value_end in value]:
        raise StructureError(f"{marked[0][:100]!r} contains {tags.value_end}, which ends values of parameters")
    return f"{any_of([literal(value) for value in values])} {end}" if values else "text"


def rules_of(tags: Tags) -> str:
    """Rules that the grammars of calls use."""
    line = f" {literal(tags.line)}" if tags.line else ""
    name = "/[a-zA-Z_][a-zA-Z0-9_]{0,63}/"
    return (
        f"text: text_end{line}\n"
        f"text_end[suffix={literal(tags.value_end)}]: /(.|\\n)*/\n"
        f"any_parameter: {literal(tags.key)} {name} {literal(f'{tags.key_end}{tags.value}{tags.line}')} text"
    )
