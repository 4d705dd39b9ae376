"""Drafts and verdicts made from lists equal those made from tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from paceline.core.draft import Draft, HostVerdict, Verdict, VerifiedTree, branching

DRAFT_TOKENS = [[5, 6, 7], [], [8]]
KINDS = [[0, 0, 0], [], [1]]
SCORES = [[0.9, 0.8, 0.7], [], [0.5]]
CPU = torch.device("cpu")


def drafts() -> tuple[Draft, Draft]:
    tokens = torch.tensor([[5, 6, 7], [0, 0, 0], [8, 0, 0]])
    return Draft(tokens, torch.tensor([3, 0, 1]), confidence=SCORES, kinds=KINDS), Draft.of(
        DRAFT_TOKENS, CPU, SCORES, KINDS
    )


def assert_same(one: Draft, other: Draft) -> None:
    assert one.draft_tokens == other.draft_tokens
    assert (one.k, one.drafted) == (other.k, other.drafted)
    assert torch.equal(one.counts, other.counts)
    assert torch.equal(one.tokens[one.real[:, 1:]], other.tokens[other.real[:, 1:]])  # padding is undefined
    assert one.confidence == other.confidence
    assert one.kinds == other.kinds
    assert (one.probabilities, one.parents, one.logits) == (other.probabilities, other.parents, other.logits)


@pytest.mark.parametrize("counts", [[2, 0, 1], [1, 0, 0], [0, 0, 0], [3, 0, 1]])
def test_first_gives_the_same_draft_from_tensors_and_lists(counts: list[int]) -> None:
    from_tensors, from_lists = drafts()
    assert_same(from_tensors.first(counts), from_lists.first(counts))


def test_spread_and_replace_give_the_same_draft_from_tensors_and_lists() -> None:
    from_tensors, from_lists = drafts()
    assert_same(from_tensors, from_lists)
    assert_same(from_tensors.spread(1, 5), from_lists.spread(1, 5))
    others = [replace(draft, tokens=draft.tokens + 1) for draft in drafts()]
    assert_same(*others)
    assert_same(others[0].first([1, 0, 1]), others[1].first([1, 0, 1]))
    assert from_lists.capped(None) is from_lists


def test_a_cap_keeps_the_first_draft_tokens() -> None:
    from_tensors, from_lists = (draft.capped([1, 4, 4]) for draft in drafts())
    assert from_tensors.draft_tokens == from_lists.draft_tokens == [[5], [], [8]]
    assert from_lists.k == 1


def test_an_empty_draft_has_any_number_of_rows() -> None:
    for rows in (0, 1, 3):
        draft = Draft.empty(rows, CPU)
        assert (draft.k, draft.tokens.shape, draft.counts.tolist()) == (0, (rows, 0), [0] * rows)
        assert draft.tokens.dtype == draft.counts.dtype == torch.int64


TREE = [[5, 6, 7, 8, 9], [4]]
TREE_PARENTS = [[-1, 0, 1, -1, 3], [-1]]


def test_a_tree_without_branches_is_a_chain() -> None:
    chain = branching([[5, 6], [7]], [[-1, 0], [-1]], CPU)
    assert chain.host_parents is None
    assert "tokens" not in vars(chain), "no tensor was made"
    tree = branching(TREE, TREE_PARENTS, CPU)
    assert tree.parents is not None
    assert tree.counts.tolist() == [5, 1]
    assert "tokens" not in vars(tree.first([3, 1]))
    assert tree.first([4, 0]).parents is not None
    assert tree.first([0, 0]).k == 0


@pytest.mark.parametrize(("caps", "left"), [([2, 1], [5, 6, 8, 9]), ([1, 0], [5, 8]), ([0, 1], [])])
def test_a_cap_limits_the_depth_of_a_tree(caps: list[int], left: list[int]) -> None:
    scores = [[0.1, 0.2, 0.3, 0.4, 0.5], [0.6]]
    cut = branching(TREE, TREE_PARENTS, CPU, scores, [[0, 1, 2, 3, 4], [5]]).capped(caps)
    assert cut.draft_tokens == [left, [4][: caps[1]]]
    ways = [paths[1 : 1 + count] for paths, count in zip(cut.token_paths, cut.drafted, strict=True)]
    assert all(len(way) <= cap for each, cap in zip(ways, caps, strict=True) for way in each)
    assert cut.confidence is not None
    assert cut.kinds is not None
    assert [TREE[0][kind] for kind in cut.kinds[0]] == left
    assert list(cut.confidence[0]) == [scores[0][kind] for kind in cut.kinds[0]]


CHANGES: dict[str, Callable[[Draft], Draft]] = {
    "unchanged": lambda draft: draft,
    "first": lambda draft: draft.first([4, 1]),
    "capped": lambda draft: draft.capped([2, 0]),
    "spread": lambda draft: draft.spread(1, 4),
    "ordered": lambda draft: draft.ordered([[3, 0, 4, 1, 2], [0]]),
    "without confidence": lambda draft: replace(draft, confidence=None),
}


@pytest.mark.parametrize("change", CHANGES)
def test_trees_of_tensors_and_of_lists_are_the_same(change: str) -> None:
    tokens, parents = torch.tensor([TREE[0], [4, 0, 0, 0, 0]]), torch.tensor([TREE_PARENTS[0], [-1] * 5])
    scores, kinds = [[0.9, 0.8, 0.7, 0.1, 0.05], [0.6]], [[0, 0, 0, 4, 4], [1]]
    made = Draft(tokens, torch.tensor([5, 1]), confidence=scores, parents=parents, kinds=kinds)
    one, other = map(CHANGES[change], (made, branching(TREE, TREE_PARENTS, CPU, scores, kinds)))
    assert (one.k, one.draft_tokens, one.host_parents) == (other.k, other.draft_tokens, other.host_parents)
    assert (one.confidence, one.kinds) == (other.confidence, other.kinds)
    assert (one.token_paths, one.probabilities) == (other.token_paths, other.probabilities)
    assert one.parents is not None
    assert other.parents is not None
    for table, another in ((one.tokens, other.tokens), (one.counts, other.counts), (one.parents, other.parents)):
        assert torch.equal(table, another)
        assert table.dtype == another.dtype == torch.int64


def test_a_verdict_from_lists_has_the_path_of_one_from_tensors() -> None:
    host = HostVerdict([[6, 7, 8], [1]], [2, 0], [4, 1])
    read, path = Verdict.of(host, [[1, 3], []]), torch.tensor([[1, 3, 2, 3], [0, 1, 2, 3]])
    assert read.path is not None
    assert torch.equal(read.path, path)
    assert Verdict(torch.zeros(2, 5), torch.tensor([2, 0]), torch.tensor([4, 1]), path=path).kept == read.kept
    assert (Verdict.of(host).path, Verdict(read.tokens, read.accepted, read.drafted).kept) == (None, None)


def test_spreading_trees_leaves_the_other_rows_without_draft_tokens() -> None:
    wide = branching(TREE, TREE_PARENTS, CPU).spread(1, 4)
    assert wide.draft_tokens == [[], *TREE, []]
    assert [ways[: 1 + count] for ways, count in zip(wide.token_paths, wide.drafted, strict=True)][1:3] == [
        ways[: 1 + count] for ways, count in zip(branching(TREE, TREE_PARENTS, CPU).token_paths, [5, 1], strict=True)
    ]


#  draft token  0   1  2  3  4   5      1 and 5 are siblings of 0, 4 is a sibling of 3
PARENTS = [-1, -1, 1, 2, 2, -1]


@pytest.mark.parametrize(
    ("path", "saved_at", "fully_accepted"),
    [([], None, False), ([0], None, True), ([1, 2], 0, False), ([1, 2, 4], 0, True), ([5], 0, True)],
)
def test_a_verified_tree_reports_where_a_sibling_saved_the_round(
    path: list[int], saved_at: int | None, fully_accepted: bool
) -> None:
    tree = VerifiedTree.of(PARENTS, path)
    assert tree == ([1, 1, 2, 3, 3, 1], saved_at, fully_accepted)
    assert (tree.depth, tree.branches) == (3, True)
    assert [tree.verified(kept) for kept in range(4)] == [0, 3, 4, 6]


def test_verified_draft_tokens_of_trees_are_counted_by_depth() -> None:
    trees = [VerifiedTree.of(PARENTS, [1, 2, 4]), VerifiedTree.of([-1, 0, 1, 1], [0, 1, 3]), VerifiedTree.of([], [])]
    verdict = HostVerdict([[7] * 4, [7] * 4, [7]], [3, 3, 0], [6, 4, 0], trees=trees)
    assert (verdict.depths, verdict.rows_saved_by_sibling) == ([3, 3, 0], 2)
    assert [verdict.verified(0, kept) for kept in (1, 3, 4)] == [3, 6, 6]
    assert [verdict.saved_by_sibling(0, kept) for kept in (0, 1)] == [False, True]
    assert [verdict.saved_by_sibling(1, kept) for kept in (2, 3)] == [False, True], "the row ended before the sibling"
    assert not verdict.saved_by_sibling(2, 1)
    assert [verdict.fully_accepted(row) for row in range(3)] == [True, True, True]


def test_tensors_and_lists_are_made_on_first_access() -> None:
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
