"""Runs line tasks concurrently, in a bounded window, and writes their results."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Protocol

LINES_PER_ROW = 4  # in flight: enough to keep every row busy, few enough for memory
# Characters that JSON allows in strings unescaped but str.splitlines treats as line breaks.
_LINE_ENDS = {letter.encode(): b"\\u%04x" % ord(letter) for letter in "\x85\u2028\u2029"}


@dataclass(frozen=True)
class LineResult:
    """Output of a line. content: the output line without its line break. failed: whether it is an error."""

    content: bytes
    failed: bool


class LineTask(Protocol):
    """The work of one input line."""

    async def run(self) -> LineResult:
        """Return the output line. Raises only errors that end the whole batch."""
        ...


class LineWriter:
    """Appends lines to a file. Lines that arrive during a write are combined into the next one."""

    def __init__(self, append: Callable[[bytes], None]) -> None:
        self._append = append
        self._pending: list[bytes] = []
        self._turn = asyncio.Lock()

    def put(self, content: bytes) -> None:
        """Queue a line, a JSON document. ``flush`` writes it."""
        for spelled, escaped in _LINE_ENDS.items():
            content = content.replace(spelled, escaped)
        self._pending.append(content + b"\n")

    async def flush(self) -> None:
        """Return once all queued lines are on disk."""
        async with self._turn:
            if self._pending:
                lines, self._pending = b"".join(self._pending), []
                await _finish_despite_cancel(asyncio.to_thread(self._append, lines))


async def _finish_despite_cancel(work: Coroutine[object, object, None]) -> None:
    """Await ``work`` even if this task is cancelled, so that the file is not closed during a write."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise


async def run_all(
    tasks: AsyncIterator[LineTask],
    writer: LineWriter,
    *,
    window: int,
    in_order: bool = False,
    on_result: Callable[[LineResult], None] = lambda _: None,
) -> None:
    """Run all tasks, at most ``window`` at a time. A task counts until its result is on disk.

    in_order: write results in the order of the tasks instead of the order of completion. on_result: called with each
    result once it is written. Raises the first exception of a task; tasks in flight are then cancelled.
    """
    slots = asyncio.Semaphore(window)
    previous_written = asyncio.Event()
    previous_written.set()
    try:
        async with asyncio.TaskGroup() as group:
            async for task in tasks:
                await slots.acquire()
                written = asyncio.Event()
                group.create_task(
                    _run_task(task, writer, previous_written if in_order else None, written, slots, on_result)
                )
                previous_written = written
    except BaseExceptionGroup as several:
        raise several.exceptions[0] from None


async def _run_task(
    task: LineTask,
    writer: LineWriter,
    previous_written: asyncio.Event | None,
    written: asyncio.Event,
    slots: asyncio.Semaphore,
    on_result: Callable[[LineResult], None],
) -> None:
    result = await task.run()
    if previous_written is not None:
        await previous_written.wait()
    writer.put(result.content)
    written.set()
    await writer.flush()
    on_result(result)
    slots.release()
