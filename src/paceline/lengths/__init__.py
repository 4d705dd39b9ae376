"""Length policies: how many tokens to draft. ``config.registry.LENGTHS`` lists them."""

from __future__ import annotations

import copy
from typing import cast

from paceline.config.registry import LENGTHS, LengthKind
from paceline.lengths.base import FixedLength, LengthPolicy, PolicyInputs


def make_policy(num_speculative_tokens: int | str | LengthKind, means: PolicyInputs) -> LengthPolicy:
    """A number is a fixed length, a name a policy that chooses. Of a policy each engine plays a copy of its own."""
    if isinstance(num_speculative_tokens, int):
        return FixedLength(num_speculative_tokens)
    kind = LENGTHS.get(num_speculative_tokens)
    return copy.deepcopy(kind) if isinstance(kind, LengthPolicy) else cast(LengthPolicy, kind.build(means))


__all__ = ["LENGTHS", "FixedLength", "LengthPolicy", "PolicyInputs", "make_policy"]
