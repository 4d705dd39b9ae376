"""Drafting on the CPU kernels in one call, and rounds that begin with it: the same bits as step by step."""

from __future__ import annotations

import operator
import signal
from _thread import interrupt_main
from typing import Any

import pytest
import torch
from benchmarks.step_trace import traces_of_steps

from batches import new_batch
from covering import in_pairs
from head_support import tiny_native_head
from paceline.config import SamplingParams
from paceline.core.batch import Batch, RowStart, SpeculationPlan
from paceline.core.draft import Draft, Verdict
from paceline.core.values import Accepted
from paceline.drafters.model import ModelDrafter
from paceline.engine import assembly
from paceline.engine.engine import Engine
from paceline.kernels import native
from paceline.kernels.attention.reference import ReferenceAttention
from paceline.kernels.cpu import cpu_ops
from paceline.lengths import LengthPolicy
from paceline.models.decoding.draft_decoder import DraftDecoder
from paceline.models.decoding.native_draft import NativeDraftDecoder, PlannedDraft, _Callbacks
from toy import POSITIONS, VOCAB, RandomLength, answers, kernels_of, make_engine, run, tiny_native

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not native.available(), reason=f"no kernels here: {native.why_none()}"),
]

SLOTS = (0, 2, 3, 5)
TEXTS = [[(5 * i + 2 * row) % VOCAB for i in range(size)] for row, size in enumerate((1, 12, 2, 31))]
K = 5
TARGET_WIDTH = 72  # width of the tiny target

PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.9},
    "cut": {"temperature": 1.2, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "penalties": {"temperature": 0.7, "presence_penalty": 0.8, "frequency_penalty": 0.3, "repetition_penalty": 1.2},
    "bias": {"temperature": 0, "logit_bias": {3: 4.0, 7: -9.0}},
}


def batch_of(params: SamplingParams) -> Batch:
    batch = new_batch(max(SLOTS) + 1, POSITIONS, VOCAB)
    for slot, text in zip(SLOTS, TEXTS, strict=True):
        batch.set_row(slot, RowStart(text, params, seed=slot))
    batch.set_live(SLOTS)
    return batch


def drafters(acceptance: str) -> tuple[ModelDrafter, ModelDrafter]:
    """A drafter that drafts in one call, and its reference."""
    sizes = ReferenceAttention(), max(SLOTS) + 1, POSITIONS, VOCAB
    at_once, by_steps = NativeDraftDecoder(tiny_native(2), *sizes), DraftDecoder(tiny_native(2), *sizes)
    return ModelDrafter(at_once, acceptance), ModelDrafter(by_steps, acceptance)


def commit(batch: Batch, draft: Draft, accepted: list[int]) -> Verdict:
    """Accept the given number of draft tokens of each row, and append one more token."""
    lines = [[*line[:count], *[4] * (K + 1 - count)] for line, count in zip(draft.draft_tokens, accepted, strict=True)]
    return batch.commit(draft, Accepted(torch.tensor(lines), torch.tensor(accepted)))


@in_pairs(kind=PARAMS, acceptance=["coupled", "rejection"], scored=[False, True])
def test_a_draft_equals_the_one_made_step_by_step(kind: str, acceptance: str, scored: bool) -> None:
    batch = batch_of(SamplingParams(max_tokens=40, **PARAMS[kind]))
    batch.ops = cpu_ops(batch.device)
    at_once, by_steps = drafters(acceptance)
    caps = [K, 2, 0, 4]
    for accepted in ([5, 2, 0, 1], [0, 1, 0, 4], [3, 2, 0, 0]):  # rows lag by different numbers of tokens
        plan = SpeculationPlan(K, caps, (lambda *_: False) if scored else None)
        draft, expected = at_once.propose(batch, plan), by_steps.propose(batch, plan).capped(caps)
        assert draft.draft_tokens == expected.draft_tokens
        assert (draft.confidence is None) == (expected.confidence is None) == (not scored)
        for line, others in zip(draft.confidence or [], expected.confidence or [], strict=True):
            assert list(line) == list(others)[: len(line)]
        if expected.probabilities is not None:
            assert draft.probabilities is not None
            for row, count in enumerate(draft.drafted):
                assert torch.equal(draft.probabilities[row, :count], expected.probabilities[row, :count])
        verdict = commit(batch, draft, accepted)
        at_once.observe(batch, verdict)
        by_steps.observe(batch, verdict)
        missing = [drafter.decoder.missing_tokens(batch) for drafter in (at_once, by_steps)]
        assert missing[0][0] == missing[1][0], "the reference drafts K tokens for every row: row 0 has them in both"


@pytest.mark.parametrize("behind", [0, 3, 15])
def test_the_first_pass_reads_what_a_row_has_missed(behind: int, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = batch_of(SamplingParams(temperature=0, max_tokens=40))
    at_once, by_steps = drafters("coupled")
    for drafter in (at_once, by_steps):
        drafter.propose(batch, SpeculationPlan(1))
        for slot, length in zip(batch.slots, batch.lengths, strict=True):
            drafter.decoder.num_computed_tokens[slot] = max(0, length - 1 - behind)
    monkeypatch.setattr(at_once.decoder, "catch_up", lambda *_: pytest.fail("a pass of its own"))
    draft, expected = (drafter.propose(batch, SpeculationPlan(K)) for drafter in (at_once, by_steps))
    assert draft.draft_tokens == expected.draft_tokens


def test_a_draft_ends_where_the_policy_stops_it() -> None:
    batch = batch_of(SamplingParams(temperature=0, max_tokens=40))
    (at_once, _), seen = drafters("coupled"), list[int]()

    def stop(_: Batch, scores: Any, parents: Any = None) -> bool:
        seen.append(len(scores[0]))
        return seen[-1] == 3

    draft = at_once.propose(batch, SpeculationPlan(K, stop_drafting=stop))
    assert draft.drafted == [3] * 4
    assert seen == [1, 2, 3]
    assert at_once.decoder.missing_tokens(batch) == [-2] * 4, "all draft tokens but the last are in the cache"


def engine_of(drafter: str, policy: LengthPolicy | None = None, **options: Any) -> Engine:
    target = tiny_native(1)
    draft = tiny_native(2) if drafter == "model" else tiny_native_head(target, TARGET_WIDTH)
    engine = make_engine(target, draft, drafter=drafter, attention="auto", **options)
    if policy is not None:
        engine.use_policy(policy)
    return engine


PROMPTS = [[1, 5, 9, 3, 5, 9], [2, 7, 7, 2, 7], [4, 4, 4], [9, 1, 8], [6], [3, 1, 4, 1, 5, 9, 2, 6]]
MIXED = [SamplingParams(temperature=row % 3 / 2, max_tokens=9 + 5 * row, seed=row) for row in range(len(PROMPTS))]


def outcome(engine: Engine) -> list[Any]:
    outputs = run(engine, PROMPTS, MIXED)
    counts = [(sample.metrics.rounds, sample.metrics.accepted) for output in outputs for sample in output.outputs]
    return [answers(outputs), counts]


@pytest.mark.parametrize("drafter", ["model", "feature"])
def test_a_round_in_one_call_equals_draft_and_round(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With rows that join and leave, random lengths, and drafts that are partly accepted."""
    whole = engine_of(drafter, RandomLength(seed=3))
    planned = list[bool]()
    propose = whole.parts.drafter.propose

    def watched(batch: Batch, plan: SpeculationPlan) -> Draft:
        draft = propose(batch, plan)
        planned.append(isinstance(draft, PlannedDraft))
        return draft

    monkeypatch.setattr(whole.parts.drafter, "propose", watched)
    parted = engine_of(drafter, RandomLength(seed=3))
    original = parted.parts.drafter.propose

    def read(batch: Batch, plan: SpeculationPlan) -> Draft:
        draft = original(batch, plan)
        assert draft.draft_tokens is not None
        return draft

    monkeypatch.setattr(parted.parts.drafter, "propose", read)
    assert outcome(whole) == outcome(parted)
    assert sum(planned) > 10


def test_answers_of_a_draft_model_equal_those_drafted_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = outcome(engine_of("model", RandomLength(seed=3)))
    monkeypatch.setattr(assembly, "runs_native_rounds", lambda _: False)
    engine = engine_of("model", RandomLength(seed=3))
    assert not isinstance(engine.parts.drafter.decoders[0], NativeDraftDecoder)
    assert outcome(engine) == at_once


@pytest.mark.parametrize("drafter", ["model", "feature"])
def test_a_round_of_known_length_is_one_native_call(drafter: str) -> None:
    for trace in traces_of_steps(engine_of(drafter), [1, 2, 3] * 4):
        assert dict(trace.native) == {"pl_round": 1}


@pytest.mark.parametrize("drafter", ["model", "feature"])
def test_the_time_of_a_draft_inside_of_a_round_is_the_drafts(drafter: str) -> None:
    engine = engine_of(drafter)
    run(engine, PROMPTS[:1], [SamplingParams(temperature=0, max_tokens=12)])
    assert kernels_of(engine).native._draft_seconds[0] > 0


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_that_comes_before_a_callback_is_raised_after_the_call() -> None:
    """Ctrl-C while the library works is first seen by Python when the library calls back."""
    callbacks = _Callbacks()
    called = callbacks.callback(lambda: True)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores interrupts
    try:
        found = list(map(operator.call, [called, interrupt_main, called]))
    finally:
        signal.signal(signal.SIGINT, before)
    assert found == [1, None, 0], "C code alone calls the three"
    with pytest.raises(KeyboardInterrupt):
        callbacks.raise_failure()
