"""Rounds as captured graphs: the host launches one, and reads the record of the one before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from paceline.core.batch import Batch, SpeculationPlan
from paceline.core.draft import Logprobs, Undrawn, Verdict
from paceline.core.rows import Constraint, StepFeatures
from paceline.engine.rounds.choice import why_no_graph_now, why_no_masked_graph_now
from paceline.engine.rounds.device_round import DeviceRound
from paceline.engine.rounds.likely import likely_programs
from paceline.engine.rounds.place import FinishedRound, RoundTicket
from paceline.engine.rounds.round import Speculation
from paceline.engine.scheduler import Scheduler
from paceline.engine.sequences import Sequence as LiveSequence
from paceline.kernels.gpu.ahead import Ahead, Progress, capture_ahead
from paceline.kernels.gpu.graphs import Ticket
from paceline.kernels.gpu.masks import RowMasks
from paceline.kernels.gpu.state import read_logprobs, read_record, read_trees

_MOST_COUNTED = 64  # missing tokens that a pass reads rather than that the host waits for the device to count them


@dataclass(frozen=True)
class GraphTicket:
    """A launched round.

    record: its record, once the device has finished.
    k: draft tokens per row; the depth of trees. width: siblings at each depth of a tree; 1 for chains.
    features: what the rows asked for at the launch.
    mixes: whether the record tells which rows had n-gram drafts in place of a model's.
    """

    record: Ticket
    k: int
    width: int
    features: StepFeatures
    mixes: bool = False
    drafted_at = None

    def read(self) -> Verdict:
        record = self.record.read()
        if self.width > 1 and self.k > 0:
            return read_trees(record, self.width)
        matched = [line.pop() for line in record] if self.mixes else None
        logprobs: Logprobs | None = None
        if self.features.logprobs is not None:
            record, logprobs = read_logprobs(record, self.k)
        return replace(read_record(record), logprobs=logprobs, matched=matched)


class GraphPlace:
    """Launches the rounds of a ``DeviceRound`` (a ``RoundPlace``); each is read while the next one runs."""

    name = "device"
    lag = 1
    _why_not = staticmethod(why_no_graph_now)

    def __init__(self, device_round: DeviceRound, parts: Speculation, scheduler: Scheduler) -> None:
        self.device_round, self._parts, self._scheduler = device_round, parts, scheduler
        self._drafter = device_round.drafter
        self.why_not = partial(self._why_not, parts, self._drafter.width)
        # ``Sequence.stay`` of the rows in the last round with draft tokens; empty after a pause
        self._drafted: set[tuple[LiveSequence, int]] = set()
        self._plain_rounds = 0  # rounds without draft tokens since then
        self._missing_after_draft = 0  # upper bound per row: tokens missing in the draft model's cache after that round

    def masked(self) -> MaskedGraphPlace:
        """The place of the same device's rounds with grammars."""
        return MaskedGraphPlace(self.device_round, self._parts, self._scheduler)

    def capture_ahead(self, seconds: float, progress: Progress = iter, rows: int | None = None) -> Ahead | None:
        """Capture the rounds that requests will need; only while the engine is idle. None if nothing is captured."""
        graphs = self.device_round.graphs
        if not graphs.captures:
            return None
        return capture_ahead(graphs, likely_programs(self.device_round, self._parts.policy, rows), seconds, progress)

    def needs_torch(self, batch: Batch) -> bool:
        return True

    def run(self, batch: Batch, plan: SpeculationPlan) -> RoundTicket:
        k, longest, features, missing = self._prepared(batch, plan)
        record = self.device_round.run(batch.rows, k, longest, features, missing)
        return self._ticket(record, k, features)

    def _prepared(self, batch: Batch, plan: SpeculationPlan) -> tuple[int, int, StepFeatures, int]:
        """Set the rows' limits of draft tokens, and return the round's arguments."""
        k = min(plan.k, self._drafter.longest)
        longest = batch.longest + self._scheduler.in_flight
        caps = batch.max_draft_tokens if plan.caps is None else plan.caps
        self.device_round.program.set_limits(caps, plan.least_matches)
        return k, longest, batch.sampling.step_features, self._missing_tokens(batch, k)

    def _ticket(self, record: Ticket, k: int, features: StepFeatures) -> GraphTicket:
        return GraphTicket(record, k, self._drafter.width, features, mixes=self._drafter.mixes and k > 0)

    def pause(self) -> None:
        self._drafted = set()

    def _missing_tokens(self, batch: Batch, k: int) -> int:
        """Upper bound, over all rows, of tokens missing in the draft model's cache; it grows in rounds with k = 0.

        The host counts for rows of the last round with draft tokens, and for others from the tokens that were read with
        their prompts. It reads the device only if these are many, which later rounds may have read.
        """
        decoders = self._parts.drafter.decoders
        if k == 0 or not decoders:
            self._plain_rounds += 1
            return 0
        running = self._scheduler.running
        missing = self._missing_after_draft + self._plain_rounds
        others = [sequence for sequence in running if sequence.stay not in self._drafted]
        if others:
            known = [batch.length_of(sequence.slot) - min(sequence.num_computed[1:]) for sequence in others]
            missing = max(missing, max(known) + min(self._plain_rounds, self._scheduler.in_flight))
        if others and missing > _MOST_COUNTED:
            missing = max(max(decoder.missing_tokens(batch)) for decoder in decoders)
        self._drafted, self._plain_rounds = {sequence.stay for sequence in running}, 0
        self._missing_after_draft = self._drafter.missing_after(k)
        return missing


class MaskedGraphPlace(GraphPlace):
    """Launches rounds with grammars among their rows, and makes the masks while the forward pass runs.

    The next masks depend on the tokens of the round, so it is read before the next one is launched.
    """

    lag = 0
    _why_not = staticmethod(why_no_masked_graph_now)

    def run(self, batch: Batch, plan: SpeculationPlan) -> RoundTicket:
        k, longest, features, missing = self._prepared(batch, plan)
        draft = self.device_round.begin_masked(batch.rows, k, longest, features, missing).read()
        masks = [
            [] if constraint is None else masks_of(constraint, line[: line[-1]], batch.vocab_size)
            for constraint, line in zip(batch.sampling.constraints, draft[: batch.rows], strict=True)
        ]
        record = self.device_round.finish_masked(batch.rows, k, features, masks)
        verdict = self._ticket(record, k, features).read().of_rows(range(batch.rows))
        for row, tokens in zip(masks, verdict.tokens, strict=True):
            forbidden = len(row) >= len(tokens) and (last := row[len(tokens) - 1]) is not None and not last.any()
            if tokens and tokens[-1] < 0 and forbidden:
                tokens[-1] = Undrawn.ALL_FORBIDDEN
        batch.note_gains(verdict.gained)
        batch.sampling.advance(verdict.tokens)
        return FinishedRound(verdict, drafted_at=None)


def masks_of(constraint: Constraint, draft_tokens: Sequence[int], vocab_size: int) -> RowMasks:
    """Return the masks of a row's positions in a round: of its pending token and of its draft tokens."""
    if constraint.is_free(draft_tokens):
        return []
    table = torch.zeros(len(draft_tokens) + 1, vocab_size, dtype=torch.bfloat16)
    constraint.mask(draft_tokens, 0, table)
    return [None if allowed.all() else allowed for allowed in (table == 0).numpy()]
