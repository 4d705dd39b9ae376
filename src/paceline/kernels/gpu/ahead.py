"""Capture programs as graphs before any request needs them, within limits of time, memory and number of graphs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from paceline.core.hardware import available_memory
from paceline.kernels.gpu.graphs import MOST_GRAPHS, Graphs, Named

Progress: TypeAlias = Callable[[Sequence[Named]], Iterable[Named]]  # may show a progress bar

LEFT_FREE = 0.5  # fraction of the free memory that stays free, for prompts and for graphs captured later


@dataclass(frozen=True)
class Ahead:
    """Result: programs captured and the seconds it took; the number left out and the reason, if any."""

    captured: int
    seconds: float
    left: int = 0
    why: str | None = None

    def __str__(self) -> str:
        done = f"{self.captured} programs captured ahead as graphs in {self.seconds:.1f} s"
        if self.why is None:
            return f"{done}: all likely ones"
        return f"{done}; {self.left} likely ones will be captured at first use: {self.why}"


class CaptureLimits:
    """Limits of a capture run: seconds from now, and a fraction of the memory that is free now."""

    def __init__(self, graphs: Graphs, seconds: float) -> None:
        self._graphs, self._seconds, self._began = graphs, seconds, time.perf_counter()
        self._least = LEFT_FREE * available_memory(graphs.device)

    @property
    def spent(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._began

    def reached(self) -> str | None:
        """The limit that has been reached, in words; None while one more program may be captured."""
        if self.spent >= self._seconds:
            return f"the limit of {self._seconds:g} s was reached"
        if self._graphs.full:
            return f"at most {MOST_GRAPHS} graphs are kept at a time"
        if available_memory(self._graphs.device) < self._least:
            return f"less than {LEFT_FREE:.0%} of the memory that was free before is left"
        return None


def capture_ahead(graphs: Graphs, programs: Iterable[Named], seconds: float, progress: Progress = iter) -> Ahead:
    """Capture the programs that are not captured yet, in this order, until a limit is reached.

    The limits are checked between programs: the last one may exceed them.
    """
    limits, known = CaptureLimits(graphs, seconds), set(graphs.keys)
    wanted = [(key, program) for key, program in programs if key not in known]
    for captured, (key, program) in enumerate(progress(wanted)):
        if (why := limits.reached()) is not None:
            return Ahead(captured, limits.spent, len(wanted) - captured, why)
        graphs.capture(key, program)
    return Ahead(len(wanted), limits.spent)
