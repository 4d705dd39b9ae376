"""Length policies: one protocol, made from what ``num_speculative_tokens`` says."""

from __future__ import annotations

from collections.abc import Callable

from paceline.lengths.auto import AutoLength
from paceline.lengths.base import LengthPolicy, Means
from paceline.lengths.bass import BassLength
from paceline.lengths.cost import CostModel
from paceline.lengths.fixed import FixedLength
from paceline.lengths.profiled import ProfiledLength

POLICIES: dict[str, Callable[[Means], LengthPolicy]] = {
    "auto": lambda means: AutoLength(CostModel(means.costs(), whole=not means.ragged), means.decoders, means.copies),
    "bass": lambda _: BassLength(),
    "profiled": lambda means: ProfiledLength(means.profile().best),
}


def make_policy(num_speculative_tokens: int | str, means: Means) -> LengthPolicy:
    """A number is a fixed length, a name a policy that chooses."""
    if isinstance(num_speculative_tokens, int):
        return FixedLength(num_speculative_tokens)
    return POLICIES[num_speculative_tokens](means)


__all__ = ["POLICIES", "FixedLength", "LengthPolicy", "Means", "make_policy"]
