r"""Regular expressions, read by Python's own parser and written anew in the few signs that need no interpretation.

What differs between dialects (ECMA 262, which JSON schemas mean, and Python's), looks around or remembers is refused by
name. A pattern is matched by a whole text. \d, \w and \s are ASCII's; their opposites what ECMA says.
"""

from __future__ import annotations

import importlib
import re
import sys
import warnings
from collections.abc import Iterable
from typing import Any

from paceline.errors import StructureError

MAX_REPETITIONS = 128  # of a repetition
MAX_PATTERN_CHARACTERS = 2048  # of a pattern written out, every repetition as often as it may come

Ranges = tuple[tuple[int, int], ...]  # of code points, first and last, in order and apart
_parser: Any = importlib.import_module("re._parser")

_LAST = sys.maxunicode
_SURROGATES = ((0xD800, 0xDFFF),)
_CATEGORIES: dict[str, Ranges] = {
    "DIGIT": ((0x30, 0x39),),
    "WORD": ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)),
    "SPACE": ((0x09, 0x0D), (0x20, 0x20)),
}
_ECMA_SPACE: Ranges = (
    (0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029), (0x202F, 0x202F),
    (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF),
)  # fmt: skip
_LINE_ENDS: Ranges = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))
_DIALECTS = {
    r"\[\^?\]": "an empty class, or a class that begins with ]",
    r"\{,": "a count without its beginning; write {0,n}",
    r"\(\?(?!:)": "a group that looks around, sets flags, has a name or never goes back",
    r"\\[bB]": r"\b or \B, which look around",
    r"\\[AZz]": r"an anchor that not all dialects have; write ^ and $",
    r"\\a": r"\a, which dialects read differently",
    r"\\[1-9]": "what a group matched before",
}
_DIALECT = re.compile(r"\\\\|" + "|".join(f"({sign})" for sign in _DIALECTS))


# --- sets of characters ---------------------------------------------------------


def union(*parts: Iterable[tuple[int, int]]) -> Ranges:
    """Everything that is in one of them."""
    joined: list[tuple[int, int]] = []
    for first, last in sorted(each for part in parts for each in part):
        if joined and first <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(last, joined[-1][1]))
        else:
            joined.append((first, last))
    return tuple(joined)


def without(ranges: Ranges, taken: Iterable[tuple[int, int]]) -> Ranges:
    """What of the ranges is in none of those taken."""
    left: list[tuple[int, int]] = []
    cuts = union(taken)
    for first, last in ranges:
        for low, high in cuts:
            if high < first or low > last:
                continue
            if low > first:
                left.append((first, low - 1))
            first = high + 1
        if first <= last:
            left.append((first, last))
    return tuple(left)


def common(one: Ranges, other: Ranges) -> Ranges:
    """What is in both."""
    return without(one, without(((0, _LAST),), other))


def alphabet(unspelled: Iterable[int]) -> Ranges:
    """The characters that can be spelled where no token spells these bytes alone: those that do not begin with one."""
    missing = [_of_first_byte(byte) for byte in unspelled]
    return without(((0, _LAST),), union(_SURROGATES, *missing))


def _of_first_byte(byte: int) -> Ranges:
    """The characters whose UTF-8 begins with it."""
    if byte < 0x80:
        return ((byte, byte),)
    for low, high, bits in ((0xC2, 0xDF, 6), (0xE0, 0xEF, 12), (0xF0, 0xF4, 18)):
        if low <= byte <= high:
            first = (byte - (low & {6: 0xC0, 12: 0xE0, 18: 0xF0}[bits])) << bits
            return ((max(first, {6: 0x80, 12: 0x800, 18: 0x10000}[bits]), min(first + (1 << bits) - 1, _LAST)),)
    return ()


def named(ranges: Ranges) -> str:
    """Some of the characters, for messages."""
    return ", ".join(f"U+{first:04X}" + (f" to U+{last:04X}" if last > first else "") for first, last in ranges[:5])


def class_of(ranges: Ranges) -> str:
    """A set as a class of a regular expression."""
    return "[" + "".join(_sign(first) + (f"-{_sign(last)}" if last > first else "") for first, last in ranges) + "]"


def literal(text: str) -> str:
    """A regular expression that matches this text alone."""
    return "".join(_sign(ord(letter)) for letter in text)


def _sign(code: int) -> str:
    """A character in a spelling that no dialect reads as anything else, inside classes and outside."""
    letter = chr(code)
    if letter.isascii() and letter.isalnum():
        return letter
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


# --- patterns -------------------------------------------------------------------


def rewritten(pattern: object, spelled: Ranges) -> str:
    """A pattern in plain signs, without its anchors. Raises StructureError for what would not be followed.

    spelled: the characters that an answer can have.
    """
    return _Rewriter(pattern, spelled).text


class _Rewriter:
    def __init__(self, pattern: object, spelled: Ranges) -> None:
        if not isinstance(pattern, str):
            raise StructureError(f"a pattern is a text, not {pattern!r}")
        self._pattern, self._spelled = pattern, spelled
        self._check_dialect()
        parsed = self._parse()
        if (places := self._size(parsed)) > MAX_PATTERN_CHARACTERS:
            raise self._refusal(
                f"describes up to {places} characters, its counts multiplied; up to {MAX_PATTERN_CHARACTERS} can"
            )
        self.text = self._alternatives(parsed)

    def _refusal(self, why: str) -> StructureError:
        shown = self._pattern if len(self._pattern) <= 100 else f"{self._pattern[:100]}..."
        return StructureError(f"the pattern {shown!r} {why} be followed")

    def _check_dialect(self) -> None:
        for found in _DIALECT.finditer(self._pattern):
            if found.lastindex is not None:
                raise self._refusal(f"has {list(_DIALECTS.values())[found.lastindex - 1]}: it cannot")

    def _parse(self) -> Any:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return _parser.parse(self._pattern, re.ASCII)
        except (re.error, OverflowError) as error:
            raise self._refusal(f"is broken ({error}): it cannot") from error

    def _size(self, nodes: Any) -> int:
        return sum(self._size_of(str(code), given) for code, given in nodes)

    def _size_of(self, code: str, given: Any) -> int:
        if code in ("MAX_REPEAT", "MIN_REPEAT"):
            low, high, inner = given
            most = low if high == _parser.MAXREPEAT else high
            if most > MAX_REPETITIONS:
                raise self._refusal(f"counts to {most}; up to {MAX_REPETITIONS} can")
            return max(1, int(most)) * self._size(inner)
        if code == "BRANCH":
            return sum(map(self._size, given[1]))
        return self._size(given[3]) if code == "SUBPATTERN" else 1

    def _alternatives(self, nodes: Any) -> str:
        """The whole pattern, whose alternatives may each be anchored at both ends."""
        branches = nodes[0][1][1] if len(nodes) == 1 and str(nodes[0][0]) == "BRANCH" else [nodes]
        return "|".join(self._sequence(self._unanchored(list(branch))) for branch in branches)

    def _unanchored(self, nodes: list[Any]) -> list[Any]:
        while nodes and str(nodes[0][0]) == "AT" and str(nodes[0][1]) == "AT_BEGINNING":
            nodes = nodes[1:]
        while nodes and str(nodes[-1][0]) == "AT" and str(nodes[-1][1]) == "AT_END":
            nodes = nodes[:-1]
        return nodes

    def _sequence(self, nodes: Any) -> str:
        return "".join(self._node(str(code), given) for code, given in nodes)

    def _node(self, code: str, given: Any) -> str:
        if code in ("LITERAL", "NOT_LITERAL", "ANY", "IN"):
            return one_of(_characters(code, given), self._spelled)
        if code in ("MAX_REPEAT", "MIN_REPEAT"):
            low, high, inner = given
            return f"({self._sequence(inner)}){{{low},{'' if high == _parser.MAXREPEAT else high}}}"
        if code == "BRANCH":
            return f"({'|'.join(map(self._sequence, given[1]))})"
        if code == "SUBPATTERN" and not given[1] and not given[2]:
            return f"({self._sequence(given[3])})"
        if code == "AT":
            raise self._refusal("has an anchor inside: it cannot")
        raise self._refusal(f"has {code.lower().replace('_', ' ')}, which no grammar has: it cannot")


def _characters(code: str, given: Any) -> Ranges:
    if code == "ANY":
        return without(((0, _LAST),), _LINE_ENDS)
    if code == "LITERAL":
        return ((given, given),)
    if code == "NOT_LITERAL":
        return without(((0, _LAST),), ((given, given),))
    negated = str(given[0][0]) == "NEGATE"
    found = union(*(_member(str(kind), value) for kind, value in given[negated:]))
    return without(((0, _LAST),), found) if negated else found


def _member(kind: str, value: Any) -> Ranges:
    if kind == "LITERAL":
        return ((value, value),)
    if kind == "RANGE":
        return (value,)
    name = str(value).removeprefix("CATEGORY_")
    if not name.startswith("NOT_"):
        return _CATEGORIES[name]
    positive = name.removeprefix("NOT_")
    return without(((0, _LAST),), _ECMA_SPACE if positive == "SPACE" else _CATEGORIES[positive])


def one_of(ranges: Ranges, spelled: Ranges) -> str:
    """One character of a set, out of those that can be spelled. Raises StructureError if there is none."""
    possible = common(ranges, spelled)
    if not possible:
        raise _unspelled(ranges)
    if len(possible) == 1 and possible[0][0] == possible[0][1]:
        return literal(chr(possible[0][0]))
    return class_of(possible)


def check_spelled(text: str, spelled: Ranges) -> None:
    """Raises StructureError for a text with characters that cannot be spelled."""
    if missing := without(union((ord(letter), ord(letter)) for letter in text), spelled):
        raise _unspelled(missing)


def _unspelled(ranges: Ranges) -> StructureError:
    return StructureError(
        f"the model has no tokens to spell {named(ranges)}, which the structure asks for; escapes by number (\\u0001) "
        "are not written"
    )
