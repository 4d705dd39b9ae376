"""What a response template says of thoughts and calls beyond reading them: markers, and how a grammar writes calls.

A response template is transformers' description of an answer, which checkpoints ship. It is untrusted: only texts are
taken from it here. ``models.text.response_template`` reads answers by it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeAlias

from paceline.chat.families import FORMATS, ChatFormat, ToolFormat
from paceline.chat.grammars import CallSyntax, json_schema, literal, special
from paceline.chat.parser import Reader
from paceline.chat.thinking import ThinkingMarkers
from paceline.chat.values import ToolDefinition

Reads: TypeAlias = Callable[[Sequence[ToolDefinition], str], Reader]
"""Makes the reader of an answer, given the tools and the prompt."""

THOUGHTS = ("reasoning_content", "reasoning", "thinking")
CALLS = "tool_calls"


@dataclass(frozen=True)
class JsonCalls:
    """Calls as JSON objects between two markers. name, arguments: the objects' members."""

    begin: str
    end: str
    name: str
    arguments: str

    @property
    def syntax(self) -> CallSyntax:
        """How a grammar writes these calls."""
        marker = self.begin.rstrip()
        before, end = self.begin[len(marker) :], self.end.strip()
        closing = self.end[: self.end.index(end)]
        after = self.end[len(closing) + len(end) :]

        def one(tool: ToolDefinition) -> str:
            head = f"{before}{{{json.dumps(self.name)}: {json.dumps(tool.name)}, {json.dumps(self.arguments)}: "
            last = f" {literal(after)}" if after else ""
            return f"{literal(head)} {json_schema(dict(tool.parameters))} {literal('}' + closing)} {special(end)}{last}"

        return CallSyntax(marker, one)


def syntax_of(name: str) -> tuple[CallSyntax, str]:
    """Return the syntax of calls of a name, and the rule of what begins a text beside them.

    name: a name out of ``FORMATS``, or what ``ToolFormat.structure`` says of a response template.
    """
    if name not in FORMATS:
        return JsonCalls(**json.loads(name)).syntax, ""
    form = FORMATS[name]
    return form.syntax, "" if form.channels is None else form.channels.begin_text_rule


def format_by_responses(template: Mapping[str, Any], reads: Reads, thinking: ThinkingMarkers | None) -> ChatFormat:
    """Return the format of answers that a response template describes.

    reads: makes their readers. thinking: markers of thoughts that the chat template names, for templates that find
    thoughts by patterns.
    """
    fields = _object(template.get("fields"))
    calls = _json_calls(_object(fields.get(CALLS)))
    tools = None
    if calls is not None:
        named = json.dumps(asdict(calls))
        tools = ToolFormat("response_template", partial(_without_prompt, reads), calls.syntax, described=named)
    marks = tuple(mark.replace("\\", "") for mark in _texts(fields))
    return ChatFormat(_thinking(fields) or thinking, tools, reads, marks)


def _without_prompt(reads: Reads, tools: Sequence[ToolDefinition]) -> Reader:
    return reads(tools, "")


def _thinking(fields: Mapping[str, Any]) -> ThinkingMarkers | None:
    """Return what begins and ends thoughts, if both are texts."""
    found = (_object(fields.get(name)) for name in THOUGHTS)
    ends = next(((field["open"], field.get("close")) for field in found if "open" in field), ("", ""))
    begin, end = map(_text, ends)
    return ThinkingMarkers(begin, end, end, "") if begin and end else None


def _json_calls(field: Mapping[str, Any]) -> JsonCalls | None:
    """Return the form of calls, if it is JSON between two texts."""
    begin, end = _text(field.get("open")), _text(field.get("close"))
    if not begin.strip() or begin != begin.lstrip() or not end.strip() or field.get("content") != "json":
        return None
    transform = field.get("transform")
    function = "{content}" if transform is None else _object(transform).get("function")
    if function == "{content}":
        return JsonCalls(begin, end, "name", "arguments")
    places = [str(_object(function).get(member)) for member in ("name", "arguments")]
    members = [place.removeprefix("{content.").removesuffix("}") for place in places]
    if any(not member.isidentifier() for member in members):
        return None
    return JsonCalls(begin, end, *members)


def _object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _text(value: object) -> str:
    """Return a text, or the first of several; "" for anything else."""
    first = value[0] if isinstance(value, list) and value else value
    return first if isinstance(first, str) else ""


def _texts(value: object) -> Iterator[str]:
    """Yield all texts within a value."""
    rest = [value]
    while rest:  # files may be nested deeply
        one = rest.pop()
        if isinstance(one, str):
            yield one
        rest.extend(one.values() if isinstance(one, Mapping) else one if isinstance(one, list) else ())
