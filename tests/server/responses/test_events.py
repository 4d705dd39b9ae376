"""Events of streamed responses: numbered, in order, and the same items as the whole response."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

import pytest

from paceline.chat.values import MessageEvent
from paceline.server.responses.events import ResponseStream
from server.messages.test_replies import ANSWERS


def stream(events: Sequence[MessageEvent]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the events and the items."""
    numbers = count()
    made = ResponseStream(lambda prefix: f"{prefix}_{next(numbers)}", lambda _: [])
    found = [*(each for event in events for each in made.feed([event])), *made.close("completed")]
    return found, made.items


@pytest.mark.parametrize("events", ANSWERS.values(), ids=ANSWERS)
def test_items_grow_to_what_their_done_events_say(events: Sequence[MessageEvent]) -> None:
    found, items = stream(events)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    assert [event["item"] for event in found if event["type"] == "response.output_item.done"] == items
    for index, item in enumerate(items):
        own = [event for event in found if event.get("output_index") == index]
        assert own[0]["type"] == "response.output_item.added"
        assert own[0]["item"]["status"] == "in_progress"
        assert own[-1]["type"] == "response.output_item.done"
        grown = "".join(event["delta"] for event in own if event["type"].endswith(".delta"))
        text = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert grown == text
        assert {event["item_id"] for event in own[1:-1]} == {item["id"]}


def test_the_items_of_an_answer_with_calls() -> None:
    _, items = stream(ANSWERS["calls"])
    assert [item["type"] for item in items] == ["reasoning", "message", "function_call", "function_call"]
    assert (items[2]["call_id"], items[2]["name"], items[2]["arguments"]) == ("a", "read", '{"p": 1}')
    assert stream(ANSWERS["nothing"])[1][0]["content"][0]["text"] == ""
