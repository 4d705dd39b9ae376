r"""Regular expressions, parsed by Python and rewritten with the few constructs that all dialects read alike.

Constructs that differ between dialects (ECMA 262, which JSON schemas use, and Python's), lookarounds and backreferences
are refused by name. \d, \w and \s are ASCII; \D, \W and \S follow ECMA. Anchors may stand where an alternative begins
or ends.
"""

from __future__ import annotations

import importlib
import re
import sys
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

from paceline.errors import StructureError
from paceline.structured.limits import MAX_REGEX_CHARACTERS

MAX_REPETITIONS = 128  # largest count of one repetition
MAX_PATTERN_CHARACTERS = 2048  # largest size of a pattern with all repetitions written out
_MAX_ALTERNATIVES = 64  # with groups that contain anchors written out

Ranges = tuple[tuple[int, int], ...]  # first and last code points, sorted and not adjacent
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
    r"\{,": "a count without a minimum; write {0,n}",
    r"\(\?(?!:)": "a lookaround, flags, a named or an atomic group",
    r"\\[bB]": r"a word boundary (\b or \B)",
    r"\\[AZz]": r"an anchor that not all dialects have; write ^ and $",
    r"\\a": r"\a, which dialects read differently",
    r"\\[1-9]": "a backreference",
}
# Behind them, what has none of these meanings: any other escape, and the characters of a class. A class without an end
# is one piece, too: searched for from each of its brackets, an end costs quadratic time.
_OTHERS = r"\\.|\[\^?(?:\\[^bBAZza1-9]|[^\]\\])++\]?"
_DIALECT = re.compile("|".join([r"\\\\", *(f"({sign})" for sign in _DIALECTS), _OTHERS]), re.DOTALL)


# --- sets of characters ---------------------------------------------------------


def union(*parts: Iterable[tuple[int, int]]) -> Ranges:
    """The code points that are in at least one of the parts."""
    joined: list[tuple[int, int]] = []
    for first, last in sorted(pair for part in parts for pair in part):
        if joined and first <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(last, joined[-1][1]))
        else:
            joined.append((first, last))
    return tuple(joined)


def without(ranges: Ranges, removed: Iterable[tuple[int, int]]) -> Ranges:
    """The code points of ``ranges`` that are not in ``removed``."""
    left: list[tuple[int, int]] = []
    cuts = union(removed)
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
    """The code points that are in both."""
    return without(one, without(((0, _LAST),), other))


def alphabet(unspelled: Iterable[int]) -> Ranges:
    """The characters that a model can generate.

    unspelled: bytes without a token of their own. Characters whose UTF-8 begins with one of them are left out.
    """
    missing = [_of_first_byte(byte) for byte in unspelled]
    return without(((0, _LAST),), union(_SURROGATES, *missing))


def _of_first_byte(byte: int) -> Ranges:
    """The characters whose UTF-8 encoding begins with this byte."""
    if byte < 0x80:
        return ((byte, byte),)
    for low, high, bits in ((0xC2, 0xDF, 6), (0xE0, 0xEF, 12), (0xF0, 0xF4, 18)):
        if low <= byte <= high:
            first = (byte - (low & {6: 0xC0, 12: 0xE0, 18: 0xF0}[bits])) << bits
            return ((max(first, {6: 0x80, 12: 0x800, 18: 0x10000}[bits]), min(first + (1 << bits) - 1, _LAST)),)
    return ()


def named(ranges: Ranges) -> str:
    """The first few ranges as text, for messages."""
    return ", ".join(f"U+{first:04X}" + (f" to U+{last:04X}" if last > first else "") for first, last in ranges[:5])


def class_of(ranges: Ranges) -> str:
    """The character class of a regular expression for these code points."""
    spans = (_escaped(first) + (f"-{_escaped(last)}" if last > first else "") for first, last in ranges)
    return "[" + "".join(spans) + "]"


def literal(text: str) -> str:
    """A regular expression that matches only this text."""
    return "".join(_escaped(ord(letter)) for letter in text)


def _escaped(code: int) -> str:
    """A character, escaped so that all dialects read it alike, inside classes and outside."""
    letter = chr(code)
    if letter.isascii() and letter.isalnum():
        return letter
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


# --- patterns -------------------------------------------------------------------


def rewritten(pattern: object, spelled: Ranges, *, searched: bool = False) -> str:
    """The pattern in portable constructs and without anchors, for texts that match as a whole.

    spelled: the characters that the model can generate. searched: whether text may come before and behind what matches,
    except at an anchor. Raises StructureError for a pattern that is not supported.
    """
    return _Rewriter(pattern, spelled).text(searched=searched)


class _Rewriter:
    def __init__(self, pattern: object, spelled: Ranges) -> None:
        if not isinstance(pattern, str):
            raise StructureError(f"a pattern has to be a text, not {pattern!r}")
        self._pattern, self._spelled = pattern, spelled
        if (length := len(pattern)) > MAX_REGEX_CHARACTERS:
            raise self._refusal(f"has {length} characters; up to {MAX_REGEX_CHARACTERS} are supported")
        self._check_dialect()
        parsed = self._parse()
        if (size := self._size(parsed)) > MAX_PATTERN_CHARACTERS:
            raise self._refusal(
                f"matches up to {size} characters, its counts multiplied; up to {MAX_PATTERN_CHARACTERS} are supported"
            )
        self._parsed = parsed
        self._alternatives = 1

    def text(self, *, searched: bool) -> str:
        """The pattern rewritten. Raises StructureError."""
        alternatives = [
            (begins, ends, self._sequence(inner))
            for begins, nodes in self._without_begin([*self._parsed])
            for ends, inner in self._without_end(nodes)
        ]
        if not searched:
            return "|".join(text for _, _, text in alternatives)
        branches: dict[tuple[bool, bool], list[str]] = {}
        for begins, ends, text in alternatives:
            branches.setdefault((begins, ends), []).append(text)
        anything = f"{class_of(self._spelled)}{{0,}}"
        return "|".join(
            f"{'' if begins else anything}({'|'.join(texts)}){'' if ends else anything}"
            for (begins, ends), texts in branches.items()
        )

    def _refusal(self, reason: str) -> StructureError:
        shown = self._pattern if len(self._pattern) <= 100 else f"{self._pattern[:100]}..."
        return StructureError(f"the pattern {shown!r} {reason}")

    def _check_dialect(self) -> None:
        for match in _DIALECT.finditer(self._pattern):
            if match.lastindex is not None:
                raise self._refusal(f"has {list(_DIALECTS.values())[match.lastindex - 1]}, which is not supported")

    def _parse(self) -> Any:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return _parser.parse(self._pattern, re.ASCII)
        except (re.error, OverflowError) as error:
            raise self._refusal(f"is broken ({error})") from error

    def _size(self, nodes: Any) -> int:
        """Characters that the nodes match at most, where an unlimited repetition counts with its minimum."""
        return sum(self._size_of(str(code), argument) for code, argument in nodes)

    def _size_of(self, code: str, argument: Any) -> int:
        if code in ("MAX_REPEAT", "MIN_REPEAT"):
            low, high, inner = argument
            count = low if high == _parser.MAXREPEAT else high
            if count > MAX_REPETITIONS:
                raise self._refusal(f"has a count of {count}; up to {MAX_REPETITIONS} are supported")
            return max(1, int(count)) * self._size(inner)
        if code == "BRANCH":
            return sum(map(self._size, argument[1]))
        return self._size(argument[3]) if code == "SUBPATTERN" else 1

    def _without_begin(self, nodes: list[Any]) -> Iterator[tuple[bool, list[Any]]]:
        """The alternatives of a sequence, each without the anchors at its beginning, and whether there were any."""
        if nodes and _is_anchor(nodes[0], "AT_BEGINNING"):
            yield from ((True, inner) for _, inner in self._without_begin(nodes[1:]))
        elif nodes and (groups := self._anchored(nodes[0])):
            for group in groups:
                yield from self._without_begin([*group, *nodes[1:]])
        else:
            yield False, nodes

    def _without_end(self, nodes: list[Any]) -> Iterator[tuple[bool, list[Any]]]:
        """The same for anchors at the end."""
        if nodes and _is_anchor(nodes[-1], "AT_END"):
            yield from ((True, inner) for _, inner in self._without_end(nodes[:-1]))
        elif nodes and (groups := self._anchored(nodes[-1])):
            for group in groups:
                yield from self._without_end([*nodes[:-1], *group])
        else:
            yield False, nodes

    def _anchored(self, node: Any) -> list[list[Any]]:
        """The alternatives of a group that has anchors; none for other nodes. Raises StructureError if too many."""
        groups = _groups_of(node) if _has_anchor([node]) else []
        self._alternatives += max(0, len(groups) - 1)
        if self._alternatives > _MAX_ALTERNATIVES:
            raise self._refusal(f"has more than {_MAX_ALTERNATIVES} alternatives with anchors, which are not supported")
        return groups

    def _sequence(self, nodes: Any) -> str:
        return "".join(self._node(str(code), argument) for code, argument in nodes)

    def _node(self, code: str, argument: Any) -> str:
        if code in ("LITERAL", "NOT_LITERAL", "ANY", "IN"):
            return one_of(_characters(code, argument), self._spelled)
        if code in ("MAX_REPEAT", "MIN_REPEAT"):
            low, high, inner = argument
            return f"({self._sequence(inner)}){{{low},{'' if high == _parser.MAXREPEAT else high}}}"
        if code == "BRANCH":
            return f"({'|'.join(map(self._sequence, argument[1]))})"
        if code == "SUBPATTERN" and not argument[1] and not argument[2]:
            return f"({self._sequence(argument[3])})"
        if code == "AT":
            raise self._refusal("has an anchor inside, which is not supported")
        raise self._refusal(f"has {code.lower().replace('_', ' ')}, which is not supported")


def _is_anchor(node: Any, name: str) -> bool:
    return str(node[0]) == "AT" and str(node[1]) == name


def _has_anchor(nodes: Any) -> bool:
    """Whether an anchor stands in a sequence or its groups, outside of repetitions."""
    return any(str(node[0]) == "AT" or any(map(_has_anchor, _groups_of(node))) for node in nodes)


def _groups_of(node: Any) -> list[list[Any]]:
    """The alternatives of a group; none for other nodes."""
    code, argument = str(node[0]), node[1]
    groups = argument[1] if code == "BRANCH" else [argument[3]] if code == "SUBPATTERN" else []
    return [[*group] for group in groups]


def _characters(code: str, argument: Any) -> Ranges:
    if code == "ANY":
        return without(((0, _LAST),), _LINE_ENDS)
    if code == "LITERAL":
        return ((argument, argument),)
    if code == "NOT_LITERAL":
        return without(((0, _LAST),), ((argument, argument),))
    negated = str(argument[0][0]) == "NEGATE"
    listed = union(*(_member(str(kind), value, negated) for kind, value in argument[negated:]))
    return without(((0, _LAST),), listed) if negated else listed


def _member(kind: str, value: Any, negated: bool) -> Ranges:
    r"""The characters of a class's member. White space that only some dialects know is in neither \s nor \S."""
    if kind == "LITERAL":
        return ((value, value),)
    if kind == "RANGE":
        return (value,)
    name = str(value).removeprefix("CATEGORY_")
    positive, complement = name.removeprefix("NOT_"), name.startswith("NOT_")
    category = _ECMA_SPACE if positive == "SPACE" and complement != negated else _CATEGORIES[positive]
    return without(((0, _LAST),), category) if complement else category


def one_of(ranges: Ranges, spelled: Ranges) -> str:
    """A regular expression for one of the characters that can be spelled. Raises StructureError if none can be."""
    possible = common(ranges, spelled)
    if not possible:
        raise _unspelled(ranges)
    if len(possible) == 1 and possible[0][0] == possible[0][1]:
        return literal(chr(possible[0][0]))
    return class_of(possible)


def check_spelled(text: str, spelled: Ranges) -> None:
    """Raise StructureError for a text with characters that cannot be spelled."""
    if missing := without(union((ord(letter), ord(letter)) for letter in text), spelled):
        raise _unspelled(missing)


def _unspelled(ranges: Ranges) -> StructureError:
    return StructureError(
        f"the model has no tokens to spell {named(ranges)}, which the structure needs; numeric escapes (\\u0001) are "
        "not generated"
    )
