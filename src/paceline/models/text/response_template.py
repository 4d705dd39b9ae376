"""Reading of answers by a checkpoint's response template, where its chat template names no syntax that is known here.

A response template is transformers' description of an answer: its fields (thoughts, text, calls), what begins and ends
each, and how its text becomes a value. Its patterns are untrusted, so a subprocess with limits matches them.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.chat.families import ChatFormat, chat_format
from paceline.chat.parser import MessageWriter, Reader
from paceline.chat.reading import Reading, Source
from paceline.chat.responses import format_by_responses
from paceline.chat.strict import StrictTools
from paceline.chat.thinking import ThinkingMarkers
from paceline.chat.values import ToolDefinition
from paceline.errors import RequestError
from paceline.models.files.boundary import brief
from paceline.models.text.limited_process import LimitedProcess


class ResponseTemplate:
    """Reads answers by a response template, in one subprocess for all of them. Thread-safe."""

    def __init__(self, template: Mapping[str, Any]) -> None:
        self._template = template
        self._process = LimitedProcess("response_program.py", {"template": template})
        self._numbers = itertools.count()
        self._dropped: deque[int] = deque()

    def reads(self, tools: Sequence[ToolDefinition], prompt: str) -> Reader:
        """Return the reader of an answer. prompt: what it follows, which may begin its first field.

        The reader raises RequestError if the template is no such template, or exceeds a limit.
        """
        strict = StrictTools(tools)

        def read(source: Source, writer: MessageWriter) -> Reading[None]:
            number = next(self._numbers)
            opening: dict[str, Any] = {"prefix": prompt, "tools": [tool.as_openai() for tool in tools]}
            try:
                while (yield from source.available()):
                    piece = {"answer": number, "text": source.take(source.left), "ends": False}
                    self._read({**piece, **opening}, strict, writer)
                    opening = {}
                self._read({"answer": number, "text": "", "ends": True, **opening}, strict, writer)
            finally:
                self._dropped.append(number)

        return read

    def format(self, thinking: ThinkingMarkers | None) -> ChatFormat:
        """Return the format of answers. thinking: markers of thoughts that the chat template names."""
        return format_by_responses(self._template, self.reads, thinking)

    def _read(self, job: dict[str, Any], strict: StrictTools, writer: MessageWriter) -> None:
        dropped = [self._dropped.popleft() for _ in range(len(self._dropped))]
        reply = self._process.exchange(json.dumps({**job, "dropped": dropped}))
        if "error" in reply:
            raise RequestError(f"the model's response template cannot read this answer: {brief(reply['error'])}")
        for kind, *values in reply["events"]:
            if kind == "text":
                writer.text(*values)
            elif kind == "thoughts":
                writer.reasoning(*values)
            elif values[0] not in strict or strict.obeys(*values):
                writer.whole_call(*values)
            else:
                writer.text(json.dumps({"name": values[0], "arguments": values[1]}, ensure_ascii=False))


def response_template(template: object) -> ResponseTemplate | None:
    """Return what reads answers by the response template of a tokenizer's files; None if they have none.

    Raises RequestError for one that is nested too deeply.
    """
    known = importlib.util.find_spec("transformers.utils.chat_parsing") is not None
    try:
        return ResponseTemplate(template) if isinstance(template, Mapping) and known else None
    except RecursionError as error:
        raise RequestError("the model's response template is nested too deeply") from error


def format_of(chat_template: str, tool_parser: str | None, responses: ResponseTemplate | None) -> ChatFormat:
    """Return the format of a model's answers: that of its chat template or, if none is known, of its response template.

    tool_parser: see ``chat_format``.
    """
    form = chat_format(chat_template, tool_parser)
    return form if form.tools is not None or responses is None else responses.format(form.thinking)
