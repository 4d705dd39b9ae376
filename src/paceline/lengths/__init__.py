"""Length policies: one protocol, made from what ``num_speculative_tokens`` says."""

from __future__ import annotations

from collections.abc import Callable

from paceline.lengths.base import LengthPolicy
from paceline.lengths.bass import BassLength
from paceline.lengths.fixed import FixedLength

POLICIES: dict[str, Callable[[], LengthPolicy]] = {"bass": BassLength}


def make_policy(num_speculative_tokens: int | str) -> LengthPolicy:
    """A number is a fixed length, a name a policy that chooses."""
    if isinstance(num_speculative_tokens, int):
        return FixedLength(num_speculative_tokens)
    return POLICIES[num_speculative_tokens]()


__all__ = ["POLICIES", "LengthPolicy", "make_policy"]
