"""Strict calls: whether arguments obey the schema of their tool, where no grammar has made sure of it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from paceline.chat.parser import MessageWriter
from paceline.chat.pointers import resolved
from paceline.chat.reading import Reading, Source, refuse_constant
from paceline.chat.values import ToolDefinition, message_of
from paceline.errors import StructureError

_MAX_STEPS = 10_000  # of one check: 20 ms
_UNCHECKED = {  # keywords that grammars do not follow, and patterns: a client's may take for ever with Python's matcher
    "pattern", "not", "if", "multipleOf", "uniqueItems", "contains", "patternProperties", "propertyNames",
    "dependentRequired", "dependentSchemas", "unevaluatedItems",
}  # fmt: skip
_TYPES: Mapping[str, Callable[[Any], bool]] = {
    "string": lambda value: isinstance(value, str),
    "integer": lambda value: _is_number(value) and float(value).is_integer(),
    "number": lambda value: _is_number(value),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}


class StrictTools:
    """The strict ones of some tools. Calls of them that no grammar has led are held until they are checked."""

    def __init__(self, tools: Iterable[ToolDefinition]) -> None:
        self._tools = {tool.name: tool for tool in tools if tool.strict}

    def __contains__(self, name: object) -> bool:
        return name in self._tools

    def have(self, keyword: re.Pattern[str]) -> set[str]:
        """The names of those whose schemas have a keyword. keyword: as JSON text, with the beginning of its value."""
        return {name for name, tool in self._tools.items() if keyword.search(json.dumps(dict(tool.parameters)))}

    def obeys(self, name: str, arguments: str) -> bool:
        """Whether the JSON text of arguments is certain to obey the schema of the strict tool of this name."""
        schema = self._tools[name].parameters
        try:
            value = json.loads(arguments, object_pairs_hook=_once, parse_constant=refuse_constant)
            return _Check(schema).obeys(schema, value)
        except (ValueError, OverflowError, RecursionError, StructureError):
            return False


def held_call(
    source: Source,
    writer: MessageWriter,
    strict: StrictTools,
    before: str,
    read: Callable[[MessageWriter], Reading[None]],
) -> Reading[None]:
    """Read a call of a strict tool, and write it if it obeys its schema; otherwise as text.

    before: the text that was read of it. read: reads its rest, and writes the call to a writer that is given.
    """
    held = MessageWriter()
    source.record()
    yield from read(held)
    text = source.recorded()
    message = message_of(held.take())
    (call,) = message.tool_calls
    if call.complete and strict.obeys(call.name, call.arguments):
        writer.whole_call(call.name, call.arguments)
        writer.text(message.text)
    else:
        writer.text(before + text)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name comes twice")
    return found


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


class _Check:
    """One check of a value. Raises StructureError for what cannot be checked, or takes too long."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root, self._steps = root, 0

    def obeys(self, schema: Any, value: Any) -> bool:
        """Whether a value obeys a schema, all of whose keywords hold together."""
        self._step()
        if not isinstance(schema, Mapping):
            return schema is True
        if unchecked := [name for name in schema.keys() & _UNCHECKED if schema[name] not in (False, {})]:
            raise StructureError(f"{min(unchecked)} is not checked")
        return self._is_of_type(schema, value) and self._combines(schema, value) and self._fits(schema, value)

    def _step(self, steps: int = 1) -> None:
        self._steps += steps
        if self._steps > _MAX_STEPS:
            raise StructureError("the check takes too long")

    def _is_of_type(self, schema: Mapping[str, Any], value: Any) -> bool:
        types = schema.get("type", [*_TYPES])
        return any(_TYPES[name](value) for name in ([types] if isinstance(types, str) else types))

    def _combines(self, schema: Mapping[str, Any], value: Any) -> bool:
        if "$ref" in schema and not self.obeys(resolved(self._root, schema["$ref"]), value):
            return False
        return (
            ("enum" not in schema or self._is_among(schema["enum"], value))
            and ("const" not in schema or self._is_among([schema["const"]], value))
            and ("anyOf" not in schema or any(self.obeys(option, value) for option in schema["anyOf"]))
            and ("oneOf" not in schema or sum(self.obeys(option, value) for option in schema["oneOf"]) == 1)
            and all(self.obeys(part, value) for part in schema.get("allOf", ()))
        )

    def _is_among(self, values: Sequence[Any], value: Any) -> bool:
        self._step(len(values))
        return any(value == each and _text(value) == _text(each) for each in values)  # 1 and true are equal in Python

    def _fits(self, schema: Mapping[str, Any], value: Any) -> bool:
        if isinstance(value, str):
            return _is_between(len(value), schema, "Length")
        if isinstance(value, list):
            first = schema.get("prefixItems", [])
            further = ((schema.get("items", True), item) for item in value[len(first) :])
            return _is_between(len(value), schema, "Items") and all(
                self.obeys(*pair) for pair in chain(zip(first, value, strict=False), further)
            )
        if isinstance(value, dict):
            return _is_between(len(value), schema, "Properties") and self._has_properties(schema, value)
        return not _is_number(value) or (
            schema.get("minimum", value) <= value <= schema.get("maximum", value)
            and ("exclusiveMinimum" not in schema or schema["exclusiveMinimum"] < value)
            and ("exclusiveMaximum" not in schema or value < schema["exclusiveMaximum"])
        )

    def _has_properties(self, schema: Mapping[str, Any], value: Mapping[str, Any]) -> bool:
        known, others = schema.get("properties", {}), schema.get("unevaluatedProperties", True)
        others = schema.get("additionalProperties", others)
        return all(name in value for name in schema.get("required", ())) and all(
            self.obeys(known.get(name, others), item) for name, item in value.items()
        )


def _text(value: object) -> str:
    return json.dumps(value, sort_keys=True)


def _is_between(size: int, schema: Mapping[str, Any], noun: str) -> bool:
    return bool(schema.get(f"min{noun}", 0) <= size <= schema.get(f"max{noun}", size))
