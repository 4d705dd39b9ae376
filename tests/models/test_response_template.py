"""Response templates: messages as transformers reads them wherever an answer is cut, forced calls, hostile patterns."""

from __future__ import annotations

import functools
import json
import random
from typing import Any

import pytest
from transformers.utils.chat_parsing import parse_response

from paceline.chat.families import ChatFormat
from paceline.chat.values import AssistantMessage, TextDelta, ToolDefinition, message_of
from paceline.errors import RequestError
from paceline.models.text import limited_process
from paceline.models.text.limited_program import Answer, _reply
from paceline.models.text.response_program import _reads
from paceline.models.text.response_template import ResponseTemplate, format_of, response_template
from paceline.models.text.tokenizer import Tokenizer
from paceline.structured.calls import CallsStructure
from server_support import byte_tokenizer

ANCHOR = {"defaults": {"role": "assistant"}, "start_anchor": "<|assistant|>"}
AS_JSON: dict[str, Any] = {
    **ANCHOR,
    "fields": {
        "thinking": {"open": "<reason>", "close": "</reason>"},
        "tool_calls": {
            "open": "<call>",
            "close": "</call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": {"name": "{content.tool}", "arguments": "{content.input}"}},
        },
        "content": {"close": "<|end|>"},
    },
}
BY_PATTERNS: dict[str, Any] = {
    **ANCHOR,
    "fields": {
        "reasoning_content": {"open_pattern": r"\s*<reason>", "close_pattern": r"</reason>\s*"},
        "tool_calls": {
            "open_pattern": r"\s*<call (?P<name>\w+)>",
            "close": "</call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<(?P<key>\w+)>(?P<value>.*?)</\w+>"},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close_pattern": r"\s*<\|end\|>"},
    },
}
AS_LIST: dict[str, Any] = {
    **ANCHOR,
    "fields": {
        "tool_calls": {
            "open": "[calls]",
            "close": "[/calls]",
            "content": "python-call-list",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}},
            "transform_each": True,
        },
        "content": {},
    },
}
TOOLS = [
    ToolDefinition("add", parameters={"type": "object", "properties": {"a": {"type": "integer"}}}),
    ToolDefinition("ping"),
]
TEMPLATES = {"json": AS_JSON, "patterns": BY_PATTERNS, "list": AS_LIST}
ADD, PING = '<call>{"tool": "add", "input": {"a": 1}}</call>', '<call>{"tool": "ping", "input": {}}</call>'
ANSWERS = [
    ("json", "", f"<reason> hm <call> </reason>\n\nSo: \n{ADD}{PING}"),
    ("json", "<|user|>hi<|assistant|><reason>", "inside </reason> Only text <cal "),
    ("json", "", "Text<|end|>"),
    (
        "patterns",
        "<|assistant|>",
        "<reason>x</reason> Look: <call add><a>3</a><b>x y</b></call>\n<call ping></call><|end|>",
    ),
    ("patterns", "<|assistant|>\n<reason>", "because</reason>It < 3 <call"),
    ("list", "", "Sure [calls][add(a=1), ping()][/calls]"),
]


class InThisProcess:
    """Answers as ``LimitedProcess`` does, without a process, which takes half a second to start."""

    def __init__(self, template: dict[str, Any]) -> None:
        self._settings, self._made = {"template": template, "memory": limited_process.MEMORY}, list[Answer]()

    def exchange(self, line: str) -> dict[str, Any]:
        return _reply(_reads, self._made, self._settings, line)


@functools.cache
def format_of_name(name: str) -> ChatFormat:
    """The format of one of ``TEMPLATES``; a process reads all answers in JSON, this one the others."""
    return format_by(TEMPLATES[name], apart=name == "json")


def format_by(template: dict[str, Any], *, apart: bool) -> ChatFormat:
    """A format whose answers are read in a process of its own, or in this one."""
    responses = ResponseTemplate(template)
    if not apart:
        responses._process = InThisProcess(template)  # type: ignore[assignment]
    return format_of("{{ messages }}", None, responses)


def read(form: ChatFormat, text: str, prompt: str, cuts: tuple[int, ...] = ()) -> AssistantMessage:
    parser = form.parser(TOOLS, prompt=prompt)
    pieces = [text[start:end] for start, end in zip((0, *cuts), (*cuts, len(text)), strict=True)]
    events = [event for piece in pieces for event in parser.feed(piece)]
    shown = "".join(event.text for event in events if isinstance(event, TextDelta))
    assert "call" not in shown.replace("<cal ", "").replace("<call", "", int(text.endswith("<call"))), "it leaks"
    return message_of([*events, *parser.finish()])


def by_transformers(template: dict[str, Any], text: str, prompt: str) -> tuple[str | None, str, list[Any]]:
    tools = [tool.as_openai() for tool in TOOLS]
    found = parse_response(text, template, prefix=prompt, tools=tools)  # type: ignore[arg-type]
    calls = [call["function"] for call in found.get("tool_calls", [])]
    thoughts = found.get("thinking", found.get("reasoning_content"))
    return thoughts, found.get("content", ""), calls


@pytest.mark.parametrize(("name", "prompt", "text"), ANSWERS)
def test_answers_are_read_as_by_transformers_wherever_they_are_cut(name: str, prompt: str, text: str) -> None:
    form, places = format_of_name(name), random.Random(0)
    expected = by_transformers(TEMPLATES[name], text, prompt)
    assert any(expected[1:]), "the test shows something"
    for cuts in [
        (),
        tuple(range(1, len(text))),
        *(tuple(sorted(places.sample(range(len(text)), 5))) for _ in range(3)),
    ]:
        message = read(form, text, prompt, cuts)
        calls = [{"name": call.name, "arguments": json.loads(call.arguments)} for call in message.tool_calls]
        assert (message.reasoning, message.text, calls) == expected
        assert all(call.complete for call in message.tool_calls)


@pytest.mark.parametrize(
    "body", ["{oops", '{"input": {}}', '{"tool": 3, "input": {}}', '{"tool": "add", "input": [1]}']
)
def test_what_is_no_call_stays_text(body: str) -> None:
    message = read_alone(format_of_name("json"), f"A <call>{body}</call>")
    assert (message.text, message.tool_calls) == (f"A{body}", [])


def read_alone(form: ChatFormat, text: str, tools: list[ToolDefinition] | None = None) -> AssistantMessage:
    parser = form.parser(TOOLS if tools is None else tools, prompt="<|assistant|>")
    return message_of([*parser.feed(text), *parser.finish()])


def test_without_tools_calls_are_text_and_strict_ones_are_checked() -> None:
    form, call = format_of_name("json"), '{"tool": "add", "input": {"a": "x"}}'
    assert read_alone(form, f"<call>{call}</call>", []).text == call
    strict = [ToolDefinition("add", parameters={**TOOLS[0].parameters, "required": ["a"]}, strict=True)]
    assert read_alone(form, f"<call>{call}</call>", strict).tool_calls == []
    right = '<call>{"tool": "add", "input": {"a": 3}}</call>'
    assert [made.arguments for made in read_alone(form, right, strict).tool_calls] == ['{"a": 3}']


def test_a_family_that_is_known_keeps_its_own_syntax() -> None:
    responses = response_template(AS_JSON)
    assert format_of("<tool_call>", None, responses).responses is None
    assert format_of("", "json", responses).responses is None
    assert response_template(None) is None
    assert "<call>" in format_of_name("json").special_tokens()
    assert "<|end|>" in " ".join(format_of_name("patterns").special_tokens())


def test_forced_calls_follow_the_template_that_reads_them() -> None:
    """JSON between two texts is a grammar; patterns are none."""
    pytest.importorskip("llguidance", reason="structured outputs need the extra 'structured'")
    from chat.test_grammars import NUMBERS, walks
    from paceline.structured.grammars import Grammars

    form, made = format_of_name("json"), byte_tokenizer()
    made.add_special_tokens({"additional_special_tokens": ["<call>"]})  # "</call>" is spelled in letters
    tokenizer = Tokenizer.load(made)
    tools = [ToolDefinition("set", parameters=NUMBERS), ToolDefinition("ping")]
    structure = CallsStructure(form.tool_format().structure, tools, "forced", one_call=False)
    grammar = Grammars(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids).grammar(structure, lambda: False)
    for text in walks(grammar, tokenizer, 4):
        message = read_alone(form, text, tools)
        assert message.text == ""
        assert message.tool_calls
        assert all(json.loads(call.arguments).keys() in (set(), {"a", "kind", "on"}) for call in message.tool_calls)
    with pytest.raises(RequestError, match="finds calls by patterns, which no grammar can follow"):
        format_of_name("patterns").tool_format()


@pytest.fixture
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limited_process, "SECONDS", 1)


HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "exponential": ({"open_pattern": r"<call>(?:x|x|xx)+(?:!|\?)", "close": "z"}, "takes more than 1 seconds"),
    "a huge pattern": ({"open_pattern": r"(?:a{9999}){9999}", "close": "z"}, "takes more than|needs more than"),
    "no pattern": ({"open_pattern": "(", "close": "z"}, "invalid open_pattern"),
    "unknown": ({"open": "a", "program": "b"}, "unknown keys"),
    "no field": (["a"], "must be a dict"),  # type: ignore[dict-item]
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates_end_their_answers_alone(name: str, short_limits: None) -> None:
    field, message = HOSTILE[name]
    form = format_by({**ANCHOR, "fields": {"tool_calls": field, "content": {}}}, apart="more than" in message)
    with pytest.raises(RequestError, match=f"response template cannot read this answer: .*({message})"):
        form.parser(TOOLS, prompt="<|assistant|>").feed("<call>" + 60 * "x")
    if name == "exponential":  # the process starts again
        assert read_alone(form, "plain").text == "plain"


def test_a_template_that_is_nested_too_deeply_is_refused() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(RequestError, match="nested too deeply"):
        response_template({"fields": {"content": deep}})


def test_a_template_that_is_no_object_is_none() -> None:
    with pytest.raises(RequestError, match="it is no object with fields"):
        format_by({"fields": 3}, apart=False).parser(TOOLS, prompt="").feed("a")
