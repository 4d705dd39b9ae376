"""Answers with several parts: a mask depends on the tokens before it alone, committed or drafted."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from chat_support import ADD, GEMMA_TEMPLATE, HARMONY_TEMPLATE, PING, save_chat_model
from covering import in_pairs
from paceline.chat.gemma import GEMMA4
from paceline.chat.harmony import SPECIAL
from paceline.chat.options import ChatOptions
from paceline.config import SamplingParams, StructuredOutputs
from paceline.core.outputs import CompletionOutput
from paceline.errors import StructureError
from paceline.llm import LLM
from paceline.models.text.tokenizer import Tokenizer
from paceline.structured.cursor import GrammarCursor
from paceline.structured.grammars import Grammars
from paceline.structured.phases import AnswerRules, PhasedConstraint, Thinking, Trigger, overshoots
from server_support import byte_tokenizer, load

pytest.importorskip("llguidance", reason="structured outputs need the extra 'structured'")
pytestmark = pytest.mark.usefixtures("one_thread", "no_trials")

VOCABULARY = 257
NOT_THE_END = "any but the end"
SAID = [{"role": "user", "content": "go go"}]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(byte_tokenizer())


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids)


@pytest.fixture(scope="module")
def rules(tokenizer: Tokenizer, grammars: Grammars) -> Any:
    """Makes rules: the grammar allows abc, or abd. thinking: what thoughts may begin with, between spaces."""
    grammar = grammars.grammar(StructuredOutputs(grammar='start: "ab" ("c" | "d")'))
    newline = tuple(tokenizer.encode("\n"))

    def tokens(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text)) if text else ()

    def make(
        *,
        thinking: str = "",
        inside: bool = False,
        budget: int | None = None,
        following: str = "",
        trigger: Trigger | None = None,
        header: str = "",
    ) -> AnswerRules:
        begin, end = thinking.partition(" ")[0].encode(), tokens("</t>")
        thoughts = Thinking(
            begin, b"</t>", [*map(tokens, thinking.split())], inside, budget, end, (), tokens(following)
        )
        start = lambda: GrammarCursor.at_start(grammar)  # noqa: E731
        return AnswerRules(
            thoughts if thinking else None,
            start,
            trigger,
            grammar.ends,
            newline,
            tokenizer.token_bytes,
            tokens(header),
        )

    return make


def allowed(constraint: PhasedConstraint, tokenizer: Tokenizer, draft: str = "") -> str | None:
    """Letters that may come after a draft, "$" for the end; None if all may, NOT_THE_END if all letters may."""
    tokens, logits = tokenizer.encode(draft) if draft else [], torch.zeros(1, VOCABULARY)
    constraint.mask(tokens, len(tokens), logits)
    found = (logits[0] == 0).nonzero()[:, 0].tolist()
    if len(found) == VOCABULARY:
        return None
    if found == list(range(VOCABULARY - 1)):
        return NOT_THE_END
    return "".join(sorted("$" if token == 256 else tokenizer.token_text(token) for token in found))


def after(rules: AnswerRules, tokenizer: Tokenizer, text: str) -> PhasedConstraint:
    constraint = PhasedConstraint(rules)
    constraint.advance(tokenizer.encode(text))
    return constraint


CASES: list[tuple[dict[str, Any], str, str | None]] = [
    ({}, "", "a"),
    ({}, "ab", "cd"),
    ({}, "abc", "$"),
    ({"trigger": Trigger(b"<<")}, "", None),
    ({"trigger": Trigger(b"<<")}, "x<<", "a"),
    ({"trigger": Trigger(b"<<")}, "<<ab", "cd"),
    ({"trigger": Trigger(b"<<")}, "<<abd", None),
    ({"trigger": Trigger(b"<<")}, "<<abd <<a", "b"),
    ({"trigger": Trigger(b"<<", repeats=False)}, "<<abd", "$"),
    ({"trigger": Trigger(b"<<", at_start=True)}, " \n<<", "a"),
    ({"trigger": Trigger(b"<<", at_start=True)}, "x<<", None),
    ({"thinking": "<t>", "inside": True}, "", NOT_THE_END),
    ({"thinking": "<t>", "inside": True}, "hm</t>", "\na"),
    ({"thinking": "<t>", "inside": True}, "hm</t>\n", "a"),
    ({"thinking": "<t>", "inside": True}, "<t></", NOT_THE_END),
    ({"thinking": "<t>", "inside": True, "trigger": Trigger(b"<<")}, "hm", None),
    ({"thinking": "<t>", "inside": True, "budget": 0}, "", "<"),
    ({"thinking": "<t>", "inside": True, "budget": 2}, "ab", "<"),
    ({"thinking": "<t>", "inside": True, "budget": 2}, "ab</t", ">"),
    ({"thinking": "<t>", "inside": True, "budget": 2}, "ab</t>", "a"),
    ({"thinking": "<t>"}, "", "<a"),
    ({"thinking": "<t>"}, "<", "t"),
    ({"thinking": "<t>"}, "<t>", NOT_THE_END),
    ({"thinking": "<t>"}, "<t>hm<t></t>", "\na"),
    ({"thinking": "<t>"}, "<t></t>\nab", "cd"),
    ({"thinking": "<t>"}, "ab", "cd"),
    ({"thinking": "<t>", "budget": 0}, "<t>", "<"),
    ({"thinking": "<t>", "budget": 0}, "<t></t>", "a"),
    ({"thinking": "<t>", "budget": 1}, "<t>x</t>ab", "cd"),
    ({"thinking": "at>"}, "", "a"),
    ({"thinking": "at>"}, "a", "bt"),
    ({"thinking": "at>"}, "ab", "cd"),
    ({"thinking": "at>"}, "at", ">"),
    ({"thinking": "at>"}, "at></t>", "\na"),
    ({"thinking": "ab"}, "ab", NOT_THE_END),
    ({"header": "<f>"}, "", "<"),
    ({"header": "<f>"}, "<f>", "a"),
    ({"header": "<f>"}, "<f>abc", "$"),
    ({"thinking": "<t>", "header": "<f>"}, "<", "ft"),
    ({"thinking": "<t>", "header": "<f>"}, "<f>", "a"),
    ({"thinking": "<t>", "header": "<f>"}, "<t><f></t>", "<"),
    ({"thinking": "<t>", "header": "<f>", "budget": 2}, "<t>xy", "<"),
    ({"thinking": "<t>", "header": "<f>", "budget": 2}, "<t>xy</t><f>ab", "cd"),
    ({"thinking": "<t>", "header": "<f>", "following": "+"}, "<t></t>", "+"),
    ({"thinking": "<t>", "header": "<f>", "following": "+"}, "<t></t>+<f>", "a"),
    ({"thinking": "<t>", "following": "+"}, "<t></t>", "+"),
    ({"thinking": "<t>", "following": "+"}, "<t></t>+ab", "cd"),
    ({"thinking": "<t>", "inside": True, "header": "<f>", "following": "+"}, "</t>+", "<"),
    ({"thinking": "<t>", "inside": True, "header": "<f>", "following": "+"}, "</t>+<", "ft"),
    ({"thinking": "<t>", "following": "+"}, "<t>x</t>+", "<a"),
    ({"thinking": "<t>", "following": "+"}, "<t>x</t>+<t>", NOT_THE_END),
    ({"thinking": "<t>", "following": "+"}, "<t>x</t>+<t></t>+<t>y</t>+ab", "cd"),
    ({"thinking": "<t> <u> ax"}, "", "<a"),
    ({"thinking": "<t> <u> ax"}, "a", "bx"),
    ({"thinking": "<t> <u> ax"}, "ax", NOT_THE_END),
    ({"thinking": "<t> <u>", "header": "<f>", "following": "+"}, "<u>x</t>+<", "ftu"),
    ({"thinking": "<t> <u>", "header": "<f>", "following": "+"}, "<u>x</t>+<t>y</t>+<f>ab", "cd"),
    ({"thinking": "<t> <u>", "following": "+", "budget": 6}, "<t>x</t>+<u>yz", "<"),
    ({"thinking": "<t> <u>", "following": "+", "budget": 6}, "<t>x</t>+<u>yz</t>+", "a"),
    ({"thinking": "<t>", "following": "+", "budget": 0}, "<t></t>+", "a"),
    ({"thinking": "<t>", "trigger": Trigger(b"<<"), "following": "+", "budget": 6}, "<t>x</t>+<t>y", None),
    ({"thinking": "<t>", "trigger": Trigger(b"<<"), "following": "+", "budget": 6}, "<t>x</t>+<t>yz", "<"),
    ({"thinking": "<t>", "trigger": Trigger(b"<<"), "following": "+", "budget": 6}, "<t>x</t>+<t>yz</t>+<<", "a"),
    ({"thinking": "<t>", "trigger": Trigger(b"<<"), "following": "+", "budget": 6}, "<t>x</t>+<<a", "b"),
    ({"thinking": "<t>", "trigger": Trigger(b"<<"), "budget": 1}, "<t>", None),
    ({"thinking": "<t>", "trigger": Trigger(b"<<"), "budget": 1}, " <t>x", "<"),
    ({"thinking": "<t>", "trigger": Trigger(b"<<"), "budget": 1}, "<t>x</t>y<<", "a"),
    ({"thinking": "<t>", "trigger": Trigger(b"<<")}, "<t><<", None),
    ({"thinking": "<t>", "trigger": Trigger(b"<<")}, "<<", "a"),
]


@pytest.mark.parametrize(("options", "text", "expected"), CASES)
def test_what_may_come_is_the_same_after_an_answer_and_after_a_draft(
    options: dict[str, Any], text: str, expected: str | None, rules: Any, tokenizer: Tokenizer
) -> None:
    for cut in range(len(text) + 1):
        constraint = after(rules(**options), tokenizer, text[:cut])
        assert allowed(constraint, tokenizer, text[cut:]) == expected, cut
        free = [allowed(constraint, tokenizer, text[cut:end]) is None for end in range(cut, len(text) + 1)]
        assert constraint.is_free(tokenizer.encode(text[cut:]) if text[cut:] else []) == all(free), cut


def test_a_token_that_ends_thoughts_has_nothing_behind_the_marker_but_what_may_follow(
    rules: Any, tokenizer: Tokenizer
) -> None:
    odd = {
        "P": b">a",
        "Q": b">x",
        "R": b"</t>\nab",
        "S": b"</t>c",
        "T": b">\n\n",
        "U": b"t>ab",
        "V": b"-</t>b",
        "W": b"<",
    }
    spelled = {token: odd.get(tokenizer.token_text(token), tokenizer.token_bytes(token)) for token in range(VOCABULARY)}
    overshot = overshoots(b"</t>", [*spelled.values()])
    made = rules(thinking="<t>", inside=True)
    made = replace(made, thinking=replace(made.thinking, overshoots=overshot), bytes_of=spelled.__getitem__)
    for text in ("", "</", "</t", "W/t", "<t></t"):
        constraint, logits = after(made, tokenizer, text), torch.zeros(1, VOCABULARY)
        constraint.mask([], 0, logits)
        for token in range(VOCABULARY - 1):
            if logits[0, token] == 0:
                after(made, tokenizer, text).advance([token])
            else:
                with pytest.raises(StructureError):
                    after(made, tokenizer, text).advance([token])
        forbidden = "".join(tokenizer.token_text(token) for token in (logits[0, :-1] != 0).nonzero()[:, 0].tolist())
        assert forbidden == ("QSV" if text.endswith("t") else "SV"), text


def test_tokens_of_a_models_vocabulary_end_thoughts_before_a_structure_only_as_it_begins(tmp_path: Path) -> None:
    odd = (">q", ">{", "</think>{", "</think>q")
    requests = load(save_chat_model(tmp_path / "odd", special=odd)).requests
    options = ChatOptions.of({"chat_template_kwargs": {"enable_thinking": True}})
    prompt = replace(requests.chat_prompt(SAID, options), structure=StructuredOutputs(json_object=True))
    make, encode = requests.chat_constraint(prompt, SamplingParams()), requests.tokenizer.encode
    assert make is not None
    constraint, logits = make(), torch.zeros(1, requests.tokenizer.vocab_size)
    constraint.advance(encode("x</think"))
    constraint.mask([], 0, logits)
    assert [bool(logits[0, encode(token)[0]] == 0) for token in odd] == [False, True, True, False]


def test_a_token_that_may_not_come_ends_the_answer(rules: Any, tokenizer: Tokenizer) -> None:
    constraint = PhasedConstraint(rules(thinking="<t>", inside=True, budget=0))
    with pytest.raises(StructureError):
        constraint.advance(tokenizer.encode("x"))


# --- answers ---


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_chat_model(tmp_path_factory.mktemp("phases") / "tiny")


def texts(llm: LLM, params: SamplingParams, **options: Any) -> list[tuple[str, list[int]]]:
    outputs = llm.chat(SAID, params, use_tqdm=False, **options)
    return [(answer.text, answer.token_ids) for answer in outputs[0].outputs]


@pytest.mark.parametrize("begin", ["<", "{"])
def test_speculation_changes_no_answer_that_is_a_call_or_follows_a_structure(path: str, begin: str) -> None:
    llm = load(path, drafter="ngram", num_speculative_tokens=5, max_batch_size=8)
    wanted = StructuredOutputs(json={"type": "object", "properties": {"a": {"enum": ["<tool_call>", "{{{"]}}})
    likely = dict.fromkeys(Tokenizer.load(byte_tokenizer()).encode(begin), 30.0)
    params = SamplingParams(n=3, seed=1, max_tokens=90, temperature=0.8, logit_bias=likely, structured_outputs=wanted)
    found = texts(llm, params, tools=[ADD, PING])
    assert found == texts(llm.plain(), params, tools=[ADD, PING])
    assert all(text.startswith("<tool_call>" if begin == "<" else "{") for text, _ in found)
    messages = [answer.message for answer in llm.chat(SAID, params, use_tqdm=False, tools=[ADD, PING])[0].outputs]
    assert {bool(message.tool_calls) for message in messages if message} == {begin == "<"}


@pytest.mark.parametrize("width", [1, 3])
def test_speculation_changes_no_answer_with_several_parts(path: str, width: int) -> None:
    llm = load(path, drafter="ngram", num_speculative_tokens=5, speculation_width=width, max_batch_size=8)
    plain = llm.plain()
    named = {"type": "function", "function": {"name": "add"}}
    think = {"chat_template_kwargs": {"enable_thinking": True}, "max_thinking_tokens": 9}
    open_ = {"chat_template_kwargs": {"enable_thinking": False}, "max_thinking_tokens": 4}
    likely = dict.fromkeys(Tokenizer.load(byte_tokenizer()).encode("<tool_call>nk"), 9.0)
    params = SamplingParams(n=2, seed=1, max_tokens=48, temperature=0.8, logit_bias=likely)
    for fields, choice in (({}, "auto"), (think, None), (think, "required"), (open_, named)):
        tools: dict[str, Any] = {} if choice is None else {"tools": [ADD, PING], "tool_choice": choice}
        assert texts(llm, params, **fields, **tools) == texts(plain, params, **fields, **tools)


@pytest.mark.parametrize(
    ("stop", "text", "reason"),
    [("kk", "kkkkk\n</think>\n\n", "kk"), ("</think>", "kkkkk\n", "</think>"), ("q", None, None)],
)
def test_stop_strings_end_an_answer_behind_its_thoughts(
    path: str, stop: str, text: str | None, reason: str | None
) -> None:
    likely = dict.fromkeys(Tokenizer.load(byte_tokenizer()).encode("k"), 100.0)
    params = SamplingParams(max_tokens=60, temperature=0, logit_bias=likely, stop=stop)
    think: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": True}, "max_thinking_tokens": 5}
    (answer,) = load(path).chat(SAID, params, use_tqdm=False, **think)[0].outputs
    assert (answer.text, answer.stop_reason) == (text or f"kkkkk\n</think>\n\n{'k' * 44}", reason)
    assert answer.message is not None
    assert answer.message.reasoning == "kkkkk"


FAMILIES: dict[str, tuple[str, Sequence[str], dict[str, float]]] = {  # with biases of tokens
    "harmony": (HARMONY_TEMPLATE, SPECIAL, {"<|channel|>": 30.0, "<|end|>": 100.0, "<|message|>": -60.0, "c": 25.0}),
    "gemma": (
        GEMMA_TEMPLATE,
        ("<|channel>", "<channel|>", *vars(GEMMA4).values()),
        {"<|channel>": 30.0, "<channel|>": 75.0},
    ),
}
HINTS = [{"role": "user", "content": "analysis, commentary to=functions.add, thought, final, call:add{a:"}]
STRUCTURE = StructuredOutputs(json={"enum": ["<|end|>", "<channel|>", '"', 10**9]})
FORCED: dict[str, Any] = {"tools": [ADD, PING], "tool_choice": "required"}


ASKED: dict[str, tuple[StructuredOutputs | None, dict[str, Any]]] = {
    "a structure": (STRUCTURE, {}),
    "calls": (None, FORCED),
    "calls or a structure": (STRUCTURE, {"tools": [ADD, PING]}),
}


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[LLM, SamplingParams]]:
    """Makes a model whose thoughts begin with several tokens, and parameters with which half of its answers have some.

    Each is made once.
    """

    @cache
    def make(name: str) -> tuple[LLM, SamplingParams]:
        template, special, biases = FAMILIES[name]
        path = save_chat_model(tmp_path_factory.mktemp("family") / name, template, special)
        encode = Tokenizer.load(byte_tokenizer(special)).encode
        likely = {encode(token)[0]: bias for token, bias in biases.items()}
        llm = load(path, drafter="ngram", num_speculative_tokens=5, max_batch_size=8)
        return llm, SamplingParams(n=8, seed=1, max_tokens=160, temperature=30.0, logit_bias=likely)

    return make


@in_pairs(name=FAMILIES, asked=ASKED, way=[(1, None), (3, None), (1, 6)])
def test_thoughts_that_begin_with_several_tokens_come_before_calls_and_structures(
    family: Callable[[str], tuple[LLM, SamplingParams]], name: str, asked: str, way: tuple[int, int | None]
) -> None:
    """way: the width of drafts, and the most tokens of thoughts."""
    (llm, params), (width, budget), (wanted, fields) = family(name), way, ASKED[asked]
    params, fields = replace(params, structured_outputs=wanted), {**fields, "max_thinking_tokens": budget}
    answers, expected = (
        each.chat(HINTS, params, use_tqdm=False, **fields)[0].outputs
        for each in (llm.with_options(speculation_width=width), llm.plain())
    )
    assert [(each.text, each.token_ids) for each in answers] == [(each.text, each.token_ids) for each in expected]
    assert {check_parts(each, wanted, fields) for each in answers} >= {(True, True), (False, True)}
    assert sum(each.metrics.accepted for each in answers)


def check_parts(answer: CompletionOutput, wanted: StructuredOutputs | None, fields: dict[str, Any]) -> tuple[bool, ...]:
    """Check that an answer that was not cut is thoughts, if any, and what they are followed by.

    Returns whether it has thoughts, and whether it was not cut.
    """
    message = answer.message
    assert message is not None
    if answer.finish_reason == "stop":
        assert bool(message.text) != bool(message.tool_calls)
        assert not message.text or json.loads(message.text) in json.loads(str(STRUCTURE.json))["enum"]
        assert not message.text or wanted is not None
        assert not message.tool_calls or "tools" in fields
        assert all(call.complete and call.name in ("add", "ping") for call in message.tool_calls)
    return message.reasoning is not None, answer.finish_reason == "stop"


def test_thoughts_before_a_structure_have_no_tokens_that_end_them_in_another_way(
    rules: Any, tokenizer: Tokenizer
) -> None:
    made = rules(thinking="<t>", inside=True)
    barred = replace(made, thinking=replace(made.thinking, barred=tokenizer.encode("xy")))
    logits = torch.zeros(1, VOCABULARY)
    PhasedConstraint(barred).mask([], 0, logits)
    forbidden = [*tokenizer.encode("xy"), VOCABULARY - 1]
    assert (logits[0] != 0).nonzero()[:, 0].tolist() == forbidden


@pytest.mark.parametrize(
    ("parser", "parameters", "keyword", "told", "begin"),
    [
        (
            "hermes",
            {"not": {"required": ["a"]}},
            "'not'",
            "are not enforced, so they may be any JSON object",
            '{"name": "search", "arguments": {',
        ),
        (
            "qwen_xml",
            {"properties": {"a": {}}, "minProperties": 1},
            "'minProperties'",
            "follow their schema but for this: ",
            "<function=search>",
        ),
    ],
)
def test_a_schema_that_cannot_be_enforced_is_told_once_or_refused(
    parser: str,
    parameters: dict[str, Any],
    keyword: str,
    told: str,
    begin: str,
    path: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    llm, params = load(path), SamplingParams(max_tokens=60, temperature=0)
    function = {"name": "search", "parameters": {"type": "object", **parameters}}
    fields: dict[str, Any] = {
        "tools": [{"type": "function", "function": function}, PING],
        "tool_choice": {"type": "function", "function": {"name": "search"}},
        "tool_parser": parser,
    }
    assert texts(llm, params, **fields)[0][0].startswith(f"<tool_call>\n{begin}")
    texts(llm, params, **fields)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith(f"arguments of search {told}")
    assert keyword in warning
    function["strict"] = True
    with pytest.raises(StructureError, match=f"tool search.*{keyword}"):
        texts(llm, params, **fields)
