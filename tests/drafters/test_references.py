"""n-gram drafts from references and from answers, in whole engines."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from paceline.config import MAX_REFERENCE_TOKENS, MAX_REFERENCES, SamplingParams
from paceline.core.batch import Batch, ParallelSample, RequestGroup, SpeculationPlan
from paceline.core.draft import MAX_KINDS, Draft
from paceline.core.outputs import RequestOutput
from paceline.drafters import NgramDrafter
from paceline.drafters.lookup import REFERENCES
from paceline.engine.engine import Engine
from paceline.engine.request import Request
from paceline.errors import ParameterError
from paceline.kernels import native
from toy import VOCAB, ToyModel, answers, make_engine, make_request, run

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = [3, 9, 4]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def copying(**options: Any) -> Engine:
    return make_engine(ToyModel(), drafter="ngram", **options)


def play(engine: Engine, *requests: tuple[SamplingParams, Sequence[Sequence[int]]]) -> list[RequestOutput]:
    outputs = [engine.add(replace(make_request(PROMPT, params), references=texts)) for params, texts in requests]
    while engine.busy:
        engine.step()
        engine.scheduler.check_integrity()
    return outputs


def rounds(output: RequestOutput) -> list[int]:
    return [answer.metrics.rounds for answer in output.outputs]


@pytest.fixture(scope="module")
def right() -> list[int]:
    return answers(run(make_engine(ToyModel()), [PROMPT], [GREEDY]))[0][0]


@pytest.mark.parametrize("kernels", ["auto", "off"])
@pytest.mark.parametrize("n", [1, 3])
def test_a_right_reference_is_copied_by_every_answer(
    right: list[int], n: int, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(native.VARIABLE, kernels)
    [output] = play(copying(), (replace(GREEDY, n=n), [[7, 7], [*PROMPT, *right]]))
    assert answers([output]) == [[right] * n]
    assert max(rounds(output)) <= 6, "24 tokens, 4 draft tokens a round, all right"


def test_a_draft_says_where_its_draft_tokens_come_from(right: list[int]) -> None:
    """``auto`` needs it to judge drafts of other texts apart."""
    engine, kinds = copying(), set()
    propose = engine.parts.drafter.propose

    def watched(batch: Batch, plan: SpeculationPlan) -> Draft:
        draft = propose(batch, plan)
        rows = zip(draft.kinds or [], draft.drafted, strict=True)
        kinds.update(kind for line, count in rows for kind in line[:count])
        assert draft.spread(1, 3 + batch.rows).kinds == [[], *(draft.kinds or []), [], []]
        return draft

    engine.parts.drafter.propose = watched  # type: ignore[method-assign]
    play(engine, (replace(GREEDY, n=2), [[*PROMPT, *right[:12]]]))
    assert REFERENCES in kinds
    assert kinds <= set(range(MAX_KINDS))


def test_a_reference_helps_its_own_request_alone(right: list[int]) -> None:
    with_it, without = play(copying(), (GREEDY, [[*PROMPT, *right]]), (GREEDY, []))
    assert rounds(with_it)[0] < rounds(without)[0]


@pytest.mark.parametrize("kernels", ["auto", "off"])
def test_answers_are_drafted_from_earlier_samples(
    right: list[int], kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(native.VARIABLE, kernels)
    engine = copying(max_batch_size=1)  # one after the other: the first has no sample to copy from
    [output] = play(engine, (replace(GREEDY, n=3), []))
    alone, *later = rounds(output)
    assert answers([output]) == [[right] * 3]
    assert alone > 12
    assert max(later) <= 6
    [output] = play(copying(max_batch_size=1, lookup_tokens=0), (replace(GREEDY, n=3), []))
    assert answers([output]) == [[right] * 3]
    assert rounds(output) == [alone] * 3


def test_answers_are_drafted_from_those_of_earlier_requests_of_the_same_scope_only(right: list[int]) -> None:
    def again(first: Request, second: Request, **options: Any) -> bool:
        """Whether the second request takes fewer rounds than the first."""
        engine, outputs = copying(max_batch_size=1, **options), []
        for request in (first, second):
            outputs.append(engine.add(request))
            while engine.busy:
                engine.step()
        assert answers(outputs) == [[right]] * 2
        return rounds(outputs[1]) < rounds(outputs[0])

    plain = make_request(PROMPT, GREEDY)
    salted = make_request(PROMPT, replace(GREEDY, cache_salt="a"))
    private = make_request(PROMPT, replace(GREEDY, keep_prefix=False))
    assert again(plain, plain)
    assert again(salted, salted)
    assert again(replace(plain, prefix_owner="one"), replace(plain, prefix_owner="one"))
    assert not again(replace(plain, prefix_owner="one"), replace(plain, prefix_owner="two"))
    assert not again(salted, plain)
    assert not again(plain, salted)
    assert not again(private, plain)
    assert not again(private, private)
    assert not again(plain, plain, acceptance="rejection")


@pytest.mark.parametrize("kernels", ["auto", "off"])
def test_the_tokens_of_answers_are_bounded_over_many_requests_and_scopes(
    kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(native.VARIABLE, kernels)
    drafter = NgramDrafter(answer_tokens=500)
    texts = drafter.answers
    assert texts is not None
    for number in range(2000):
        owner = str(number % 7) if number < 1000 else str(number)
        drafter.end(0, ParallelSample(RequestGroup(scope=(owner,)), 0), [number % 50] * (number % 90))
        drafter.leave(0)
        assert texts.held <= 500
    assert texts.held > 300
    assert len(texts._scopes) < 30


def test_the_index_of_references_ends_with_their_request(right: list[int]) -> None:
    engine = copying()
    play(engine, (replace(GREEDY, n=3), [right]), (GREEDY, [right]))
    play(engine, *[(GREEDY, ())] * engine.config.max_batch_size)  # others take the rows
    gc.collect()
    drafter = engine.parts.drafter
    assert isinstance(drafter, NgramDrafter)
    assert not drafter._references


def refused(engine: Engine, references: Sequence[Sequence[int]], params: SamplingParams = GREEDY) -> str:
    with pytest.raises(ParameterError, match=r"^references=") as error:
        engine.add(replace(make_request(PROMPT, params), references=references))
    assert not engine.busy
    return str(error.value)


@pytest.mark.parametrize("drafter", [None, "model"])
def test_references_that_no_drafter_reads_are_refused(drafter: str | None) -> None:
    draft = None if drafter is None else ToyModel(blur=0.3)
    assert "drafter='ngram' or 'hybrid'" in refused(make_engine(ToyModel(), draft, drafter=drafter), [[1]])


def test_references_without_a_drafter_are_refused() -> None:
    assert "num_speculative_tokens=0" in refused(copying(), [[1]], replace(GREEDY, num_speculative_tokens=0))
    refused(copying(num_speculative_tokens=0), [[1]])


def test_references_have_a_limit() -> None:
    engine = copying()
    assert str(MAX_REFERENCE_TOKENS) in refused(engine, [[1] * MAX_REFERENCE_TOKENS, [1]])
    assert str(MAX_REFERENCES) in refused(engine, [[1]] * (MAX_REFERENCES + 1))
    play(engine, (replace(GREEDY, max_tokens=2), [[1] * MAX_REFERENCE_TOKENS]))


def test_a_reference_without_tokens_is_refused() -> None:
    assert "leave empty ones out" in refused(copying(), [[1, 2], []])


@pytest.mark.parametrize("token", [-1, VOCAB])
def test_a_reference_with_a_token_outside_the_vocabulary_is_refused(token: int) -> None:
    assert f"{VOCAB - 1}" in refused(copying(), [[1, token]])
