"""The draft model as a drafter, and its cache, which may miss tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from batches import filled
from paceline.config import AcceptanceName, SamplingParams
from paceline.core.batch import Batch, RowStart, SpeculationPlan
from paceline.core.values import Accepted, Purpose
from paceline.drafters.model import ModelDrafter
from paceline.kernels.attention import BACKENDS
from paceline.models.decoding.draft_decoder import DraftDecoder
from toy import VOCAB, ToyModel, logits_after, slow_adjust, slow_distribution, slow_draw

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = [[1], [2, 3, 4, 5, 6, 7], [8, 9, 1]]
PARAMS = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=1.0, presence_penalty=1.0, repetition_penalty=1.2, min_tokens=4),
    SamplingParams(temperature=0.8, top_k=6, top_p=0.9, frequency_penalty=0.4, logit_bias={4: 1.0}),
]
STOPS = (2, 11)


def setup(rule: AcceptanceName = "coupled", params: Sequence[SamplingParams] = PARAMS) -> tuple[ModelDrafter, Batch]:
    decoder = DraftDecoder(ToyModel(), BACKENDS["padded"](), len(PROMPTS), 64)
    rows = enumerate(zip(PROMPTS, params, strict=True))
    batch = filled([RowStart(prompt, each, 100 + row, STOPS) for row, (prompt, each) in rows], 64, VOCAB)
    decoder.prefill(batch, range(len(PROMPTS)), [0] * len(PROMPTS), [len(prompt) - 1 for prompt in PROMPTS])
    return ModelDrafter(decoder, rule), batch


def expected_tokens(batch: Batch, k: int) -> list[list[int]]:
    """The draft model's own continuation, token by token from the whole text."""
    draft_tokens = []
    for row, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        text = batch.tokens[row, : batch.lengths[row]].tolist()
        for _ in range(k):
            adjusted = slow_adjust(
                logits_after(ToyModel(), text), params, prompt, text[len(prompt) :], frozenset(STOPS)
            )
            text.append(slow_draw(adjusted, params, 100 + row, len(text)))
        draft_tokens.append(text[batch.lengths[row] :])
    return draft_tokens


@pytest.mark.parametrize("seed", range(4))
def test_draft_tokens_are_the_draft_models_own_continuation_after_any_history(seed: int) -> None:
    rng = random.Random(seed)
    drafter, batch = setup()
    for _ in range(9):
        k = rng.choice([0, 0, 1, 2, 4])
        tokens = torch.tensor([[rng.randrange(VOCAB) for _ in range(k + 1)] for _ in PROMPTS])
        accepted = torch.tensor([rng.randint(0, k) for _ in PROMPTS])
        draft = batch.empty_draft
        if k:
            draft = drafter.propose(batch, SpeculationPlan(k))
            assert draft.draft_tokens == expected_tokens(batch, k)
            assert draft.drafted == [k] * len(PROMPTS)
            for row in range(len(PROMPTS)):  # what is kept of a row is what was drafted
                tokens[row, : accepted[row]] = torch.tensor(draft.draft_tokens[row][: accepted[row]])
        drafter.observe(batch, batch.commit(draft, Accepted(tokens, accepted)))


@pytest.mark.parametrize("seed", range(4))
def test_a_draft_that_is_stopped_early_leaves_the_next_one_right(seed: int) -> None:
    rng = random.Random(seed)
    drafter, batch = setup()
    for _ in range(12):
        k, stop, seen = rng.randint(1, 5), rng.randint(1, 6), []
        enough = lambda part, scores: seen.append([len(line) for line in scores]) or len(seen) == stop  # noqa: B023, E731
        draft = drafter.propose(batch, SpeculationPlan(k, stop_drafting=enough))
        drafted = min(k, stop)
        assert seen == [[step + 1] * len(PROMPTS) for step in range(drafted)]
        assert draft.draft_tokens == expected_tokens(batch, drafted)
        assert draft.drafted == [drafted] * len(PROMPTS)
        accepted = torch.tensor([rng.choice([rng.randint(0, drafted), drafted]) for _ in PROMPTS])
        tokens = torch.tensor([[rng.randrange(VOCAB) for _ in range(drafted + 1)] for _ in PROMPTS])
        for row in range(len(PROMPTS)):
            tokens[row, : accepted[row]] = torch.tensor(draft.draft_tokens[row][: accepted[row]])
        drafter.observe(batch, batch.commit(draft, Accepted(tokens, accepted)))


def test_a_draft_token_is_scored_by_its_likelihood_whatever_the_temperature() -> None:
    drafter, batch = setup()
    draft = drafter.propose(batch, SpeculationPlan(3, stop_drafting=lambda part, scores: False))
    assert draft.confidence is not None
    for row, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        for place, token in enumerate(draft.draft_tokens[row]):
            answer = draft.draft_tokens[row][:place]
            adjusted = slow_adjust(logits_after(ToyModel(), prompt + answer), params, prompt, answer, frozenset(STOPS))
            distribution = slow_distribution(adjusted, SamplingParams(temperature=1.0))
            assert draft.confidence[row][place] == pytest.approx(distribution[token], abs=1e-5)


def test_without_stop_drafting_there_are_no_scores() -> None:
    drafter, batch = setup()
    assert drafter.propose(batch, SpeculationPlan(3)).confidence is None


def test_under_the_coupled_rule_no_distribution_is_reported() -> None:
    drafter, batch = setup()
    assert drafter.propose(batch, SpeculationPlan(3)).probabilities is None


def test_the_rejection_rule_gets_the_distribution_that_draft_tokens_were_drawn_from() -> None:
    drafter, batch = setup("rejection")
    draft = drafter.propose(batch, SpeculationPlan(3))
    assert draft.probabilities is not None
    for row, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        for place in range(3):
            answer = draft.draft_tokens[row][:place]
            adjusted = slow_adjust(logits_after(ToyModel(), prompt + answer), params, prompt, answer, frozenset(STOPS))
            assert draft.probabilities[row, place].tolist() == pytest.approx(
                slow_distribution(adjusted, params), abs=1e-5
            )


def test_under_the_rejection_rule_draft_tokens_have_noise_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    purposes = []
    import paceline.core.sampling as sampling

    original = sampling.noise_key
    monkeypatch.setattr(
        sampling, "noise_key", lambda s, p, purpose: purposes.append(purpose) or original(s, p, purpose)
    )
    for rule in ("coupled", "rejection"):
        drafter, batch = setup(rule)  # type: ignore[arg-type]
        batch.ops = None  # the kernels make their keys out of sight
        drafter.propose(batch, SpeculationPlan(1))
    assert purposes == [Purpose.DRAW, Purpose.DRAFT]


def test_a_batch_of_greedy_rows_needs_no_distribution() -> None:
    drafter, batch = setup("rejection", [SamplingParams(temperature=0)] * 3)
    assert drafter.propose(batch, SpeculationPlan(2)).probabilities is None
