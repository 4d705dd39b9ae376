"""JSON schemas as grammars that enforce all that they say, in the notation of xgrammar.

What could not be followed to the letter is refused by name: an answer that may break its schema keeps no promise. All
values are written so that no text of the grammar can break the schema: properties in their order and once, additional
names without escapes and none of those named, strings of whole characters that the model can spell.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar
from urllib.parse import unquote

from paceline.errors import StructureError
from paceline.structured.keywords import (
    OF_TYPE,
    SAID,
    are_names,
    bounds_of,
    check_names,
    counts_of,
    expect,
    is_of,
    whole_bounds,
)
from paceline.structured.patterns import (
    Ranges,
    alphabet,
    any_but,
    check_spelled,
    class_of,
    common,
    one_of,
    rewritten,
)

_FORMATS = {"date", "time", "date-time", "duration", "hostname", "ipv4", "ipv6", "uuid", "uri", "uri-reference"}
_MOST_RULES = 20_000

_RAW = ((0x20, 0x21), (0x23, 0x5B), (0x5D, 0x10FFFF))  # characters of a JSON string that stand for themselves
_ESCAPES = {'"': '"', "\\": "\\", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}
_ESCAPED = r'\\["\\/bfnrt]'
_BY_NUMBER = r"\\u([0-9A-CE-Fa-ce-f][0-9A-Fa-f][0-9A-Fa-f][0-9A-Fa-f]|[Dd][0-7][0-9A-Fa-f][0-9A-Fa-f])"  # no halves
_INTEGER = r"\-?(0|[1-9][0-9]{0,17})"
_NUMBER = _INTEGER + r"(\.[0-9]{1,17})?([eE][+\-]?[0-9]{1,2})?"
_SPACE = "w ::= [ \\n\\r\\t]\nws ::= w{0,8}\n"  # small models would add spaces for ever
_BORROWED = re.compile(r"\broot(?:_\w+)?\b")


def grammar_of(kind: str, text: str, unspelled: Iterable[int] = ()) -> str:
    """The grammar of a "regex", a "schema" or any "object". Raises StructureError for what would not be followed.

    unspelled: bytes for which the model has no token of their own.
    """
    spelled = alphabet(unspelled)
    if kind == "regex":
        return f"root ::= {_regex(rewritten(text, lambda ranges: one_of(ranges, spelled)))}\n"
    return _Schemas({"type": "object"} if kind == "object" else json.loads(text), spelled).grammar()


def _regex(text: str) -> str:
    return f"Regex({json.dumps(text, ensure_ascii=False)})" if text else '""'


def _quoted(text: str) -> str:
    """As the notation writes a text."""
    return json.dumps(text, ensure_ascii=False)


@dataclass
class _Rule:
    """needs: for each of its alternatives, the rules in it. first: those that may come first of all."""

    text: str
    needs: list[set[str]]
    first: set[str] = field(default_factory=set)


class _Schemas:
    """One schema on its way to a grammar. What is said twice becomes one rule."""

    def __init__(self, schema: Any, spelled: Ranges) -> None:
        self._root, self._spelled = schema, spelled
        self._raw = common(_RAW, spelled)
        self._rules: dict[str, _Rule] = {}
        self._names: dict[str, str] = {}  # of rules by their text
        self._references: dict[str, str] = {}  # names of rules by what refers to them
        self._borrowed: dict[str, str] = {}

    def grammar(self) -> str:
        """The whole of it. Raises StructureError."""
        root = self._reference("#")
        self._check_ends(root)
        lines = [f"{name} ::= {rule.text}" for name, rule in self._rules.items()]
        return f"root ::= {root}\n{_SPACE}" + "\n".join([*self._borrowed.values(), *lines]) + "\n"

    # --- rules ---

    def _rule(self, text: str, needs: Iterable[Iterable[str]] = ((),), first: Iterable[str] = ()) -> str:
        """The name of a rule of this text."""
        if text not in self._names:
            self._names[text] = self._add(f"r{len(self._rules)}", _Rule(text, [set(n) for n in needs], set(first)))
        return self._names[text]

    def _add(self, name: str, rule: _Rule) -> str:
        if len(self._rules) >= _MOST_RULES:
            raise StructureError(f"the schema needs more than {_MOST_RULES} rules, the most that are followed")
        self._rules[name] = rule
        return name

    def _choice(self, names: Sequence[str]) -> str:
        if len(set(names)) == 1:
            return names[0]
        return self._rule(" | ".join(dict.fromkeys(names)), [{name} for name in names], names)

    def _check_ends(self, root: str) -> None:
        """Raise StructureError if a value would never end, or refers to itself before it begins."""
        ending: set[str] = set()
        while True:
            more = {n for n, rule in self._rules.items() if any(need <= ending for need in rule.needs)} - ending
            if not more:
                break
            ending |= more
        if set(self._rules) - ending:
            raise StructureError("the schema refers to itself so that no value of it ever ends")
        self._check_begins()

    def _check_begins(self) -> None:
        """No circle of rules that may come first in each other."""
        waiting = {name: set(rule.first) for name, rule in self._rules.items()}
        while done := [name for name, first in waiting.items() if not first & waiting.keys()]:
            for name in done:
                del waiting[name]
        if waiting:
            raise StructureError("the schema refers to itself before anything is said ('$ref' in a circle)")

    # --- schemas ---

    def _reference(self, target: str) -> str:
        if target not in self._references:
            name = self._references[target] = f"d{len(self._references)}"
            schema = self._resolve(target)
            self._add(name, _Rule("", []))  # in its place, however deep what follows goes
            found = self._value(schema, at_root=target == "#")
            self._rules[name] = _Rule(found, [{found}], {found})
        return self._references[target]

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

    def _value(self, schema: Any, at_root: bool = False) -> str:
        """The name of the rule for a value of a schema."""
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
        types = schema.get("type", list(OF_TYPE) if not said else None)
        names = types if isinstance(types, list) else [types]
        if "type" not in schema:
            return self._anything()
        return self._choice([self._typed[name](self, schema) for name in names])

    def _check_definitions(self, schema: Mapping[str, Any]) -> None:
        """Also of what nothing refers to."""
        for name in ("$defs", "definitions"):
            defined = schema.get(name, {})
            expect(isinstance(defined, dict), repr(name), defined, "an object of schemas")
            if schema is self._root:
                for key in defined:
                    self._reference(f"#/{name}/" + key.replace("~", "~0").replace("/", "~1").replace("%", "%25"))
            else:
                for each in defined.values():
                    self._value(each)

    def _anything(self) -> str:
        name = "any"
        if name not in self._rules:
            self._add(name, _Rule("", []))
            plain = [typed(self, {}) for kind, typed in self._typed.items() if kind not in ("object", "array")]
            pair = self._rule(f'{self._string({})} ws ":" ws {name}', [{name}])
            values = [
                self._rule(self._list("{", pair, "}", 0, None), [()]),
                self._rule(self._list("[", name, "]", 0, None), [()]),
                *plain,
            ]
            self._rules[name] = _Rule(" | ".join(values), [{value} for value in values], set(values))
        return name

    def _list(self, opening: str, item: str, closing: str, low: int, high: int | None) -> str:
        """``low`` to ``high`` items; None: any number."""
        return f"{_quoted(opening)} ws {self._items(item, low, high, begun=False)} {_quoted(closing)}"

    def _items(self, item: str, low: int, high: int | None, begun: bool) -> str:
        """So many more items, with spaces after the last; begun: there was one before."""
        if high == 0:
            return "ws" if begun else '""'
        more = self._rule(f'ws "," ws {item}', [{item}])
        if begun:
            return f"{_repeated(more, low, high)} ws"
        rest = _repeated(more, max(0, low - 1), None if high is None else high - 1)
        some = f"({item} {rest} ws)"
        return some if low else f'({some} | "")'

    # --- what stands alone ---

    def _ref(self, schema: Mapping[str, Any]) -> str:
        target = schema["$ref"]
        expect(isinstance(target, str), "'$ref'", target, "a text")
        return self._reference(target)

    def _any_of(self, schema: Mapping[str, Any]) -> str:
        given = schema["anyOf"]
        expect(isinstance(given, list) and len(given) > 0, "'anyOf'", given, "schemas")
        return self._choice([self._value(each) for each in given])

    def _all_of(self, schema: Mapping[str, Any]) -> str:
        given = schema["allOf"]
        expect(isinstance(given, list) and len(given) > 0, "'allOf'", given, "schemas")
        if len(given) != 1:
            raise StructureError("the schema says 'allOf' with several schemas; put them into one")
        return self._value(given[0])

    def _enum(self, schema: Mapping[str, Any]) -> str:
        values = schema["enum"]
        expect(isinstance(values, list) and len(values) > 0, "'enum'", values, "values")
        if "type" in schema and (wrong := [value for value in values if not is_of(value, schema["type"])]):
            raise StructureError(f"the schema allows {wrong[0]!r}, which is not of its 'type'")
        return self._rule(_regex("|".join(dict.fromkeys(self._spelling(value) for value in values))))

    def _const(self, schema: Mapping[str, Any]) -> str:
        return self._enum({**schema, "enum": [schema["const"]]})

    def _spelling(self, value: Any) -> str:
        """A value as a regular expression that matches nothing else."""
        try:
            text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        except ValueError as error:
            raise StructureError(f"the schema allows {value!r}, which JSON has not") from error
        check_spelled(text, self._spelled)
        return "".join(one_of(((ord(letter), ord(letter)),), self._spelled) for letter in text)

    # --- types ---

    def _object(self, schema: Mapping[str, Any]) -> str:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        expect(isinstance(properties, dict), "'properties'", properties, "an object of schemas")
        expect(are_names(required), "'required'", required, "names")
        if missing := set(required) - properties.keys():
            raise StructureError(f"the schema requires {min(missing)!r}, which is none of its 'properties'")
        more = schema.get("additionalProperties", "properties" not in schema and not required)
        low, high = counts_of(schema, "minProperties", "maxProperties")
        entries = [self._entry(name, each) for name, each in properties.items()]
        other = None if more is False else self._other_entry(list(properties), more)
        if other is not None and low > len(required) + 1:
            raise StructureError(
                f"the schema says 'minProperties' {low} beside additional properties, whose names may come twice; "
                "name the properties"
            )
        places = [(entry, name in required) for entry, name in zip(entries, properties, strict=True)]
        return self._rule(*_Members(self._rule, places, other, low, high).all("{", "}"))

    def _entry(self, name: str, schema: Any) -> str:
        value = self._value(schema)
        return self._rule(f'{_regex(self._spelling(name))} ws ":" ws {value}', [{value}])

    def _other_entry(self, names: Sequence[str], schema: Any) -> str:
        value = self._value(schema)
        key = self._rule(_regex(f'"({any_but(names, self._raw)})"'))
        return self._rule(f'{key} ws ":" ws {value}', [{value}])

    def _array(self, schema: Mapping[str, Any]) -> str:
        first = schema.get("prefixItems", [])
        expect(isinstance(first, list), "'prefixItems'", first, "schemas")
        items = schema.get("items", not first)
        low, high = counts_of(schema, "minItems", "maxItems")
        places = [(self._value(each), False) for each in first]
        other = None if items is False else self._value(items)
        return self._rule(*_Members(self._rule, places, other, low, high, in_order=True).all("[", "]"))

    def _string(self, schema: Mapping[str, Any]) -> str:
        if "pattern" in schema:
            return self._rule(_regex(f'"({rewritten(schema["pattern"], self._in_json)})"'))
        if "format" in schema:
            return self._format(schema["format"])
        low, high = counts_of(schema, "minLength", "maxLength")
        raw = class_of(self._raw)
        if (low, high) == (0, None):
            return self._rule(_regex(f'"({raw}|{_ESCAPED}|{_BY_NUMBER})*"'))
        return self._rule(_regex(f'"({raw}|{_ESCAPED}){{{low},{"" if high is None else high}}}"'))

    def _format(self, name: object) -> str:
        expect(isinstance(name, str), "'format'", name, "a name")
        if name not in _FORMATS:
            raise StructureError(f"the format {name!r} cannot be enforced; known: {', '.join(sorted(_FORMATS))}")
        return self._borrow({"type": "string", "format": name})

    def _in_json(self, ranges: Ranges) -> str:
        """One character of a set as JSON strings spell it."""
        escaped = "".join(sign for letter, sign in _ESCAPES.items() if _has(ranges, ord(letter)))
        raw = common(ranges, self._raw)
        ways = [class_of(raw)] if raw else []
        if escaped:
            ways.append("\\\\" + class_of(tuple((ord(sign), ord(sign)) for sign in sorted(escaped))))
        if not ways:
            ways = [f"\\\\u00{code:02x}" for code in range(0x20) if _has(ranges, code)]
        if not ways:
            one_of(ranges, self._raw)  # says which
        return ways[0] if len(ways) == 1 else f"({'|'.join(ways)})"

    def _number(self, schema: Mapping[str, Any]) -> str:
        bounds = bounds_of(schema)
        return self._borrow({"type": "number", **bounds}) if bounds else self._rule(_regex(_NUMBER))

    def _integer(self, schema: Mapping[str, Any]) -> str:
        bounds = whole_bounds(bounds_of(schema))
        return self._borrow({"type": "integer", **bounds}) if bounds else self._rule(_regex(_INTEGER))

    def _boolean(self, _: Mapping[str, Any]) -> str:
        return self._rule('"true" | "false"')

    def _null(self, _: Mapping[str, Any]) -> str:
        return self._rule('"null"')

    def _borrow(self, schema: dict[str, Any]) -> str:
        """xgrammar's own rules for a format, or for numbers between bounds."""
        import xgrammar

        key = json.dumps(schema, sort_keys=True)
        name = f"x{len(self._borrowed)}"
        if key not in self._borrowed:
            lines = str(xgrammar.Grammar.from_json_schema(key)).splitlines()
            text = "\n".join(line for line in lines if line.startswith("root"))
            self._borrowed[key] = _BORROWED.sub(lambda found: f"{name}_{found[0]}", text)
        found = self._borrowed[key].split("_", 1)[0]
        return self._rule(f"{found}_root")

    _alone: ClassVar[dict[str, Callable[[_Schemas, Mapping[str, Any]], str]]] = {
        "$ref": _ref, "anyOf": _any_of, "allOf": _all_of, "enum": _enum, "const": _const,
    }  # fmt: skip
    _typed: ClassVar[dict[str, Callable[[_Schemas, Mapping[str, Any]], str]]] = {
        "object": _object, "array": _array, "string": _string, "number": _number, "integer": _integer,
        "boolean": _boolean, "null": _null,
    }  # fmt: skip


MakeRule = Callable[[str, Iterable[Iterable[str]], Iterable[str]], str]


class _Members:
    """The members of an object or an array: some in their order, then any number of others, so many in all.

    places: each one's rule, and whether it must come. other: the rule of the others; None: there are none.
    in_order: a member comes only after all those before it (arrays).
    """

    def __init__(
        self,
        rule: MakeRule,
        places: Sequence[tuple[str, bool]],
        other: str | None,
        low: int,
        high: int | None,
        in_order: bool = False,
    ) -> None:
        self._rule, self._places, self._other = rule, places, other
        self._low, self._high, self._in_order = low, high, in_order
        self._counted = max(1, low) if high is None else high  # members beyond so many need not be told apart

    def all(self, opening: str, closing: str) -> tuple[str, list[set[str]], tuple[()]]:
        """A rule's text and what it needs. Raises StructureError if there is no such object or array."""
        ways = self._ways()
        if ways is None:
            raise StructureError("the schema asks for numbers of members that its objects or arrays cannot have")
        return f"{_quoted(opening)} ws {ways} ws {_quoted(closing)}", [{ways}], ()

    def _ways(self) -> str | None:
        """The rule for all members, made from the last place to the first."""
        after = [self._others(count) for count in range(self._counted + 1)]
        for entry, needed in reversed(self._places):
            after = [self._place(entry, needed, count, after) for count in range(self._counted + 1)]
        return after[0]

    def _others(self, count: int) -> str | None:
        """What may follow ``count`` members and the last place."""
        low = max(0, self._low - count)
        high = None if self._high is None else self._high - count
        nothing = self._rule('""', [()], ())
        if self._other is None or high == 0:
            return nothing if low == 0 else None
        entry = self._other
        more = self._rule(f'ws "," ws {entry}', [{entry}], ())
        if count > 0:
            return self._rule(_repeated(more, low, high), [{more}] if low else [()], ())
        rest = _repeated(more, max(0, low - 1), None if high is None else high - 1)
        some = f"{entry} {rest}"
        if low:
            return self._rule(some, [{entry, more} if low > 1 else {entry}], ())
        return self._rule(f'{some} | ""', [()], ())

    def _place(self, entry: str, needed: bool, count: int, after: Sequence[str | None]) -> str | None:
        """What may follow ``count`` members, from a place on."""
        ways: list[tuple[str, set[str]]] = []
        following = after[min(count + 1, self._counted)]
        if following is not None and (self._high is None or count < self._high):
            comma = 'ws "," ws ' if count else ""
            ways.append((f"{comma}{entry} {following}", {entry, following}))
        left_out = self._end(count) if self._in_order else after[count]
        if not needed and left_out is not None:
            ways.append((left_out, {left_out}))
        if not ways:
            return None
        return self._rule(" | ".join(text for text, _ in ways), [needs for _, needs in ways], ())

    def _end(self, count: int) -> str | None:
        return self._rule('""', [()], ()) if count >= self._low else None


def _repeated(name: str, low: int, high: int | None) -> str:
    if high == 0:
        return '""'
    return f"{name}*" if (low, high) == (0, None) else f"{name}{{{low},{'' if high is None else high}}}"


def _has(ranges: Ranges, code: int) -> bool:
    return any(first <= code <= last for first, last in ranges)
