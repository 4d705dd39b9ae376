"""Tool calls in a section of their own, a name and JSON each, as Kimi K2 and DeepSeek V3 write them.

Kimi: <|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>
<|tool_calls_section_end|>. DeepSeek V3.1: the same with a bare name. DeepSeek V3 and R1: function, a separator, the
name in the same line, and the arguments in a block of JSON.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from paceline.chat.grammars import json_schema, literal, special
from paceline.chat.parser import MessageWriter, Reader
from paceline.chat.reading import NAME_STOP, MalformedError, Markers, Reading, Source, json_value
from paceline.chat.strict import StrictTools
from paceline.chat.values import ToolDefinition

_NUMBERED = re.compile(r"functions\.(.+):\d+")


@dataclass(frozen=True)
class Sections:
    """Special tokens of a section and its calls, and the text beside names and arguments.

    behind: the token between a call's head and the rest. numbered: whether the head is functions.NAME:NUMBER, which is
    the call's id, too. fenced: whether the head is "function", and name and arguments come behind the token.
    """

    begin: str
    begin_call: str
    behind: str
    end_call: str
    end: str
    numbered: bool = False
    fenced: bool = False

    @property
    def special(self) -> tuple[str, ...]:
        """The special tokens."""
        return self.begin, self.begin_call, self.behind, self.end_call, self.end


KIMI = Sections(
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
    numbered=True,
)
DEEPSEEK_V31 = Sections(
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
DEEPSEEK_V3 = replace(DEEPSEEK_V31, fenced=True)
_FENCE, _END_FENCE = "\n```json\n", "\n```"


def reads_sections(form: Sections, tools: Sequence[ToolDefinition]) -> Reader:
    """Return a reader of answers with such sections. Fenced and other calls are told apart by their heads."""
    begins, strict = Markers(form.begin), StrictTools(tools)

    def read(source: Source, writer: MessageWriter) -> Reading[None]:
        while (yield from begins.read(source, writer.text)) is not None:
            led, before = True, form.begin
            while True:
                source.record()
                yield from source.skip_space()
                if (yield from source.accept(form.end)):
                    source.recorded()
                    break
                if not (yield from source.accept(form.begin_call)) or not (
                    yield from _call(form, source, writer, strict, led=led)
                ):
                    rest = source.recorded()
                    writer.text(before + rest if before else rest.lstrip())
                    break
                led, before = False, ""

    return read


def _call(form: Sections, source: Source, writer: MessageWriter, strict: StrictTools, *, led: bool) -> Reading[bool]:
    """Read a call behind its first marker. Returns False if it is none: nothing was written.

    led: whether a grammar may have led it.
    """
    try:
        name, call_id, fenced = yield from _head(form, source)
    except MalformedError:
        return False
    if name in strict and not led:
        pieces: list[str] = []
        if not (yield from json_value(source, pieces.append)) or not strict.obeys(name, "".join(pieces)):
            return False
        source.recorded()
        writer.whole_call(name, "".join(pieces), call_id)
    else:
        source.recorded()
        writer.begin_call(name, call_id)
        complete = yield from json_value(source, writer.arguments)
        writer.end_call(complete)
        if not complete:
            return True
    yield from source.skip_space()
    if fenced:
        yield from source.accept(_END_FENCE.strip())
        yield from source.skip_space()
    yield from source.accept(form.end_call)
    return True


def _head(form: Sections, source: Source) -> Reading[tuple[str, str | None, bool]]:
    """Read up to the arguments -> name, id, and whether they are fenced. Raises MalformedError."""
    name = yield from source.take_while(NAME_STOP)
    yield from source.skip_space()
    yield from source.expect(form.behind)
    numbered = _NUMBERED.fullmatch(name) if form.numbered else None
    call_id = name if numbered else None
    fenced = name == "function" and not (yield from source.is_at("{"))
    if fenced:
        name = yield from source.take_while(NAME_STOP)
        yield from source.skip_space()
        yield from source.expect(_FENCE.strip())
    yield from source.skip_space()
    if not name or not (yield from source.is_at("{")):
        raise MalformedError
    return (numbered[1] if numbered else name), call_id, fenced


def writes_sections(form: Sections) -> Callable[[ToolDefinition], str]:
    """Return what writes the rest of a section with one call, after its begin marker, as a grammar."""
    end = f"{special(form.end_call)} {special(form.end)}"

    def one(tool: ToolDefinition) -> str:
        arguments = json_schema(dict(tool.parameters))
        begin, behind = special(form.begin_call), special(form.behind)
        if form.fenced:
            fence = literal(f"{tool.name}{_FENCE}")
            return f"{begin} {literal('function')} {behind} {fence} {arguments} {literal(_END_FENCE)} {end}"
        head = f"{literal(f'functions.{tool.name}:')} /[0-9]/" if form.numbered else literal(tool.name)
        return f"{begin} {head} {behind} {arguments} {end}"

    return one
