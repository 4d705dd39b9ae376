"""Where rounds run: a protocol with three implementations, which give the same results.

``round.py`` runs them step by step, ``kernels.py`` in one call of the CPU kernels, ``graph.py`` as a captured program.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from paceline.core.batch import Batch, SpeculationPlan
from paceline.core.draft import Verdict


class Obstacle(NamedTuple):
    """Why a place cannot run a round, and what the user may do about it: an imperative, or that nothing helps."""

    reason: str
    remedy: str


class RoundTicket(Protocol):
    """A launched round."""

    @property
    def drafted_at(self) -> float | None:
        """Seconds of time.perf_counter at which its draft was made; None if it is not timed."""
        ...

    def read(self) -> Verdict:
        """Wait for the round, and return its result for the rows of its launch."""
        ...


@dataclass(frozen=True)
class FinishedRound:
    """The ticket of a round that ended before its launch returned."""

    verdict: Verdict
    drafted_at: float | None

    def read(self) -> Verdict:
        return self.verdict


class HostPlace:
    """What places without a lag have in common (``RoundPlace``)."""

    name = "host"
    lag = 0

    def needs_torch(self, batch: Batch) -> bool:
        return True

    def pause(self) -> None:
        """Nothing to note."""


class RoundPlace(Protocol):
    """Runs rounds for the decoding rows.

    name: for logs and metrics, "host" or "device"; a device's programs keep the drafter's state.
    lag: rounds that are still in flight while the host launches the next one.
    """

    @property
    def name(self) -> str: ...

    @property
    def lag(self) -> int: ...

    def why_not(self, batch: Batch) -> Obstacle | None:
        """Return why it cannot run the next round of the batch; None if it can."""
        ...

    def needs_torch(self, batch: Batch) -> bool:
        """Return whether the next round may run torch operators, so that torch's modes must be set."""
        ...

    def run(self, batch: Batch, plan: SpeculationPlan) -> RoundTicket:
        """Launch a round: draft, verify, accept, commit.

        Without a lag the batch has its new lengths on return. With a lag the host notes them when it reads the round.
        """
        ...

    def pause(self) -> None:
        """Note that the next round runs elsewhere, or that no row goes on."""
        ...
