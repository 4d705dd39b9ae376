"""The queue of requests without a row: by priority, and fair between clients."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Protocol, TypeVar


class QueueItem(Protocol):
    """An item of the queue; all samples of a request share its ``request_id``."""

    request_id: str
    client: str
    priority: int


Item = TypeVar("Item", bound=QueueItem)


class Waiting(Iterable[Item]):
    """Samples in the order in which they will get a row, if no others come.

    Lower values of ``priority`` go first. Clients of the same priority take turns; a client's requests keep their
    order. A turn is one request, so all samples of a request stay together.
    """

    def __init__(self) -> None:
        self._queues: dict[int, dict[str, deque[Item]]] = {}  # priority -> client -> samples; the next client first

    def __len__(self) -> int:
        return sum(len(queue) for clients in self._queues.values() for queue in clients.values())

    def __bool__(self) -> bool:
        return bool(self._queues)

    def __iter__(self) -> Iterator[Item]:
        """Yield the items by priority and client, not turn by turn."""
        for priority in sorted(self._queues):
            for queue in self._queues[priority].values():
                yield from queue

    def extend(self, items: Iterable[Item]) -> None:
        """Add items behind their client's others; a client new to the queue gets its turn after all others."""
        for item in items:
            self._queues.setdefault(item.priority, {}).setdefault(item.client, deque()).append(item)

    @property
    def first(self) -> Item:
        """The item whose turn is next; the queue must not be empty."""
        return next(iter(self._queues[min(self._queues)].values()))[0]

    def turn(self, limit: int) -> list[Item]:
        """Take up to ``limit`` samples of the next request. Samples that are left wait for their client's next turn."""
        first = self.first
        clients = self._queues[first.priority]
        queue = clients.pop(first.client)
        taken: list[Item] = []
        while queue and len(taken) < limit and queue[0].request_id == first.request_id:
            taken.append(queue.popleft())
        if queue:
            clients[first.client] = queue
        if not clients:
            del self._queues[first.priority]
        return taken

    def keep(self, items: Iterable[Item]) -> None:
        """Remove all but these items, which must be in the queue and in its order."""
        kept = list(items)
        self.clear()
        self.extend(kept)

    def clear(self) -> None:
        self._queues.clear()
