"""A draft that the host has from the start is the same draft as one of tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from paceline.core.draft import Draft, HostVerdict, Verdict, VerifiedTree, branching

GUESSES = [[5, 6, 7], [], [8]]
KINDS = [[0, 0, 0], [], [1]]
SCORES = [[0.9, 0.8, 0.7], [], [0.5]]
CPU = torch.device("cpu")


def drafts() -> tuple[Draft, Draft]:
    tokens = torch.tensor([[5, 6, 7], [0, 0, 0], [8, 0, 0]])
    return Draft(tokens, torch.tensor([3, 0, 1]), confidence=SCORES, kinds=KINDS), Draft.of(GUESSES, CPU, SCORES, KINDS)


def assert_same(one: Draft, other: Draft) -> None:
    assert one.draft_tokens == other.draft_tokens
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
    assert of_tensors.draft_tokens == of_lists.draft_tokens == [[5], [], [8]]
    assert of_lists.k == 1


def test_no_guesses_are_a_draft_for_any_number_of_rows() -> None:
    for rows in (0, 1, 3):
        draft = Draft.empty(rows, CPU)
        assert (draft.k, draft.tokens.shape, draft.counts.tolist()) == (0, (rows, 0), [0] * rows)
        assert draft.tokens.dtype == draft.counts.dtype == torch.int64


TREE = [[5, 6, 7, 8, 9], [4]]
FOLLOWS = [[-1, 0, 1, -1, 3], [-1]]


def test_a_tree_without_branches_is_a_chain() -> None:
    chain = branching([[5, 6], [7]], [[-1, 0], [-1]], CPU)
    assert chain.host_parents is None
    assert "tokens" not in vars(chain), "the host has it"
    tree = branching(TREE, FOLLOWS, CPU)
    assert tree.parents is not None
    assert tree.counts.tolist() == [5, 1]
    assert "tokens" not in vars(tree.first([3, 1]))
    assert tree.first([4, 0]).parents is not None
    assert tree.first([0, 0]).k == 0


@pytest.mark.parametrize(("caps", "left"), [([2, 1], [5, 6, 8, 9]), ([1, 0], [5, 8]), ([0, 1], [])])
def test_of_a_tree_the_cap_is_its_depth(caps: list[int], left: list[int]) -> None:
    scores = [[0.1, 0.2, 0.3, 0.4, 0.5], [0.6]]
    cut = branching(TREE, FOLLOWS, CPU, scores, [[0, 1, 2, 3, 4], [5]]).capped(caps)
    assert cut.draft_tokens == [left, [4][: caps[1]]]
    ways = [paths[1 : 1 + count] for paths, count in zip(cut.token_paths, cut.drafted, strict=True)]
    assert all(len(way) <= cap for each, cap in zip(ways, caps, strict=True) for way in each)
    assert cut.confidence is not None
    assert cut.kinds is not None
    assert [TREE[0][kind] for kind in cut.kinds[0]] == left
    assert list(cut.confidence[0]) == [scores[0][kind] for kind in cut.kinds[0]]


CHANGES: dict[str, Callable[[Draft], Draft]] = {
    "as they are": lambda draft: draft,
    "the first": lambda draft: draft.first([4, 1]),
    "not so deep": lambda draft: draft.capped([2, 0]),
    "of more rows": lambda draft: draft.spread(1, 4),
    "in another order": lambda draft: draft.ordered([[3, 0, 4, 1, 2], [0]]),
    "without scores": lambda draft: replace(draft, confidence=None),
}


@pytest.mark.parametrize("change", CHANGES)
def test_trees_of_tensors_and_of_lists_are_the_same(change: str) -> None:
    tokens, parents = torch.tensor([TREE[0], [4, 0, 0, 0, 0]]), torch.tensor([FOLLOWS[0], [-1] * 5])
    scores, kinds = [[0.9, 0.8, 0.7, 0.1, 0.05], [0.6]], [[0, 0, 0, 4, 4], [1]]
    made = Draft(tokens, torch.tensor([5, 1]), confidence=scores, parents=parents, kinds=kinds)
    one, other = map(CHANGES[change], (made, branching(TREE, FOLLOWS, CPU, scores, kinds)))
    assert (one.k, one.draft_tokens, one.host_parents) == (other.k, other.draft_tokens, other.host_parents)
    assert (one.confidence, one.kinds) == (other.confidence, other.kinds)
    assert (one.token_paths, one.probabilities) == (other.token_paths, other.probabilities)
    assert one.parents is not None
    assert other.parents is not None
    for table, another in ((one.tokens, other.tokens), (one.counts, other.counts), (one.parents, other.parents)):
        assert torch.equal(table, another)
        assert table.dtype == another.dtype == torch.int64


def test_of_a_verdict_that_was_read_the_path_is_that_of_tensors() -> None:
    host = HostVerdict([[6, 7, 8], [1]], [2, 0], [4, 1])
    read, path = Verdict.of(host, [[1, 3], []]), torch.tensor([[1, 3, 2, 3], [0, 1, 2, 3]])
    assert read.path is not None
    assert torch.equal(read.path, path)
    assert Verdict(torch.zeros(2, 5), torch.tensor([2, 0]), torch.tensor([4, 1]), path=path).kept == read.kept
    assert (Verdict.of(host).path, Verdict(read.tokens, read.accepted, read.drafted).kept) == (None, None)


def test_a_part_of_a_batch_with_trees_leaves_the_other_rows_without_guesses() -> None:
    wide = branching(TREE, FOLLOWS, CPU).spread(1, 4)
    assert wide.draft_tokens == [[], *TREE, []]
    assert [ways[: 1 + count] for ways, count in zip(wide.token_paths, wide.drafted, strict=True)][1:3] == [
        ways[: 1 + count] for ways, count in zip(branching(TREE, FOLLOWS, CPU).token_paths, [5, 1], strict=True)
    ]


#  draft token    0  1  2  3   4  5     draft token 1 stands beside 0, draft token 4 beside 3
PARENTS = [-1, -1, 1, 2, 2, -1]


@pytest.mark.parametrize(
    ("path", "saved_at", "whole"),
    [([], None, False), ([0], None, True), ([1, 2], 0, False), ([1, 2, 4], 0, True), ([5], 0, True)],
)
def test_a_judged_tree_knows_where_a_sibling_saved_the_round(
    path: list[int], saved_at: int | None, whole: bool
) -> None:
    tree = VerifiedTree.of(PARENTS, path)
    assert tree == ([1, 1, 2, 3, 3, 1], saved_at, whole)
    assert (tree.depth, tree.branches) == (3, True)
    assert [tree.verified(kept) for kept in range(4)] == [0, 3, 4, 6]


def test_trees_are_counted_by_depth_and_cut_with_their_answers() -> None:
    trees = [VerifiedTree.of(PARENTS, [1, 2, 4]), VerifiedTree.of([-1, 0, 1, 1], [0, 1, 3]), VerifiedTree.of([], [])]
    verdict = HostVerdict([[7] * 4, [7] * 4, [7]], [3, 3, 0], [6, 4, 0], trees=trees)
    assert (verdict.depths, verdict.rows_saved_by_sibling) == ([3, 3, 0], 2)
    assert [verdict.verified(0, kept) for kept in (1, 3, 4)] == [3, 6, 6]
    assert [verdict.saved_by_sibling(0, kept) for kept in (0, 1)] == [False, True]
    assert [verdict.saved_by_sibling(1, kept) for kept in (2, 3)] == [False, True], "it was cut before the sibling"
    assert not verdict.saved_by_sibling(2, 1)
    assert [verdict.fully_accepted(row) for row in range(3)] == [True, True, True]


def test_only_what_is_asked_for_is_made() -> None:
    listed, made = Draft.of([[5, 6], []], CPU), Draft(torch.tensor([[5, 6], [0, 0]]), torch.tensor([2, 0]))
    assert (listed.k, listed.drafted, listed.parents, listed.first([1, 0]).draft_tokens) == (2, [2, 0], None, [[5], []])
    assert not {"tokens", "counts"} & vars(listed).keys()
    assert torch.equal(listed.tokens, made.tokens)
    assert listed.tokens is listed.tokens, "made once"
    assert "draft_tokens" not in vars(made)
    verdict = Verdict.of(HostVerdict([[6, 7], [1]], [1, 0], [2, 0]))
    assert not {"tokens", "accepted", "drafted"} & vars(verdict).keys()
    assert verdict.tokens.tolist() == [[6, 7], [1, 0]]
    assert "tokens" in vars(verdict)
