"""The decoder: logits do not depend on old contents of the cache or on how the tokens are split over passes."""

from __future__ import annotations

import pytest
import torch

from batches import new_batch
from paceline.config import SamplingParams
from paceline.core.batch import Batch, RowStart
from paceline.core.draft_tensors import DraftTensors
from paceline.kernels.attention import BACKENDS
from paceline.models.base import Model
from paceline.models.decoding.draft_decoder import DraftDecoder
from toy import VOCAB, ToyModel, logits_after, tiny_llama

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = [[1], [2, 3, 4, 5, 6, 7], [8, 9, 1]]
MODELS = {"toy": ToyModel, "llama": tiny_llama}


def setup(model: Model, backend: str = "padded", positions: int = 16) -> tuple[DraftDecoder, Batch]:
    """Return a decoder whose cache was full of garbage, and a batch of prompts prefilled except their last token."""
    decoder = DraftDecoder(model, BACKENDS[backend](), 4, positions)
    decoder.cache.keys.fill_(1e3)
    decoder.cache.values.fill_(-1e3)
    decoder.num_computed_tokens.fill_(11)
    batch = new_batch(4, positions, model.vocab_size)
    for row, prompt in enumerate(PROMPTS):
        batch.set_row(row, RowStart(prompt, SamplingParams(temperature=0), row))
        decoder.cut_row(row, 0)
    batch.set_live(range(len(PROMPTS)))
    decoder.prefill(batch, range(3), [0, 0, 0], [len(prompt) - 1 for prompt in PROMPTS])
    return decoder, batch


@pytest.mark.parametrize("backend", ["padded", "split"])
@pytest.mark.parametrize("name", MODELS)
def test_verify_returns_the_logits_after_every_draft_token(name: str, backend: str) -> None:
    model = MODELS[name]()
    decoder, batch = setup(model, backend)
    draft_tokens = torch.randint(0, VOCAB, (3, 4), generator=torch.Generator().manual_seed(0))
    counts = torch.tensor([4, 2, 0])
    logits = decoder.verify(batch, DraftTensors(draft_tokens, counts))
    for row, prompt in enumerate(PROMPTS):
        for place in range(int(counts[row]) + 1):
            expected = logits_after(model, prompt + draft_tokens[row, :place].tolist())
            assert logits[row, place].tolist() == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("chunks", [[(0, 5)], [(0, 2), (2, 5)], [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]])
@pytest.mark.parametrize("name", MODELS)
def test_chunked_prefill_equals_one_prefill(name: str, chunks: list[tuple[int, int]]) -> None:
    model = MODELS[name]()
    decoder, batch = setup(model)
    decoder.cache.keys.fill_(7)
    decoder.cache.values.fill_(7)
    for start, stop in chunks:  # the other rows are padded beyond their end
        decoder.prefill(batch, range(3), [0, start, min(start, 2)], [0, stop, min(stop, 2)])
    logits = decoder.verify(batch, DraftTensors.of(batch.empty_draft, batch.device))
    for row, prompt in enumerate(PROMPTS):
        assert logits[row, 0].tolist() == pytest.approx(logits_after(model, prompt), abs=1e-4)
    assert decoder.num_computed_tokens[:3].tolist() == [0, 5, 2]


def test_prefill_of_later_rows_does_not_change_decoding_rows() -> None:
    model = ToyModel()
    decoder, batch = setup(model)
    batch.set_row(3, RowStart([5] * 9, SamplingParams(), 3))
    decoder.prefill(batch, [3], [0], [8])
    batch.set_live(range(4))
    logits = decoder.verify(batch, DraftTensors.of(batch.empty_draft, batch.device))
    for row, prompt in enumerate([*PROMPTS, [5] * 9]):
        assert logits[row, 0].tolist() == logits_after(model, prompt)


@pytest.mark.parametrize("name", MODELS)
def test_a_full_row_decodes_its_last_token_beside_long_drafts(name: str) -> None:
    """Writes beyond the end of a row must not change any token that is read."""
    model = MODELS[name]()
    decoder, batch = setup(model, positions=7)
    draft_tokens = torch.ones(3, 6, dtype=torch.int64)
    for _ in range(2):
        logits = decoder.verify(batch, DraftTensors(draft_tokens, torch.tensor([6, 1, 4])))
    for row, (prompt, places) in enumerate(zip(PROMPTS, (7, 2, 5), strict=True)):
        for place in range(places):
            if len(prompt) + place <= 7:
                expected = logits_after(model, prompt + [1] * place)
                assert logits[row, place].tolist() == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("missing", [[1, 1, 1], [1, 3, 2], [1, 6, 1]])
def test_next_hidden_runs_the_missing_tokens_of_each_row(missing: list[int]) -> None:
    model = ToyModel()
    decoder, batch = setup(model)
    decoder.num_computed_tokens[:3] = torch.tensor([len(p) - each for p, each in zip(PROMPTS, missing, strict=True)])
    logits = decoder.logits(decoder.next_hidden(batch, max(missing)))
    for row, prompt in enumerate(PROMPTS):
        assert logits[row].tolist() == logits_after(model, prompt)
    assert decoder.num_computed_tokens[:3].tolist() == [len(prompt) for prompt in PROMPTS]


def test_rewind_drops_rejected_draft_tokens() -> None:
    decoder, batch = setup(ToyModel())
    decoder.num_computed_tokens[:3] = torch.tensor([4, 3, 2])
    decoder.rewind(batch)
    assert decoder.num_computed_tokens[:3].tolist() == [0, 3, 2]


def test_a_copied_row_continues_like_its_source() -> None:
    model = ToyModel()
    decoder, batch = setup(model)
    batch.set_live(())
    batch.set_row(0, RowStart(PROMPTS[1], SamplingParams(temperature=0), 1))
    batch.set_live(range(3))
    decoder.copy_row(1, 0, 5)
    assert decoder.num_computed_tokens[0] == 5
    logits = decoder.verify(batch, DraftTensors.of(batch.empty_draft, batch.device))
    assert logits[0, 0].tolist() == logits[1, 0].tolist() == logits_after(model, PROMPTS[1])


@pytest.mark.parametrize("own", [VOCAB - 5, VOCAB + 5])
def test_logits_of_a_padded_head_are_cut_or_filled(own: int) -> None:
    model = ToyModel(own)
    decoder = DraftDecoder(model, BACKENDS["padded"](), 1, 8, VOCAB)
    tokens = torch.tensor([[VOCAB - 1, 2]])  # the first id is outside the smaller model's vocabulary
    logits = decoder.logits(decoder.forward(tokens, torch.zeros(1, dtype=torch.int64), 2))
    assert logits.shape == (1, 2, VOCAB)
    assert logits[..., :own].isfinite().all()
    assert (logits[..., own:] == -torch.inf).all()
