"""What an attention backend is.

Shapes: B rows, L new tokens a row, H heads, G key/value heads, P positions, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from torch import Tensor

from paceline.gpu.state import PackedHeads


@dataclass
class Plan:
    """One forward pass, as attention sees it: computed once, used by every layer.

    positions: [B, L] int64, the position of every query. A key is visible to a query if and only if its position is
        not greater than the query's (and, with a sliding window w, greater than the query's minus w).
    longest: positions of the cache that any query can see (a host integer): keys at ``longest`` and beyond are hidden
        from all.
    """

    positions: Tensor
    longest: int
    masks: dict[int | None, Tensor] = field(default_factory=dict)  # by sliding window
    rows: list[Plan] = field(default_factory=list)  # one plan a row, for backends that go row by row


class AttentionBackend(Protocol):
    """Attention of L new tokens a row over each row's own cached prefix."""

    name: str

    def plan(self, positions: Tensor, longest: int) -> Plan:
        """Prepare one forward pass."""
        ...

    def attend(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: Plan, *, scale: float | None, window: int | None
    ) -> Tensor:
        """q [B, H, L, D] over k_cache, v_cache [B, G, P, D] (this layer's rows, new keys written) -> [B, H, L, D].

        ``scale`` defaults to D ** -0.5; ``window`` is a sliding window in positions, or None.
        """
        ...


class Attend(Protocol):
    """What a model calls once a layer: write the new keys and values, then attend over the row's whole prefix.

    q [B, H, L, D], k and v [B, G, L, D] (rotary already applied) -> [B, H, L, D].
    """

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, window: int | None = None
    ) -> Tensor: ...


@runtime_checkable
class AttendPacked(Protocol):
    """An ``Attend`` that would rather have a layer's heads unnormed and unturned, and do it all at once."""

    def packed(self, layer: int, heads: PackedHeads, *, scale: float | None, window: int | None) -> Tensor:
        """-> [B, H, L, D]."""
        ...
