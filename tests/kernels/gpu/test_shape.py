"""Penalties and cuts of a round's logits: the kernels against the torch reference, and that against the host's code."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from batches import new_batch
from kernels.gpu.rows import DEVICE
from paceline.config import SamplingParams
from paceline.core import sampling
from paceline.core.batch import Batch, RowStart
from paceline.core.rows import StepFeatures
from paceline.core.values import Purpose
from paceline.kernels.gpu import shape
from paceline.kernels.gpu.masks import TokenMasks, masked

pytestmark = pytest.mark.usefixtures("one_thread")
VOCAB, PLACES = 70, 2
PARAMS = [
    SamplingParams(temperature=0.7, top_p=0.8, presence_penalty=0.4, frequency_penalty=0.3, max_tokens=90),
    SamplingParams(temperature=1.0, top_k=5, top_p=0.95, repetition_penalty=1.3, min_tokens=25, max_tokens=90),
    SamplingParams(temperature=1.0, top_p=0.0, max_tokens=90),
    SamplingParams(temperature=1.7, min_p=0.2, repetition_penalty=0.8, max_tokens=90),
    SamplingParams(temperature=0.0, top_k=3, frequency_penalty=-0.5, max_tokens=90),
    SamplingParams(temperature=1.2, typical_p=0.8, top_n_sigma=2.0, top_p=0.9, max_tokens=90),
    SamplingParams(temperature=1.0, top_k=1, top_p=0.01, min_p=1.0, presence_penalty=-1.0, min_tokens=2, max_tokens=90),
]


def rows_of(params: list[SamplingParams], seed: int) -> tuple[Batch, Tensor, Tensor]:
    """Rows with answers of some tokens, draft tokens, and logits with ties."""
    make = torch.Generator().manual_seed(seed)
    batch = new_batch(len(params) + 1, 120, VOCAB, DEVICE)
    for row, each in enumerate(params):
        tokens = torch.randint(VOCAB, (4 + 3 * row,), generator=make).tolist()
        batch.set_row(row + (row > 0), RowStart(tokens, each, row, stop_tokens=(7, 0, 9)))
    batch.set_live([row + (row > 0) for row in range(len(params))])  # slot 1 is free
    for row, slot in enumerate(batch.slots):  # an answer of 22 tokens
        size = batch.lengths[row]
        batch.text[slot, size : size + 22] = torch.randint(VOCAB // 3, (22,), generator=make)
        batch.length[slot] += 22
    batch.note_gains([22] * len(params))
    draft_tokens = torch.randint(VOCAB // 3, (len(params), PLACES + 1), generator=make).to(DEVICE)
    logits = torch.randn(len(params), PLACES, VOCAB, generator=make) * 3
    coarse = (logits * 2).round() / 2  # many equal ones
    return batch, draft_tokens, torch.where(torch.rand(logits.shape, generator=make) < 0.5, coarse, logits).to(DEVICE)


@pytest.mark.parametrize(
    ("params", "adjusts", "first", "block"),
    [(PARAMS, True, 1, 128), (PARAMS[1:2], True, 0, 32), (PARAMS[:1], False, 0, 128)],
)
def test_the_kernels_equal_the_reference(params: list[SamplingParams], adjusts: bool, first: int, block: int) -> None:
    batch, draft_tokens, logits = rows_of(params, first)
    rows = batch.state(batch.rows)
    asks, before = StepFeatures(adjusts, cuts=True, truncates=True), logits.clone()
    found = shape.shaped(logits, rows, asks, draft_tokens, first, block=block)
    expected = sampling.shaped(logits, rows, asks, draft_tokens, first)
    assert torch.equal(logits, before)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert 0 < torch.isinf(found).sum() < found.numel()


@settings(max_examples=10)
@given(seed=st.integers(0, 999), first=st.integers(0, 1))
def test_the_reference_cuts_and_draws_like_the_host(seed: int, first: int) -> None:
    batch, draft_tokens, logits = rows_of(PARAMS, seed)
    rows = batch.state(batch.rows)
    found = sampling.shaped(logits, rows, batch.sampling.step_features, draft_tokens, first)
    adjusted = sampling.adjust(logits, batch, draft_tokens, first)
    assert torch.equal(torch.isinf(found), torch.isinf(sampling.warp(adjusted, batch)))
    host = sampling._draw_adjusted(adjusted, batch, first, Purpose.DRAW)
    assert torch.equal(sampling.draw_at_temperature(found, rows, first), host)


def test_masses_are_those_of_torch_to_the_bit() -> None:
    """A mass that differed by one would move a nucleus now and then."""
    logits = -torch.rand(1, 1, 4096) * 30
    logits[..., 0] = 0
    params = [SamplingParams(temperature=1.0, top_p=0.5, max_tokens=9)]
    batch = new_batch(1, 20, 4096, DEVICE)
    batch.set_row(0, RowStart([1], params[0], 0))
    batch.set_live(range(1))
    none = torch.empty(1, 0, dtype=torch.int64, device=DEVICE)
    total = sampling.masses(logits).sum().double()
    ordered = sampling.masses(logits.flatten().sort(descending=True).values).cumsum(0)
    for place in (1, 40, 700):  # a share at the exact boundary of a token
        batch.sampling.top_p.fill_(float(ordered[place] / total))
        rows = batch.state(1)
        expected = sampling.shaped(logits.to(DEVICE), rows, StepFeatures(cuts=True), none)
        assert torch.equal(shape.shaped(logits.to(DEVICE), rows, StepFeatures(cuts=True), none), expected)


CUTS = [
    {"top_k": 1},
    {"top_k": 20, "top_p": 0.95, "temperature": 0.6},  # what Qwen3 recommends
    {"top_k": 150, "top_p": 0.5},  # as many as there are tokens
    {"top_k": 7, "min_p": 0.3, "top_p": 0.999999},
    {"top_p": 0.0},
    {"top_p": 0.9, "min_p": 0.05, "temperature": 0.01},
    {"top_p": 0.9, "temperature": 3.0},
    {"min_p": 1.0},
    {"top_k": 149, "temperature": 0.0},
    {},
    {"typical_p": 0.5, "temperature": 0.7},
    {"typical_p": 0.95, "epsilon_cutoff": 0.01},
    {"eta_cutoff": 0.02, "top_n_sigma": 1.0, "top_p": 0.9, "temperature": 1.5},
    {"typical_p": 0.2, "temperature": 0.0},
]


def lines_of(vocab: int, seed: int) -> Tensor:
    """Lines that a search by bins could get wrong, [kinds, V]."""
    make = torch.Generator().manual_seed(seed)
    normal = torch.randn(9, vocab, generator=make) * torch.tensor([3.0, 0.01, 40.0, 3.0, 3.0, 3.0, 3.0, 0, 0])[:, None]
    normal[3] = normal[3].round()  # ties
    normal[4, :60] = -torch.inf  # a grammar's, with blocks that are all forbidden
    normal[5, 3] = 25.0  # one token has nearly all mass
    normal[6, 40:] = -1e30
    normal[8] = -torch.inf
    normal[8, 77] = 1.5  # one token is left, and in the line before all are equal
    return normal


@pytest.mark.parametrize(
    ("params", "block", "dtype"), [(CUTS[:10], 64, torch.float32), (CUTS[1:4] + CUTS[10:], 256, torch.bfloat16)]
)
def test_cuts_keep_the_hosts_tokens_of_lines_of_every_kind(
    params: list[dict[str, float]], block: int, dtype: torch.dtype
) -> None:
    """Each row has two of the lines, and each line is cut in two ways."""
    count = len(params)
    batch = new_batch(count, 20, 150, DEVICE)
    for row, each in enumerate(params):
        batch.set_row(row, RowStart([1], SamplingParams(**({"temperature": 1.0} | each), max_tokens=9), row))  # type: ignore[arg-type]
    batch.set_live(range(count))
    lines = lines_of(150, block).to(dtype)
    logits = torch.stack([lines[[row % 9, (row * 2 + 3) % 9]] for row in range(count)]).to(DEVICE)
    none = torch.empty(count, 0, dtype=torch.int64, device=DEVICE)
    rows, asks = batch.state(count), batch.sampling.step_features
    found = shape.shaped(logits, rows, asks, none, block=block)
    assert torch.equal(found, sampling.shaped(logits, rows, asks, none))
    assert torch.equal(torch.isinf(found), torch.isinf(sampling.warp(logits.float(), batch)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masks_leave_the_tokens_that_may_come(dtype: torch.dtype) -> None:
    """Rows with masks at some positions, of more tokens than whole words have; what the round before set is gone."""
    make, masks = torch.Generator().manual_seed(0), TokenMasks(4, 3, 150, torch.device(DEVICE))
    masks.set([[torch.zeros(150, dtype=torch.bool).numpy()] * 3] * 4)
    allowed = torch.rand(3, 2, 150, generator=make) < 0.4
    masks.set([list(allowed[0].numpy()), [], [None, allowed[2, 1].numpy()]])
    logits = torch.randn(3, 2, 150, generator=make).to(DEVICE, dtype)
    allowed[1], allowed[2, 0] = True, True
    expected = logits.float().masked_fill(~allowed.to(DEVICE), -torch.inf)
    assert torch.equal(shape.masked(logits, masks, block=64), expected)
    assert torch.equal(masked(logits, masks).float(), expected)
