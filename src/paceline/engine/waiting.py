"""Who waits for a row, and whose turn it is."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Protocol, TypeVar


class QueueItem(Protocol):
    """An answer that somebody waits for; ``request_id`` is one for all answers to a prompt."""

    request_id: str
    client: str
    priority: int


Item = TypeVar("Item", bound=QueueItem)


class Waiting(Iterable[Item]):
    """Answers in the order in which they will be begun, if nobody else comes.

    Lower values of ``priority`` go first. Clients of the same priority take turns; a client's own requests keep the
    order in which they came. A turn is one request, so the answers to a prompt stay together.
    """

    def __init__(self) -> None:
        self._queues: dict[int, dict[str, deque[Item]]] = {}  # priority -> client -> answers, the next client first

    def __len__(self) -> int:
        return sum(len(queue) for clients in self._queues.values() for queue in clients.values())

    def __bool__(self) -> bool:
        return bool(self._queues)

    def __iter__(self) -> Iterator[Item]:
        """By priority and client, not turn by turn."""
        for priority in sorted(self._queues):
            for queue in self._queues[priority].values():
                yield from queue

    def extend(self, items: Iterable[Item]) -> None:
        """These come last of their client's; a client that did not wait has its turn after those that do."""
        for item in items:
            self._queues.setdefault(item.priority, {}).setdefault(item.client, deque()).append(item)

    @property
    def first(self) -> Item:
        """Whose turn it is; somebody must wait."""
        return next(iter(self._queues[min(self._queues)].values()))[0]

    def turn(self, most: int) -> list[Item]:
        """Take the next request's answers, at most so many; what is left of them waits for its client's next turn."""
        first = self.first
        clients = self._queues[first.priority]
        queue = clients.pop(first.client)
        taken: list[Item] = []
        while queue and len(taken) < most and queue[0].request_id == first.request_id:
            taken.append(queue.popleft())
        if queue:
            clients[first.client] = queue
        if not clients:
            del self._queues[first.priority]
        return taken

    def keep(self, items: Iterable[Item]) -> None:
        """Only these, which are some of those that wait, in the order in which they wait."""
        kept = list(items)
        self.clear()
        self.extend(kept)

    def clear(self) -> None:
        self._queues.clear()
