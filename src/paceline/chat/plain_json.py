"""Tool calls as JSON alone: one object, or an array of them, also in a Markdown fence."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from paceline.chat.calls import read_call
from paceline.chat.parser import MessageWriter, Reader
from paceline.chat.reading import Reading, Source
from paceline.chat.strict import StrictTools
from paceline.chat.values import ToolDefinition

_FENCES = ("```json\n", "```\n")


def reads_json(tools: Sequence[ToolDefinition], prefix: str = "", led: str = "") -> Reader:
    """Return a reader of answers that begin with a call of one of these functions; other answers are text.

    prefix: what may come before the call. led: what answers begin with that a grammar leads from there on; "" if none
    does.
    """
    names, strict = {tool.name for tool in tools}, StrictTools(tools)

    def read(source: Source, writer: MessageWriter) -> Reading[None]:
        source.record()
        yield from source.skip_space()
        unled = None if led and (yield from source.is_at(led)) else strict
        if prefix:
            yield from source.accept(prefix)
            yield from source.skip_space()
        fenced = yield from _accept_any(source, _FENCES)
        yield from source.skip_space()
        in_array = yield from source.accept("[")
        yield from source.skip_space()
        if not (yield from read_call(source, writer, names, unled)):
            writer.text(source.recorded())
            return
        yield from _more_calls(source, writer, names, unled)
        if in_array:
            yield from source.accept("]")
        yield from source.skip_space()
        if fenced:
            yield from source.accept("```")

    return read


def _more_calls(
    source: Source, writer: MessageWriter, names: Collection[str], strict: StrictTools | None
) -> Reading[None]:
    """Read calls that follow the first one, after commas, semicolons or white space."""
    while True:
        source.record()
        yield from source.skip_space()
        if not (yield from source.accept(",")):
            yield from source.accept(";")
        yield from source.skip_space()
        if not (yield from source.is_at("{")):
            writer.text(source.recorded().strip())
            return
        if not (yield from read_call(source, writer, names, strict)):
            writer.text(source.recorded())
            return


def _accept_any(source: Source, markers: tuple[str, ...]) -> Reading[bool]:
    for marker in markers:
        if (yield from source.accept(marker)):
            return True
    return False
