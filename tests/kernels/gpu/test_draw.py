"""Drawing in the kernel against plain torch and against ``sampling.draw``: the same tokens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="triton is not installed")

from batches import new_batch
from paceline.config import SamplingParams
from paceline.core import sampling
from paceline.core.batch import Batch, RowStart
from paceline.core.values import Purpose
from paceline.kernels.gpu import draw as kernels

pytestmark = pytest.mark.usefixtures("one_thread")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make_batch(temperatures: list[float], vocab: int, seed: int = 0) -> Batch:
    batch = new_batch(len(temperatures) + 1, 600, vocab, DEVICE)
    for row, temperature in enumerate(temperatures):
        start = RowStart(
            [1] * (row * 50 + 3), SamplingParams(temperature=temperature), sampling.sequence_seed(seed, row)
        )
        batch.set_row(row + (row > 1), start)
    batch.set_live([row + (row > 1) for row in range(len(temperatures))])
    return batch


def noise_of(batch: Batch) -> kernels.Noise:
    return kernels.Noise.of(batch.state())


@settings(max_examples=30)
@given(data=st.data())
def test_kernel_and_sampling_with_and_without_reading_the_device_draw_the_same_tokens(data: st.DataObject) -> None:
    pick = data.draw
    temperatures = pick(st.lists(st.sampled_from([0.0, 0.3, 1.0, 5.0]), min_size=1, max_size=3))
    length, vocab = pick(st.integers(1, 3)), pick(st.integers(1, 150))
    batch = make_batch(temperatures, vocab, pick(st.integers(0, 2**40)))
    logits = pick(st.sampled_from([0.0, 1.0, 20.0])) * torch.randn(len(temperatures), length, vocab, device=DEVICE)
    first, purpose = pick(st.integers(0, 3)), pick(st.sampled_from([Purpose.DRAW, Purpose.DRAFT]))
    noise = noise_of(batch)
    found = kernels.draw(logits, noise, first, purpose, block=64)
    expected = sampling.draw(logits, batch, None, first, purpose)
    assert found.tolist() == expected.tolist()
    captured = sampling.draw_at_temperature(logits, batch.state(batch.rows), first, purpose)
    assert captured.tolist() == found.tolist()


@settings(max_examples=15)
@given(data=st.data())
def test_a_cut_vocabulary_draws_like_the_whole_one_without_the_other_tokens(data: st.DataObject) -> None:
    """The noise belongs to the token, not to its column: drafter and target still agree."""
    pick = data.draw
    vocab = pick(st.integers(3, 120))
    ids = torch.tensor(sorted(pick(st.sets(st.integers(0, vocab - 1), min_size=1))), device=DEVICE)
    batch = make_batch([1.0, 0.0], vocab, pick(st.integers(0, 99)))
    cut = torch.randn(2, 2, len(ids), device=DEVICE)
    whole = torch.full((2, 2, vocab), -1e6, device=DEVICE)
    whole[..., ids] = cut
    found = kernels.draw(cut, noise_of(batch), 0, Purpose.DRAW, ids=ids, block=32)
    assert found.tolist() == sampling.draw(whole, batch).tolist()


def test_logits_may_be_a_part_of_a_wider_table_and_of_half_precision() -> None:
    batch = make_batch([1.0, 0.7], 50)
    table = torch.randn(2, 3, 64, device=DEVICE).half()
    found = kernels.draw(table[..., :50], noise_of(batch), 0, Purpose.DRAW, block=32)
    assert found.tolist() == sampling.draw(table[..., :50].float(), batch).tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ties_go_to_the_smaller_token_also_across_blocks(temperature: float) -> None:
    batch = make_batch([temperature], 100)
    logits = torch.full((1, 1, 100), -1e9, device=DEVICE)
    logits[0, 0, [70, 9, 40]] = 5.0 if temperature == 0 else 5e8
    found = kernels.draw(logits, noise_of(batch), 0, Purpose.DRAW, block=32)
    assert found.tolist() == sampling.draw(logits, batch).tolist()
    if temperature == 0:
        assert found.item() == 9


@pytest.mark.filterwarnings("ignore:All-NaN", "ignore:invalid value")  # from numpy, which the interpreter uses
def test_nan_logits_give_a_token_of_the_vocabulary() -> None:
    """The token is looked up in the next pass: an index beyond the embedding would end the process on a GPU."""
    logits = torch.full((2, 2, 40), float("nan"), device=DEVICE)
    types = (torch.float32, torch.int64, torch.int64, torch.int64)
    noise = kernels.Noise(*(torch.zeros(2, device=DEVICE, dtype=type_) for type_ in types))
    for temperature in (0.0, 1.0):
        noise.temperature.fill_(temperature)
        drawn = kernels.draw(logits, noise, 0, Purpose.DRAW, block=16)
        assert bool(((drawn >= 0) & (drawn < 40)).all())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.filterwarnings("ignore:All-NaN", "ignore:invalid value")
def test_an_infinite_logit_wins(temperature: float) -> None:
    """A head in float16 that exceeds its range."""
    logits = torch.randn(2, 1, 40, device=DEVICE)
    logits[:, :, 29] = torch.inf
    types = (torch.float32, torch.int64, torch.int64, torch.int64)
    noise = kernels.Noise(*(torch.zeros(2, device=DEVICE, dtype=type_) for type_ in types))
    noise.temperature.fill_(temperature)
    assert kernels.draw(logits, noise, 0, Purpose.DRAW, block=16).unique().tolist() == [29]
