"""A limit over all clients with a lower limit per client, so that no client can use up everything."""

from __future__ import annotations

from collections import Counter
from typing import Literal

Full = Literal["server", "client"]  # which limit is reached


class SharedLimit:
    """Counts units (requests or bytes) in total and per client. Not thread-safe: call it from the event loop only."""

    def __init__(self, total: int, per_client: int) -> None:
        self._total, self._per_client = total, per_client
        self.taken = 0
        self._by_client: Counter[str] = Counter()

    def take(self, client: str, units: int = 1) -> Full | None:
        """Take ``units``, or return which limit prevents it."""
        if self.taken + units > self._total:
            return "server"
        if self._by_client[client] + units > self._per_client:
            return "client"
        self.taken += units
        self._by_client[client] += units
        return None

    def give(self, client: str, units: int = 1) -> None:
        """Return units that were taken."""
        self.taken -= units
        self._by_client[client] -= units
        if not self._by_client[client]:
            del self._by_client[client]
