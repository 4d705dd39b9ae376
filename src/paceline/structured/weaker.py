"""Schemas without what cannot be enforced of them, so that the rest can be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.errors import StructureError
from paceline.structured.keywords import KeywordError, constraints_of

_ALONE = ("$ref", "anyOf", "oneOf", "allOf", "enum", "const")


def without_cause(schema: Mapping[str, Any], error: StructureError) -> Mapping[str, Any]:
    """The schema without what has raised an error. Raises the error again if nothing can be left out."""
    if isinstance(error, KeywordError) and (weaker := _changed(schema, error.weaker)) != schema:
        return weaker
    names = constraints_of(schema)
    alone = [name for name in _ALONE if name in names]
    changes = alone[:1] or names - {"type"}
    if not changes:
        raise error
    return _changed(schema, dict.fromkeys(changes))


def _changed(schema: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The schema with these keywords, or without them (None); properties that only those may ask for are allowed."""
    left_out = {name for name, value in changes.items() if value is None}
    changed = {name: value for name, value in {**schema, **changes}.items() if name not in left_out}
    properties = changed.get("properties")
    if "patternProperties" in left_out:
        changed["additionalProperties"] = True
    elif isinstance(properties, dict) and any(_adds_names(schema.get(name), properties) for name in left_out):
        changed.setdefault("additionalProperties", True)
    return changed


def _adds_names(value: Any, known: Mapping[str, Any]) -> bool:
    """Whether the value of a keyword may ask for properties beside those that are known."""
    if isinstance(value, list):
        return any(_adds_names(item, known) for item in value)
    if not isinstance(value, dict):
        return False
    if not value.keys().isdisjoint({"$ref", "additionalProperties", "patternProperties"}):
        return True
    named = [
        name for key in ("properties", "required") if isinstance(of := value.get(key), (dict, list)) for name in of
    ]
    return not all(isinstance(name, str) and name in known for name in named) or _adds_names([*value.values()], known)


def replaced(value: Any, weaker: Mapping[int, Mapping[str, Any]]) -> Any:
    """A copy of a value of JSON in which other objects stand for some, by their identity."""
    if isinstance(value, list):
        return [replaced(item, weaker) for item in value]
    if not isinstance(value, dict):
        return value
    return {key: replaced(item, weaker) for key, item in weaker.get(id(value), value).items()}
