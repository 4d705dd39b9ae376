"""Checked fields of a head's config.json. Each function raises ModelFormatError for a value of another type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from paceline.errors import ModelFormatError
from paceline.models.files.boundary import brief

T = TypeVar("T")


def object_of(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the object ``name``; empty if there is none."""
    return _of_kind(fields, name, dict, {}, "an object")


def list_of(fields: Mapping[str, Any], name: str) -> list[Any]:
    """Return the list ``name``; empty if there is none."""
    return _of_kind(fields, name, list, [], "a list")


def flag_of(fields: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """Return the truth value ``name``."""
    return _of_kind(fields, name, bool, default, "true or false")


def number_of(fields: Mapping[str, Any], name: str, default: int) -> int:
    """Return the whole number ``name``."""
    return _of_kind(fields, name, int, default, "a whole number")


def real_of(fields: Mapping[str, Any], name: str, default: float) -> float:
    """Return the number ``name``."""
    return float(_of_kind(fields, name, (int, float), default, "a number"))


def _of_kind(fields: Mapping[str, Any], name: str, kind: type[T] | tuple[type[T], ...], default: T, words: str) -> T:
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ModelFormatError(f"{name} of the head's configuration must be {words}, not {brief(repr(value))}")
    return value
