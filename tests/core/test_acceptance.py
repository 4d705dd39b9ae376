"""The two acceptance rules on single rounds."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batches import filled
from paceline.config import SamplingParams
from paceline.core.acceptance import RULES, coupled, rejection
from paceline.core.batch import Batch, RowStart
from paceline.core.draft_tensors import DraftTensors
from paceline.core.nodes import Tree
from paceline.core.rules import walk
from paceline.core.sampling import draw, sequence_seed
from paceline.kernels import cpu, native
from paceline.kernels.cpu import CpuOps
from toy import ToyConstraint

pytestmark = pytest.mark.usefixtures("one_thread")

V = 6


def make_batch(rows: int, vocab: int = V, **params: object) -> Batch:
    own = SamplingParams(**params)  # type: ignore[arg-type]
    return filled([RowStart([row % V, 2], own, sequence_seed(row, 0)) for row in range(rows)], 32, vocab)


def no_draft(batch: Batch) -> DraftTensors:
    return DraftTensors.of(batch.empty_draft, batch.device)


def one_hot(tokens: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.one_hot(tokens, V).float()


@settings(max_examples=80, deadline=None)
@given(rows=st.integers(1, 4), k=st.integers(0, 5), data=st.data(), temperature=st.sampled_from([0.0, 1.0]))
def test_coupled_accepts_the_real_draft_tokens_before_the_first_mismatch(
    rows: int, k: int, data: st.DataObject, temperature: float
) -> None:
    batch = make_batch(rows, temperature=temperature)
    logits = torch.randn(rows, k + 1, V, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99))))
    draws = draw(logits, batch)
    right = torch.tensor([[data.draw(st.booleans()) for _ in range(k)] for _ in range(rows)], dtype=torch.bool).view(
        rows, k
    )
    tokens = torch.where(right, draws[:, :k], (draws[:, :k] + 1) % V)
    counts = torch.tensor([data.draw(st.integers(0, k)) for _ in range(rows)])
    accepted = coupled(DraftTensors(tokens, counts), logits, batch)
    for row in range(rows):
        expected = 0
        while expected < counts[row] and right[row, expected]:
            expected += 1
        assert accepted.accepted[row] == expected
        assert torch.equal(accepted.tokens[row, : expected + 1], draws[row, : expected + 1])


def test_of_siblings_with_one_token_the_first_is_accepted() -> None:
    """Its child follows it; the second sibling has none."""
    parents = torch.tensor([[-1, -1, 0]])
    draws, tokens = torch.tensor([[5, 3, 4, 2]]), torch.tensor([[5, 5, 3]])
    path, accepted = walk(draws, tokens, parents, Tree.of(parents, torch.tensor([3])))
    assert path[0, :2].tolist() == [0, 2]
    assert accepted.tolist() == [2]


@pytest.mark.parametrize("kernels", ["auto", "off"])
@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 3), k=st.integers(1, 6), data=st.data(), packed=st.booleans())
def test_coupled_accepts_the_path_of_a_tree_along_the_targets_own_draws(
    kernels: str, rows: int, k: int, data: st.DataObject, packed: bool
) -> None:
    """A draw at a node takes into account the draft tokens on the path to it and no others."""
    batch = make_batch(rows, temperature=1.0, presence_penalty=2.0, repetition_penalty=1.3)
    logits = torch.randn(rows, k + 1, V, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99))))
    tokens = torch.tensor([[data.draw(st.integers(0, V - 1)) for _ in range(k)] for _ in range(rows)])
    parents = torch.tensor(
        [[data.draw(st.integers(-1, draft_token - 1)) for draft_token in range(k)] for _ in range(rows)]
    )
    draft = DraftTensors(tokens, torch.tensor([data.draw(st.integers(0, k)) for _ in range(rows)]), parents=parents)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "chosen", lambda: native.select(kernels))
        accepted = coupled(draft, logits[draft.real] if packed else logits, batch)
    assert accepted.path is not None
    for row in range(rows):
        place, drawn, path = 0, [], []
        while True:
            alone = make_batch(rows, temperature=1.0, presence_penalty=2.0, repetition_penalty=1.3)
            alone.tokens[row, 2 : 2 + len(drawn)] = torch.tensor(drawn, dtype=torch.int64)
            alone.length[row] += len(drawn)
            token = int(draw(logits[:, place, None], alone)[row, 0])
            drawn.append(token)
            matches = [
                draft_token
                for draft_token in range(int(draft.counts[row]))
                if int(parents[row, draft_token]) == place - 1 and int(tokens[row, draft_token]) == token
            ]
            if not matches:
                break
            path.append(matches[0])
            place = matches[0] + 1
        assert accepted.tokens[row, : len(drawn)].tolist() == drawn
        assert accepted.path[row].tolist() == [*path, *range(len(path), k)]


def test_rejection_accepts_tokens_with_at_least_the_drafts_probability() -> None:
    batch = make_batch(64)
    tokens = torch.zeros(64, 3, dtype=torch.int64)
    logits = torch.zeros(64, 4, V)
    logits[..., 0] = 3.0
    q = torch.full((64, 3, V), 1 / V)
    accepted = rejection(DraftTensors(tokens, torch.full((64,), 3), q), logits, batch)
    assert accepted.accepted.tolist() == [3] * 64


def test_rejection_never_accepts_tokens_that_the_target_excludes() -> None:
    batch = make_batch(64, top_k=2)
    logits = torch.randn(64, 3, V)
    worst = logits.argmin(-1)[:, :2]
    accepted = rejection(DraftTensors(worst, torch.full((64,), 2), one_hot(worst)), logits, batch)
    assert accepted.accepted.tolist() == [0] * 64
    best_two = logits[:, 0].topk(2).indices
    assert all(token in pair for token, pair in zip(accepted.tokens[:, 0].tolist(), best_two.tolist(), strict=True))


def test_a_row_without_draft_tokens_draws_from_the_whole_distribution_despite_padding() -> None:
    """The q of padding must not be subtracted: a row without draft tokens gets a bonus token, not a recovered one."""
    batch = make_batch(500)
    logits = torch.zeros(500, 2, V)
    padding = torch.zeros(500, 1, dtype=torch.int64)
    accepted = rejection(DraftTensors(padding, torch.zeros(500, dtype=torch.int64), one_hot(padding)), logits, batch)
    assert accepted.accepted.tolist() == [0] * 500
    assert 40 < (accepted.tokens[:, 0] == 0).sum() < 130


def test_draft_tokens_from_the_targets_own_distribution_are_always_accepted() -> None:
    batch = make_batch(200)
    logits = torch.randn(200, 5, V)
    q = logits[:, :4].softmax(-1)
    tokens = q.reshape(-1, V).multinomial(1, generator=torch.Generator().manual_seed(0)).view(200, 4)
    accepted = rejection(DraftTensors(tokens, torch.full((200,), 4), q), logits, batch)
    assert accepted.accepted.tolist() == [4] * 200


@pytest.mark.parametrize("rule", RULES)
def test_greedy_rows_beside_sampled_ones_take_the_argmax_under_both_rules(rule: str) -> None:
    batch = filled([RowStart([1], SamplingParams(temperature=each), 1 + each) for each in (0, 1)], 32, V)
    for seed in range(50):
        logits = torch.randn(2, 4, V, generator=torch.Generator().manual_seed(seed))
        best = logits.argmax(-1)
        tokens = best[:, :3].clone()
        tokens[0, 2] = (tokens[0, 2] + 1) % V
        accepted = RULES[rule](DraftTensors(tokens, torch.tensor([3, 3]), one_hot(tokens)), logits, batch)  # type: ignore[index]
        assert accepted.accepted[0] == 2
        assert accepted.tokens[0, :3].tolist() == best[0, :3].tolist()


@pytest.mark.parametrize("rule", RULES)
def test_logprobs_are_those_of_the_unadjusted_target(rule: str) -> None:
    batch = make_batch(3, logprobs=4, temperature=0.5, logit_bias={1: 9.0}, top_k=2)
    logits = torch.randn(3, 3, V)
    draft = DraftTensors(torch.zeros(3, 2, dtype=torch.int64), torch.tensor([2, 1, 0]))
    accepted = RULES[rule](draft, logits, batch)  # type: ignore[index]
    distribution = logits.log_softmax(-1)
    assert accepted.logprobs is not None
    own, ids, values = (table.tolist() for table in accepted.logprobs)
    for row, (tokens, count) in enumerate(zip(accepted.tokens.tolist(), accepted.accepted.tolist(), strict=True)):
        for place, token in enumerate(tokens[: count + 1]):
            assert own[row][place] == pytest.approx(distribution[row, place, token].item())
            assert ids[row][place] == distribution[row, place].topk(4).indices.tolist()
            assert values[row][place] == pytest.approx(distribution[row, place].topk(4).values.tolist())


@pytest.mark.parametrize("kernels", ["auto", "off"])
@pytest.mark.parametrize("rule", RULES)
def test_a_ranked_rows_logprobs_are_those_of_the_unconstrained_target(
    rule: str, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With kernels, the accepting call returns the log-probabilities; no second call computes them."""
    monkeypatch.setattr(cpu, "chosen", lambda: native.select(kernels))
    batch = make_batch(3, rank_by="mean_logprob", n=2, temperature=0.5, logit_bias={1: 9.0}, top_k=2)
    batch.sampling.constraints[1] = ToyConstraint()
    batch.sampling.any_constraint = True
    logits = torch.randn(3, 3, V)
    distribution = logits.log_softmax(-1)
    draft = DraftTensors(torch.zeros(3, 2, dtype=torch.int64), torch.tensor([2, 1, 0]))
    if native.select(kernels) is not None:
        monkeypatch.setattr(CpuOps, "logprobs", lambda *_: pytest.fail("in a call of its own"))
    accepted = RULES[rule](draft, logits, batch)  # type: ignore[index]
    assert accepted.logprobs is not None
    own, ids, _ = (table.tolist() for table in accepted.logprobs)
    for row, (tokens, count) in enumerate(zip(accepted.tokens.tolist(), accepted.accepted.tolist(), strict=True)):
        for place, token in enumerate(tokens[: count + 1]):
            assert own[row][place] == pytest.approx(distribution[row, place, token].item(), abs=2e-5)
            assert ids[row][place] == []


def test_more_logprobs_than_tokens_in_the_vocabulary_are_all_of_them() -> None:
    batch = make_batch(2, logprobs=20)
    accepted = RULES["coupled"](no_draft(batch), torch.randn(2, 1, V), batch)
    assert accepted.logprobs is not None
    assert accepted.logprobs.top_ids.shape == (2, 1, V)


def test_no_logprobs_are_computed_unless_a_live_row_requests_them() -> None:
    batch = make_batch(2)
    assert RULES["coupled"](no_draft(batch), torch.randn(2, 1, V), batch).logprobs is None
