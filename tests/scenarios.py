"""Scenarios that rate ``auto`` on simulated time: rows, acceptance probabilities and costs are given."""

from __future__ import annotations

import random
from statistics import mean
from typing import Any

from paceline.lengths.auto import AutoLength
from paceline.lengths.cost import CostModel, CostTable
from simulation import DraftSimulation, linear_costs

LOOKAHEAD = 16
ROUNDS_OF_A_SMALL_MODEL = CostTable(
    (1, 2, 4, 8, 16), (0, 1, 3, 7), 100,
    ((7.8, 7.9, 8.2, 9.5), (7.9, 8.2, 9.5, 15.2), (8.2, 9.5, 15.2, 25), (9.5, 15.2, 25, 45), (15.2, 25, 45, 85)),
    (0,) * 5, (0,) * 5,
)  # fmt: skip
WRONG_TABLE = linear_costs(verify=3.0, token=1.5)
PAIR = linear_costs(verify=37.0, token=3.0, draft_step=10.0, feed_tokens=(1, 101), feed=(1.0, 101.0))
WEAK, STRONG = 1 / 9, 25 / 33  # scores of an n-gram draft after few and after many matching tokens


# Functions below return a row's next draft tokens as (score, whether it is correct).
def coins(chance, seed, score=0.8):
    rng = random.Random(seed)
    return lambda row: [(score, rng.random() < chance[row]) for _ in range(8)]


def stray(rng, place):
    return [(WEAK, rng.random() < 0.1) for _ in range(LOOKAHEAD)]


def by_turns(rng, place):
    """Alternate between fifty tokens with a match and fifty without."""
    left = 50 - place % 50
    if place // 50 % 2:
        return stray(rng, place)
    inside = [(STRONG if place % 50 > 4 or j else WEAK, rng.random() < 0.97) for j in range(left)]
    return [*inside, *[(STRONG, False)] * LOOKAHEAD][:LOOKAHEAD]


def telling(rng, place):
    """Scores that equal the probability of being correct."""
    chances = [0.97 if rng.random() < 0.75 else 0.3 for _ in range(LOOKAHEAD)]
    return [(chance, rng.random() < chance) for chance in chances]


def steady(chance, score):
    return lambda rng, place: [(score, rng.random() < chance) for _ in range(LOOKAHEAD)]


def phases(rng, place):
    return [(0.8, rng.random() < (0.9, 0.1, 0.9)[min(place // 100, 2)]) for _ in range(LOOKAHEAD)]


def copy_scenarios():
    """Yield name and (draft tokens, rows, whether the batch drains, tokens per row, assumed costs)."""
    for rows in (1, 2, 4, 8, 16):
        mixed = {row: (0.95, 0.6, 0.2, 0.85)[row % 4] for row in range(rows)}
        for name, chance in (
            ("mixed", mixed),
            *((n, dict.fromkeys(range(rows), c)) for n, c in (("good", 0.9), ("poor", 0.25), ("wrong", 0.0))),
        ):
            for drains in (False, True):
                yield (
                    f"{name}-{rows}-{'drain' if drains else 'open'}",
                    (chance, rows, drains, 64, ROUNDS_OF_A_SMALL_MODEL),
                )
        yield f"turns-{rows}", (by_turns, rows, False, 300, ROUNDS_OF_A_SMALL_MODEL)
        yield f"phases-{rows}", (phases, rows, False, 300, ROUNDS_OF_A_SMALL_MODEL)
        yield f"badcost-{rows}", (phases, rows, False, 300, WRONG_TABLE)


def model_scenarios():
    """Yield name and (draft tokens of the model, n-gram drafts or None, rows)."""
    kinds = {
        "telling": telling,
        "s.9": steady(0.9, 0.9),
        "s.8/.5": steady(0.8, 0.5),
        "s.6/.95": steady(0.6, 0.95),
        "s.3": steady(0.3, 0.6),
        "wrong": steady(0.0, 0.99),
        "phases": phases,
    }
    for rows in (1, 2, 4):
        for name, draft_tokens in kinds.items():
            yield f"{name}-{rows}", (draft_tokens, None, rows)


def hybrid_scenarios():
    for rows in (1, 2, 4):
        for name, draft_tokens in (("telling", telling), ("wrong", steady(0.0, 0.99)), ("s.6", steady(0.6, 0.6))):
            for copied, copies in (
                ("turns", by_turns),
                ("stray", stray),
                ("copy", steady(1.0, STRONG)),
                ("surewrong", steady(0.0, STRONG)),
            ):
                yield f"{name}+{copied}-{rows}", (draft_tokens, copies, rows)


def run_copies(spec, seed):
    draft_tokens, rows, drains, tokens, assumed = spec
    if isinstance(draft_tokens, dict):
        draw = coins(draft_tokens, seed)
    else:
        rng = random.Random(seed)
        draw = lambda row: draft_tokens(rng, simulation.place(row))  # noqa: E731
    simulation = DraftSimulation(ROUNDS_OF_A_SMALL_MODEL, draw, rows, tokens=tokens, noise=0.1, seed=seed, look=0.25)
    total = simulation.play(AutoLength(CostModel(assumed)), drains)
    return total if drains or not isinstance(draft_tokens, dict) else mean(simulation.ends.values())


def run_model(spec, seed):
    draft_tokens, copies, rows = spec
    own, other = random.Random(seed), random.Random(-1 - seed)
    simulation = DraftSimulation(
        PAIR, lambda row: draft_tokens(own, simulation.place(row)), rows, 300, noise=0.05, seed=seed
    )
    if copies is not None:
        simulation.copies = lambda row: copies(other, simulation.place(row))
    policy = AutoLength(CostModel(PAIR), [simulation.reader], copies is not None)
    return simulation.play(policy)


RUNNERS: dict[str, Any] = {
    "ngram": (copy_scenarios, run_copies),
    "model": (model_scenarios, run_model),
    "hybrid": (hybrid_scenarios, run_model),
}
