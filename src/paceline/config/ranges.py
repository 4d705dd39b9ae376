"""Rules for parameters: type and range, written beside the field and checked in one place.

The rule is part of the field's annotation: ``Annotated[int, Whole(1, 64)]``. Plain ``bool``, ``str`` and ``Literal``
need none. A field without a rule is a TypeError as soon as its class is used.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    Protocol,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from paceline.config.help import Help
from paceline.config.names import SAME
from paceline.errors import ParameterError, UnknownParameterError, shown

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


T = TypeVar("T")


class Rule(Protocol):
    """allowed: the range, for messages."""

    @property
    def allowed(self) -> str: ...

    def take(self, name: str, value: Any) -> Any:
        """The value as it is kept (a copy, where it could change later). Raises ParameterError."""
        ...


def check(ok: bool, name: str, value: object, allowed: str) -> None:
    """Raise ParameterError unless ``ok``."""
    if not ok:
        raise ParameterError(name, value, allowed)


def is_whole(value: object) -> bool:
    """Whether ``value`` is a whole number; True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether ``value`` is a number; it may be huge, infinite or nan."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_text(value: object) -> bool:
    """Whether ``value`` is a string that UTF-8 can encode, without half characters (lone surrogates)."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_text(name: str, value: object) -> str:
    """A string without half characters, which no tokenizer can read. Raises ParameterError."""
    _TEXT.take(name, value)
    assert isinstance(value, str)
    return value


@dataclass(frozen=True)
class Whole:
    """A whole number from ``low`` to ``high``."""

    low: int
    high: int

    @property
    def allowed(self) -> str:
        return f"a whole number from {self.low} to {self.high}"

    def take(self, name: str, value: Any) -> Any:
        check(is_whole(value) and self.low <= value <= self.high, name, value, self.allowed)
        return value


@dataclass(frozen=True)
class Number:
    """A number from ``low`` to ``high``; or 0, where that means something of its own."""

    low: float
    high: float
    or_zero: bool = False

    @property
    def allowed(self) -> str:
        return f"{'0 or ' if self.or_zero else ''}a number in [{self.low:g}, {self.high:g}]"

    def take(self, name: str, value: Any) -> Any:
        inside = is_number(value) and (self.low <= value <= self.high or (self.or_zero and value == 0))
        check(inside, name, value, self.allowed)  # comparing refuses nan, and huge numbers are never converted
        return value


@dataclass(frozen=True)
class OneOf:
    """One of these words. others: words of other engines, and those that they stand for."""

    words: tuple[str, ...]
    others: Mapping[str, str] = field(default_factory=dict)

    @property
    def allowed(self) -> str:
        return "one of " + ", ".join(map(repr, self.words))

    def take(self, name: str, value: Any) -> Any:
        check(isinstance(value, str) and value in (*self.words, *self.others), name, value, self.allowed)
        return self.others.get(value, value)


@dataclass(frozen=True)
class TrueOrFalse:
    """True or False, and no other value."""

    allowed: str = "True or False"

    def take(self, name: str, value: Any) -> Any:
        check(isinstance(value, bool), name, value, self.allowed)
        return value


@dataclass(frozen=True)
class Text:
    """A string; with ``filled`` not an empty one."""

    filled: bool = False

    @property
    def allowed(self) -> str:
        empty = "that is not empty, and " if self.filled else ""
        return f"a string {empty}without half a character (a lone surrogate)"

    def take(self, name: str, value: Any) -> Any:
        check(is_text(value) and not (self.filled and not value), name, value, self.allowed)
        return value


_TEXT = Text()


@dataclass(frozen=True)
class NumaNodes:
    """Numbers of NUMA nodes, "0,1"; or "auto", or "off"."""

    allowed: str = "'auto', 'off', or numbers of nodes, such as '0,1'"

    def take(self, name: str, value: Any) -> Any:
        numbers = is_text(value) and re.fullmatch(r"\d{1,4}(,\d{1,4})*", value, re.ASCII) is not None
        check(numbers or value in ("auto", "off"), name, value, self.allowed)
        return value


_LONGEST_FILE_NAME, _LONGEST_PATH = 255, 4096  # bytes, on every usual file system


@dataclass(frozen=True)
class FileName:
    """A path that a file system could have, kept as a string."""

    allowed: str = "the name of a file"

    def take(self, name: str, value: Any) -> str:
        check(isinstance(value, (str, os.PathLike)) and _could_be(os.fspath(value)), name, value, self.allowed)
        return str(os.fspath(value))


def _could_be(path: str | bytes) -> bool:
    try:
        raw = os.fsencode(path)
    except UnicodeEncodeError:
        return False
    fits = len(raw) < _LONGEST_PATH and all(len(part) <= _LONGEST_FILE_NAME for part in raw.split(b"/"))
    return isinstance(path, str) and raw != b"" and b"\0" not in raw and fits


@dataclass(frozen=True)
class Texts:
    """At most ``most`` strings of ``characters`` together, none empty; kept as a tuple. secret: not shown in errors.

    one: a string alone is a list of one.
    """

    most: int
    characters: int
    one: bool = False
    secret: bool = False

    @property
    def allowed(self) -> str:
        return f"at most {self.most} strings that are not empty, with {self.characters} characters together at most"

    def take(self, name: str, value: Any) -> tuple[str, ...]:
        texts = (value,) if self.one and isinstance(value, str) else value
        ok = isinstance(texts, Sequence) and not isinstance(texts, (str, bytes)) and len(texts) <= self.most
        ok = ok and all(is_text(text) and text for text in texts) and sum(map(len, texts)) <= self.characters
        check(ok, name, "..." if self.secret else value, self.allowed)
        return tuple(texts)


@dataclass(frozen=True)
class TokenIds:
    """At most ``most`` token ids, kept as a tuple. The engine checks that its model has them."""

    most: int
    largest: int

    @property
    def allowed(self) -> str:
        return f"at most {self.most} token ids (whole numbers from 0 to {self.largest})"

    def take(self, name: str, value: Any) -> tuple[int, ...]:
        ok = isinstance(value, Sequence) and not isinstance(value, (str, bytes)) and len(value) <= self.most
        check(ok and all(is_whole(i) and 0 <= i <= self.largest for i in value), name, value, self.allowed)
        return tuple(value)


@dataclass(frozen=True)
class Functions:
    """Functions in a list, kept as a tuple."""

    allowed: str = "a list of functions"

    def take(self, name: str, value: Any) -> tuple[Any, ...]:
        ok = isinstance(value, Sequence) and not isinstance(value, (str, bytes)) and all(map(callable, value))
        check(ok, name, value, self.allowed)
        return tuple(value)


@dataclass(frozen=True)
class TokenNumbers:
    """Token ids, at most ``keys.most``, each to a number; kept as a dictionary of its own."""

    keys: TokenIds
    values: Number

    @property
    def allowed(self) -> str:
        return f"a mapping from {self.keys.allowed} to {self.values.allowed}"

    def take(self, name: str, value: Any) -> dict[int, float]:
        check(isinstance(value, Mapping), name, value, self.allowed)
        try:
            self.keys.take(name, tuple(value))
            return {token: self.values.take(name, number) for token, number in value.items()}
        except ParameterError as error:
            raise ParameterError(name, value, self.allowed) from error


@dataclass(frozen=True)
class InstanceOf:
    """An instance of a dataclass; a mapping of its fields becomes one."""

    kind: type

    @property
    def allowed(self) -> str:
        return f"{self.kind.__name__}, or a mapping of its fields ({', '.join(names_of(self.kind))})"

    def take(self, name: str, value: Any) -> Any:
        if isinstance(value, self.kind):
            return value
        check(isinstance(value, Mapping), name, value, self.allowed)
        check_names(self.kind, value, f"{name}.")
        return self.kind(**value)


@dataclass(frozen=True)
class AnyOf:
    """A value that one of several rules takes. none: whether None is allowed too."""

    rules: tuple[Rule, ...]
    none: bool

    @property
    def allowed(self) -> str:
        return ", or ".join([rule.allowed for rule in self.rules] + ["None"] * self.none)

    def take(self, name: str, value: Any) -> Any:
        if value is None and self.none:
            return None
        if len(self.rules) == 1:
            return self._only(name, value)
        for rule in self.rules:
            try:
                return rule.take(name, value)
            except ParameterError:
                continue
        raise ParameterError(name, value, self.allowed)

    def _only(self, name: str, value: Any) -> Any:
        """The value by the only rule, whose own error says more: a part names the field within it."""
        try:
            return self.rules[0].take(name, value)
        except ParameterError as error:
            if error.field != name or not self.none:
                raise
            raise ParameterError(name, error.value, f"{error.allowed}, or None") from error


def rule_for(hint: Any) -> Rule:
    """The rule that an annotation states. Raises TypeError where it states none."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _annotated(arguments)
    if origin in (Union, UnionType):
        rules = tuple(rule_for(member) for member in arguments if member is not NoneType)
        return AnyOf(rules, NoneType in arguments)
    if origin is Literal:
        return OneOf(arguments)
    if hint is bool:
        return TrueOrFalse()
    if hint is str:
        return _TEXT
    raise TypeError(f"{hint} has no rule; annotate it with a rule")


def _annotated(arguments: tuple[Any, ...]) -> Rule:
    inner, *rules = (part for part in arguments if not isinstance(part, Help))
    if not rules:
        return rule_for(inner)
    return AnyOf((rules[0],), none=True) if NoneType in get_args(inner) else rules[0]


@cache
def rules_of(kind: type) -> Mapping[str, Rule]:
    """The rule of every field of a dataclass."""
    hints = get_type_hints(kind, include_extras=True)
    return {name: rule_for(hints[name]) for name in names_of(kind)}


@cache
def names_of(kind: type) -> tuple[str, ...]:
    """The fields of a dataclass."""
    return tuple(field.name for field in dataclasses.fields(kind))


def check_names(kind: type, given: Mapping[Any, object], prefix: str = "") -> None:
    """Raise ParameterError for names that are no fields; it names the equivalent or the nearest field."""
    for name in given:
        if name not in names_of(kind):
            unknown = prefix + (name if isinstance(name, str) and name.isidentifier() else shown(name))
            raise UnknownParameterError(unknown, given[name], _instead(kind, name))


def _instead(kind: type, name: object) -> str:
    """The hint for an unknown field."""
    same = {other: own for other, own in SAME.items() if own in (*names_of(kind), "draft_model")}
    elsewhere: Mapping[str, str] = {**same, **kind.OTHER_NAMES} if hasattr(kind, "OTHER_NAMES") else {}
    if isinstance(name, str) and name in elsewhere:
        return f"instead: {elsewhere[name]}"
    near = difflib.get_close_matches(name, names_of(kind), n=1) if isinstance(name, str) and is_text(name) else []
    return f"did you mean {near[0]}?" if near else f"known are {', '.join(names_of(kind))}"


def names_checked(kind: type[T]) -> type[T]:
    """Make a dataclass raise ParameterError for unknown names, as ``check_names`` does."""
    make: Callable[..., None] = kind.__init__

    @functools.wraps(make)
    def checked(self: T, *values: Any, **given: Any) -> None:
        check_names(kind, given)
        make(self, *values, **given)

    kind.__init__ = checked  # type: ignore[method-assign,assignment]
    return kind


def check_fields(instance: DataclassInstance, prefix: str = "") -> None:
    """Check every field by its rule and keep the value that the rule returns; for ``__post_init__``."""
    for name, rule in rules_of(type(instance)).items():
        value = getattr(instance, name)
        checked = rule.take(f"{prefix}{name}", value)
        if checked is not value:
            object.__setattr__(instance, name, checked)
