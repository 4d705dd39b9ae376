"""Tensor programs as CUDA graphs, whose results reach the host later, through pinned memory.

``engine/rounds/device_round.py`` launches rounds with these general parts:

    device_round = DeviceRound(program)          # a RoundProgram
    program.set_limits(caps, None)               # the rows' limits of draft tokens; one small upload
    ticket = device_round.run(rows, k, longest)  # captured at first use, then one graph launch; returns at once
    record = ticket.read()                       # waits for that round only, while later ones may run

Programs are run for their side effects on tensors that never move (text, lengths, caches) and return one tensor.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

Program = Callable[[], Tensor]
Named: TypeAlias = tuple[Hashable, Program]  # a program and its key


class OtherRanks(Protocol):
    """The other tensor-parallel ranks, which capture and replay their parts of a program when this rank does."""

    def capturing(self) -> AbstractContextManager[int]:
        """Let the ranks capture what is run inside -> the capture's number."""
        ...

    def replaying(self, number: int, /) -> AbstractContextManager[None]:
        """Let the ranks replay a capture while this rank does, inside the context."""
        ...

    def forget(self, number: int, /) -> None:
        """Tell the ranks that a capture will not be replayed any more."""
        ...


class NoOtherRanks:
    """The ``OtherRanks`` of a process without other ranks."""

    def capturing(self) -> AbstractContextManager[int]:
        return nullcontext(0)

    def replaying(self, number: int, /) -> AbstractContextManager[None]:
        return nullcontext()

    def forget(self, number: int, /) -> None:
        pass


MOST_GRAPHS = 384  # more than `auto` needs: 18 buckets of rows x 9 lengths x two kinds of requests


def recorded(graph: torch.cuda.CUDAGraph, pool: object) -> torch.cuda.graph:
    """A context that captures what this thread launches; other threads, such as NCCL's, may use CUDA meanwhile."""
    return torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local")  # type: ignore[arg-type]


def wait_for(device: torch.device) -> None:
    """Wait until all that was launched has run."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Graphs:
    """Runs programs: on CUDA as graphs, captured at the first use of their key or ahead of it; elsewhere eagerly.

    Only the most recently used graphs are kept: padded attention and many kinds of requests make any number of keys.

    idle: a context in which running a program has no lasting effect, for the warm-up runs before a capture.
    capture: False runs programs eagerly on CUDA, too.
    other_ranks: the other tensor-parallel ranks, if they have parts in the programs.
    """

    def __init__(
        self,
        device: torch.device,
        idle: Callable[[], AbstractContextManager[None]] = nullcontext,
        *,
        capture: bool = True,
        other_ranks: OtherRanks | None = None,
    ) -> None:
        self.device, self.captures = device, capture and device.type == "cuda"
        self._idle, self._other_ranks = idle, other_ranks or NoOtherRanks()
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, Tensor, int]] = {}
        self._pool: object = None
        self.capture_ms = math.inf  # of the fastest capture so far: the first ones also compile kernels

    def __contains__(self, key: Hashable) -> bool:
        return key in self._graphs

    @property
    def keys(self) -> list[Hashable]:
        """Keys of the captured programs, least recently used first."""
        return list(self._graphs)

    @property
    def full(self) -> bool:
        """Whether capturing one more program drops another one."""
        return len(self._graphs) >= MOST_GRAPHS

    def run(self, key: Hashable, program: Program) -> Tensor:
        """Run the program, or replay it; the result is valid until the next run of any key."""
        if not self.captures:
            return program()
        if key not in self._graphs and self.full:
            self._drop_oldest()
        found = self._graphs.pop(key, None) or self._capture(program)
        self._graphs[key] = graph, result, number = found  # the most recently used one is last
        with self._other_ranks.replaying(number):
            graph.replay()
        return result

    def _drop_oldest(self) -> None:
        """Free the least recently used graph, after waiting for the device: it may still run."""
        wait_for(self.device)
        self._other_ranks.forget(self._graphs.pop(next(iter(self._graphs)))[-1])

    def capture(self, key: Hashable, program: Program) -> None:
        """Capture a program that has not been, without running it. It becomes the first one to be dropped."""
        assert not self.full, "capturing ahead must not drop a captured program"
        self._graphs = {key: self._capture(program)} | self._graphs

    def _capture(self, program: Program) -> tuple[torch.cuda.CUDAGraph, Tensor, int]:
        """Capture a program. All graphs share one memory pool: they never run at the same time."""
        began = time.perf_counter()
        with self._idle():
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                program()  # compiles and picks kernels
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with self._other_ranks.capturing() as number, recorded(graph, self._pool):
                result = program()
        self._pool = self._pool or graph.pool()
        self.capture_ms = min(self.capture_ms, 1000 * (time.perf_counter() - began))
        return graph, result, number


@dataclass
class Ticket:
    """A round's record [B, k + 4] on its way to the host."""

    _host: Tensor
    _arrived: torch.cuda.Event | None

    def read(self) -> list[list[int]]:
        """Wait for the record, not for later launches. It is valid until ``Ring.slots`` more records are pushed."""
        if self._arrived is not None:
            self._arrived.synchronize()
        lines: list[list[int]] = self._host.tolist()
        return lines


class Ring:
    """Pinned host memory for the records of the last rounds; pinned, so that copies do not make the host wait.

    numbers: largest number of int64 values in a record.
    """

    slots = 4

    def __init__(self, device: torch.device, numbers: int) -> None:
        self._cuda = device.type == "cuda"
        self._memory = torch.empty((self.slots, numbers), dtype=torch.int64, pin_memory=self._cuda)
        self._next = 0

    def push(self, record: Tensor) -> Ticket:
        """Start copying a record; overwrites the one pushed ``slots`` records before."""
        host = self._memory[self._next][: record.numel()].view(record.shape)
        self._next = (self._next + 1) % self.slots
        host.copy_(record, non_blocking=True)
        return Ticket(host, _event() if self._cuda else None)


class Upload:
    """A vector of int64 numbers that the host sets and the device reads. Setting it does not wait.

    device: [n] int64, which graphs may have captured: it never moves.
    """

    slots = 4

    def __init__(self, device: torch.device, numbers: list[int]) -> None:
        self._cuda = device.type == "cuda"
        self.device = torch.tensor(numbers, dtype=torch.int64, device=device)
        self._memory = torch.empty((self.slots, len(numbers)), dtype=torch.int64, pin_memory=self._cuda)
        self._gone: list[torch.cuda.Event | None] = [None] * self.slots
        self._next, self._known = 0, list(numbers)

    def set(self, numbers: list[int]) -> None:
        """Send the numbers to the device, unless it already has them."""
        if numbers == self._known:
            return
        place, gone = self._next, self._gone[self._next]
        if gone is not None:  # its slot was used four uploads before: long arrived
            gone.synchronize()
        self._memory[place] = torch.tensor(numbers)
        self.device.copy_(self._memory[place], non_blocking=True)
        self._gone[place] = _event() if self._cuda else None
        self._next, self._known = (place + 1) % self.slots, list(numbers)


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event
