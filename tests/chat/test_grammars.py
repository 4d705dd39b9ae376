"""Grammars of calls: whatever they allow, the family's parser reads as calls that follow their schemas."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from tokenizers import AddedToken

from paceline.chat.families import FORMATS, ChatFormat
from paceline.chat.grammars import json_schema
from paceline.chat.options import tools_of
from paceline.chat.values import (
    AssistantMessage,
    ToolCallArgumentsDelta,
    ToolCallStart,
    ToolDefinition,
    message_of,
)
from paceline.config import StructuredOutputs
from paceline.config.limits import ToolParserName
from paceline.errors import StructureError
from paceline.models.text.tokenizer import Tokenizer
from paceline.structured.calls import CallsStructure
from paceline.structured.cursor import GrammarCursor
from paceline.structured.grammars import Grammar, Grammars
from server_support import byte_tokenizer

pytest.importorskip("llguidance", reason="structured outputs need the extra 'structured'")
pytestmark = pytest.mark.usefixtures("no_trials")

NUMBERS = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 0, "maximum": 9},
        "kind": {"enum": ["x y", 'q"u', "é"]},
        "on": {"type": "boolean"},
    },
    "required": ["a", "kind", "on"],
    "additionalProperties": False,
}
TOOLS = [ToolDefinition("set.it", parameters=NUMBERS), ToolDefinition("ping")]
WALKS = 12


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    made = byte_tokenizer()
    names = sorted({name for form in FORMATS.values() for name in form.special})
    made.add_special_tokens({"additional_special_tokens": [AddedToken(name, special=True) for name in names]})
    return Tokenizer.load(made)


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids)


def walks(grammar: Grammar, tokenizer: Tokenizer, count: int = WALKS) -> Iterator[str]:
    """Texts of random tokens that the grammar allows. White space is rare, so that they stay short."""
    chance = random.Random(3)
    blank = set(tokenizer.encode(" \n\r\t"))
    for _ in range(count):
        cursor, tokens = GrammarCursor.at_start(grammar), []
        while not cursor.ended and len(tokens) < 600:
            allowed = set(cursor.allowed(tokenizer.vocab_size).nonzero()[0].tolist())
            if allowed & grammar.ends and (chance.random() < 0.5 or allowed <= grammar.ends):
                break
            choice = chance.choice(sorted((allowed - grammar.ends - blank) or (allowed - grammar.ends)))
            tokens.append(choice)
            cursor = cursor.after(choice)
        yield tokenizer.spell(tokens)


def read(kind: str, text: str, structured: bool = False) -> AssistantMessage:
    parser = ChatFormat(None, FORMATS[kind]).parser(TOOLS, structured=structured)
    return message_of([*parser.feed(text), *parser.finish()])


def check(message: AssistantMessage) -> None:
    assert message.tool_calls
    assert message.text == ""
    for call in message.tool_calls:
        arguments = json.loads(call.arguments)
        if call.name == "ping":
            assert arguments == {}
        else:
            assert call.name == "set.it"
            assert arguments["a"] in range(10)
            assert arguments["kind"] in NUMBERS["properties"]["kind"]["enum"]  # type: ignore[index]
            assert isinstance(arguments["on"], bool)


@pytest.mark.parametrize("kind", ["qwen_xml", "gemma", "hermes"])
def test_a_tool_without_a_schema_may_get_any_arguments(kind: str, grammars: Grammars, tokenizer: Tokenizer) -> None:
    syntax, tool = FORMATS[kind].syntax, ToolDefinition("ping", parameters={"type": "object"})
    grammar = grammars.grammar(StructuredOutputs(grammar=syntax.forced([tool], one_call=True)))
    written = {
        "qwen_xml": "<tool_call>\n<function=ping>\n<parameter=a>\nb\n</parameter>\n</function>\n</tool_call>",
        "gemma": '<|tool_call>call:ping{a:<|"|>b<|"|>}<tool_call|>',
        "hermes": '<tool_call>\n{"name": "ping", "arguments": {"a": "b"}}\n</tool_call>',
    }[kind]
    assert GrammarCursor.at_start(grammar).after_all(tokenizer.encode(written)).ended
    (call,) = read(kind, written).tool_calls
    assert json.loads(call.arguments) == {"a": "b"}
    closed = replace(tool, parameters={"type": "object", "additionalProperties": False})
    grammar = grammars.grammar(StructuredOutputs(grammar=syntax.forced([closed], one_call=True)))
    with pytest.raises(StructureError):
        GrammarCursor.at_start(grammar).after_all(tokenizer.encode(written))


OPTIONAL = {"type": "object", "properties": {name: {"type": "integer"} for name in ("a", "b", "c")}}
NAMES = {"type": "object", "properties": {name: {"type": "integer"} for name in ("filter[x]", "a b", "", "ä\u00a0-")}}
FILE = {"type": "object", "properties": {"q": {"type": "string"}, "n": {"type": "integer"}}, "required": ["q"]}


@pytest.mark.parametrize("kind", ["gemma", "function_gemma"])
@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize(
    ("schema", "written", "arguments"),
    [
        (FILE, "{q:QUOTEif x < y: <b> <| \n<QUOTE}", {"q": "if x < y: <b> <| \n<"}),
        (FILE, "{q:QUOTEQUOTE,n:3}", {"q": "", "n": 3}),
        (OPTIONAL, "{}", {}),
        (OPTIONAL, "{b:1}", {"b": 1}),
        (OPTIONAL, "{a:1,c:2}", {"a": 1, "c": 2}),
        (OPTIONAL | {"required": ["b", "b"]}, "{b:1,c:2}", {"b": 1, "c": 2}),
        (NAMES, '{"filter[x]":1,"a b":2,"":3,ä\u00a0-:4}', {"filter[x]": 1, "a b": 2, "": 3, "ä\u00a0-": 4}),
    ],
)
def test_gemma_calls_may_have_any_text_and_any_optional_arguments(
    kind: str,
    has_tokens: bool,
    schema: dict[str, Any],
    written: str,
    arguments: dict[str, Any],
    tokenizer: Tokenizer,
    grammars: Grammars,
) -> None:
    if not has_tokens:
        tokenizer = Tokenizer.load(byte_tokenizer())
        grammars = Grammars(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids)
    form = FORMATS[kind]
    begin, end, quote = form.special
    grammar = grammars.grammar(
        StructuredOutputs(grammar=form.syntax.forced([ToolDefinition("f", parameters=schema)], one_call=True))
    )
    text = f"{begin}call:f{written.replace('QUOTE', quote)}{end}"
    assert GrammarCursor.at_start(grammar).after_all(tokenizer.encode(text)).ended
    (call,) = read(kind, text).tool_calls
    assert json.loads(call.arguments) == arguments


@pytest.mark.parametrize("kind", ["gemma", "function_gemma"])
def test_ordinary_tokens_cannot_spell_the_mark_that_ends_a_string(
    kind: str, tokenizer: Tokenizer, grammars: Grammars
) -> None:
    form = FORMATS[kind]
    begin, _, quote = form.special
    grammar = form.syntax.forced([ToolDefinition("f", parameters=FILE)], one_call=True)
    cursor = GrammarCursor.at_start(grammars.grammar(StructuredOutputs(grammar=grammar)))
    *letters, last = (token for letter in quote for token in tokenizer.encode(letter))
    cursor = cursor.after_all([*tokenizer.encode(f"{begin}call:f{{q:{quote}"), *letters])
    assert not cursor.allowed(tokenizer.vocab_size)[last]


@pytest.mark.parametrize("kind", [kind for kind, form in FORMATS.items() if kind != "auto"])
def test_parameters_may_refer_to_the_definitions_of_their_schema(
    kind: str, tokenizer: Tokenizer, grammars: Grammars
) -> None:
    item = {"$defs": {"Item": {"enum": ["x", 3]}}, "properties": {"item": {"$ref": "#/$defs/Item"}}}
    tool = ToolDefinition("f", parameters={"type": "object", "required": ["item"], **item})
    grammar = grammars.grammar(StructuredOutputs(grammar=FORMATS[kind].syntax.forced([tool], one_call=True)))
    assert not GrammarCursor.at_start(grammar).ended


REFERS = {"$defs": {"E": {"enum": ["x", 3]}}}
REFUSED = object()
NULLABLE = {"type": ["string", "null"]}
OPTIONAL_TEXT = {"anyOf": [{"type": "string"}, {"type": "null"}]}
QWEN_VALUES = [
    (NULLABLE | {"enum": ["c", None]}, "null", None),
    (NULLABLE | {"enum": ["c", None]}, '"c"', "c"),
    (NULLABLE | {"enum": ["c", None]}, "None", REFUSED),
    (NULLABLE, "null", None),
    (NULLABLE, "nullable", "nullable"),
    (NULLABLE, "nul", "nul"),
    (NULLABLE, "", ""),
    ({"type": "string"}, "null", "null"),
    (NULLABLE | {"enum": ["null", "c"]}, "null", "null"),
    (NULLABLE | {"enum": ["null", "c"]}, "c", "c"),
    (NULLABLE | {"const": "null"}, "null", "null"),
    (NULLABLE | {"enum": ["null", None]}, "null", None),
    (NULLABLE | {"enum": ["null", None]}, '"null"', "null"),
    ({"type": "string", "enum": ["null", None]}, "null", "null"),
    ({"anyOf": [{"type": "string", "enum": ["null"]}, {"type": "null"}]}, '"null"', "null"),
    ({"anyOf": [{"type": "string", "enum": ["null"]}, {"type": "null"}]}, "null", None),
    ({"anyOf": [{"type": "string", "enum": ["null", "c"]}, {"type": "integer"}]}, "null", REFUSED),
    (OPTIONAL_TEXT, "Paris", "Paris"),
    (OPTIONAL_TEXT, "null", None),
    ({"type": "string", "const": "dog"}, "dog", "dog"),
    ({"type": "string", "const": "dog"}, "cat", REFUSED),
    ({"const": 3}, "3", 3),
    ({"$ref": "#/$defs/E"}, "3", 3),
    ({"$ref": "#/$defs/E"}, "4", REFUSED),
    ({"$ref": "#/properties/other"}, '{"a": 1}', {"a": 1}),
    ({"type": "array", "items": {"$ref": "#"}}, '[{"v": [], "other": {"a": 2}}]', [{"v": [], "other": {"a": 2}}]),
    ({"type": "array", "items": {"$ref": "#"}}, "[[[]]]", REFUSED),
    ({"type": "string"}, "see </parameter> here", REFUSED),
    ({"type": "string"}, "a\n<b>", "a\n<b>"),
    ({"type": "array", "items": {"type": "string"}}, '["see </parameter> here"]', ["see </parameter> here"]),
    ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, '"a</parameter>b"', "a</parameter>b"),
]
MARK = '<|"|>'
GEMMA_VALUES = [
    ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "3", 3),
    ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "null", None),
    ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, f"{MARK}x{MARK}", REFUSED),
    ({"type": ["integer", "null"]}, f"{MARK}x{MARK}", REFUSED),
    ({"enum": [1, 2]}, "2", 2),
    ({"enum": [1, 2]}, "9", REFUSED),
    ({"const": "dog"}, f"{MARK}dog{MARK}", "dog"),
    ({"const": "dog"}, f"{MARK}cat{MARK}", REFUSED),
    (NULLABLE | {"enum": ["a", None]}, "null", None),
    ({"type": "string", "enum": ["a", None]}, "null", REFUSED),
    (NULLABLE | {"enum": ["a", None]}, f"{MARK}b{MARK}", REFUSED),
    ({"$ref": "#/$defs/E"}, f"{MARK}x{MARK}", "x"),
    ({"$ref": "#/$defs/E"}, "4", REFUSED),
    ({"$ref": "#"}, "{v:1}", {"v": 1}),
    ({"type": "object"}, "{a-b:1.5e3}", {"a-b": 1500.0}),
    ({"allOf": [{"$ref": "#/$defs/E"}]}, "3", 3),
    ({"allOf": [{"$ref": "#/$defs/E"}]}, "4", REFUSED),
]


@pytest.mark.parametrize(
    ("kind", "schema", "text", "value"),
    [
        *(("qwen_xml", *each) for each in QWEN_VALUES),
        *(("glm", *each) for each in QWEN_VALUES[:8]),
        *(("gemma", *each) for each in GEMMA_VALUES),
    ],
)
def test_values_that_a_schema_has_are_allowed_and_read_as_they_are(
    kind: str, schema: dict[str, Any], text: str, value: object, tokenizer: Tokenizer, grammars: Grammars
) -> None:
    other = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    parameters = {
        **REFERS,
        "type": "object",
        "properties": {"v": schema, "other": other},
        "required": ["v"],
        "additionalProperties": False,
    }
    form, tool = FORMATS[kind], ToolDefinition("f", parameters=parameters)
    grammar = grammars.grammar(StructuredOutputs(grammar=form.syntax.forced([tool], one_call=True)))
    written = {
        "qwen_xml": f"<tool_call>\n<function=f>\n<parameter=v>\n{text}\n</parameter>\n</function>\n</tool_call>",
        "glm": f"<tool_call>f<arg_key>v</arg_key><arg_value>{text}</arg_value></tool_call>",
        "gemma": f"<|tool_call>call:f{{v:{text}}}<tool_call|>",
    }[kind]
    cursor = GrammarCursor.at_start(grammar)
    for token in tokenizer.encode(written):
        if not cursor.allowed(tokenizer.vocab_size)[token]:
            assert value is REFUSED
            return
        cursor = cursor.after(token)
    assert cursor.ended
    for step in (1, 3, len(written)):
        parser = ChatFormat(None, form).parser([tool])
        pieces = [written[at : at + step] for at in range(0, len(written), step)]
        (call,) = message_of([*(e for piece in pieces for e in parser.feed(piece)), *parser.finish()]).tool_calls
        assert json.loads(call.arguments) == {"v": value}


OPTIONAL_DIGITS = {"anyOf": [{"type": "string", "enum": ["1", "2", "null"]}, {"type": "null"}]}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        (OPTIONAL_DIGITS, "1", "1"),
        (OPTIONAL_DIGITS, "null", None),
        (OPTIONAL_DIGITS, '"null"', "null"),
        (OPTIONAL_DIGITS, "3", 3),
        ({"oneOf": [{"type": "string"}, {"type": "null"}]}, "12", "12"),
        ({"oneOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
        ({"anyOf": [{"type": "string", "const": "null"}, {"type": "integer"}]}, "null", "null"),
        ({"enum": ["1", 2, True]}, "1", "1"),
        ({"enum": ["1", 2, True]}, "2", 2),
        ({"type": ["integer", "null"]}, "null", None),
        ({"type": "number"}, "1", 1),
        ({"type": "integer"}, "1.5", 1.5),
        (NULLABLE | {"enum": ["a", "b"]}, "null", None),
    ],
)
def test_values_that_no_grammar_has_checked_are_read_by_their_schema(
    schema: dict[str, Any], text: str, value: object
) -> None:
    tool = ToolDefinition("f", parameters={"type": "object", "properties": {"v": schema}})
    parser = ChatFormat(None, FORMATS["qwen_xml"]).parser([tool])
    written = f"<tool_call>\n<function=f>\n<parameter=v>\n{text}\n</parameter>\n</function>\n</tool_call>"
    (call,) = message_of([*parser.feed(written), *parser.finish()]).tool_calls
    assert call.arguments == json.dumps({"v": value})


LEVELS = {str(n): {"anyOf": [{"$ref": f"#/$defs/{n + 1}"}] * 30} for n in range(4)} | {"4": {"type": "null"}}
LONG = {"$defs": {"E": {"enum": ["x" * 2**14]}}, "properties": {f"p{n}": {"$ref": "#/$defs/E"} for n in range(20)}}
UNENFORCEABLE: list[tuple[str, dict[str, Any], str]] = [
    ("gemma", {"properties": {"v": {"$ref": "#/$defs/0"}}, "$defs": LEVELS}, "supported characters"),
    ("gemma", {"properties": {f"p{n}": {} for n in range(400)}}, "supported characters"),
    ("gemma", LONG, "supported characters"),
    ("qwen_xml", LONG, "supported characters"),
    ("qwen_xml", {"properties": {"a": {}}, "minProperties": 1}, "'minProperties'"),
    ("gemma", {"anyOf": [{"type": "object"}]}, "'anyOf'"),
    ("gemma", {"additionalProperties": {"type": "null"}}, "'additionalProperties'"),
    ("qwen_xml", {"properties": {"a>b": {}}}, "the name of a parameter"),
    ("qwen_xml", {"properties": {"": {}}}, "the name of a parameter"),
    ("gemma", {"properties": {"v": {"const": 'a<|"|>'}}}, "which ends strings"),
    ("qwen_xml", {"properties": {"v": {"enum": ["a", "b</parameter>"]}}}, "contains </parameter>"),
]


@pytest.mark.parametrize(("kind", "parameters", "message"), UNENFORCEABLE)
def test_parameters_that_a_syntax_cannot_enforce_are_named(kind: str, parameters: dict[str, Any], message: str) -> None:
    tool = ToolDefinition("f", parameters={"type": "object", **parameters})
    with pytest.raises(StructureError, match=message):
        FORMATS[kind].syntax.forced([tool], one_call=True)


PARTLY: dict[str, Any] = {  # one keyword of all, and one of a property, cannot be enforced
    "type": "object",
    "properties": {
        "n": {"type": "integer", "format": "int32"},
        "odd": {"type": "integer", "multipleOf": 2},
        "kind": {"enum": ["cat", "dog"]},
    },
    "required": ["n", "kind"],
    "dependentRequired": {"kind": ["odd"]},
    "x-origin": "a",
}
CALLS_OF_F = {
    "hermes": (
        '<tool_call>\n{"name": "f", "arguments": {%s}}\n</tool_call>',
        ['"n":1,"odd":3,"kind":"cat"', '"n":1,"kind":"dog"'],
        ['"n":"1","kind":"cat"', '"kind":"cat"', '"n":1,"kind":"cow"', '"n":1,"odd":"x","kind":"cat"'],
    ),
    "qwen_xml": (
        "<tool_call>\n<function=f>\n%s</function>\n</tool_call>",
        ["<parameter=n>\n1\n</parameter>\n<parameter=kind>\ncat\n</parameter>\n"],
        [
            "<parameter=n>\nx\n</parameter>\n<parameter=kind>\ncat\n</parameter>\n",
            "<parameter=n>\n1\n</parameter>\n<parameter=kind>\ncow\n</parameter>\n",
            "<parameter=kind>\ncat\n</parameter>\n",
        ],
    ),
    "gemma": (
        "<|tool_call>call:f{%s}<tool_call|>",
        [f"n:1,kind:{MARK}cat{MARK}", f"n:1,kind:{MARK}dog{MARK},odd:3"],
        [f"n:{MARK}1{MARK},kind:{MARK}cat{MARK}", f"n:1,kind:{MARK}cow{MARK}", "n:1"],
    ),
}


@pytest.mark.parametrize("kind", CALLS_OF_F)
@pytest.mark.parametrize("joint", [{}, {"minProperties": 1, "anyOf": [{"required": ["odd"]}, {}]}])
def test_what_cannot_be_enforced_of_a_tool_leaves_the_rest(
    kind: str, joint: dict[str, Any], tokenizer: Tokenizer, grammars: Grammars
) -> None:
    tool = ToolDefinition("f", parameters=PARTLY | joint)
    structure = CallsStructure(kind, [tool], "forced", one_call=True)
    grammar = grammars.grammar(structure)
    (note,) = grammar.notes
    assert note.startswith("arguments of f follow their schema but for this: ")
    assert "'dependentRequired'" in note
    template, yes, no = CALLS_OF_F[kind]
    for arguments in (*yes, *no):
        cursor = GrammarCursor.at_start(grammar)
        try:
            ended = cursor.after_all(tokenizer.encode(template % arguments)).ended
        except StructureError:
            ended = False
        assert ended == (arguments in yes), arguments
    with pytest.raises(StructureError, match=r"tool f: .*'dependentRequired'"):
        grammars.grammar(replace(structure, tools=[replace(tool, strict=True)]))


@pytest.mark.parametrize("kind", ["qwen_xml", "gemma"])
def test_arguments_that_only_a_keyword_names_may_be_written(kind: str, grammars: Grammars) -> None:
    parameters = PARTLY | {"anyOf": [{"required": ["other"]}]}
    tools = [ToolDefinition("f", parameters=parameters)]
    (note,) = grammars.grammar(CallsStructure(kind, tools, "forced", one_call=True)).notes
    assert note.startswith("arguments of f are not enforced, so they may be any JSON object: ")


def test_tools_may_have_their_parameters_by_reference() -> None:
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/N"}}}
    function = {"name": "f", "parameters": {"$defs": {"N": node}, "$ref": "#/$defs/N"}}
    (tool,) = tools_of([{"type": "function", "function": function}])
    assert tool.properties == node["properties"]
    assert "$ref" not in tool.parameters
    either = {"anyOf": [node, {"type": "object"}]}
    (tool,) = tools_of([{"type": "function", "function": {"name": "f", "parameters": either}}])
    assert tool.parameters == either


def test_every_format_has_its_name_in_the_configuration() -> None:
    assert set(FORMATS) == set(ToolParserName.__args__)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("kind", "one_call"), [*((kind, False) for kind in FORMATS), ("hermes", True), ("llama3", True)]
)
def test_what_a_grammar_allows_is_read_as_calls(
    kind: str, one_call: bool, grammars: Grammars, tokenizer: Tokenizer
) -> None:
    syntax = FORMATS[kind].syntax
    counts = set()
    for text in walks(grammars.grammar(StructuredOutputs(grammar=syntax.forced(TOOLS, one_call))), tokenizer):
        message = read(kind, text)
        check(message)
        counts.add(len(message.tool_calls))
    assert counts == {1} if one_call or syntax.single else len(counts) > 1
    for text in walks(grammars.grammar(StructuredOutputs(grammar=syntax.triggered(TOOLS, one_call))), tokenizer):
        check(read(kind, syntax.begin + text))


@pytest.mark.parametrize("kind", FORMATS)
def test_strict_calls_that_a_grammar_has_led_are_calls_and_arrive_as_they_are_written(
    kind: str, grammars: Grammars, tokenizer: Tokenizer
) -> None:
    """But for gemma's, whose grammar does not enforce all of a schema."""
    form, strict = FORMATS[kind], [replace(tool, strict=True) for tool in TOOLS]
    grammar = grammars.grammar(CallsStructure(kind, strict, "triggered", one_call=True))
    for text in walks(grammar, tokenizer):
        parser = ChatFormat(None, form).parser(strict)
        early = [event for letter in form.syntax.begin + text for event in parser.feed(letter)]
        message = message_of([*early, *parser.finish()])
        check(message)
        place = next(place for place, event in enumerate(early) if isinstance(event, ToolCallStart))
        streamed = [event for event in early[place:] if isinstance(event, ToolCallArgumentsDelta)]
        if message.tool_calls[0].name == "set.it":
            assert (len(streamed) > 1) == (kind not in ("gemma", "function_gemma"))


@pytest.mark.parametrize("kind", ["qwen_xml", "gemma"])
def test_patterns_of_strict_tools_that_a_syntax_cannot_enforce_are_refused(kind: str) -> None:
    text = {"type": "string", "pattern": "^a"}
    parameters = {"type": "object", "properties": {"pattern": {"type": "string"}, "v": text}}
    tool = ToolDefinition("f", parameters=parameters)
    FORMATS[kind].syntax.one(tool)
    with pytest.raises(StructureError, match="'pattern'"):
        FORMATS[kind].syntax.one(replace(tool, strict=True))
    FORMATS[kind].syntax.one(replace(tool, strict=True, parameters=parameters | {"properties": {"pattern": {}}}))


TEXTS = {"enum": ["yes", "<tool_call>", '<tool_call>{"name": "ping", "arguments": {}}</tool_call>', "[TOOL_CALLS]ping"]}
MARKERS = "<|end|><|start|>"
CALL_OR_TEXT = [kind for kind, form in FORMATS.items() if not form.syntax.is_json]


@pytest.mark.parametrize("kind", CALL_OR_TEXT)
@pytest.mark.parametrize("one_call", [True, False])
def test_what_a_grammar_of_calls_or_text_allows_is_read_as_one_of_them(
    kind: str, one_call: bool, tokenizer: Tokenizer, grammars: Grammars
) -> None:
    begin, rule = "", json_schema({"anyOf": [TEXTS, {"const": {"name": "ping", "arguments": {}}}]})
    if (channels := FORMATS[kind].channels) is not None:
        begin, rule = channels.begin_text, f"{channels.begin_text_rule} {json_schema({'enum': [MARKERS]})}"
    grammar = grammars.grammar(StructuredOutputs(grammar=FORMATS[kind].syntax.or_text(TOOLS, one_call, rule)))
    found = {True: 0, False: 0}
    for answer in walks(grammar, tokenizer, 4 * WALKS):
        message = read(kind, answer, structured=True)
        found[bool(message.tool_calls)] += 1
        assert bool(message.tool_calls) == answer.startswith(FORMATS[kind].syntax.begin)
        if message.tool_calls:
            check(message)
            assert len(message.tool_calls) == 1 or not (one_call or FORMATS[kind].syntax.single)
        else:
            value = json.loads(message.text)
            assert begin + message.text == answer
            assert value in [*TEXTS["enum"], MARKERS] or value == {"name": "ping", "arguments": {}}
    assert all(found.values()), found
