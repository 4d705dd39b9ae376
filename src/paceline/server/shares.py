"""A limit for all, and a smaller one for each client, so that nobody has everything."""

from __future__ import annotations

from collections import Counter
from typing import Literal

Full = Literal["server", "client"]  # whose limit is reached


class Shares:
    """So many units, connections or bytes, for all clients together and for each. For the event loop only."""

    def __init__(self, total: int, each: int) -> None:
        self._total, self._each = total, each
        self.taken = 0
        self._by_client: Counter[str] = Counter()

    def take(self, client: str, units: int = 1) -> Full | None:
        """Take some, or say whose limit is in the way."""
        if self.taken + units > self._total:
            return "server"
        if self._by_client[client] + units > self._each:
            return "client"
        self.taken += units
        self._by_client[client] += units
        return None

    def give(self, client: str, units: int = 1) -> None:
        """Give back what was taken."""
        self.taken -= units
        self._by_client[client] -= units
        if not self._by_client[client]:
            del self._by_client[client]
