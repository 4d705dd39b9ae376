"""n-gram drafts in the rows where they suffice, else the draft model's, whose cache falls behind meanwhile."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from batches import filled
from paceline.config import SamplingParams
from paceline.core.batch import Batch, RowStart, SpeculationPlan
from paceline.core.draft import Draft, Verdict
from paceline.core.values import Accepted
from paceline.drafters import HybridDrafter, ModelDrafter, NgramDrafter
from paceline.drafters.ngram import STRONG
from paceline.kernels.attention import BACKENDS
from paceline.lengths.base import LengthPolicy
from paceline.models.base import AnyModel
from paceline.models.decoding.draft_decoder import DraftDecoder
from toy import (
    VOCAB,
    FlatToy,
    RandomSources,
    ToyModel,
    answers,
    logits_after,
    make_engine,
    run,
    slow_adjust,
    slow_draw,
    tiny_native,
)

pytestmark = pytest.mark.usefixtures("one_thread")

TWICE = [1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5]  # a match of the longest kind, followed by 6
SHORT = [1, 2, 3, 4, 7, 2, 3, 4]  # a match of three tokens
NEW = [1, 2, 3]
PARAMS = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=1.0, presence_penalty=1.0, repetition_penalty=1.2),
    SamplingParams(temperature=0.8, top_k=6, top_p=0.9, frequency_penalty=0.4, logit_bias={4: 1.0}),
]


def setup(*prompts: list[int], width: int = 1, acceptance: str = "coupled") -> tuple[HybridDrafter, Batch]:
    decoder = DraftDecoder(ToyModel(), BACKENDS["padded"](), len(prompts), 120)
    batch = filled([RowStart(prompt, PARAMS[row % 3], 100 + row) for row, prompt in enumerate(prompts)], 120, VOCAB)
    decoder.prefill(batch, range(len(prompts)), [0] * len(prompts), [len(prompt) - 1 for prompt in prompts])
    return HybridDrafter(NgramDrafter(width=width), ModelDrafter(decoder, acceptance, width)), batch


def models_own(batch: Batch, prompts: list[list[int]], k: int) -> list[list[int]]:
    """The draft model's own continuation, token by token from the whole text."""
    draft_tokens = []
    for row, prompt in enumerate(prompts):
        text = batch.tokens[row, : batch.lengths[row]].tolist()
        for _ in range(k):
            logits = logits_after(ToyModel(), text)
            adjusted = slow_adjust(logits, PARAMS[row % 3], prompt, text[len(prompt) :], frozenset())
            text.append(slow_draw(adjusted, PARAMS[row % 3], 100 + row, len(text)))
        draft_tokens.append(text[batch.lengths[row] :])
    return draft_tokens


@pytest.mark.parametrize(
    ("prompts", "copies"),
    [([TWICE], True), ([TWICE, TWICE], True), ([SHORT], False), ([NEW], False), ([TWICE, SHORT, TWICE], False)],
    ids=["long match", "all long", "short match", "no match", "one of three short"],
)
def test_by_default_ngram_drafts_suffice_only_if_every_match_is_strong(prompts: list[list[int]], copies: bool) -> None:
    drafter, batch = setup(*prompts)
    draft = drafter.propose(batch, SpeculationPlan(3))
    own = models_own(batch, prompts, 3)
    assert own != [[6, 1, 2]] * len(prompts)
    assert draft.draft_tokens == ([[6, 1, 2]] * len(prompts) if copies else own)


@pytest.mark.parametrize("prompts", [[TWICE], [SHORT, TWICE], [NEW, NEW]])
@pytest.mark.parametrize("asked", [0, 1, 6])
def test_the_plans_fallback_decides_if_there_is_one(asked: int, prompts: list[list[int]]) -> None:
    drafter, batch = setup(*prompts)
    shown: list[Draft] = []
    instead = lambda batch, copies: shown.append(copies) or [asked] * batch.rows  # noqa: E731
    draft = drafter.propose(batch, SpeculationPlan(4, fallback=instead))
    expected = NgramDrafter().propose(batch, SpeculationPlan(4))
    assert [copies.draft_tokens for copies in shown] == [expected.draft_tokens]
    assert shown[0].confidence == expected.confidence
    if asked:
        assert draft.draft_tokens == models_own(batch, prompts, min(asked, 4)), "never more than planned"
    else:
        assert draft is shown[0]


def mixed_draft(drafter: HybridDrafter, batch: Batch, asked: list[int], k: int = 3) -> Draft:
    return drafter.propose(batch, SpeculationPlan(k, fallback=lambda _batch, _copies: asked))


@pytest.mark.parametrize("asked", [[0, 3, 0], [3, 0, 2], [0, 0, 1]])
def test_each_row_gets_the_draft_that_the_fallback_chooses(asked: list[int]) -> None:
    """With its scores and kinds: the search's sources come first, then the model's."""
    prompts = [TWICE, TWICE, SHORT]
    drafter, batch = setup(*prompts)
    copies = NgramDrafter().propose(batch, SpeculationPlan(3))
    draft = mixed_draft(drafter, batch, asked)
    own = models_own(batch, prompts, 3)
    assert copies.confidence is not None
    assert draft.confidence is not None
    assert draft.kinds is not None
    for row, count in enumerate(asked):
        expected = own[row][: max(asked)] if count else copies.draft_tokens[row]
        assert draft.draft_tokens[row] == expected
        assert [drafter.sources[kind] for kind in draft.kinds[row]] == ["draft model" if count else "own text"] * len(
            expected
        )
        if not count:
            assert list(draft.confidence[row])[:3] == list(copies.confidence[row])[:3]
    assert draft.parents is None, "chains"


@pytest.mark.parametrize("asked", [[0, 2], [2, 0]])
def test_trees_stay_trees_beside_chains(asked: list[int]) -> None:
    drafter, batch = setup(TWICE, TWICE, width=2)
    alone = mixed_draft(drafter, batch, [2, 2])
    drafter.decoders[0].rewind(batch)
    draft = mixed_draft(drafter, batch, asked)
    (tree,) = (row for row in range(2) if asked[row])
    assert draft.parents is not None
    assert alone.parents is not None
    assert draft.draft_tokens[tree] == alone.draft_tokens[tree]
    size = len(alone.draft_tokens[tree])
    assert draft.parents[tree] == alone.parents[tree] != list(range(-1, size - 1))
    copies = NgramDrafter(width=2).propose(batch, SpeculationPlan(3)).draft_tokens[1 - tree]
    assert draft.draft_tokens[1 - tree] == copies


def test_a_row_that_allows_no_draft_tokens_gets_none() -> None:
    drafter, batch = setup(TWICE, TWICE, TWICE)
    fallback = lambda _batch, _copies: [4, 4, 0]  # noqa: E731
    draft = drafter.propose(batch, SpeculationPlan(4, [0, 2, 3], fallback=fallback))
    assert draft.drafted == [0, 2, 3]
    assert draft.draft_tokens[2] == [6, 1, 2]


@pytest.mark.parametrize("caps", [None, [0, 2, 2], [2, 0, 2]])
def test_under_the_rejection_rule_one_drafter_serves_all_rows(caps: list[int] | None) -> None:
    """Its sampled draft tokens need their distributions."""
    drafter, batch = setup(TWICE, TWICE, SHORT, acceptance="rejection")
    plan = SpeculationPlan(2, caps, fallback=lambda _batch, _copies: [0, 2, 0])
    draft = drafter.propose(batch, plan).capped(caps)
    if caps is not None and caps[1] == 0:  # nobody is left for whom the model is wanted
        assert draft.probabilities is None
        return
    assert draft.drafted == (caps or [2, 2, 2])
    assert draft.probabilities is not None
    assert {kind for line in draft.kinds or [] for kind in line} == {len(drafter.sources) - 1}


@pytest.mark.parametrize("seed", range(6))
def test_after_any_rounds_the_draft_model_drafts_as_from_the_whole_text(seed: int) -> None:
    """Rounds with n-gram drafts, the draft model's, both or none, and timed drafts leave nothing stale behind."""
    rng, prompts = random.Random(seed), [[1], [2, 3, 4, 2, 3], [8, 9, 1]]
    drafter, batch = setup(*prompts)
    for _ in range(14):
        kind = rng.choice(["copies", "model", "mixed", "mixed", "plain", "timed"])
        k = 0 if kind == "plain" else rng.choice([1, 2, 4])
        draft, asked = batch.empty_draft, [0] * 3
        if kind == "timed":
            mixed_draft(drafter, batch, [2] * 3, 2)
            drafter.decoders[0].rewind(batch)  # as the calibration leaves it: its rows begin anew
            k = 4
        if k:
            if kind in ("model", "mixed"):
                asked = [k if kind == "model" else rng.choice([0, k]) for _ in range(3)]
            draft = mixed_draft(drafter, batch, asked, k)
        for row, own in enumerate(models_own(batch, prompts, k)):
            assert not asked[row] or draft.draft_tokens[row] == own
        accepted = torch.tensor([rng.choice([rng.randint(0, n), n]) for n in draft.drafted])
        tokens = torch.randint(0, VOCAB, (3, draft.k + 1), generator=torch.Generator().manual_seed(rng.randrange(99)))
        for row in range(3):
            tokens[row, : accepted[row]] = torch.tensor(draft.draft_tokens[row][: accepted[row]])
        drafter.observe(batch, batch.commit(draft, Accepted(tokens, accepted)))


@pytest.mark.parametrize("model", [ToyModel, FlatToy, lambda: tiny_native(1)], ids=["torch", "flat", "native"])
def test_after_mixed_rounds_a_draft_model_that_is_the_target_is_always_right(model: Callable[[], AnyModel]) -> None:
    engine = make_engine(model(), model(), drafter="hybrid", num_speculative_tokens=4, attention="auto")
    engine.use_policy(RandomSources(seed=3))
    propose, verify = engine.parts.drafter.propose, []

    def proposed(batch: Batch, plan: SpeculationPlan) -> Draft:
        draft = propose(batch, plan)
        models = len(engine.parts.drafter.sources) - 1
        verify.append({slot for slot, kinds in zip(batch.slots, draft.kinds or [], strict=False) if models in kinds})
        return draft

    right = []
    observe = engine.parts.drafter.observe

    def observed(batch: Batch, verdict: Verdict) -> None:
        rows = zip(batch.slots, verdict.accepted, verdict.drafted, strict=True)
        right.extend(accepted == drafted for slot, accepted, drafted in rows if verify and slot in verify[-1])
        observe(batch, verdict)

    engine.parts.drafter.propose, engine.parts.drafter.observe = proposed, observed  # type: ignore[method-assign]
    params = [SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)] * 4
    run(engine, [TWICE, SHORT, NEW, TWICE], params)
    assert any(len(slots) in (1, 2, 3) for slots in verify)
    assert len(right) > 20
    assert all(right)


def test_measurements_before_the_first_ngram_draft_leave_no_trace() -> None:
    """The calibration drafts without ending the round; then n-gram drafts come first, and the draft model's later."""
    engine = make_engine(
        FlatToy(), FlatToy(), drafter="hybrid", num_speculative_tokens="auto", attention="auto", max_batch_size=1
    )

    class CopiesFirst(LengthPolicy):
        name, round = "copies first", 0

        def choose(self, batch: Batch) -> SpeculationPlan:
            self.round += 1
            asked = 0 if self.round <= 2 else 3
            return SpeculationPlan(3, fallback=lambda batch, _copies: [asked] * batch.rows)

    engine.use_policy(CopiesFirst())
    params = [SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)]
    [output] = run(engine, [TWICE], params)
    assert answers([output]) == answers(run(make_engine(ToyModel()), [TWICE], params))
    assert output.outputs[0].metrics.rounds <= 2 + 18 / 3, "the target is its own draft model"


def test_ngram_drafts_have_scores() -> None:
    _, batch = setup(TWICE, SHORT, NEW)
    draft = NgramDrafter().propose(batch, SpeculationPlan(2))
    assert draft.confidence is not None
    first = [scores[0] for scores in draft.confidence]
    assert first[0] == STRONG > first[1] > first[2] == 0
    assert draft.confidence[0][1] > STRONG, "it grows with each right draft token"
