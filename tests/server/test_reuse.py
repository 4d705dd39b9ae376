"""Cached prompt tokens are counted in usage, and shared only between requests with the same salt."""

from __future__ import annotations

import json
from typing import Any

import pytest

from server_support import Live
from web import client

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def post(live: Live, path: str, **body: Any) -> Any:
    reply = client.post(f"{live.url}{path}", json={"max_tokens": 4, "temperature": 0, **body})
    assert reply.status_code == 200, reply.text
    return reply.json()


def cached(document: Any) -> int:
    return int(document["usage"]["prompt_tokens_details"]["cached_tokens"])


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_cached_tokens_of_a_next_turn_appear_in_usage_metrics_and_streams(live: Live) -> None:
    hits = live.metric("prefix_cache_hits_total")
    messages = [user("a question that is new to this server")]
    first = post(live, CHAT, messages=messages)
    assert cached(first) == 0
    messages += [first["choices"][0]["message"], user("and?")]
    second = post(live, CHAT, messages=messages, metrics=True)
    assert cached(second) > first["usage"]["prompt_tokens"] - len(
        "[bot]"
    )  # the chat template's, which then adds [assistant]
    assert cached(second) == second["choices"][0]["paceline"]["metrics"]["cached_tokens"]
    assert live.metric("prefix_cache_hits_total") - hits == cached(second)
    third = post_stream(live, messages=messages)
    assert third["usage"]["prompt_tokens_details"]["cached_tokens"] == second["usage"]["prompt_tokens"] - 1


def post_stream(live: Live, **body: Any) -> Any:
    """The last chunk of a stream."""
    body = {"max_tokens": 4, "stream": True, "stream_options": {"include_usage": True}, **body}
    with client.stream("POST", f"{live.url}{CHAT}", json=body) as reply:
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line.startswith("data: {")]
    return json.loads(lines[-1])


def test_cached_tokens_of_several_answers_and_prompts(live: Live) -> None:
    prompts = ["one text that is long enough to be copied", "another text that is new to this server"]
    options = {"n": 3, "temperature": 1.0}
    assert cached(post(live, COMPLETIONS, prompt=prompts, **options)) == 0
    assert cached(post(live, COMPLETIONS, prompt=prompts, **options)) == sum(len(prompt) - 1 for prompt in prompts)


@pytest.mark.parametrize(
    ("first", "second", "copies"),
    [
        ({"cache_salt": "s1"}, {"cache_salt": "s1"}, True),
        ({"cache_salt": "s2"}, {"cache_salt": "s3"}, False),
        ({"keep_prefix": False}, {}, False),
    ],
)
def test_prefixes_are_shared_within_a_salt_only(
    live: Live, first: dict[str, Any], second: dict[str, Any], copies: bool
) -> None:
    prompt = f"a text of its own for {first} and {second}, which both of them send"
    assert cached(post(live, COMPLETIONS, prompt=prompt, **first)) == 0
    assert cached(post(live, COMPLETIONS, prompt=prompt, **second)) == (len(prompt) - 1 if copies else 0)


@pytest.mark.parametrize(
    "given", [{"cache_salt": ""}, {"cache_salt": 5}, {"cache_salt": "x" * 513}, {"keep_prefix": 1}]
)
def test_invalid_salts_are_refused(live: Live, given: dict[str, Any]) -> None:
    reply = client.post(f"{live.url}{COMPLETIONS}", json={"prompt": "a", **given})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == next(iter(given))
