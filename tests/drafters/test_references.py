"""n-gram drafts from references and from parallel samples, in whole engines."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from paceline.config import MAX_REFERENCE_TOKENS, MAX_REFERENCES, SamplingParams
from paceline.core.batch import Batch, SpeculationPlan
from paceline.core.draft import MAX_KINDS, Draft
from paceline.core.outputs import RequestOutput
from paceline.drafters import NgramDrafter
from paceline.drafters.lookup import REFERENCES
from paceline.engine.engine import Engine
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
    engine.parts.drafter = NgramDrafter(siblings=False)
    [output] = play(engine, (replace(GREEDY, n=3), []))
    assert rounds(output) == [alone] * 3


def test_answers_of_two_requests_are_not_drafted_from_each_other() -> None:
    first, second = play(copying(max_batch_size=1), (GREEDY, []), (GREEDY, []))
    assert rounds(first) == rounds(second)


def test_the_index_of_a_request_ends_with_it(right: list[int]) -> None:
    engine = copying()
    play(engine, (replace(GREEDY, n=3), [right]), (GREEDY, [right]))
    play(engine, *[(GREEDY, ())] * engine.config.max_batch_size)  # others take the rows
    gc.collect()
    drafter = engine.parts.drafter
    assert isinstance(drafter, NgramDrafter)
    assert not drafter._texts


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
