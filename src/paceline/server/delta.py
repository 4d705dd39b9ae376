"""What a request gained in a round, copied for the event loop, and its way to clients that may read slowly."""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

from paceline.core.outputs import CompletionOutput, RequestOutput, TokenKind, TokenLogprob
from paceline.server.errors import ApiError

T = TypeVar("T")


@dataclass(frozen=True)
class Delta:
    """New content of answer ``index``: text, tokens and their log-probabilities.

    kinds, pieces: per token, how it was produced and the text it added. ended: the complete answer, if it is finished.
    """

    index: int
    text: str
    token_ids: Sequence[int]
    kinds: Sequence[TokenKind]
    pieces: Sequence[str]
    logprobs: Sequence[TokenLogprob]
    ended: CompletionOutput | None

    @staticmethod
    def joined(deltas: Sequence[Delta]) -> Delta:
        """Concatenate consecutive deltas of one answer."""
        return Delta(
            index=deltas[0].index,
            text="".join(delta.text for delta in deltas),
            token_ids=_chained(delta.token_ids for delta in deltas),
            kinds=_chained(delta.kinds for delta in deltas),
            pieces=_chained(delta.pieces for delta in deltas),
            logprobs=_chained(delta.logprobs for delta in deltas),
            ended=deltas[-1].ended,
        )

    @staticmethod
    def whole(answer: CompletionOutput) -> Delta:
        """Return a finished answer as a single delta."""
        return Delta(
            index=answer.index,
            text=answer.text,
            token_ids=answer.token_ids,
            kinds=answer.token_kinds,
            pieces=answer.pieces,
            logprobs=answer.logprobs or [],
            ended=answer,
        )


@dataclass(frozen=True)
class Update:
    """New content of prompt ``number``. output: the complete output, if all its answers are finished."""

    number: int
    deltas: Sequence[Delta]
    output: RequestOutput | None

    @property
    def entries(self) -> int:
        """Tokens and log-probabilities: the measure of how long serializing takes."""
        tokens = sum([len(delta.token_ids) for delta in self.deltas])
        return tokens + sum([len(entry.top) for delta in self.deltas for entry in delta.logprobs])

    @staticmethod
    def joined(updates: Sequence[Update]) -> Update:
        """Merge consecutive updates of one prompt."""
        if len(updates) == 1:
            return updates[0]
        of_answer: defaultdict[int, list[Delta]] = defaultdict(list)
        for update in updates:
            for delta in update.deltas:
                of_answer[delta.index].append(delta)
        return Update(updates[0].number, [*map(Delta.joined, of_answer.values())], updates[-1].output)


def _chained(parts: Iterable[Sequence[T]]) -> list[T]:
    return list(chain.from_iterable(parts))


class OutputCursor:
    """Position up to which each answer of a request has been delivered."""

    def __init__(self, output: RequestOutput) -> None:
        self.output, n = output, len(output.candidates)
        self.tokens, self.characters, self.ended = [0] * n, [0] * n, [False] * n

    def take_new(self) -> list[Delta]:
        """Return what was added since the last call."""
        return [
            self._take(answer)
            for answer in self.output.candidates
            if not self.ended[answer.index] and (answer.finished or len(answer.token_ids) > self.tokens[answer.index])
        ]

    def _take(self, answer: CompletionOutput) -> Delta:
        index = answer.index
        first, first_character = self.tokens[index], self.characters[index]
        self.tokens[index], self.characters[index] = len(answer.token_ids), len(answer.text)
        self.ended[index] = answer.finished
        return Delta(
            index=index,
            text=answer.text[first_character:],
            token_ids=answer.token_ids[first:],
            kinds=answer.token_kinds[first:],
            pieces=answer.pieces[first:],
            logprobs=[] if answer.logprobs is None else answer.logprobs[first:],
            ended=answer if answer.finished else None,
        )


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
