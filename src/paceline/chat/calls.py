"""Tool calls as JSON objects: {"name": ..., "arguments": {...}}."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from paceline.chat.parser import MessageWriter
from paceline.chat.reading import MalformedError, Reading, Source, json_string, json_value
from paceline.chat.strict import StrictTools

ARGUMENTS = ("arguments", "parameters")  # names of the member with the arguments
_NAMES = ("name", "tool_name")  # of that with the function's name; the second is Cohere's


@dataclass(frozen=True)
class _Header:
    """The beginning of a call. arguments: JSON text if they were read; None if they come next or never.

    arguments_follow: whether they are behind the name, and further members of the object may be behind them.
    """

    name: str
    arguments: str | None
    arguments_follow: bool


def read_call(
    source: Source, writer: MessageWriter, names: Collection[str] | None = None, strict: StrictTools | None = None
) -> Reading[bool]:
    """Read a JSON object as a call. Its arguments are written as they arrive once its name is known.

    names: functions that may be called; None for any. strict: tools whose calls are written only when they are complete
    and obey their schemas; None if a grammar has made sure of that. Returns False if the text is no such call: nothing
    was written, and the caller's recording of the source has what was read.
    """
    try:
        header = yield from _header(source)
        if names is not None and header.name not in names:
            return False
        if strict is not None and header.name in strict:
            if header.arguments_follow:
                header = replace(header, arguments=(yield from _whole_value(source)))
            if not strict.obeys(header.name, header.arguments or "{}"):
                return False
    except MalformedError:
        return False
    source.recorded()
    writer.begin_call(header.name)
    if not header.arguments_follow:
        writer.arguments(header.arguments or "{}")
        writer.end_call()
    elif header.arguments is not None or (yield from json_value(source, writer.arguments)):
        writer.arguments(header.arguments or "")
        writer.end_call()
        yield from _read_rest(source, writer)
    else:
        writer.end_call(complete=False)
    return True


def read_array(source: Source, writer: MessageWriter, strict: StrictTools, first: StrictTools | None) -> Reading[bool]:
    """Read calls up to the closing bracket. Returns False if the first is none; what follows the calls is text.

    first: None if a grammar leads the first call, else ``strict``.
    """
    yield from source.skip_space()
    if not (yield from read_call(source, writer, strict=first)):
        return False
    while True:
        source.record()
        yield from source.skip_space()
        if (yield from source.accept(",")):
            yield from source.skip_space()
            if (yield from read_call(source, writer, strict=strict)):
                continue
        elif (yield from source.accept("]")):
            source.recorded()
            return True
        writer.text(source.recorded().lstrip())
        return True


def _header(source: Source) -> Reading[_Header]:
    """Read up to the arguments of a call whose name is known, or to the object's end. Raises MalformedError."""
    name: str | None = None
    arguments: str | None = None
    yield from source.expect("{")
    while (key := (yield from _next_key(source))) is not None:
        if key in _NAMES and name is None:
            name = yield from json_string(source)
        elif key in ARGUMENTS and arguments is None:
            if name is not None:
                return _Header(name, None, arguments_follow=True)
            arguments = yield from _whole_value(source)
        else:
            yield from _whole_value(source)
    if name is None:
        raise MalformedError
    return _Header(name, arguments, arguments_follow=False)


def _read_rest(source: Source, writer: MessageWriter) -> Reading[None]:
    """Read the object's members after the arguments. What is no member becomes text."""
    source.record()
    try:
        while (yield from _next_key(source)) is not None:
            yield from _whole_value(source)
        source.recorded()
    except MalformedError:
        writer.text(source.recorded())


def _next_key(source: Source) -> Reading[str | None]:
    """Read the name of the next member and its colon; None at the object's end. Raises MalformedError."""
    yield from source.skip_space()
    if (yield from source.accept(",")):
        yield from source.skip_space()
    if (yield from source.accept("}")):
        return None
    key = yield from json_string(source)
    yield from source.skip_space()
    yield from source.expect(":")
    yield from source.skip_space()
    return key


def _whole_value(source: Source) -> Reading[str]:
    """Read a JSON value. Raises MalformedError if it is not complete."""
    pieces: list[str] = []
    if not (yield from json_value(source, pieces.append)):
        raise MalformedError
    return "".join(pieces)
