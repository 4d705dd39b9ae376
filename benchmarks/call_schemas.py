"""Forty schemas of tools' arguments: nested, enumerated, arrays, Unicode, long strings, recursion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.chat.values import ToolDefinition

Schema = dict[str, Any]
SHORT: Schema = {"type": "string", "maxLength": 12}
DIGIT: Schema = {"type": "integer", "minimum": 0, "maximum": 9}


def of(optional: Mapping[str, Schema] | None = None, **required: Schema) -> Schema:
    """An object with these members and no others."""
    properties = {**required, **(optional or {})}
    return {"type": "object", "properties": properties, "required": [*required], "additionalProperties": False}


def some(items: Schema, low: int, high: int) -> Schema:
    """Return the schema of an array of ``low`` to ``high`` items."""
    return {"type": "array", "items": items, "minItems": low, "maxItems": high}


SCHEMAS: list[Schema] = [
    of(),
    of(city=SHORT),
    of(city=SHORT, unit={"enum": ["celsius", "fahrenheit"]}),
    of(a=DIGIT, b=DIGIT),
    of(x={"type": "number", "minimum": -1, "maximum": 1}),
    of(on={"type": "boolean"}),
    of(nothing={"type": "null"}),
    of({"maybe": SHORT}, sure=DIGIT),
    of({"p": DIGIT, "q": DIGIT, "r": DIGIT}),
    of(tags=some(SHORT, 1, 3)),
    of(matrix=some(some(DIGIT, 2, 2), 2, 2)),
    of(inner=of(deeper=of(deepest=of(value=DIGIT)))),
    of(people=some(of(name=SHORT, age={"type": "integer", "minimum": 0, "maximum": 120}), 1, 2)),
    of(color={"enum": ["rot", "grün", "blau"]}),
    of(greeting={"enum": ["こんにちは", "привет", "γειά"]}),
    of(face={"enum": ["😀", "🙃"]}),
    of(größe=DIGIT, naïve=SHORT),
    of(story={"type": "string", "minLength": 100, "maxLength": 128}),
    of(code={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}),
    of(day={"type": "string", "format": "date"}),
    of(clock={"type": "string", "pattern": "^([01][0-9]|2[0-3]):[0-5][0-9]$"}),
    of(value={"anyOf": [DIGIT, SHORT, {"type": "null"}]}),
    of(mixed={"type": ["integer", "boolean"]}),
    of(fixed={"const": "exactly this"}),
    of(number={"const": 42}),
    of(list={"type": "array", "prefixItems": [DIGIT, SHORT], "items": False, "minItems": 2}),
    of(path={"type": "string", "pattern": "^/[a-z]{1,8}(/[a-z]{1,8}){0,3}$"}, flags=some({"enum": ["r", "w"]}, 0, 2)),
    of(query=SHORT, limit={"type": "integer", "minimum": 1, "maximum": 50}, order={"enum": ["asc", "desc"]}),
    of({"old": SHORT, "new": SHORT}, file=SHORT),
    of(quotes={"enum": ['say "hi"', "it's", "back\\slash", "line\nbreak"]}),
    of(braces={"enum": ["{}", "</tool_call>", "[1, 2]", '{"name": "x"}']}),
    of(step={"type": "integer", "minimum": -5, "maximum": 5}),
    of(id={"type": "string", "format": "uuid"}),
    of(address={"type": "string", "format": "ipv4"}),
    {
        "type": "object",
        "properties": {"tree": {"$ref": "#/$defs/node"}},
        "required": ["tree"],
        "$defs": {"node": of({"next": {"anyOf": [DIGIT, {"type": "null"}]}}, value=DIGIT)},
    },
    {"type": "object", "additionalProperties": DIGIT, "minProperties": 1, "maxProperties": 1},
    of(None, **{f"field_{n}": {"type": "boolean"} for n in range(8)}),
    of(choice={"anyOf": [of(kind={"const": "a"}, a=DIGIT), of(kind={"const": "b"}, b=SHORT)]}),
    of(messages=some(of(role={"enum": ["user", "assistant"]}, text=SHORT), 1, 2)),
    of(empty={"type": "array", "maxItems": 0}, text={"type": "string", "minLength": 1, "maxLength": 40}),
]
TOOLS = [ToolDefinition(f"tool_{n}", f"Example {n}", schema, strict=True) for n, schema in enumerate(SCHEMAS)]
