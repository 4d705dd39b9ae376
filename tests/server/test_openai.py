"""OpenAI's client against a live server: the same answers as the offline API, in every format."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import jsonschema_rs
import openai
import pytest

from byte_model import TEMPLATE
from models.test_tokenizer import sentencepiece
from paceline.config import SamplingParams, ServerConfig
from paceline.core.outputs import CompletionOutput, TokenKind, TokenLogprob
from paceline.llm import LLM
from paceline.server.logprobs import Spelling, chat_logprobs, completion_logprobs
from paceline.server.replies import accepted_per_round
from server_support import Live, start
from web import client

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = "once upon a time"


def expected(offline: LLM, prompt: str = PROMPT, **params: Any) -> list[CompletionOutput]:
    params = {"max_tokens": 24, "temperature": 1.0, "seed": 7} | params
    return offline.generate(prompt, SamplingParams(**params), use_tqdm=False)[0].outputs


def ask(live: Live, prompt: Any = PROMPT, **params: Any) -> Any:
    params = {"model": "tiny", "max_tokens": 24, "temperature": 1.0, "seed": 7} | params
    return live.openai.completions.create(prompt=prompt, **params)


def test_a_completion_equals_that_of_the_offline_api(live: Live, offline: LLM) -> None:
    reply = ask(live)
    assert [choice.text for choice in reply.choices] == [answer.text for answer in expected(offline)]
    assert reply.choices[0].finish_reason == "length"
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (len(PROMPT), 24)


def test_a_nucleus_of_nothing_is_the_greedy_end(live: Live, offline: LLM) -> None:
    assert ask(live, top_p=0).choices[0].text == expected(offline, temperature=0)[0].text
    turn = {"model": "tiny", "top_p": 0, "temperature": 1.0, "seed": -7}
    short = live.post("/v1/responses", {**turn, "input": [], "max_output_tokens": 16})
    assert short.status_code == 200, short.text
    assert short.json()["top_p"] == 0


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_minus_one_token_fills_the_context(live: Live, path: str) -> None:
    prompt = {"prompt": PROMPT} if path == "completions" else {"messages": [{"role": "user", "content": PROMPT}]}
    body = {**prompt, "max_tokens": -1, "ignore_eos": True, "logprobs": False, "seed": 2**64 - 1}
    reply = live.post(f"/v1/{path}", body)
    assert reply.status_code == 200, reply.text
    assert reply.json()["usage"]["total_tokens"] == live.context.llm.engine.max_model_len
    live.wait_until_idle()


def test_n_answers_in_order_and_their_metrics(live: Live, offline: LLM) -> None:
    reply = ask(live, n=3, extra_body={"metrics": True})
    answers = expected(offline, n=3)
    assert [choice.text for choice in reply.choices] == [answer.text for answer in answers]
    for choice, answer in zip(reply.choices, answers, strict=True):
        extras = choice.paceline
        assert extras["token_ids"] == answer.token_ids
        assert "".join(extras["pieces"]) == choice.text
        assert extras["metrics"]["accepted"] == extras["kinds"].count("accepted") <= extras["metrics"]["drafted"]
    assert reply.usage.completion_tokens == 72


def test_a_stream_has_the_same_text_and_ends_with_usage(live: Live, offline: LLM) -> None:
    chunks = list(ask(live, n=2, stream=True, stream_options={"include_usage": True}))
    texts = {0: "", 1: ""}
    for chunk in chunks[:-1]:
        assert chunk.usage is None
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert list(texts.values()) == [answer.text for answer in expected(offline, n=2)]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 48


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_continuous_usage_statistics(live: Live, path: str) -> None:
    prompt: Any = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": PROMPT}
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {**prompt, "n": 2, "max_tokens": 12, "ignore_eos": True, "stream": True, "stream_options": options}
    lines = live.post(path, body).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    used = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert used == sorted(used)
    assert used[-2:] == [24, 24]
    assert used[0] < 12
    refused = live.post(path, {**body, "stream_options": {"continuous_usage_stats": True}})
    assert "needs include_usage" in refused.json()["error"]["message"]


def test_log_probabilities_belong_to_their_tokens_in_chunks_of_several(live: Live, offline: LLM) -> None:
    (answer,) = expected(offline, temperature=0.0, logprobs=2)
    chunks = list(ask(live, temperature=0.0, logprobs=2, stream=True, extra_body={"metrics": True}))
    ids = [token for chunk in chunks for token in chunk.choices[0].paceline["token_ids"]]
    values = [value for chunk in chunks for value in chunk.choices[0].logprobs.token_logprobs]
    assert answer.logprobs is not None
    assert ids == answer.token_ids
    assert values == pytest.approx([entry.logprob for entry in answer.logprobs], abs=1e-4)
    assert {len(each) for chunk in chunks for each in chunk.choices[0].logprobs.top_logprobs} == {2}
    offsets = [offset for chunk in chunks for offset in chunk.choices[0].logprobs.text_offset]
    assert offsets == [len("".join(answer.pieces[:i])) for i in range(len(ids))]


@pytest.mark.parametrize(
    ("kinds", "kept"),
    [
        ("", []),
        ("p p", []),
        ("r", [0]),
        ("a a b p r", [2, 0]),
        ("a b a a", [1, 2]),  # the last round was cut
    ],
)
def test_drafting_rounds_are_derived_from_token_kinds(kinds: str, kept: list[int]) -> None:
    words: dict[str, TokenKind] = {"a": "accepted", "r": "recovered", "b": "bonus", "p": "plain"}
    assert accepted_per_round([words[kind] for kind in kinds.split()]) == kept


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_reply_with_one_answer_has_acceptance_figures_at_its_root(live: Live, path: str) -> None:
    prompt: Any = {"messages": [{"role": "user", "content": PROMPT}]} if "chat" in path else {"prompt": PROMPT}
    body = prompt | {"max_tokens": 24, "temperature": 0, "ignore_eos": True, "metrics": True, "keep_prefix": False}
    whole = live.post(path, body).json()
    lines = live.post(path, body | {"stream": True}).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    told, own = whole["metrics"]["speculative_decoding"], whole["choices"][0]["paceline"]
    histogram = told["acceptance_histogram"]
    assert [chunk["metrics"]["speculative_decoding"] for chunk in chunks if "metrics" in chunk] == [told]
    assert sum(histogram) == told["num_spec_steps"] == sum(kind in ("recovered", "bonus") for kind in own["kinds"])
    accepted = sum(kept * rounds for kept, rounds in enumerate(histogram))
    assert accepted == told["num_accepted_draft_tokens"] == own["metrics"]["accepted"]
    assert told["num_draft_tokens"] == own["metrics"]["drafted"] > 0
    assert told["mean_acceptance_length"] == pytest.approx(1 + accepted / sum(histogram))
    assert told["num_spec_steps"] < own["metrics"]["rounds"], "some rounds drafted nothing"
    plain = live.post(path, body | {"num_speculative_tokens": 0}).json()
    assert plain["metrics"] == {"speculative_decoding": None}
    assert "metrics" not in live.post(path, body | {"n": 2}).json()
    assert "metrics" not in live.post(path, body | {"metrics": False}).json()


def test_a_stop_string_never_appears(live: Live, offline: LLM) -> None:
    (whole,) = expected(offline)
    stop = whole.text[6:9]
    text = "".join(chunk.choices[0].text for chunk in ask(live, stop=[stop], stream=True))
    assert text == whole.text[: whole.text.index(stop)]
    assert ask(live, stop=stop).choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    "params",
    [{"allowed_token_ids": [70, 71]}, {"bad_words": ["e"]}, {"bad_words": "a"}, {"skip_special_tokens": False}],
)
def test_tokens_may_be_restricted_and_special_ones_shown_as_offline(
    live: Live, offline: LLM, params: dict[str, Any]
) -> None:
    answer = ask(live, extra_body={**params, "metrics": True}).choices[0]
    (same,) = expected(offline, **params)
    assert (answer.text, answer.paceline["token_ids"]) == (same.text, same.token_ids)


def test_echo_returns_the_prompt_and_its_log_probabilities(live: Live, offline: LLM) -> None:
    reply = ask(live, echo=True, logprobs=1, max_tokens=4)
    found = reply.choices[0]
    assert found.text == PROMPT + expected(offline, max_tokens=4)[0].text
    assert found.logprobs.tokens[: len(PROMPT)] == list(PROMPT)
    assert found.logprobs.token_logprobs[0] is None
    distribution = offline.engine.next_logits(offline.requests.tokenizer.encode(PROMPT)[:5]).log_softmax(-1)
    own = offline.requests.tokenizer.encode(PROMPT)[5]
    assert found.logprobs.token_logprobs[5] == pytest.approx(distribution[own].item(), abs=1e-4)
    assert ask(live, echo=True, logprobs=1, max_tokens=0).choices[0].text == PROMPT


@pytest.mark.parametrize(("logprobs", "longest"), [(None, 0), (1, 1)])
def test_a_prompt_that_is_only_echoed_may_fill_the_context(live: Live, logprobs: int | None, longest: int) -> None:
    """The last token of a scored prompt is not read, as nothing follows it."""
    body = {"echo": True, "max_tokens": 0, "logprobs": logprobs}
    size = live.context.llm.engine.max_model_len + longest
    reply = live.post("/v1/completions", {"prompt": "a" * size, **body})
    assert (reply.status_code, reply.json()["choices"][0]["text"]) == (200, "a" * size)
    refused = live.post("/v1/completions", {"prompt": "a" * (size + 1), **body})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")


@pytest.fixture(scope="module")
def chunked(tiny: str) -> Iterator[Live]:
    """A server that reads long prompts in many chunks."""
    yield from start(ServerConfig(port=0, served_model_name="tiny"), tiny, prefill_chunk=8)


LONG = {"prompt": "once upon a time " * 25, "temperature": 0, "max_tokens": 4, "ignore_eos": True}
SCORED = LONG | {"echo": True, "logprobs": 1}


def scores(live: Live, **changes: Any) -> list[float | None]:
    """Log-probabilities of the prompt's tokens, whose first has none, and of the answer's."""
    values = live.post("/v1/completions", SCORED | changes).json()["choices"][0]["logprobs"]["token_logprobs"]
    return values[1:]  # type: ignore[no-any-return]


def test_a_stream_echoes_log_probabilities_once_its_first_sample_has_read_the_prompt(chunked: Live) -> None:
    """The other sample copies the prompt from the cache and has its tokens before."""
    alone = pytest.approx(scores(chunked, cache_salt="apart"), abs=1e-4)
    chunked.post("/v1/completions", LONG)
    lines = chunked.post("/v1/completions", SCORED | {"n": 2, "stream": True}).text.splitlines()
    chunks = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
    for index in (0, 1):
        first, *others = (chunk["logprobs"]["token_logprobs"] for chunk in chunks if chunk["index"] == index)
        assert [*first[1:], *(value for each in others for value in each)] == alone
    assert scores(chunked) == alone


def test_a_deadline_while_a_prompt_is_read_leaves_its_cached_log_probabilities_right(
    chunked: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone, engine = pytest.approx(scores(chunked, cache_salt="apart"), abs=1e-4), chunked.context.llm.engine
    with monkeypatch.context() as context:
        usual = engine.step
        context.setattr(engine, "step", lambda: (time.sleep(0.05), usual())[1])
        assert None in scores(chunked, cache_salt="shared", deadline_ms=500)
    assert scores(chunked, cache_salt="shared") == alone


def test_best_of_ranks_by_mean_log_probability(live: Live, offline: LLM) -> None:
    answers = expected(offline, n=4, logprobs=0)
    ranked = sorted(answers, key=lambda a: -(a.cumulative_logprob or 0) / len(a.token_ids))
    reply = ask(live, n=2, extra_body={"best_of": 4})
    assert [choice.text for choice in reply.choices] == [answer.text for answer in ranked[:2]]
    assert reply.usage.completion_tokens == sum(len(answer.token_ids) for answer in answers)


@pytest.mark.parametrize("rank_by", ["mean_logprob", "logprob"])
def test_ranked_answers_are_in_order_of_rank(live: Live, offline: LLM, rank_by: Any) -> None:
    answers = expected(offline, n=3, best_of=5, rank_by=rank_by)
    reply = ask(live, n=3, extra_body={"best_of": 5, "rank_by": rank_by, "metrics": True})
    assert [choice.text for choice in reply.choices] == [answer.text for answer in answers]
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    assert reply.choices[0].paceline["metrics"]["mean_logprob"] == pytest.approx(answers[0].mean_logprob, abs=1e-4)

    messages: Any = [{"role": "user", "content": "hello"}]
    params = SamplingParams(max_tokens=20, seed=3, n=3, best_of=5, rank_by=rank_by)
    best = offline.chat(messages, params, use_tqdm=False)[0].outputs
    common: dict[str, Any] = {"model": "tiny", "messages": messages, "max_tokens": 20, "seed": 3, "temperature": 1.0}
    chat = live.openai.chat.completions.create(**common, n=3, extra_body={"best_of": 5, "rank_by": rank_by})
    assert [choice.message.content for choice in chat.choices] == [answer.text for answer in best]
    assert [choice.index for choice in chat.choices] == [0, 1, 2]
    assert chat.usage is not None
    assert chat.usage.completion_tokens == 5 * 20


@pytest.mark.parametrize("extra", [{"best_of": 2}, {"rank_by": "mean_logprob"}], ids=repr)
def test_a_ranked_chat_cannot_be_streamed(live: Live, extra: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "stream": True, **extra}
    reply = live.post("/v1/chat/completions", body)
    assert reply.status_code == 400
    assert reply.json()["error"]["message"].startswith(f"{next(iter(extra))} cannot be streamed")


def test_tokens_that_differ_by_a_space_or_by_nothing_have_their_own_log_probabilities() -> None:
    spelling = Spelling(sentencepiece())
    spaced, bare, letter, byte = sentencepiece().huggingface.convert_tokens_to_ids(["▁th", "th", "t", "<0x74>"])
    top = ((spaced, -0.5), (bare, -1.0), (byte, -1.5), (letter, -2.5), (10**6, -3.5), (10**6 + 1, -4.5))
    for drawn, value in top:
        found = completion_logprobs(spelling, [drawn], [TokenLogprob(drawn, value, top)], [""], 0, 6)
        assert found.top_logprobs is not None
        assert found.top_logprobs[0] is not None
        assert sorted(found.top_logprobs[0].values(), reverse=True) == [value for _, value in top]
        assert found.top_logprobs[0][found.tokens[0]] == value == found.token_logprobs[0]
    content = chat_logprobs(spelling, [TokenLogprob(spaced, -0.5, top)]).content
    assert (content[0].token, content[0].bytes) == (" th", list(b" th"))


def test_several_prompts_as_texts_or_tokens(live: Live, offline: LLM) -> None:
    texts = [expected(offline, prompt)[0].text for prompt in ("ab", "xyz")]
    assert [choice.text for choice in ask(live, ["ab", "xyz"]).choices] == texts
    tokens = [offline.requests.tokenizer.encode(prompt) for prompt in ("ab", "xyz")]
    assert [choice.text for choice in ask(live, tokens).choices] == texts


@pytest.mark.parametrize("k", [0, 1, 4])
def test_num_speculative_tokens_of_a_request_does_not_change_its_text(live: Live, offline: LLM, k: int) -> None:
    body = {"metrics": True, "num_speculative_tokens": k}
    choice = ask(live, "abababababab", temperature=0.0, max_tokens=60, extra_body=body).choices[0]
    assert choice.text == expected(offline, "abababababab", temperature=0.0, max_tokens=60)[0].text
    metrics = choice.paceline["metrics"]
    assert metrics["drafted"] <= k * metrics["rounds"]
    assert (metrics["drafted"] == 0) == (k == 0)


def test_a_chat_whole_and_as_a_stream(live: Live, offline: LLM) -> None:
    messages: Any = [{"role": "user", "content": "hello"}]
    params = replace(offline.get_default_sampling_params(chat=True), max_tokens=20, seed=3, logprobs=2)
    (answer,) = offline.chat(messages, params, use_tqdm=False)[0].outputs
    common: Any = {"model": "tiny", "messages": messages, "max_completion_tokens": 20, "seed": 3}
    chat = live.openai.chat.completions
    reply = chat.create(**common, logprobs=True, top_logprobs=2)
    assert reply.choices[0].message.content == answer.text
    content = reply.choices[0].logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in content).decode(errors="replace") == answer.text
    assert {len(entry.top_logprobs) for entry in content} == {2}
    chunks = list(chat.create(**common, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == answer.text


def test_a_seeded_answer_does_not_depend_on_other_requests(live: Live, offline: LLM) -> None:
    prompts = [f"prompt number {i}" for i in range(16)]
    alone = [expected(offline, prompt, seed=i)[0].text for i, prompt in enumerate(prompts)]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda pair: ask(live, pair[1], seed=pair[0]).choices[0].text, enumerate(prompts)))
    assert together == alone


def test_models_tokenize_and_version_routes(live: Live) -> None:
    assert [model.id for model in live.openai.models.list()] == ["tiny"]
    assert live.openai.models.retrieve("tiny").id == "tiny"
    tokens = live.post("/tokenize", {"prompt": "héllo"}).json()
    assert tokens["count"] == len("héllo".encode())
    assert live.post("/detokenize", {"tokens": tokens["tokens"]}).json() == {"prompt": "héllo"}
    info = live.get("/tokenizer_info").json()
    assert (info["eos_token"], info["bos_token"], info["chat_template"]) == ("<eos>", None, TEMPLATE)
    (ends,) = live.post("/tokenize", {"prompt": info["eos_token"]}).json()["tokens"]
    assert live.post("/detokenize", {"tokens": [ends]}).json() == {"prompt": "<eos>"}
    assert live.get("/health").json() == {"status": "ready"}
    assert live.get("/version").status_code == 200
    assert "paceline:spec_decode_num_draft_tokens_total" in live.get("/metrics").text
    assert live.get("/stats").json()["capacity"] == 4
    peak = re.search(r"^paceline:peak_operations_per_second (\S+)$", live.get("/metrics").text, re.MULTILINE)
    assert peak is not None
    assert float(peak[1]) > 1e7, "measured during the warm-up"


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"model": "other"}, openai.NotFoundError, "'other' does not exist"),
        ({"temperature": -1}, openai.BadRequestError, "temperature=-1"),
        ({"prompt": "x" * 600}, openai.BadRequestError, "600 tokens"),
        ({"prompt": []}, openai.BadRequestError, "no tokens"),
        ({"logit_bias": {"x": 1}}, openai.BadRequestError, "logit_bias"),
        ({"extra_body": {"colour": "red"}}, openai.BadRequestError, "colour"),
        ({"extra_body": {"suffix": "the end"}}, openai.BadRequestError, "suffix is not supported"),
        ({"extra_body": {"best_of": 3}, "stream": True}, openai.BadRequestError, "best_of cannot be streamed"),
        ({"n": 50}, openai.BadRequestError, "at most 16"),
        ({"extra_body": {"timeout": 1e-6}}, openai.InternalServerError, "did not finish within"),
    ],
)
def test_invalid_requests_are_refused_by_name(live: Live, change: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        list(ask(live, **change))
    live.wait_until_idle()


@pytest.mark.parametrize(
    "body", [b"{", b"[]", b'{"prompt": "\\ud800"}', b'{"prompt": "a", "temperature": NaN}', b'{"prompt": null}']
)
def test_broken_bodies_get_400(live: Live, body: bytes) -> None:
    reply = client.post(f"{live.url}/v1/completions", content=body, headers={"content-type": "application/json"})
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["type"] == "invalid_request_error"


PLACE: Any = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "size": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["city", "size"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_follows_a_json_schema_with_and_without_drafting(live: Live, stream: bool) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "place", "schema": PLACE, "strict": True}}

    def texts(**extra: Any) -> list[str]:
        reply = live.openai.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}], n=2, seed=4, response_format=form,
            stream=stream, extra_body=extra,
        )  # fmt: skip
        if not stream:
            assert {choice.finish_reason for choice in reply.choices} == {"stop"}
            return [choice.message.content for choice in reply.choices]
        found = ["", ""]
        for chunk in reply:
            found[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        return found

    plain = texts(num_speculative_tokens=0)
    assert texts() == plain
    for text in plain:
        jsonschema_rs.validate(PLACE, json.loads(text))


def test_json_object_answers_are_json_objects(live: Live) -> None:
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "response_format": {"type": "json_object"},
        "max_tokens": 12,
        "temperature": 0,
    }
    text = live.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
    assert text.startswith("{")


@pytest.mark.parametrize(
    ("form", "says"),
    [
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}, "'not'"),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}, "nonsense"),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", "properties": 3}}},
            "wrong form",
        ),
        ({"type": "grammar"}, "json_schema"),
    ],
)
def test_a_schema_that_cannot_be_enforced_is_refused(live: Live, form: Any, says: str) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "response_format": form}
    reply = live.post("/v1/chat/completions", body)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"].startswith("response_format")
    assert says in reply.json()["error"]["message"]


@pytest.mark.usefixtures("unhurried")
def test_a_deadline_ends_an_answer_as_it_is(live: Live) -> None:
    choice = live.post("/v1/completions", {"prompt": "a", "max_tokens": 400, "deadline_ms": 30, "ignore_eos": True})
    found = choice.json()["choices"][0]
    assert (found["finish_reason"], found["stop_reason"]) == ("length", "deadline")


@pytest.mark.parametrize("extra", [{}, {"response_format": {"type": "json_object"}}], ids=repr)
def test_a_deadline_before_the_start_gives_an_empty_answer(live: Live, extra: dict[str, Any]) -> None:
    """Also if the answer's structure would have to be compiled first."""
    message = {"role": "user", "content": "hello"}
    reply = live.post("/v1/chat/completions", {"messages": [message], "deadline_ms": 0.001, **extra})
    assert reply.status_code == 200
    (choice,) = reply.json()["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "deadline")
    assert choice["message"]["content"] == ""
