"""Whether alternatives of a schema exclude each other, so that 'oneOf' can be enforced as 'anyOf'."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any


def are_apart(schemas: Sequence[Any], followed: Callable[[Any], Any]) -> bool:
    """Whether no value can be of two of the schemas: by their types, or by a tag, as pydantic and zod write unions.

    A tag is a required property of all of them that has other texts as constants in each. followed: the schema that a
    '$ref' leads to.
    """
    types = [_types(schema) for schema in schemas]
    if all(types) and _disjoint(types):
        return True
    tags = [_tags(schema, followed) for schema in schemas]
    return any(_disjoint([each[name] for each in tags]) for name in set.intersection(*map(set, tags)))


def _types(schema: Any) -> set[str]:
    named = schema.get("type", []) if isinstance(schema, dict) else []
    names = [named] if isinstance(named, str) else named
    known = isinstance(names, list) and all(isinstance(name, str) for name in names)
    return {"number" if name == "integer" else name for name in names} if known else set()


def _tags(schema: Any, followed: Callable[[Any], Any]) -> dict[str, set[str]]:
    """The required properties of an object that are texts out of a list."""
    if not isinstance(schema, dict) or schema.get("type") != "object":
        return {}
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, dict) or not isinstance(required, list):
        return {}
    named = {name: followed(properties[name]) for name in required if isinstance(name, str) and name in properties}
    found = {name: _texts(value) for name, value in named.items()}
    return {name: texts for name, texts in found.items() if texts}


def _texts(schema: Any) -> set[str]:
    values = schema.get("enum", [schema.get("const")]) if isinstance(schema, dict) else []
    return set(values) if isinstance(values, list) and all(isinstance(value, str) for value in values) else set()


def _disjoint(sets: Sequence[set[str]]) -> bool:
    return all(one.isdisjoint(other) for one, other in combinations(sets, 2))
