"""Grammars of tool calls in the syntax of each family, in Lark (see ``structured.lark``).

What these grammars allow, the family's reader reads as calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.chat.values import ToolDefinition
from paceline.config.limits import MAX_SCHEMA_CHARACTERS
from paceline.errors import StructureError


def literal(text: str) -> str:
    """A text in a grammar."""
    return json.dumps(text, ensure_ascii=False)


def special(name: str) -> str:
    """A special token in a grammar; its letters in vocabularies without it."""
    return f"%special {json.dumps(name)}"


def json_schema(schema: object) -> str:
    """JSON that follows a schema."""
    return f"%json {json.dumps(schema)}"


def within_limit(parts: Iterable[str]) -> Iterator[str]:
    """The parts of a grammar, made one by one. Raises StructureError once they are longer than a grammar may be."""
    size = 0
    for part in parts:
        size += len(part)
        if size > MAX_SCHEMA_CHARACTERS:
            raise StructureError(f"the grammar of calls has more than the {MAX_SCHEMA_CHARACTERS} supported characters")
        yield part


def any_of(expressions: Iterable[str]) -> str:
    """One of several expressions. Raises StructureError if they are too long."""
    return f"({' | '.join(within_limit(expressions))})"


def enumerated(schema: object) -> list[Any] | None:
    """The values of an enumeration or constant, without those of another type; None for other schemas."""
    if not isinstance(schema, Mapping):
        return None
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list):
        return None
    return [value for value in values if _is_of_kind(schema, value)] or values  # without any, the schema is refused


def allows(schema: Mapping[str, Any], value: object) -> bool:
    """Whether a schema allows a value by its enumeration, types and alternatives; other keywords are not looked at."""
    values, options = enumerated(schema), schema.get("anyOf", schema.get("oneOf"))
    if values is not None:
        return json.dumps(value) in map(json.dumps, values)  # 1 and true are equal in Python
    if isinstance(options, list):
        return any(not isinstance(option, Mapping) or allows(option, value) for option in options)
    return _is_of_kind(schema, value)


_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
    "array": list,
    "object": dict,
}


def _is_of_kind(schema: Mapping[str, Any], value: object) -> bool:
    """Whether a value has one of the types in "type"."""
    types = schema.get("type")
    kinds = types if isinstance(types, list) else [types]
    if isinstance(value, bool):
        return types is None or "boolean" in kinds
    value = int(value) if isinstance(value, float) and value.is_integer() else value
    return types is None or any(isinstance(value, _TYPES.get(str(kind), object)) for kind in kinds)


def kinds_of(schema: Mapping[str, Any]) -> set[str] | None:
    """The types that a schema allows: those of "type", or string and null if ``anyOf`` is exactly these; else None."""
    kinds, options = schema.get("type"), schema.get("anyOf")
    if isinstance(kinds, str):
        return {kinds}
    if isinstance(kinds, list):
        return {kind for kind in kinds if isinstance(kind, str)}
    if not isinstance(options, list) or not all(isinstance(option, Mapping) for option in options):
        return None
    found = sorted(str(option.get("type")) for option in options if enumerated(option) is None)
    return {"string", "null"} if found == ["null", "string"] and len(options) == 2 else None


_PATTERN = re.compile(r'"pattern": "')  # the keyword; a property of this name has an object
_OF_ALL_ARGUMENTS = {"$ref", "anyOf", "oneOf", "allOf", "enum", "const", "minProperties", "maxProperties"}


def arguments_of(tool: ToolDefinition) -> Mapping[str, Any] | None:
    """Schemas of arguments that are written one by one, by name; None if any may be given.

    Raises StructureError for keywords that say more about all arguments together.
    """
    if joint := tool.parameters.keys() - without_joint_keywords(tool.parameters).keys():
        raise StructureError(
            f"the parameters have {min(joint)!r}, which the syntax of this model's calls cannot enforce"
        )
    return tool.properties


def check_strict(tool: ToolDefinition, schema: object) -> None:
    """Raise StructureError if a strict tool has a pattern for text that its syntax writes without quotes."""
    if tool.strict and _PATTERN.search(json.dumps(schema)):
        raise StructureError("the parameters have 'pattern', which the syntax of this model's calls cannot enforce")


def without_joint_keywords(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters without keywords that say more about all arguments together than names and single schemas do."""
    names = set(_OF_ALL_ARGUMENTS)
    if parameters.get("additionalProperties", {}) not in (True, False, {}):
        names.add("additionalProperties")
    return {name: value for name, value in parameters.items() if name not in names}


@dataclass(frozen=True)
class CallSyntax:
    """Syntax of a family's tool calls.

    begin: the text, names of special tokens included, that calls begin with. one: the rest of a call; raises
    StructureError for a tool that it cannot enforce. separator: what comes before the next call's ``begin``.
    at_start: whether calls are the whole answer, so that ``begin`` means something only there. single: whether an
    answer has one call at most. begin_rule: ``begin`` as a grammar, if it is not one text or token. rules: rules that
    ``one`` uses. by_name: whether arguments are written one by one, so that only those that are named may come.
    """

    begin: str
    one: Callable[[ToolDefinition], str]
    separator: str = ""
    at_start: bool = False
    single: bool = False
    begin_rule: str = ""
    rules: str = ""
    by_name: bool = False

    def forced(self, tools: Sequence[ToolDefinition], one_call: bool) -> str:
        """The grammar of an answer that is one call or, unless ``one_call``, several."""
        return f"start: {self._begin} rest\n{self._rest(tools, one_call or self.single)}"

    def or_text(self, tools: Sequence[ToolDefinition], one_call: bool, text: str) -> str:
        """The grammar of an answer that is calls, or else a text. text: its rule; it never begins as calls do."""
        return f"start: {self._begin} rest | {text}\n{self._rest(tools, one_call or self.single)}"

    @property
    def is_json(self) -> bool:
        """Whether a JSON text may begin as calls do."""
        return self.begin.startswith("{")

    def triggered(self, tools: Sequence[ToolDefinition], one_call: bool) -> str:
        """The grammar of what follows ``begin``."""
        return f"start: rest\n{self._rest(tools, one_call or self.single or not self.at_start)}"

    def repeats(self, one_call: bool) -> bool:
        """Whether text and further calls may follow a call that ``triggered`` describes."""
        return not (one_call or self.single or self.at_start)

    def _rest(self, tools: Sequence[ToolDefinition], one_call: bool) -> str:
        separator = f"{literal(self.separator)} " if self.separator else ""
        more = "" if one_call else f" ({separator}{self._begin} call)*"
        calls = "".join(within_limit(f"\ncall_{n}: {self.one(tool)}" for n, tool in enumerate(tools)))
        names = [f"call_{n}" for n in range(len(tools))]
        return f"rest: call{more}\ncall: {any_of(names)}{calls}\n{self.rules}\n"

    @property
    def _begin(self) -> str:
        return self.begin_rule or special(self.begin)


def json_call(arguments: str, before: str = "", end: str = "") -> Callable[[ToolDefinition], str]:
    """The rest of a call that is a JSON object. arguments: name of their member. before: text before the call's name.

    end: text or special token in the line after the object.
    """

    def one(tool: ToolDefinition) -> str:
        head = f'{before}{tool.name}", "{arguments}": '
        closing = f'"}}\\n" {special(end)}' if end else '"}"'
        return f"{literal(head)} {json_schema(dict(tool.parameters))} {closing}"

    return one
