"""How much memory the rows' caches may take, all together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class KVCacheBudget:
    """For the caches of ``rows`` rows of at most ``positions`` tokens.

    limit: bytes. bytes_for: what a row of so many tokens takes, in all caches together.
    """

    limit: int
    rows: int
    positions: int
    bytes_for: Callable[[int], int]

    @property
    def is_short(self) -> bool:
        """Whether not all rows can be as long as they may be at once."""
        return self.limit < self.rows * self.bytes_for(self.positions)

    def max_rows(self, positions: int, beside: int = 0) -> int:
        """How many rows of so many tokens there is memory for, beside so many bytes that are taken."""
        return max(0, self.limit - beside) // max(1, self.bytes_for(positions))

    def max_positions(self, rows: int, positions: int, beside: int = 0) -> int:
        """How many tokens, at most ``positions``, so many rows may have each, beside so many bytes that are taken."""
        few, many = 0, positions
        while few < many:
            middle = (few + many + 1) // 2
            few, many = (middle, many) if self.max_rows(middle, beside) >= rows else (few, middle - 1)
        return few


@dataclass(frozen=True)
class CacheUsage:
    """Bytes of caches, as far as they are filled.

    rows: of rows in use. prefixes: of free rows, kept for prompts that begin alike. scored: of texts whose
    log-probabilities were asked for. limit: what rows in use and prefixes may take together.
    """

    row_bytes: int
    prefix_bytes: int
    scoring_bytes: int
    limit_bytes: int

    @property
    def fraction(self) -> float:
        """Of the limit what rows in use fill: 0 to 1."""
        return self.row_bytes / max(1, self.limit_bytes)


UNLIMITED = KVCacheBudget(1 << 62, 0, 0, lambda _positions: 0)
