"""Drafts and verdicts: made from tensors or lists, cut, reordered; and a draft as tensors again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace

import pytest
import torch

from paceline.core.draft import Draft, Verdict, VerifiedTree, branching, empty_draft
from paceline.core.draft_tensors import DraftTensors
from paceline.errors import ParameterError

DRAFT_TOKENS = [[5, 6, 7], [], [8]]
KINDS = [[0, 0, 0], [], [1]]
SCORES = [[0.9, 0.8, 0.7], [], [0.5]]
CPU = torch.device("cpu")


def drafts() -> tuple[Draft, Draft]:
    tokens, counts = torch.tensor([[5, 6, 7], [0, 0, 0], [8, 0, 0]]), torch.tensor([3, 0, 1])
    return Draft(tokens, counts, None, SCORES, kinds=KINDS), Draft(DRAFT_TOKENS, confidence=SCORES, kinds=KINDS)


def assert_same(one: Draft, other: Draft) -> None:
    assert vars(one) == vars(other)
    assert (one.k, one.drafted) == (other.k, other.drafted)
    tensors, others = (DraftTensors.of(each, CPU) for each in (one, other))
    assert torch.equal(tensors.tokens, others.tokens)
    assert torch.equal(tensors.counts, others.counts)
    assert torch.equal(tensors.real, others.real)


@pytest.mark.parametrize("counts", [[2, 0, 1], [1, 0, 0], [0, 0, 0], [3, 0, 1]])
def test_first_gives_the_same_draft_from_tensors_and_lists(counts: list[int]) -> None:
    from_tensors, from_lists = drafts()
    assert_same(from_tensors.first(counts), from_lists.first(counts))
    assert from_lists.first(counts).drafted == counts


def test_spread_and_replace_give_the_same_draft_from_tensors_and_lists() -> None:
    from_tensors, from_lists = drafts()
    assert_same(from_tensors, from_lists)
    assert_same(from_tensors.spread(1, 5), from_lists.spread(1, 5))
    assert from_lists.spread(1, 5).draft_tokens == [[], *DRAFT_TOKENS, []]
    others = [replace(draft, confidence=None) for draft in drafts()]
    assert_same(*others)
    assert_same(others[0].first([1, 0, 1]), others[1].first([1, 0, 1]))
    assert from_lists.capped(None) is from_lists


def test_a_cap_keeps_the_first_draft_tokens() -> None:
    from_tensors, from_lists = (draft.capped([1, 4, 4]) for draft in drafts())
    assert from_tensors.draft_tokens == from_lists.draft_tokens == [[5], [], [8]]
    assert from_lists.k == 1


def test_distributions_stay_beside_their_draft_tokens() -> None:
    q = torch.rand(3, 3, 4)
    draft = Draft(DRAFT_TOKENS, None, q)
    for cut, k in ((draft.first([2, 0, 1]), 2), (draft.capped([1, 4, 4]), 1)):
        probabilities = DraftTensors.of(cut, CPU).probabilities
        assert probabilities is not None
        assert torch.equal(probabilities, q[:, :k])
    wide = DraftTensors.of(draft.spread(1, 5), CPU).probabilities
    assert wide is not None
    assert torch.equal(wide[1:4], q)
    assert draft.first([0, 0, 0]).probabilities is None, "a round without draft tokens draws like plain decoding"


@pytest.mark.parametrize("count", [-1, 4])
def test_a_count_that_the_draft_does_not_have_is_refused(count: int) -> None:
    with pytest.raises(ParameterError, match="counts"):
        Draft(torch.ones(2, 3, dtype=torch.int64), torch.tensor([3, count]))


def test_an_empty_draft_has_any_number_of_rows() -> None:
    for rows in (0, 1, 3):
        draft = empty_draft(rows)
        assert (draft.k, draft.drafted) == (0, [0] * rows)
        tensors = DraftTensors.of(draft, CPU)
        assert (tensors.tokens.shape, tensors.counts.tolist()) == ((rows, 0), [0] * rows)
        assert tensors.tokens.dtype == tensors.counts.dtype == torch.int64


def test_drafts_and_verdicts_do_not_change() -> None:
    draft, verdict = Draft(DRAFT_TOKENS), Verdict([[1]], [0], [0])
    with pytest.raises(FrozenInstanceError):
        draft.kinds = KINDS  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        verdict.gained = [1]  # type: ignore[misc]
    assert draft.with_kinds(KINDS).kinds == KINDS
    assert draft.kinds is None
    assert verdict.host is verdict, "the name that plugins use"


TREE = [[5, 6, 7, 8, 9], [4]]
TREE_PARENTS = [[-1, 0, 1, -1, 3], [-1]]


def test_a_tree_without_branches_is_a_chain() -> None:
    assert branching([[5, 6], [7]], [[-1, 0], [-1]]).parents is None
    tree = branching(TREE, TREE_PARENTS)
    assert (tree.parents, tree.drafted) == (TREE_PARENTS, [5, 1])
    assert tree.first([4, 0]).parents == [[-1, 0, 1, -1], []]
    assert tree.first([0, 0]).k == 0


@pytest.mark.parametrize(("caps", "left"), [([2, 1], [5, 6, 8, 9]), ([1, 0], [5, 8]), ([0, 1], [])])
def test_a_cap_limits_the_depth_of_a_tree(caps: list[int], left: list[int]) -> None:
    scores = [[0.1, 0.2, 0.3, 0.4, 0.5], [0.6]]
    cut = branching(TREE, TREE_PARENTS, scores, [[0, 1, 2, 3, 4], [5]]).capped(caps)
    assert cut.draft_tokens == [left, [4][: caps[1]]]
    paths = DraftTensors.of(cut, CPU).paths
    assert list(map(len, paths)) == [1 + count for count in cut.drafted]
    assert all(len(way) <= cap for each, cap in zip(paths, caps, strict=True) for way in each)
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
    made = Draft(tokens, torch.tensor([5, 1]), None, scores, parents=parents, kinds=kinds)
    one, other = map(CHANGES[change], (made, branching(TREE, TREE_PARENTS, scores, kinds)))
    assert_same(one, other)
    tensors, others = (DraftTensors.of(each, CPU) for each in (one, other))
    assert tensors.paths == others.paths
    assert tensors.parents is not None
    assert others.parents is not None
    assert torch.equal(tensors.parents, others.parents)


def test_spreading_trees_leaves_the_other_rows_without_draft_tokens() -> None:
    tree = branching(TREE, TREE_PARENTS)
    wide = tree.spread(1, 4)
    assert (wide.draft_tokens, wide.parents) == ([[], *TREE, []], [[], *TREE_PARENTS, []])
    assert DraftTensors.of(wide, CPU).paths == [[[]], *DraftTensors.of(tree, CPU).paths, [[]]]


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
    parents, path = [PARENTS, [-1, 0, 1, 1], []], [[1, 2, 4], [0, 1, 3], []]
    verdict = Verdict([[7] * 4, [7] * 4, [7]], [3, 3, 0], [6, 4, 0], parents=parents, path=path)
    assert (verdict.depths, verdict.rows_saved_by_sibling) == ([3, 3, 0], 2)
    assert [verdict.verified(0, kept) for kept in (1, 3, 4)] == [3, 6, 6]
    assert [verdict.saved_by_sibling(0, kept) for kept in (0, 1)] == [False, True]
    assert [verdict.saved_by_sibling(1, kept) for kept in (2, 3)] == [False, True], "the row ended before the sibling"
    assert not verdict.saved_by_sibling(2, 1)
    assert [verdict.fully_accepted(row) for row in range(3)] == [True, True, True]
