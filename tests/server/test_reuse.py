"""Cached prompt tokens are counted in usage, and shared only between requests with the same API key and salt."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.config import ServerConfig
from paceline.core.row_tables import GROWS
from paceline.engine.tensor_file import decoded
from polling import wait_until
from server_support import Live, start
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
    hits, reused = live.metric("prefix_cache_hits_total"), live.metric("cached_prefix_tokens_reused_total")
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
    assert live.metric("cached_prefix_tokens_reused_total") - reused == cached(second)
    assert live.metric("cached_prefixes") > 0
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


@pytest.fixture(scope="module", params=[False, True], ids=["apart", "shared"])
def keyed(request: pytest.FixtureRequest, tiny: str) -> Iterator[tuple[Live, bool]]:
    """A server with two API keys, and whether they share prefixes."""
    config = ServerConfig(port=0, served_model_name="tiny", api_keys=("one", "two"), share_prefixes=request.param)
    for live in start(config, tiny):
        yield live, request.param


ECHO = f"{COMPLETIONS} with echo"


def body_of(route: str) -> dict[str, Any]:
    """A request for the route, with a text that no other route is sent."""
    text = f"{route[4:]} is told by the first key what nobody else may know"
    return {
        COMPLETIONS: {"prompt": text, "max_tokens": 4},
        ECHO: {"prompt": text, "max_tokens": 4, "echo": True, "logprobs": 1},
        CHAT: {"messages": [user(text)], "max_tokens": 4},
        "/v1/responses": {"input": text, "max_output_tokens": 16},
        "/v1/messages": {"messages": [user(text)], "max_tokens": 4, "model": "tiny"},
    }[route]


@pytest.mark.parametrize("route", [COMPLETIONS, ECHO, CHAT, "/v1/responses", "/v1/messages"])
def test_a_key_cannot_tell_what_another_keys_prompts_begin_with(keyed: tuple[Live, bool], route: str) -> None:
    live, shared = keyed

    def cached_of(key: str) -> int:
        reply = live.post(route.split()[0], body_of(route), headers={"authorization": f"Bearer {key}"})
        assert reply.status_code == 200, reply.text
        usage = reply.json()["usage"]
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
        return int(details.get("cached_tokens", usage.get("cache_read_input_tokens")))

    assert cached_of("one") == 0
    assert cached_of("one") > 0
    assert (cached_of("two") > 0) is shared


@pytest.mark.skipif(not GROWS, reason="rows do not grow here")
def test_after_a_restart_a_key_finds_its_own_texts_in_files(tiny: str, tmp_path: Path) -> None:
    config = ServerConfig(port=0, served_model_name="tiny", api_keys=("one", "two"))
    prompt = "what the first key says, in more than the sixty-four tokens that are worth a file of their own"

    prefixes, kept = tmp_path / "prefixes", tmp_path / "answers"
    options: dict[str, Any] = {"prefix_dir": str(prefixes), "lookup_dir": str(kept)}
    options |= {"drafter": "ngram", "attention": "native", "dtype": "auto"}

    def cached_of(live: Live, key: str) -> int:
        body = {"prompt": prompt, "max_tokens": 4, "temperature": 0}
        return cached(live.post(COMPLETIONS, body, headers={"authorization": f"Bearer {key}"}).json())

    def read_back(live: Live) -> bool:
        page = live.get("/metrics", headers={"authorization": "Bearer one"}).text
        return 'paceline:cached_prefix_events_total{event="read"} 1.0' in page

    for live in start(config, tiny, **options):
        assert cached_of(live, "one") == 0
    assert len(list(prefixes.iterdir())) == 1
    for live in start(config, tiny, **options):
        assert (cached_of(live, "two"), read_back(live)) == (0, False), "another key neither finds it nor waits for it"
        assert cached_of(live, "one") == len(prompt) - 1
        wait_until(lambda: read_back(live), "it was not read from a file")  # noqa: B023
        assert "in files" in live.context.llm.engine.describe()
    assert len(list(prefixes.iterdir())) == 2
    (file,) = kept.glob("*.answers")
    assert len(decoded(bytearray(file.read_bytes()))[1]["scopes"]) == 2, "answers of each key by themselves"
