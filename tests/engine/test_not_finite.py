"""Logits that are NaN or infinite, or all forbidden, end their own request and change no other row."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from covering import in_pairs
from kernels.tools import random_spec
from paceline.config import SamplingParams
from paceline.core.batch import Batch, SpeculationPlan
from paceline.core.draft import Draft
from paceline.core.outputs import RequestOutput
from paceline.drafters import Drafter
from paceline.engine.engine import Request
from paceline.engine.scoring import EMBEDDED, PooledStates, PromptScores
from paceline.errors import NotFiniteError, RequestError
from paceline.models.base import Model
from paceline.models.native.model import NativeModel
from paceline.server.errors import failed
from toy import POSITIONS, ToyModel, answers, make_engine, run, script_drafts, tiny_llama, truth_of

GREEDY = SamplingParams(temperature=0, max_tokens=24)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, max_tokens=24, seed=5)
SOUND, OTHER = [1, 2, 3], [4, 4, 9, 2]


@functools.cache
def native(broken: int | None, value: float = math.nan, quantization: Any = "int8") -> NativeModel:
    """Random model on the CPU kernels; the embedding of the token ``broken`` is not finite."""
    spec = random_spec(max_positions=POSITIONS, tied=False, seed=3)
    if broken is not None:
        embedding = spec.embedding.clone()
        embedding[broken, 5] = value
        spec = dataclasses.replace(spec, embedding=embedding)
    return NativeModel(spec, "native", quantization=quantization, threads=1)


class BrokenToy(ToyModel):
    """Toy model whose logits after the token ``broken`` are ``value``; ``dtype`` is that of its logits.

    In float32 the C++ operations draw, otherwise torch does.
    """

    def __init__(self, broken: int | None, value: float = math.nan, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.broken, self.value, self.logits_dtype = broken, value, dtype

    def hidden_states(self, tokens: Tensor, *given: Any) -> Any:
        states = super().hidden_states(tokens, *given)
        if self.broken is None:
            return states
        hidden = states.hidden.masked_fill((tokens == self.broken)[..., None], -1.0)
        return states._replace(hidden=hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        is_broken = hidden[..., :1] < 0
        logits = super().logits(hidden.clamp(min=0))
        return logits.masked_fill(is_broken, self.value).to(self.logits_dtype)


class Always(Drafter):
    """Drafts the one text that is given, whatever the rows are."""

    name = "always"

    def __init__(self, text: list[int]) -> None:
        self.text = text

    def propose(self, batch: Batch, plan: SpeculationPlan) -> Draft:
        return Draft([self.text[length : length + plan.k] for length in batch.lengths])


def sound_answers(model: Model, params: SamplingParams) -> tuple[list[int], list[int]]:
    first, second = answers(run(make_engine(model), [SOUND, OTHER], [params, params]))
    return first[0], second[0]


def token_of_one(first: list[int], second: list[int]) -> int:
    """The first token from the fourth on that only the first row's texts have."""
    return next(token for token in first[3:] if token not in (*first[:3], *second, *SOUND, *OTHER))


def check(
    outputs: list[RequestOutput], first: list[int], second: list[int], broken: int, *, early: bool = False
) -> None:
    """The first row has all tokens up to the broken one and an error; the second has its own answer.

    early: the row may have fewer tokens, because the CPU kernels' attention carries the NaN of a draft token to the
    tokens that are verified with it.
    """
    failed, other = outputs
    gained, expected = failed.outputs[0].token_ids, first[: first.index(broken) + 1]
    assert gained == expected or (early and gained == expected[: len(gained)])
    assert failed.outputs[0].finish_reason == "error"
    assert isinstance(failed.error, NotFiniteError)
    assert f"token {len(gained) + 1} of the answer" in str(failed.error)
    assert "'bfloat16' or 'float32'" in str(failed.error)
    assert other.outputs[0].token_ids == second
    assert other.outputs[0].finish_reason == "length"


@in_pairs(
    quantization=[None, "int8", "int4"],
    drafter=[None, "ngram", "model"],
    params=[GREEDY, SAMPLED, dataclasses.replace(SAMPLED, logprobs=2)],
)
def test_rounds_of_the_cpu_kernels(quantization: Any, drafter: str | None, params: SamplingParams) -> None:
    first, second = sound_answers(native(None, quantization=quantization), params)
    broken = token_of_one(first, second)
    target = native(broken, quantization=quantization)
    draft = native(None, quantization=quantization) if drafter == "model" else None
    engine = make_engine(target, draft, drafter=drafter)
    check(run(engine, [SOUND, OTHER], [params, params]), first, second, broken, early=drafter is not None)


TORCH = torch.bfloat16  # logits that the C++ operations do not take


@in_pairs(
    dtype=[torch.float32, TORCH],
    drafter=[None, "ngram", "model"],
    params=[GREEDY, SAMPLED, dataclasses.replace(SAMPLED, top_p=1.0, logprobs=2)],
    value=[math.nan, math.inf, -math.inf],
    rounds=["host", "device"],
)
def test_rounds_of_torch(
    dtype: torch.dtype, drafter: str | None, params: SamplingParams, value: float, rounds: str
) -> None:
    first, second = sound_answers(BrokenToy(None, dtype=dtype), params)
    broken = token_of_one(first, second)
    draft = BrokenToy(None, dtype=dtype) if drafter == "model" else None
    engine = make_engine(BrokenToy(broken, value, dtype), draft, drafter=drafter, rounds=rounds)
    check(run(engine, [SOUND, OTHER], [params, params]), first, second, broken)
    assert engine.rounds.counts[rounds] == sum(engine.rounds.counts.values())


@in_pairs(dtype=[torch.float32, TORCH], value=[math.nan, math.inf, -math.inf], rounds=["host", "device"])
def test_the_rejection_rule(dtype: torch.dtype, value: float, rounds: str) -> None:
    """Its draws differ from those of plain decoding, so only the ends of the answers are compared."""
    options = {"drafter": "model", "acceptance": "rejection", "rounds": rounds}
    sound = make_engine(BrokenToy(None, dtype=dtype), BrokenToy(None, dtype=dtype), **options)
    first, second = (each[0] for each in answers(run(sound, [SOUND, OTHER], [SAMPLED, SAMPLED])))
    broken = token_of_one(first, second)
    drafts = BrokenToy(None, dtype=dtype)
    engine = make_engine(BrokenToy(broken, value, dtype), drafts, **options)
    failed, other = run(engine, [SOUND, OTHER], [SAMPLED, SAMPLED])
    assert failed.outputs[0].token_ids == first[: first.index(broken) + 1]
    assert isinstance(failed.error, NotFiniteError)
    assert other.outputs[0].token_ids == second


@pytest.mark.parametrize("make", [native, BrokenToy])
@pytest.mark.parametrize("shape", ["caps", "chain and siblings", "random"])
def test_trees_and_ragged_chains(shape: str, make: Callable[..., Model]) -> None:
    params = [dataclasses.replace(SAMPLED, seed=seed) for seed in (5, 6)]
    found = answers(run(make_engine(make(None)), [SOUND, OTHER], params))
    (first,), (second,) = found
    broken = token_of_one(first, second)
    engine = make_engine(make(broken), drafter="ngram")
    script_drafts(engine, truth_of([SOUND, OTHER], params, found), shape)
    check(run(engine, [SOUND, OTHER], params), first, second, broken, early=make is native)


@pytest.mark.parametrize("make", [BrokenToy, functools.partial(BrokenToy, dtype=TORCH)])
def test_draft_tokens_beyond_the_end_of_an_answer_do_not_fail_it(make: Callable[..., Model]) -> None:
    """The stop token is accepted in the middle of a draft; the logits after it are NaN, but plain decoding has none."""
    first, second = sound_answers(make(None), GREEDY)
    broken = token_of_one(first, second)
    ends = dataclasses.replace(GREEDY, stop_token_ids=[broken])
    engine = make_engine(make(broken), drafter="ngram")
    engine.parts.drafter = Always([*SOUND, *first])
    (found,) = run(engine, [SOUND], [ends])
    assert found.outputs[0].finish_reason == "stop"
    assert found.outputs[0].token_ids == first[: first.index(broken) + 1]


@pytest.mark.parametrize("make", [native, BrokenToy])
def test_the_next_request_in_the_slot_of_a_failed_one(make: Callable[..., Model]) -> None:
    """No NaN that the failed row left behind in a cache reaches the text that overwrites it."""
    first, second = sound_answers(make(None), GREEDY)
    broken = token_of_one(first, second)
    engine = make_engine(make(broken), max_batch_size=1)
    failed, other = run(engine, [SOUND, OTHER], [GREEDY, GREEDY])
    check([failed, other], first, second, broken)


@in_pairs(dtype=[torch.float32, TORCH], params=[GREEDY, SAMPLED], value=[math.nan, math.inf, -math.inf])
def test_logits_processors_that_leave_nothing_to_draw_from(
    dtype: torch.dtype, params: SamplingParams, value: float
) -> None:
    first, second = sound_answers(BrokenToy(None, dtype=dtype), params)

    def process(answer: list[int], logits: Tensor) -> Tensor:
        return torch.full_like(logits, value) if len(answer) == 5 else logits

    broken = dataclasses.replace(params, logits_processors=[process])
    failed, other = run(make_engine(BrokenToy(None, dtype=dtype), drafter="ngram"), [SOUND, OTHER], [broken, params])
    assert failed.outputs[0].finish_reason == "error"
    assert isinstance(failed.error, RequestError)
    assert "left no token" in str(failed.error) or "no token is left" in str(failed.error)
    assert failed.outputs[0].token_ids == first[: len(failed.outputs[0].token_ids)]
    assert other.outputs[0].token_ids == second


def test_the_other_samples_of_a_failed_request_end_with_it() -> None:
    first, second = sound_answers(native(None), GREEDY)
    broken = token_of_one(first, second)
    engine = make_engine(native(broken))
    failed, other = run(engine, [SOUND, OTHER], [dataclasses.replace(GREEDY, n=2), GREEDY])
    assert [answer.finish_reason for answer in failed.outputs] == ["error", "error"]
    assert other.outputs[0].token_ids == second


@pytest.mark.parametrize("attention", ["padded", "split"])
def test_the_next_request_in_a_slot_with_masked_attention(attention: Any) -> None:
    """A masked NaN in the cache would make the attention of a longer row's neighbours NaN."""
    sound, broken_model = tiny_llama(), copy.copy(tiny_llama())
    first, second = sound_answers(sound, GREEDY)
    broken = token_of_one(first, second)
    embedding = sound._embedding.clone()  # type: ignore[attr-defined]
    embedding[broken] = math.nan
    broken_model._embedding = embedding  # type: ignore[attr-defined]
    engine = make_engine(broken_model, max_batch_size=1, attention=attention)
    check(run(engine, [SOUND, OTHER], [GREEDY, GREEDY]), first, second, broken)


@pytest.mark.parametrize(
    ("make", "reading"), [(native, PromptScores), (native, PooledStates), (BrokenToy, PromptScores)]
)
def test_results_for_a_prompt(make: Callable[..., Model], reading: Callable[[list[int]], Any]) -> None:
    engine = make_engine(make(7))
    texts = [[1, 2, 7, 3, 4], [1, 2, 5, 3, 4]]
    requests = [Request(text, EMBEDDED, reading=reading(text), only_read=True) for text in texts]
    outputs = [engine.add(request) for request in requests]
    while engine.busy:
        engine.step()
        engine.scheduler.check_integrity()
    assert isinstance(outputs[0].error, NotFiniteError)
    assert "the model's results for the prompt are NaN or infinite" in str(outputs[0].error)
    assert outputs[1].outputs[0].finish_reason == "length"
    assert not requests[1].reading.is_nan


def test_a_server_answers_with_500_and_the_message() -> None:
    response = failed(NotFiniteError("logits for token 3 of the answer", "tuned"))
    assert response.status == 500
    assert "token 3 of the answer" in str(response)
    assert "its adapter 'tuned'" in str(response)
