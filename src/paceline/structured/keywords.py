"""The supported keywords of JSON schemas, and checks of their values.

Every check raises StructureError, which names the keyword.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, TypeGuard

from paceline.errors import StructureError
from paceline.structured.formats import FORMATS, PATTERNS
from paceline.structured.patterns import MAX_REPETITIONS

_UNENFORCED = {  # keywords that restrict values in a way that grammars do not follow
    "not", "if", "then", "else", "multipleOf", "divisibleBy", "disallow", "extends", "$dynamicRef", "$recursiveRef",
    "uniqueItems", "contains", "minContains", "maxContains", "unevaluatedItems", "patternProperties", "propertyNames",
    "unevaluatedProperties", "dependentRequired", "dependentSchemas", "dependencies",
}  # fmt: skip
_NEEDS = {  # keywords that do nothing without one of those
    "if": {"then", "else"}, "then": {"if"}, "else": {"if"}, "minContains": {"contains"}, "maxContains": {"contains"},
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
_NOTHING_IF_EMPTY = {
    "patternProperties", "propertyNames", "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedItems",
}  # fmt: skip
_OF_SCHEMAS = {"anyOf", "allOf", "oneOf"}
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
ENFORCED_FORMATS = {*FORMATS, *PATTERNS}
_LARGEST_BOUND = 2**53  # beyond it a double cannot represent every integer
_LONGEST = 2**14  # characters of a text, which take llguidance at most 3 ms a token with any format
_DECIMALS = 6  # decimals of a bound, and of a number between bounds
_DIGITS = 15  # decimal digits that a double always represents
_WIDEST = 10**18  # default bound of numbers, so that answers end
_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,), "array": (list,), "string": (str,), "boolean": (bool,), "null": (type(None),),
    "number": (int, float), "integer": (int,),
}  # fmt: skip


class KeywordError(StructureError):
    """A keyword cannot be enforced. weaker: values of keywords with which the rest may be; None to leave one out."""

    def __init__(self, message: str, weaker: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.weaker = weaker


def expect(ok: bool, name: str, value: object, form: str) -> None:
    """Raise KeywordError unless a keyword's value has the right form. name: as it is shown, in quotes."""
    if not ok:
        raise _wrong_form(name, value, f"it has to be {form}")


def _wrong_form(name: str, value: object, form: str) -> KeywordError:
    message = f"{name} in the schema has the wrong form, {repr(value)[:100]}: {form}"
    return KeywordError(message, {name.strip("'"): None})


def constraints_of(schema: Mapping[str, Any]) -> set[str]:
    """The keywords of a schema that restrict its values.

    All others are annotations: keywords that JSON Schema does not know, as it says itself, and formats that are not
    enforced, those of numbers among them.
    """
    names = schema.keys() & (_TYPED | _ALONE.keys() | _UNENFORCED | {"type"})
    names = {name for name in names if not _does_nothing(name, schema)}
    if "format" in names:
        expect(isinstance(schema["format"], str), "'format'", schema["format"], "a name")
        if "type" in names and "string" not in _types_of(schema["type"]):
            names.remove("format")
    return names


def _does_nothing(name: str, schema: Mapping[str, Any]) -> bool:
    value = schema[name]
    if name == "format":
        return isinstance(value, str) and value not in ENFORCED_FORMATS
    if name == "unevaluatedProperties":  # objects have no properties beside those anyway
        return isinstance(value, bool) and not schema.keys().isdisjoint({"properties", "additionalProperties"})
    if name in _NEEDS:
        return schema.keys().isdisjoint(_NEEDS[name])
    return value is False if name == "uniqueItems" else value == {} and name in _NOTHING_IF_EMPTY


def check_together(names: set[str], types: object) -> None:
    """Raise KeywordError for keywords that cannot be enforced at all, in combination, or without their type.

    names: the keywords that restrict a schema's values. types: the value of its keyword 'type'.
    """
    if unenforced := names & _UNENFORCED:
        named = ", ".join(map(repr, sorted(unenforced)))
        message = f"the schema has {named[:200]}, which cannot be enforced; leave it out"
        raise KeywordError(message, dict.fromkeys(unenforced))
    for name in [name for name in _ALONE if name in names]:
        if others := names - _ALONE[name] - {name}:
            message = f"the schema has {min(others)!r} beside {name!r}; only one of them can be enforced"
            gives_way = name in _OF_SCHEMAS and others & (_TYPED | {"enum", "const"})
            raise KeywordError(message, dict.fromkeys({name} if gives_way else others))
    known = _types_of(types) if "type" in names else []
    untyped = (names & _TYPED).difference(*(OF_TYPE[type_name] for type_name in known))
    if untyped and known:
        message = f"the schema has {min(untyped)!r}, which says nothing of values of its 'type'; leave it out"
        raise KeywordError(message, dict.fromkeys(untyped))
    if untyped:
        meant = [name for name, keywords in OF_TYPE.items() if keywords & untyped and name != "integer"]
        message = f"the schema has {min(untyped)!r} without the 'type' that it belongs to; add it"
        raise KeywordError(message, {"type": meant})


def _types_of(value: object) -> list[str]:
    types = [value] if isinstance(value, str) else value
    if are_names(types) and 0 < len(types) == len(OF_TYPE.keys() & types):
        return types
    known = ", ".join(sorted(OF_TYPE))
    raise _wrong_form("'type'", value, f"one of {known}, or several, each once")


def are_names(value: object) -> TypeGuard[list[str]]:
    """Whether a value is a list of strings."""
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def counts_of(schema: Mapping[str, Any], minimum: str, maximum: str) -> tuple[int, int | None]:
    """The counts that two keywords such as 'minItems' and 'maxItems' set. The second is None if it is unlimited."""
    low = _count_of(minimum, schema[minimum]) if minimum in schema else 0
    high = _count_of(maximum, schema[maximum]) if maximum in schema else None
    if high is not None and high < low:
        message = f"the schema has {minimum!r} {low} and {maximum!r} {high}, between which there is nothing"
        raise KeywordError(message, {minimum: None, maximum: None})
    return low, high


def _count_of(name: str, count: object) -> int:
    if not isinstance(count, int) or isinstance(count, bool) or count < 0:
        raise _wrong_form(repr(name), count, "a whole number of at least 0")
    most = _LONGEST if name in ("minLength", "maxLength") else MAX_REPETITIONS
    if count > most:
        raise KeywordError(f"{name} counts to {count}; up to {most} can be enforced", {name: None})
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
