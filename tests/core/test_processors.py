"""Logits processors of a row: failures end their own request, and impossible restrictions are refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.config import SamplingParams
from paceline.core.processors import processed_row
from paceline.engine.engine import Request
from paceline.errors import ParameterError, RequestError
from toy import VOCAB, ToyModel, make_engine, make_request, run, toy_encode

PROMPT = [1, 2, 3]


def nothing_after(size: int) -> Any:
    def process(answer: list[int], logits: Tensor) -> Tensor:
        return torch.full_like(logits, -math.inf) if len(answer) >= size else logits

    return process


@pytest.mark.parametrize("drafter", [None, "ngram", "model"])
def test_a_row_without_any_allowed_token_ends_and_no_other_row_changes(drafter: str | None) -> None:
    free = SamplingParams(temperature=0, max_tokens=20)
    stuck = SamplingParams(temperature=0, max_tokens=20, logits_processors=[nothing_after(7)])
    engine = make_engine(ToyModel(), ToyModel() if drafter == "model" else None, drafter=drafter)
    failed, other = run(engine, [PROMPT, PROMPT], [stuck, free])
    alone = run(make_engine(ToyModel()), [PROMPT], [free])[0]
    assert failed.outputs[0].finish_reason == "error"
    assert isinstance(failed.error, RequestError)
    assert "left no token" in str(failed.error)
    assert failed.outputs[0].token_ids == alone.outputs[0].token_ids[: len(failed.outputs[0].token_ids)]
    assert len(failed.outputs[0].token_ids) <= 7
    assert other.outputs[0].token_ids == alone.outputs[0].token_ids


@pytest.mark.parametrize("drafter", [None, "ngram"])
def test_a_processor_that_leaves_only_end_tokens_before_min_tokens_ends_its_request(drafter: str | None) -> None:
    def process(answer: list[int], logits: Tensor) -> Tensor:
        return logits.masked_fill(torch.arange(len(logits)) != (5 if len(answer) < 3 else 9), -math.inf)

    params = SamplingParams(temperature=0, max_tokens=8, min_tokens=5, stop_token_ids=[9], logits_processors=[process])
    (found,) = run(make_engine(ToyModel(), drafter=drafter), [PROMPT], [params])
    assert found.outputs[0].finish_reason == "error"
    assert found.outputs[0].token_ids == [5, 5, 5][: len(found.outputs[0].token_ids)]


@pytest.mark.parametrize(
    "process",
    [
        lambda answer, logits: None,
        lambda answer, logits: logits[None],
        lambda answer, logits: logits[:3],
        lambda answer, logits: 1 / 0,
    ],
)
def test_a_processor_that_fails_ends_its_own_request(process: Any) -> None:
    wrong = SamplingParams(temperature=0, max_tokens=5, logits_processors=[process])
    failed, other = run(make_engine(ToyModel()), [PROMPT, PROMPT], [wrong, SamplingParams(max_tokens=5)])
    assert failed.outputs[0].finish_reason == "error"
    assert other.outputs[0].finish_reason == "length"


def forced(script: list[int]) -> Any:
    """A processor that allows the script's tokens only, and fails beyond its end."""

    def process(answer: list[int], logits: Tensor) -> Tensor:
        return torch.full_like(logits, -math.inf).index_fill(0, torch.tensor([script[len(answer)]]), 0.0)

    return process


DRAFTERS: list[dict[str, Any]] = [
    {"drafter": None},
    {"drafter": "ngram"},
    {"drafter": "ngram", "speculation_width": 2},
    {"drafter": "model"},
    {"drafter": "hybrid"},
]


def engine_with(options: dict[str, Any]) -> Any:
    draft = ToyModel() if options["drafter"] in ("model", "hybrid") else None
    return make_engine(ToyModel(), draft, num_speculative_tokens=4 if options["drafter"] else 0, **options)


@pytest.mark.parametrize("options", DRAFTERS, ids=str)
def test_no_processor_is_asked_after_an_end_token(options: dict[str, Any]) -> None:
    script = [5, 6, 5, 6, 9]
    params = SamplingParams(temperature=0, max_tokens=20, stop_token_ids=[9], logits_processors=[forced(script)])
    (output,) = run(engine_with(options), [[5, 6, 9, 5, 6]], [params])
    (answer,) = output.outputs
    assert (answer.finish_reason, answer.token_ids) == ("stop", script), answer.error


@pytest.mark.parametrize("options", DRAFTERS, ids=str)
def test_no_processor_is_asked_beyond_max_tokens(options: dict[str, Any]) -> None:
    """Beside a longer answer, whose rounds draft more tokens than the shorter one has left."""
    short = SamplingParams(temperature=0, max_tokens=3, logits_processors=[forced([4, 4, 4])])
    long = SamplingParams(temperature=0, max_tokens=30)
    output, _ = run(engine_with(options), [[4, 4, 4, 4], PROMPT], [short, long])
    (answer,) = output.outputs
    assert (answer.finish_reason, answer.token_ids) == ("length", [4, 4, 4]), answer.error


def test_a_processor_may_write_into_its_arguments() -> None:
    def spoil(answer: list[int], logits: Tensor) -> Tensor:
        answer.append(5)
        logits[:] = -math.inf
        logits[4] = 0.0
        return logits

    params = SamplingParams(temperature=0, max_tokens=6, logits_processors=[spoil])
    engine = make_engine(ToyModel(), drafter="ngram", num_speculative_tokens=3)
    assert run(engine, [PROMPT], [params])[0].outputs[0].token_ids == [4] * 6


@pytest.mark.parametrize(
    "restriction",
    [
        {"allowed_token_ids": [1, 2], "bad_words": ["a", "b"]},
        {"allowed_token_ids": [1], "bad_words": "za"},
        {"allowed_token_ids": [5], "stop_token_ids": [5], "min_tokens": 2},
    ],
)
def test_restrictions_that_allow_no_token_are_refused(restriction: dict[str, Any]) -> None:
    params = SamplingParams(**restriction)
    with pytest.raises(ParameterError, match=r"^allowed_token_ids="):
        processed_row(params, toy_encode, params.stop_token_ids, VOCAB)


def test_an_allowed_token_outside_of_the_vocabulary_is_refused() -> None:
    engine = make_engine(ToyModel())
    with pytest.raises(ParameterError, match=f"^allowed_token_ids={VOCAB}"):
        engine.add(make_request(PROMPT, SamplingParams(allowed_token_ids=[1, VOCAB])))


@pytest.mark.parametrize("restriction", [{"bad_words": "a"}, {"allowed_token_ids": [1]}, {"logits_processors": [max]}])
def test_an_engine_without_tokenizer_refuses_restrictions_by_name(restriction: dict[str, Any]) -> None:
    with pytest.raises(ParameterError, match=f"^{next(iter(restriction))}=.*LLM.generate"):
        make_engine(ToyModel()).add(Request(PROMPT, SamplingParams(**restriction)))
