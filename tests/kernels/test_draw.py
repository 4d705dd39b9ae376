"""The native draw against the torch one: the same token, whatever the logits."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batches import new_batch
from covering import in_pairs
from paceline.core.sampling import Choices, _draw, noise_key
from paceline.core.values import DrawInputs, Purpose
from paceline.core.values import DrawRows as Rows
from paceline.kernels import cpu, native
from paceline.kernels.cpu import CpuOps, cpu_ops

on_every_isa = pytest.mark.parametrize("kernels", native.available(), ids=lambda kernels: kernels.name)


def both(kernels, logits, temperature, seeds, positions, offset=0, purpose=Purpose.DRAW):
    places = DrawInputs(logits, Rows(temperature, seeds, positions + offset))
    native_tokens = CpuOps(kernels).draw(places, purpose)
    place = positions[:, None] + torch.arange(offset, offset + logits.shape[1])
    return native_tokens, _draw(logits, temperature, noise_key(seeds[:, None], place, purpose))


def unasked(rows):
    """Arguments on which a likelihood does not depend."""
    zeros = torch.zeros(rows, dtype=torch.int64)
    return Rows(zeros.float(), zeros, zeros)


def case(rows, block, vocab, spread, seed):
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, block, vocab, generator=random) * spread
    seeds = torch.randint(0, 2**62, (rows,), generator=random)
    return logits, seeds, torch.randint(0, 5000, (rows,), generator=random)


@on_every_isa
@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 5),
    block=st.integers(1, 4),
    vocab=st.integers(1, 700),
    spread=st.sampled_from([0.0, 0.01, 1.0, 8.0, 40.0, 1e4]),
    temperatures=st.lists(
        st.sampled_from([0.0, 1e-44, 1e-30, 1e-3, 0.2, 0.8, 1.0, 2.0, 100.0]), min_size=5, max_size=5
    ),
    offset=st.integers(0, 3),
    purpose=st.sampled_from(list(Purpose)),
    seed=st.integers(0, 10**6),
)
def test_the_native_draw_equals_the_references(
    kernels, rows, block, vocab, spread, temperatures, offset, purpose, seed
):
    logits, seeds, positions = case(rows, block, vocab, spread, seed)
    temperature = torch.tensor(temperatures[:rows])
    found, expected = both(kernels, logits, temperature, seeds, positions, offset, purpose)
    assert torch.equal(found, expected)


@on_every_isa
@pytest.mark.parametrize("temperature", [0.3, 0.8, 1.0, 3.0])
def test_the_native_draw_over_a_whole_vocabulary(kernels, temperature):
    logits, seeds, positions = case(40, 4, 5003, 4.0, 1)
    found, expected = both(kernels, logits, torch.full((40,), temperature), seeds, positions)
    assert torch.equal(found, expected)
    assert (found != logits.argmax(-1)).any()


@on_every_isa
def test_noise_alone_decides_among_equal_logits_and_without_it_the_smaller_token(kernels):
    logits, seeds, positions = torch.zeros(64, 1, 999), torch.arange(64), torch.zeros(64, dtype=torch.int64)
    found, expected = both(kernels, logits, torch.ones(64), seeds, positions)
    assert torch.equal(found, expected)
    assert found.unique().numel() > 50
    assert not both(kernels, logits, torch.zeros(64), seeds, positions)[0].any()


@on_every_isa
def test_cut_tokens_never_win(kernels):
    logits, seeds, positions = case(200, 1, 100, 3.0, 2)
    logits[:, :, 1::2] = -math.inf
    found, expected = both(kernels, logits, torch.full((200,), 50.0), seeds, positions)
    assert torch.equal(found, expected)
    assert not (found % 2).any()


@on_every_isa
def test_logits_of_a_wider_head_are_read_in_place_and_odd_strides_copied(kernels):
    wide, seeds, positions = case(3, 2, 80, 2.0, 3)
    for logits in (wide[..., :77], wide.transpose(0, 1)[:2].transpose(0, 1), wide[:, ::2, ::3]):
        found, expected = both(kernels, logits, torch.ones(3), seeds, positions)
        assert torch.equal(found, expected)


def test_torch_draws_where_the_kernels_cannot(monkeypatch):
    batch = new_batch(1, 8, 4)
    assert Choices(torch.zeros(1, 1, 4, dtype=torch.float64), batch).ops is None
    assert cpu_ops(torch.device("meta")) is None
    monkeypatch.setenv(native.VARIABLE, "off")
    cpu.chosen.cache_clear()
    assert cpu_ops(torch.device("cpu")) is None


def drafted_batch(logits, counts, temperature, seeds, positions, right):
    """The reference's draws [B, k + 1], draft tokens of which the first ``right`` per row equal them, and the number
    accepted.
    """
    draws = both(native.available()[0], logits, temperature, seeds, positions)[1]
    place = torch.arange(logits.shape[1] - 1)
    draft_tokens = torch.where(place < right[:, None], draws[:, :-1], (draws[:, :-1] + 1) % logits.shape[-1])
    kept = (draft_tokens == draws[:, :-1]) & (place < counts[:, None])
    return draws, draft_tokens, kept.cumprod(1).sum(1)


@on_every_isa
@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 6),
    k=st.integers(0, 4),
    vocab=st.integers(1, 500),
    temperatures=st.lists(st.sampled_from([0.0, 1e-30, 0.8, 3.0]), min_size=6, max_size=6),
    counts=st.lists(st.integers(0, 4), min_size=6, max_size=6),
    right=st.lists(st.integers(0, 4), min_size=6, max_size=6),
    packed=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_draft_tokens_are_accepted_like_the_references(
    kernels, rows, k, vocab, temperatures, counts, right, packed, seed
):
    logits, seeds, positions = case(rows, k + 1, vocab, 4.0, seed)
    temperature, counts = torch.tensor(temperatures[:rows]), torch.tensor(counts[:rows]).clamp(max=k)
    draws, draft_tokens, accepted = drafted_batch(
        logits, counts, temperature, seeds, positions, torch.tensor(right[:rows])
    )
    real = torch.arange(k + 1) < counts[:, None] + 1
    rows = Rows(temperature, seeds, positions)
    found = CpuOps(kernels).accept(
        DrawInputs(logits[real] if packed else logits, rows, draft_tokens, counts), Purpose.DRAW
    )
    drawn = torch.arange(k + 1) <= accepted[:, None]
    assert torch.equal(found[1], accepted)
    assert torch.equal(found[0], draws * drawn)


@in_pairs(kernels=native.available(), vocab=[1, 127, 128, 129, 1000], fill=[math.nan, -math.inf])
def test_the_first_of_the_largest_logits_is_found_wherever_it_lies(kernels, vocab, fill):
    places = torch.tensor([0, vocab // 3, vocab // 2, vocab - 1])
    logits = torch.full((4, 1, vocab), fill)
    logits[torch.arange(4), 0, places] = 1.0
    logits[:, 0, vocab - 1] = 1.0
    zeros = torch.zeros(4, dtype=torch.int64)
    greedy = Rows(zeros.float(), zeros, zeros)
    assert CpuOps(kernels).draw(DrawInputs(logits, greedy), Purpose.DRAW)[:, 0].tolist() == places.tolist()
    nothing = torch.full((4, 1, vocab), fill)
    assert not CpuOps(kernels).draw(DrawInputs(nothing, greedy), Purpose.DRAW).any()


@on_every_isa
@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 5),
    block=st.integers(1, 3),
    vocab=st.integers(1, 700),
    spread=st.sampled_from([0.0, 0.01, 1.0, 8.0, 40.0, 1e4]),
    seed=st.integers(0, 10**6),
)
def test_the_native_likelihood_equals_the_references(kernels, rows, block, vocab, spread, seed):
    logits, _, _ = case(rows, block, vocab, spread, seed)
    tokens = torch.randint(0, vocab, (rows, block), generator=torch.Generator().manual_seed(seed))
    expected = logits.double().softmax(-1).gather(-1, tokens[..., None])[..., 0]
    assert torch.allclose(
        CpuOps(kernels).likelihood(DrawInputs(logits, unasked(rows)), tokens).double(), expected, rtol=1e-4, atol=1e-30
    )


@on_every_isa
@pytest.mark.parametrize("fill", [math.nan, -math.inf])
def test_a_masked_token_has_no_likelihood(kernels, fill):
    logits = torch.full((1, 2, 37), fill)
    logits[0, :, 5] = 3.0
    found = CpuOps(kernels).likelihood(DrawInputs(logits, unasked(1)), torch.tensor([[5, 6]]))[0].tolist()
    assert found[0] == pytest.approx(1.0)
    assert found[1] < 1e-30


@in_pairs(kernels=native.available(), value=[-math.inf, math.nan, math.inf], vocab=[5, 37, 1003])
def test_no_token_has_a_likelihood_where_none_can_be_drawn(kernels, value, vocab):
    logits = torch.full((1, 1, vocab), value)
    assert CpuOps(kernels).likelihood(DrawInputs(logits, unasked(1)), torch.tensor([[0]])).item() == 0.0
