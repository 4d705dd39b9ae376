"""``ChatOptions``: what a conversation asks for beside its messages."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict, get_args

from paceline.chat.families import FORMATS
from paceline.chat.values import ToolChoice, ToolDefinition, ToolMode
from paceline.config.ranges import check, is_text, is_whole
from paceline.config.server import FIXED_VARIABLES
from paceline.errors import ParameterError

MAX_TOOLS = 512
_NAME = re.compile(r"[a-zA-Z0-9_.:/-]{1,128}")  # free of the characters that any family's syntax gives a meaning
_THINKING_SWITCHES = ("enable_thinking", "thinking")  # template variables that switch thoughts on and off


class ChatFields(TypedDict, total=False):
    """``ChatOptions`` as keyword arguments.

    tools: in OpenAI's form, {"type": "function", "function": {"name": ..., "parameters": {...}}}, which chat templates
    get as they are. tool_choice: "auto",
    "none", "required", {"type": "function", "function": {"name": ...}}, or, for some of the tools, {"type":
    "allowed_tools", "allowed_tools": {"mode": "auto" or "required", "tools": [{"type": "function", ...}, ...]}}.
    The others: see ``ChatOptions``.
    """

    tools: Sequence[Mapping[str, Any] | ToolDefinition]
    tool_choice: str | Mapping[str, Any] | ToolChoice
    parallel_tool_calls: bool
    tool_parser: str | None
    reasoning_effort: str | None
    max_thinking_tokens: int | None
    chat_template_kwargs: Mapping[str, Any] | None
    add_generation_prompt: bool


@dataclass(frozen=True)
class ChatOptions:
    """Options of a conversation. Raises ParameterError for a value that is not allowed.

    tools: functions that the model may call. tool_choice: which of them it may or has to call. parallel_tool_calls:
    whether an answer may have several calls. tool_parser: the syntax of calls; None chooses it by the chat template.
    reasoning_effort: for chat templates that know it; "none" switches thoughts off. max_thinking_tokens: tokens after
    which thoughts are ended. chat_template_kwargs: further variables of the chat template. add_generation_prompt:
    whether the prompt ends with the beginning of the assistant's turn. default_template_kwargs: variables that those
    and ``reasoning_effort`` override.
    """

    tools: Sequence[ToolDefinition] = ()
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    parallel_tool_calls: bool = True
    tool_parser: str | None = None
    reasoning_effort: str | None = None
    max_thinking_tokens: int | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    default_template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("parallel_tool_calls", "add_generation_prompt"):
            check(isinstance(getattr(self, name), bool), name, getattr(self, name), "true or false")
        known = ", ".join(FORMATS)
        check(self.tool_parser is None or self.tool_parser in FORMATS, "tool_parser", self.tool_parser, known)
        effort, limit = self.reasoning_effort, self.max_thinking_tokens
        allowed = "a word, such as none, low, medium or high"
        check(effort is None or (is_text(effort) and effort.isalpha()), "reasoning_effort", effort, allowed)
        allowed = "a whole number of at least 0"
        check(limit is None or (is_whole(limit) and limit >= 0), "max_thinking_tokens", limit, allowed)
        self._check_choice()

    @staticmethod
    def of(given: Mapping[str, Any]) -> ChatOptions:
        """Options from ``ChatFields``: OpenAI's forms of tools and of their choice. Raises ParameterError."""
        checked: dict[str, Any] = {
            "tools": tools_of(given.get("tools") or ()),
            "tool_choice": choice_of(given.get("tool_choice", "auto")),
            "chat_template_kwargs": template_variables(given.get("chat_template_kwargs")),
        }
        return ChatOptions(**{**given, **checked})

    def _check_choice(self) -> None:
        choice, names = self.tool_choice, [tool.name for tool in self.tools]
        for name in (choice.allowed or ()) if choice.name is None else (choice.name,):
            check(name in names, "tool_choice", name, "the name of one of the tools")
        check(bool(self.offered) or not choice.forces_call, "tool_choice", choice.mode, "auto or none without tools")

    @property
    def offered(self) -> Sequence[ToolDefinition]:
        """The tools that the answer may call."""
        choice = self.tool_choice
        if choice.name is not None:
            return [tool for tool in self.tools if tool.name == choice.name]
        if choice.allowed is not None:
            return [tool for tool in self.tools if tool.name in choice.allowed]
        return () if choice.mode == "none" else self.tools

    @property
    def one_call(self) -> bool:
        """Whether the answer may have one call at most."""
        return self.tool_choice.name is not None or not self.parallel_tool_calls

    def variables(self, chat_template: str) -> dict[str, Any]:
        """Variables for the chat template. Raises ParameterError for those that it has no use for."""
        given = dict(self.chat_template_kwargs)
        check_variables(given, chat_template)
        known = {**self.default_template_kwargs, **self._effort(chat_template), **given}
        return {**known, "add_generation_prompt": self.add_generation_prompt}

    def _effort(self, chat_template: str) -> dict[str, Any]:
        effort = self.reasoning_effort
        if effort is None:
            return {}
        switches = [name for name in _THINKING_SWITCHES if _names(chat_template, name)]
        variables: dict[str, Any] = dict.fromkeys(switches, effort != "none")
        if _names(chat_template, "reasoning_effort"):
            variables["reasoning_effort"] = effort
        allowed = "left out or none: the model's chat template knows no such setting"
        check(bool(variables) or effort == "none", "reasoning_effort", effort, allowed)
        return variables


def check_variables(names: Iterable[str], chat_template: str) -> None:
    """Raise ParameterError for variables that a chat template has no use for."""
    for name in names:
        allowed = "a variable that the model's chat template names"
        check(_names(chat_template, name), "chat_template_kwargs", name, allowed)


def _names(chat_template: str, variable: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(variable)}(?!\w)", chat_template) is not None


def template_variables(given: object) -> dict[str, Any]:
    """Variables of a chat template, checked. Raises ParameterError."""
    allowed = f"a dictionary from names in the chat template to values, without {', '.join(FIXED_VARIABLES)}"
    fields = {} if given is None else given
    named = isinstance(fields, dict) and all(isinstance(name, str) for name in fields)
    ok = named and fields.keys().isdisjoint(FIXED_VARIABLES)  # type: ignore[attr-defined]
    check(ok, "chat_template_kwargs", given, allowed)
    return dict(fields)  # type: ignore[call-overload, no-any-return]


def tools_of(given: object) -> tuple[ToolDefinition, ...]:
    """Tools in OpenAI's form, or already read. Raises ParameterError."""
    allowed = f"a list of at most {MAX_TOOLS} functions, each with a name of its own"
    if not isinstance(given, Sequence) or isinstance(given, (str, bytes)) or len(given) > MAX_TOOLS:
        raise ParameterError("tools", given, allowed)
    tools = tuple(tool if isinstance(tool, ToolDefinition) else _tool(tool) for tool in given)
    for tool in tools:
        check(_NAME.fullmatch(tool.name) is not None, "tools", tool.name, f"names of the form {_NAME.pattern}")
    check(len({tool.name for tool in tools}) == len(tools), "tools", [tool.name for tool in tools], allowed)
    return tools


def _tool(given: object) -> ToolDefinition:
    function = given.get("function") if isinstance(given, Mapping) and given.get("type") == "function" else None
    allowed = 'objects of the form {"type": "function", "function": {"name": ..., "parameters": {...}}}'
    if not isinstance(function, Mapping):
        raise ParameterError("tools", given, allowed)
    name, description = function.get("name"), function.get("description") or ""
    parameters, strict = function.get("parameters"), function.get("strict") or False
    parameters = {"properties": {}} if parameters is None else parameters
    ok = is_text(name) and is_text(description) and isinstance(strict, bool) and isinstance(parameters, dict)
    assert isinstance(given, Mapping)
    check(ok and _is_json(dict(given)), "tools", given, allowed)
    parameters = _resolved(dict(parameters))
    kind = parameters.get("type", "object")
    check(kind == "object", "tools", kind, "functions whose parameters are an object")
    if not parameters.keys() & {"$ref", "anyOf", "oneOf", "allOf"}:
        parameters["type"] = kind
    return ToolDefinition(str(name), str(description), parameters, strict, dict(given))


def _resolved(parameters: dict[str, Any]) -> dict[str, Any]:
    """The parameters in place of a reference to a definition, as pydantic describes recursive models."""
    definitions, target = parameters.get("$defs"), str(parameters.get("$ref")).removeprefix("#/$defs/")
    definition = definitions.get(target) if isinstance(definitions, Mapping) else None
    if not isinstance(definition, Mapping) or parameters.keys() - {"$defs", "$ref", "description", "title"}:
        return parameters
    return {**definition, "$defs": definitions}


def _is_json(value: object) -> bool:
    try:
        return is_text(json.dumps(value, ensure_ascii=False))
    except (TypeError, ValueError, RecursionError):
        return False


def choice_of(given: object) -> ToolChoice:
    """A tool choice in OpenAI's form, or already read. Raises ParameterError."""
    if isinstance(given, ToolChoice):
        return given
    if isinstance(given, str) and given in get_args(ToolMode):
        return ToolChoice(given)  # type: ignore[arg-type]
    name = _function_name(given)
    choice = _allowed_tools(given) if name is None else ToolChoice("required", name)
    if choice is None:
        allowed = (
            'auto, none, required, {"type": "function", "function": {"name": ...}} or {"type": "allowed_tools", ...}'
        )
        raise ParameterError("tool_choice", given, allowed)
    return choice


def _allowed_tools(given: object) -> ToolChoice | None:
    """The choice in {"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}; None otherwise."""
    among = given.get("allowed_tools") if isinstance(given, Mapping) and given.get("type") == "allowed_tools" else None
    mode, tools = (among.get("mode"), among.get("tools")) if isinstance(among, Mapping) else (None, None)
    if mode not in ("auto", "required") or not isinstance(tools, (list, tuple)):
        return None
    names = [name for name in map(_function_name, tools) if name is not None]
    return ToolChoice(mode, allowed=tuple(names)) if len(names) == len(tools) else None


def _function_name(given: object) -> str | None:
    """The name in {"type": "function", "function": {"name": ...}}; None for anything else."""
    function = given.get("function") if isinstance(given, Mapping) and given.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None
