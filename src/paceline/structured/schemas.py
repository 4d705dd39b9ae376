"""Translation of JSON schemas and regular expressions into llguidance grammars that enforce them exactly.

llguidance (1.9) compiles JSON schemas itself, but it ignores unknown keywords, rounds some numbers, and crashes on
others, so it gets a new schema, made only of keywords that are known here. Everything that it would not enforce exactly
is refused by name. Properties come in the schema's order, and once. Strings have no numeric escapes, with which a
property's name could be spelled a second way.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from graphlib import CycleError, TopologicalSorter
from itertools import combinations
from math import comb
from typing import Any, ClassVar

from paceline.chat.pointers import resolved
from paceline.errors import StructureError
from paceline.structured.alternatives import Tags, are_apart, tags_of
from paceline.structured.endings import Schema, endless
from paceline.structured.formats import FORMATS, PATTERNS
from paceline.structured.keywords import (
    KeywordError,
    are_names,
    bounds_of,
    check_exact,
    check_together,
    constraints_of,
    counts_of,
    expect,
    is_of,
    number_bounds,
    whole_bounds,
)
from paceline.structured.lark import translated
from paceline.structured.limits import GrammarLimits
from paceline.structured.patterns import Ranges, alphabet, check_spelled, common, rewritten, union
from paceline.structured.weaker import replaced, without_cause

_MAX_CHOICES = 64  # combinations of optional properties that satisfy minProperties and maxProperties
_UNESCAPED: Ranges = ((0x20, 0x7E), (0x80, 0x10FFFF))  # written in JSON strings as they are, or as \" and \\
_LETTER_ESCAPED: Ranges = ((0x08, 0x0A), (0x0C, 0x0D))  # written as \b, \t, \n, \f, \r
_ANY_OBJECT = '{"type": "object"}'
_OPTIONS = {
    "whitespace_pattern": r"[ \n\r\t]{0,8}",  # without a limit small models would add spaces endlessly
    "json_allowed_escapes": 'bfnrt\\"',
}


def grammar_of(
    kind: str,
    text: str,
    unspelled: Iterable[int] = (),
    special: Mapping[str, int] | None = None,
    limits: GrammarLimits | None = None,
) -> str:
    """The llguidance grammar of a structure.

    kind: "regex", "schema", "choice" or "grammar", with the structure as ``text`` (choices as a JSON array), or
    "object" for any JSON object. unspelled: bytes without a token of their own. special: token ids of special tokens
    by name. Raises StructureError for a structure that is too long, or cannot be enforced exactly.
    """
    return grammars_of(kind, text, unspelled, [special or {}], limits)[0]


def grammars_of(
    kind: str,
    text: str,
    unspelled: Iterable[int],
    vocabularies: Sequence[Mapping[str, int]],
    limits: GrammarLimits | None = None,
) -> list[str]:
    """The llguidance grammars of a structure for several vocabularies of special tokens. See ``grammar_of``."""
    limits = GrammarLimits() if limits is None else limits
    if len(text) > limits.characters:
        raise StructureError(f"the {kind} has {len(text)} characters; up to {limits.characters} are supported")
    spelled = alphabet(unspelled)

    @cache
    def exact(schema: str) -> str:
        """JSON of the schema that llguidance follows exactly. Raises StructureError."""
        whole = _Translation(json.loads(schema), spelled, limits.schema_parts).whole()
        return json.dumps({**whole, "x-guidance": _OPTIONS})

    try:
        rules = [_rules(kind, text, spelled, special, exact) for special in vocabularies]
    except RecursionError as error:
        raise StructureError(f"the {kind} is nested too deeply to be followed") from error
    # forced tokens would allow only one spelling
    return [f'%llguidance {{"no_forcing": true}}\n{each}\n' for each in rules]


def _rules(kind: str, text: str, spelled: Ranges, special: Mapping[str, int], exact: Callable[[str], str]) -> str:
    """Rules of a structure. exact: translates the text of a schema."""
    if kind == "regex":
        return f"start: /{rewritten(text, spelled)}/"
    if kind == "choice":
        choices = json.loads(text)
        for choice in choices:
            check_spelled(choice, spelled)
        return f"start: {' | '.join(map(json.dumps, choices))}"
    if kind == "grammar":
        return translated(text, lambda schema: exact(json.dumps(schema)), special)
    return f"start: %json {exact(_ANY_OBJECT if kind == 'object' else text)}"


def weakened(schema: Any, unspelled: Iterable[int], limits: GrammarLimits) -> tuple[Any, list[str]]:
    """The schema without what cannot be enforced, and the reasons why that cannot be.

    What follows the schema follows the weaker one, too, if it has the types that the keywords are for. Raises
    StructureError for a schema that is too large, or has no value that ends.
    """
    weaker: dict[int, Mapping[str, Any]] = {}
    reasons = list[str]()
    _Translation(schema, alphabet(unspelled), limits.schema_parts, weaker, reasons).whole()
    return replaced(schema, weaker), reasons


class _TooManyPartsError(StructureError):
    """The schema is too large: no part of it is to blame."""


class _Translation:
    """Translates one schema into one that llguidance enforces exactly.

    parts: see ``GrammarLimits.schema_parts``. weaker: None, or where schemas are noted, by the identity of those that
    cannot be enforced, which can be and are enforced in their place; reasons: why.
    """

    def __init__(
        self,
        schema: Any,
        spelled: Ranges,
        parts: int,
        weaker: dict[int, Mapping[str, Any]] | None = None,
        reasons: list[str] | None = None,
    ) -> None:
        self._root, self._parts = schema, parts
        self._weaker, self._reasons = weaker, [] if reasons is None else reasons
        self._spelled = common(spelled, union(_UNESCAPED, _LETTER_ESCAPED))
        self._steps = 0  # schemas that were translated, and references and tags that were looked at
        self._definitions: dict[str, Schema] = {}  # new definitions, by their '$ref'
        self._references: dict[int, str] = {}  # new '$ref', by the identity of the schema that an old one leads to
        self._shares: dict[str, str] = {}  # new '$ref', by the JSON of a shared schema
        self._ends: dict[str, Any] = {}  # the schema behind each old '$ref' whose chain was followed
        self._tags: dict[int, Tags] = {}  # by the identity of their schema

    def whole(self) -> Schema:
        """The new schema. Raises StructureError."""
        root = self._reference("#")
        if endless(self._definitions):
            raise StructureError("the schema refers to itself so that no value of it ever ends")
        self._check_begins()
        definitions = {name.rsplit("/", 1)[1]: schema for name, schema in self._definitions.items()}
        return {"$ref": root, "$defs": definitions}

    # --- references ---

    def _step(self, steps: int = 1) -> None:
        """Count work. Raises StructureError once it is too much."""
        self._steps += steps
        if self._steps > self._parts:
            raise _TooManyPartsError(f"the schema has more than the {self._parts} parts that are supported")

    def _reference(self, target: str) -> str:
        """The new '$ref' to a schema, which is translated once, however often and in whatever spelling it is named."""
        schema = resolved(self._root, target)
        if id(schema) not in self._references:
            name = self._references[id(schema)] = self._define({})  # reserved first: the schema may be recursive
            self._definitions[name] = self._value(schema, at_root=schema is self._root)
        return self._references[id(schema)]

    def _define(self, schema: Schema) -> str:
        """Add a definition, and return its '$ref'."""
        name = f"#/$defs/{len(self._definitions)}"
        self._definitions[name] = schema
        return name

    def _shared(self, schema: Schema) -> Schema:
        """A '$ref' to one definition for all equal schemas. llguidance takes half a millisecond for each bound."""
        text = json.dumps(schema)
        if text not in self._shares:
            self._shares[text] = self._define(schema)
        return {"$ref": self._shares[text]}

    def _check_begins(self) -> None:
        """Raise StructureError for references in a circle without a type in between."""
        try:
            TopologicalSorter({name: set(_same_as(schema)) for name, schema in self._definitions.items()}).prepare()
        except CycleError as error:
            raise StructureError("the schema refers to itself directly ('$ref' in a circle)") from error

    # --- schemas ---

    def _value(self, schema: Any, at_root: bool = False) -> Schema:
        """The translation of a schema."""
        self._step()
        if schema is True:
            schema = {}
        expect(isinstance(schema, dict), "a schema", schema, "an object or true")
        while True:
            try:
                return self._enforced(schema if self._weaker is None else self._weaker.get(id(schema), schema), at_root)
            except _TooManyPartsError:
                raise
            except StructureError as error:
                if self._weaker is None:
                    raise
                self._weaker[id(schema)] = without_cause(self._weaker.get(id(schema), schema), error)
                self._reasons.append(str(error))

    def _enforced(self, schema: Mapping[str, Any], at_root: bool) -> Schema:
        names = constraints_of(schema)
        check_together(names, schema.get("type"))
        if "$id" in schema and not at_root:
            message = "the schema has '$id' inside, which changes what '$ref' means; leave it out"
            raise KeywordError(message, {"$id": None})
        self._check_definitions(schema, at_root)
        for keyword, method in self._alone.items():
            if keyword in names:
                return method(self, schema)
        if "type" not in schema:
            return {}
        types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        return _any_of([self._typed[name](self, schema) for name in types])

    def _check_definitions(self, schema: Mapping[str, Any], at_root: bool) -> None:
        """Translate all definitions, including those that nothing refers to, to find unsupported keywords in them."""
        for name in ("$defs", "definitions"):
            definitions = schema.get(name, {})
            expect(isinstance(definitions, dict), repr(name), definitions, "an object of schemas")
            for key, definition in definitions.items():
                if at_root:
                    self._reference(f"#/{name}/" + key.replace("~", "~0").replace("/", "~1").replace("%", "%25"))
                else:
                    self._value(definition)

    # --- keywords without a type ---

    def _ref(self, schema: Mapping[str, Any]) -> Schema:
        target = schema["$ref"]
        expect(isinstance(target, str), "'$ref'", target, "a text")
        return {"$ref": self._reference(target)}

    def _any(self, schema: Mapping[str, Any]) -> Schema:
        schemas = schema["anyOf"]
        expect(isinstance(schemas, list) and len(schemas) > 0, "'anyOf'", schemas, "schemas")
        return _any_of([self._value(subschema) for subschema in schemas])

    def _one(self, schema: Mapping[str, Any]) -> Schema:
        """Schemas of which no two allow the same value, so that 'oneOf' says the same as 'anyOf'."""
        schemas = schema["oneOf"]
        expect(isinstance(schemas, list) and len(schemas) > 0, "'oneOf'", schemas, "schemas")
        if not are_apart([self._followed(subschema) for subschema in schemas], self._tags_of):
            message = "the schema has 'oneOf' with schemas that may allow the same value; write 'anyOf'"
            raise KeywordError(message, {"oneOf": None, "anyOf": schemas})
        return _any_of([self._value(subschema) for subschema in schemas])

    def _followed(self, schema: Any) -> Any:
        """The schema that a '$ref' leads to. Each is followed once."""
        passed: set[str] = set()
        while isinstance(schema, dict) and isinstance(target := schema.get("$ref"), str):
            if target in passed:
                raise StructureError("the schema refers to itself directly ('$ref' in a circle)")
            if target in self._ends:
                schema = self._ends[target]
                break
            self._step()
            passed.add(target)
            schema = resolved(self._root, target)
        self._ends.update(dict.fromkeys(passed, schema))
        return schema

    def _tags_of(self, schema: Any) -> Tags:
        if id(schema) not in self._tags:
            self._tags[id(schema)] = tags_of(schema, self._followed)
        self._step(len(self._tags[id(schema)]))
        return self._tags[id(schema)]

    def _all(self, schema: Mapping[str, Any]) -> Schema:
        schemas = schema["allOf"]
        expect(isinstance(schemas, list) and len(schemas) > 0, "'allOf'", schemas, "schemas")
        if len(schemas) != 1:
            raise StructureError("the schema has 'allOf' with several schemas; merge them into one")
        return self._value(schemas[0])

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
            for item in [*value, *value.values()] if isinstance(value, dict) else value:
                self._check_literal(item)

    # --- types ---

    def _object(self, schema: Mapping[str, Any]) -> Schema:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        expect(isinstance(properties, dict), "'properties'", properties, "an object of schemas")
        expect(are_names(required), "'required'", required, "names")
        if missing := set(required) - properties.keys():
            message = f"the schema requires {min(missing)!r}, which is none of its 'properties'"
            raise KeywordError(message, {"properties": {**properties, **dict.fromkeys(missing, True)}})
        for name in properties:
            check_spelled(name, self._spelled)
        additional = schema.get("additionalProperties", "properties" not in schema and not required)
        translated = {
            "type": "object",
            "properties": {name: self._value(value) for name, value in properties.items()},
            "required": list(dict.fromkeys(required)),
            "additionalProperties": additional is not False and self._value(additional),
        }
        return self._of_size(translated, *counts_of(schema, "minProperties", "maxProperties"))

    def _of_size(self, translated: Schema, low: int, high: int | None) -> Schema:
        """An object with ``low`` to ``high`` properties. Raises StructureError if that cannot be enforced."""
        names, required = translated["properties"], translated["required"]
        closed = translated["additionalProperties"] is False
        if not closed and low > len(required) + 1:
            message = (
                f"the schema has 'minProperties' {low} beside additional properties, whose names may come twice; "
                "name the properties"
            )
            raise KeywordError(message, {"minProperties": None})
        maximum = len(names) if high is None and closed else high
        if (closed and low > len(names)) or (maximum is not None and maximum < max(low, len(required))):
            raise _impossible("Properties")
        if low <= len(required) and (high is None or (closed and high >= len(names))):
            return translated
        if len(names) == len(required):  # only the number of additional properties varies
            return {**translated, **_counts("Properties", low, high)}
        return self._choices(translated, low, maximum)

    def _choices(self, translated: Schema, low: int, maximum: int | None) -> Schema:
        """An object with optional properties, as alternatives that each require all of their properties."""
        names, required = translated["properties"], translated["required"]
        optional = [name for name in names if name not in required]
        counts = range(max(0, low - len(required)), min(len(optional), (maximum or 0) - len(required)) + 1)
        choices = sum(comb(len(optional), count) for count in counts)
        if translated["additionalProperties"] is not False or choices > _MAX_CHOICES:
            message = (
                "the schema has 'minProperties' or 'maxProperties' beside optional 'properties', of which there are "
                f"more than {_MAX_CHOICES} choices; require them, or leave it out"
            )
            raise KeywordError(message, {"minProperties": None, "maxProperties": None})
        values = {name: {"$ref": self._define(value)} for name, value in names.items()}
        chosen = [{*required, *extra} for count in counts for extra in combinations(optional, count)]
        alternatives = [{name: value for name, value in values.items() if name in subset} for subset in chosen]
        return _any_of([{**translated, "properties": each, "required": list(each)} for each in alternatives])

    def _array(self, schema: Mapping[str, Any]) -> Schema:
        first = schema.get("prefixItems", [])
        expect(isinstance(first, list), "'prefixItems'", first, "schemas")
        items = schema.get("items", not first)
        low, high = counts_of(schema, "minItems", "maxItems")
        if items is False and low > len(first):
            raise _impossible("Items")
        return {
            "type": "array",
            "prefixItems": [self._value(item) for item in first],
            "items": items is not False and self._value(items),
            **_counts("Items", low, high),
        }

    def _string(self, schema: Mapping[str, Any]) -> Schema:
        text: Schema = {"type": "string"}
        if "pattern" in schema:
            text = self._matching(self._searched(schema["pattern"]))
        elif schema.get("format") in PATTERNS:
            text = self._matching(rewritten(PATTERNS[schema["format"]], self._spelled))
        elif schema.get("format") in FORMATS:
            text = {"type": "string", "format": FORMATS[schema["format"]]}
        return {**text, **_counts("Length", *counts_of(schema, "minLength", "maxLength"))}

    def _matching(self, pattern: str) -> Schema:
        return {"type": "string", "pattern": f"^({pattern})$"}

    def _searched(self, pattern: object) -> str:
        try:
            return rewritten(pattern, self._spelled, searched=True)
        except StructureError as error:
            raise KeywordError(str(error), {"pattern": None}) from error

    def _number(self, schema: Mapping[str, Any]) -> Schema:
        return self._shared({"type": "number", **number_bounds(bounds_of(schema))})

    def _integer(self, schema: Mapping[str, Any]) -> Schema:
        return self._shared({"type": "integer", **whole_bounds(bounds_of(schema))})

    def _boolean(self, _: Mapping[str, Any]) -> Schema:
        return {"type": "boolean"}

    def _null(self, _: Mapping[str, Any]) -> Schema:
        return {"type": "null"}

    _alone: ClassVar[dict[str, Callable[[_Translation, Mapping[str, Any]], Schema]]] = {
        "$ref": _ref, "anyOf": _any, "oneOf": _one, "allOf": _all, "enum": _enum, "const": _const,
    }  # fmt: skip
    _typed: ClassVar[dict[str, Callable[[_Translation, Mapping[str, Any]], Schema]]] = {
        "object": _object, "array": _array, "string": _string, "number": _number, "integer": _integer,
        "boolean": _boolean, "null": _null,
    }  # fmt: skip


def _any_of(schemas: list[Schema]) -> Schema:
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def _counts(noun: str, low: int, high: int | None) -> dict[str, int]:
    return {f"min{noun}": low, **({} if high is None else {f"max{noun}": high})}


def _impossible(noun: str) -> KeywordError:
    message = "the schema asks for numbers of members that its objects or arrays cannot have"
    return KeywordError(message, {f"min{noun}": None, f"max{noun}": None})


def _same_as(schema: Schema) -> Iterator[str]:
    """The definitions that a schema refers to directly, outside of any object or array."""
    if "$ref" in schema:
        yield schema["$ref"]
    for subschema in schema.get("anyOf", ()):
        yield from _same_as(subschema)
