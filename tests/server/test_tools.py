"""Tools, thoughts and structures over HTTP, with OpenAI's own client against a live server."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from chat_support import ADD, HARMONY_TEMPLATE, PING, save_chat_model
from models.test_response_template import AS_JSON
from paceline.chat.harmony import SPECIAL
from paceline.chat.options import ChatOptions
from paceline.config import ServerConfig
from paceline.errors import ParameterError
from paceline.models.text.limited_process import LimitedProcess
from paceline.server.context import _loaded
from paceline.structured.limits import GrammarLimits
from server_support import Live, load, start

pytest.importorskip("llguidance", reason="structured outputs need the extra 'structured'")

DESCRIBED_TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ tools and '' }}{% endfor %}<|assistant|>"
SAID: list[Any] = [{"role": "user", "content": "go"}]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    path = save_chat_model(tmp_path_factory.mktemp("tools") / "tiny")
    yield from start(ServerConfig(port=0, served_model_name="tiny"), path)


@pytest.fixture(scope="module")
def channels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server whose model writes as gpt-oss does."""
    path = save_chat_model(tmp_path_factory.mktemp("channels") / "tiny", HARMONY_TEMPLATE, SPECIAL)
    yield from start(ServerConfig(port=0, served_model_name="tiny"), path)


def chat(live: Live, **options: Any) -> Any:
    given = {"model": "tiny", "messages": SAID, "tools": [ADD, PING], "temperature": 0, "max_tokens": 300} | options
    return live.openai.chat.completions.create(**given)


def streamed(live: Live, **options: Any) -> tuple[str, str, list[tuple[str, str]], str]:
    """Thoughts, text, calls and finish reason that the chunks of a stream make."""
    thoughts, text, reason = "", "", ""
    calls: list[list[str]] = []
    for chunk in chat(live, stream=True, **options):
        (choice,) = chunk.choices
        reason = choice.finish_reason or reason
        text += choice.delta.content or ""
        thoughts += getattr(choice.delta, "reasoning_content", None) or ""
        for call in choice.delta.tool_calls or []:
            if call.id is not None:
                assert (call.type, call.index) == ("function", len(calls))
                calls.append([call.function.name, ""])
            calls[call.index][1] += call.function.arguments
    return thoughts, text, [(name, arguments) for name, arguments in calls], reason


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "ping"}}])
def test_a_forced_call_is_made_streamed_and_not(live: Live, choice: Any) -> None:
    (answer,) = chat(live, tool_choice=choice, parallel_tool_calls=False).choices
    assert (answer.finish_reason, answer.message.content) == ("tool_calls", None)
    (call,) = answer.message.tool_calls
    arguments = json.loads(call.function.arguments)
    if choice == "required":
        assert call.function.name in ("add", "ping")
    else:
        assert (call.function.name, arguments) == ("ping", {})
    found = "", "", [(call.function.name, call.function.arguments)], "tool_calls"
    assert streamed(live, tool_choice=choice, parallel_tool_calls=False) == found


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server whose chat template names no syntax of calls; a response template describes its answers."""
    path = Path(save_chat_model(tmp_path_factory.mktemp("described") / "tiny", DESCRIBED_TEMPLATE, ["<call>"]))
    config = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps(config | {"response_template": AS_JSON}))
    yield from start(ServerConfig(port=0, served_model_name="tiny"), str(path))


def test_a_response_template_reads_forced_calls_and_texts(described: Live) -> None:
    """Thoughts may come first, because the template has some."""
    short = {"extra_body": {"max_thinking_tokens": 3}, "parallel_tool_calls": False}
    (answer,) = chat(described, tool_choice="required", **short).choices
    (call,) = answer.message.tool_calls
    assert (answer.finish_reason, answer.message.content) == ("tool_calls", None)
    assert call.function.name in ("add", "ping")
    thoughts = getattr(answer.message, "reasoning_content", None) or ""
    found = thoughts, "", [(call.function.name, call.function.arguments)], "tool_calls"
    assert streamed(described, tool_choice="required", **short) == found
    (plain,) = chat(described, max_tokens=8).choices
    assert streamed(described, max_tokens=8)[1:3] == (plain.message.content or "", [])


@pytest.mark.parametrize("stream", [False, True])
def test_the_event_loop_does_not_wait_for_a_response_template(
    described: Live, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pattern may take seconds, and other requests go on meanwhile."""
    exchange, threads = LimitedProcess.exchange, set[str]()

    def noted(process: LimitedProcess, line: str) -> dict[str, Any]:
        threads.add(threading.current_thread().name.rstrip("_0"))
        return exchange(process, line)

    monkeypatch.setattr(LimitedProcess, "exchange", noted)
    asked: dict[str, Any] = {"model": "tiny", "stream": stream}
    said = asked | {"messages": SAID, "max_tokens": 4}
    for path, body in (
        ("/v1/chat/completions", said),
        ("/v1/messages", said),
        ("/v1/responses", asked | {"input": "go", "max_output_tokens": 16}),
        ("/api/chat", asked | {"messages": SAID, "options": {"num_predict": 4}}),
    ):
        threads.clear()
        assert described.post(path, body).raise_for_status().read()
        assert threads == {"texts", "waiting replies"}, path


def allowed_tools(mode: str, *names: str) -> Any:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize("name", ["add", "ping"])
def test_only_allowed_tools_are_called(live: Live, name: str) -> None:
    """The prompt has all tools, so that its prefix stays the same."""
    asked = {"parallel_tool_calls": False, "tool_choice": allowed_tools("required", name)}
    found = chat(live, **asked)
    (call,) = found.choices[0].message.tool_calls
    assert call.function.name == name
    assert found.usage.prompt_tokens == chat(live, max_tokens=1).usage.prompt_tokens
    assert streamed(live, **asked)[2:] == ([(name, call.function.arguments)], "tool_calls")


def test_allowed_tools_are_offered_beside_text() -> None:
    fields: Any = {"tools": [ADD, PING], "tool_choice": allowed_tools("auto", "ping")}
    options = ChatOptions.of(fields)
    assert [tool.name for tool in options.offered] == ["ping"]
    assert not options.tool_choice.forces_call
    assert not options.one_call


def test_n_answers_have_calls_of_their_own(live: Live) -> None:
    named = {"type": "function", "function": {"name": "add"}}
    found = chat(live, tool_choice=named, n=3, temperature=1, seed=4).choices
    calls = [choice.message.tool_calls[0] for choice in found]
    values = [json.loads(call.function.arguments) for call in calls]
    assert all(0 <= value["a"] <= 99 and value["b"] in ("x", "y\n") for value in values)
    assert len({call.id for call in calls}) == 3


def test_a_cut_call_ends_with_length(live: Live) -> None:
    named = {"type": "function", "function": {"name": "add"}}
    (answer,) = chat(live, tool_choice=named, max_tokens=45).choices
    assert answer.finish_reason == "length"
    assert answer.message.tool_calls[0].function.arguments.startswith("{")


def test_auto_and_none_leave_text_free(live: Live) -> None:
    for choice in ("auto", "none"):
        (answer,) = chat(live, tool_choice=choice, max_tokens=12).choices
        assert (answer.finish_reason, answer.message.tool_calls) == ("length", None)
        assert answer.message.content


def test_a_conversation_with_calls_and_results_is_rendered(live: Live) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 7, "b": "x"}'}}
    messages = [
        *SAID,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "8"},
    ]
    reply = live.post("/tokenize", {"messages": messages}).json()
    text = live.post("/detokenize", {"tokens": reply["tokens"]}).json()["prompt"]
    assert text == "[user]go[assistant]<tool_call>7</tool_call>[tool]8[bot]<think></think>"
    assert chat(live, messages=messages, max_tokens=2).choices[0].message.content


@pytest.mark.parametrize("value", ["x" * 3000, [[0]] * 3000], ids=["text", "numbers"])
def test_the_variables_of_a_template_count_as_text(live: Live, value: Any) -> None:
    body = {"messages": SAID, "max_tokens": 1, "chat_template_kwargs": {"enable_thinking": value}}
    reply = live.post("/v1/chat/completions", body)
    assert reply.status_code == 400
    assert "characters; prompts of this model have at most" in reply.json()["error"]["message"]


def test_thoughts_are_split_off_and_their_budget_ends_them(live: Live) -> None:
    asked = {"tools": openai.omit, "max_tokens": 40, "extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}
    (answer,) = chat(live, **asked).choices
    assert (answer.message.content, answer.finish_reason) == ("", "length")
    thoughts = answer.message.reasoning_content
    asked["extra_body"]["max_thinking_tokens"] = 7  # type: ignore[index]
    (answer,) = chat(live, **asked).choices
    kept = answer.message.reasoning_content.rstrip("\ufffd")  # a character may be cut
    assert thoughts.startswith(kept)
    assert 0 < len(kept) <= 7
    assert answer.message.content
    assert streamed(live, **asked)[:2] == (answer.message.reasoning_content, answer.message.content)


@pytest.mark.parametrize("n", [1, 3])
def test_the_tokens_of_thoughts_are_counted_streamed_and_not(live: Live, n: int) -> None:
    more = {"chat_template_kwargs": {"enable_thinking": True}, "max_thinking_tokens": 7}
    asked = {"tools": openai.omit, "max_tokens": 40, "n": n, "temperature": 1, "seed": 5, "extra_body": more}
    whole = chat(live, **asked)
    counted = whole.usage.completion_tokens_details.reasoning_tokens  # every byte is a token
    assert 7 * n <= counted <= 8 * n, "a character that the end cuts becomes text with the token after it"
    *_, last = chat(live, **asked, stream=True, stream_options={"include_usage": True})
    assert last.usage.completion_tokens_details == whole.usage.completion_tokens_details
    assert chat(live, max_tokens=5).usage.completion_tokens_details.reasoning_tokens == 0


@pytest.mark.parametrize(
    ("path", "fields", "details"),
    [
        ("/v1/messages", {"messages": SAID, "thinking": {"type": "enabled", "budget_tokens": 7}}, "thinking_tokens"),
        ("/v1/responses", {"input": "go", "reasoning": {"effort": "low"}}, "reasoning_tokens"),
    ],
)
def test_the_tokens_of_thoughts_are_counted_in_every_api(
    live: Live, path: str, fields: dict[str, Any], details: str
) -> None:
    limit = {"max_output_tokens": 9} if "input" in fields else {"max_tokens": 30}
    body = {"model": "tiny", "seed": 5, **limit, **fields}
    usage = live.post(path, body).json()["usage"]
    assert usage["output_tokens_details"] == {details: 9 if "input" in fields else 7}, usage
    *_, last = re.findall(r'"usage":(\{"input_tokens".*?\}.*?\})', live.post(path, {**body, "stream": True}).text)
    assert f'"output_tokens_details":{json.dumps(usage["output_tokens_details"], separators=(",", ":"))}' in last


def test_thoughts_come_before_a_forced_call(live: Live) -> None:
    more = {"chat_template_kwargs": {"enable_thinking": True}, "max_thinking_tokens": 5}
    named = {"type": "function", "function": {"name": "ping"}}
    (answer,) = chat(live, tool_choice=named, extra_body=more).choices
    assert answer.message.reasoning_content
    assert answer.message.tool_calls[0].function.name == "ping"
    assert answer.finish_reason == "tool_calls"


STRUCTURES = [
    ({"choice": ["yes", "no\n"]}, r"(yes|no\n)"),
    ({"regex": "[ab]{3}"}, r"[ab]{3}"),
    ({"json": {"enum": [1, None]}}, r"(1|null)"),
    ({"json": '{"type": "boolean"}'}, r"(true|false)"),
    ({"json_object": True}, r"\{.*"),
    ({"grammar": 'start: "a" b\nb: "b" | %json {"const": 3}'}, r"a(b|3)"),
]


@pytest.mark.parametrize(("structure", "pattern"), STRUCTURES)
def test_structured_outputs_by_name(live: Live, structure: dict[str, Any], pattern: str) -> None:
    bias = {str(live.context.texts.tokenizer.encode("b")[0]): 5}
    more = {"structured_outputs": structure}
    options = {"max_tokens": 20, "logit_bias": bias, "presence_penalty": 0.5, "stop": ["zzz"], "extra_body": more}
    (answer,) = chat(live, tools=openai.omit, **options).choices
    assert re.fullmatch(pattern, answer.message.content, re.DOTALL), answer.message.content
    found = live.openai.completions.create(model="tiny", prompt="x", **options).choices[0]  # type: ignore[call-overload]
    assert re.fullmatch(pattern, found.text, re.DOTALL), found.text


def test_a_structure_comes_after_the_thoughts(live: Live) -> None:
    more = {"chat_template_kwargs": {"enable_thinking": True}, "max_thinking_tokens": 3}
    (answer,) = chat(live, tools=openai.omit, extra_body={**more, "structured_outputs": {"choice": ["ja"]}}).choices
    assert answer.message.content == "ja"


@pytest.mark.parametrize("structure", [{"regex": r"<\|end\|>\na+"}, {"choice": ["<|end|>\na"]}])
@pytest.mark.parametrize("first", ["a", "f"])
def test_a_structure_comes_in_the_channel_after_the_thoughts(
    channels: Live, structure: dict[str, Any], first: str
) -> None:
    """The first letter of the first channel decides between thoughts (analysis) and text (final)."""
    tokenizer = channels.context.texts.tokenizer
    likely = {str(tokenizer.encode(first)[0]): 30, str(tokenizer.eos_token_ids[0]): 60}
    more = {"max_thinking_tokens": 9, "structured_outputs": structure}
    asked = {"tools": openai.omit, "logit_bias": likely, "extra_body": more}
    reply = chat(channels, **asked, logprobs=True)
    (answer,) = reply.choices
    assert answer.message.content == "<|end|>\na"
    assert answer.finish_reason == "stop"
    thoughts = getattr(answer.message, "reasoning_content", "")
    assert bool(thoughts) == (first == "a")
    assert streamed(channels, **asked)[:2] == (thoughts, answer.message.content)
    tokens = "".join(entry.token for entry in answer.logprobs.content)
    assert re.fullmatch(
        r"(<\|channel\|>analysis<\|message\|>.*<\|end\|><\|start\|>assistant)?"
        r"<\|channel\|>final<\|message\|><\|end\|>\na(<eos>)?",
        tokens,
        re.DOTALL,
    ), tokens
    assert reply.usage.completion_tokens == len(answer.logprobs.content)


def test_thoughts_before_a_structure_that_are_cut_are_no_text(channels: Live) -> None:
    likely = {str(channels.context.texts.tokenizer.encode("a")[0]): 30}
    asked = {"tools": openai.omit, "max_tokens": 30, "logit_bias": likely}
    (answer,) = chat(channels, **asked, extra_body={"structured_outputs": {"choice": ["ja"]}}).choices
    assert (answer.message.content, answer.finish_reason) == ("", "length")
    assert answer.message.reasoning_content


def test_a_forced_call_in_a_channel_comes_after_thoughts_with_a_budget(channels: Live) -> None:
    body = {"model": "tiny", "messages": SAID, "max_tokens": 100, "thinking": {"type": "enabled", "budget_tokens": 5}}
    tool = {"name": "ping", "input_schema": {"type": "object", "additionalProperties": False}}
    reply = channels.post("/v1/messages", {**body, "tools": [tool], "tool_choice": {"type": "any"}}).json()
    *before, last = [block["type"] for block in reply["content"]]
    assert (last, reply["stop_reason"]) == ("tool_use", "tool_use")
    assert set(before) <= {"thinking"}


SCHEMA = {"type": "object", "properties": {"a": {"enum": ["<tool_call>", "yes"]}}, "required": ["a"]}
CALL_OR_JSON = {
    "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
    "structured_outputs": {"json": SCHEMA},
}


@pytest.mark.parametrize("name", CALL_OR_JSON)
@pytest.mark.parametrize("thinks", [False, True])
def test_an_answer_is_a_call_or_a_text_that_follows_the_structure(live: Live, name: str, thinks: bool) -> None:
    more = {"chat_template_kwargs": {"enable_thinking": True}, "max_thinking_tokens": 3} if thinks else {}
    begins = live.context.texts.tokenizer.encode("<{")
    found = set()
    for likely in begins:
        asked = {
            "n": 3,
            "temperature": 1,
            "seed": 2,
            "logit_bias": {str(likely): 40.0 / (1 + thinks)},
            "extra_body": {**more, name: CALL_OR_JSON[name]},
        }
        for choice in chat(live, **asked).choices:
            message = choice.message
            found.add(bool(message.tool_calls))
            if message.tool_calls:
                assert message.content is None
                assert all(call.function.name in ("add", "ping") for call in message.tool_calls)
            else:
                assert choice.finish_reason == "stop"
                assert json.loads(message.content)["a"] in ("<tool_call>", "yes")
        (first,) = chat(live, **{**asked, "n": 1}).choices
        calls = [(call.function.name, call.function.arguments) for call in first.message.tool_calls or []]
        thoughts = first.message.reasoning_content if thinks else ""
        assert streamed(live, **{**asked, "n": 1}) == (
            thoughts,
            first.message.content or "",
            calls,
            first.finish_reason,
        )
    assert found == {True, False}


@pytest.mark.parametrize("choice", ["required", "none"])
def test_a_structure_holds_for_the_text_beside_tools_that_must_or_must_not_be_called(live: Live, choice: str) -> None:
    options = {
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "extra_body": {"structured_outputs": {"regex": "a+b"}},
    }
    (answer,) = chat(live, **options, logit_bias={"98": 50}).choices
    assert (answer.message.content is None) == bool(answer.message.tool_calls) == (choice == "required")
    assert choice == "required" or re.fullmatch("a+b", answer.message.content)


REFUSED = [
    ({"tools": [ADD, ADD]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "names of the form"),
    ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "the name of one of the tools"),
    ({"tools": [], "tool_choice": "required"}, "without tools"),
    ({"tool_choice": allowed_tools("auto", "add", "other")}, "the name of one of the tools"),
    ({"tool_choice": allowed_tools("required")}, "without tools"),
    ({"tool_choice": allowed_tools("none", "add")}, "tool_choice"),
    ({"reasoning_effort": "high", "chat_template_kwargs": {"mood": 1}}, "chat_template_kwargs"),
    ({"guided_regex": "a"}, "use structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "exactly one of"),
    ({"structured_outputs": {"structural_tag": "a"}}, "structural_tag"),
    ({"tool_choice": "required", "min_tokens": 3}, "min_tokens"),
    ({"tool_choice": "required", "bad_words": ["a"]}, "bad_words"),
    ({"structured_outputs": {"regex": "a"}}, "can only be json or json_object"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"not": {}}}}}, "'not'"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": 3}}]}]}, "tool_calls"),
    ({"structured_outputs": {"grammar": "start: %llguidance {}"}, "tools": []}, "%llguidance"),
    ({"structured_outputs": {"grammar": "start: nothing"}, "tools": []}, "nothing"),
    ({"structured_outputs": {"grammar": "start: %json {"}, "tools": []}, "%json without JSON"),
]


@pytest.mark.parametrize(("extra", "says"), REFUSED)
def test_what_cannot_be_done_is_refused_by_name(live: Live, extra: dict[str, Any], says: str) -> None:
    body = {"messages": SAID, "tools": [ADD], "max_tokens": 5, **extra}
    reply = live.post("/v1/chat/completions", body)
    assert reply.status_code == 400
    assert says in reply.json()["error"]["message"], reply.text


STRICT: dict[str, Any] = {
    "type": "function",
    "function": {"name": "loose", "parameters": {"type": "object", "not": {}}, "strict": True},
}
UNENFORCEABLE: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [PING, STRICT]}, "tools", "tool loose: "),
    ({"tools": [PING, STRICT], "tool_choice": "required"}, "tools", "tool loose: "),
    ({"tools": [PING, STRICT], "response_format": {"type": "json_object"}}, "tools", "tool loose: "),
    ({"structured_outputs": {"json": {"not": {}}}}, "structured_outputs", "'not'"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"not": {}}}}, "tools": []},
        "response_format",
        "'not'",
    ),
]


@pytest.mark.parametrize(("extra", "param", "says"), UNENFORCEABLE)
def test_a_schema_that_cannot_be_enforced_is_named_by_its_field(
    live: Live, extra: dict[str, Any], param: str, says: str
) -> None:
    reply = live.post("/v1/chat/completions", {"messages": SAID, "max_tokens": 5, **extra})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param
    assert says in reply.json()["error"]["message"]


def test_annotations_of_a_schema_are_ignored(live: Live) -> None:
    """Those of OpenAPI among them, wherever they are."""
    count = {"type": "integer", "format": "int32", "example": 3, "nullable": False, "minimum": 3, "maximum": 3}
    schema = {"type": "object", "properties": {"n": count}, "required": ["n"], "x-go-name": "Count"}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    (answer,) = chat(live, tools=openai.omit, response_format=form).choices
    assert json.loads(answer.message.content) == {"n": 3}
    tool = {"type": "function", "function": {"name": "count", "parameters": schema, "strict": True}}
    (answer,) = chat(live, tools=[tool], tool_choice="required", parallel_tool_calls=False).choices
    assert json.loads(answer.message.tool_calls[0].function.arguments) == {"n": 3}


def test_strict_tools_that_exceed_a_limit_together_are_named(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each schema can be enforced, but the grammar of all calls is too long. No grammar of these names is cached."""
    monkeypatch.setattr(live.context.llm.requests._grammars, "_limits", GrammarLimits(characters=200))
    named = (("long", ADD), ("short", PING))
    tools = [{**tool, "function": {**tool["function"], "name": name, "strict": True}} for name, tool in named]
    reply = live.post("/v1/chat/completions", {"messages": SAID, "max_tokens": 5, "tools": tools})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "tools")
    assert reply.json()["error"]["message"].startswith("tools: tools long, short: ")


def test_default_variables_are_those_that_the_template_names(tmp_path: Path) -> None:
    chat = save_chat_model(tmp_path / "chat", "{{ enable_thinking }}{{ messages[0].content }}")
    known, unknown = (ServerConfig(chat_template_kwargs={name: True}) for name in ("enable_thinking", "enable_thinkng"))
    assert _loaded(lambda: load(chat), known).tokenizer is not None
    with pytest.raises(ParameterError, match=r"^chat_template_kwargs='enable_thinkng'"):
        _loaded(lambda: load(chat), unknown)
