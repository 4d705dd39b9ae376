"""Schemas are enforced exactly. Keywords that cannot be are refused by name, wherever in the schema they are."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from paceline.errors import StructureError
from paceline.structured.limits import GrammarLimits
from paceline.structured.schemas import grammar_of, weakened

pytest.importorskip("llguidance", reason="structured outputs need the extra 'structured'")

WRONG = "wrong form"


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"$ref": "https://example.org/schema.json"}, "only its own parts"),
        ({"$ref": "other.json#/a"}, "only its own parts"),
        ({"$ref": "#/$defs/missing"}, "does not have"),
        ({"anyOf": [{"$ref": "#/anyOf/" + "9" * 5000}]}, "does not have"),
        ({"$ref": "#"}, "ends"),
        ({"anyOf": [{"$ref": "#"}, {"type": "null"}]}, "in a circle"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, "ends"),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "ends"),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "ends"),
        ({"type": "array", "minItems": -1}, WRONG),
        ({"type": "array", "maxItems": 1.5}, WRONG),
        ({"type": "string", "minLength": True}, WRONG),
        ({"type": "string", "maxLength": "3"}, WRONG),
        ({"type": "array", "minItems": 3, "maxItems": 2}, "nothing"),
        ({"type": "array", "prefixItems": [{"type": "null"}], "minItems": 2}, "cannot have"),
        ({"type": "array", "items": [{"type": "null"}]}, WRONG),
        ({"type": "array", "prefixItems": {"type": "null"}}, WRONG),
        ({"type": "array", "items": False, "minItems": 1}, "cannot have"),
        ({"type": "object", "properties": [1]}, WRONG),
        ({"type": "object", "properties": {"a": 1}}, WRONG),
        ({"type": "object", "properties": {"a": False}}, WRONG),
        ({"type": "object", "properties": {"a": {}}, "required": "a"}, WRONG),
        ({"type": "object", "properties": {"a": {}}, "required": [1]}, WRONG),
        ({"type": "object", "additionalProperties": 1}, WRONG),
        ({"type": "object", "additionalProperties": True, "minProperties": 2}, "may come twice"),
        ({"type": "object", "properties": {"a": {}}, "minProperties": 2}, "cannot have"),
        ({"type": "integer", "minimum": "1"}, WRONG),
        ({"type": "number", "minimum": 1e300}, WRONG),
        ({"type": "number", "minimum": 1e-9}, WRONG),
        ({"type": "number", "minimum": float("nan")}, WRONG),
        ({"type": "integer", "maximum": -(10**400)}, WRONG),
        ({"type": "integer", "minimum": 1, "exclusiveMinimum": 1}, "beside"),
        ({"type": "integer", "exclusiveMinimum": 1, "exclusiveMaximum": 2}, "no whole number"),
        ({"type": "integer", "exclusiveMinimum": True}, WRONG),
        ({"type": []}, WRONG),
        ({"type": 3}, WRONG),
        ({"type": ["string", {}]}, WRONG),
        ({"type": ["string"] * 2}, WRONG),
        ({"enum": []}, WRONG),
        ({"enum": "ab"}, WRONG),
        ({"enum": ["\ud800"]}, "U\\+D800"),
        ({"const": float("nan")}, "which JSON cannot express"),
        ({"anyOf": []}, WRONG),
        ({"anyOf": {"type": "null"}}, WRONG),
        ({"allOf": []}, WRONG),
        ({"$ref": 3}, WRONG),
        ({"$defs": [1]}, WRONG),
        ({"$defs": {"a": {"type": "array", "items": {"not": {}}}}}, "'not'"),
        ({"properties": {"a": {"$id": "x"}}, "type": "object"}, "'\\$id' inside"),
        ({"type": "string", "pattern": "a^b"}, "an anchor inside"),
        ({"type": "string", "format": ["date"]}, WRONG),
        ({"items": {"type": "null"}}, "'type'"),
        ({"type": "integer", "minLength": 1}, "says nothing of values of its 'type'"),
        ({"const": -(2**63) + 1}, "last digit"),
        ({"enum": [2**53 + 1]}, "last digit"),
        ({"const": 10**400}, "last digit"),
        ({"const": 4.2559895300493646e-13}, "last digit"),
        ({"const": {"a": [8657960497247100.0]}}, "last digit"),
        ({"const": "\x01"}, "U\\+0001"),
        ({"type": "object", "properties": {"\x7f": {}}}, "U\\+007F"),
        ({"type": "string", "pattern": "\\x01"}, "U\\+0001"),
        (
            {"type": "object", "properties": {name: {} for name in "abcdefgh"}, "minProperties": 2},
            "more than 64 choices",
        ),
        ({"type": "object", "properties": {"a": {}}, "additionalProperties": {}, "maxProperties": 1}, "choices"),
    ],
)
def test_unsupported_schemas_are_refused_at_any_depth(schema: Any, message: str) -> None:
    for whole in (
        schema,
        {"type": "array", "items": schema},
        {"type": "object", "properties": {"p": {"anyOf": [schema]}}},
    ):
        if whole is not schema and "$ref" in json.dumps(schema):
            continue  # the reference is relative to the root
        with pytest.raises(StructureError, match=message):
            grammar_of("schema", json.dumps(whole))


@pytest.mark.parametrize(
    "structure",
    [
        ("regex", "a\x04"),
        ("choice", json.dumps(["ok", "a\x04"])),
        ("regex", "[\U00050000-\U00050010]"),
        ("schema", json.dumps({"enum": ["ok", "\U00050000"]})),
        ("schema", json.dumps({"type": "object", "properties": {"\U00050000": {}}})),
        ("schema", json.dumps({"type": "string", "pattern": "\U00050000"})),
    ],
)
def test_characters_without_tokens_are_named(structure: tuple[str, str]) -> None:
    with pytest.raises(StructureError, match=r"no tokens to spell U\+(0004|50000)"):
        grammar_of(*structure, unspelled=[0x04, 0xF1])
    grammar_of(*structure)


def test_size_and_depth_of_a_schema_are_limited() -> None:
    wide = {"type": "object", "properties": {f"p{number}": {} for number in range(2001)}}
    deep = json.loads('{"anyOf":[' * 400 + "{}" + "]}" * 400)
    chain = {"$ref": "#/$defs/0", "$defs": {str(n): {"$ref": f"#/$defs/{n + 1}"} for n in range(1000)}}
    described = {"type": "string", "description": "a" * 2**18}
    unclosed = {"type": "string", "pattern": "[" * 2**14}
    for schema, message in (
        (wide, "2000 parts"),
        (deep, "too deeply"),
        (chain, "too deeply"),
        (described, "schema has 262"),
        (unclosed, "16384 characters"),
    ):
        started = time.process_time()
        with pytest.raises(StructureError, match=message):
            grammar_of("schema", json.dumps(schema))
        assert time.process_time() - started < 1


def test_whether_values_end_is_found_in_linear_time() -> None:
    """Each of 400 definitions needs the one before it, and the last one is needed by six large objects."""
    chain: dict[str, Any] = {"0": {"type": "null"}}
    for number in range(1, 400):
        before = {"$ref": f"#/$defs/{number - 1}"}
        chain[str(number)] = {"type": "object", "properties": {"x": before}, "required": ["x"]}
    needed = {**{f"p{number}": {} for number in range(120)}, "last": {"$ref": "#/$defs/399"}}
    properties = {**needed, **{f"o{number}": {} for number in range(6)}}
    large = {"type": "object", "properties": properties, "required": [*needed], "minProperties": len(needed) + 1}
    definitions = {**chain, **{f"large{number}": large for number in range(6)}}
    started = time.process_time()
    grammar_of("schema", json.dumps({"$defs": definitions, "$ref": "#/$defs/large0"}))
    assert time.process_time() - started < 2


TAGGED = {  # a discriminated union as pydantic writes it
    "discriminator": {"mapping": {"cat": "#/$defs/Cat", "dog": "#/$defs/Dog"}, "propertyName": "kind"},
    "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
    "$defs": {
        "Cat": {
            "type": "object",
            "properties": {"kind": {"const": "cat", "type": "string"}, "lives": {"type": "integer"}},
            "required": ["kind", "lives"],
        },
        "Dog": {
            "type": "object",
            "properties": {"kind": {"enum": ["dog", "puppy"], "type": "string"}},
            "required": ["kind"],
        },
    },
}
A_OR_B = {"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "null"}}}
TAKEN = {
    "type": "object",
    "properties": {"ab": {"type": "integer"}, "c/d": {}},
    "required": ["ab"],
    "additionalProperties": {"type": "null"},
}


ORDER = {
    "$anchor": "order",
    "x-order": ["id"],
    "type": "object",
    "properties": {
        "id": {"type": "integer", "format": "int64", "example": 7, "minimum": 1},
        "price": {"type": "number", "format": "double", "x-unit": {"not": {}}},
        "mail": {"type": "string", "format": "email", "maxLength": 3, "nullable": False},
        "file": {"type": "string", "contentMediaType": "text/plain", "contentEncoding": "base64", "enum": ["a", "b"]},
        "day": {"type": ["string", "null"], "format": "date"},
        "tags": {"type": "array", "items": {"type": "null"}, "uniqueItems": False},
    },
    "required": ["id"],
    "unevaluatedProperties": False,
    "propertyNames": {},
}


@pytest.mark.parametrize(
    ("schema", "yes", "no"),
    [
        (
            ORDER,
            [
                '{"id":7}',
                '{"id":1,"price":1.5,"mail":"abc","file":"b","day":null,"tags":[null]}',
                '{"id":1,"day":"2024-02-29"}',
            ],
            ['{"id":0}', '{"id":1.5}', '{"id":1,"mail":"abcd"}', '{"id":1,"file":"c"}', '{"id":1,"day":"x"}', "{}"],
        ),
        (
            {"type": "string"},
            ['"\xe9\U0001f600"', r'"\n\""'],
            [r'"\ud800"', r'"\ud83d\ude00"', r'"\u0041"', '"\x01"', '"\n"', '"\x7f"', r'"\x"'],
        ),
        (
            {"type": "string"},
            [b'"\xc3\xa9"'],
            [
                b'"\xc0\x80"',
                b'"\xed\xa0\x80"',
                b'"\xf5\x80\x80\x80"',
                b'"\xe0\x80\x80"',
                b'"\xf4\x90\x80\x80"',
                b'"\x80"',
            ],
        ),
        (
            {"type": "string", "pattern": "[^a]"},
            ['"b"', r'"\""', '"abba"', r'"a\n"'],
            ['""', '"a"', '"aa"', r'"\u0062"', b'"\xed\xa0\x80"'],
        ),
        (
            {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "pattern": r"\S"},
                    "url": {"type": "string", "pattern": "^https?://"},
                },
                "required": ["name", "url"],
            },
            ['{"name":"J","url":"https://"}', '{"name":" Jane Doe","url":"http://a.b/c?d"}'],
            ['{"name":" ","url":"https://a"}', '{"name":"J","url":"see https://a"}'],
        ),
        (
            {"type": "string", "pattern": "^a|b$", "minLength": 3, "maxLength": 5},
            ['"axx"', '"xxxxb"'],
            ['"ab"', '"xax"', '"axxxxx"'],
        ),
        (
            {"type": "string", "pattern": "[A-Z][0-9]{3}", "minLength": 8, "maxLength": 9},
            ['"xxA123xx"', '"xxxxxB999"'],
            ['"A123"', '"xxA12xxx"', '"A123567890"'],
        ),
        ({"type": "string", "pattern": "^.$"}, ['"a"'], ['"\u2028"', r'"\n"']),
        (
            {"type": "string", "minLength": 2, "maxLength": 3},
            ['"\xe9a"', r'"\n\n"'],
            ['"\xe9"', '"aaaa"', r'"\u0061\u0061"'],
        ),
        (
            TAKEN,
            ['{"ab":1}', '{ "ab" : 1 , "c/d" : [] , "x" : null }'],
            ['{"ab":1,"ab":null}', r'{"ab":1,"a\u0062":null}'],
        ),
        (TAKEN, [], [r'{"ab":1,"c\/d":null}', '{"x":null,"ab":1}', '{"ab":1,"x":2}', "{}"]),
        ({**A_OR_B, "minProperties": 1}, ['{"a":null}', '{"b":null}', '{"a":null,"b":null}'], ["{}", '{"c":null}']),
        ({**A_OR_B, "maxProperties": 1}, ["{}", '{"a":null}', '{"b":null}'], ['{"a":null,"b":null}']),
        ({"type": "integer"}, ["-5", "9" * 18], ["1.0", "1e3", "01", "9" * 19]),
        ({"type": "integer", "minimum": -3, "exclusiveMaximum": 12}, ["-3", "11"], ["-4", "12"]),
        ({"type": "number", "exclusiveMaximum": 12.25}, ["12.249999", "-7"], ["12.25", "12.2499999999999999999"]),
        ({"type": "number", "exclusiveMaximum": 10**14}, ["99999999999999"], ["99999999999999.999999"]),
        ({"enum": [1.5, "x", [2.0]]}, ["1.5", '"x"', "[2]"], ["1.50", "2"]),
        (
            {"type": "array", "prefixItems": [{"type": "null"}], "items": False},
            ["[]", "[ null ]"],
            ["[null,null]", "[1]"],
        ),
        ({"type": ["null", "array"], "maxItems": 1}, ["null", "[{}]"], ["[1,1]", "[" + " " * 9 + "]"]),
        (
            {"type": "string", "format": "duration"},
            ['"P1Y2M3DT4H5M6S"', '"PT30M"', '"P7W"', '"P1D"'],
            ['"P"', '"PT"', '"P1H"', '"P1W1D"', '"P1234567890D"'],
        ),
        (
            {"type": "string", "format": "uri", "minLength": 1, "maxLength": 12},
            ['"http://a.b"'],
            ['"http://a.bcdef"', '"a.b"', '""'],
        ),
        (
            {"type": "string", "pattern": "^[a-z]+$", "minLength": 2, "maxLength": 300},
            ['"ab"', f'"{"a" * 300}"'],
            ['"a"', f'"{"a" * 301}"', '"a1"'],
        ),
        ({"oneOf": [{"type": "integer"}, {"type": ["string", "null"]}]}, ["1", '"a"', "null"], ["true", "[]"]),
        (TAGGED, ['{"kind":"cat","lives":9}', '{"kind":"dog"}'], ['{"kind":"dog","lives":9}', '{"kind":"fish"}']),
        (
            {"type": "string", "format": "date"},
            ['"2024-02-29"', '"2000-02-29"', '"2023-02-28"', '"2023-01-31"', '"2023-11-30"'],
            ['"2024-02-31"', '"2024-13-01"', '"2023-02-29"', '"1900-02-29"', '"2023-04-31"', '"2024-00-10"'],
        ),
        (
            {"type": "string", "format": "time"},
            ['"23:59:59Z"', '"00:00:00.25+05:30"'],
            ['"12:00:60Z"', '"24:00:00Z"', '"12:00:00"', '"12:00:00-24:00"', '"12:00:00.Z"'],
        ),
        (
            {"type": "string", "format": "date-time"},
            ['"2024-02-29T12:00:59Z"'],
            ['"2023-02-29T12:00:00Z"', '"2024-02-29T12:00:60Z"', '"2024-02-29"'],
        ),
    ],
)
def test_schemas_are_enforced_exactly(schema: Any, yes: list[Any], no: list[Any]) -> None:
    follows = follower(schema)
    assert [text for text in yes if not follows(text)] == []
    assert [text for text in no if follows(text)] == []


def follower(schema: Any) -> Callable[[str | bytes], bool]:
    """Tells whether a text follows the grammar of a schema."""
    from llguidance import LLMatcher, LLTokenizer

    start = LLMatcher(LLTokenizer("byte"), grammar_of("schema", json.dumps(schema)))

    def follows(text: str | bytes) -> bool:
        data, matcher = text.encode() if isinstance(text, str) else text, start.deep_copy()
        return matcher.try_consume_tokens(list(data)) == len(data) and matcher.is_accepting()

    return follows


KIND = {"enum": ["cat", "dog"]}


@pytest.mark.parametrize(
    ("weak", "yes", "no"),
    [
        ({"type": "integer", "multipleOf": 5, "maximum": 9}, ["7"], ["10", '"a"']),
        ({"type": "array", "uniqueItems": True, "items": KIND}, ['["cat","cat"]'], ['["x"]', "1"]),
        ({"type": "string", "pattern": "(?=a)", "maxLength": 2}, ['"b"'], ['"bcd"', "1"]),
        ({"type": "string", "maxLength": 2**20}, ['"b"'], ["1"]),
        ({"type": "integer", "minLength": 1, "maximum": 3}, ["2"], ["4", '"a"']),
        ({"type": "number", "minimum": 1e300}, ["1"], ['"a"']),
        ({"type": "number", "exclusiveMinimum": True, "minimum": 0}, ["1"], ['"a"']),
        ({"enum": ["cat", 2**60], "type": ["string", "integer"]}, ['"x"', "3"], ["[]"]),
        ({"anyOf": [KIND, {"not": {}}]}, ['"cat"', "[]"], []),
        ({"oneOf": [KIND, {"enum": ["cat", "cow"]}]}, ['"cat"', '"cow"'], ['"fox"']),
        ({"type": "string", "enum": ["cat"], "minLength": 9}, ['"cat"'], ['"catcatcat"']),
        ({"allOf": [KIND, {"type": "string"}]}, ["[]"], []),
        ({"minimum": 3}, ["4"], ["2", '"a"']),
        ({"properties": {"a": KIND}, "required": ["a", "b"]}, ['{"a":"cat","b":1}'], ['{"a":"cat"}', '{"a":1,"b":1}']),
        ({"type": "object", "properties": {"a": KIND}, "anyOf": [{"required": ["a"]}, {}]}, ["{}"], ['{"a":1}', "1"]),
        (
            {"type": "object", "properties": {"a": KIND}, "anyOf": [{"properties": {"b": {}}, "required": ["b"]}]},
            ['{"a":"cat","b":1}'],
            ['{"a":1}'],
        ),
        (
            {
                "type": "object",
                "properties": {"a": KIND},
                "patternProperties": {"^x": {}},
                "additionalProperties": False,
            },
            ['{"a":"cat","x":1}'],
            ['{"a":1}'],
        ),
        ({"$ref": "#/$defs/Kind", "minLength": 1}, ['"dog"'], ['"cow"']),
        ({"$ref": "https://example.org/kind"}, ["1"], []),
        ({"type": "object", "properties": {"a": KIND}, "anyOf": [{"required": 1}]}, ['{"a":"cat"}'], ['{"a":1}']),
        ({"$ref": "#/$defs/Deep"}, ["{}", '{"a":"cat"}'], ['{"a":1}', "1"]),
        ({"type": "nonsense"}, ["1"], []),
        ({"type": "object", "properties": {"a": 1}}, ['{"a":2}'], ["1"]),
        ({"$id": "x", "type": "integer"}, ["1"], ['"a"']),
    ],
)
def test_what_cannot_be_enforced_of_a_schema_leaves_the_rest(weak: Any, yes: list[str], no: list[str]) -> None:
    schema = {
        "type": "object",
        "properties": {"weak": weak, "kind": {"$ref": "#/$defs/Kind"}, "n": {"type": "integer"}},
        "required": ["weak", "kind"],
        "dependentRequired": {"kind": ["n"]},
        "$defs": {"Kind": KIND, "Deep": {"type": "object", "properties": {"a": KIND}, "if": {}, "then": {}}},
    }
    before = json.dumps(schema)
    with pytest.raises(StructureError):
        grammar_of("schema", before)
    weaker, reasons = weakened(schema, (), GrammarLimits())
    assert (json.dumps(schema), len(reasons) > 1) == (before, True)
    follows = follower(weaker)
    assert [text for text in yes if not follows(f'{{"weak":{text},"kind":"dog"}}')] == []
    assert [text for text in no if follows(f'{{"weak":{text},"kind":"dog"}}')] == []
    for rest in ("", ',"kind":"cow"', ',"kind":"dog","n":"a"'):
        assert not follows(f'{{"weak":{yes[0]}{rest}}}')
