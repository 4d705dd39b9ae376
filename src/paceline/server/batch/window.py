"""Chores in flight, never more than so many, and their outcomes on disk."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Protocol

LINES_PER_ROW = 4  # in flight: so many that no row waits for one to be read, few enough to fit into memory
# What JSON lets stand as it is, within strings, and str.splitlines takes for the end of a line.
_LINE_ENDS = {letter.encode(): b"\\u%04x" % ord(letter) for letter in "\x85\u2028\u2029"}


@dataclass(frozen=True)
class Outcome:
    """What a line came to. content: a line of output without its end. failed: whether that is an error."""

    content: bytes
    failed: bool


class Chore(Protocol):
    """A line to be answered."""

    async def play(self) -> Outcome:
        """What it comes to. Raises what ends the whole batch, and nothing else."""
        ...


class Scribe:
    """Puts lines into a file, all that came while the disk was busy in one go."""

    def __init__(self, append: Callable[[bytes], None]) -> None:
        self._append = append
        self._pending: list[bytes] = []
        self._turn = asyncio.Lock()

    def put(self, content: bytes) -> None:
        """The next line, a JSON document; on disk after ``settle``."""
        for spelled, escaped in _LINE_ENDS.items():
            content = content.replace(spelled, escaped)
        self._pending.append(content + b"\n")

    async def settle(self) -> None:
        """All lines that were put are on disk."""
        async with self._turn:
            if self._pending:
                lines, self._pending = b"".join(self._pending), []
                await _to_its_end(asyncio.to_thread(self._append, lines))


async def _to_its_end(work: Coroutine[object, object, None]) -> None:
    """Nobody closes a file that a thread still writes, also if nobody waits any more."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise


async def play_all(
    chores: AsyncIterator[Chore],
    scribe: Scribe,
    *,
    window: int,
    in_order: bool = False,
    tell: Callable[[Outcome], None] = lambda _: None,
) -> None:
    """Play all chores, at most ``window`` at a time: one counts until its outcome is on disk.

    in_order: outcomes are written in the order of the chores, else in that of their ends. tell: called with each once
    it is written. Raises the first exception of any chore; those that were in flight are then given up.
    """
    room = asyncio.Semaphore(window)
    before = asyncio.Event()
    before.set()
    try:
        async with asyncio.TaskGroup() as group:
            async for chore in chores:
                await room.acquire()
                written = asyncio.Event()
                group.create_task(_play(chore, scribe, before if in_order else None, written, room, tell))
                before = written
    except BaseExceptionGroup as several:
        raise several.exceptions[0] from None


async def _play(
    chore: Chore,
    scribe: Scribe,
    before: asyncio.Event | None,
    written: asyncio.Event,
    room: asyncio.Semaphore,
    tell: Callable[[Outcome], None],
) -> None:
    outcome = await chore.play()
    if before is not None:
        await before.wait()
    scribe.put(outcome.content)
    written.set()
    await scribe.settle()
    tell(outcome)
    room.release()
