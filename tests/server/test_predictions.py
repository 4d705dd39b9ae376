"""OpenAI's predicted outputs: the answer does not change, and usage rates the prediction."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.config import SamplingParams, ServerConfig
from paceline.config.limits import MAX_REFERENCE_CHARACTERS
from paceline.llm import LLM
from paceline.server.predictions import details_of, in_common
from server_support import Live, start

MESSAGES = [{"role": "user", "content": "write it again"}]


def ask(live: Live, prediction: Any = None, **options: Any) -> dict[str, Any]:
    given = {"messages": MESSAGES, "max_tokens": 40, "temperature": 0.0, "seed": 3, "metrics": True}
    given |= {"keep_prefix": False} | options  # an answer is not drafted from those before
    reply = live.post("/v1/chat/completions", given | ({} if prediction is None else {"prediction": prediction}))
    assert reply.status_code == 200, reply.text
    document: dict[str, Any] = reply.json()
    return document


def content(text: Any) -> dict[str, Any]:
    return {"type": "content", "content": text}


def texts(document: dict[str, Any]) -> list[str]:
    return [choice["message"]["content"] for choice in document["choices"]]


def rounds(document: dict[str, Any]) -> int:
    return max(choice["paceline"]["metrics"]["rounds"] for choice in document["choices"])


@pytest.fixture(scope="module")
def right(live: Live, offline: LLM) -> str:
    """The answer as text; every byte is a token."""
    [output] = offline.chat(MESSAGES, SamplingParams(temperature=0, max_tokens=40), use_tqdm=False)
    answer = output.outputs[0].text
    assert answer == texts(ask(live))[0]
    return answer


def counts(document: dict[str, Any]) -> tuple[int, int]:
    details = document["usage"]["completion_tokens_details"]
    return details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]


def test_a_correct_prediction_saves_rounds_and_is_counted(live: Live, right: str) -> None:
    plain, predicted = ask(live), ask(live, content(right))
    assert texts(predicted) == texts(plain)
    assert rounds(predicted) < rounds(plain)
    size = len(right.encode())
    kept, missed = counts(predicted)
    assert kept + missed == size
    assert plain["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
    assert predicted["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"]


def test_a_prediction_in_parts_equals_their_concatenation(live: Live, right: str) -> None:
    parts = [{"type": "text", "text": right[:7]}, {"type": "text", "text": right[7:]}]
    whole, pieced = (ask(live, content(each))["usage"] for each in (right, parts))
    assert whole.pop("prompt_tokens_details").keys() == pieced.pop("prompt_tokens_details").keys()  # cached
    assert whole == pieced


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("right", {}),
        ("right", {"n": 4, "temperature": 1.0}),
        ("wrong", {"n": 4, "temperature": 1.0}),
        ("short", {"logprobs": True, "presence_penalty": 1.0}),
    ],
)
def test_a_prediction_changes_no_answer(live: Live, right: str, kind: str, options: dict[str, Any]) -> None:
    prediction = {"right": right, "wrong": "\x00" * 50, "short": "a"}[kind]
    plain, predicted = ask(live, **options), ask(live, content(prediction), **options)
    assert texts(predicted) == texts(plain)
    kept, missed = counts(predicted)
    assert kept + missed == len(prediction.encode()) * len(predicted["choices"])
    assert kept == 0 or kind == "right"


def test_the_last_chunk_of_a_stream_counts_the_prediction(live: Live, right: str) -> None:
    client = live.openai.chat.completions
    given: Any = {"model": "tiny", "messages": MESSAGES, "max_tokens": 40, "temperature": 0, "seed": 3}
    chunks = list(
        client.create(**given, prediction=content(right), stream=True, stream_options={"include_usage": True})
    )
    whole = client.create(**given, prediction=content(right))
    used = [usage.model_copy(update={"prompt_tokens_details": None}) for usage in (chunks[-1].usage, whole.usage)]
    assert used[0] == used[1], "except for the tokens cached by the first"
    assert whole.usage.completion_tokens_details.accepted_prediction_tokens > 0


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("chat/completions", {"prediction": "text"}, "prediction"),
        ("chat/completions", {"prediction": {"type": "text", "content": "a"}}, "prediction.type"),
        ("chat/completions", {"prediction": content(7)}, "prediction.content"),
        ("chat/completions", {"prediction": content("")}, "prediction"),
        ("chat/completions", {"prediction": content(" \n\t\u3000")}, "prediction"),
        ("chat/completions", {"prediction": content([{"type": "text", "text": ""}])}, "prediction"),
        ("chat/completions", {"prediction": content([{"type": "image_url"}])}, "prediction.content"),
        ("chat/completions", {"prediction": content("a" * (MAX_REFERENCE_CHARACTERS + 1))}, "prediction"),
        ("chat/completions", {"prediction": content("a"), "num_speculative_tokens": 0}, "prediction"),
        ("completions", {"prediction": content("a")}, "prediction"),
    ],
)
def test_invalid_predictions_are_refused_by_name(live: Live, path: str, body: dict[str, Any], named: str) -> None:
    asked = {"messages": MESSAGES} if path.startswith("chat") else {"prompt": "a"}
    reply = live.post(f"/v1/{path}", asked | body)
    assert reply.status_code == 400
    assert named in f"{reply.json()['error']['param']} {reply.json()['error']['message']}"
    live.wait_until_idle()


@pytest.fixture(scope="module")
def without_lookup(tiny: str) -> Iterator[Live]:
    yield from start(ServerConfig(port=0, served_model_name="tiny"), tiny, drafter=None, num_speculative_tokens=0)


def test_a_server_without_lookup_refuses_predictions(without_lookup: Live) -> None:
    reply = without_lookup.post("/v1/chat/completions", {"messages": MESSAGES, "prediction": content("a")})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "prediction"
    assert "drafter='ngram'" in reply.json()["error"]["message"]


# --- counting ---------------------------------------------------------------------------------------------------------


def slow_in_common(first: list[int], second: list[int]) -> int:
    """Reference implementation: dynamic programming."""
    line = [0] * (len(second) + 1)
    for token in first:
        before = line
        line = [0]
        for place, other in enumerate(second):
            line.append(before[place] + 1 if token == other else max(before[place + 1], line[-1]))
    return line[-1]


@given(
    first=st.lists(st.integers(0, 3), max_size=80),
    others=st.lists(st.lists(st.integers(0, 5), max_size=80), max_size=3),
)
def test_bit_parallel_lcs_equals_dynamic_programming(first: list[int], others: list[list[int]]) -> None:
    assert in_common(first, others) == [slow_in_common(first, other) for other in others]


def test_long_texts_are_compared_token_by_token() -> None:
    rng = random.Random(1)
    text = [rng.randrange(50_000) for _ in range(3000)]
    changed = [token for place, token in enumerate(text) if place % 100 != 7]
    assert in_common(text, [changed]) == [len(changed)]


@pytest.mark.parametrize("answers", [[[5]] * 64, [list(range(2**14))]], ids=["of one token", "of many tokens"])
def test_a_long_prediction_costs_little_memory_and_is_indexed_once_for_all_answers(answers: list[list[int]]) -> None:
    readings = []

    class Prediction(list[int]):
        def __iter__(self) -> Iterator[int]:
            readings.append(1)
            return super().__iter__()

    prediction = Prediction(range(2**15))
    tracemalloc.start()
    try:
        details = details_of(prediction, answers)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    kept = sum(map(len, answers))
    assert details.accepted_prediction_tokens == kept
    assert details.rejected_prediction_tokens == len(prediction) * len(answers) - kept
    assert len(readings) == 1
    assert peak < 12 * 2**20, f"{peak / 2**20:.0f} MiB"
