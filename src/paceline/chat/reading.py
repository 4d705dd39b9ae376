"""Incremental reading of a model's output: parsers are generators that wait until enough text has arrived.

A parser is written as if it had the whole answer. Where it needs more than there is, it yields, and it goes on when
text has been added, so an answer gives the same events wherever it is cut into pieces.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator
from typing import TypeAlias, TypeVar

T = TypeVar("T")
Reading: TypeAlias = Generator[None, None, T]  # yields while it waits for text

SPACE = " \t\r\n"
_STRING_STOP = re.compile(r'["\\]')
_PLAIN_STOP = re.compile(r"[^\s:,0-9a-zA-Z.+-]")  # characters that are no part of numbers, names and separators
NAME_STOP = re.compile(r"[^a-zA-Z0-9_.:/-]")  # characters that are no part of a function's name
_SCALAR_STOP = re.compile(r"[^0-9a-zA-Z.+-]")


class MalformedError(Exception):
    """The text is not in the expected syntax."""


class Source:
    """Text of an answer: what has arrived and was not read yet."""

    def __init__(self) -> None:
        self._text, self._start = "", 0
        self._recordings: list[list[str]] = []  # the innermost is last
        self.ended = False

    def add(self, text: str) -> None:
        self._text, self._start = self._text[self._start :] + text, 0

    @property
    def left(self) -> int:
        """Number of characters that have arrived and were not read."""
        return len(self._text) - self._start

    def peek(self, size: int) -> str:
        """Return up to ``size`` characters without reading them."""
        return self._text[self._start : self._start + size]

    def take(self, size: int) -> str:
        """Read ``size`` characters; fewer if there are fewer."""
        text = self.peek(size)
        self._start += len(text)
        if self._recordings:
            self._recordings[-1].append(text)
        return text

    def put_back(self, text: str) -> None:
        """Undo reading of ``text``, which was read last. A recording must have begun before all of it, or be ended."""
        pieces, left = self._recordings[-1] if self._recordings else [], len(text)
        while pieces and left:
            piece = pieces.pop()
            if len(piece) > left:
                pieces.append(piece[:-left])
            left -= min(left, len(piece))
        dropped = max(0, len(text) - self._start)  # what ``add`` has dropped
        self._text, self._start = text[:dropped] + self._text, self._start + dropped - len(text)

    def find(self, pattern: re.Pattern[str]) -> int:
        """Return the number of characters before the first match; -1 if there is none."""
        match = pattern.search(self._text, self._start)
        return -1 if match is None else match.start() - self._start

    def record(self) -> None:
        """Begin to record what is read, also within another recording."""
        self._recordings.append([])

    def recorded(self) -> str:
        """End the last recording; return what was read meanwhile."""
        text = "".join(self._recordings.pop())
        if self._recordings:
            self._recordings[-1].append(text)
        return text

    def available(self) -> Reading[bool]:
        """Wait for a character. Returns False at the end of the answer."""
        while not self.left and not self.ended:
            yield
        return self.left > 0

    def is_at(self, marker: str) -> Reading[bool]:
        """Whether ``marker`` comes next; waits until that is certain. Nothing is read."""
        while not self.ended and self.left < len(marker) and marker.startswith(self.peek(len(marker))):
            yield
        return self.peek(len(marker)) == marker

    def accept(self, marker: str) -> Reading[bool]:
        """Read ``marker`` if it comes next. Returns whether it did."""
        found = yield from self.is_at(marker)
        if found:
            self.take(len(marker))
        return found

    def expect(self, marker: str) -> Reading[None]:
        """Read ``marker``. Raises MalformedError if something else comes next."""
        if not (yield from self.accept(marker)):
            raise MalformedError

    def skip_space(self) -> Reading[None]:
        """Read white space."""
        while (yield from self.available()) and self.peek(1) in SPACE:
            self.take(1)

    def take_while(self, stop: re.Pattern[str]) -> Reading[str]:
        """Read up to a character that matches ``stop``, or to the end of the answer."""
        pieces: list[str] = []
        while (yield from self.available()):
            size = self.find(stop)
            pieces.append(self.take(self.left if size < 0 else size))
            if size >= 0:
                break
        return "".join(pieces)


class Markers:
    """Texts that are searched for in an answer. What may be the beginning of one is held back."""

    def __init__(self, *markers: str) -> None:
        self._markers = sorted(markers, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, self._markers)) or r"(?!)")

    def read(self, source: Source, emit: Callable[[str], None]) -> Reading[str | None]:
        """Pass the text before the next marker to ``emit``, as it arrives; read and return the marker.

        Returns None at the end of the answer.
        """
        while (yield from source.available()):
            before = source.find(self._pattern)
            text = source.take(before if before >= 0 else source.left - self._held(source))
            if text:
                emit(text)
            if before >= 0:
                size = next(len(each) for each in self._markers if source.peek(len(each)) == each)
                return source.take(size)
            if source.left:  # the possible beginning of a marker
                if source.ended:
                    emit(source.take(source.left))
                else:
                    yield
        return None

    def _held(self, source: Source) -> int:
        """Number of last characters that may begin a marker."""
        longest = len(self._markers[0]) - 1 if self._markers else 0
        text = source.peek(source.left)
        sizes = range(min(longest, len(text)), 0, -1)
        return next((n for n in sizes if any(marker.startswith(text[-n:]) for marker in self._markers)), 0)


# --- JSON ---


def json_value(source: Source, emit: Callable[[str], None]) -> Reading[bool]:
    """Read one JSON value and pass it to ``emit`` as it arrives. Returns whether the value was complete.

    Its strings and brackets are followed to find the end; the value is not checked otherwise. Outside of strings a
    character that JSON has no use for ends it.
    """
    depth = 0
    while (yield from source.available()):
        character = source.peek(1)
        if character == '"':
            if not (yield from _json_string(source, emit)):
                return False
        elif character in "{[":
            depth += 1
            emit(source.take(1))
        elif character in "}]" and depth:
            depth -= 1
            emit(source.take(1))
        elif depth == 0 or source.find(_PLAIN_STOP) == 0:
            return (yield from _json_scalar(source, emit)) if depth == 0 else False
        else:
            size = source.find(_PLAIN_STOP)
            emit(source.take(source.left if size < 0 else size))
            continue
        if depth == 0:
            return True
    return False


def _json_scalar(source: Source, emit: Callable[[str], None]) -> Reading[bool]:
    text = yield from source.take_while(_SCALAR_STOP)
    emit(text)
    return is_json(text) and source.left > 0


def _json_string(source: Source, emit: Callable[[str], None]) -> Reading[bool]:
    emit(source.take(1))
    while (yield from source.available()):
        size = source.find(_STRING_STOP)
        if size < 0:
            emit(source.take(source.left))
            continue
        piece = source.take(size + 1)
        if piece[-1] == "\\" and (yield from source.available()):
            piece += source.take(1)
        elif piece[-1] == '"':
            emit(piece)
            return True
        emit(piece)
    return False


def json_string(source: Source) -> Reading[str]:
    """Read a JSON string; returns what it spells. Raises MalformedError."""
    if not (yield from source.is_at('"')):
        raise MalformedError
    pieces: list[str] = []
    if not (yield from _json_string(source, pieces.append)):
        raise MalformedError
    try:
        value = json.loads("".join(pieces), strict=False)
    except ValueError as error:
        raise MalformedError from error
    return str(value)


def is_json(text: str) -> bool:
    """Whether a text is one complete JSON value; NaN and Infinity, which Python reads, are none."""
    try:
        json.loads(text, parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        return False
    return True


def refuse_constant(name: str) -> None:
    """Raise ValueError: NaN and the infinities, which Python reads, are not JSON."""
    raise ValueError(f"{name} is not JSON")
