"""Model families: how a model's answers are read, chosen from its chat template."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from paceline.chat import cohere, harmony, hermes, mistral
from paceline.chat.cohere import reads_cohere
from paceline.chat.gemma import FUNCTION_GEMMA, GEMMA4, GemmaMarkers, reads_gemma, value_rules, writes_gemma
from paceline.chat.grammars import CallSyntax, json_call
from paceline.chat.harmony import reads_harmony
from paceline.chat.hermes import reads_hermes
from paceline.chat.mistral import mistral_call_id, reads_mistral
from paceline.chat.parser import OutputParser, Reader, openai_call_id, read_text, reads_calls_or_text
from paceline.chat.plain_json import reads_json
from paceline.chat.sections import DEEPSEEK_V3, DEEPSEEK_V31, KIMI, Sections, reads_sections, writes_sections
from paceline.chat.tagged import GLM, MINIMAX, QWEN, Tags, reads_tagged, rules_of, writes_tagged
from paceline.chat.thinking import ThinkingMarkers, ThoughtsSplitter, markers_in, reads_thinking
from paceline.chat.values import ToolDefinition
from paceline.errors import RequestError


@dataclass(frozen=True)
class Channels:
    """How answers are written whose thoughts, calls and text are messages of their own.

    reads_structured: as ``ToolFormat.reads``, for answers that have to follow a grammar. after_thoughts: text between
    thoughts and the next message. begin_preamble: what begins a message to the user before the answer itself.
    begin_text: what begins the message of text. begin_text_rule: the same as a grammar.
    """

    reads_structured: Callable[[Sequence[ToolDefinition]], Reader]
    after_thoughts: str
    begin_preamble: str
    begin_text: str
    begin_text_rule: str


@dataclass(frozen=True)
class ToolFormat:
    """Syntax of a family's tool calls.

    reads: makes the reader of an answer, given the tools. syntax: how a grammar writes calls. marker: text in chat
    templates of this family; "" if the family is chosen by name alone. special: special tokens of the syntax, which
    stay in the text that is parsed. new_id: makes the id of a call. instructions: the system text that tells a model
    of tools if its chat template has none; None if the family's templates always have. channels: for families whose
    ``reads`` reads thoughts, and answers without tools, too; None for others. described: the syntax as JSON, if a
    checkpoint says it (``responses.JsonCalls``).
    """

    name: str
    reads: Callable[[Sequence[ToolDefinition]], Reader]
    syntax: CallSyntax
    marker: str = ""
    special: tuple[str, ...] = ()
    new_id: Callable[[], str] = openai_call_id
    instructions: Callable[[Sequence[ToolDefinition]], str] | None = None
    channels: Channels | None = None
    beside: str = ""
    described: str = ""

    @property
    def structure(self) -> str:
        """What ``responses.syntax_of`` knows the syntax by."""
        return self.described or self.name

    def fits(self, chat_template: str) -> bool:
        """Whether a chat template is of this family."""
        return bool(self.marker) and self.marker in chat_template and self.beside in chat_template

    def writes(self, name: str, arguments: str) -> str:
        """A call as text, for chat templates without tools. arguments: JSON text."""
        call = f'{{"name": {json.dumps(name)}, "arguments": {arguments}}}'
        return f"{hermes.BEGIN}\n{call}\n{hermes.END}" if self.name == "hermes" else call


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
_PYTHON_TAG = "<|python_tag|>"
_JSON_HEAD = '{"name": "'
_MISTRAL = (mistral.BEGIN, mistral.ARGS, mistral.CALL_ID)


def _gemma(name: str, markers: GemmaMarkers) -> ToolFormat:
    syntax = CallSyntax(markers.begin, writes_gemma(markers), rules=value_rules(markers.quote), by_name=True)
    special = (markers.begin, markers.end, markers.quote)
    return ToolFormat(name, partial(reads_gemma, markers), syntax, markers.begin, special)


def _tagged(name: str, tags: Tags, marker: str) -> ToolFormat:
    syntax = CallSyntax(tags.begin, writes_tagged(tags), "\n", rules=rules_of(tags), by_name=True)
    return ToolFormat(name, partial(reads_tagged, tags), syntax, marker, (tags.begin, tags.end))


def _sections(name: str, form: Sections, beside: str = "") -> ToolFormat:
    syntax = CallSyntax(form.begin, writes_sections(form))
    return ToolFormat(name, partial(reads_sections, form), syntax, form.begin, form.special, beside=beside)


_FORMATS = (  # the first whose marker is in the template
    ToolFormat(
        "harmony",
        reads_harmony,
        CallSyntax(
            harmony.BEGIN_CALL,
            harmony.write_call,
            single=True,
            begin_rule=harmony.BEGIN_RULE,
        ),
        harmony.CHANNEL + "analysis",
        harmony.SPECIAL,
        channels=Channels(
            partial(reads_harmony, structured=True),
            harmony.AFTER_THOUGHTS,
            harmony.BEGIN_PREAMBLE,
            harmony.BEGIN_TEXT,
            harmony.BEGIN_TEXT_RULE,
        ),
    ),
    _tagged("qwen_xml", QWEN, "<function="),
    _tagged("glm", GLM, "<arg_key>"),
    _tagged("minimax", MINIMAX, MINIMAX.begin),
    _sections("kimi", KIMI),
    _sections("deepseek_v3", DEEPSEEK_V3, beside="```json"),
    _sections("deepseek_v31", DEEPSEEK_V31),
    ToolFormat(
        "cohere",
        reads_cohere,
        CallSyntax(cohere.BEGIN, cohere.write_call, single=True),
        cohere.BEGIN,
        (cohere.BEGIN, cohere.END),
    ),
    ToolFormat(
        "hermes",
        reads_hermes,
        CallSyntax(hermes.BEGIN, json_call("arguments", hermes.HEAD, hermes.END), "\n"),
        hermes.BEGIN,
        (hermes.BEGIN, hermes.END),
        instructions=_instructions(f"{hermes.BEGIN}\n{_CALL}\n{hermes.END}"),
    ),
    ToolFormat(
        "mistral",
        partial(reads_mistral, in_array=False),
        CallSyntax(mistral.BEGIN, mistral.write_named_call),
        mistral.ARGS,
        _MISTRAL,
        mistral_call_id,
    ),
    ToolFormat(
        "mistral_json",
        partial(reads_mistral, in_array=True),
        CallSyntax(mistral.BEGIN, mistral.write_call, single=True),
        mistral.BEGIN,
        _MISTRAL,
        mistral_call_id,
    ),
    _gemma("gemma", GEMMA4),
    _gemma("function_gemma", FUNCTION_GEMMA),
    ToolFormat(
        "llama3",
        partial(reads_json, prefix=_PYTHON_TAG, led=_JSON_HEAD),
        CallSyntax(_JSON_HEAD, json_call("parameters"), "; ", at_start=True),
        _PYTHON_TAG,
        (_PYTHON_TAG,),
    ),
    ToolFormat(
        "json",
        partial(reads_json, led=_JSON_HEAD),
        CallSyntax(_JSON_HEAD, json_call("arguments"), "\n", at_start=True),
        instructions=_instructions(_CALL),
    ),
)
FORMATS: Mapping[str, ToolFormat] = {form.name: form for form in _FORMATS}


@dataclass(frozen=True)
class ChatFormat:
    """How a model writes thoughts and tool calls. tools: None if its format is not known.

    responses: makes the reader of an answer by the model's response template, given the tools and the prompt; None if
    another format is known. marks: texts of that template, which may have names of special tokens.
    """

    thinking: ThinkingMarkers | None
    tools: ToolFormat | None
    responses: Callable[[Sequence[ToolDefinition], str], Reader] | None = None
    marks: tuple[str, ...] = ()

    def parser(
        self,
        tools: Sequence[ToolDefinition] = (),
        inside_thoughts: bool = False,
        structured: bool = False,
        prompt: str = "",
    ) -> OutputParser:
        """Return a parser of one answer.

        tools: functions that the request offers; without any, calls are text. inside_thoughts: whether the prompt ends
        in an open block of thoughts (``thinking.begins_inside``). structured: whether an answer has to follow a
        grammar: it is calls alone or text alone. prompt: what the answer follows; only response templates look at it.
        Raises RequestError if tools are given and their format is not known.
        """
        new_id = openai_call_id if self.tools is None else self.tools.new_id
        if self.responses is not None and not structured:
            return OutputParser(self.responses(tools, prompt), new_id)
        if self.tools is not None and self.channels is not None:
            reads = self.channels.reads_structured if structured else self.tools.reads
            parser = OutputParser(reads(tools), new_id)
            parser.feed(self.thinking.begin if inside_thoughts and self.thinking is not None else "")
            return parser
        reader = self.tool_format().reads(tools) if tools else read_text
        if tools and structured:
            reader = reads_calls_or_text(self.tool_format().syntax.begin, reader)
        if self.thinking is not None:
            reader = reads_thinking(self.thinking, inside_thoughts, reader)
        return OutputParser(reader, new_id)

    def splitter(self, inside_thoughts: bool) -> ThoughtsSplitter | None:
        """Return a splitter of one answer into thoughts and text; None if the model has no thoughts."""
        if self.thinking is None:
            return None
        begin, end, channels = self.thinking.begin, self.thinking.end, self.channels
        if channels is None:
            return ThoughtsSplitter(end, {begin: True}, inside_thoughts, repeats=False)
        first = {begin: True, channels.begin_text: False}
        further = {channels.after_thoughts + opening: thinks for opening, thinks in first.items()}
        return ThoughtsSplitter(end, {**first, **further}, inside_thoughts, repeats=True)

    @property
    def channels(self) -> Channels | None:
        """How answers are written in channels; None if they are not."""
        return None if self.tools is None else self.tools.channels

    def tool_format(self) -> ToolFormat:
        """The syntax of tool calls. Raises RequestError if it is not known."""
        names = ", ".join(FORMATS)
        if self.tools is None and self.responses is not None:
            raise RequestError(
                "the model's response template finds calls by patterns, which no grammar can follow: leave tool_choice "
                f"at auto and response_format out, or choose a tool parser: {names}"
            )
        if self.tools is None:
            raise RequestError(f"the chat template names no known syntax of tool calls; choose a tool parser: {names}")
        return self.tools

    def special_tokens(self, tools: Sequence[ToolDefinition] = ()) -> tuple[str, ...]:
        """Markers whose special tokens must stay in the text of an answer, because the parser reads them."""
        thinking = () if self.thinking is None else (self.thinking.begin.strip(), self.thinking.end)
        if self.responses is not None:
            return (*thinking, *self.marks)
        has_calls = tools or self.channels is not None
        return (*thinking, *(self.tool_format().special if has_calls else ()))


def chat_format(chat_template: str, tool_parser: str | None = None) -> ChatFormat:
    """Return the format of a model's answers.

    tool_parser: name of the syntax of tool calls, one of ``FORMATS``; None chooses it by the template.
    """
    if tool_parser is None:
        tools = next((form for form in _FORMATS if form.fits(chat_template)), None)
    else:
        tools = FORMATS[tool_parser]
    names_markers = tools.marker if tools is not None and tools.channels is not None else chat_template
    return ChatFormat(markers_in(names_markers), tools)
