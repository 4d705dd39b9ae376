"""The first difference between two prompts of a client is found, logged and measured."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from paceline.server import transcripts
from paceline.server.transcripts import Transcripts
from server_support import Live

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_prompt_is_compared_with_the_most_similar_earlier_one_of_its_client() -> None:
    seen = Transcripts()
    assert seen.note("a", [1, 2, 3]) is None
    assert seen.note("b", [1, 2, 3]) is None
    longer = seen.note("a", [1, 2, 3, 4, 5])
    assert longer is not None
    assert longer.extends
    other = seen.note("a", [9, 9])
    assert other is not None
    assert (other.first_difference, other.extends) == (0, False)
    changed = seen.note("a", [1, 2, 7, 4, 5])
    assert changed is not None
    assert (changed.first_difference, changed.earlier_tokens, changed.extends) == (2, 5, False)
    again = seen.note("a", [1, 2, 3, 4, 5, 6])
    assert again is not None
    assert again.extends, "the other conversation goes on"


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transcripts, "_TOKENS", 10)
    seen = Transcripts()
    for client in range(200):
        for prompt in range(9):
            seen.note(f"client {client}", [prompt] * 50)
    assert len(seen._of_client) == 64
    assert {len(prompts) for prompts in seen._of_client.values()} == {4}
    assert {len(each) for prompts in seen._of_client.values() for each in prompts} == {10}


def test_a_changing_line_is_shown_in_the_log_and_in_a_metric(live: Live, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "paceline.server")

    def ask(day: int) -> None:
        system: dict[str, Any] = {"role": "system", "content": f"Today is day {day} of the year. You are helpful."}
        body = {"messages": [system, {"role": "user", "content": "hi"}], "max_tokens": 1}
        assert live.post("/v1/chat/completions", body).status_code == 200

    before = live.metric("prompt_first_difference_tokens_count")
    ask(327)
    ask(328)
    found = [getattr(record, "fields", {}) for record in caplog.records if record.getMessage() == "prompt differs"]
    assert found
    fields = found[-1]
    assert "Today is day 32" in fields["before"]
    assert (fields["was"][0], fields["now"][0]) == ("7", "8")
    assert fields["first_difference"] == len("[system]Today is day 32")
    assert live.metric("prompt_first_difference_tokens_count") >= before + 1
