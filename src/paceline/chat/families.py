"""Model families: how a model's answers are read, chosen from its chat template."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from paceline.chat.grammars import CallSyntax, json_call
from paceline.chat.hermes import BEGIN, END, reads_hermes
from paceline.chat.parser import GeneratorParser, OutputParser, Reader, openai_call_id, read_text
from paceline.chat.plain_json import reads_json
from paceline.chat.thinking import ThinkingMarkers, markers_in, reads_thinking
from paceline.chat.values import ToolDefinition
from paceline.errors import RequestError


@dataclass(frozen=True)
class ToolFormat:
    """Syntax of a family's tool calls.

    reads: makes the reader of an answer, given the tools. syntax: how a grammar writes calls. marker: text in chat
    templates of this family; "" if the family is chosen by name alone. special: special tokens of the syntax, which
    stay in the text that is parsed. new_id: makes the id of a call. instructions: the system text that tells a model
    of tools if its chat template has none; None if the family's templates always have.
    """

    name: str
    reads: Callable[[Sequence[ToolDefinition]], Reader]
    syntax: CallSyntax
    marker: str = ""
    special: tuple[str, ...] = ()
    new_id: Callable[[], str] = openai_call_id
    instructions: Callable[[Sequence[ToolDefinition]], str] | None = None

    def writes(self, name: str, arguments: str) -> str:
        """A call as text, for chat templates without tools. arguments: JSON text."""
        call = f'{{"name": {json.dumps(name)}, "arguments": {arguments}}}'
        return f"{BEGIN}\n{call}\n{END}" if self.name == "hermes" else call


def _instructions(example: str) -> Callable[[Sequence[ToolDefinition]], str]:
    """System text for chat templates without tools. example: how a call is written."""

    def text(tools: Sequence[ToolDefinition]) -> str:
        listed = "\n".join(json.dumps(tool.as_openai(), ensure_ascii=False) for tool in tools)
        return (
            f"You may call these functions, given as JSON with a schema of their arguments:\n{listed}\n\n"
            f"To call one, answer with a JSON object and nothing else:\n{example}"
        )

    return text


_CALL = '{"name": "<function>", "arguments": {<arguments>}}'
_FORMATS = (  # the first whose marker is in the template
    ToolFormat(
        "hermes",
        lambda tools: reads_hermes({tool.name for tool in tools}),
        CallSyntax(BEGIN, json_call("arguments", '\n{"name": "', f"\n{END}"), "\n"),
        BEGIN,
        (BEGIN, END),
        instructions=_instructions(f"{BEGIN}\n{_CALL}\n{END}"),
    ),
    ToolFormat(
        "json",
        lambda tools: reads_json({tool.name for tool in tools}),
        CallSyntax('{"name": "', json_call("arguments", "", ""), "\n", at_start=True),
        instructions=_instructions(_CALL),
    ),
)
FORMATS: Mapping[str, ToolFormat] = {form.name: form for form in _FORMATS}


@dataclass(frozen=True)
class ChatFormat:
    """How a model writes thoughts and tool calls. tools: None if its format is not known."""

    thinking: ThinkingMarkers | None
    tools: ToolFormat | None

    def parser(self, tools: Sequence[ToolDefinition] = (), inside_thoughts: bool = False) -> OutputParser:
        """Return a parser of one answer.

        tools: functions that the request offers; without any, calls are text. inside_thoughts: whether the prompt ends
        in an open block of thoughts (``thinking.begins_inside``).
        Raises RequestError if tools are given and their format is not known.
        """
        read = self.tool_format().reads(tools) if tools else read_text
        if self.thinking is not None:
            read = reads_thinking(self.thinking, inside_thoughts, read)
        return GeneratorParser(read, self.tools.new_id if self.tools is not None else openai_call_id)

    def tool_format(self) -> ToolFormat:
        """The syntax of tool calls. Raises RequestError if it is not known."""
        if self.tools is None:
            names = ", ".join(FORMATS)
            raise RequestError(f"the chat template names no known syntax of tool calls; choose a tool parser: {names}")
        return self.tools

    def special_tokens(self, tools: Sequence[ToolDefinition] = ()) -> tuple[str, ...]:
        """Special tokens that must stay in the text of an answer, because the parser reads them."""
        thinking = () if self.thinking is None else (self.thinking.begin.strip(), self.thinking.end)
        return (*thinking, *(self.tool_format().special if tools else ()))


def chat_format(chat_template: str, tool_parser: str | None = None) -> ChatFormat:
    """Return the format of a model's answers.

    tool_parser: name of the syntax of tool calls, one of ``FORMATS``; None chooses it by the template.
    """
    if tool_parser is not None:
        return ChatFormat(markers_in(chat_template), FORMATS[tool_parser])
    found = next((form for form in _FORMATS if form.marker and form.marker in chat_template), None)
    return ChatFormat(markers_in(chat_template), found)


def parser_for(
    chat_template: str,
    override: str | None = None,
    tools: Sequence[ToolDefinition] = (),
    inside_thoughts: bool = False,
) -> OutputParser:
    """Return the parser of one answer of a model with this chat template. See ``ChatFormat.parser``."""
    return chat_format(chat_template, override).parser(tools, inside_thoughts)
