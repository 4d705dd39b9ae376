"""Rank 0 of a divided model: it makes the other ranks repeat everything that its part and its caches do."""

from __future__ import annotations

import signal
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from paceline.core.cache import KVCache, KVHeads
from paceline.core.paged_tables import PagedTables
from paceline.errors import RankError
from paceline.models.parallel.group import Ranks
from paceline.models.parallel.plan import Op, Step, as_numbers

CacheShape: TypeAlias = tuple[Sequence[KVHeads], int, int, torch.dtype, torch.device]
"""``KVCache``'s arguments."""

LAST_WORDS = 2.0  # seconds to wait for the exit of a process that broke a connection


class RankProcesses(Protocol):
    """The other ranks' processes."""

    def find_ended(self, patience: float = 0.0) -> str | None:
        """A message about the rank that has ended; None if all run. patience: seconds to wait for an exit."""
        ...

    def end(self, ranks: Ranks | None, *, orderly: bool) -> None:
        """End all of them."""
        ...


class Leading:
    """Rank 0's lead, of a class that also has a part of the model. paged: whether its caches are in pages.

    Changes of caches are sent with the next forward pass. After an error in a pass the ranks are out of step, and every
    further call raises RankError.
    """

    ranks: Ranks
    name: str
    paged: bool

    def cache_shape(self, rows: int, positions: int) -> CacheShape:
        """``KVCache``'s arguments, for the heads of this part."""
        raise NotImplementedError

    def lead(self, processes: RankProcesses) -> None:
        """Begin to lead the ranks, which wait for instructions."""
        self._processes, self._turn, self._numbers = processes, threading.Lock(), count()
        self._pending: deque[Step] = deque()
        self._failure: str | None = None
        self._listeners: list[Callable[[], None]] = []

    def when_a_rank_ends(self, call: Callable[[], None]) -> None:
        self._listeners.append(call)

    def on_rank_ended(self) -> None:
        """Notify the listeners; called in the watching thread."""
        for call in self._listeners:
            call()

    def check(self) -> None:
        with self._turn:
            if ended := self._failure or self._processes.find_ended():
                raise RankError(ended)

    def new_cache(self, rows: int, positions: int) -> KVCache:
        """Create a cache on every rank."""
        cache = MirroredCache(next(self._numbers), self._pending, self.cache_shape(rows, positions), paged=self.paged)
        self._pending.append(Step(Op.NEW_CACHE, (cache.number, rows, positions)))
        weakref.finalize(cache, self._pending.append, Step(Op.DROP_CACHE, (cache.number,)))
        return cache

    @contextmanager
    def capturing(self) -> Iterator[int]:
        """Let the other ranks capture what is run inside -> the graph's number."""
        number = next(self._numbers)
        with self.on_all_ranks(Step(Op.CAPTURE, (number,))):
            pass
        yield number
        with self.on_all_ranks(Step(Op.CAPTURED)):
            pass

    @contextmanager
    def replaying(self, number: int) -> Iterator[None]:
        """Let the other ranks replay that graph while this rank does, inside the context."""
        with self.on_all_ranks(Step(Op.REPLAY, (number,))):
            yield

    def forget(self, number: int) -> None:
        """Let the other ranks drop that graph before the next operation."""
        self._pending.append(Step(Op.DROP_GRAPH, (number,)))

    @contextmanager
    def on_all_ranks(self, step: Step) -> Iterator[None]:
        """Run a step on all ranks, after the pending ones."""
        with self._turn, uninterrupted():
            if self._failure is not None:
                raise RankError(self._failure)
            try:
                self._send_steps(step)
                yield
            except BaseException as error:
                self._failure = self._failure_message(error)
                self._processes.end(self.ranks, orderly=False)
                raise RankError(self._failure) from error

    def _send_steps(self, step: Step) -> None:
        if ended := self._processes.find_ended():
            raise RankError(ended)
        steps = [self._pending.popleft() for _ in range(len(self._pending))] + [step]
        self.ranks.broadcast_numbers(as_numbers(steps))
        for each in steps:
            if each.tensor is not None:
                self.ranks.send(each.tensor)

    def _failure_message(self, error: BaseException) -> str:
        ended = self._processes.find_ended(LAST_WORDS) or f"a forward pass failed ({type(error).__name__}: {error})"
        return f"{ended}; the ranks that share {self.name} cannot go on, and the engine has ended: make a new LLM"

    def close(self) -> None:
        """End the other ranks. The model cannot be used afterwards; closing it again does nothing."""
        with self._turn:
            if self._failure is None:
                self._failure = f"the model {self.name} was closed, and its ranks have ended"
                self._processes.end(self.ranks, orderly=True)


class MirroredCache(KVCache):
    """Rank 0's cache; its changes are repeated, in order, on the other ranks' caches with the same number."""

    def __init__(self, number: int, pending: deque[Step], shape: CacheShape, *, paged: bool) -> None:
        super().__init__(*shape, paged=paged)
        self.number, self._pending = number, pending

    def keep(self, rows: Tensor, text: Tensor, paths: Tensor) -> None:
        super().keep(rows, text, paths)
        self._pending.append(Step(Op.KEEP, (self.number,), torch.cat([rows[:, None], text[:, None], paths], 1)))

    def copy_row(self, source: int, destination: int, length: int) -> None:
        super().copy_row(source, destination, length)
        self._pending.append(Step(Op.COPY_ROW, (self.number, source, destination, length)))

    def erase_row(self, row: int) -> None:
        super().erase_row(row)
        self._pending.append(Step(Op.ERASE_ROW, (self.number, row)))

    def cut(self, row: int, length: int) -> None:
        super().cut(row, length)
        if isinstance(self.storage, PagedTables):
            self._pending.append(Step(Op.CUT_ROW, (self.number, row, length)))


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Defer Ctrl-C to the end of the context: ranks that stop in the middle of a pass would be out of step."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is None:
        yield
        return
    came = False

    def note(*_: object) -> None:
        nonlocal came
        came = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            signal.raise_signal(signal.SIGINT)
