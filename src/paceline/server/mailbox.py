"""Queue of updates from the engine, which never waits, to clients that may read slowly."""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque

from paceline.server.delta import Update
from paceline.server.errors import ApiError

MailboxItem = Update | ApiError
MAX_UNREAD = 64  # updates that are queued without being merged


class Mailbox:
    """Updates of one request. When too many are queued, they are merged: a slow client gets fewer and longer updates.

    The memory for a client that does not read is bounded by the length of its answers. Not thread-safe: call it from
    the event loop only.
    """

    def __init__(self) -> None:
        self._items: deque[MailboxItem] = deque()
        self._arrived = asyncio.Event()
        self._max_items = MAX_UNREAD

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: MailboxItem) -> None:
        """Add an update without waiting."""
        self._items.append(item)
        self._arrived.set()
        if len(self._items) > self._max_items:
            self._join()

    async def get(self) -> MailboxItem:
        """Wait for and return the oldest update."""
        while not self._items:
            self._arrived.clear()
            await self._arrived.wait()
        return self._items.popleft()

    def _join(self) -> None:
        """Merge to one update per prompt, followed by the first error. Merge again at twice that number."""
        of_prompt: defaultdict[int, list[Update]] = defaultdict(list)
        failures = [item for item in self._items if isinstance(item, ApiError)]
        for item in self._items:
            if isinstance(item, Update):
                of_prompt[item.number].append(item)
        self._items = deque([*map(Update.joined, of_prompt.values()), *failures[:1]])
        self._max_items = max(MAX_UNREAD, 2 * len(self._items))
