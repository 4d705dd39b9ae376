"""Losslessness of drafts from a part of the vocabulary (``draft_vocab_size``): see ``test_lossless``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from covering import in_pairs
from head_support import tiny_head, tiny_native_head
from kernels.tools import random_spec
from paceline.config import SamplingParams
from paceline.core.batch import Batch, SpeculationPlan
from paceline.core.draft import Draft, Verdict
from paceline.core.sampling import Choices
from paceline.core.values import Purpose
from paceline.drafters.heads.native import NativeHeadDecoder
from paceline.drafters.model import ModelDrafter
from paceline.engine.engine import Engine
from paceline.models.base import AnyModel
from paceline.models.decoding.draft_vocabulary import DraftVocabulary
from paceline.models.native.model import NativeModel
from recurrent_support import tiny_mtp, tiny_native_recurrent
from test_lossless import (
    EOS,
    GREEDY,
    MIXED,
    PARAMS,
    PROMPTS,
    SAMPLES,
    SMALL,
    SMALL_PARAMS,
    SMALL_TARGET,
    needs_kernels,
    p_value,
    plain,
    speculative_engine,
)
from toy import VOCAB, RandomLength, ToyModel, answers, make_engine, make_request, run, tiny_llama, tiny_native

pytestmark = pytest.mark.usefixtures("one_thread")

SIZE = 7  # of the 24 tokens


def whole_heads(model: str) -> tuple[AnyModel, AnyModel]:
    """A target, and a trained head for it whose vocabulary is the target's."""
    if model == "native":
        target = tiny_native(1)
        return target, tiny_native_head(target, 72, drafted=VOCAB)
    target = {"llama": tiny_llama, "toy": ToyModel}[model]()
    return target, tiny_head(target, 32 if model == "llama" else 8, drafted=VOCAB)


def vocabulary_of(engine: Engine) -> DraftVocabulary:
    (decoder,) = engine.parts.drafter.decoders
    assert decoder.vocabulary is not None
    return decoder.vocabulary


def note_drafts(engine: Engine) -> list[tuple[Draft, set[int]]]:
    """A list that gets every draft with the tokens that it could be made of."""
    found: list[tuple[Draft, set[int]]] = []
    propose = engine.parts.drafter.propose

    def noted(batch: Batch, plan: SpeculationPlan) -> Draft:
        draft = propose(batch, plan)
        found.append((draft, set(vocabulary_of(engine).tokens.tolist())))
        return draft

    engine.parts.drafter.propose = noted  # type: ignore[method-assign]
    return found


CASES = [
    ("llama", "model", "random", "mixed", 1),
    ("llama", "self", 4, "everything", 1),
    ("llama", "model", 4, "greedy", 3),
    ("native", "model", "random", "mixed", 1),
    ("native", "model", 4, "greedy", 1),
    ("native", "self", "caps", "everything", 1),
    ("native", "hybrid", "hybrid", "siblings", 2),
    ("native", "self", "selection", "processed", 1),
    ("recurrent", "head", "random", "mixed", 1),
    ("recurrent", "head", 4, "greedy", 1),
    ("recurrent", "head", 4, "siblings", 3),
    ("recurrent", "head hybrid", "hybrid", "everything", 1),
    ("recurrent", "head", "caps", "processed", 1),
    ("recurrent", "model", "confident", "mixed", 1),
]


@needs_kernels
@pytest.mark.parametrize(("model", "drafter", "length", "family", "width"), CASES)
def test_answers_equal_plain_decoding(model: str, drafter: str, length: int | str, family: str, width: int) -> None:
    options = {"speculation_width": width, "prefill_chunk": 7, "draft_vocab_size": SIZE}
    engine = speculative_engine(model, drafter, length, family, **options)
    drafts = note_drafts(engine)
    assert answers(run(engine, PROMPTS, PARAMS[family])) == plain(model, family)
    assert vocabulary_of(engine).version > 0, "the subset changed while sequences ran"
    if family == "greedy":  # a grammar may allow other tokens only
        drafted = [(token, subset) for draft, subset in drafts for row in draft.draft_tokens for token in row]
        assert len(drafted) > 100
        assert all(token in subset for token, subset in drafted)


@needs_kernels
@in_pairs(model=["llama", "native", "toy"], family=["greedy", "mixed", "siblings"], width=[1, 3])
def test_answers_with_a_head_of_the_whole_vocabulary_equal_plain_decoding(model: str, width: int, family: str) -> None:
    engine = make_engine(
        *whole_heads(model), eos=EOS, drafter="feature", speculation_width=width, draft_vocab_size=SIZE, prefill_chunk=7
    )
    engine.use_policy(RandomLength(seed=3))
    assert answers(run(engine, PROMPTS, PARAMS[family])) == plain(model, family)
    assert vocabulary_of(engine).version > 0


@needs_kernels
@pytest.mark.parametrize(
    ("model", "drafter", "size"),
    [("llama", "model", 3), ("native", "hybrid", SIZE), ("recurrent", "head", VOCAB - 1), ("native", "hybrid", 3)],
)
def test_greedy_answers_equal_plain_decoding_under_the_rejection_rule(model: str, drafter: str, size: int) -> None:
    options: dict[str, Any] = {"acceptance": "rejection", "draft_vocab_size": size}
    engine = speculative_engine(model, drafter, "random", "greedy", **options)
    assert answers(run(engine, PROMPTS, GREEDY)) == plain(model, "greedy")
    assert vocabulary_of(engine).version == 0


@needs_kernels
@pytest.mark.parametrize(("model", "drafter"), [("native", "model"), ("recurrent", "head")])
def test_sampled_answers_under_the_rejection_rule_are_the_same_the_second_time(model: str, drafter: str) -> None:
    options: dict[str, Any] = {"acceptance": "rejection", "draft_vocab_size": SIZE, "max_batch_size": 8}
    engine = speculative_engine(model, drafter, 3, "mixed", **options)
    assert answers(run(engine, PROMPTS, MIXED)) == answers(run(engine, PROMPTS, MIXED))


@needs_kernels
@pytest.mark.parametrize("temperature", [0, 0.8, 1.5])
@pytest.mark.parametrize("model", ["native", "llama"])
def test_a_model_that_drafts_for_itself_errs_only_outside_of_the_subset(model: str, temperature: float) -> None:
    """The noise is that of the target's token ids: with other noise, sampled drafts would err everywhere."""
    engine = speculative_engine(model, "self", 4, "greedy", draft_vocab_size=SIZE)
    drafts, rejected = note_drafts(engine), 0
    observe = engine.parts.policy.observe

    def check(batch: Batch, verdict: Verdict) -> None:
        nonlocal rejected
        subset = drafts[-1][1] if drafts else set()
        for tokens, count, drafted in zip(verdict.tokens, verdict.accepted, verdict.drafted, strict=True):
            if count < drafted:
                rejected += 1
                assert tokens[count] not in subset
        observe(batch, verdict)

    engine.parts.policy.observe = check  # type: ignore[method-assign]
    params = [SamplingParams(temperature=temperature, max_tokens=22, seed=seed) for seed in range(len(PROMPTS))]
    run(engine, PROMPTS, params)
    assert rejected > 20


@needs_kernels
@pytest.mark.parametrize("kind", ["mtp", "feature"])
def test_a_native_head_gives_the_subset_the_bits_of_its_whole_vocabulary(kind: str) -> None:
    """Logits and distributions of the first draft tokens, after the subset has changed."""
    target = tiny_native_recurrent() if kind == "mtp" else tiny_native(1)
    head = tiny_mtp(target) if kind == "mtp" else tiny_native_head(target, 72, drafted=VOCAB)

    def first_draft(size: int) -> tuple[Tensor, Tensor, NativeHeadDecoder]:
        engine = make_engine(
            target, head, drafter="feature", draft_vocab_size=size, acceptance="rejection", max_batch_size=10
        )
        for seed, prompt in enumerate(PROMPTS):
            engine.add(make_request(prompt, SamplingParams(temperature=0.8, max_tokens=9, seed=seed)))
        propose = engine.parts.drafter.propose
        engine.parts.drafter.propose = lambda batch, _plan: batch.empty_draft  # type: ignore[method-assign]
        while engine.scheduler.prefilling or not engine.batch.rows:
            engine.step()
        (decoder,) = engine.parts.drafter.decoders
        assert isinstance(decoder, NativeHeadDecoder)
        if size and decoder.vocabulary is not None:
            propose(engine.batch, SpeculationPlan(2))
            decoder.vocabulary.count([19, 20, 21, 22, 22])
            decoder.vocabulary.choose()
        draft = propose(engine.batch, SpeculationPlan(1))
        assert draft.probabilities is not None
        return decoder.native.scratch.clone(), draft.probabilities, decoder

    whole, q_whole, _ = first_draft(0)
    short, q_short, decoder = first_draft(SIZE)
    assert decoder.vocabulary is not None
    tokens = decoder.vocabulary.tokens
    assert {19, 20, 21, 22} < set(tokens.tolist())
    rows = q_short.sum(-1)[:, 0] > 0
    torch.testing.assert_close(short[rows][:, tokens], whole[rows][:, tokens], rtol=0, atol=0)
    outside = torch.ones(VOCAB, dtype=torch.bool).index_fill_(0, tokens, False)
    assert q_short[:, :, outside].sum() == 0
    renormalised = q_whole[:, :, tokens] / q_whole[:, :, tokens].sum(-1, keepdim=True)
    torch.testing.assert_close(q_short[:, :, tokens], renormalised)


# --- distributions ----------------------------------------------------------------------------------------------------


def small_native() -> NativeModel:
    spec = random_spec(vocab_size=SMALL, layers=1, max_positions=64, tied=False, seed=2)
    return NativeModel(spec, "small", quantization="int8", threads=1)


SMALL_DRAFTS: dict[str, Callable[[], AnyModel]] = {
    "llama": functools.partial(tiny_llama, 2, SMALL),
    "native": small_native,
    "head": lambda: tiny_head(SMALL_TARGET(), 8, drafted=SMALL),
    "native head": lambda: tiny_native_head(SMALL_TARGET(), 8, drafted=SMALL),
}


def small_engine(draft: str, rule: str, size: int = 2) -> Engine:
    return make_engine(
        SMALL_TARGET(),
        SMALL_DRAFTS[draft](),
        drafter="feature" if "head" in draft else "model",
        acceptance=rule,
        draft_vocab_size=size,
        num_speculative_tokens=2,
        max_batch_size=50,
        max_model_len=16,
    )


@needs_kernels
@pytest.mark.parametrize(
    ("draft", "rule", "knobs"),
    [
        ("native", "rejection", "temperature only"),
        ("native", "rejection", "every knob"),
        ("llama", "rejection", "temperature only"),
        ("native head", "rejection", "temperature only"),
        pytest.param("native head", "rejection", "every knob", marks=pytest.mark.slow),
        pytest.param("head", "rejection", "every knob", marks=pytest.mark.slow),
        pytest.param("llama", "rejection", "a structure", marks=pytest.mark.slow),
        pytest.param("native", "rejection", "a structure", marks=pytest.mark.slow),
        pytest.param("native", "coupled", "every knob", marks=pytest.mark.slow),
        pytest.param("native head", "coupled", "temperature only", marks=pytest.mark.slow),
    ],
)
def test_three_tokens_follow_the_exact_distribution(draft: str, rule: str, knobs: str) -> None:
    params = SamplingParams(n=SAMPLES, max_tokens=3, seed=31, **SMALL_PARAMS[knobs])
    assert p_value(small_engine(draft, rule), params) > 1e-3


@needs_kernels
def test_distributions_of_the_whole_vocabulary_fail_the_test_of_the_distribution(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rule must read what the draft tokens were drawn from: probability 0 outside of the subset."""
    engine = small_engine("llama", "rejection")
    (decoder,) = engine.parts.drafter.decoders
    hidden: list[Tensor] = []
    logits = decoder.logits

    def noted(states: Tensor) -> Tensor:
        hidden.append(states)
        return logits(states)

    def draw(self: ModelDrafter, choices: Choices, batch: Batch, distributions: list[Tensor]) -> Tensor:
        distributions.append(Choices(decoder.model.logits(hidden[-1])[:, None], batch).distribution())
        return choices.draw(Purpose.DRAFT)

    monkeypatch.setattr(decoder, "logits", noted)
    monkeypatch.setattr(ModelDrafter, "_draw", draw)
    assert p_value(engine, SamplingParams(n=SAMPLES, max_tokens=3, seed=31)) < 1e-6
