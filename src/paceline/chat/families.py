"""Model families: how a model's answers are read, chosen from its chat template."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from paceline.chat.hermes import read_hermes
from paceline.chat.parser import GeneratorParser, OutputParser, Reader, openai_call_id, read_text
from paceline.chat.plain_json import reads_json
from paceline.chat.thinking import ThinkingMarkers, markers_in, reads_thinking
from paceline.chat.values import ToolDefinition
from paceline.errors import RequestError


@dataclass(frozen=True)
class ToolFormat:
    """Syntax of a family's tool calls.

    reads: makes the reader of an answer, given the tools. marker: text in chat templates of this family; "" if the
    family is chosen by name alone. special: special tokens of the syntax, which stay in the text that is parsed.
    new_id: makes the id of a call.
    """

    name: str
    reads: Callable[[Sequence[ToolDefinition]], Reader]
    marker: str = ""
    special: tuple[str, ...] = ()
    new_id: Callable[[], str] = openai_call_id


_FORMATS = (  # the first whose marker is in the template
    ToolFormat("hermes", lambda _: read_hermes, "<tool_call>", ("<tool_call>", "</tool_call>")),
    ToolFormat("json", lambda tools: reads_json({tool.name for tool in tools})),
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
        read = self._tool_format().reads(tools) if tools else read_text
        if self.thinking is not None:
            read = reads_thinking(self.thinking, inside_thoughts, read)
        return GeneratorParser(read, self.tools.new_id if self.tools is not None else openai_call_id)

    def _tool_format(self) -> ToolFormat:
        if self.tools is None:
            names = ", ".join(FORMATS)
            raise RequestError(f"the chat template names no known syntax of tool calls; choose a tool parser: {names}")
        return self.tools

    def special_tokens(self, tools: Sequence[ToolDefinition] = ()) -> tuple[str, ...]:
        """Special tokens that must stay in the text of an answer, because the parser reads them."""
        thinking = () if self.thinking is None else (self.thinking.begin.strip(), self.thinking.end)
        return (*thinking, *(self._tool_format().special if tools else ()))


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
