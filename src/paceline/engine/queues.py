"""The queues of the scheduler: sequences that wait, that gave way, in prefill, and those that decode."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import chain

from paceline.core.batch import Batch
from paceline.engine.sequences import Sequence
from paceline.engine.waiting import Waiting


class Queues:
    """Each unfinished sequence is in one of them.

    prefilling: sequences in prefill, in the order in which they began. running: the live rows of the batch, in their
        order.
    preempted: sequences that had a slot and gave way, in the order in which they get one again (``resumes``).
    """

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.waiting: Waiting[Sequence] = Waiting()
        self.preempted: list[Sequence] = []
        self.prefilling: list[Sequence] = []
        self.running: list[Sequence] = []

    @property
    def busy(self) -> bool:
        """Whether any sequence is unfinished."""
        return bool(self.waiting or self.preempted or self.prefilling or self.running)

    @property
    def num_waiting(self) -> int:
        """Sequences without a slot."""
        return len(self.waiting) + len(self.preempted)

    @property
    def unfinished(self) -> Iterator[Sequence]:
        """The sequences of all queues."""
        return chain(self.waiting, self.preempted, self.prefilling, self.running)

    @property
    def in_use(self) -> list[Sequence]:
        """The sequences that have a slot."""
        return [*self.running, *self.prefilling]

    @property
    def any_deadline(self) -> bool:
        """Whether a sequence has a time limit."""
        return any(sequence.deadline < math.inf for sequence in self.unfinished)

    @property
    def resumes(self) -> bool:
        """Whether a preempted sequence is the next to get a slot: before those that wait, but for more urgent ones."""
        if not (self.preempted and self.waiting):
            return bool(self.preempted)
        return self.preempted[0].priority <= self.waiting.first.priority

    def set_running(self, sequences: list[Sequence]) -> None:
        """Let these sequences decode, and no others."""
        self.running = sorted(sequences, key=lambda sequence: sequence.slot)
        self.batch.set_live([sequence.slot for sequence in self.running])

    def vacate(self, leaves: Callable[[Sequence], bool]) -> None:
        """Take sequences out of the queues of those with a slot."""
        self.prefilling = [sequence for sequence in self.prefilling if not leaves(sequence)]
        self.set_running([sequence for sequence in self.running if not leaves(sequence)])

    def sweep(self) -> None:
        """Take finished sequences out of the queues of those without a slot."""
        self.waiting.keep(sequence for sequence in self.waiting if not sequence.output.finished)
        self.preempted = [sequence for sequence in self.preempted if not sequence.output.finished]

    def clear(self) -> None:
        """Empty all queues."""
        self.waiting.clear()
        self.preempted.clear()
        self.prefilling.clear()
        self.set_running([])
