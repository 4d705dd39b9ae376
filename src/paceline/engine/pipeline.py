"""Rounds that the device plays alone, and the host that settles each while the next one runs."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from functools import partial

import torch

from paceline.core.draft import HostVerdict, Logprobs, Verdict, VerifiedTree
from paceline.core.rows import StepFeatures
from paceline.engine.device_round import DeviceRound
from paceline.engine.round import Speculation
from paceline.engine.scheduler import Scheduler
from paceline.engine.sequences import Sequence, gain_tokens
from paceline.kernels.gpu.ahead import Ahead, Progress
from paceline.kernels.gpu.graphs import Ticket
from paceline.kernels.gpu.state import read_logprobs, read_record, read_trees
from paceline.lengths.base import LengthPolicy
from paceline.models.base import AnyModel, FlatModel


def why_not_device(parts: Speculation) -> str | None:
    """Why the device cannot play rounds alone; None if it can."""
    if not parts.drafter.on_device:
        return "this drafter guesses on the host"
    if parts.policy.selects:
        return "this length policy looks at guesses on the host"
    decoders = [parts.target, *parts.drafter.decoders]
    models: list[AnyModel] = [decoder.model for decoder in decoders]
    if any(isinstance(model, FlatModel) for model in models):
        return "the CPU kernels are run by the host"
    if any(getattr(model, "reads_device", False) for model in models):
        return "a model runs through transformers' own code"
    if any(decoder.backend.name == "split" for decoder in decoders):
        return "attention 'split' needs the lengths on the host"
    return None


@dataclass
class _Flight:
    """A round that the host has launched but not settled: whose rows it played, how many draft tokens, what it
    tells.
    """

    ticket: Ticket
    sequences: list[Sequence]
    k: int
    asks: StepFeatures
    width: int

    def read(self) -> tuple[HostVerdict, Logprobs | None]:
        """The verdict, and log-probabilities if rows asked for them; waits for the round."""
        record = self.ticket.read()
        if self.width > 1 and self.k > 0:
            return read_trees(record, self.width), None
        if self.asks.logprobs is None:
            return read_record(record), None
        record, logprobs = read_logprobs(record, self.k)
        return read_record(record), logprobs


class Pipeline:
    """Launches a round, then settles the one before it: the device never waits for the host.

    A length policy that times rounds gets each settled before the next is chosen.
    """

    def __init__(self, runner: DeviceRound, parts: Speculation, scheduler: Scheduler) -> None:
        self.runner, self.parts, self.scheduler = runner, parts, scheduler
        self.batch = scheduler.batch
        self._flights: deque[_Flight] = deque()
        # for whom the last round with draft tokens was, if nobody else has played since
        self._proposed: list[Sequence] = []
        self._plain = 0  # rounds without draft tokens since then
        self._lacks = 0  # most tokens of a row that the draft model lacked after it
        self.last_verdict: Verdict | None = None  # of the last round settled

    def capture_ahead(self, seconds: float, progress: Progress = iter) -> Ahead | None:
        """Capture the rounds that requests will need, while none is here; None where rounds are not captured."""
        return self.runner.capture_ahead(partial(likely_lengths, self.parts.policy), seconds, progress)

    def suits(self) -> bool:
        """Whether the device can play the next round for the rows there are; trees for those that ask for little."""
        parts, asks = self.parts, self.batch.sampling.step_features
        asks_little = self.runner.width == 1 or not (asks.adjusts or asks.logprobs is not None)
        alone = not (parts.drafter.copies and any(self.batch.samples[: self.batch.rows]))  # copied from nothing else
        able = asks_little and alone and not self.batch.sampling.needs_host
        return able and parts.drafter.on_device and not parts.policy.selects

    @property
    def late(self) -> int:
        """How many rounds the host is behind."""
        return 0 if self.parts.policy.times else 1

    def step(self) -> list[Sequence]:
        """Launch a round; settle the one before. Returns the sequences that gained tokens."""
        if self._anyone_goes_on():
            self._launch()
            return self._settle_all_but(self.late)
        return self.drain()

    def drain(self) -> list[Sequence]:
        """Settle everything: from now on the host knows what the device knows, and may play."""
        self._proposed = []
        return self._settle_all_but(0)

    def forget(self) -> None:
        """Whatever is in flight concerns nobody any more."""
        while self._flights:
            self._flights.popleft()
            self.parts.policy.lost()
        self._proposed = []
        self.scheduler.in_flight = 0

    def _anyone_goes_on(self) -> bool:
        """Whether some row has room after what is in flight, which gives at least one token a round."""
        batch = self.batch
        sure = len(self._flights)
        return any(batch.limits[row] - batch.lengths[row] > sure for row in range(batch.rows))

    def _launch(self) -> None:
        batch, runner = self.batch, self.runner
        wish = self.parts.policy.choose(batch).within(batch)
        k = wish.k if runner.draft_tokens else 0
        longest = min(batch.longest + self.scheduler.in_flight, batch.positions)
        runner.cap_draft_tokens(batch.max_draft_tokens[: batch.rows] if wish.caps is None else wish.caps)
        asks = batch.sampling.step_features
        ticket = runner.play(batch.rows, k, longest, asks, self._lag(k))
        self._flights.append(_Flight(ticket, list(self.scheduler.running), k, asks, runner.width))
        self._count_in_flight()

    def _lag(self, k: int) -> int:
        """Most tokens that the draft model lacks of a row: it falls behind while rounds have no draft tokens.

        Of rows that had draft tokens lately the host knows; of others it asks.
        """
        decoders = self.parts.drafter.decoders
        if k == 0 or not decoders:
            self._plain += 1
            return 0
        running, known = self.scheduler.running, {id(sequence) for sequence in self._proposed}
        lag = self._lacks + self._plain
        if any(id(sequence) not in known for sequence in running):
            lag = max(max(decoder.lags(self.batch)) for decoder in decoders)
        self._proposed, self._plain = list(running), 0
        self._lacks = decoders[0].lag_after(k)
        return lag

    def _count_in_flight(self) -> None:
        self.scheduler.in_flight = sum(flight.k + 1 for flight in self._flights)

    def _settle_all_but(self, last: int) -> list[Sequence]:
        gained: list[Sequence] = []
        while len(self._flights) > last:
            gained += self._settle(self._flights.popleft())
        return gained

    def _settle(self, flight: _Flight) -> list[Sequence]:
        """Rows may have left, moved or joined since the round was launched: its lines are found by sequence."""
        verdict, logprobs = flight.read()
        lines = {id(sequence): line for line, sequence in enumerate(flight.sequences) if not sequence.output.finished}
        running = self.scheduler.running
        known = [(row, lines[id(s)]) for row, s in enumerate(running) if id(s) in lines]
        for row, line in known:
            self.batch.lengths[row] += verdict.gained[line]
        self._count_in_flight()
        if not known:
            self.parts.policy.lost()
            return []
        self.last_verdict = _verdict(verdict, [lines.get(id(sequence)) for sequence in running], logprobs)
        self.parts.policy.observe(self.batch, self.last_verdict)
        gained = [running[row] for row, _ in known]
        now = time.monotonic()
        for row, _ in known:
            gain_tokens(running[row], self.last_verdict, row, now, at_limit=self.batch.positions)
        return gained + self.scheduler.leave(gained)


def likely_lengths(policy: LengthPolicy, rows: int) -> list[int]:
    """All that so many rows may be asked for, for as answers end there is room for fewer; most rounds' come first."""
    most = policy.length_for(rows)
    return sorted(range(policy.max_draft_tokens + 1), key=lambda k: abs(k - most))


def _verdict(read: HostVerdict, lines: list[int | None], logprobs: Logprobs | None) -> Verdict:
    """The lines of a round in the rows' present order; rows that did not play have drafted and kept nothing."""
    tokens = [[] if line is None else read.tokens[line] for line in lines]
    accepted = [0 if line is None else read.accepted[line] for line in lines]
    drafted = [0 if line is None else read.drafted[line] for line in lines]
    gained = [0 if line is None else read.gained[line] for line in lines]
    verdict = Verdict.of(HostVerdict(tokens, accepted, drafted, gained))
    if read.trees is not None:
        verdict.host.trees = [VerifiedTree.of([], []) if line is None else read.trees[line] for line in lines]
    if logprobs is not None:  # of rows that did not play they mean nothing
        order = torch.tensor([line or 0 for line in lines])
        told = logprobs.own, logprobs.top_ids, logprobs.top_values
        verdict.logprobs = Logprobs(*(table[order] for table in told))
    return verdict
