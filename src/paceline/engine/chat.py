"""Conversations: from messages and tools to a prompt, a parser of its answers and the rules that they follow."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from typing import Any

from paceline.chat.families import ChatFormat, ToolFormat
from paceline.chat.messages import for_template
from paceline.chat.options import ChatOptions
from paceline.chat.parser import OutputParser
from paceline.chat.thinking import ThoughtsSplitter, begins_inside, is_over
from paceline.chat.values import AssistantMessage, message_of
from paceline.config import SamplingParams, StructuredOutputs
from paceline.config.inputs import check_message
from paceline.core.rows import Constraint
from paceline.errors import ParameterError, RequestError, StructureError
from paceline.models.text.response_template import format_of
from paceline.models.text.tokenizer import Tokenizer
from paceline.structured.calls import ANY_OBJECT, CallsStructure
from paceline.structured.cursor import GrammarCursor
from paceline.structured.grammars import Grammar, Grammars
from paceline.structured.phases import AnswerRules, PhasedConstraint, Thinking, Trigger, overshoots
from paceline.structured.trial import UndecidedError

log = logging.getLogger("paceline")
_TAIL = 16  # last tokens of a prompt that show whether it begins the thoughts
_NO_ARGUMENTS = {"type": "object", "properties": {}}
ConstraintFactory = Callable[[], Constraint]


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation as a prompt. kept_special: special tokens that stay in the text of answers, for the parser.

    prompt_end: the rendered prompt's last characters; all of them for a response template. structure: form of the text
    of answers.
    """

    token_ids: list[int]
    options: ChatOptions
    format: ChatFormat
    kept_special: frozenset[int]
    prompt_end: str
    structure: StructuredOutputs | None = None

    def parser(self) -> OutputParser:
        """Return a parser of one answer."""
        inside = begins_inside(self.format.thinking, self.prompt_end)
        structured = self.structure is not None or self.options.tool_choice.forces_call
        return self.format.parser(self.options.offered, inside, structured, self.prompt_end)

    def splitter(self, stop: Sequence[str]) -> ThoughtsSplitter | None:
        """Return a splitter that keeps one answer's thoughts out of the search for these stop strings.

        Returns None if the whole answer is searched: the model has no thoughts, or a string contains their end marker.
        """
        form = self.format
        if not stop or form.thinking is None or any(form.thinking.end in text for text in stop):
            return None
        return form.splitter(begins_inside(form.thinking, self.prompt_end))

    def parsed(self, text: str) -> AssistantMessage:
        """Return the message of a complete answer."""
        parser = self.parser()
        return message_of([*parser.feed(text), *parser.finish()])


def chat_prompt(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], options: ChatOptions) -> ChatPrompt:
    """Render a conversation. Raises RequestError, ParameterError."""
    template = tokenizer.chat_template(tools=bool(options.tools))
    form = format_of(template, options.tool_parser, tokenizer.response_template)
    offered = options.offered
    converted, tools = for_template([*map(check_message, messages)], options.tools, form.tools, template)
    special = form.special_tokens(offered)  # raises if the syntax of calls is not known
    tokens = _encoded(tokenizer, converted, options.variables(template), tools)
    kept = frozenset[int]().union(*map(tokenizer.special_in, special))
    end = tokenizer.spell(tokens[-_TAIL:] if form.responses is None else tokens)
    return ChatPrompt(tokens, options, form, kept, end)


def _encoded(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]],
) -> list[int]:
    """Token ids of a conversation whose tools are as they were sent; completed only for templates that need that."""
    try:
        return tokenizer.chat(messages, variables, tools)
    except RequestError:
        completed = [_completed(tool) for tool in tools]
        if completed == list(tools):
            raise
        return tokenizer.chat(messages, variables, completed)


def _completed(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool with a description and parameters, empty ones if it has none."""
    function = {name: value for name, value in tool["function"].items() if value is not None}
    return {**tool, "function": {"description": "", "parameters": dict(_NO_ARGUMENTS), **function}}


def check_beside_rules(params: SamplingParams) -> None:
    """Raise ParameterError for parameters that cannot be combined with rules for an answer."""
    free = "left out with tools, structured outputs and max_thinking_tokens, which decide which tokens may come"
    if params.restriction not in ("", "structured_outputs"):
        raise ParameterError(params.restriction, getattr(params, params.restriction), free)
    if params.min_tokens:
        raise ParameterError("min_tokens", params.min_tokens, free)
    if params.ignore_eos:
        raise ParameterError("ignore_eos", True, free)


class ChatRules:
    """Makes the constraints of answers to conversations. Thread-safe.

    grammars: makes the compiler of grammars, which needs an optional package.
    """

    def __init__(self, tokenizer: Tokenizer, ends: Sequence[int], grammars: Callable[[], Grammars]) -> None:
        self._tokenizer, self._ends, self._grammars = tokenizer, frozenset(ends), grammars
        self._bytes_of = cache(tokenizer.token_bytes)
        self._overshoots = cache(partial(_overshoots, tokenizer))

    def compile(self, prompt: ChatPrompt, stopped: Callable[[], bool] = lambda: False) -> ConstraintFactory | None:
        """Return a factory for the constraint of one answer; None if the structure alone says what is allowed.

        stopped: see ``Grammars.grammar``.
        Raises StructureError, ParameterError, MissingPackageError.
        """
        thinking = self._thinking(prompt)
        if thinking is None and not prompt.options.offered:
            return None
        grammar, trigger = self._grammar(prompt, stopped)
        if grammar is None and (thinking is None or thinking.budget is None):
            return None
        if thinking is not None and grammar is not None and trigger is None:
            thinking = replace(thinking, overshoots=self._overshoots(thinking.end))
        rules = AnswerRules(
            thinking,
            None if grammar is None else lambda: GrammarCursor.at_start(grammar),
            trigger,
            self._ends,
            self._newlines if grammar is not None else (),
            self._bytes_of,
            self._header(prompt),
        )
        return lambda: PhasedConstraint(rules)

    def _header(self, prompt: ChatPrompt) -> tuple[int, ...]:
        """The tokens that begin the text of an answer that follows a structure. Calls have theirs in the grammar."""
        channels = prompt.format.channels
        if channels is None or prompt.structure is None or prompt.options.offered:
            return ()
        return self._encode(channels.begin_text)

    @property
    def _newlines(self) -> tuple[int, ...]:
        found = (self._tokenizer.encode(text, add_special_tokens=False) for text in ("\n", "\n\n"))
        return tuple(dict.fromkeys(tokens[0] for tokens in found if len(tokens) == 1))

    def _thinking(self, prompt: ChatPrompt) -> Thinking | None:
        markers, budget = prompt.format.thinking, prompt.options.max_thinking_tokens
        if markers is None and budget is not None:
            raise ParameterError("max_thinking_tokens", budget, "left out: the model's chat template has no thoughts")
        channels = prompt.format.channels
        begins_text = channels is not None and prompt.prompt_end.endswith(channels.begin_text)
        if markers is None or is_over(markers, prompt.prompt_end) or begins_text:
            return None
        return Thinking(
            markers.begin.encode(),
            markers.end.encode(),
            [*map(self._encode, (markers.begin,) if channels is None else (markers.begin, channels.begin_preamble))],
            begins_inside(markers, prompt.prompt_end),
            budget,
            self._encode(markers.closing),
            barred=() if channels is None else prompt.kept_special - self._tokenizer.special_in(markers.end),
            following=() if channels is None else self._encode(channels.after_thoughts),
        )

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def _grammar(self, prompt: ChatPrompt, stopped: Callable[[], bool]) -> tuple[Grammar | None, Trigger | None]:
        """The grammar that answers follow, and what it begins after; None: at the beginning."""
        options, structure = prompt.options, prompt.structure
        if not options.offered:
            return (None if structure is None else self._grammars().grammar(structure, stopped)), None
        forced = options.tool_choice.forces_call
        if prompt.format.responses is not None and prompt.format.tools is None and structure is None and not forced:
            return None, None  # calls that its response template finds are free
        form = prompt.format.tool_format()
        syntax = form.syntax
        calls = CallsStructure(form.structure, options.offered, "forced" if forced else "triggered", options.one_call)
        if structure is not None and not forced:
            calls = replace(calls, form="or_text", text=self._schema_beside_calls(structure, form, stopped))
        grammar = self._of_calls(calls, stopped)
        if forced or structure is not None:
            return grammar, None
        return grammar, Trigger(syntax.begin.encode(), syntax.at_start, syntax.repeats(options.one_call))

    def _of_calls(self, calls: CallsStructure, stopped: Callable[[], bool]) -> Grammar:
        """The grammar of calls. Schemas that cannot be enforced allow any object, unless their tool is strict."""
        try:
            grammar = self._grammars().grammar(calls, stopped)
        except UndecidedError:
            raise
        except StructureError as error:
            if error.field is not None:  # a strict tool that it names
                raise
            names = ", ".join(tool.name for tool in calls.tools)
            if any(tool.strict for tool in calls.tools):
                raise StructureError(f"tools {names}: {error}", "tools") from error
            _warn_once(f"arguments of {names} are not enforced, so they may be any JSON object: {error}")
            return self._grammars().grammar(calls.free, stopped)
        for note in grammar.notes:
            _warn_once(note)
        return grammar

    def _schema_beside_calls(
        self, structure: StructuredOutputs, form: ToolFormat, stopped: Callable[[], bool]
    ) -> dict[str, Any]:
        """The schema of a text that may come in place of calls. Raises RequestError, StructureError.

        An answer is a call if it begins as one: the text must not be able to.
        """
        if structure.json is None and not structure.json_object:
            raise RequestError(
                "beside tools, structured_outputs can only be json or json_object; leave out one of them"
            )
        if form.syntax.is_json:
            raise RequestError(
                f"calls in the syntax {form.name} could not be told from a structured answer: leave out tools, "
                "response_format or structured_outputs, or set tool_choice to required or none"
            )
        self._grammars().grammar(structure, stopped)  # so that its errors are told from those of the tools
        return ANY_OBJECT if structure.json is None else dict(json.loads(str(structure.json)))


def _overshoots(tokenizer: Tokenizer, end: bytes) -> Sequence[Sequence[int]]:
    return overshoots(end, [*map(tokenizer.token_bytes, range(tokenizer.vocab_size))])


@lru_cache(maxsize=1024)  # agents send the same tools in every request
def _warn_once(note: str) -> None:
    """Log what calls are not held to. Repeated warnings are left out."""
    log.warning("%s", note)
