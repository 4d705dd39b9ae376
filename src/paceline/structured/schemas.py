"""Structures as grammars of llguidance that enforce all that they say.

llguidance (1.9) compiles JSON schemas itself, but ignores keywords that it does not know, rounds some numbers, and
crashes on others. It is given a schema written anew from the keywords known here; what it would not enforce to the
letter is refused by name. Properties come in their order and once: strings are written without escapes by number, which
would spell the name of a property a second way.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from itertools import combinations
from math import comb
from typing import Any, ClassVar
from urllib.parse import unquote

from paceline.errors import StructureError
from paceline.structured.keywords import (
    SAID,
    are_names,
    bounds_of,
    check_exact,
    check_names,
    counts_of,
    expect,
    is_of,
    number_bounds,
    whole_bounds,
)
from paceline.structured.patterns import Ranges, alphabet, check_spelled, common, rewritten, union

_FORMATS = {
    name: name for name in ("date", "time", "date-time", "duration", "hostname", "ipv4", "ipv6", "uuid", "uri")
} | {"uri-reference": "uri"}  # every URI is one
_MAX_SUBSCHEMAS = 2000  # of a schema: an object of so many properties compiles in a third of a second
_MAX_CHOICES = 64  # to choose so many properties out of those that need not be there
_PLAIN: Ranges = ((0x20, 0x7E), (0x80, 0x10FFFF))  # what JSON strings spell as it stands, or by a letter (next line)
_BY_LETTER: Ranges = ((0x08, 0x0A), (0x0C, 0x0D))
_OPTIONS = {
    "whitespace_pattern": r"[ \n\r\t]{0,8}",  # small models would add spaces for ever
    "json_allowed_escapes": 'bfnrt\\"',
}

Schema = dict[str, Any]


def grammar_of(kind: str, text: str, unspelled: Iterable[int] = ()) -> str:
    """The grammar of a "regex", a "schema" or any "object". Raises StructureError for what would not be followed.

    unspelled: bytes for which the model has no token of their own.
    """
    spelled = alphabet(unspelled)
    try:
        if kind == "regex":
            rule = f"/{rewritten(text, spelled)}/"
        else:
            schema = {"type": "object"} if kind == "object" else json.loads(text)
            rule = f"%json {json.dumps({**_Translation(schema, spelled).whole(), 'x-guidance': _OPTIONS})}"
    except RecursionError as error:
        raise StructureError(f"the {kind} is nested too deeply to be followed") from error
    return f'%llguidance {{"no_forcing": true}}\nstart: {rule}\n'  # forcing would forbid all spellings but one


class _Translation:
    """One schema on its way to one that llguidance enforces to the letter."""

    def __init__(self, schema: Any, spelled: Ranges) -> None:
        self._root = schema
        self._spelled = common(spelled, union(_PLAIN, _BY_LETTER))
        self._parts = 0
        self._definitions: dict[str, Schema] = {}  # by what refers to them in the new schema
        self._references: dict[str, str] = {}  # these, by what refers to them in the old one, or says them

    def whole(self) -> Schema:
        """The new schema. Raises StructureError."""
        root = self._reference("#")
        self._check_ends()
        self._check_begins()
        definitions = {name.rsplit("/", 1)[1]: schema for name, schema in self._definitions.items()}
        return {"$ref": root, "$defs": definitions}

    # --- references ---

    def _reference(self, target: str) -> str:
        if target not in self._references:
            name = self._references[target] = self._define({})  # in its place, however deep what follows goes
            self._definitions[name] = self._value(self._resolve(target), at_root=target == "#")
        return self._references[target]

    def _define(self, schema: Schema) -> str:
        """What refers to it in the new schema."""
        name = f"#/$defs/{len(self._definitions)}"
        self._definitions[name] = schema
        return name

    def _shared(self, schema: Schema) -> Schema:
        """What refers to one definition however often it is said: bounds take llguidance half a millisecond each."""
        text = json.dumps(schema)
        if text not in self._references:
            self._references[text] = self._define(schema)
        return {"$ref": self._references[text]}

    def _resolve(self, target: str) -> Any:
        if target != "#" and not target.startswith("#/"):
            raise StructureError(f"the schema refers to {target!r}; only its own parts ('#/$defs/...') can be followed")
        place = self._root
        for part in unquote(target).split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(place, dict) and key in place:
                place = place[key]
            elif isinstance(place, list) and key.isdecimal() and int(key) < len(place):
                place = place[int(key)]
            else:
                raise StructureError(f"the schema refers to {target!r}, which it does not have")
        return place

    def _check_ends(self) -> None:
        """Raise StructureError if some value would never end."""
        ending: set[str] = set()
        while more := {n for n, schema in self._definitions.items() if n not in ending and _ends(schema, ending)}:
            ending |= more
        if self._definitions.keys() - ending:
            raise StructureError("the schema refers to itself so that no value of it ever ends")

    def _check_begins(self) -> None:
        """Raise StructureError for a circle of schemas that are each other."""
        try:
            TopologicalSorter({name: set(_same_as(schema)) for name, schema in self._definitions.items()}).prepare()
        except CycleError as error:
            raise StructureError("the schema refers to itself before anything is said ('$ref' in a circle)") from error

    # --- schemas ---

    def _value(self, schema: Any, at_root: bool = False) -> Schema:
        """What llguidance is told of a schema."""
        self._parts += 1
        if self._parts > _MAX_SUBSCHEMAS:
            raise StructureError(f"the schema has more than {_MAX_SUBSCHEMAS} parts, the most that are followed")
        if schema is True:
            schema = {}
        expect(isinstance(schema, dict), "a schema", schema, "an object or true")
        said = schema.keys() - SAID
        check_names(said, schema.get("type"))
        if "$id" in schema and not at_root:
            raise StructureError("the schema says '$id' inside, which changes what '$ref' means; leave it out")
        self._check_definitions(schema)
        for name, method in self._alone.items():
            if name in said:
                return method(self, schema)
        if "type" not in schema:
            return {}
        types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        return _any_of([self._typed[name](self, schema) for name in types])

    def _check_definitions(self, schema: Mapping[str, Any]) -> None:
        """Also of what nothing refers to."""
        for name in ("$defs", "definitions"):
            defined = schema.get(name, {})
            expect(isinstance(defined, dict), repr(name), defined, "an object of schemas")
            for key, each in defined.items():
                if schema is self._root:
                    self._reference(f"#/{name}/" + key.replace("~", "~0").replace("/", "~1").replace("%", "%25"))
                else:
                    self._value(each)

    # --- what stands alone ---

    def _ref(self, schema: Mapping[str, Any]) -> Schema:
        target = schema["$ref"]
        expect(isinstance(target, str), "'$ref'", target, "a text")
        return {"$ref": self._reference(target)}

    def _any(self, schema: Mapping[str, Any]) -> Schema:
        given = schema["anyOf"]
        expect(isinstance(given, list) and len(given) > 0, "'anyOf'", given, "schemas")
        return _any_of([self._value(each) for each in given])

    def _all(self, schema: Mapping[str, Any]) -> Schema:
        given = schema["allOf"]
        expect(isinstance(given, list) and len(given) > 0, "'allOf'", given, "schemas")
        if len(given) != 1:
            raise StructureError("the schema says 'allOf' with several schemas; put them into one")
        return self._value(given[0])

    def _enum(self, schema: Mapping[str, Any]) -> Schema:
        values = schema["enum"]
        expect(isinstance(values, list) and len(values) > 0, "'enum'", values, "values")
        if "type" in schema and (wrong := [value for value in values if not is_of(value, schema["type"])]):
            raise StructureError(f"the schema allows {wrong[0]!r}, which is not of its 'type'")
        for value in values:
            self._check_literal(value)
        return {"enum": values}

    def _const(self, schema: Mapping[str, Any]) -> Schema:
        return self._enum({**schema, "enum": [schema["const"]]})

    def _check_literal(self, value: Any) -> None:
        if isinstance(value, str):
            check_spelled(value, self._spelled)
        elif isinstance(value, (int, float)):
            check_exact(value)
        elif isinstance(value, (list, dict)):
            for each in [*value, *value.values()] if isinstance(value, dict) else value:
                self._check_literal(each)

    # --- types ---

    def _object(self, schema: Mapping[str, Any]) -> Schema:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        expect(isinstance(properties, dict), "'properties'", properties, "an object of schemas")
        expect(are_names(required), "'required'", required, "names")
        if missing := set(required) - properties.keys():
            raise StructureError(f"the schema requires {min(missing)!r}, which is none of its 'properties'")
        for name in properties:
            check_spelled(name, self._spelled)
        more = schema.get("additionalProperties", "properties" not in schema and not required)
        made = {
            "type": "object",
            "properties": {name: self._value(each) for name, each in properties.items()},
            "required": list(dict.fromkeys(required)),
            "additionalProperties": more is not False and self._value(more),
        }
        return self._of_size(made, *counts_of(schema, "minProperties", "maxProperties"))

    def _of_size(self, made: Schema, low: int, high: int | None) -> Schema:
        """An object of so many properties. Raises StructureError."""
        names, needed, closed = made["properties"], made["required"], made["additionalProperties"] is False
        if not closed and low > len(needed) + 1:
            raise StructureError(
                f"the schema says 'minProperties' {low} beside additional properties, whose names may come twice; "
                "name the properties"
            )
        most = len(names) if high is None and closed else high
        if (closed and low > len(names)) or (most is not None and most < max(low, len(needed))):
            raise _impossible()
        if low <= len(needed) and (high is None or (closed and high >= len(names))):
            return made
        if len(names) == len(needed):  # the others are additional ones
            return {**made, **_counts("Properties", low, high)}
        return self._chosen(made, low, most)

    def _chosen(self, made: Schema, low: int, most: int | None) -> Schema:
        """An object, some of whose properties need not be there, as one of objects that each have all of theirs."""
        names, needed = made["properties"], made["required"]
        free = [name for name in names if name not in needed]
        counts = range(max(0, low - len(needed)), min(len(free), (most or 0) - len(needed)) + 1)
        if made["additionalProperties"] is not False or sum(comb(len(free), count) for count in counts) > _MAX_CHOICES:
            raise StructureError(
                "the schema says 'minProperties' or 'maxProperties' beside 'properties' that are not required, of "
                f"which there are more than {_MAX_CHOICES} choices; require them, or leave it out"
            )
        values = {name: {"$ref": self._define(value)} for name, value in names.items()}
        ways = [{*needed, *some} for count in counts for some in combinations(free, count)]
        chosen = [{name: value for name, value in values.items() if name in way} for way in ways]
        return _any_of([{**made, "properties": each, "required": list(each)} for each in chosen])

    def _array(self, schema: Mapping[str, Any]) -> Schema:
        first = schema.get("prefixItems", [])
        expect(isinstance(first, list), "'prefixItems'", first, "schemas")
        items = schema.get("items", not first)
        low, high = counts_of(schema, "minItems", "maxItems")
        if items is False and low > len(first):
            raise _impossible()
        return {
            "type": "array",
            "prefixItems": [self._value(each) for each in first],
            "items": items is not False and self._value(items),
            **_counts("Items", low, high),
        }

    def _string(self, schema: Mapping[str, Any]) -> Schema:
        if "pattern" in schema:
            return {"type": "string", "pattern": f"^({rewritten(schema['pattern'], self._spelled)})$"}
        if "format" in schema:
            name = schema["format"]
            expect(isinstance(name, str), "'format'", name, "a name")
            if name not in _FORMATS:
                raise StructureError(f"the format {name!r} cannot be enforced; known: {', '.join(sorted(_FORMATS))}")
            return {"type": "string", "format": _FORMATS[name]}
        return {"type": "string", **_counts("Length", *counts_of(schema, "minLength", "maxLength"))}

    def _number(self, schema: Mapping[str, Any]) -> Schema:
        return self._shared({"type": "number", **number_bounds(bounds_of(schema))})

    def _integer(self, schema: Mapping[str, Any]) -> Schema:
        return self._shared({"type": "integer", **whole_bounds(bounds_of(schema))})

    def _boolean(self, _: Mapping[str, Any]) -> Schema:
        return {"type": "boolean"}

    def _null(self, _: Mapping[str, Any]) -> Schema:
        return {"type": "null"}

    _alone: ClassVar[dict[str, Callable[[_Translation, Mapping[str, Any]], Schema]]] = {
        "$ref": _ref, "anyOf": _any, "allOf": _all, "enum": _enum, "const": _const,
    }  # fmt: skip
    _typed: ClassVar[dict[str, Callable[[_Translation, Mapping[str, Any]], Schema]]] = {
        "object": _object, "array": _array, "string": _string, "number": _number, "integer": _integer,
        "boolean": _boolean, "null": _null,
    }  # fmt: skip


def _any_of(schemas: list[Schema]) -> Schema:
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def _counts(what: str, low: int, high: int | None) -> dict[str, int]:
    return {f"min{what}": low, **({} if high is None else {f"max{what}": high})}


def _impossible() -> StructureError:
    return StructureError("the schema asks for numbers of members that its objects or arrays cannot have")


def _ends(schema: Schema, ending: Collection[str]) -> bool:
    """Whether a value can end if those of some definitions can."""
    if "$ref" in schema:
        return schema["$ref"] in ending
    if "anyOf" in schema:
        return any(_ends(each, ending) for each in schema["anyOf"])
    if schema.get("type") == "object":
        needed = [schema["properties"][name] for name in schema["required"]]
        if schema.get("minProperties", 0) > len(needed):
            needed.append(schema["additionalProperties"])
        return all(_ends(each, ending) for each in needed)
    if schema.get("type") == "array":
        low, first = schema["minItems"], schema["prefixItems"]
        return all(_ends(each, ending) for each in [*first[:low], *([schema["items"]] if low > len(first) else [])])
    return True


def _same_as(schema: Schema) -> Iterator[str]:
    """The definitions whose values are its own."""
    if "$ref" in schema:
        yield schema["$ref"]
    for each in schema.get("anyOf", ()):
        yield from _same_as(each)
