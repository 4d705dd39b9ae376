"""Memory budget of the rows' caches, and how much of it is in use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class KVCacheBudget:
    """Memory limit for the caches of ``slots`` slots of at most ``positions`` tokens, of which ``rows`` decode at most.

    The other slots keep prefixes. limit: bytes. bytes_for: maps a slot's length in tokens to its bytes in all caches
    together. state_bytes: recurrent states of each slot that keeps a prefix; those of rows have memory of their own.
    """

    limit: int
    rows: int
    slots: int
    positions: int
    bytes_for: Callable[[int], int]
    state_bytes: int = 0

    @property
    def is_short(self) -> bool:
        """Whether the limit is too small for all slots to have their maximum length at once."""
        return self.limit < self.slots * self.prefix_bytes(self.positions)

    @property
    def row_limit(self) -> int:
        """The most bytes that rows take: those of all at their maximum length, or the limit."""
        return min(self.limit, self.rows * self.bytes_for(self.positions))

    def prefix_bytes(self, tokens: int) -> int:
        """Bytes of a free slot that keeps a prefix of ``tokens`` tokens."""
        return self.bytes_for(tokens) + self.state_bytes if tokens else 0

    def max_rows(self, positions: int, beside: int = 0) -> int:
        """Number of rows of ``positions`` tokens that fit, with ``beside`` bytes already taken."""
        return max(0, self.limit - beside) // max(1, self.bytes_for(positions))

    def max_positions(self, rows: int, positions: int, beside: int = 0) -> int:
        """Longest length in tokens, at most ``positions``, at which ``rows`` rows fit beside ``beside`` bytes."""
        low, high = 0, positions
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.max_rows(middle, beside) >= rows else (low, middle - 1)
        return low


@dataclass(frozen=True)
class CacheUsage:
    """Bytes of the caches that hold tokens.

    row_bytes: rows in use. prefix_bytes: cached prefixes in free slots, kept for prompts that begin alike.
    limit_bytes: limit for both.
    """

    row_bytes: int
    prefix_bytes: int
    limit_bytes: int

    @property
    def fraction(self) -> float:
        """Part of the limit that rows in use fill, from 0 to 1."""
        return self.row_bytes / max(1, self.limit_bytes)


UNLIMITED = KVCacheBudget(1 << 62, 0, 0, 0, lambda _positions: 0)
