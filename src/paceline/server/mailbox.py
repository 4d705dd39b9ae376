"""News on their way from the engine, which waits for nobody, to clients that may be slow."""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque

from paceline.server.delta import Update
from paceline.server.errors import ApiError

News = Update | ApiError
UNREAD = 64  # pieces of news that are kept as they came


class Mailbox:
    """News of one request. What is not fetched in time is joined: whoever fetches late gets fewer and longer pieces.

    So a client that does not read costs little more than its answers, whose length is bounded. For the event loop only.
    """

    def __init__(self) -> None:
        self._news: deque[News] = deque()
        self._arrived = asyncio.Event()
        self._most = UNREAD

    def __len__(self) -> int:
        return len(self._news)

    def put(self, news: News) -> None:
        """Never waits."""
        self._news.append(news)
        self._arrived.set()
        if len(self._news) > self._most:
            self._join()

    async def get(self) -> News:
        """The oldest; waits for one."""
        while not self._news:
            self._arrived.clear()
            await self._arrived.wait()
        return self._news.popleft()

    def _join(self) -> None:
        """One update a prompt; errors after them, as they end everything. The next time after as many again."""
        of_prompt: defaultdict[int, list[Update]] = defaultdict(list)
        failures = [news for news in self._news if isinstance(news, ApiError)]
        for news in self._news:
            if isinstance(news, Update):
                of_prompt[news.number].append(news)
        self._news = deque([*map(Update.joined, of_prompt.values()), *failures[:1]])
        self._most = max(UNREAD, 2 * len(self._news))
