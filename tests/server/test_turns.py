"""Readers of answers: pieces are joined, and the tokens of thoughts are counted."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from paceline.chat.families import chat_format
from paceline.chat.values import (
    MessageEvent,
    ReasoningDelta,
    TextDelta,
    ToolCallArgumentsDelta,
    ToolDefinition,
    message_of,
)
from paceline.core.outputs import CompletionOutput, TokenLogprob
from paceline.server import documents
from paceline.server.delta import Delta
from paceline.server.turns import AnswerReader, ScoredText, merged
from server_support import Live

TEMPLATE = "{{ messages }}{{ tools }}<think></think><tool_call>"
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def delta(pieces: Sequence[str], ends: bool) -> Delta:
    ended = CompletionOutput(0, finish_reason="stop") if ends else None
    return Delta(0, "".join(pieces), [0] * len(pieces), ["plain"] * len(pieces), pieces, [], ended)


def test_consecutive_pieces_are_joined() -> None:
    events = [ReasoningDelta("a"), ReasoningDelta("b"), TextDelta("c"), TextDelta("d"), ToolCallArgumentsDelta(0, "1")]
    joined = [ReasoningDelta("ab"), TextDelta("cd"), ToolCallArgumentsDelta(0, "12"), ToolCallArgumentsDelta(1, "3")]
    assert merged([*events, ToolCallArgumentsDelta(0, "2"), ToolCallArgumentsDelta(1, "3")]) == joined


def test_a_hundred_thousand_pieces_are_joined_in_linear_time() -> None:
    events, before = [TextDelta("x" * 40)] * 100_000, time.process_time()
    (joined,) = merged(events)
    assert joined == TextDelta("x" * 4_000_000)
    assert time.process_time() - before < 3


BODIES: dict[str, dict[str, Any]] = {
    "/v1/messages": {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8},
    "/v1/responses": {"input": "hi", "max_output_tokens": 8},
}


def told(stream: str) -> str:
    """The text of a stream's updates, however long each is: the second answer is drafted from the first."""
    return "".join(re.findall('(?:"type":"text_delta","text"|"delta"):"([^"]*)"', stream))


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.usefixtures("one_thread")
def test_long_updates_are_read_outside_of_the_event_loop(
    live: Live, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop serves every client: a client that reads slowly gets one update of many tokens."""
    usual, threads = AnswerReader.feed, set()

    def feed(reader: AnswerReader, update: Delta) -> list[MessageEvent]:
        threads.add(threading.current_thread().name)
        return usual(reader, update)

    monkeypatch.setattr(AnswerReader, "feed", feed)
    body = {**BODIES[path], "seed": 7, "stream": True}
    short = live.post(path, body)
    monkeypatch.setattr(documents, "_SHORT_REPLY", 0)
    threads.clear()
    long = live.post(path, body)
    assert {name.rsplit("_", 1)[0] for name in threads} == {"replies"}
    assert told(long.text) == told(short.text)


@pytest.mark.parametrize(
    ("pieces", "tokens"),
    [
        (["<think>", "one", " two", "</think>", "yes"], 3),
        (["<think>", "one", " two"], 3),
        (["yes", " <think>", "no"], 0),
        (["<think>", "</think>", "yes"], 0),
        ([], 0),
    ],
)
@pytest.mark.parametrize("at_once", [True, False])
def test_the_tokens_of_thoughts_are_counted(pieces: list[str], tokens: int, at_once: bool) -> None:
    reader = AnswerReader(chat_format(TEMPLATE).parser())
    for number, piece in enumerate([] if at_once else pieces):
        reader.feed(delta([piece], number == len(pieces) - 1))
    if at_once or not pieces:
        reader.feed(delta(pieces, ends=True))
    assert reader.reasoning_tokens == tokens


def test_text_that_was_held_back_for_a_stop_string_comes_when_a_deadline_ends_the_answer() -> None:
    reader = AnswerReader(chat_format(TEMPLATE).parser())
    assert reader.feed(delta(["yes.", ""], ends=False)) == [TextDelta("yes.")]
    late = Delta(0, "END OF", [], [], [], [], CompletionOutput(0, finish_reason="deadline"))
    assert reader.feed(late) == [TextDelta("END OF")]
    joined = AnswerReader(chat_format(TEMPLATE).parser()).feed(Delta.joined([delta(["yes.", ""], ends=False), late]))
    assert joined == [TextDelta("yes.END OF")]


def test_a_call_after_thoughts_is_the_same_in_any_pieces() -> None:
    text = f"<think>hm</think>I look.{CALL}"
    tools = [ToolDefinition("f")]
    whole = message_of(AnswerReader(chat_format(TEMPLATE).parser(tools)).feed(delta([text], ends=True)))
    pieces = message_of(AnswerReader(chat_format(TEMPLATE).parser(tools)).feed(delta(list(text), ends=True)))
    assert (whole.reasoning, whole.text) == (pieces.reasoning, pieces.text) == ("hm", "I look.")
    assert (
        [call.arguments for call in whole.tool_calls] == [call.arguments for call in pieces.tool_calls] == ['{"a": 1}']
    )


@pytest.mark.parametrize(
    ("pieces", "text"),
    [
        (["<think>", "a", "</think>", "\n\n", "th", "ink", ""], ["th", "ink"]),
        (["", "é", " x", " \n", ""], ["", "é", " x", " \n"]),
        (["<think>a</think>\n\nHi", " you", "."], ["<think>a</think>\n\nHi", " you", "."]),
        (["Hi", " \n", *CALL, ""], ["Hi"]),
        (["1 <", "2", " <tool", "_x"], ["1 <", "2", " <tool", "_x"]),
    ],
)
@pytest.mark.parametrize("at_once", [True, False])
def test_the_text_has_the_log_probabilities_of_its_tokens(pieces: list[str], text: list[str], at_once: bool) -> None:
    reader = AnswerReader(chat_format(TEMPLATE).parser([ToolDefinition("f")]), scored=True)
    entries = [TokenLogprob(number, -float(number)) for number in range(len(pieces))]
    whole = replace(delta(pieces, ends=True), logprobs=entries)
    one_by_one = [
        replace(delta([piece], number == len(pieces) - 1), logprobs=entries[number : number + 1])
        for number, piece in enumerate(pieces)
    ]
    events = merged([event for each in ([whole] if at_once else one_by_one) for event in reader.feed(each)])
    (said,) = (event for event in events if isinstance(event, TextDelta))
    assert isinstance(said, ScoredText)
    assert [pieces[entry.token_id] for entry in said.logprobs] == text
