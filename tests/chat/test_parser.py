"""Parsers of recorded answers: the same message wherever an answer is cut, and text where it is no call."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

import pytest

from paceline.chat.families import FORMATS, ChatFormat, chat_format
from paceline.chat.parser import MessageWriter
from paceline.chat.thinking import KNOWN
from paceline.chat.values import (
    AssistantMessage,
    MessageEvent,
    TextDelta,
    ToolCallArgumentsDelta,
    ToolCallEnd,
    ToolCallStart,
    ToolDefinition,
    message_of,
)

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "array"}, "n": {"type": "integer"}},
}
TOOLS = [ToolDefinition("get_weather", parameters=WEATHER), ToolDefinition("add")]
HARMONY = "<|channel|>analysis<|message|>"
TEMPLATES = {
    "hermes": "<tool_call>",
    "thinking": "<think></think><tool_call>",
    "json": "",
    "qwen_xml": "<tool_call><function=",
    "mistral": "[TOOL_CALLS] [ARGS] [THINK] [/THINK]",
    "gemma": "<|tool_call> <|channel>thought\n <channel|>",
    "function_gemma": "<start_function_call>",
    "harmony": HARMONY,
    "llama3": "<|python_tag|>",
    "glm": "<think></think><tool_call><arg_key>",
    "minimax": "<minimax:tool_call>",
    "cohere": "<|START_THINKING|> <|START_ACTION|>",
    "kimi": "<think></think><|tool_calls_section_begin|>",
    "deepseek_v3": "<｜tool▁calls▁begin｜> ```json",
    "deepseek_v31": "<think></think><｜tool▁calls▁begin｜>",
}


def parsed(kind: str, text: str, cuts: tuple[int, ...] = (), inside: bool = False) -> AssistantMessage:
    parser = chat_format(TEMPLATES[kind], "json" if kind == "json" else None).parser(TOOLS, inside)
    events = []
    for start, end in zip((0, *cuts), (*cuts, len(text)), strict=True):
        events += parser.feed(text[start:end])
    return message_of([*events, *parser.finish()])


def shape(message: AssistantMessage) -> tuple[object, ...]:
    calls = [(call.name, call.arguments, call.complete) for call in message.tool_calls]
    return message.reasoning, message.text, calls


RECORDED = [
    (
        "hermes",
        'Look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "days": [1, 2]}}\n</tool_call>',
        (None, "Look.", [("get_weather", '{"city": "Oslo", "days": [1, 2]}', True)]),
    ),
    (
        "hermes",
        (
            '<tool_call>\n{"arguments": {"a": "</tool_call>\\"{"}, "name": "add"}\n</tool_call>\n<tool_call>\n'
            '{"name": "add", "arguments": {}}\n</tool_call>'
        ),
        (None, "", [("add", '{"a": "</tool_call>\\"{"}', True), ("add", "{}", True)]),
    ),
    (
        "thinking",
        '<think>\nhm <tool_call>\n\n</think>\n\nText \n<tool_call>\n{"name": "add", "arguments": {"x": 1.5e3}}\n',
        ("hm <tool_call>", "Text", [("add", '{"x": 1.5e3}', True)]),
    ),
    ("thinking", "  no thoughts <think>x</think>\n", (None, "  no thoughts <think>x</think>\n", [])),
    ("thinking", "<think>\nnever closed <", ("never closed <", "", [])),
    ("json", '{"name": "add", "arguments": {"a": 1}}', (None, "", [("add", '{"a": 1}', True)])),
    (
        "json",
        '```json\n[{"name": "add", "parameters": {}},\n {"name": "add", "arguments": {"b": null}}]\n```',
        (None, "", [("add", "{}", True), ("add", '{"b": null}', True)]),
    ),
    ("hermes", '{"name": "add", "arguments": {"a": 2}}', (None, "", [("add", '{"a": 2}', True)])),
    ("json", '{"name": "other", "arguments": {}}', (None, '{"name": "other", "arguments": {}}', [])),
    ("json", '{"answer": 42}', (None, '{"answer": 42}', [])),
    ("hermes", "<tool_call>\nnot json</tool_call> x", (None, "<tool_call>\nnot json</tool_call> x", [])),
    ("hermes", '<tool_call>{"name": "add", "argum', (None, '<tool_call>{"name": "add", "argum', [])),
    (
        "hermes",
        '<tool_call>{"name": "add", "arguments": {"a": [1, {"b": "x',
        (None, "", [("add", '{"a": [1, {"b": "x', False)]),
    ),
    (
        "hermes",
        '<tool_call>{"name": "add", "arguments": {"a": <b>}}</tool_call>',
        (None, "<b>}}</tool_call>", [("add", '{"a": ', False)]),
    ),
]


RECORDED += [
    (
        "qwen_xml",
        (
            'I look.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n"N"\n</parameter>\n'
            "<parameter=days>\n[1, 2]\n</parameter>\n<parameter=n>\nmany\n</parameter>\n</function>\n</tool_call>\n"
            "<tool_call>\n<function=add>\n</function>\n</tool_call>"
        ),
        (
            None,
            "I look.",
            [("get_weather", '{"city": "Oslo\\n\\"N\\"", "days": [1, 2], "n": "many"}', True), ("add", "{}", True)],
        ),
    ),
    (
        "qwen_xml",
        "<function=add><parameter=a>1</parameter></function> ok",
        (None, "ok", [("add", '{"a": "1"}', True)]),
    ),
    ("qwen_xml", "<tool_call>\n<function=add", (None, "<tool_call>\n<function=add", [])),
    ("qwen_xml", "<tool_call><function=a b>", (None, "<tool_call><function=a b>", [])),
    (
        "qwen_xml",
        "<function=get_weather>\n<parameter=n>\nNaN\n</parameter>\n</function>",
        (None, "", [("get_weather", '{"n": "NaN"}', True)]),
    ),
    (
        "qwen_xml",
        (
            '<function=get_weather>\n<parameter=days>\n ["</parameter>"] \n</parameter>\n'
            '<parameter=n>\n"1\n</parameter>\n<parameter=city>\n"O"\n</parameter>\n</function>'
        ),
        (None, "", [("get_weather", '{"days": ["</parameter>"], "n": "\\"1", "city": "\\"O\\""}', True)]),
    ),
    (
        "qwen_xml",
        '<function=get_weather>\n<parameter=days>\n["</parameter>',
        (None, "", [("get_weather", '{"days": "[\\""}', False)]),
    ),
    ("qwen_xml", "<function=add>\nstray", (None, "stray", [("add", "{}", False)])),
    ("qwen_xml", "<function=add><parameter=a>\n12\n", (None, "", [("add", '{"a": "12', False)])),
    (
        "mistral",
        '[THINK]so[/THINK]Ok.[TOOL_CALLS]add[ARGS]{"a": "[TOOL_CALLS]"}[TOOL_CALLS]get_weather[CALL_ID]abc[ARGS]{}',
        ("so", "Ok.", [("add", '{"a": "[TOOL_CALLS]"}', True), ("get_weather", "{}", True)]),
    ),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}, {"name": "add", "arguments": {}}]',
        (None, "", [("add", '{"a": 1}', True), ("add", "{}", True)]),
    ),
    ("mistral", "[TOOL_CALLS]not a call", (None, "[TOOL_CALLS]not a call", [])),
    ("mistral", "[TOOL_CALLS] [1]", (None, "[TOOL_CALLS] [1]", [])),
    ("mistral", '[TOOL_CALLS]add[ARGS]{"a": "', (None, "", [("add", '{"a": "', False)])),
    (
        "gemma",
        (
            '<|channel>thought\nhm\n<channel|>Sure.<|tool_call>call:get_weather{city:<|"|>O{s}"lo<|"|>,days:[1,{k:true}],n:-2.5}'
            "<tool_call|><|tool_call>call:add{}<tool_call|>"
        ),
        (
            "hm",
            "Sure.",
            [("get_weather", '{"city":"O{s}\\"lo","days":[1,{"k":true}],"n":-2.5}', True), ("add", "{}", True)],
        ),
    ),
    ("gemma", '<|tool_call>call:add{"a":"b",c:word', (None, "", [("add", '{"a":"b","c":"word"', False)])),
    ("gemma", "<|tool_call>call:add{a:b\u00a0\v}<tool_call|>", (None, "", [("add", '{"a":"b\u00a0\\u000b"}', True)])),
    ("gemma", "<|tool_call>call add{}", (None, "<|tool_call>call add{}", [])),
    ("gemma", "<|tool_call>call:add{a:<x>}", (None, "<x>}", [("add", '{"a":', False)])),
    (
        "function_gemma",
        "<start_function_call>call:add{a:<escape>x<escape>}<end_function_call>",
        (None, "", [("add", '{"a":"x"}', True)]),
    ),
    (
        "harmony",
        (
            "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant<|channel|>commentary<|message|>"
            "Let me.<|end|>"
            '<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}'
        ),
        ("Think.", "Let me.", [("add", '{"a": 1}', True)]),
    ),
    (
        "harmony",
        '<|start|>assistant to=functions.add<|channel|>commentary json<|message|>{"a": <|call|>',
        (None, "", [("add", '{"a": ', False)]),
    ),
    (
        "harmony",
        '<|start|>assistant to=functions.add<|channel|>commentary<|message|> {"a": "<|end|>"}\n<|call|>',
        (None, "", [("add", '{"a": "<|end|>"}\n', True)]),
    ),
    (
        "harmony",
        (
            "<|channel|>analysis<|message|>One.<|end|><|start|>assistant<|channel|>analysis<|message|>Two.<|end|>"
            "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
            "<|start|>assistant<|channel|>analysis<|message|><|end|><|start|>assistant<|channel|>final<|message|>Yes."
        ),
        ("One.\nTwo.", "I look.\nYes.", []),
    ),
    ("harmony", "<|channel|>final<|message|>Hello <|x|>", (None, "Hello <|x|>", [])),
    ("harmony", "Plain text <|chan", (None, "Plain text <|chan", [])),
    ("harmony", "<|channel|>final", (None, "<|channel|>final", [])),
    (
        "harmony",
        '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": ',
        (None, "", [("add", '{"a": ', False)]),
    ),
    (
        "llama3",
        '<|python_tag|>{"name": "add", "parameters": {"a": "1"}}; {"name": "add", "parameters": {}}',
        (None, "", [("add", '{"a": "1"}', True), ("add", "{}", True)]),
    ),
    ("llama3", "<|python_tag|>print(1)", (None, "<|python_tag|>print(1)", [])),
    ("llama3", '{"name": "add", "parameters": {"a": 1}} done', (None, "done", [("add", '{"a": 1}', True)])),
]
_KIMI = "<|tool_call_begin|>functions.%s<|tool_call_argument_begin|>"
_DEEPSEEK = "<｜tool▁call▁begin｜>%s<｜tool▁sep｜>"
RECORDED += [
    (
        "kimi",
        (
            "<think>hm</think>So.<|tool_calls_section_begin|>"
            f'{_KIMI % "add:0"}{{"a": "<|tool_call_end|>"}}<|tool_call_end|>'
            f"{_KIMI % 'get_weather:1'} {{}} <|tool_call_end|>"
            "<|tool_calls_section_end|>"
        ),
        ("hm", "So.", [("add", '{"a": "<|tool_call_end|>"}', True), ("get_weather", "{}", True)]),
    ),
    (
        "kimi",
        f"<|tool_calls_section_begin|>{_KIMI % 'add:0'}",
        (None, f"<|tool_calls_section_begin|>{_KIMI % 'add:0'}", []),
    ),
    (
        "kimi",
        f'<|tool_calls_section_begin|>{_KIMI % "add:0"}{{"a": [1',
        (None, "", [("add", '{"a": [1', False)]),
    ),
    (
        "kimi",
        f"<|tool_calls_section_begin|>{_KIMI % 'add:0'}{{}}<|tool_call_end|>stray",
        (None, "stray", [("add", "{}", True)]),
    ),
    (
        "deepseek_v31",
        (
            "Look.<｜tool▁calls▁begin｜>"
            f'{_DEEPSEEK % "add"}{{"a": 1}}<｜tool▁call▁end｜>'
            f"{_DEEPSEEK % 'add'}{{}}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        ),
        (None, "Look.", [("add", '{"a": 1}', True), ("add", "{}", True)]),
    ),
    (
        "deepseek_v3",
        (
            f'<｜tool▁calls▁begin｜>{_DEEPSEEK % "function"}add\n```json\n{{"a": "```"}}\n```<｜tool▁call▁end｜>\n'
            f"{_DEEPSEEK % 'function'}get_weather\n```json\n{{}}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        ),
        (None, "", [("add", '{"a": "```"}', True), ("get_weather", "{}", True)]),
    ),
    (
        "glm",
        (
            "<think>hm</think>\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>\nOslo\n</arg_value>\n"
            '<arg_key>days</arg_key>\n<arg_value>[1, "</arg_value>"]</arg_value>\n</tool_call>\n'
            "<tool_call>add</tool_call>"
        ),
        (
            "hm",
            "",
            [("get_weather", '{"city": "\\nOslo\\n", "days": [1, "</arg_value>"]}', True), ("add", "{}", True)],
        ),
    ),
    ("glm", '<tool_call>{"name": "add"}</tool_call>', (None, '<tool_call>{"name": "add"}</tool_call>', [])),
    ("glm", "<tool_call>add<arg_key>a</arg_key><arg_value>1", (None, "", [("add", '{"a": "1', False)])),
    (
        "minimax",
        (
            'So.\n<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">x < y</parameter>\n</invoke>\n'
            '<invoke name="get_weather">\n<parameter name="n">3</parameter>\n</invoke>\n</minimax:tool_call>'
        ),
        (None, "So.", [("add", '{"a": "x < y"}', True), ("get_weather", '{"n": 3}', True)]),
    ),
    (
        "cohere",
        (
            '<|START_THINKING|>hm<|END_THINKING|><|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "add", '
            '"parameters": {"a": 1}},\n    {"tool_call_id": "1", "tool_name": "add", "parameters": {}}\n]<|END_ACTION|>'
        ),
        ("hm", "", [("add", '{"a": 1}', True), ("add", "{}", True)]),
    ),
    ("cohere", "<|START_ACTION|>[]", (None, "<|START_ACTION|>[]", [])),
    ("deepseek_v3", "<｜tool▁calls▁begin｜>none", (None, "<｜tool▁calls▁begin｜>none", [])),
]


def test_calls_have_the_ids_that_the_model_wrote_unless_two_are_equal() -> None:
    calls = [f"{_KIMI % name}{{}}<|tool_call_end|>" for name in ("add:3", "add:4", "add:3")]
    ids = [call.id for call in parsed("kimi", f"<|tool_calls_section_begin|>{''.join(calls)}").tool_calls]
    assert ids[:2] == ["functions.add:3", "functions.add:4"]
    assert ids[2] not in ids[:2]


@pytest.mark.parametrize(("kind", "text", "expected"), RECORDED)
def test_an_answer_is_read_the_same_wherever_it_is_cut(kind: str, text: str, expected: tuple[object, ...]) -> None:
    assert shape(parsed(kind, text)) == expected
    for cut in range(len(text) + 1):
        assert shape(parsed(kind, text, (cut,))) == expected, cut
    assert shape(parsed(kind, text, tuple(range(1, len(text))))) == expected


def test_thoughts_that_the_prompt_begins() -> None:
    assert shape(parsed("thinking", "so\n</think>\n\nYes.", inside=True)) == ("so", "Yes.", [])


def test_thoughts_that_the_prompt_begins_in_a_channel() -> None:
    text = "so<|end|><|start|>assistant<|channel|>final<|message|>Yes."
    assert shape(parsed("harmony", text, inside=True)) == ("so", "Yes.", [])


def test_a_syntax_in_channels_brings_its_own_markers_of_thoughts() -> None:
    known, named, other = (chat_format(*given) for given in ((HARMONY,), ("</think>", "harmony"), (HARMONY, "hermes")))
    assert known.thinking == named.thinking == other.thinking
    assert (known.channels, other.channels) == (named.channels, None)


def test_letters_of_markers_are_text_where_a_grammar_decides_the_order_of_messages() -> None:
    value = '["<|end|>", "<|start|>assistant<|channel|>analysis<|message|>"]\n'
    thoughts = "<|start|>assistant<|channel|>commentary to=functions.f<|message|>hm"
    text = f"{HARMONY}{thoughts}<|end|><|start|>assistant<|channel|>final<|message|>{value}"
    for cut in range(len(text) + 1):
        parser = chat_format(TEMPLATES["harmony"]).parser(structured=True)
        events = [*parser.feed(text[:cut]), *parser.feed(text[cut:]), *parser.finish()]
        assert shape(message_of(events)) == (thoughts, value, []), cut


def test_all_that_comes_before_a_structure_is_thoughts() -> None:
    messages = [("analysis", "One."), ("commentary", "I look."), ("analysis", "Two."), ("final", '{"a": 1}')]
    text = "<|end|><|start|>assistant".join(f"<|channel|>{name}<|message|>{text}" for name, text in messages)
    for cut in range(len(text) + 1):
        parser = chat_format(TEMPLATES["harmony"]).parser(structured=True)
        events = [*parser.feed(text[:cut]), *parser.feed(text[cut:]), *parser.finish()]
        assert shape(message_of(events)) == ("One.\nI look.\nTwo.", '{"a": 1}', []), cut


def test_ten_thousand_calls_take_linear_time() -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
    message = parsed("hermes", call * 10_000)
    assert len(message.tool_calls) == 10_000
    assert {json.loads(call.arguments)["a"] for call in message.tool_calls} == {1}
    assert len({call.id for call in message.tool_calls}) == 10_000


FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<function=add>", "<parameter=a>", "</parameter>", "</function>", "<think>"),
    *("</think>", "[TOOL_CALLS]", "[ARGS]", "add", '{"name": "add", "arguments": ', '{"a": "', '"}', "}", "{}", "["),
    *("]", ", ", "\n", '\\"', "<|tool_call>", "call:add{a:", '<|"|>', "}<tool_call|>", "<|python_tag|>", "<|call|>"),
    *("<|start|>assistant", "<"),
]


def fragments(chance: random.Random) -> tuple[str, list[str]]:
    """An answer of random fragments, and the words in it that no syntax contains."""
    pieces, words = [], []
    for n in range(chance.randrange(1, 14)):
        pieces.append(chance.choice(FRAGMENTS))
        if chance.random() < 0.4:
            words.append(f"w{n}w")
            pieces.append(words[-1])
    return "".join(pieces), words


@pytest.mark.parametrize("kind", TEMPLATES)
def test_no_answer_is_lost_or_breaks_a_parser(kind: str) -> None:
    chance = random.Random(11)
    for _ in range(400):
        text, words = fragments(chance)
        expected = shape(parsed(kind, text))
        cuts = tuple(sorted(chance.sample(range(len(text) + 1), min(len(text), 5))))
        assert shape(parsed(kind, text, cuts)) == expected, text
        read = parsed(kind, text)
        found = "".join(
            [read.reasoning or "", read.text, *(f"{call.name}{call.arguments}" for call in read.tool_calls)]
        )
        assert [word for word in words if word not in found] == [], text


MARKERS = sorted({name for form in FORMATS.values() for name in (form.syntax.begin, *form.special)})
THOUGHTS = [text for each in KNOWN for text in (each.begin, each.end, each.end[:-1])]
PIECES = [*FRAGMENTS, *MARKERS, *THOUGHTS, "null", "w"]


def check_order(events: Sequence[MessageEvent]) -> None:
    """Check that no delta is empty, and that calls are counted up, ended, and never within each other."""
    calls, is_open = 0, False
    for event in events:
        if isinstance(event, ToolCallStart):
            assert (event.index, is_open) == (calls, False)
            is_open = True
        elif isinstance(event, ToolCallEnd):
            assert (event.index, is_open) == (calls, True)
            calls, is_open = calls + 1, False
        else:
            assert event.text
            assert is_open == isinstance(event, ToolCallArgumentsDelta)
    assert not is_open


@pytest.mark.parametrize("kind", FORMATS)
def test_any_answer_is_read_the_same_wherever_it_is_cut(kind: str) -> None:
    chance = random.Random(5)
    for _ in range(150):
        thinking = KNOWN[3] if kind == "harmony" else chance.choice([None, *KNOWN])
        form, tools = ChatFormat(thinking, FORMATS[kind]), chance.choice([TOOLS, []])
        inside, structured = chance.random() < 0.3, chance.random() < 0.3
        begin = thinking.begin if thinking is not None and chance.random() < 0.4 else ""
        text = begin + "".join(chance.choices(PIECES, k=chance.randrange(1, 14)))
        cuts = sorted(chance.sample(range(len(text)), min(len(text), 5)))
        shapes = []
        for starts in ([0], [0, *cuts], range(len(text))):
            parser = form.parser(tools, inside, structured)
            parts = [text[start:end] for start, end in zip(starts, [*starts[1:], len(text)], strict=True)]
            events = [*(event for part in parts for event in parser.feed(part)), *parser.finish()]
            check_order(events)
            shapes.append(shape(message_of(events)))
        assert shapes == [shapes[0]] * 3, text


VOLUME = {
    "type": "object",
    "properties": {
        "volume": {"type": "integer", "minimum": 0, "maximum": 9},
        "room": {"$ref": "#/$defs/Room"},
        "names": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
    },
    "required": ["volume"],
    "additionalProperties": False,
    "$defs": {"Room": {"anyOf": [{"enum": ["hall"]}, {"type": "null"}]}},
}
SET = ToolDefinition("set", parameters=VOLUME, strict=True)
ANSWERS = {  # with the place of the arguments
    "hermes, fenced": ("hermes", '```json\n{"name": "set", "arguments": %s}\n```'),
    "hermes, without markers": ("hermes", '{\n "name": "set",\n "arguments": %s\n}'),
    "hermes, arguments first": ("hermes", '<tool_call>{"arguments": %s, "name": "set"}</tool_call>'),
    "hermes, on one line": ("hermes", 'So:<tool_call>{"name": "set", "arguments": %s}</tool_call>'),
    "hermes, after another": ("hermes", '[{"name": "ping"}, {"name": "set", "arguments": %s}]'),
    "json, in a list": ("json", '[{"name": "set", "arguments": %s}]'),
    "json, otherwise spaced": ("json", '{"name":"set","arguments":%s}'),
    "llama3": ("llama3", '<|python_tag|>{"name": "set", "parameters": %s}'),
    "mistral, in a list": ("mistral", '[TOOL_CALLS][{"name": "set", "arguments": %s}]'),
    "mistral, with an id": ("mistral", "[TOOL_CALLS]set[CALL_ID]123456789[ARGS]%s"),
    "mistral_json, by name": ("mistral_json", "[TOOL_CALLS]set[ARGS]%s"),
    "kimi, behind a space": (
        "kimi",
        f"<|tool_calls_section_begin|> {_KIMI % 'ping:0'}{{}}<|tool_call_end|>{_KIMI % 'set:1'}%s",
    ),
    "deepseek, after another": (
        "deepseek_v31",
        f"<｜tool▁calls▁begin｜>{_DEEPSEEK % 'ping'}{{}}<｜tool▁call▁end｜>{_DEEPSEEK % 'set'}%s",
    ),
    "cohere": ("cohere", '<|START_ACTION|>[{"tool_name": "set", "parameters": %s}]<|END_ACTION|>'),
    "harmony": ("harmony", "<|start|>assistant to=functions.set<|channel|>commentary json<|message|>%s<|call|>"),
}
OBEYING = ['{"volume": 9}', '{"room": null, "volume": 0}', '{"volume": 3.0, "room": "hall", "names": ["abc"]}']
BREAKING = [
    '{"volume": 30}',
    "{}",
    '{"volume": 3, "other": 1}',
    '{"volume": true}',
    '{"volume": 3, "room": "bath"}',
    '{"volume": 3, "names": ["abcd"]}',
    '{"volume": 3, "names": ["a", "b", "c"]}',
    '{"volume": 3, "volume": 30}',
    '{"volume": NaN}',
    '{"volume": 3, "names": ["a"',
    "[3]",
]


def of_strict(kind: str, answer: str, step: int) -> AssistantMessage:
    parser = ChatFormat(None, FORMATS[kind]).parser([SET, ToolDefinition("ping")])
    pieces = [answer[at : at + step] for at in range(0, len(answer), step)]
    return message_of([*(event for piece in pieces for event in parser.feed(piece)), *parser.finish()])


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("step", [1, 1000])
def test_a_strict_call_that_no_grammar_has_led_obeys_its_schema_or_is_text(name: str, step: int) -> None:
    kind, written = ANSWERS[name]
    for arguments in (*OBEYING, *BREAKING):
        message = of_strict(kind, written % arguments, step)
        found = [call.arguments for call in message.tool_calls if call.name == "set"]
        assert found == ([arguments] if arguments in OBEYING else []), arguments
        assert found or arguments.removesuffix("}") in message.text


BARE = "<function=set>\n%s</function>"
LED = "<tool_call>\n<function=set>\n%s</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("kind", "answer", "arguments"),
    [
        ("qwen_xml", BARE % "<parameter=volume>\n9\n</parameter>\n", {"volume": 9}),
        ("qwen_xml", BARE % "<parameter=volume>\n30\n</parameter>\n", None),
        ("qwen_xml", BARE % "<parameter=volume>\nloud\n</parameter>\n", None),
        ("qwen_xml", BARE % "", None),
        ("qwen_xml", LED % "<parameter=volume>\n9\n</parameter>\n", {"volume": 9}),
        ("qwen_xml", LED % '<parameter=volume>\n9\n</parameter>\n<parameter=names>\n["abcd"]\n</parameter>\n', None),
        ("glm", "<tool_call>set<arg_key>volume</arg_key><arg_value>9</arg_value></tool_call>", {"volume": 9}),
        ("glm", "<tool_call>set<arg_key>volume</arg_key><arg_value>30</arg_value></tool_call>", None),
        ("gemma", '<|tool_call>call:set{volume:9,names:[<|"|>abc<|"|>]}<tool_call|>', {"volume": 9, "names": ["abc"]}),
        ("gemma", '<|tool_call>call:set{volume:9,names:[<|"|>abcd<|"|>]}<tool_call|>', None),
        ("gemma", "<|tool_call>call:set{volume:9", None),
    ],
)
@pytest.mark.parametrize("step", [1, 1000])
def test_a_strict_call_in_a_syntax_of_its_own_obeys_its_schema_or_is_text(
    kind: str, answer: str, arguments: dict[str, object] | None, step: int
) -> None:
    message = of_strict(kind, f"Look.\n{answer}", step)
    assert [json.loads(call.arguments) for call in message.tool_calls] == ([] if arguments is None else [arguments])
    assert message.text == ("Look." if arguments is not None else f"Look.\n{answer}")


def test_white_space_before_a_call_is_left_out_of_the_text_after_it() -> None:
    writer = MessageWriter()
    writer.text("before \n")
    writer.whole_call("f", "{}")
    writer.text("after")
    assert [event.text for event in writer.take() if isinstance(event, TextDelta)] == ["before", "after"]
