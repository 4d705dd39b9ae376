"""Tables of test cases that cover all pairs of values instead of all combinations."""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import pytest

Pair = tuple[int, int]  # a factor and one of its values, both by index


def pairwise(
    factors: Mapping[str, Iterable[Any]],
    only: Mapping[tuple[str, Any], Mapping[str, Collection[Any]]] | None = None,
) -> list[tuple[Any, ...]]:
    """Cases in which any two values of two factors meet at least once, if the restrictions allow them to meet.

    The cases are the same in every process: a greedy search, in which a seeded generator breaks ties.

    factors: values by name; a case has one value of each, in this order.
    only: (factor, value) -> the values of other factors that may meet this value; what it doesn't name may.
    """
    names, values = list(factors), [list(each) for each in factors.values()]
    banned = _banned(names, values, only or {})
    pairs = itertools.combinations([[(f, v) for v in range(len(each))] for f, each in enumerate(values)], 2)
    missing = {pair: None for ours, theirs in pairs for pair in itertools.product(ours, theirs) if pair not in banned}
    cases, rng = [], random.Random(0)

    def completed(case: tuple[Pair, ...], left: list[int]) -> tuple[Pair, ...] | None:
        """The case with a value of each factor left: of those that fit, one that covers the most missing pairs."""
        if not left:
            return case
        met: dict[Pair, int] = {}
        for value in range(len(values[left[0]])):
            new = [_ordered(old, (left[0], value)) for old in case]
            if banned.isdisjoint(new):
                met[left[0], value] = sum(pair in missing for pair in new)
        for best in sorted(met, key=lambda one: (-met[one], rng.random())):
            if (found := completed((*case, best), left[1:])) is not None:
                return found
        return None

    while missing:
        first = next(iter(missing))
        left = [factor for factor in range(len(values)) if factor not in (first[0][0], first[1][0])]
        case = completed(first, rng.sample(left, len(left)))
        missing.pop(first)  # also if other restrictions leave no case for it
        if case is not None:
            for pair in itertools.combinations(sorted(case), 2):
                missing.pop(pair, None)
            cases.append(tuple(values[factor][value] for factor, value in sorted(case)))
    return cases


def named(value: Any) -> str | None:
    """The part of a test's id for a value: its name if it has one, as kernels do."""
    return getattr(value, "name", None)


def in_pairs(**factors: Iterable[Any]) -> pytest.MarkDecorator:
    """Run a test with any two values of two factors."""
    return pytest.mark.parametrize(tuple(factors), pairwise(factors), ids=named)


def in_turn(many: Iterable[Any], few: Iterable[Any]) -> list[tuple[Any, Any]]:
    """Each of many values with one of few, which are taken in turn."""
    return list(zip(many, itertools.cycle(few), strict=False))


def _ordered(one: Pair, other: Pair) -> tuple[Pair, Pair]:
    return (one, other) if one < other else (other, one)


def _banned(
    names: list[str], values: list[list[Any]], only: Mapping[tuple[str, Any], Mapping[str, Collection[Any]]]
) -> set[tuple[Pair, Pair]]:
    """Pairs of values that the restrictions keep apart."""
    return {
        _ordered((names.index(name), values[names.index(name)].index(value)), (names.index(other), theirs))
        for (name, value), restricted in only.items()
        for other, allowed in restricted.items()
        for theirs, candidate in enumerate(values[names.index(other)])
        if candidate not in allowed
    }
