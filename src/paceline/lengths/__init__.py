"""Length policies, which decide how many tokens to draft. ``config.registry.LENGTHS`` lists them."""

from __future__ import annotations

import copy
from typing import cast

from paceline.config.registry import LENGTHS, LengthKind
from paceline.lengths.base import FixedLength, LengthPolicy, PolicyInputs


def make_policy(num_speculative_tokens: int | str | LengthKind, inputs: PolicyInputs) -> LengthPolicy:
    """A policy for one engine: a fixed length for a number, otherwise the named or given policy.

    A policy object is copied, so that engines do not share its state.
    """
    if isinstance(num_speculative_tokens, int):
        return FixedLength(num_speculative_tokens)
    kind = LENGTHS.get(num_speculative_tokens)
    return copy.deepcopy(kind) if isinstance(kind, LengthPolicy) else cast(LengthPolicy, kind.build(inputs))


__all__ = ["LENGTHS", "FixedLength", "LengthPolicy", "PolicyInputs", "make_policy"]
