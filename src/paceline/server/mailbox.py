"""Queue of updates from the engine, which never waits, to clients that may read slowly."""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque

from paceline.server.delta import Update
from paceline.server.errors import ApiError

News = Update | ApiError
UNREAD = 64  # updates that are queued without being merged


class Mailbox:
    """Updates of one request. When too many are queued, they are merged: a slow client gets fewer and longer updates.

    The memory for a client that does not read is bounded by the length of its answers. Not thread-safe: call it from
    the event loop only.
    """

    def __init__(self) -> None:
        self._news: deque[News] = deque()
        self._arrived = asyncio.Event()
        self._most = UNREAD

    def __len__(self) -> int:
        return len(self._news)

    def put(self, news: News) -> None:
        """Add an update. Never waits."""
        self._news.append(news)
        self._arrived.set()
        if len(self._news) > self._most:
            self._join()

    async def get(self) -> News:
        """Wait for and return the oldest update."""
        while not self._news:
            self._arrived.clear()
            await self._arrived.wait()
        return self._news.popleft()

    def _join(self) -> None:
        """Merge to one update per prompt, followed by the first error. Merge again at twice that number."""
        of_prompt: defaultdict[int, list[Update]] = defaultdict(list)
        failures = [news for news in self._news if isinstance(news, ApiError)]
        for news in self._news:
            if isinstance(news, Update):
                of_prompt[news.number].append(news)
        self._news = deque([*map(Update.joined, of_prompt.values()), *failures[:1]])
        self._most = max(UNREAD, 2 * len(self._news))
