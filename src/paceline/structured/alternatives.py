"""Whether alternatives of a schema exclude each other, so that 'oneOf' can be enforced as 'anyOf'."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Tags = Mapping[str, set[str]]


def are_apart(schemas: Sequence[Any], tags_of: Callable[[Any], Tags]) -> bool:
    """Whether no value can be of two of the schemas: by their types, or by a tag, as pydantic and zod write unions.

    A tag is a required property of all of them that has other texts as constants in each. schemas: none is a '$ref'.
    tags_of: as the function ``tags_of``. Takes time linear in the number of types, tags and texts.
    """
    if len({id(schema) for schema in schemas}) < len(schemas):
        return False
    types = [_types(schema) for schema in schemas]
    if all(types) and _disjoint(types):
        return True
    tags = [tags_of(schema) for schema in schemas]
    return any(_disjoint([each[name] for each in tags]) for name in set.intersection(*map(set, tags)))


def tags_of(schema: Any, followed: Callable[[Any], Any]) -> Tags:
    """The required properties of an object that are texts out of a list. followed: what a '$ref' leads to."""
    if not isinstance(schema, dict) or schema.get("type") != "object":
        return {}
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, dict) or not isinstance(required, list):
        return {}
    names = dict.fromkeys(name for name in required if isinstance(name, str) and name in properties)
    texts_by_name = {name: _texts(followed(properties[name])) for name in names}
    return {name: texts for name, texts in texts_by_name.items() if texts}


def _types(schema: Any) -> set[str]:
    named = schema.get("type", []) if isinstance(schema, dict) else []
    names = [named] if isinstance(named, str) else named
    known = isinstance(names, list) and all(isinstance(name, str) for name in names)
    return {"number" if name == "integer" else name for name in names} if known else set()


def _texts(schema: Any) -> set[str]:
    values = schema.get("enum", [schema.get("const")]) if isinstance(schema, dict) else []
    return set(values) if isinstance(values, list) and all(isinstance(value, str) for value in values) else set()


def _disjoint(sets: Sequence[set[str]]) -> bool:
    return len(set().union(*sets)) == sum(map(len, sets))
