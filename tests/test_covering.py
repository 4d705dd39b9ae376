from __future__ import annotations

import itertools
from typing import Any

from covering import pairwise

FACTORS: dict[str, list[Any]] = {
    "drafter": ["none", "ngram", "model"],
    "length": [1, 4, "auto", "random"],
    "rule": ["a", "b"],
    "rows": [1, 8],
}
ONLY: dict[tuple[str, Any], dict[str, list[Any]]] = {
    ("drafter", "none"): {"length": [1], "rule": ["a"]},
    ("rule", "b"): {"length": [1, 4], "rows": [8]},
}


def allowed(case: tuple[object, ...]) -> bool:
    named = dict(zip(FACTORS, case, strict=True))
    return all(
        named[other] in values
        for (name, value), restricted in ONLY.items()
        if named[name] == value
        for other, values in restricted.items()
    )


def pairs_in(cases: list[tuple[object, ...]]) -> set[object]:
    return {(i, case[i], j, case[j]) for case in cases for i, j in itertools.combinations(range(len(case)), 2)}


def test_every_allowed_pair_is_covered_and_no_other() -> None:
    found, whole = pairwise(FACTORS, ONLY), [case for case in itertools.product(*FACTORS.values()) if allowed(case)]
    assert all(map(allowed, found))
    assert pairs_in(found) == pairs_in(whole)
    assert len(set(found)) == len(found) < len(whole)


def test_without_restrictions_few_cases_beyond_the_largest_two_factors_are_needed() -> None:
    found = pairwise(FACTORS)
    assert pairs_in(found) == pairs_in(list(itertools.product(*FACTORS.values())))
    assert 12 <= len(found) <= 14 < 48


def test_a_pair_that_only_third_factors_forbid_is_left_out() -> None:
    """1 wants "x", 2 wants "y", so that the two cannot meet."""
    only: dict[tuple[str, Any], dict[str, list[Any]]] = {("a", 1): {"c": ["x"]}, ("b", 2): {"c": ["y"]}}
    factors: dict[str, list[Any]] = {"a": [0, 1], "b": [1, 2], "c": ["x", "y"]}
    assert sorted(pairwise(factors, only)) == [
        (0, 1, "x"),
        (0, 1, "y"),
        (0, 2, "y"),
        (1, 1, "x"),
    ]


def test_the_cases_are_the_same_every_time() -> None:
    assert pairwise(FACTORS, ONLY) == pairwise(FACTORS, ONLY)
