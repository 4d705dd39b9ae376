"""The part of a vocabulary that drafts are made of, and output heads over it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.tools import random_spec
from paceline.errors import ParameterError
from paceline.kernels import native
from paceline.models.base import Shortenable, ShortHead
from paceline.models.decoding.draft_vocabulary import FIRST_CHOICE, LAST_CHOICE, NEVER, DraftVocabulary
from paceline.models.native.model import NativeModel, Quantization
from paceline.models.native.short_head import PackedShortHead
from paceline.models.torch.short_head import TorchShortHead
from paceline.models.torch.transformer import Transformer
from toy import tiny_llama

pytestmark = pytest.mark.usefixtures("one_thread")
needs_kernels = pytest.mark.skipif(not native.available(), reason=f"needs the kernels: {native.why_none()}")


class Listed:
    """A short head that only lists its tokens."""

    def __init__(self, size: int) -> None:
        self.size, self.tokens = size, torch.full((size,), -1)
        self.puts: list[int] = []

    def put(self, places: Tensor, tokens: Tensor) -> None:
        self.tokens[places] = tokens
        self.puts.append(len(tokens))

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden[:, :1] + self.tokens.float()


def seen(
    vocabulary: DraftVocabulary, rounds: Sequence[Sequence[Sequence[int]]], prompts: Sequence[Sequence[int]]
) -> None:
    """Let the vocabulary observe rounds, in each of which every row gains tokens."""
    text = torch.zeros(len(prompts), 8192, dtype=torch.int64)
    lengths = [len(prompt) for prompt in prompts]
    for row, prompt in enumerate(prompts):
        text[row, : len(prompt)] = torch.tensor(prompt)
        vocabulary.join(row)
    for gains in rounds:
        for row, tokens in enumerate(gains):
            text[row, lengths[row] : lengths[row] + len(tokens)] = torch.tensor(tokens)
            lengths[row] += len(tokens)
        batch: Any = SimpleNamespace(text=text, slots=list(range(len(prompts))), lengths=list(lengths))
        verdict: Any = SimpleNamespace(tokens=[[*tokens, 99] for tokens in gains], gained=[*map(len, gains)])
        vocabulary.observe(batch, verdict)


def test_the_subset_begins_with_the_smallest_ids_and_the_tokens_that_always_stay() -> None:
    vocabulary = DraftVocabulary(Listed(5), 100, always=[97, 3, 97, 100, -1])
    assert vocabulary.tokens.tolist() == [0, 1, 2, 3, 97]


def test_frequent_tokens_replace_others_and_the_rest_keep_their_places() -> None:
    head = Listed(6)
    vocabulary = DraftVocabulary(head, 100, always=[50])
    vocabulary.count([80, 80, 4, 70, 70, 70, 60])
    vocabulary.choose()
    assert set(vocabulary.tokens.tolist()) == {50, 80, 70, 60, 4, 0}
    assert vocabulary.tokens.tolist()[:1] == [0]
    assert vocabulary.tokens.tolist()[4:] == [4, 50]
    assert head.tokens.tolist() == vocabulary.tokens.tolist()
    assert (head.puts, vocabulary.version) == ([6, 3], 1)
    vocabulary.choose()
    assert vocabulary.version == 1, "nothing has changed"


def test_equal_counts_prefer_the_smaller_id() -> None:
    vocabulary = DraftVocabulary(Listed(3), 100)
    vocabulary.count([90, 40, 70, 60])
    vocabulary.choose()
    assert sorted(vocabulary.tokens.tolist()) == [40, 60, 70]


def test_choices_come_at_fixed_numbers_of_counted_tokens() -> None:
    chosen: list[int] = []
    vocabulary = DraftVocabulary(Listed(5), 100)
    vocabulary.choose = lambda: chosen.append(vocabulary._counted)  # type: ignore[method-assign]
    seen(vocabulary, [[[7]]] * 8000, [[1, 2]])
    apart = [later - earlier for earlier, later in itertools.pairwise(chosen)]
    assert chosen[0] == FIRST_CHOICE
    assert apart[:3] == [2 * FIRST_CHOICE, 4 * FIRST_CHOICE, 8 * FIRST_CHOICE]
    assert max(apart) <= LAST_CHOICE


def test_a_prompt_is_counted_once_and_only_tokens_that_rows_took() -> None:
    vocabulary = DraftVocabulary(Listed(5), 100)
    seen(vocabulary, [[[30, 31], [32]], [[33], []]], [[20, 20, 21], [22]])
    counts = {token: int(count) for token, count in enumerate(vocabulary._counts) if count}
    assert counts == {20: 2, 21: 1, 22: 1, 30: 1, 31: 1, 32: 1, 33: 1}


def test_under_the_rejection_rule_the_subset_stays() -> None:
    vocabulary = DraftVocabulary(Listed(5), 100, follows=False)
    seen(vocabulary, [[[60] * 9]] * 30, [[1]])
    assert vocabulary.tokens.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("size", "always"), [(100, []), (101, []), (2, [1, 2]), (1, [5])])
def test_a_size_that_leaves_nothing_to_choose_is_refused(size: int, always: list[int]) -> None:
    with pytest.raises(ParameterError, match="draft_vocab_size"):
        DraftVocabulary(Listed(size), 100, always)


def test_a_draft_model_with_fewer_tokens_than_the_target() -> None:
    vocabulary = DraftVocabulary(Listed(3), 100, known=10)
    vocabulary.count([50, 50, 9])
    vocabulary.choose()
    assert sorted(vocabulary.tokens.tolist()) == [0, 1, 9]
    assert vocabulary.logits(torch.zeros(1, 4)).shape == (1, 100)


def test_logits_outside_of_the_subset_are_never_drawn() -> None:
    vocabulary = DraftVocabulary(Listed(3), 6, always=[5])
    logits = vocabulary.logits(torch.ones(2, 1, 4))
    assert logits.shape == (2, 1, 6)
    assert logits[1, 0].tolist() == [1.0, 2.0, *[torch.tensor(NEVER).item()] * 3, 6.0]
    assert logits.softmax(-1)[..., 2:5].sum() == 0


# --- output heads -----------------------------------------------------------------------------------------------------


def same_logits(model: Any, width: int, head: ShortHead, exact: bool) -> None:
    """Check a head of 40 places against the whole one, also after places were filled anew."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randperm(model.vocab_size, generator=generator)
    head.put(torch.arange(40), tokens[:40])
    for rows in (1, 3, 17):
        hidden = torch.randn(rows, width, generator=generator)
        whole = model.logits(hidden)
        torch.testing.assert_close(
            head.logits(hidden), whole[:, tokens[:40]], **({"rtol": 0, "atol": 0} if exact else {})
        )
    places = torch.tensor([39, 0, 33, 7])
    head.put(places, tokens[40:44])
    tokens[places] = tokens[40:44].clone()
    torch.testing.assert_close(head.logits(hidden), whole[:, tokens[:40]], **({"rtol": 0, "atol": 0} if exact else {}))


@needs_kernels
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_packed_columns_give_the_bits_of_the_whole_head(quantization: Quantization | None, tied: bool) -> None:
    model = NativeModel(random_spec(tied=tied), "random", quantization=quantization, threads=1)
    head = model.short_head(40)
    assert isinstance(head, PackedShortHead)
    same_logits(model, model.width, head, exact=True)


def test_rows_in_torch_give_the_logits_of_the_whole_head() -> None:
    model = tiny_llama(vocab_size=131)
    assert isinstance(model, Transformer)
    head = model.short_head(40)
    assert isinstance(head, TorchShortHead)
    same_logits(model, 32, head, exact=False)


@needs_kernels
def test_columns_outside_of_a_head_are_refused() -> None:
    head = NativeModel(random_spec(), "random", quantization="int8", threads=1).short_head(40)
    for place, token in ((40, 0), (-1, 0), (0, 131), (0, -1)):
        with pytest.raises(ParameterError, match="outside"):
            head.put(torch.tensor([place]), torch.tensor([token]))


@needs_kernels
@pytest.mark.parametrize("tied", [True, False])
def test_a_pass_reads_its_layers_and_a_column_for_each_scored_token(tied: bool) -> None:
    model = NativeModel(random_spec(tied=tied), "random", quantization="int8", threads=1)
    assert isinstance(model, Shortenable)
    read = model.pass_bytes
    assert read is not None
    padded = 128  # of 72
    assert read.token == padded + 4
    embedding = 0 if tied else 131 * padded * 2
    assert read.layers == pytest.approx(model.weight_bytes() - 131 * read.token - embedding, abs=1)
    assert 0 < read.layers < model.weight_bytes()
