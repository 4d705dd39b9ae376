"""Length policies: one protocol, made from what ``num_speculative_tokens`` says."""

from __future__ import annotations

from collections.abc import Callable

from paceline.lengths.base import LengthPolicy, Means
from paceline.lengths.bass import BassLength
from paceline.lengths.budget import BudgetLength
from paceline.lengths.confident import ConfidentLength
from paceline.lengths.cost import CostModel
from paceline.lengths.fixed import FixedLength
from paceline.lengths.goodput import LONGEST_AUTO, GoodputLength
from paceline.lengths.hybrid import HybridLength
from paceline.lengths.profiled import ProfiledLength


def _auto(means: Means) -> LengthPolicy:
    if means.ragged and not means.decoders:  # guesses are free, and each costs its own verification
        return BudgetLength(CostModel(means.costs().without_drafting(), LONGEST_AUTO))
    policy = GoodputLength if not means.ragged else HybridLength if means.copies else ConfidentLength
    return policy(CostModel(means.costs(), LONGEST_AUTO), means.decoders)


POLICIES: dict[str, Callable[[Means], LengthPolicy]] = {
    "auto": _auto,
    "bass": lambda _: BassLength(),
    "profiled": lambda means: ProfiledLength(means.profile().best),
}


def make_policy(num_speculative_tokens: int | str, means: Means) -> LengthPolicy:
    """A number is a fixed length, a name a policy that chooses."""
    if isinstance(num_speculative_tokens, int):
        return FixedLength(num_speculative_tokens)
    return POLICIES[num_speculative_tokens](means)


__all__ = ["POLICIES", "FixedLength", "LengthPolicy", "Means", "make_policy"]
