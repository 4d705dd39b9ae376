"""Which JSON schemas and patterns are followed to the letter.

What xgrammar would not enforce is refused: an answer that may break its schema keeps no promise.
"""

from __future__ import annotations

import re
from typing import Any

from paceline.errors import StructureError

_SAID = {
    "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly",
    "$schema", "$id", "$comment", "$defs", "definitions",
}  # fmt: skip
_ALONE: dict[str, set[str]] = {  # beside these xgrammar looks at nothing but the type
    "$ref": set(),
    "anyOf": set(),
    "allOf": set(),
    "enum": {"type"},
    "const": {"type"},
    "pattern": {"type"},
    "format": {"type"},
}
_OF_TYPE: dict[str, set[str]] = {
    "object": {"properties", "required", "additionalProperties", "minProperties", "maxProperties"},
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "string": {"minLength", "maxLength", "pattern", "format"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"},
    "integer": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"},
}
_TYPED = set().union(*_OF_TYPE.values())
_FORMATS = {"date", "time", "date-time", "duration", "hostname", "ipv4", "ipv6", "uuid", "uri", "uri-reference"}
_IN_JSON = re.compile(r'(?:[^"\\\x00-\x1f]|\\[dDwWsS]|\\[^\w"\\])*')  # what xgrammar would put there as it is
_CHARACTER = r'(.|\\"|\\\\|\\/|\\[bfnrt])'  # of a JSON string, escaped where it must be
_COUNTS = {"minItems", "maxItems", "minProperties", "maxProperties", "minLength", "maxLength"}
_MOST = 128  # of a count: with thousands xgrammar 0.2.8 makes grammars that are wrong
_LOOKAROUND = re.compile(r"\(\?(?!:)|\\[bB]")  # and other marks that no regular language has


def enforceable(schema: Any) -> Any:
    """The schema as xgrammar enforces all of it. Raises StructureError for what it would not."""
    if not isinstance(schema, dict):
        return schema  # true, false, or nothing that xgrammar takes
    said = schema.keys() - _SAID
    _check_names(said, schema.get("type"))
    _check_values(schema)
    return _with_lengths({name: _inner(name, value) for name, value in schema.items()})


def _inner(name: str, value: Any) -> Any:
    """A keyword's value with the schemas in it made enforceable."""
    if name in ("items", "additionalProperties"):
        return enforceable(value)
    if name in ("anyOf", "allOf", "prefixItems"):
        return [enforceable(each) for each in value]
    if name in ("properties", "$defs", "definitions"):
        return {key: enforceable(each) for key, each in value.items()}
    return value


def _with_lengths(schema: dict[str, Any]) -> dict[str, Any]:
    """Lengths of strings as patterns: with lengths alone xgrammar 0.2.8 lets raw control characters into strings."""
    if not schema.keys() & {"minLength", "maxLength"}:
        return schema
    low, high = schema.pop("minLength", 0), schema.pop("maxLength", "")
    return {**schema, "pattern": f"^{_CHARACTER}{{{low},{high}}}$"}


def _check_names(said: set[str], types: object) -> None:
    if unknown := said - _TYPED - _ALONE.keys() - {"type"}:
        raise StructureError(f"the schema says {min(unknown)!r}, which cannot be enforced; leave it out")
    for name in said & _ALONE.keys():
        if others := said - _ALONE[name] - {name}:
            raise StructureError(f"the schema says {min(others)!r} beside {name!r}; only one of them can be enforced")
    known: list[str] = [types] if isinstance(types, str) else list(types) if isinstance(types, list) else []
    if untyped := (said & _TYPED) - set().union(*(_OF_TYPE.get(str(each), set()) for each in known)):
        raise StructureError(f"the schema says {min(untyped)!r} and not the 'type' that it belongs to; say both")


def _check_values(schema: dict[str, Any]) -> None:
    if len(schema.get("allOf", [None])) != 1:
        raise StructureError("the schema says 'allOf' with several schemas; put them into one")
    if schema.get("format", "date") not in _FORMATS:
        raise StructureError(
            f"the format {schema['format']!r} cannot be enforced; known: {', '.join(sorted(_FORMATS))}"
        )
    for name in _COUNTS & schema.keys():
        _check_count(name, schema[name])
    if missing := set(schema.get("required", ())) - schema.get("properties", {}).keys():
        raise StructureError(f"the schema requires {min(missing)!r}, which is none of its 'properties'")
    if "pattern" in schema:
        check_pattern(schema["pattern"])
        if not _IN_JSON.fullmatch(schema["pattern"]):
            raise StructureError(
                f"the pattern {schema['pattern']!r} has a quote, a backslash or an escape beyond \\d \\w \\s"
            )
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if "type" in schema and (wrong := [value for value in values if not _is_of(value, schema["type"])]):
        raise StructureError(f"the schema allows {wrong[0]!r}, which is not of its 'type'")


def check_pattern(pattern: str) -> None:
    """Raise StructureError for what a regular expression says and would not be enforced."""
    if _LOOKAROUND.search(pattern):
        raise StructureError(f"the pattern {pattern!r} looks around or sets flags, which a grammar cannot")
    _check_count("pattern", max(map(int, re.findall(r"\d+", " ".join(re.findall(r"\{[\d,]*\}", pattern)))), default=0))


def _check_count(name: str, count: int) -> None:
    if count > _MOST:
        raise StructureError(f"{name} counts to {count}; up to {_MOST} can be enforced")


_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,), "array": (list,), "string": (str,), "boolean": (bool,), "null": (type(None),),
    "number": (int, float), "integer": (int,),
}  # fmt: skip


def _is_of(value: object, types: str | list[str]) -> bool:
    names = [types] if isinstance(types, str) else types
    return any(
        isinstance(value, _TYPES.get(name, ())) and (name == "boolean" or not isinstance(value, bool)) for name in names
    )
