"""Accepting and committing: the kernels, their torch reference and the rules of ``acceptance.py`` agree."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from kernels.gpu.rows import DEVICE, copied, kept, make_batch, same, state_of
from paceline.core import acceptance
from paceline.core.batch import Batch
from paceline.core.draft import Draft
from paceline.core.draft_tensors import DraftTensors
from paceline.core.rows import RowState
from paceline.core.sampling import draw, probabilities
from paceline.core.values import DeviceAcceptance, LogprobTensors, Purpose
from paceline.kernels.gpu import accept
from paceline.kernels.gpu.ops import ReferenceOps, TritonOps
from paceline.kernels.gpu.state import (
    accepted_path,
    read_logprobs,
    read_record,
    read_trees,
    tree_parents,
    with_logprobs,
)

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCK = 32
reference = ReferenceOps()
TEMPERATURES = st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0]), min_size=1, max_size=3)


def likely_draft_tokens(pick: st.DrawFn, batch: Batch, logits: Tensor, purpose: Purpose) -> Tensor:  # type: ignore[type-arg]
    """The tokens drawn from the logits, some of them replaced by others."""
    tokens = draw(logits, batch, purpose=purpose)
    wrong = torch.tensor([[pick(st.integers(0, 3)) == 0 for _ in line] for line in tokens.tolist()], device=DEVICE)
    return torch.where(wrong, (tokens + 1) % logits.shape[-1], tokens)


def counts_of(pick: st.DrawFn, rows: int, k: int) -> Tensor:  # type: ignore[type-arg]
    return torch.tensor([pick(st.integers(0, k)) if pick(st.booleans()) else k for _ in range(rows)], device=DEVICE)


def both_coupled(draft: DraftTensors, logits: Tensor, states: list[RowState]) -> list[Tensor]:
    """Records of the kernels and of the reference."""
    kernels = accept.coupled(draft, logits, states[0], block=BLOCK)
    return [kernels, reference._coupled(draft, logits, states[1], None)]


@settings(max_examples=10)
@given(data=st.data())
def test_coupled_equals_the_rule(data: st.DataObject) -> None:
    pick = data.draw
    temperatures, k, vocab = pick(TEMPERATURES), pick(st.integers(0, 5)), pick(st.integers(2, 90))
    batch = make_batch(temperatures, vocab, pick(st.integers(0, 999)))
    logits = 2 * torch.randn(batch.rows, k + 1, vocab, device=DEVICE)
    tokens = likely_draft_tokens(pick, batch, logits[:, :k], Purpose.DRAW) if k else batch.text.new_empty(batch.rows, 0)
    draft = DraftTensors(tokens, counts_of(pick, batch.rows, k))
    accepted = acceptance.coupled(draft, logits, batch)
    states = [copied(state_of(batch)) for _ in range(2)]
    records = [
        accept.coupled(draft, logits, states[0], block=BLOCK),
        reference._coupled(draft, logits, states[1], None),
    ]
    verdict = batch.commit(Draft(draft.tokens, draft.counts), accepted)
    for record, state in zip(records, states, strict=True):
        host = read_record(record.tolist())
        assert host == verdict
        assert host.gained == [accepted + 1 for accepted in host.accepted]
        assert same(state, state_of(batch))


@settings(max_examples=10)
@given(data=st.data())
def test_rejection_equals_the_rule(data: st.DataObject) -> None:
    pick = data.draw
    temperatures, k, vocab = pick(TEMPERATURES), pick(st.integers(1, 4)), pick(st.integers(2, 90))
    batch = make_batch(temperatures, vocab, pick(st.integers(0, 999)))
    logits = 2 * torch.randn(batch.rows, k + 1, vocab, device=DEVICE)
    q_logits = logits[:, :k] + pick(st.sampled_from([0.0, 0.5, 3.0])) * torch.randn(batch.rows, k, vocab, device=DEVICE)
    draft = DraftTensors(draw(q_logits, batch, purpose=Purpose.DRAFT), counts_of(pick, batch.rows, k), logits=q_logits)
    q = probabilities(q_logits, batch)
    accepted = acceptance.rejection(DraftTensors(draft.tokens, draft.counts, q), logits, batch)
    states = [copied(state_of(batch)) for _ in range(2)]
    records = [accept.rejection(draft, logits, states[0], block=BLOCK), reference._rejection(draft, logits, states[1])]
    verdict = batch.commit(Draft(draft.tokens, draft.counts), accepted)
    for record, state in zip(records, states, strict=True):
        assert read_record(record.tolist()) == verdict
        assert same(state, state_of(batch))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_records_tokens_have_the_models_own_logprobs(dtype: torch.dtype) -> None:
    """At any temperature; and their bits survive among integers."""
    batch = make_batch([0.0, 0.5, 3.0], 90)
    logits = (3 * torch.randn(3, 4, 90, device=DEVICE)).to(dtype)
    draft = DraftTensors(draw(logits[:, :3].float(), batch), torch.tensor([3, 1, 0], device=DEVICE))
    record = reference._coupled(draft, logits.float(), copied(state_of(batch)), None)
    logprobs = logits.float().log_softmax(-1).gather(-1, record[:, :4, None]).squeeze(-1)
    for own in (accept.own_logprobs(logits, record, block=BLOCK), reference.logprobs(logits, record, 0).own):
        assert torch.allclose(own, logprobs, atol=1e-5)
        lines, read = read_logprobs(with_logprobs(record, LogprobTensors.alone(own)).tolist(), 3)
        assert lines == record.tolist()
        assert read.own == own.tolist()
        assert read.top_ids == [[[]] * 4] * 3
        _, ids, top = reference.logprobs(logits, record, 5)
        lines, read = read_logprobs(with_logprobs(record, LogprobTensors(own, ids, top)).tolist(), 3)
        assert lines == record.tolist()
        assert (read.own, read.top_ids) == (own.tolist(), ids.tolist())
        assert read.top_values == top.tolist()
        assert torch.allclose(top, logits.float().log_softmax(-1).topk(5).values, atol=1e-5)


@settings(max_examples=8)
@given(data=st.data())
def test_trees_and_their_candidates_equal_the_reference(data: st.DataObject) -> None:
    pick = data.draw
    temperatures, k, width = pick(TEMPERATURES), pick(st.integers(1, 3)), pick(st.integers(2, 3))
    batch, vocab, count = make_batch(temperatures, 40, pick(st.integers(0, 999))), 40, k * width
    ops = TritonOps(), reference
    logits = 2 * torch.randn(batch.rows, count + 1, vocab, device=DEVICE)
    candidates = [each.top_candidates(logits[:, :1].contiguous(), copied(state_of(batch)), 0, width) for each in ops]
    assert torch.equal(*candidates)
    assert all(len(set(line)) == width for line in candidates[0].tolist())
    tokens = torch.randint(0, vocab, (batch.rows, count), device=DEVICE)
    tokens[:, :width] = candidates[0]
    parents = torch.tensor(tree_parents(count, width), device=DEVICE).expand(batch.rows, -1)
    draft = DraftTensors(tokens, torch.full((batch.rows,), count, device=DEVICE), parents=parents)
    states = [copied(state_of(batch)) for _ in range(2)]
    records = [
        each.accept(draft, logits, state, DeviceAcceptance(), width) for each, state in zip(ops, states, strict=True)
    ]
    assert torch.equal(*records)
    assert same(*states)
    trees = read_trees(records[0].tolist(), width)
    assert min(trees.accepted) >= 1, "the best candidate is the target's own draw"
    path, accepted = accepted_path(records[0])
    assert accepted.tolist() == trees.accepted
    assert path.shape == (batch.rows, count)


def test_draft_tokens_without_probabilities_follow_the_coupled_rule() -> None:
    batch = make_batch([1.0], 40)
    logits = torch.randn(1, 3, 40, device=DEVICE)
    draft = DraftTensors(draw(logits[:, :2], batch), torch.tensor([2], device=DEVICE))
    rule = DeviceAcceptance(independent=True)
    for ops in (TritonOps(), reference):
        assert kept(ops.accept(draft, logits, copied(state_of(batch)), rule, 1))[0][1:] == (2, 2, 3)


@pytest.mark.parametrize("rate", [0.6, *(pytest.param(rate, marks=pytest.mark.slow) for rate in (0.0, 1.0))])
def test_synthetic_acceptance_does_not_depend_on_the_draft_tokens(rate: float) -> None:
    batch = make_batch([1.0] * 4, 50)
    logits = torch.randn(4, 4, 50, device=DEVICE)
    draft = DraftTensors(torch.full((4, 3), 7, device=DEVICE), torch.tensor([3, 3, 1, 0], device=DEVICE))
    total = 0
    for turn in range(30):  # the interpreter is slow: the kernel runs three of these
        states = [copied(state_of(batch)) for _ in range(2)]
        record = reference._coupled(draft, logits, states[1], rate)
        if turn < 3:
            assert kept(accept.coupled(draft, logits, states[0], rate, block=BLOCK)) == kept(record)
            assert same(*states)
        for tokens, accepted, drafted, _ in kept(record):
            assert accepted <= drafted
            assert tokens[:accepted] == [7] * accepted
        total += sum(line[1] for line in kept(record)[:2])
        batch.length += 1  # other positions, other noise
    expected = {0.0: 0, 0.6: 60 * (0.6 + 0.36 + 0.216), 1.0: 180}[rate]
    assert total == pytest.approx(expected, abs=22 if rate == 0.6 else 0)


def commit_both(logits: Tensor, draft: DraftTensors, state: RowState) -> list[tuple[list[int], int, int, int]]:
    states = [copied(state) for _ in range(2)]
    records = [
        accept.coupled(draft, logits, states[0], block=BLOCK),
        reference._coupled(draft, logits, states[1], None),
    ]
    assert same(*states)
    assert same(*states)
    return kept(records[0])


def certain(tokens: list[list[int]], vocab: int = 20) -> tuple[Tensor, DraftTensors]:
    """Logits that draw exactly these tokens, drafted correctly."""
    table = torch.tensor(tokens, device=DEVICE)
    logits = torch.nn.functional.one_hot(table, vocab).float() * 100
    counts = torch.full((len(tokens),), len(tokens[0]) - 1, device=DEVICE)
    return logits, DraftTensors(table[:, :-1].contiguous(), counts)


def test_a_row_gains_nothing_beyond_its_first_stop_token_nor_beyond_its_limit() -> None:
    logits, draft = certain([[4, 5, 6, 7]] * 3)
    batch = make_batch([0.0] * 3, 20)
    lines = commit_both(logits, draft, state_of(batch, limit=25, stops=[[6, -1], [9, 5], [-1, -1]]))
    assert [line[3] for line in lines] == [3, 2, 0]  # row 2 is longer than the limit
    assert [line[3] for line in commit_both(logits, draft, state_of(batch, limit=45))] == [4, 4, 2]


def test_ended_rows_and_rows_that_are_not_live_stay_idle() -> None:
    logits, draft = certain([[4, 5]] * 3)
    batch = make_batch([0.0] * 3, 20)
    batch.text[batch.slots[0], 3] = 8  # row 0 has drawn a stop token in the round before; row 1's prompt ends with one
    batch.length[batch.slots[0]] += 1
    batch.text[batch.slots[1], 22] = 8
    state = state_of(batch, stops=[[8, -1], [8, -1], [8, -1]], live=2)
    assert [line[1:] for line in commit_both(logits, draft, state)] == [(0, 0, 0), (1, 1, 2), (0, 0, 0)]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, in the interpreter
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_token_whose_logit_is_not_finite_is_not_drawn(value: float) -> None:
    """Row 0 draws none; row 1 none after its first draft token, which it gains; row 2 none where a draft was wrong."""
    batch, (logits, draft) = make_batch([0.0, 1.0, 0.0], 70), certain([[4, 5, 6]] * 3, 70)
    draft.tokens[2, 0] = 9
    for row, place in ((0, 0), (1, 1), (2, 1)):
        logits[row, place] = value
    lines = commit_both(logits, draft, state_of(batch))
    assert lines == [([-1], 0, 2, 0), ([4, -1], 1, 2, 1), ([4], 0, 2, 1)]
    state, q = state_of(batch), DraftTensors(draft.tokens, draft.counts, logits=logits[:, :2].nan_to_num(0, 0, 0))
    lines = [kept(each._rejection(q, logits, copied(state))) for each in (TritonOps(), reference)]
    assert lines[0] == lines[1]
    assert lines[0][0] == ([-1], 0, 2, 0)
