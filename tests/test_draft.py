"""A draft that the host has from the start is the same draft as one of tensors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from paceline.draft import Draft, ReadDraft

GUESSES = [[5, 6, 7], [], [8]]
KINDS = [[0, 0, 0], [], [1]]
SCORES = [[0.9, 0.8, 0.7], [], [0.5]]
CPU = torch.device("cpu")


def drafts() -> tuple[Draft, Draft]:
    tokens = torch.tensor([[5, 6, 7], [0, 0, 0], [8, 0, 0]])
    return Draft(tokens, torch.tensor([3, 0, 1]), confidence=SCORES, kinds=KINDS), ReadDraft.of(
        GUESSES, CPU, SCORES, KINDS
    )


def assert_same(one: Draft, other: Draft) -> None:
    assert one.guesses == other.guesses
    assert (one.k, one.drafted) == (other.k, other.drafted)
    assert torch.equal(one.counts, other.counts)
    assert torch.equal(one.tokens[one.real[:, 1:]], other.tokens[other.real[:, 1:]])  # padding means nothing
    assert one.confidence == other.confidence
    assert one.kinds == other.kinds
    assert (one.probabilities, one.parents, one.logits) == (other.probabilities, other.parents, other.logits)


@pytest.mark.parametrize("counts", [[2, 0, 1], [1, 0, 0], [0, 0, 0], [3, 0, 1]])
def test_the_first_guesses_of_each_row_are_the_same(counts: list[int]) -> None:
    of_tensors, of_lists = drafts()
    assert_same(of_tensors.first(counts), of_lists.first(counts))


def test_it_is_the_same_as_it_is_spread_or_with_another_field() -> None:
    of_tensors, of_lists = drafts()
    assert_same(of_tensors, of_lists)
    assert_same(of_tensors.spread(1, 5), of_lists.spread(1, 5))
    others = [replace(draft, tokens=draft.tokens + 1) for draft in drafts()]
    assert_same(*others)
    assert_same(others[0].first([1, 0, 1]), others[1].first([1, 0, 1]))
    assert of_lists.capped(None) is of_lists


def test_a_cap_leaves_the_first_guesses() -> None:
    of_tensors, of_lists = (draft.capped([1, 4, 4]) for draft in drafts())
    assert of_tensors.guesses == of_lists.guesses == [[5], [], [8]]
    assert of_lists.k == 1


def test_no_guesses_are_a_draft_for_any_number_of_rows() -> None:
    for rows in (0, 1, 3):
        draft = Draft.empty(rows, CPU)
        assert (draft.k, draft.tokens.shape, draft.counts.tolist()) == (0, (rows, 0), [0] * rows)
        assert draft.tokens.dtype == draft.counts.dtype == torch.int64
