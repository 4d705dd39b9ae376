"""What a short draft vocabulary loses: coverage of recorded answers."""

from __future__ import annotations

import random

import pytest
import torch
from benchmarks.short_vocabulary import Listing, coverage, stretches
from benchmarks.tree_gain import Answer

from paceline.models.draft_vocabulary import FIRST_CHOICE, DraftVocabulary

VOCABULARY, SIZE = 9000, 4096


def answer(tokens: list[int], prompt: list[int]) -> Answer:
    return Answer("chat", 0.0, prompt, [], tokens)


def test_a_subset_that_follows_covers_what_comes_again_and_a_fixed_one_does_not() -> None:
    large = random.Random(3).sample(range(SIZE, VOCABULARY), 200)
    (line,) = (each for each in coverage([answer(large, [1])] * 3, VOCABULARY) if each["size"] == SIZE)
    assert line["fixed"]["all"] == 0
    assert line["following"]["all"] == pytest.approx(0.66, abs=0.12)  # the first answer is new


def test_stretches_cover_an_answer_and_change_where_the_subset_does() -> None:
    subset = DraftVocabulary(Listing(SIZE), VOCABULARY)
    found = list(stretches(answer([8000] * 200, [1]), subset, True))
    assert [(first, stop) for first, stop, _ in found] == [(0, FIRST_CHOICE - 1), (FIRST_CHOICE - 1, 200)]
    assert [bool(torch.isin(torch.tensor(8000), tokens)) for *_, tokens in found] == [False, True]
