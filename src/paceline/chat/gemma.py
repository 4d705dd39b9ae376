"""Tool calls of Gemma 4 and FunctionGemma: call:NAME{key:<|"|>text<|"|>,other:3} between markers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from paceline.chat.grammars import (
    any_of,
    arguments_of,
    check_strict,
    enumerated,
    json_schema,
    literal,
    special,
    within_limit,
)
from paceline.chat.parser import MessageWriter, Reader
from paceline.chat.reading import NAME_STOP, MalformedError, Markers, Reading, Source, is_json, json_string
from paceline.chat.strict import StrictTools, held_call
from paceline.chat.values import ToolDefinition
from paceline.errors import StructureError

_DEEPEST = 8  # references and alternatives of an argument that are followed
_WORD_STOP = re.compile(r"[,:{}\[\]<\" \t\r\n]")  # what no bare word contains; all of it is read as something else


@dataclass(frozen=True)
class GemmaMarkers:
    """Markers around calls and around strings."""

    begin: str
    end: str
    quote: str


GEMMA4 = GemmaMarkers("<|tool_call>", "<tool_call|>", '<|"|>')
FUNCTION_GEMMA = GemmaMarkers("<start_function_call>", "<end_function_call>", "<escape>")


def reads_gemma(markers: GemmaMarkers, tools: Sequence[ToolDefinition]) -> Reader:
    """Return a reader of answers with calls between these markers."""
    begin, strict = Markers(markers.begin), StrictTools(tools)

    def call(source: Source, name: str, writer: MessageWriter) -> Reading[None]:
        writer.begin_call(name)
        writer.end_call((yield from _ObjectReader(source, writer.arguments, markers.quote).read()))
        yield from source.accept(markers.end)

    def read(source: Source, writer: MessageWriter) -> Reading[None]:
        while (yield from begin.read(source, writer.text)) is not None:
            source.record()
            try:
                yield from source.expect("call:")
                name = yield from source.take_while(NAME_STOP)
                if not name or not (yield from source.is_at("{")):
                    raise MalformedError
            except MalformedError:
                writer.text(markers.begin + source.recorded())
                continue
            before = markers.begin + source.recorded()
            if name in strict:  # the grammar leaves strings, arrays and objects free
                yield from held_call(source, writer, strict, before, partial(call, source, name))
            else:
                yield from call(source, name, writer)

    return read


class _ObjectReader:
    """Reads an object in Gemma's form and passes it on as JSON, as it arrives."""

    def __init__(self, source: Source, emit: Callable[[str], None], quote: str) -> None:
        self._source, self._emit, self._quote = source, emit, quote
        self._end_of_string = Markers(quote)
        self._open: list[str] = []
        self._at_key = False

    def read(self) -> Reading[bool]:
        """Read the object. Returns whether it was complete."""
        while (yield from self._source.available()):
            if not (yield from self._part()):
                return False
            if not self._open:
                return True
        return False

    def _part(self) -> Reading[bool]:
        """Read a bracket, a separator, a string or a word. Returns False if it is none of them."""
        source, character = self._source, self._source.peek(1)
        if character in "{[}],: \t\r\n":
            self._punctuation(source.take(1))
        elif character == '"':
            try:
                self._emit(json.dumps((yield from json_string(source)), ensure_ascii=False))
            except MalformedError:
                return False
        elif (yield from source.accept(self._quote)):
            return (yield from self._string())
        elif character == "<":
            return False
        else:
            word = yield from source.take_while(_WORD_STOP)  # a key, a number, true, false or null; else a string
            self._emit(json.dumps(word, ensure_ascii=False) if self._at_key or not is_json(word) else word)
        return True

    def _punctuation(self, character: str) -> None:
        if character in "{[":
            self._open.append(character)
        elif character in "}]":
            self._open.pop()
        if character in "{[,:":
            self._at_key = character in "{," and self._open[-1] == "{"
        self._emit(character)

    def _string(self) -> Reading[bool]:
        self._emit('"')
        ended = yield from self._end_of_string.read(
            self._source, lambda text: self._emit(json.dumps(text, ensure_ascii=False)[1:-1])
        )
        if ended is None:
            return False
        self._emit('"')
        return True


# --- grammar ---


def writes_gemma(markers: GemmaMarkers) -> Callable[[ToolDefinition], str]:
    """Return the grammar of a call after its begin marker.

    It enforces names of arguments, their types and enumerated values, but not what arrays and objects contain.
    """

    def one(tool: ToolDefinition) -> str:
        properties = arguments_of(tool)
        check_strict(tool, tool.parameters)
        if properties is None:
            return f"{literal(f'call:{tool.name}')} object {special(markers.end)}"
        arguments = _arguments(tool, properties, markers.quote)
        return " ".join([literal(f"call:{tool.name}{{"), arguments, literal("}"), special(markers.end)])

    return one


def _arguments(tool: ToolDefinition, properties: Mapping[str, Any], quote: str) -> str:
    """The arguments of a call: required ones first, then any of the others. Raises StructureError if too long."""
    values = (_value_rule(schema, tool.parameters, quote) for schema in properties.values())
    pairs = {
        name: f"{literal(_key(name) + ':')} {value}"
        for name, value in zip(properties, within_limit(values), strict=True)
    }
    required = [name for name in dict.fromkeys(tool.parameters.get("required", ())) if name in pairs]
    optional = [name for name in pairs if name not in required]

    def further(names: Sequence[str]) -> str:
        return " ".join(f'("," {pairs[name]})?' for name in names)

    if required:
        return f"""{' "," '.join(pairs[name] for name in required)} {further(optional)}"""
    by_first = (f"{pairs[name]} {further(optional[place:])}" for place, name in enumerate(optional, 1))
    return f"{any_of(by_first)}?" if optional else ""


def _key(name: str) -> str:
    """The name of an argument as it is written: in quotes if it is no bare word."""
    return json.dumps(name, ensure_ascii=False) if not name or _WORD_STOP.search(name) else name


def _value_rule(schema: object, root: Mapping[str, Any], quote: str, depth: int = 0) -> str:
    """A value as a grammar. root: the schema that references are to. depth: of references and alternatives so far."""
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        return "value"
    inner = partial(_value_rule, root=root, quote=quote, depth=depth + 1)
    values, kind, options = enumerated(schema), schema.get("type"), schema.get("anyOf", schema.get("allOf"))
    if values and not any(isinstance(value, (list, dict)) for value in values):
        return any_of([_constant(value, quote) for value in values])
    if isinstance(options, list) and options:
        return any_of(map(inner, options))
    if isinstance(kind, list) and kind:
        return any_of(inner({**schema, "type": each}) for each in kind)
    for name in ("$defs", "definitions"):
        definitions, (place, _, target) = root.get(name), str(schema.get("$ref")).rpartition("/")
        if place == f"#/{name}" and isinstance(definitions, Mapping) and target in definitions:
            return inner(definitions[target])
    if kind in ("integer", "number", "boolean", "null"):
        return json_schema(schema)
    return kind if kind in ("string", "array", "object") else "value"


def _constant(value: object, quote: str) -> str:
    if isinstance(value, str) and quote in value:
        raise StructureError(f"{value[:100]!r} contains {quote}, which ends strings")
    mark = special(quote)
    return f"{mark} {literal(value)} {mark}" if isinstance(value, str) else literal(json.dumps(value))


def value_rules(quote: str) -> str:
    """Rules of values in Gemma's form."""
    return (
        f'value: string | NUMBER | BOOLEAN | "null" | array | object\n'
        f"string: {special(quote)} string_end\n"
        f"string_end[suffix={special(quote)}]: LETTERS\n"
        f"LETTERS: /(.|\\n)*/ & ~/(.|\\n)*{re.escape(quote)}(.|\\n)*/\n"  # the mark's letters would end it, too
        'array: "[" (value ("," value)*)? "]"\n'
        'object: "{" (KEY ":" value ("," KEY ":" value)*)? "}"\n'
        "KEY: /[a-zA-Z_$][a-zA-Z0-9_.$-]{0,63}/\n"
        'BOOLEAN: "true" | "false"\n'
        "NUMBER: /-?(0|[1-9][0-9]{0,17})(\\.[0-9]{1,17})?([eE][-+]?[0-9]{1,2})?/\n"
    )
