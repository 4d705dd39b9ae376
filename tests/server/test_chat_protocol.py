"""Fields that common clients send: supported, or ignored if they cannot change the answer; all others are refused."""

# mypy: disable-error-code=call-arg
from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from models.test_tokenizer import byte_level_backend, wrap
from paceline.chat.options import ChatOptions
from paceline.config import SamplingParams
from paceline.engine.chat import chat_prompt
from paceline.server.chat_protocol import ChatRequest
from paceline.server.errors import from_validation
from paceline.server.limits import MAX_LOGPROB_ENTRIES
from paceline.server.protocol import CompletionRequest
from paceline.server.responses.prompt import options_of
from paceline.server.responses.protocol import ResponsesRequest

USER: dict[str, Any] = {"role": "user", "content": "hi"}

HARMLESS: list[dict[str, Any]] = [
    {"prompt_cache_key": "a"},
    {"prompt_cache_retention": "24h"},
    {"prompt_cache_options": {"mode": "implicit"}},
    {"service_tier": "fast"},
    {"safety_identifier": "someone"},
    {"metadata": {"run": "7"}},
    {"reasoning_effort": "none"},
    {"verbosity": "medium"},
    {"parallel_tool_calls": True, "tools": []},
    {"suffix": ""},
    {"stop": ""},
    {"stop": ["", ""]},
    {"seed": -1},
    {"audio": None, "function_call": None},
    {"top_k": -1},
    {"stream": True, "stream_options": {"include_obfuscation": False}},
    {"skip_special_tokens": True, "use_beam_search": False, "add_generation_prompt": True, "chat_template_kwargs": {}},
]


@pytest.mark.parametrize("extra", HARMLESS, ids=str)
def test_fields_that_cannot_change_the_answer_are_accepted(extra: dict[str, Any]) -> None:
    plain, limit = ChatRequest(messages=[USER]).sampling(SamplingParams(), 8), {"max_tokens": 8}
    assert ChatRequest.model_validate({"messages": [USER], **extra}).sampling(SamplingParams(), 8) == plain
    assert CompletionRequest.model_validate({"prompt": "a", **limit, **extra}).sampling(SamplingParams(), 1) == plain


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"guided_json": {}}, "guided_json is not supported: use structured_outputs"),
        ({"suffix": "end"}, "suffix is not supported: only completions fill gaps"),
        ({"store": 0}, "store is not supported"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "include_obfuscation"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_unsupported_fields_are_refused_by_name(extra: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        ChatRequest.model_validate({"messages": [USER], **extra})


def test_messages_of_assistants_and_tools_may_be_empty() -> None:
    said = {"role": "assistant", "content": None, "tool_calls": None}
    returned = {"role": "tool", "content": None, "tool_call_id": "c"}
    request = ChatRequest.model_validate({"messages": [USER, said, {"role": "assistant"}, returned, USER]})
    assert [message["content"] for message in request.conversation] == ["hi", "", "", "", "hi"]
    with pytest.raises(ValidationError, match="only a message of an assistant or a tool"):
        ChatRequest.model_validate({"messages": [{"role": "user", "content": None}]})


def test_answers_are_read_as_clients_send_them_back() -> None:
    """With a type of each message (lm-eval), what OpenAI's client has parsed, and what LiteLLM adds everywhere."""
    more = {"provider_specific_fields": {"citations": None}}
    function = {"name": "add", "arguments": '{"a": 7}'}
    call = {"id": "c1", "type": "function", "function": {**function, "parsed_arguments": {"a": 7}, **more}, **more}
    said = {"role": "assistant", "content": '{"a": 7}', "parsed": {"a": 7}, "refusal": None, "tool_calls": [call]}
    said |= {"audio": None, "function_call": None, "annotations": [{"type": "url_citation"}], **more}
    request = ChatRequest.model_validate({"messages": [{"type": "text", **USER}, said, {"type": "message", **USER}]})
    first, answer, last = request.conversation
    assert first == last == USER
    assert answer == {
        "role": "assistant",
        "content": '{"a": 7}',
        "tool_calls": [{"id": "c1", "type": "function", "function": function}],
    }
    with pytest.raises(ValidationError, match=r"messages.0.type"):
        ChatRequest.model_validate({"messages": [{"type": "image", **USER}]})


NO_TEXT = {"role": "assistant", "content": None, "refusal": "I cannot."}
REFUSAL = {"role": "assistant", "content": [{"type": "refusal", "refusal": "I cannot."}]}


@pytest.mark.parametrize("refused", [NO_TEXT, REFUSAL])
def test_a_refusal_is_what_the_assistant_said(refused: dict[str, Any]) -> None:
    request = ChatRequest.model_validate({"messages": [USER, refused, USER]})
    assert request.conversation[1] == {"role": "assistant", "content": "I cannot."}


def test_a_call_and_its_result_in_the_form_that_tools_replaced() -> None:
    function = {"name": "add", "arguments": "{}"}
    called = {"role": "assistant", "content": None, "function_call": function}
    returned = {"role": "function", "name": "add", "content": "7"}
    request = ChatRequest.model_validate({"messages": [USER, called, returned]})
    _, call, result = request.conversation
    assert call == {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    assert result == {"role": "tool", "name": "add", "content": "7"}


@pytest.mark.parametrize(
    ("kind", "extra"),
    [
        (ChatRequest, {"max_tokens": -1}),
        (ChatRequest, {"max_completion_tokens": -1}),
        (CompletionRequest, {"max_tokens": -1}),
    ],
)
def test_minus_one_token_is_what_the_context_has_left(kind: Any, extra: dict[str, Any]) -> None:
    prompt = {"messages": [USER]} if kind is ChatRequest else {"prompt": "a"}
    assert kind.model_validate({**prompt, **extra}).answer_limit(90) == 90


def test_the_default_of_a_completion_is_a_few_tokens_and_of_a_chat_all_that_are_left() -> None:
    assert CompletionRequest(prompt="a").answer_limit(90) == 16
    assert ChatRequest(messages=[USER]).answer_limit(90) == 90


def test_an_answer_without_a_limit_is_as_long_as_one_reply_can_report() -> None:
    twenty = ChatRequest(messages=[USER], n=2, logprobs=True, top_logprobs=20)
    assert twenty.sampling(SamplingParams(), 131_072).max_tokens == MAX_LOGPROB_ENTRIES // 42
    assert ChatRequest(messages=[USER]).sampling(SamplingParams(), 131_072).max_tokens == 131_072
    assert ChatRequest(messages=[USER], max_tokens=7).answer_limit(90) == 7


def test_completions_without_log_probabilities_may_say_false() -> None:
    assert CompletionRequest.model_validate({"prompt": "a", "logprobs": False}).logprobs is None
    assert CompletionRequest.model_validate({"prompt": "a", "logprobs": 0}).logprobs == 0
    with pytest.raises(ValidationError, match="logprobs"):
        CompletionRequest.model_validate({"prompt": "a", "logprobs": True})


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file"])
def test_what_is_no_text_is_refused_by_its_type(kind: str) -> None:
    content = [{"type": "text", "text": "what is this?"}, {"type": kind, kind: {"url": "data:,"}}]
    body = {"messages": [{"role": "user", "content": content}]}
    with pytest.raises(ValidationError) as caught:
        ChatRequest.model_validate(body)
    error = from_validation(caught.value.errors(), body)
    assert str(error) == f"messages.0.content.1: parts of type {kind} are not supported: this server reads text only"
    assert error.param == "messages.0.content"


def test_names_reach_the_template_and_cache_hints_do_not() -> None:
    hint = {"type": "ephemeral"}
    parts = [{"type": "text", "text": "hi", "cache_control": hint, "prompt_cache_breakpoint": {"mode": "explicit"}}]
    message = {"role": "user", "name": "Ada", "content": parts, "cache_control": hint}
    request = ChatRequest.model_validate({"messages": [message, USER]})
    assert list(request.conversation) == [{"role": "user", "content": "hi", "name": "Ada"}, USER]


SENT: list[dict[str, Any]] = [
    {
        "function": {
            "strict": True,
            "parameters": {"required": ["b"], "properties": {"b": {"default": None}, "a": {}}, "x-order": 1},
            "name": "f",
        },
        "type": "function",
    },
    {"type": "function", "function": {"name": "g", "parameters": {}, "description": None}},
    {"type": "function", "function": {"name": "h"}},
]
TALK = "{% for tool in tools or () %}{{ tool | tojson }}{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"


def chat_options(api: str) -> ChatOptions:
    """The options of a conversation with the tools that were sent, in an API's form."""
    if api == "llm":
        return ChatOptions.of({"tools": SENT})
    if api == "chats":
        tools = [{**tool, "cache_control": {"type": "ephemeral"}} for tool in SENT]
        return ChatRequest.model_validate({"messages": [USER], "tools": tools}).chat_options
    tools = [{**tool["function"], "type": "function"} for tool in SENT]
    return options_of(ResponsesRequest.model_validate({"input": "hi", "tools": tools}))


@pytest.mark.parametrize("api", ["llm", "chats", "responses"])
def test_the_template_gets_the_tools_that_were_sent_as_in_transformers(api: str) -> None:
    tokenizer = wrap(byte_level_backend(), eos_token="<eos>", chat_template=TALK)
    prompt = chat_prompt(tokenizer, [USER], replace(chat_options(api), tool_parser="hermes"))
    own = [{"type": "function", "function": tool["function"]} for tool in SENT] if api == "responses" else SENT
    expected = tokenizer.huggingface.apply_chat_template([USER], tools=own, tokenize=False)
    assert tokenizer.spell(prompt.token_ids) == expected


def test_a_template_that_needs_a_description_gets_an_empty_one() -> None:
    template = TALK.replace("tool | tojson", "'// ' + tool.function.description + '.'")
    tokenizer = wrap(byte_level_backend(), eos_token="<eos>", chat_template=template)
    prompt = chat_prompt(tokenizer, [USER], ChatOptions.of({"tools": SENT, "tool_parser": "hermes"}))
    assert tokenizer.spell(prompt.token_ids) == "// .// .// .hi"
