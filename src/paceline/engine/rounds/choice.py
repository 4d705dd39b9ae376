"""Runners: what runs a round for the decoding rows. One protocol, the host's runner, and the choice round by round."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Protocol

from paceline.core.batch import Batch
from paceline.core.draft import Verdict
from paceline.engine.rounds.round import Speculation, speculative_round
from paceline.engine.scheduler import Scheduler
from paceline.engine.sequences import Sequence

log = logging.getLogger("paceline")


class Runner(Protocol):
    """Runs rounds for the decoding rows.

    name: where its rounds run, for logs and metrics. last_verdict: result of the last processed round; None if the last
        step processed none.
    """

    name: str
    last_verdict: Verdict | None

    def why_not(self, batch: Batch) -> str | None:
        """Return why it cannot run the next round of the batch; None if it can."""
        ...

    def step(self) -> list[Sequence]:
        """Run a round. Return the sequences that gained tokens or ended."""
        ...

    def drain(self) -> list[Sequence]:
        """Process the rounds that still run, so that another runner may go on. Return the sequences that gained."""
        ...

    def forget(self) -> None:
        """Discard the rounds that still run: their rows have ended."""
        ...


class HostRunner:
    """Runs each round step by step, or in one call of the CPU kernels (``Speculation.native``), and waits for it."""

    name = "host"

    def __init__(self, parts: Speculation, scheduler: Scheduler) -> None:
        self._parts, self._scheduler = parts, scheduler
        self.last_verdict: Verdict | None = None

    def why_not(self, batch: Batch) -> str | None:
        return None  # it runs every round

    def step(self) -> list[Sequence]:
        self.last_verdict = speculative_round(self._parts, self._scheduler.batch)
        return self._scheduler.process_outputs(self.last_verdict)

    def drain(self) -> list[Sequence]:
        return []

    def forget(self) -> None:
        """Nothing to discard: a step ends with its round."""


class Runners:
    """The runners of an engine, in order of preference; the last one can run every round.

    rounds: number of rounds that each runner has run, by its name.
    reasons: why rounds were not run by the first runner so far.
    """

    def __init__(self, batch: Batch, *runners: Runner) -> None:
        self._batch, self._runners, self._current = batch, runners, runners[0]
        self.rounds: Counter[str] = Counter({runner.name: 0 for runner in runners})
        self.reasons: dict[str, None] = {}

    @property
    def current(self) -> str:
        """Name of the runner of the last round."""
        return self._current.name

    def step(self) -> tuple[list[Sequence], Verdict | None]:
        """Run a round by the first runner that can. Return the sequences that gained tokens or ended, and its verdict.

        If the runner changes, the rounds that still run by the other are processed first; if all rows end with them,
        no round is run.
        """
        gained: list[Sequence] = []
        for runner in self._runners:
            reason = runner.why_not(self._batch)
            if reason is None:
                break
            if reason not in self.reasons:
                self._note(runner, reason)
        if runner is not self._current:
            before, self._current = self._current, runner
            gained = before.drain()
            if not self._batch.rows:
                return gained, before.last_verdict
        self.rounds[runner.name] += 1
        return gained + runner.step(), runner.last_verdict

    def _note(self, runner: Runner, reason: str) -> None:
        """Log, once per reason, that a runner does not run rounds that it otherwise would."""
        self.reasons[reason] = None
        log.warning(
            "rounds run on the %s while a request needs it (%s); the %s runs all others",
            self._runners[-1].name,
            reason,
            runner.name,
        )

    def forget(self) -> None:
        """Discard the rounds that still run: their rows have ended."""
        for runner in self._runners:
            runner.forget()
