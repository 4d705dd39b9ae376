"""Sequences join slots of a batch, gain tokens in them and leave."""

from __future__ import annotations

import pytest
import torch

from batches import filled, new_batch
from paceline.config import MAX_SPECULATION_LENGTH, SamplingParams
from paceline.core.batch import Batch, RowStart
from paceline.core.draft import Draft
from paceline.core.draft_tensors import DraftTensors
from paceline.core.values import Accepted


def make_batch() -> Batch:
    starts = [
        RowStart([1, 2, 3], SamplingParams(max_tokens=5), seed=11),
        RowStart([4], SamplingParams(max_tokens=50, top_k=3, logit_bias={2: 1.5}), seed=12),
        RowStart([5, 6], SamplingParams(min_tokens=3, temperature=0), seed=13, stop_tokens=(7,)),
    ]
    return filled(starts, 20, 10, free=1)


def test_a_row_gains_its_accepted_tokens_and_one_more() -> None:
    batch = make_batch()
    tokens = torch.tensor([[7, 8, 9], [7, 8, 9], [9, 8, 9]])
    verdict = batch.commit(Draft([[7, 8]] * 3), Accepted(tokens, torch.tensor([0, 2, 1])))
    assert (verdict.tokens, verdict.accepted) == ([[7], [7, 8, 9], [9, 8]], [0, 2, 1])
    assert (verdict.drafted, verdict.gained) == ([2, 2, 2], [1, 3, 2])
    assert batch.lengths[:3] == batch.live_length.tolist() == [4, 4, 4]
    assert [batch.text[row, :4].tolist() for row in range(3)] == [[1, 2, 3, 7], [4, 7, 8, 9], [5, 6, 9, 8]]
    assert batch.pending().tolist() == [[7], [9], [8]]


def test_a_commit_by_the_kernels_equals_torchs() -> None:
    """On the CPU rows gain their tokens by one call of the kernels, on a device by tensor operators."""
    rng = torch.Generator().manual_seed(3)
    host, device = make_batch(), make_batch()
    device.ops = None
    for width in (1, 3, 1, 2, 1):
        tokens = torch.randint(1, 9, (3, width), generator=rng)
        draft, accepted = Draft(tokens[:, 1:]), torch.randint(0, width, (3,), generator=rng)
        assert host.commit(draft, Accepted(tokens, accepted)) == device.commit(draft, Accepted(tokens, accepted))
        assert host.pending_on_host() == host.pending()[:, 0].tolist()
        assert host.lengths == device.lengths
        assert host.length.tolist() == device.length.tolist()
        for row, length in enumerate(host.lengths):
            assert host.text[row, :length].tolist() == device.text[row, :length].tolist()


def test_rows_of_a_part_have_pending_tokens_of_their_own() -> None:
    assert make_batch().part(1, 3).pending_on_host() == [4, 6]


def test_rows_of_a_part_keep_the_ends_of_their_time() -> None:
    batch = make_batch()
    batch.deadlines[2] = 5.0
    assert batch.part(2, 3).deadlines == [5.0]


@pytest.mark.parametrize("kernels", [True, False])
def test_a_row_gains_nothing_beyond_its_first_stop_token_nor_beyond_its_limit(kernels: bool) -> None:
    batch = new_batch(4, 20, 10)
    batch.ops = batch.ops if kernels else None
    for row, stops in enumerate([(7,), (3, 8), (), ()]):
        batch.set_row(row, RowStart([8, 7], SamplingParams(max_tokens=5), seed=row, stop_tokens=stops))
    batch.set_live(range(3))
    block = torch.tensor([[5, 6, 7, 9]] * 3)
    batch.commit(Draft(block[:, 1:]), Accepted(block, torch.tensor([3, 3, 1])))
    assert batch.length.tolist() == [*batch.lengths, 2] == [5, 6, 4, 2]  # the prompts' own stop tokens end nothing
    batch.commit(Draft(block[:, 1:]), Accepted(block, torch.tensor([3, 3, 0])))
    assert batch.length.tolist() == [*batch.lengths, 2] == [5, 7, 5, 2]
    assert batch.text[:3, 2:7].tolist() == [[5, 6, 7, 0, 0], [5, 6, 7, 9, 5], [5, 6, 5, 0, 0]]


@pytest.mark.parametrize("kernels", [True, False])
def test_the_widest_round_at_the_very_end_of_a_row_stays_inside_it(kernels: bool) -> None:
    batch = new_batch(1, 20, 10)
    batch.ops = batch.ops if kernels else None
    batch.set_row(0, RowStart([1] * 19, SamplingParams(), seed=1))
    batch.set_live(range(1))
    width = MAX_SPECULATION_LENGTH + 1
    tokens = torch.ones(1, width, dtype=torch.int64)
    batch.commit(Draft(tokens[:, 1:]), Accepted(tokens, torch.tensor([width - 1])))
    assert batch.lengths == batch.length.tolist() == [20]
    assert batch.text[0].tolist() == [1] * 20 + [0] * width


def test_max_gain_is_that_of_the_row_with_the_most_tokens_left() -> None:
    batch = make_batch()
    assert batch.max_gain == 19  # row 1: 50 tokens wanted, 20 positions
    batch.set_live(range(1))
    assert batch.max_gain == 5


def test_longest_looks_at_decoding_rows_only() -> None:
    batch = make_batch()
    batch.set_row(3, RowStart([1] * 15, SamplingParams(), seed=14))
    assert batch.longest == 3


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("slots", [[0, 1, 2], [1, 2], [0, 2], [0, 3], [3]])
def test_rows_are_the_sequences_in_the_live_slots(slots: list[int], kernels: bool) -> None:
    batch, expected = make_batch(), make_batch()
    batch.ops = batch.ops if kernels else None
    batch.set_row(3, RowStart([9, 8, 7, 6], SamplingParams(temperature=0.5, max_tokens=2), seed=14))
    expected.text[:], expected.length[:] = batch.text, batch.length
    batch.set_live(slots)
    assert (batch.slots, batch.rows) == (slots, len(slots))
    assert batch.slot_order.tolist()[: len(slots)] == slots
    assert sorted(batch.slot_order.tolist()) == [0, 1, 2, 3]
    assert batch.tokens.tolist() == batch.text[slots].tolist()
    assert batch.lengths == batch.live_length.tolist() == [int(batch.length[slot]) for slot in slots]
    assert batch.limits == [int(batch.limit[slot]) for slot in slots]
    assert batch.pending_on_host() == batch.pending()[:, 0].tolist()
    for name, values in batch.state().values._asdict().items():
        table = getattr(batch, name, None)
        table = getattr(batch.sampling, name) if table is None else table
        assert torch.equal(values, table[slots]), name
    tokens = torch.tensor([[5, 6, 5]] * len(slots))
    batch.commit(Draft(tokens[:, 1:]), Accepted(tokens, torch.full((len(slots),), 2)))
    for slot in range(4):
        if slot not in slots:
            assert torch.equal(batch.text[slot], expected.text[slot])
            assert batch.length[slot] == batch.length_of(slot) == expected.length[slot]
    assert batch.lengths == [batch.length_of(slot) for slot in slots] == [int(batch.length[slot]) for slot in slots]


def test_a_sequence_keeps_its_state_while_others_join_and_leave() -> None:
    batch = make_batch()
    batch.commit(Draft([[7]] * 3), Accepted(torch.tensor([[7, 8]] * 3), torch.tensor([1, 0, 0])))
    batch.set_live([2])
    batch.set_row(0, RowStart([3], SamplingParams(), seed=1))
    batch.set_live([0, 2])
    assert batch.lengths == [1, 3]
    assert batch.tokens[1, :3].tolist() == [5, 6, 7]
    assert [params.min_tokens for params in batch.sampling.params] == [0, 3]


def test_a_row_forgets_the_parameters_of_the_one_before_it() -> None:
    batch = make_batch()
    batch.set_live([0])
    batch.set_row(1, RowStart([3], SamplingParams(logit_bias={5: 1.0}, min_tokens=1), seed=1, stop_tokens=(8,)))
    batch.set_row(2, RowStart([3], SamplingParams(), seed=1, stop_tokens=(8,)))
    batch.set_live(range(3))
    assert batch.sampling.bias is not None
    assert [tensor.tolist() for tensor in batch.sampling.bias] == [[0, 0, 1, 1], [5], [1.0]]
    assert batch.sampling.stop_tokens is not None
    assert [tensor.tolist() for tensor in batch.sampling.stop_tokens[:2]] == [[0, 0, 1, 1], [8]]


def test_parameters_of_a_row_in_prefill_apply_when_it_decodes() -> None:
    batch = new_batch(2, 20, 10)
    batch.set_row(0, RowStart([1], SamplingParams(), seed=1))
    batch.set_row(1, RowStart([1, 2], SamplingParams(logit_bias={3: 2.0}, min_tokens=2), seed=2, stop_tokens=(4,)))
    batch.set_live(range(1))
    assert batch.sampling.bias is None
    assert not batch.sampling.adjusts
    batch.set_live(range(2))
    assert batch.sampling.bias is not None
    assert [tensor.tolist() for tensor in batch.sampling.bias] == [[0, 0, 1], [3], [2.0]]
    assert batch.sampling.stop_tokens is not None
    assert [tensor.tolist() for tensor in batch.sampling.stop_tokens[:2]] == [[0, 0, 1], [4]]


def test_features_that_no_live_row_uses_are_off() -> None:
    batch = make_batch()
    assert batch.sampling.any_cut
    assert batch.sampling.any_bias
    assert batch.sampling.any_minimum
    batch.set_live(range(1))
    rows = batch.sampling
    assert not any((rows.any_cut, rows.any_bias, rows.any_minimum, rows.any_penalty, rows.all_greedy))
    assert rows.logprobs is None


def test_an_empty_draft_has_no_draft_tokens() -> None:
    batch = make_batch()
    assert (batch.empty_draft.k, batch.empty_draft.drafted) == (0, [0, 0, 0])
    tensors = DraftTensors.of(batch.empty_draft, batch.device)
    assert (tensors.tokens.shape, tensors.counts.tolist()) == ((3, 0), [0, 0, 0])
    assert tensors.tokens.dtype == tensors.counts.dtype == torch.int64


def test_a_live_rows_slot_cannot_begin_another_sequence() -> None:
    """The lists of live rows would tell the state of the one before."""
    batch = make_batch()
    with pytest.raises(AssertionError, match="slot 1 belongs to a live row"):
        batch.set_row(1, RowStart([9], SamplingParams(), seed=0))
    batch.set_live([0, 2])
    batch.set_row(1, RowStart([9], SamplingParams(), seed=0))
    batch.set_live([0, 1, 2])
    assert batch.lengths == [3, 1, 2]
