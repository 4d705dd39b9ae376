"""Programs captured before anybody asks for them, as far as time, memory and the number of graphs allow."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from paceline.core.hardware import available_memory
from paceline.kernels.gpu.graphs import MOST_GRAPHS, Graphs, Named

Progress: TypeAlias = Callable[[Sequence[Named]], Iterable[Named]]  # may show a bar

LEFT_FREE = 0.5  # of the memory that is free before: prompts want some, and what is captured later


@dataclass(frozen=True)
class Ahead:
    """What was captured ahead, in how many seconds; how many others were left out, and why, if any were."""

    captured: int
    seconds: float
    left: int = 0
    why: str | None = None

    def __str__(self) -> str:
        done = f"{self.captured} programs captured ahead as graphs in {self.seconds:.1f} s"
        if self.why is None:
            return f"{done}: all that are likely"
        return f"{done}; {self.left} likely ones are left to their first use, for {self.why}"


class Limits:
    """What ends it. From now on: seconds, and a share of the memory that is free now."""

    def __init__(self, graphs: Graphs, seconds: float) -> None:
        self._graphs, self._seconds, self._began = graphs, seconds, time.perf_counter()
        self._least = LEFT_FREE * available_memory(graphs.device)

    @property
    def spent(self) -> float:
        """Seconds."""
        return time.perf_counter() - self._began

    def reached(self) -> str | None:
        """Which, in words; None while one more may be captured."""
        if self.spent >= self._seconds:
            return f"no more than {self._seconds:g} s were given"
        if self._graphs.full:
            return f"{MOST_GRAPHS} graphs are kept at a time"
        if available_memory(self._graphs.device) < self._least:
            return f"less than {LEFT_FREE:.0%} is left of the memory that was free before"
        return None


def capture_ahead(graphs: Graphs, programs: Iterable[Named], seconds: float, progress: Progress = iter) -> Ahead:
    """Capture those that have not been, in this order, until a limit is reached; the last one may go beyond it."""
    limits, known = Limits(graphs, seconds), set(graphs.keys)
    wanted = [(key, program) for key, program in programs if key not in known]
    for captured, (key, program) in enumerate(progress(wanted)):
        if (why := limits.reached()) is not None:
            return Ahead(captured, limits.spent, len(wanted) - captured, why)
        graphs.capture(key, program)
    return Ahead(len(wanted), limits.spent)
