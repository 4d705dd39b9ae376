"""The supported keywords of JSON schemas, and checks of their values.

Every check raises StructureError, which names the keyword.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, TypeGuard

from paceline.errors import StructureError
from paceline.structured.patterns import MAX_REPETITIONS

ANNOTATIONS = {  # keywords that do not restrict values
    "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly",
    "$schema", "$id", "$comment", "$defs", "definitions", "discriminator",
}  # fmt: skip
_ALONE: dict[str, set[str]] = {  # keywords that exclude all others, except those listed
    "$ref": set(),
    "anyOf": set(),
    "allOf": set(),
    "enum": {"type"},
    "const": {"type"},
    "oneOf": set(),
    "pattern": {"type", "minLength", "maxLength"},
    "format": {"type", "minLength", "maxLength"},
}
OF_TYPE: dict[str, set[str]] = {
    "object": {"properties", "required", "additionalProperties", "minProperties", "maxProperties"},
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "string": {"minLength", "maxLength", "pattern", "format"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"},
    "integer": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"},
    "boolean": set(),
    "null": set(),
}
_TYPED = set().union(*OF_TYPE.values())
_LARGEST_BOUND = 2**53  # beyond it a double cannot represent every integer
_LONGEST = 2**14  # characters of a text, which take llguidance at most 3 ms a token with any format
_DECIMALS = 6  # decimals of a bound, and of a number between bounds
_DIGITS = 15  # decimal digits that a double always represents
_WIDEST = 10**18  # default bound of numbers, so that answers end
_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,), "array": (list,), "string": (str,), "boolean": (bool,), "null": (type(None),),
    "number": (int, float), "integer": (int,),
}  # fmt: skip


def expect(ok: bool, name: str, value: object, form: str) -> None:
    """Raise StructureError unless a keyword's value has the right form."""
    if not ok:
        shown = repr(value)
        raise StructureError(f"{name} in the schema has the wrong form, {shown[:100]}: it has to be {form}")


def check_names(names: set[str], types: object) -> None:
    """Raise StructureError for keywords that cannot be enforced at all, in combination, or without their type.

    names: the schema's keywords. types: the value of its keyword 'type'.
    """
    if unknown := names - _TYPED - _ALONE.keys() - {"type"}:
        named = ", ".join(map(repr, sorted(unknown)))
        raise StructureError(f"the schema has {named[:200]}, which cannot be enforced; leave it out")
    for name in names & _ALONE.keys():
        if others := names - _ALONE[name] - {name}:
            raise StructureError(f"the schema has {min(others)!r} beside {name!r}; only one of them can be enforced")
    known = _types_of(types) if "type" in names else []
    if untyped := (names & _TYPED).difference(*(OF_TYPE[type_name] for type_name in known)):
        raise StructureError(f"the schema has {min(untyped)!r} without the 'type' that it belongs to; add it")


def _types_of(value: object) -> list[str]:
    types = [value] if isinstance(value, str) else value
    if not are_names(types) or not 0 < len(types) == len(OF_TYPE.keys() & types):
        known = ", ".join(sorted(OF_TYPE))
        raise StructureError(
            f"'type' in the schema has the wrong form, {repr(value)[:100]}: one of {known}, or several, each once"
        )
    return types


def are_names(value: object) -> TypeGuard[list[str]]:
    """Whether a value is a list of strings."""
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def counts_of(schema: Mapping[str, Any], minimum: str, maximum: str) -> tuple[int, int | None]:
    """The counts that two keywords such as 'minItems' and 'maxItems' set. The second is None if it is unlimited."""
    low = _count_of(minimum, schema[minimum]) if minimum in schema else 0
    high = _count_of(maximum, schema[maximum]) if maximum in schema else None
    if high is not None and high < low:
        raise StructureError(f"the schema has {minimum!r} {low} and {maximum!r} {high}, between which there is nothing")
    return low, high


def _count_of(name: str, count: object) -> int:
    if not isinstance(count, int) or isinstance(count, bool) or count < 0:
        raise StructureError(
            f"{name!r} in the schema has the wrong form, {repr(count)[:100]}: a whole number of at least 0"
        )
    most = _LONGEST if name in ("minLength", "maxLength") else MAX_REPETITIONS
    if count > most:
        raise StructureError(f"{name} counts to {count}; up to {most} can be enforced")
    return count


def bounds_of(schema: Mapping[str, Any]) -> dict[str, int | float]:
    """The bounds of a number that the schema sets, by keyword."""
    bounds = {name: schema[name] for name in OF_TYPE["number"] if name in schema}
    for name, bound in bounds.items():
        expect(is_of(bound, "number"), repr(name), bound, "a number")
        expect(abs(bound) <= _LARGEST_BOUND, repr(name), bound, "no further from 0 than 2^53")
        exponent = Decimal(repr(bound)).as_tuple().exponent
        ok = isinstance(exponent, int) and exponent >= -_DECIMALS
        expect(ok, repr(name), bound, f"a number of at most {_DECIMALS} decimals")
        check_exact(bound)
    for one, other in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if one in bounds and other in bounds:
            raise StructureError(f"the schema has {one!r} beside {other!r}; keep one of them")
    return bounds


def number_bounds(bounds: Mapping[str, int | float]) -> dict[str, int | float]:
    """Keywords for a number's bounds, and a step between numbers with which no rounding to a double crosses a bound."""
    if not bounds:
        return {}
    whole = len(str(int(max(abs(bound) for bound in bounds.values()))))
    step = 10.0 ** -max(0, min(_DECIMALS, _DIGITS - whole))
    return {**_bounded(bounds, -_WIDEST, _WIDEST), "multipleOf": step}


def whole_bounds(bounds: Mapping[str, int | float]) -> dict[str, int | float]:
    """Keywords for an integer's bounds, rounded to integers."""
    whole: dict[str, int] = {}
    if "minimum" in bounds:
        whole["minimum"] = math.ceil(bounds["minimum"])
    if "exclusiveMinimum" in bounds:
        whole["minimum"] = math.floor(bounds["exclusiveMinimum"]) + 1
    if "maximum" in bounds:
        whole["maximum"] = math.floor(bounds["maximum"])
    if "exclusiveMaximum" in bounds:
        whole["maximum"] = math.ceil(bounds["exclusiveMaximum"]) - 1
    if whole.get("minimum", -math.inf) > whole.get("maximum", math.inf):
        raise StructureError("the schema's bounds have no whole number between them")
    return _bounded(whole, -_WIDEST, _WIDEST)


def _bounded(bounds: Mapping[str, int | float], low: int, high: int) -> dict[str, int | float]:
    """The bounds, with ``low`` and ``high`` for missing ones."""
    ends: dict[str, int | float] = {}
    if "exclusiveMinimum" not in bounds:
        ends["minimum"] = low
    if "exclusiveMaximum" not in bounds:
        ends["maximum"] = high
    return ends | dict(bounds)


def check_exact(number: int | float) -> None:
    """Raise StructureError for a number that llguidance would not write exactly."""
    if isinstance(number, float) and not math.isfinite(number):
        raise StructureError(f"the schema allows {number!r}, which JSON cannot express")
    digits, exponent = Decimal(repr(number)).normalize().as_tuple()[1:] if isinstance(number, float) else ((), 0)
    if abs(number) > (10**_DIGITS if digits else _LARGEST_BOUND) or len(digits) > _DIGITS or int(exponent) < -12:
        raise StructureError(
            f"the schema has {repr(number)[:100]}, which cannot be enforced to the last digit; up to {_DIGITS} digits "
            "can, 12 of them after the decimal point"
        )


def is_of(value: object, types: str | list[str]) -> bool:
    """Whether a value has one of these JSON types. Booleans are not numbers."""
    names = [types] if isinstance(types, str) else types
    return any(isinstance(value, _TYPES[name]) and (name == "boolean" or not isinstance(value, bool)) for name in names)
