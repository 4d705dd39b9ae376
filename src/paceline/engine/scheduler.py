"""The order of passes: waiting sequences begin, prompts are prefilled in chunks, finished sequences leave at once."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain

import torch
from torch import Tensor

from paceline.core.batch import Batch
from paceline.core.cache_budget import CacheUsage
from paceline.core.draft import Verdict
from paceline.core.hardware import Stopwatch
from paceline.core.outputs import FinishReason
from paceline.engine.chunks import PrefillChunker, PromptSlice
from paceline.engine.prefixes import STATES_APART
from paceline.engine.rounds.round import Speculation
from paceline.engine.scoring import collect
from paceline.engine.sequences import AnswerLengths, Sequence, end_if_outranked, fail, finish, gain_tokens, log_failure
from paceline.engine.slot_allocator import SlotAllocator
from paceline.engine.waiting import Waiting
from paceline.errors import NotFiniteError
from paceline.lengths.base import UnreadPrompt

_FILE_SECONDS = 0.01  # of waiting for a file while nothing else can be done, until new requests are looked at


@dataclass
class Scheduler:
    """Runs the prefill of sequences and decides when each begins and leaves.

    slots: gives each sequence its slot.
    chunks: decides what is prefilled next.
    prefilling: sequences in prefill, in the order in which they began. running: the live rows, in their order.
    preempted: sequences that had a slot and gave way, in the order in which they get one again (``_resumes``).
    in_flight: upper bound of tokens that a row has gained on the device, but not yet on the host.
    final, watched: see ``Engine.expect``.
    answers: lengths of recent answers.
    preemptions: how often sequences gave way. recomputed_tokens: tokens that were therefore read again.
    """

    batch: Batch
    parts: Speculation
    slots: SlotAllocator
    chunks: PrefillChunker
    waiting: Waiting[Sequence] = field(default_factory=Waiting)
    preempted: list[Sequence] = field(default_factory=list)
    prefilling: list[Sequence] = field(default_factory=list)
    running: list[Sequence] = field(default_factory=list)
    in_flight: int = 0
    final: bool = False
    watched: bool = True
    answers: AnswerLengths = field(default_factory=AnswerLengths)
    preemptions: int = 0
    recomputed_tokens: int = 0

    @property
    def draining(self) -> bool:
        """Whether the decoding rows are the last ones."""
        return self.final and not (self.waiting or self.preempted or self.prefilling)

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.preempted or self.prefilling or self.running)

    @property
    def num_waiting(self) -> int:
        """Sequences without a slot."""
        return len(self.waiting) + len(self.preempted)

    @property
    def unfinished(self) -> Iterator[Sequence]:
        """The sequences of all queues."""
        return chain(self.waiting, self.preempted, self.prefilling, self.running)

    @property
    def in_use(self) -> list[Sequence]:
        """The sequences that have a slot."""
        return [*self.running, *self.prefilling]

    def admit(self) -> list[Sequence]:
        """Give free rows to waiting sequences, feed a chunk of prompts, and let finished prefills start to decode.

        Returns the sequences that have ended (with their prompt, by their time limit, or because they failed to start)
        or gained their first token.
        """
        ended = self.overdue(time.monotonic())
        self._reserve()
        while (limit := self.admissible) > 0:
            ended += self._begin([self.preempted.pop(0)] if self._resumes else self.waiting.turn(limit))
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
        if self._resumes:
            return self.slots.num_free_for(self.preempted[0])
        return self.slots.num_free_for(self.waiting.first) if self.waiting else 0

    @property
    def _resumes(self) -> bool:
        """Whether a preempted sequence is the next to get a slot: before those that wait, but for more urgent ones."""
        if not (self.preempted and self.waiting):
            return bool(self.preempted)
        return self.preempted[0].priority <= self.waiting.first.priority

    def describe(self) -> str:
        """Say how often sequences gave way; empty if none has."""
        if not self.preemptions:
            return ""
        return f", {self.preemptions} gave way for others, {self.recomputed_tokens} tokens were read again"

    def _reserve(self) -> None:
        """Reserve memory for the next round of each row. If it is short, the sequences of the lowest rank give way."""
        for sequence in self.slots.by_rank if self.slots.room.is_short else ():
            while sequence.slot >= 0 and not self.slots.grow(sequence, self.in_flight):
                self._preempt(self.slots.by_rank[-1])

    def _preempt(self, sequence: Sequence) -> None:
        """Let a sequence give way: it waits for a slot, and its prompt and answer so far are then read again."""
        self.slots.preempt(sequence)
        self.preempted.insert(0, sequence)  # those that gave way before it have lower ranks
        self.preemptions += 1
        self.prefilling = [other for other in self.prefilling if other is not sequence]
        self._set_running([other for other in self.running if other is not sequence])

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
        self.slots.read_back(sequence)
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
        slots, room = self.slots, self.slots.room
        rows = sum(map(room.bytes_for, lengths)) - slots.shared_bytes
        return CacheUsage(rows, slots.prefix_bytes, room.limit)

    def _rows_soon(self, begun_now: int) -> int:
        """Number of rows decoding once the sequences being started and all waiting sequences have been admitted."""
        return min(self.batch.max_rows, len(self.slots.used) + begun_now + self.num_waiting)

    def _prefill(self) -> dict[int, Tensor]:
        """Feed one chunk; none if the next round would then end after a deadline.

        Returns, by slot, the hidden states [width] at the last token of the prompts that were read to their end.
        """
        if all(sequence.waits for sequence in self.prefilling):  # for files
            if not self.running:
                self.slots.wait_for_file(_FILE_SECONDS)
            return {}
        left = self._seconds_left()
        if self.running and left < self.chunks.speed.per_pass:
            return {}
        self.chunks.awaited = self._awaited
        chosen = self.chunks.choose(self.prefilling, bool(self.running), left)
        parts = [self._until_state_stop(part) for part in chosen]
        timer = Stopwatch(self.batch.device)
        ends = self._feed(0, parts)
        for index in range(1, len(self.parts.decoders)):
            self._feed(index, parts)
        timer.stop()
        self.chunks.watch(parts, timer)
        return ends

    def _until_state_stop(self, part: PromptSlice) -> PromptSlice:
        """Return the slice up to the first of its prompt's stops, else to a multiple of the target's step if it can."""
        sequence, step = self.prefilling[part.index], self.parts.target.prefill_step
        if stops := [stop for stop in sequence.state_stops if part.start < stop <= part.stop]:
            return replace(part, stop=min(stops))
        whole = part.stop - part.stop % step
        return part if part.stop == sequence.prefill_stop or whole <= part.start else replace(part, stop=whole)

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
        return (self.watched and not self.final) or self._any_deadline

    @property
    def _begins_at_once(self) -> bool:
        """Whether the pass that ends a prompt also gives its first token: no round would run anyway.

        A round for the last token alone would read all weights again, and with draft tokens take even longer.
        """
        return not self.running and self._awaited and self.parts.target.reads_ends

    @property
    def _any_deadline(self) -> bool:
        return any(sequence.deadline < math.inf for sequence in self.unfinished)

    def _feed(self, index: int, parts: list[PromptSlice]) -> dict[int, Tensor]:
        """Feed the chunk to one decoder, but no tokens that were copied from another slot. Returns as ``_prefill``."""
        read = [
            (sequence, part.stop)
            for sequence, part in ((self.prefilling[part.index], part) for part in parts)
            if sequence.num_computed[index] < part.stop and (index == 0 or sequence.read_by_draft)
        ]
        ends = self._fill(index, [each for each in read if index > 0 or not each[0].collects(each[1])])
        self._collect([each for each in read if index == 0 and each[0].collects(each[1])])
        return ends

    def _fill(self, index: int, read: list[tuple[Sequence, int]]) -> dict[int, Tensor]:
        """Run each sequence to its stop in one pass of a decoder. Returns as ``_prefill``."""
        if not read:
            return {}
        decoder, at_once = self.parts.decoders[index], index == 0 and self._begins_at_once
        going_on = [each for each in read if not (at_once and each[0].decodes_from(each[1]))]
        ending = [each for each in read if at_once and each[0].decodes_from(each[1])]
        order = [sequence for sequence, _ in (*going_on, *ending)]
        slots, starts = [s.slot for s in order], [s.num_computed[index] for s in order]
        stops = [*(stop for _, stop in going_on), *(stop + 1 for _, stop in ending)]
        hidden = decoder.end_prompts(self.batch, slots, starts, stops, len(ending)) if ending else ()
        if not ending:
            decoder.prefill(self.batch, slots, starts, stops)
        for sequence, stop in read:
            self._count_again(index, sequence, stop)
            sequence.num_computed[index] = stop
            if index == 0 and sequence.scope.kept is not None:
                # at the end, too, where a draft model may still have to read the prompt
                wanted = stop == sequence.prefill_stop or stop in sequence.state_stops
                decoder.save_state(sequence.slot, apart=0 if wanted else STATES_APART)
        return {sequence.slot: last for (sequence, _), last in zip(ending, hidden, strict=True)}

    def _collect(self, read: list[tuple[Sequence, int]]) -> None:
        """Run each sequence to its stop in one pass of the target, and collect from the hidden states.

        States of recurrent layers are not saved: such a pass ends like a round, whose last tokens may be rejected.
        """
        if not read:
            return
        target, starts = self.parts.target, [s.num_computed[0] for s, _ in read]
        hidden = target.read(self.batch, [s.slot for s, _ in read], starts, [stop for _, stop in read])
        collect(target, list(zip((s.reading for s, _ in read), starts, hidden, strict=True)))
        for sequence, stop in read:
            self._count_again(0, sequence, stop)
            sequence.num_computed[0] = stop

    def _count_again(self, index: int, sequence: Sequence, stop: int) -> None:
        """Count the tokens up to ``stop`` that the target reads once more."""
        again = max(0, min(stop, sequence.lost_tokens) - sequence.num_computed[0]) if index == 0 else 0
        self.recomputed_tokens += again
        sequence.output.metrics.recomputed_tokens += again

    def _gain_first_tokens(self, ends: dict[int, Tensor]) -> list[Sequence]:
        """Give prompts that were read to their end their first token, without a round. Return what has changed."""
        first = [sequence for sequence in self.prefilling if sequence.slot in ends and sequence.is_prefilled]
        if not first:
            return []
        begun = {sequence.slot for sequence in first}
        self.prefilling = [sequence for sequence in self.prefilling if sequence.slot not in begun]
        self._set_running(first)
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
            self._set_running([*self.running, *joining])
        return ended

    def _end_reading(self, sequence: Sequence) -> None:
        """Keep what was collected from a prompt that was read; finish a sequence that ends with it, or with NaN."""
        if sequence.reading is not None and sequence.reading.is_nan:
            fail(sequence, NotFiniteError("results for the prompt", sequence.params.adapter), time.monotonic())
            return
        self.slots.keep_reading(sequence)
        if sequence.only_read:
            finish(sequence, "length", time.monotonic())

    def _set_running(self, sequences: list[Sequence]) -> None:
        self.running = sorted(sequences, key=lambda sequence: sequence.slot)
        self.batch.set_live([sequence.slot for sequence in self.running])

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
            self.prefilling = [sequence for sequence in self.prefilling if not sequence.output.finished]
            self._set_running([sequence for sequence in self.running if not sequence.output.finished])
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
        self.waiting.clear()
        self.preempted.clear()
        self.prefilling.clear()
        self._set_running([])
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
        if not self._any_deadline:
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
        self.waiting.keep(s for s in self.waiting if not s.output.finished)
        self.preempted = [s for s in self.preempted if not s.output.finished]
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
