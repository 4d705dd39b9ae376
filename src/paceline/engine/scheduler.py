"""The order of passes: waiting sequences begin, prompts are prefilled in chunks, finished sequences leave at once."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from itertools import chain

import torch
from torch import Tensor

from paceline.core.batch import Batch
from paceline.core.cache_budget import CacheUsage
from paceline.core.draft import Verdict
from paceline.core.outputs import FinishReason
from paceline.engine.chunks import PrefillChunker
from paceline.engine.prefill import Prefill
from paceline.engine.queues import Queues
from paceline.engine.rounds.round import Speculation
from paceline.engine.sequences import AnswerLengths, Sequence, end_if_outranked, fail, finish, gain_tokens, log_failure
from paceline.engine.slot_allocator import SlotAllocator
from paceline.errors import NotFiniteError
from paceline.lengths.base import UnreadPrompt

_FILE_SECONDS = 0.01  # of waiting for a file while nothing else can be done, until new requests are looked at


class Scheduler(Queues):
    """Decides when each sequence begins and leaves, and what prompts are fed between rounds.

    slots: gives each sequence its slot. chunks: decides what is prefilled next; ``prefill`` runs it.
    in_flight: upper bound of tokens that a row has gained on the device, but not yet on the host.
    final, watched: see ``Engine.expect``.
    answers: lengths of recent answers. preemptions: how often sequences gave way.
    """

    def __init__(self, batch: Batch, parts: Speculation, slots: SlotAllocator, chunks: PrefillChunker) -> None:
        super().__init__(batch)
        self.parts, self.slots, self.chunks = parts, slots, chunks
        self.prefill = Prefill(batch, parts, chunks)
        self.in_flight = 0
        self.final, self.watched = False, True
        self.answers = AnswerLengths()
        self.preemptions = 0

    @property
    def draining(self) -> bool:
        """Whether the decoding rows are the last ones."""
        return self.final and not (self.waiting or self.preempted or self.prefilling)

    def admit(self) -> list[Sequence]:
        """Give free rows to waiting sequences, feed a chunk of prompts, and let finished prefills start to decode.

        Returns the sequences that have ended (with their prompt, by their time limit, or because they failed to start)
        or gained their first token.
        """
        ended = self.overdue(time.monotonic())
        self._reserve()
        while (limit := self.admissible) > 0:
            ended += self._begin([self.preempted.pop(0)] if self.resumes else self.waiting.turn(limit))
        if not self.prefilling:
            return ended
        ended += self._join()
        if self.prefilling:
            ended += self._gain_first_tokens(self._prefill())
            ended += self._join()
        return ended + self.overdue(time.monotonic())  # the chunk may have taken their time

    @property
    def admissible(self) -> int:
        """Number of samples of the next request that may begin now."""
        if self.resumes:
            return self.slots.num_free_for(self.preempted[0])
        return self.slots.num_free_for(self.waiting.first) if self.waiting else 0

    def describe(self) -> str:
        """Say how often sequences gave way; empty if none has."""
        if not self.preemptions:
            return ""
        return f", {self.preemptions} gave way for others, {self.prefill.recomputed_tokens} tokens were read again"

    def _reserve(self) -> None:
        """Reserve memory for the next round of each row. If it is short, the sequences of the lowest rank give way."""
        for sequence in self.slots.by_rank if self.slots.memory.room.is_short else ():
            while sequence.slot >= 0 and not self.slots.grow(sequence, self.in_flight):
                self._preempt(self.slots.by_rank[-1])

    def _preempt(self, sequence: Sequence) -> None:
        """Let a sequence give way: it waits for a slot, and its prompt and answer so far are then read again."""
        self.slots.preempt(sequence)
        self.preempted.insert(0, sequence)  # those that gave way before it have lower ranks
        self.preemptions += 1
        self.vacate(lambda other: other is sequence)

    def _begin(self, turn: list[Sequence]) -> list[Sequence]:
        """Give slots to samples of one request. If one fails to start, only its request ends; return its samples."""
        for number, sequence in enumerate(turn):
            try:
                self._start(sequence, self._rows_soon(len(turn) - number))
            except Exception as error:  # noqa: BLE001 (any kind: it ends one request)
                log_failure(sequence, error)
                self.slots.size_free_slots()
                self.waiting.extend(turn[number:])
                return self.drop(sequence.request_id, "error", error)
        return []

    def _start(self, sequence: Sequence, rows_soon: int) -> None:
        if (
            sequence.budget_from_row
            and sequence.params.time_budget is not None
            and not math.isfinite(sequence.deadline)
        ):
            sequence.deadline = time.monotonic() + sequence.params.time_budget
        self.slots.take(sequence)
        self.prefilling.append(sequence)
        self.slots.reuse_prefix(sequence)
        sequence.read_by_draft = not sequence.only_read and self._draft_models_read(sequence, rows_soon)

    def _draft_models_read(self, sequence: Sequence, rows_soon: int) -> bool:
        """Whether draft models should read the prompt before it decodes."""
        unread = sequence.prefill_stop - min(sequence.num_computed[1:], default=0)
        answer = min(sequence.params.max_tokens, self.batch.expected_tokens)
        seconds = sequence.deadline - time.monotonic()
        prompt = UnreadPrompt(unread, min(sequence.params.answers, rows_soon), answer, seconds)
        return self.parts.policy.reads_prompt(rows_soon, prompt)

    @property
    def filled(self) -> CacheUsage:
        """The memory that caches hold now."""
        lengths = [*self.batch.lengths, *(sequence.prefilled for sequence in self.prefilling)]
        memory = self.slots.memory
        rows = sum(map(memory.room.bytes_for, lengths)) - memory.shared_bytes
        return CacheUsage(rows, memory.prefix_bytes, memory.room.limit)

    def _rows_soon(self, begun_now: int) -> int:
        """Number of rows decoding once the sequences being started and all waiting sequences have been admitted."""
        return min(self.batch.max_rows, len(self.slots.used) + begun_now + self.num_waiting)

    def _prefill(self) -> dict[int, Tensor]:
        """Feed one chunk; none if the next round would then end after a deadline.

        Returns, by slot, the hidden states [width] at the last token of the prompts that were read to their end.
        """
        if all(sequence.waits for sequence in self.prefilling):  # for files
            if not self.running and self.slots.stored is not None:
                self.slots.stored.wait(_FILE_SECONDS)
            return {}
        left = self._seconds_left()
        if self.running and left < self.chunks.speed.per_pass:
            return {}
        self.chunks.awaited = self._awaited
        chosen = self.chunks.choose(self.prefilling, bool(self.running), left)
        return self.prefill.run(self.prefilling, chosen, at_once=not self.running and self._awaited)

    def _seconds_left(self) -> float:
        """Return the seconds until the next round must begin to meet the earliest deadline of a row."""
        earliest = min((sequence.deadline for sequence in self.in_use), default=math.inf)
        return earliest - time.monotonic() - self._round_seconds

    @property
    def _round_seconds(self) -> float:
        """Expected seconds of the next round."""
        return self.chunks.rounds.expected(max(1, len(self.running)))

    @property
    def _awaited(self) -> bool:
        """Whether it matters when each token comes, and not only when all have come."""
        return (self.watched and not self.final) or self.any_deadline

    def _gain_first_tokens(self, ends: dict[int, Tensor]) -> list[Sequence]:
        """Give prompts that were read to their end their first token, without a round. Return what has changed."""
        first = [sequence for sequence in self.prefilling if sequence.slot in ends and sequence.is_prefilled]
        if not first:
            return []
        begun = {sequence.slot for sequence in first}
        self.prefilling = [sequence for sequence in self.prefilling if sequence.slot not in begun]
        self.set_running(first)
        hidden = torch.stack([ends[sequence.slot] for sequence in self.running])
        return self.process_outputs(self.parts.first_tokens(self.batch, hidden), range(self.batch.rows))

    def _join(self) -> list[Sequence]:
        """Let prefilled sequences start to decode, also those that waited for the prefix of another prompt.

        Returns those that end with their prompt.
        """
        self.slots.end_waits()
        ready = [sequence for sequence in self.prefilling if sequence.is_prefilled]
        for sequence in ready:
            self._end_reading(sequence)
        ended = self._release_finished()
        ended += self._drop_failed(ended)
        if joining := [sequence for sequence in self.prefilling if sequence.is_prefilled]:
            self.prefilling = [sequence for sequence in self.prefilling if not sequence.is_prefilled]
            self.set_running([*self.running, *joining])
        return ended

    def _end_reading(self, sequence: Sequence) -> None:
        """Keep what was collected from a prompt that was read; finish a sequence that ends with it, or with NaN."""
        if sequence.reading is not None and sequence.reading.is_nan:
            fail(sequence, NotFiniteError("results for the prompt", sequence.params.adapter), time.monotonic())
            return
        self.slots.prefixes.keep_reading(sequence)
        if sequence.only_read:
            finish(sequence, "length", time.monotonic())

    def process_outputs(self, verdict: Verdict, rows: Iterable[int]) -> list[Sequence]:
        """Give decoding rows their new tokens, cut at the sample's end. Finished rows leave.

        rows: those that were in the round. Returns their sequences, and the other samples of requests that failed.
        """
        gained: list[Sequence] = []
        now = time.monotonic()
        for row in rows:
            gain_tokens(self.running[row], verdict, row, now, at_limit=self.batch.positions)
            gained.append(self.running[row])
        return gained + self._leave(gained)

    def _leave(self, sequences: list[Sequence]) -> list[Sequence]:
        """Free the slots of finished sequences. Return the other samples of requests that failed.

        sequences: those that have gained tokens. Those among them that cannot become one of the returned samples any
        more are finished, too.
        """
        ended = False
        for sequence in sequences:
            if sequence.rivals and not sequence.output.finished:
                end_if_outranked(sequence, self.batch.positions)
            ended = ended or sequence.output.finished
        if not ended:
            return []
        self._release_finished()
        return self._drop_failed(sequences)

    def _drop_failed(self, ended: list[Sequence]) -> list[Sequence]:
        """Finish the other samples of requests that failed. Return them."""
        failed = [sequence for sequence in ended if sequence.output.error is not None]
        return [sample for one in failed for sample in self.drop(one.request_id, "error", one.output.error)]

    def _release_finished(self) -> list[Sequence]:
        """Free the slots of finished sequences, which keep their prefixes. Return the sequences."""
        ended = [sequence for sequence in self.in_use if sequence.output.finished]
        for sequence in ended:
            self.slots.release(sequence)
            self.answers.add(sequence)
        if ended:
            self.vacate(lambda sequence: sequence.output.finished)
            self.batch.expected_tokens = self.answers.expected(self.running)
        return ended

    def drop(self, request_id: str, reason: FinishReason, error: Exception | None = None) -> list[Sequence]:
        """Finish every unfinished sequence of a request, in whatever queue. Return them."""
        dropped = [sequence for sequence in self.unfinished if sequence.request_id == request_id]
        for sequence in dropped:
            finish(sequence, reason, time.monotonic())
            sequence.output.error = sequence.output.error or error
        self.sweep()
        return dropped

    def clear(self) -> None:
        """Finish all sequences and empty all rows, whatever state an interrupted round has left."""
        for sequence in self.unfinished:
            if not sequence.output.finished:
                finish(sequence, "abort", time.monotonic())
        super().clear()
        self.slots.clear()

    def overdue(self, now: float) -> list[Sequence]:
        """Finish the sequences that cannot gain another token before their deadline; they keep their tokens.

        A round or chunk that is expected to end too late is not started. The expectation may be wrong after slow
        rounds, and no round would correct it, so the slowest recent round is then forgotten.
        """
        late = [sequence for sequence, seconds in self._seconds_to_next_token() if sequence.ends_by(now + seconds)]
        for sequence in late:
            finish(sequence, "deadline", now)
        if not all(sequence.ends_by(now) for sequence in late):
            self.chunks.rounds.doubt(max(1, len(self.running)))
        if late:
            self.sweep()
        return late

    def _seconds_to_next_token(self) -> Iterator[tuple[Sequence, float]]:
        """Yield the sequences with a deadline and the seconds until each is expected to gain a token.

        Every prompt may start, whatever earlier chunks took: the first chunk shows what a chunk takes now.
        """
        if not self.any_deadline:
            return
        seconds = self._round_seconds
        for sequence in self.running:
            yield sequence, seconds
        for sequence in self.prefilling:
            started = sequence.num_computed[0] > sequence.output.metrics.cached_tokens
            yield sequence, seconds + self.chunks.least_seconds(sequence.prefilled) if started else 0.0
        for sequence in chain(self.waiting, self.preempted):
            yield sequence, 0.0

    def sweep(self) -> None:
        """Remove finished sequences from every queue and slot."""
        super().sweep()
        self._release_finished()

    def check_integrity(self) -> None:
        """Raise AssertionError unless queues, slots and caches agree. Cheap: it runs whenever the engine is idle."""
        slots = [sequence.slot for sequence in self.running]
        assert self.batch.slots == slots, "live rows and running sequences differ"
        assert self.batch.lengths == list(map(self.batch.length_of, slots)), "lengths of live rows disagree"
        assert {s.slot: s for s in self.in_use} == self.slots.used, "sequences and used slots differ"
        self.slots.check_integrity()
        lengths = self.batch.length.tolist()
        for sequence in self.in_use:
            slot = sequence.slot
            assert not sequence.output.finished, f"slot {slot}: its sequence is finished but was not freed"
            size = len(sequence.prompt) + len(sequence.output.token_ids)
            assert self.batch.length_of(slot) == size, f"slot {slot}: lengths disagree"
            assert 0 <= lengths[slot] - size <= self.in_flight, f"slot {slot}: the device's length disagrees"
            text = self.batch.text[slot, :size].tolist()
            assert text == sequence.prompt + sequence.output.token_ids, f"slot {slot}: tokens disagree"
