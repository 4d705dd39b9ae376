"""Events of streamed messages: blocks open and close in order, and make the unstreamed message."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from paceline.chat.values import (
    MessageEvent,
    ReasoningDelta,
    TextDelta,
    ToolCallArgumentsDelta,
    ToolCallEnd,
    ToolCallStart,
    message_of,
)
from paceline.core.outputs import CompletionOutput
from paceline.server.messages.replies import (
    MessageReply,
    MessageStream,
    MessageTokensDetails,
    MessageUsage,
    content_of,
    stop_of,
)

CALL = [ToolCallStart(0, "a", "read"), ToolCallArgumentsDelta(0, '{"p": '), ToolCallArgumentsDelta(0, "1}")]
SECOND = [ToolCallStart(1, "b", "ls"), ToolCallEnd(1)]
ANSWERS: dict[str, Sequence[MessageEvent]] = {
    "nothing": [],
    "text": [TextDelta("one "), TextDelta("two")],
    "thoughts": [ReasoningDelta("hm"), ReasoningDelta("m"), TextDelta("yes")],
    "calls": [ReasoningDelta("hm"), TextDelta("I look."), *CALL, ToolCallEnd(0), *SECOND],
}
USAGE = MessageUsage(
    input_tokens=1,
    cache_creation_input_tokens=0,
    cache_read_input_tokens=2,
    output_tokens=3,
    output_tokens_details=MessageTokensDetails(thinking_tokens=2),
)


def stream(events: Sequence[MessageEvent]) -> list[dict[str, Any]]:
    message = MessageReply(
        id="m",
        type="message",
        role="assistant",
        model="m",
        content=[],
        stop_reason=None,
        stop_sequence=None,
        usage=USAGE,
    )
    made = MessageStream(message)
    found = [*made.start(), *(each for event in events for each in made.feed([event]))]
    return [*found, *made.end("end_turn", None, USAGE)]


def joined(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The blocks that a client makes of the events."""
    blocks: list[dict[str, Any]] = []
    open_block = False
    for event in events:
        if event["type"] == "content_block_start":
            assert not open_block
            assert event["index"] == len(blocks)
            blocks.append({**event["content_block"], "arguments": ""})
            open_block = True
        elif event["type"] == "content_block_delta":
            assert open_block
            assert event["index"] == len(blocks) - 1
            name = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}
            field = name[event["delta"]["type"]]
            blocks[-1]["arguments" if field == "partial_json" else field] += event["delta"][field]
        elif event["type"] == "content_block_stop":
            assert open_block
            open_block = False
    assert not open_block
    for block in blocks:
        arguments = block.pop("arguments")
        if block["type"] == "tool_use":
            block["input"] = json.loads(arguments or "{}")
    return blocks


@pytest.mark.parametrize("events", ANSWERS.values(), ids=ANSWERS)
def test_the_blocks_of_a_stream_are_those_of_the_whole_message(events: Sequence[MessageEvent]) -> None:
    found = stream(events)
    assert [event["type"] for event in found[:2]] == ["message_start", "ping"]
    assert [event["type"] for event in found[-2:]] == ["message_delta", "message_stop"]
    assert found[-2]["usage"]["cache_read_input_tokens"] == 2
    assert found[-2]["usage"]["output_tokens_details"] == {"thinking_tokens": 2}
    assert joined(found) == [block.model_dump(exclude_unset=True) for block in content_of(message_of(events))]


@pytest.mark.parametrize("arguments", ["[1]", '{"a": ', '{"a": NaN}', '{"a": "\\ud800"}', "[" * 5000])
def test_arguments_that_are_no_object_stay_readable(arguments: str) -> None:
    events = [ToolCallStart(0, "a", "f"), ToolCallArgumentsDelta(0, arguments), ToolCallEnd(0, complete=False)]
    (block,) = content_of(message_of(events))
    assert block.input == {"INVALID_JSON": arguments}


def test_stop_reasons() -> None:
    def stop(reason: Any, stop_reason: Any = None, calls: int = 0) -> tuple[str, str | None]:
        return stop_of(CompletionOutput(0, finish_reason=reason, stop_reason=stop_reason), calls)

    assert stop("stop") == stop("stop", 7) == ("end_turn", None)
    assert stop("stop", "END") == ("stop_sequence", "END")
    assert stop("stop", 7, calls=2) == ("tool_use", None)
    assert stop("length", calls=1) == stop("deadline") == ("max_tokens", None)
