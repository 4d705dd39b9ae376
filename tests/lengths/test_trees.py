"""``auto`` with draft trees: survival, choice of nodes, and learning."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batches import filled
from paceline.config import SamplingParams
from paceline.core.batch import Batch, RowStart, SpeculationPlan
from paceline.core.draft import Draft, Verdict
from paceline.core.draft_tensors import DraftTensors
from paceline.lengths.auto import AutoLength
from paceline.lengths.auto_round import AutoRound
from paceline.lengths.cost import CostModel, CostTable
from paceline.lengths.scores import ScoreCalibration, bins_of, bins_of_draft, judge
from simulation import Reader, linear_costs, with_timing
from toy import SHAPES

pytestmark = pytest.mark.usefixtures("one_thread")
Tree = list[int]  # the draft token that each draft token follows


def path_to(tree: Sequence[int], draft_token: int) -> list[int]:
    """The draft token and its ancestors."""
    return [] if draft_token < 0 else [*path_to(tree, tree[draft_token]), draft_token]


def draft_of(
    trees: list[Tree], scores: list[list[float]] | None = None, tokens: list[list[int]] | None = None
) -> Draft:
    """A draft with one tree per row."""
    return Draft(tokens or [list(range(len(tree))) for tree in trees], confidence=scores, parents=trees)


def batch_of(rows: int) -> Batch:
    params = SamplingParams(temperature=0, max_tokens=100)
    return filled([RowStart([1] * 10, params, row) for row in range(rows)], 200, 64)


trees = (
    st.integers(1, 7)
    .flatmap(lambda size: st.tuples(*(st.integers(-1, draft_token - 1) for draft_token in range(size))))
    .map(list)
)


@given(trees, st.data())
def test_survival_is_the_product_along_the_path(tree: Tree, data: st.DataObject) -> None:
    scores = data.draw(st.lists(st.floats(0, 1), min_size=len(tree), max_size=len(tree)))
    belief, bins = ScoreCalibration(), bins_of(len(tree), scores, tree)
    survivals = belief.survivals(0, bins, tree)
    for draft_token, survival in enumerate(survivals):
        chance = 1.0
        for step in path_to(tree, draft_token):
            chance *= belief.chance(0, bins[step])
        assert survival == pytest.approx(chance)


def test_of_scores_alone_a_chain_is_the_same_as_a_tree_without_branches() -> None:
    scores, chain = [0.9, 0.2, 0.7], [-1, 0, 1]
    assert bins_of(3, scores) == bins_of(3, scores, chain)
    assert bins_of(3, scores, [-1, -1, 0]) != bins_of(3, scores)  # the second is a first draft token, too


@given(trees, st.data())
def test_draft_tokens_with_right_ancestors_are_judged_as_far_as_the_gained_tokens_reach(
    tree: Tree, data: st.DataObject
) -> None:
    tokens = data.draw(st.lists(st.integers(0, 2), min_size=len(tree), max_size=len(tree)))
    gained = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=4))
    verdict = Verdict([gained], [len(gained) - 1], [0])
    (judged,) = judge(draft_of([tree], tokens=[tokens]), verdict)

    def is_first(draft_token: int) -> bool:
        return (tree[draft_token], tokens[draft_token]) not in list(zip(tree, tokens, strict=True))[:draft_token]

    def is_right(draft_token: int) -> bool:
        path = path_to(tree, draft_token)
        return all(is_first(step) for step in path) and [tokens[step] for step in path] == gained[: len(path)]

    expected = [
        (draft_token, is_right(draft_token))
        for draft_token in range(len(tree))
        if len(path_to(tree, draft_token)) <= len(gained) and all(map(is_right, path_to(tree, draft_token)[:-1]))
    ]
    assert judged == expected


def closed(tree: Tree, chosen: Sequence[bool]) -> bool:
    return all(parent < 0 or chosen[parent] for parent, taken in zip(tree, chosen, strict=True) if taken)


def best_by_trying(lines: list[list[float]], trees: list[Tree], price: float, costs: CostTable) -> float:
    """Highest value, in tokens, of all sets of draft tokens that contain their ancestors."""
    each = [[c for c in product((False, True), repeat=len(tree)) if closed(tree, c)] for tree in trees]
    return max(
        sum(s for line, c in zip(lines, choice, strict=True) for s, taken in zip(line, c, strict=True) if taken)
        - price * costs.verify_ms(len(trees), sum(map(sum, choice)) / len(trees))
        for choice in product(*each)
    )


@pytest.mark.parametrize("token", [0.5, 3.0, 8.0])
@pytest.mark.parametrize("seed", range(5))
def test_the_chosen_nodes_have_the_highest_value_and_are_a_tree(seed: int, token: float) -> None:
    rng, costs = random.Random(seed), linear_costs(verify=30.0, token=token)
    for _ in range(4):
        trees = [SHAPES["random"](rng, rng.randint(1, 5)) for _ in range(2)]
        scores = [[rng.random() for _ in tree] for tree in trees]
        draft, policy, batch = draft_of(trees, scores), AutoLength(CostModel(costs)), batch_of(2)
        policy.ngram_drafts.judged = 1000  # lifts the cap on a first round's time
        note = policy.choose(batch).note
        assert isinstance(note, AutoRound)
        chosen = policy.select(batch, draft)
        lines = [
            policy.ngram_drafts.calibration.survivals(0, *each)
            for each in zip(bins_of_draft(draft), trees, strict=True)
        ]
        taken = [sorted(line, reverse=True)[:n] for line, n in zip(lines, chosen.drafted, strict=True)]
        value = sum(map(sum, taken)) - note.price * costs.verify_ms(2, sum(chosen.drafted) / 2)
        assert value == pytest.approx(best_by_trying(lines, trees, note.price, costs))
        chains = [list(range(-1, len(line) - 1)) for line in chosen.draft_tokens]
        for row, (draft_tokens, follows) in enumerate(zip(chosen.draft_tokens, chosen.parents or chains, strict=True)):
            assert all(parent < place for place, parent in enumerate(follows))
            ways = [
                [draft.draft_tokens[row][step] for step in path_to(trees[row], draft_token)]
                for draft_token in draft_tokens
            ]
            assert [
                [draft_tokens[step] for step in path_to(follows, place)] for place in range(len(draft_tokens))
            ] == ways


def ways_of(draft: Draft) -> list[list[list[int]]]:
    return DraftTensors.of(draft, torch.device("cpu")).paths


@given(st.lists(trees, min_size=1, max_size=3), st.randoms(use_true_random=False))
def test_a_tree_in_another_order_is_the_same_tree(trees: list[Tree], rng: random.Random) -> None:
    orders = []
    for tree in trees:
        left, order = set(range(len(tree))), list[int]()
        while left:
            order.append(rng.choice([draft_token for draft_token in sorted(left) if tree[draft_token] not in left]))
            left.remove(order[-1])
        orders.append(order)
    draft = draft_of(trees)
    new = draft.ordered(orders)
    assert list(map(sorted, ways_of(new))) == list(map(sorted, ways_of(draft)))
    assert new.draft_tokens == [
        [line[draft_token] for draft_token in order] for line, order in zip(draft.draft_tokens, orders, strict=True)
    ]


def play(policy: AutoLength, chances: Sequence[float], tree: Tree, rounds: int, costs: CostTable) -> list[int]:
    """Draft tokens verified in each round, for static trees whose node i is right with probability chances[i]."""
    rng, batch, verified = random.Random(1), batch_of(1), []
    for _ in range(rounds):
        batch.lengths[0] = 10
        plan, size = policy.choose(batch), 0
        truth, here = [], -1
        while True:  # the path that is right: of siblings one at most
            children, luck = [draft_token for draft_token, parent in enumerate(tree) if parent == here], rng.random()
            here = next((g for n, g in enumerate(children) if luck < sum(chances[c] for c in children[: n + 1])), -2)
            if here == -2:
                break
            truth.append(here)
        kept: list[int] = []
        if plan.k:
            draft = policy.select(batch, draft_of([tree]).capped([plan.k]))
            (size,), draft_tokens = draft.drafted, draft.draft_tokens[0]
            kept = truth[
                : next((n for n, draft_token in enumerate(truth) if draft_token not in draft_tokens), len(truth))
            ]
        gained = [*truth[: len(kept)], truth[len(kept)] if len(kept) < len(truth) else 63]
        verdict = Verdict([gained], [len(kept)], [size])
        policy.observe(batch, with_timing(verdict, plan, 0.0, costs.verify_ms(1, size)))
        verified.append(size)
    return verified


def test_positions_of_a_tree_are_learned_from_nodes_whose_parents_were_right() -> None:
    """The second of two roots is right more often; the children of the first are nearly always right."""
    costs = linear_costs(token=0.05)
    policy = AutoLength(CostModel(costs))
    play(policy, [0.2, 0.6, 0.95, 0.1], [-1, -1, 0, 1], 300, costs)
    found = [policy.ngram_drafts.calibration.chance(1, bin_) for bin_ in bins_of(4)]
    assert found == pytest.approx([0.2, 0.6, 0.95, 0.1], abs=0.15)


@pytest.mark.parametrize(("token", "most"), [(0.05, 4), (2.5, 2)])
def test_where_verification_is_expensive_only_the_likely_part_of_a_tree_is_verified(token: float, most: int) -> None:
    costs = linear_costs(token=token)
    policy = AutoLength(CostModel(costs))
    sizes = play(policy, [0.05, 0.85, 0.05, 0.8], [-1, -1, 0, 1], 200, costs)
    assert sum(sizes[100:]) / 100 == pytest.approx(most, abs=0.4)


def test_drafting_a_tree_goes_on_while_any_leaf_pays_for_it() -> None:
    costs = linear_costs(verify=37.0, token=3.0, draft_step=10.0)
    policy, batch = AutoLength(CostModel(costs), [Reader(1)], copies=False), batch_of(1)  # type: ignore[list-item]
    enough = policy.choose(batch).stop_drafting
    assert enough is not None
    assert not enough(batch, [[0.05, 0.99]], [[-1, -1]])
    assert enough(batch, [[0.05, 0.99]])  # a chain, which ends with a draft token that hardly survives
    assert enough(batch, [[0.05, 0.05]], [[-1, -1]])
    assert SpeculationPlan(1).stop_drafting is None
