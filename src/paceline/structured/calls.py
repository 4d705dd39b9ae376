"""Calls of tools as structures: grammars in the syntax of a model's family."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

from paceline.chat.grammars import CallSyntax, json_schema, without_joint_keywords
from paceline.chat.responses import syntax_of
from paceline.chat.values import ToolDefinition
from paceline.errors import StructureError
from paceline.structured.limits import GrammarLimits
from paceline.structured.schemas import grammar_of, weakened

ANY_OBJECT = {"type": "object"}
_MAX_REASONS = 500  # characters
_SAYING = {"properties", "additionalProperties", "anyOf", "oneOf", "allOf", "$ref"}  # about more than any object


@dataclass(frozen=True)
class CallsStructure:
    """Calls as the required form of an answer, or of what follows the marker that begins them.

    syntax: see ``chat.responses.syntax_of``. form: "forced" for an answer of calls, "or_text" for one of calls or of
    JSON that follows ``text``, a schema, "triggered" for what follows the marker. one_call: whether there may be one
    call only.
    """

    syntax: str
    tools: Sequence[ToolDefinition]
    form: Literal["forced", "or_text", "triggered"]
    one_call: bool
    text: Mapping[str, Any] | None = None

    def as_text(self) -> str:
        """All of it as JSON, without descriptions, which say nothing about the grammar. Raises StructureError."""
        tools = [{"name": t.name, "parameters": dict(t.parameters), "strict": t.strict} for t in self.tools]
        try:
            return json.dumps({**vars(self), "tools": tools})
        except RecursionError as error:
            raise StructureError("a schema is nested too deeply to be followed") from error

    @property
    def free(self) -> CallsStructure:
        """The same with any JSON object as arguments."""
        return replace(self, tools=[replace(tool, parameters=ANY_OBJECT) for tool in self.tools])


def grammar_of_calls(text: str, unspelled: Collection[int], limits: GrammarLimits) -> tuple[str, list[str]]:
    """The Lark grammar of the calls that ``CallsStructure.as_text`` describes, and notes on what it does not enforce.

    Raises StructureError if the grammar is too long, or, with the field "tools", if a strict tool cannot be enforced.
    """
    job = json.loads(text)
    syntax, begin = syntax_of(job["syntax"])
    notes = list[str]()
    tools = [_enforceable(ToolDefinition(**tool), syntax, unspelled, limits, notes) for tool in job["tools"]]
    if job["form"] == "or_text":
        return syntax.or_text(tools, job["one_call"], f"{begin} {json_schema(job['text'])}"), notes
    write = syntax.forced if job["form"] == "forced" else syntax.triggered
    return write(tools, job["one_call"]), notes


def _enforceable(
    tool: ToolDefinition, syntax: CallSyntax, unspelled: Collection[int], limits: GrammarLimits, notes: list[str]
) -> ToolDefinition:
    """The tool, without what cannot be enforced of its schema. Raises StructureError if it is strict."""

    def check(tool: ToolDefinition) -> ToolDefinition:
        grammar_of("schema", json.dumps(tool.parameters), unspelled, limits=limits)
        syntax.one(tool)
        return tool

    try:
        return check(tool)
    except StructureError as error:
        if tool.strict:
            raise StructureError(f"tool {tool.name}: {error}", "tools") from error
        reason = str(error)
    with suppress(StructureError):
        parameters, reasons = weakened(dict(tool.parameters), unspelled, limits)
        reason = "; ".join(dict.fromkeys([*reasons, reason]))[:_MAX_REASONS]
        open_before, is_open = (schema.get("additionalProperties") is True for schema in (tool.parameters, parameters))
        for weaker in (parameters, without_joint_keywords(parameters)):
            with suppress(StructureError):
                if weaker.keys() & _SAYING and not (syntax.by_name and is_open and not open_before):
                    enforceable = check(replace(tool, parameters=weaker))
                    notes.append(f"arguments of {tool.name} follow their schema but for this: {reason}")
                    return enforceable
    notes.append(f"arguments of {tool.name} are not enforced, so they may be any JSON object: {reason}")
    return replace(tool, parameters=ANY_OBJECT)
