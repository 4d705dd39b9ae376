"""Rounds on the device: the host launches one round and processes the outputs of the round before it."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from paceline.core.batch import Batch
from paceline.core.draft import Logprobs, Verdict
from paceline.core.rows import SamplingRows, StepFeatures
from paceline.engine.rounds.program import DeviceRound
from paceline.engine.rounds.round import Speculation
from paceline.engine.scheduler import Scheduler
from paceline.engine.sequences import Sequence, gain_tokens
from paceline.kernels.gpu.ahead import Ahead, Progress
from paceline.kernels.gpu.graphs import Ticket
from paceline.kernels.gpu.state import read_logprobs, read_record, read_trees
from paceline.lengths.base import LengthPolicy
from paceline.models.base import AnyModel, FlatModel

Value = TypeVar("Value")

NGRAM_SOURCES = "n-gram drafts from references or parallel samples"


def why_not_device(parts: Speculation) -> str | None:
    """Return why the device cannot run rounds with these parts; None if it can."""
    if reason := _why_speculation_on_host(parts):
        return reason
    models: list[AnyModel] = [decoder.model for decoder in parts.decoders]
    if any(isinstance(model, FlatModel) for model in models):
        return "the CPU kernels are called from the host"
    if any(decoder.vocabulary is not None for decoder in parts.drafter.decoders):
        return "the draft vocabulary is chosen on the host"
    if obstacles := [obstacle for model in models if (obstacle := getattr(model, "device_obstacle", None))]:
        return str(obstacles[0])
    if parts.target.adapters is not None:
        return "adapters differ from row to row"
    if any(decoder.backend.name == "split" for decoder in parts.decoders):
        return "attention 'split' needs the lengths on the host"
    return None


def _why_speculation_on_host(parts: Speculation) -> str | None:
    if not parts.drafter.on_device:
        return "the drafter runs on the host"
    return "the length policy reads draft tokens on the host" if parts.policy.reads_drafts else None


def _why_sampling_on_host(sampling: SamplingRows) -> str:
    if sampling.any_constraint:
        return "a grammar or logits processor"
    return "a logit bias" if sampling.any_bias else "min_tokens with many stop tokens"


@dataclass
class _InFlightRound:
    """A launched round whose outputs have not been processed.

    ticket: gives the round's record once the device has finished.
    sequences: the sequence of each row when the round was launched.
    k: draft tokens per row; the depth of trees.
    features: what the rows asked for when the round was launched.
    width: siblings at each depth of a tree; 1 for chains.
    note: of the length policy, which gets it back with the verdict.
    """

    ticket: Ticket
    sequences: list[Sequence]
    k: int
    features: StepFeatures
    width: int
    note: object

    def read(self) -> Verdict:
        """Wait for the round. Return its verdict."""
        record = self.ticket.read()
        if self.width > 1 and self.k > 0:
            return read_trees(record, self.width)
        if self.features.logprobs is None:
            return read_record(record)
        record, logprobs = read_logprobs(record, self.k)
        return replace(read_record(record), logprobs=logprobs)


class DeviceRunner:
    """A ``Runner`` that launches a round, then processes the outputs of the one before: the device never waits."""

    name = "device"

    def __init__(self, device_round: DeviceRound, parts: Speculation, scheduler: Scheduler) -> None:
        self.device_round, self.parts, self.scheduler = device_round, parts, scheduler
        self.batch = scheduler.batch
        self._in_flight: deque[_InFlightRound] = deque()
        # the rows of the last round with draft tokens; empty after rounds of the host
        self._drafted_rows: list[Sequence] = []
        self._plain_rounds = 0  # rounds without draft tokens since then
        self._missing_after_draft = 0  # upper bound per row: tokens missing in the draft model's cache after that round
        self.last_verdict: Verdict | None = None

    def capture_ahead(self, seconds: float, progress: Progress = iter) -> Ahead | None:
        """Capture the rounds that requests will need; only while the engine is idle. None if nothing is captured."""
        return self.device_round.capture_ahead(partial(likely_lengths, self.parts.policy), seconds, progress)

    def why_not(self, batch: Batch) -> str | None:
        sampling, drafter = batch.sampling, self.parts.drafter
        features = sampling.step_features
        if self.device_round.width > 1 and (features.adjusts or features.logprobs is not None):
            return "trees with penalties, min_tokens or log-probabilities"
        if drafter.copies and any(batch.samples):
            return NGRAM_SOURCES
        if sampling.needs_host:
            return _why_sampling_on_host(sampling)
        return _why_speculation_on_host(self.parts)

    def step(self) -> list[Sequence]:
        """Launch a round and process the one before. Return the sequences that gained tokens."""
        self.last_verdict = None
        if self._any_row_continues():
            self._launch()
            return self._process_all_but(1)
        return self.drain()

    def drain(self) -> list[Sequence]:
        self.last_verdict = None
        self._drafted_rows = []
        return self._process_all_but(0)

    def forget(self) -> None:
        self._in_flight.clear()
        self._drafted_rows = []
        self.scheduler.in_flight = 0

    def _any_row_continues(self) -> bool:
        """Whether some row can gain more tokens than the rounds in flight add at least: one per round."""
        batch = self.batch
        certain_gain = len(self._in_flight)
        return any(limit - length > certain_gain for limit, length in zip(batch.limits, batch.lengths, strict=True))

    def _launch(self) -> None:
        batch, runner = self.batch, self.device_round
        plan = self.parts.policy.choose(batch).within(batch)
        k = plan.k if runner.can_draft else 0
        longest = min(batch.longest + self.scheduler.in_flight, batch.positions)
        runner.cap_draft_tokens(batch.max_draft_tokens if plan.caps is None else plan.caps)
        features = batch.sampling.step_features
        ticket = runner.run(batch.rows, k, longest, features, self._missing_tokens(k))
        self._in_flight.append(
            _InFlightRound(ticket, list(self.scheduler.running), k, features, runner.width, plan.note)
        )
        self._count_in_flight()

    def _missing_tokens(self, k: int) -> int:
        """Upper bound, over all rows, of tokens missing in the draft model's cache; it grows in rounds with k = 0.

        The host counts for rows of the last round with draft tokens. For other rows it reads the device.
        """
        decoders = self.parts.drafter.decoders
        if k == 0 or not decoders:
            self._plain_rounds += 1
            return 0
        running, counted = self.scheduler.running, {id(sequence) for sequence in self._drafted_rows}
        missing = self._missing_after_draft + self._plain_rounds
        if any(id(sequence) not in counted for sequence in running):
            missing = max(max(decoder.missing_tokens(self.batch)) for decoder in decoders)
        self._drafted_rows, self._plain_rounds = list(running), 0
        self._missing_after_draft = decoders[0].missing_after(k)
        return missing

    def _count_in_flight(self) -> None:
        self.scheduler.in_flight = sum(launched.k + 1 for launched in self._in_flight)

    def _process_all_but(self, remaining: int) -> list[Sequence]:
        gained: list[Sequence] = []
        while len(self._in_flight) > remaining:
            gained += self._process(self._in_flight.popleft())
        return gained

    def _process(self, launched: _InFlightRound) -> list[Sequence]:
        """Give the running sequences their tokens. Rows may have left or joined since the launch."""
        verdict = launched.read()
        lines = {id(sequence): line for line, sequence in enumerate(launched.sequences) if not sequence.output.finished}
        running = self.scheduler.running
        rows_and_lines = [(row, lines[id(s)]) for row, s in enumerate(running) if id(s) in lines]
        self.batch.note_gains([verdict.gained[lines[id(s)]] if id(s) in lines else 0 for s in running])
        self._count_in_flight()
        if not rows_and_lines:
            return []
        self.last_verdict = _reordered(verdict, [lines.get(id(sequence)) for sequence in running], launched.note)
        self.parts.policy.observe(self.batch, self.last_verdict)
        gained = [running[row] for row, _ in rows_and_lines]
        now = time.monotonic()
        for row, _ in rows_and_lines:
            gain_tokens(running[row], self.last_verdict, row, now, at_limit=self.batch.positions)
        return gained + self.scheduler.leave(gained)


def likely_lengths(policy: LengthPolicy, rows: int) -> list[int]:
    """Return every draft length that rounds of ``rows`` rows may have, the likeliest first."""
    usual = policy.length_for(rows)
    return sorted(policy.possible_lengths, key=lambda k: abs(k - usual))


def _reordered(launched: Verdict, lines: list[int | None], note: object) -> Verdict:
    """Return a round's verdict in the present order of rows. lines: each row's line in the round, None if it had none.

    Rows that were not in the round have drafted, accepted and gained nothing; their log-probabilities are undefined.
    """

    def of_rows(table: list[Value], absent: Value) -> list[Value]:
        return [absent if line is None else table[line] for line in lines]

    return Verdict(
        of_rows(launched.tokens, []),
        of_rows(launched.accepted, 0),
        of_rows(launched.drafted, 0),
        of_rows(launched.gained, 0),
        None if launched.parents is None else of_rows(launched.parents, []),
        None if launched.path is None else of_rows(launched.path, []),
        None if launched.logprobs is None else Logprobs(*(of_rows(each, []) for each in launched.logprobs)),
        note,
    )
