"""The loop over rounds: choose a place and a plan, run, read, finish.

On the CPU a round is read at once. On a device the host launches a round and then finishes the one before, so the
device never waits for the host.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from dataclasses import dataclass, replace

from paceline.core.batch import SpeculationPlan
from paceline.core.draft import Verdict
from paceline.engine.rounds.choice import RoundChoice
from paceline.engine.rounds.place import RoundPlace, RoundTicket
from paceline.engine.rounds.round import Speculation
from paceline.engine.rounds.timing import RoundTimer
from paceline.engine.scheduler import Scheduler
from paceline.engine.sequences import Sequence


@dataclass(frozen=True)
class _LaunchedRound:
    """A round that has not been finished.

    stays: ``Sequence.stay`` of each decoding row at its launch. began: seconds of time.perf_counter.
    """

    ticket: RoundTicket
    place: RoundPlace
    plan: SpeculationPlan
    stays: list[tuple[Sequence, int]]
    began: float


class RoundLoop:
    """Runs rounds for the decoding rows, each at the first place that can.

    place: where the last round ran.
    counts: number of rounds by the name of their place.
    last_verdict: result of the last round that the last step finished; None if it finished none.
    """

    def __init__(self, parts: Speculation, scheduler: Scheduler, choice: RoundChoice) -> None:
        self.choice, self.place = choice, choice.places[0]
        self.counts: Counter[str] = Counter({place.name: 0 for place in choice.places})
        self.last_verdict: Verdict | None = None
        self._parts, self._scheduler, self._batch = parts, scheduler, scheduler.batch
        self._launched: deque[_LaunchedRound] = deque()
        self._timer = RoundTimer()

    def step(self) -> list[Sequence]:
        """Launch a round, and finish all but those that its place keeps in flight.

        Returns the sequences that gained tokens or ended. If the place changes, rounds in flight are finished first;
        if all rows end with them, no round is launched.
        """
        self.last_verdict = None
        gained: list[Sequence] = []
        place = self.choice.place_for(self._batch)
        if place is not self.place:
            gained = self._drain()
            self.place = place
            if not self._batch.rows:
                return gained
        self.counts[place.name] += 1
        if self._launched and not self._any_row_continues():
            return gained + self._drain()
        self._launch(place)
        while len(self._launched) > place.lag:
            gained += self._finish(self._launched.popleft())
        return gained

    def forget(self) -> None:
        """Discard the rounds in flight: their rows have ended."""
        self._launched.clear()
        self.place.pause()
        self._scheduler.in_flight = 0

    def _drain(self) -> list[Sequence]:
        self.place.pause()
        gained: list[Sequence] = []
        while self._launched:
            gained += self._finish(self._launched.popleft())
        return gained

    def _any_row_continues(self) -> bool:
        """Whether some row can gain more tokens than the rounds in flight add at least: one per round."""
        certain_gain, rows = len(self._launched), self._batch
        return any(limit - length > certain_gain for limit, length in zip(rows.limits, rows.lengths, strict=True))

    def _launch(self, place: RoundPlace) -> None:
        batch, began = self._batch, time.perf_counter()
        plan = self._parts.policy.choose(batch).within(batch)  # never beyond a row's last token: it needs no draft
        ticket = place.run(batch, plan)
        stays = [sequence.stay for sequence in self._scheduler.running]
        self._launched.append(_LaunchedRound(ticket, place, plan, stays, began))
        if place.lag:
            self._count_in_flight()

    def _count_in_flight(self) -> None:
        self._scheduler.in_flight = sum([launched.plan.k + 1 for launched in self._launched])

    def _finish(self, launched: _LaunchedRound) -> list[Sequence]:
        """Read a round, let the drafter and the policy learn from it, and give its tokens to their sequences."""
        batch, lag, ticket = self._batch, launched.place.lag, launched.ticket
        verdict, rows = ticket.read(), list(range(batch.rows))
        if lag:  # rows may have left or joined since the launch
            verdict, rows = self._of_present_rows(verdict, launched)
            batch.note_gains(verdict.gained)
            self._count_in_flight()
            if not rows:
                return []
        timing = self._timer.ended(launched.began, ticket.drafted_at, drafts=launched.plan.k > 0)
        self.last_verdict = verdict = replace(verdict, note=launched.plan.note, timing=timing)
        if launched.place.name == "host":  # else the program keeps the drafter's state
            self._parts.drafter.observe(batch, verdict)
        self._parts.policy.observe(batch, verdict)
        self._timer.learned()
        return self._scheduler.process_outputs(verdict, rows)

    def _of_present_rows(self, verdict: Verdict, launched: _LaunchedRound) -> tuple[Verdict, list[int]]:
        """Return a round's result in the present order of rows, and the rows that have been in it.

        A sequence that was preempted since the launch begins anew from the text that the host knew then.
        """
        lines = {stay: line for line, stay in enumerate(launched.stays)}
        order = [lines.get(sequence.stay) for sequence in self._scheduler.running]
        return verdict.of_rows(order), [row for row, line in enumerate(order) if line is not None]
