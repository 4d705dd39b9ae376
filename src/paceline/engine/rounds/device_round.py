"""Launches of rounds on the device: on CUDA one graph per (row bucket, k, span, features); on a CPU uncaptured.

Where a row has a grammar the round is three programs (``MaskedProgram``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from paceline.config import MAX_SPECULATION_LENGTH
from paceline.core.rows import LOGPROB_SIZES, NOTHING, StepFeatures
from paceline.engine.rounds.device_drafters import catch_up
from paceline.engine.rounds.program import MaskedProgram, RoundProgram
from paceline.kernels.gpu.graphs import Graphs, Named, Ring, Ticket
from paceline.kernels.gpu.masks import RowMasks
from paceline.kernels.gpu.state import RECORD_TAIL
from paceline.models.base import SharedModel

# A step is at most half of the rows, from 8 rows on a quarter or 16: 33 rows as 64 took 1.35 times as long as 33
ROW_BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, 80, 96, 128, 160, 192, 256)
SPAN = 256  # positions: padded attention is captured for multiples of this


class DeviceRound:
    """Runs rounds for the live rows of a batch; ``run`` returns before the device has finished.

    capture: False runs the programs uncaptured on CUDA, too.
    fed_tokens: see ``DeviceDrafter``.
    """

    def __init__(self, program: RoundProgram, *, capture: bool = True) -> None:
        self.program, self.drafter, self.batch = program, program.drafter, program.batch
        self.fed_tokens = program.drafter.fed_tokens
        batch, model = program.batch, program.target.model
        ranks = model if isinstance(model, SharedModel) else None
        self.graphs = Graphs(batch.device, self._all_rows_idle, capture=capture, other_ranks=ranks)
        per_position = 2 + 2 * LOGPROB_SIZES[-1]  # token and log-probability: of the token itself and of the likeliest
        per_row = per_position * (MAX_SPECULATION_LENGTH + 1) + RECORD_TAIL + 1  # one more: tokens matched
        self._ring = Ring(batch.device, batch.capacity * per_row)
        self._masked = MaskedProgram(program)

    @contextmanager
    def _all_rows_idle(self) -> Iterator[None]:
        """Mark all rows as idle while programs are run for capture: idle rows gain nothing and keep their caches."""
        live = self.batch.live.clone()
        self.batch.live.zero_()
        try:
            yield
        finally:
            self.batch.live.copy_(live)

    def bucket(self, rows: int) -> int:
        """Return the number of rows of the program that runs ``rows`` live rows."""
        capacity = self.batch.capacity
        return min(capacity, next((size for size in ROW_BUCKETS if size >= rows), capacity))

    def span(self, longest: int) -> int:
        """Return the number of positions that attention reads; all of them if each row pays only for its own length."""
        target = self.program.target
        limit = target.cache.positions + 1
        return limit if target.backend.name == "ragged" else min(limit, -(-longest // SPAN) * SPAN)

    @property
    def capture_ms(self) -> float:
        """Milliseconds of the fastest capture so far; infinity before the first."""
        return self.graphs.capture_ms

    def is_captured(self, k: int) -> bool:
        """Whether a round of k draft tokens for the batch's rows needs no capture first; the host's never need one."""
        batch, k = self.batch, min(k, self.drafter.longest)
        if not self.graphs.captures or batch.sampling.needs_host:
            return True
        bucket, features = self.bucket(batch.rows), batch.sampling.step_features
        if features.masks:
            return ("accept", bucket, k, features) in self.graphs
        return (bucket, k, self.span(batch.longest + k * self.drafter.width), features) in self.graphs

    def named_round(self, bucket: int, k: int, span: int, features: StepFeatures, references: bool = False) -> Named:
        """Return the program of a round and its key."""
        key = bucket, k, span, features
        program = partial(self.program.run, *key, references=references)
        return (*key, "references") if references else key, program

    def named_catch_up(self, bucket: int, width: int, span: int) -> Named:
        """Return the program that feeds the draft model ``width`` tokens per row, and its key."""
        decoder = self.drafter.decoder
        assert decoder is not None, "there is no draft model"
        return ("catch up", bucket, width, span), lambda: catch_up(decoder, self.batch.state(bucket), width, span)

    def run(self, rows: int, k: int, longest: int, features: StepFeatures = NOTHING, missing: int = 0) -> Ticket:
        """Launch a round of k draft tokens for ``rows`` live rows. Return the ticket of its record.

        longest: upper bound of the rows' lengths before the round, in tokens: the longest of those that the host knows,
            and the tokens that a row may gain in rounds in flight.
        features: what the rows ask for.
        missing: upper bound of the tokens missing in a row of the draft model's cache. It is small after a round with
            draft tokens; then the round is one program, one launch.

        The record [bucket, k + 4] int64 holds tokens, accepted, drafted, gained (``gpu.state.read_record``). The
        log-probabilities that rows ask for follow (``gpu.state.read_logprobs``). For trees k is the depth, and the
        record [bucket, 2 N + 4] also holds the path (``gpu.state.read_trees``). If the drafter mixes and k > 0, the
        last column is the number of tokens matched in rows with an n-gram draft, 0 in others.
        """
        size, references = self._prepare(rows, k, longest, missing)
        return self._ring.push(self.graphs.run(*self.named_round(*size, features, references)))

    def begin_masked(self, rows: int, k: int, longest: int, features: StepFeatures, missing: int = 0) -> Ticket:
        """Launch the draft and the forward pass of a round, arguments as for ``run``; ``finish_masked`` ends it.

        Returns the ticket of the draft: [bucket, k + 1] int64, tokens and then each row's number of them.
        """
        size, references = self._prepare(rows, k, longest, missing)
        unmasked, adapted = replace(features, masks=False), features.adapters
        key = "draft", *size, unmasked, references
        ticket = self._ring.push(self.graphs.run(key, lambda: self._masked.draft(*size, unmasked, references)))
        self.graphs.run(("forward", *size, adapted), lambda: self._masked.verify(*size, adapted))
        return ticket

    def finish_masked(self, rows: int, k: int, features: StepFeatures, masks: Sequence[RowMasks]) -> Ticket:
        """Launch the rest of a round that ``begin_masked`` began -> its record's ticket. masks: of the live rows."""
        self.program.masks.set(masks)
        asked = self.bucket(rows), min(k, self.drafter.longest), features
        return self._ring.push(self.graphs.run(("accept", *asked), lambda: self._masked.accept_and_commit(*asked)))

    def _prepare(self, rows: int, k: int, longest: int, missing: int) -> tuple[tuple[int, int, int], bool]:
        """Provide pages, a draft model that has caught up, and references. Arguments as for ``run``.

        Returns bucket, k and span of the round's program, and whether it searches references.
        """
        k, references = min(k, self.drafter.longest), self.drafter.references
        self._cover(k, longest, missing)
        if k > 0:
            self.catch_up(rows, missing, longest)
        searches = k > 0 and references is not None and references.follow(self.batch)
        return (self.bucket(rows), k, self.span(longest + k * self.drafter.width)), searches

    def _cover(self, k: int, longest: int, missing: int) -> None:
        """Give the live rows pages for the tokens of a round, wherever those in flight leave their ends."""
        batch, decoder = self.batch, self.drafter.decoder
        stops = batch.ends_after(longest - batch.longest + k * self.drafter.width)
        self.program.target.cache.cover(batch.slots, [length - 1 for length in batch.lengths], stops)
        if k > 0 and decoder is not None:
            firsts = [max(0, length - 1 - missing) for length in batch.lengths]
            decoder.cache.cover(batch.slots, firsts, stops)

    def catch_up(self, rows: int, missing: int, longest: int) -> None:
        """Feed the draft model up to ``missing`` tokens per row, except the last ones, which the round itself feeds."""
        if missing > self.fed_tokens:
            width = 1 << (missing - self.fed_tokens - 1).bit_length()
            self.graphs.run(*self.named_catch_up(self.bucket(rows), width, self.span(longest)))
