"""Schemas that could not be followed to the letter are refused by name, wherever in the schema it stands."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.errors import StructureError
from paceline.structured.schemas import grammar_of

pytest.importorskip("llguidance", reason="structured outputs need the extra 'structured'")

WRONG = "wrong form"


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"$ref": "https://example.org/schema.json"}, "only its own parts"),
        ({"$ref": "other.json#/a"}, "only its own parts"),
        ({"$ref": "#/$defs/missing"}, "does not have"),
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
        ({"type": "integer", "minimum": 1, "exclusiveMinimum": 1}, "beside"),
        ({"type": "integer", "exclusiveMinimum": 1, "exclusiveMaximum": 2}, "no whole number"),
        ({"type": "integer", "exclusiveMinimum": True}, WRONG),
        ({"type": []}, WRONG),
        ({"type": 3}, WRONG),
        ({"type": ["string", {}]}, WRONG),
        ({"enum": []}, WRONG),
        ({"enum": "ab"}, WRONG),
        ({"enum": ["\ud800"]}, "U\\+D800"),
        ({"const": float("nan")}, "which JSON has not"),
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
        ({"$anchor": "a"}, "anchor"),
    ],
)
def test_what_could_not_be_followed_is_refused_wherever_it_stands(schema: Any, says: str) -> None:
    for whole in (
        schema,
        {"type": "array", "items": schema},
        {"type": "object", "properties": {"p": {"anyOf": [schema]}}},
    ):
        if whole is not schema and "$ref" in json.dumps(schema):
            continue  # it means the whole
        with pytest.raises(StructureError, match=says):
            grammar_of("schema", json.dumps(whole))


@pytest.mark.parametrize(
    "asked",
    [
        ("regex", "a\x04"),
        ("regex", "[\U00050000-\U00050010]"),
        ("schema", json.dumps({"enum": ["ok", "\U00050000"]})),
        ("schema", json.dumps({"type": "object", "properties": {"\U00050000": {}}})),
        ("schema", json.dumps({"type": "string", "pattern": "\U00050000"})),
    ],
)
def test_characters_that_no_tokens_spell_are_named(asked: tuple[str, str]) -> None:
    with pytest.raises(StructureError, match=r"no tokens to spell U\+(0004|50000)"):
        grammar_of(*asked, unspelled=[0x04, 0xF1])
    grammar_of(*asked)
