"""Assigns slots: waiting sequences get slots, prompts are prefilled in chunks, finished sequences leave at once."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain

from paceline.core.batch import Batch, RowStart
from paceline.core.cache_budget import UNLIMITED, CacheUsage, KVCacheBudget
from paceline.core.draft import Verdict
from paceline.core.hardware import Stopwatch
from paceline.core.outputs import FinishReason
from paceline.engine.chunks import PrefillChunker, PromptSlice
from paceline.engine.prefixes import (
    STATES_APART,
    WORTH_WAITING,
    CachedPrefix,
    FreeSlotPool,
    Scope,
    best_source,
    common_prefix_length,
    may_share_prefix,
)
from paceline.engine.round import Speculation
from paceline.engine.scoring import PromptReading, collect
from paceline.engine.sequences import Sequence, end_if_outranked, finish, gain_tokens, log_failure
from paceline.engine.waiting import Waiting
from paceline.models.decoder import Decoder


@dataclass
class Scheduler:
    """Assigns slots to sequences and runs their prefill.

    A sequence keeps its slot from its first chunk to its end: the place of its keys and values in all caches, of its
    tokens and parameters in the batch, and of what drafter and policy know of it. The free slots keep their cached
    prefixes. A new sequence starts with the longest prefix of its prompt that any slot holds.

    parts: their decoders hold the caches; drafter and policy are told when sequences begin and end.
    prefilling: sequences in prefill, in the order in which they began. running: the live rows, in their order.
    chunks: decides what is prefilled next.
    readings: by slot, what is collected from the hidden states of its text during prefill. Only the last finished
        text's is kept, because it may be far larger than the text.
    in_flight: upper bound of tokens that a row has gained on the device, but not yet on the host.
    closed: whether no caller reads results before they end, and no requests will come before the present ones have
        ended.
    watched: whether a caller reads results before they end; other requests may come in any case.
    room: memory of the caches. If it is short, a sequence starts only if its largest size fits beside the largest
        sizes of all others, so that each can finish. Free slots give way, the least recently used first.
    """

    batch: Batch
    parts: Speculation
    capacity: int
    chunks: PrefillChunker
    waiting: Waiting[Sequence] = field(default_factory=Waiting)
    prefilling: list[Sequence] = field(default_factory=list)
    running: list[Sequence] = field(default_factory=list)
    in_flight: int = 0
    closed: bool = False
    watched: bool = True
    room: KVCacheBudget = UNLIMITED
    free: FreeSlotPool = field(init=False)
    readings: dict[int, PromptReading] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.free = FreeSlotPool(self.capacity)
        self._size_free_slots()

    @property
    def draining(self) -> bool:
        """Whether the decoding rows are the last ones."""
        return self.closed and not self.waiting and not self.prefilling

    @property
    def decoders(self) -> list[Decoder]:
        """The decoders with per-row caches, the target's first."""
        return [self.parts.target, *self.parts.drafter.decoders]

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.prefilling or self.running)

    @property
    def num_used_rows(self) -> int:
        """Sequences that decode or are being prefilled."""
        return len(self.running) + len(self.prefilling)

    @property
    def in_use(self) -> list[Sequence]:
        """The sequences that have a slot."""
        return [*self.running, *self.prefilling]

    def admit(self) -> list[Sequence]:
        """Give free rows to waiting sequences, feed a chunk of prompts, and let finished prefills start to decode.

        Returns the sequences that have ended: with their prompt, by their time limit, or because they failed to start.
        """
        ended = self.overdue(time.monotonic())
        while (limit := self.admissible) > 0:
            ended += self._begin(self.waiting.turn(limit))
        if not self.prefilling:
            return ended
        ended += self._join()
        if self.prefilling:
            self._prefill()
            ended += self._join()
        return ended + self.overdue(time.monotonic())  # the chunk may have taken their time

    @property
    def admissible(self) -> int:
        """Number of samples of the next request that there are free slots and memory for."""
        free = self.capacity - self.num_used_rows if self.waiting else 0
        if free == 0 or not self.room.is_short:
            return free
        return min(free, self.room.max_rows(self._max_cache_tokens(self.waiting.first), self.reserved_bytes))

    def _max_cache_tokens(self, sequence: Sequence) -> int:
        """Return the cache positions that the sequence's row may need."""
        return self.batch.positions_for(len(sequence.prompt) + sequence.params.max_tokens)

    @property
    def reserved_bytes(self) -> int:
        """Bytes reserved for the caches of the sequences that have a slot."""
        return sum(self.room.bytes_for(sequence.reserved_tokens) for sequence in self.in_use)

    def _begin(self, turn: list[Sequence]) -> list[Sequence]:
        """Give slots to samples of one request. If one fails to start, only its request ends; return its samples."""
        for number, sequence in enumerate(turn):
            try:
                self._start(sequence, self._rows_soon(len(turn) - number))
            except Exception as error:  # noqa: BLE001 (any kind: it ends one request)
                log_failure(sequence, error)
                self._size_free_slots()
                self.waiting.extend(turn[number:])
                return self.drop(sequence.request_id, "error", error)
        return []

    def _start(self, sequence: Sequence, rows_soon: int) -> None:
        sequence.reserved_tokens = self._max_cache_tokens(sequence)
        slot, cached = self._choose_slot(sequence)
        self.free.prefixes[slot] = CachedPrefix()  # the slot is overwritten, even if the start fails
        self._resize(slot, sequence.reserved_tokens)
        self._set_row(slot, sequence)
        sequence.output.metrics.first_scheduled = time.monotonic()
        sequence.read_by_draft = not sequence.only_read and self.parts.policy.expects_to_draft(rows_soon)
        self.parts.join(slot)
        for decoder in self.decoders:
            decoder.cut_row(slot, cached)
        sequence.num_computed, sequence.output.metrics.cached_tokens = self._cached(slot, cached), cached
        self._copy_reading(slot, sequence, cached)
        self.readings.pop(slot, None)
        if sequence.reading is not None:
            self.readings[slot] = sequence.reading
        del self.free.prefixes[slot]
        sequence.slot = slot
        self.prefilling.append(sequence)
        self._reuse_prefix(sequence)

    def _choose_slot(self, sequence: Sequence) -> tuple[int, int]:
        """Choose a free slot. Return it, and how many of the prompt's tokens it holds."""
        prompt, scope = sequence.prompt, sequence.scope
        cut, common = self._cut_for(sequence), self.free.reusable_by(prompt, scope)
        reusable = {slot: cut(slot, tokens) for slot, tokens in common.items()}
        self._stop_where_others_part(sequence, max(common.values()), max(reusable.values()))
        slot = self.free.choose(reusable, best_source(self._texts_in_use(sequence), prompt, scope, cut)[1])
        if self.room.is_short:
            slot = self._make_way(slot, reusable, sequence.reserved_tokens)
        return slot, reusable[slot]

    def _cut_for(self, sequence: Sequence) -> Callable[[int, int], int]:
        """Return a function that returns how many of a slot's first tokens the sequence can copy."""
        cut, reading = self.parts.target.reusable, sequence.reading
        if reading is None:
            return cut
        return lambda slot, tokens: cut(slot, reading.reusable(tokens, self.readings.get(slot)))

    def _copy_reading(self, source: int, sequence: Sequence, tokens: int) -> None:
        if sequence.reading is not None:
            sequence.reading.copy(tokens, self.readings.get(source))

    def _stop_where_others_part(self, sequence: Sequence, common: int, reusable: int) -> None:
        """Let prefill pause where the prompt parts from a text whose state was not saved there: others may part there.

        common: first tokens that a free slot's text has, too. reusable: those of them that can be copied.
        """
        if self.parts.target.cuts_anywhere:
            return
        if sequence.reading is not None:  # before the first token that is scored, where other choices may part
            sequence.state_stops.add(sequence.reading.reusable(len(sequence.prompt), None))
        in_use = best_source(self._texts_in_use(sequence), sequence.prompt, sequence.scope)[1]
        if (stop := max(common, in_use)) - reusable >= WORTH_WAITING:
            sequence.state_stops.add(stop)

    def _make_way(self, slot: int, reusable: dict[int, int], tokens: int) -> int:
        """Empty free slots until a sequence of ``tokens`` positions fits. Return the free slot to use.

        The slot that holds most of the prompt goes last. If it cannot stay to be copied from, it is used itself.
        """
        source = max(reusable, key=reusable.__getitem__)
        victims = (other for other in self.free.by_use if other not in (slot, source))
        needed = self.reserved_bytes + self.room.bytes_for(tokens) + self._free_slot_bytes(without=slot)
        spare = self.room.limit - needed
        while spare < 0 and (victim := next(victims, None)) is not None:
            spare += self._empty(victim)
        if spare < 0 and source != slot:
            slot, source = (source, slot) if reusable[source] > reusable[slot] else (slot, source)
            self._empty(source)
        return slot

    def _free_slot_bytes(self, without: int = -1) -> int:
        """Return the bytes that free slots hold, except the slot ``without``."""
        lengths = [len(prefix.tokens) for slot, prefix in self.free.prefixes.items() if slot != without]
        return sum(map(self.room.bytes_for, lengths))

    @property
    def filled(self) -> CacheUsage:
        """The memory that caches hold now."""
        lengths = [*self.batch.lengths, *(sequence.prefilled for sequence in self.prefilling)]
        return CacheUsage(sum(map(self.room.bytes_for, lengths)), self._free_slot_bytes(), self.room.limit)

    def _empty(self, slot: int) -> int:
        """Drop the prefix of a free slot. Return the bytes that this frees."""
        tokens = len(self.free.prefixes[slot].tokens)
        self.free.prefixes[slot] = CachedPrefix()
        self.batch.free_slot(slot, 0)
        self._resize(slot, 0)
        return self.room.bytes_for(tokens)

    def _resize(self, slot: int, positions: int) -> None:
        """Resize a slot in all caches, if memory is short."""
        for decoder in self.decoders if self.room.is_short else ():
            decoder.resize_row(slot, positions)

    def _size_free_slots(self) -> None:
        """Resize the free slots to the prefixes that they hold."""
        for slot, prefix in self.free.prefixes.items():
            self._resize(slot, len(prefix.tokens))

    def _texts_in_use(self, sequence: Sequence) -> Iterator[tuple[int, list[int], Scope]]:
        """Yield (slot, tokens in its caches, scope) of sequences that may have a common prefix with this one."""
        for other in self.in_use:
            if may_share_prefix(other.prompt, sequence.prompt, sequence.scope.least):
                yield other.slot, self._text(other), other.scope

    def _text(self, sequence: Sequence) -> list[int]:
        """Return the tokens of a sequence that the target's cache holds, without rejected draft tokens."""
        if not sequence.is_prefilled:
            return sequence.prompt[: sequence.num_computed[0]]
        computed = max(0, self.batch.length_of(sequence.slot) - 1)
        return [*sequence.prompt, *sequence.output.token_ids][:computed]

    def _cached(self, slot: int, tokens: int) -> list[int]:
        """Return how many of a slot's first ``tokens`` each decoder's cache holds; the target's holds all of them."""
        drafts = self.decoders[1:]
        return [tokens, *(min(tokens, decoder.num_computed(slot)) if tokens else 0 for decoder in drafts)]

    def _set_row(self, slot: int, sequence: Sequence) -> None:
        stop_tokens = tuple(sorted(sequence.stop_tokens))
        start = sequence.prompt, sequence.params, sequence.seed, stop_tokens, sequence.constraint, sequence.member
        deadline = math.inf if sequence.deadline is None else sequence.deadline
        self.batch.set_row(slot, RowStart(*start, deadline))
        self.parts.target.set_adapter(slot, sequence.params.adapter)

    def _rows_soon(self, begun_now: int) -> int:
        """Number of rows decoding once the sequences being started and all waiting sequences have been admitted."""
        return min(self.capacity, self.num_used_rows + begun_now + len(self.waiting))

    def _reuse_prefix(self, sequence: Sequence) -> None:
        """Copy the longest prefix of a prefilling prompt that any slot holds; wait for a prefix being read."""
        free = ((slot, prefix.tokens, prefix.scope) for slot, prefix in self.free.prefixes.items())
        texts, cut = chain(free, self._texts_in_use(sequence)), self._cut_for(sequence)
        source, tokens = best_source(texts, sequence.prompt, sequence.scope, cut)
        if tokens > sequence.num_computed[0]:
            self._copy(source, sequence, tokens)
        self._wait_for_common_prefix(sequence)

    def _copy(self, source: int, sequence: Sequence, tokens: int) -> None:
        """Copy the first ``tokens`` of a slot to a prefilling sequence's, in all decoders' caches."""
        sequence.output.metrics.cached_tokens += tokens - sequence.num_computed[0]
        for index, cached in enumerate(self._cached(source, tokens)):
            if cached > sequence.num_computed[index]:
                self.decoders[index].copy_row(source, sequence.slot, cached)
                sequence.num_computed[index] = cached
        self._copy_reading(source, sequence, tokens)
        if source in self.free.prefixes:
            self.free.use(self.free.prefixes[source])

    def _wait_for_common_prefix(self, sequence: Sequence) -> None:
        """If two prompts have a prefix that neither has read, the one that is fed first reads it for both.

        Only sequences that do not wait themselves are waited for, so there are no cycles.
        """
        for other in self.prefilling:
            if other is sequence or other.waits:
                continue
            first, second = sorted((other, sequence), key=lambda prompt: prompt.feeding_order)
            stop = common_prefix_length(first.prompt, second.prompt, min(first.prefill_stop, second.prefill_stop))
            min_gain = 1 if stop == second.prefill_stop else second.scope.worth_waiting
            if second.reading is not None:
                stop = second.reading.reusable(stop, first.reading)
            gain = stop - max(second.num_computed[0], second.prefix_stop)
            already_read = second is sequence and first.prefilled >= stop  # just copied, as far as it was worth it
            if second.scope.may_copy(first.scope) and gain >= min_gain and not already_read:
                if not self.parts.target.cuts_anywhere:
                    first.state_stops.add(stop)
                second.prefix_reader, second.prefix_stop = first, stop

    def _end_waits(self) -> None:
        """End the waits whose prefix has been read, or whose reader has left, until none is left to end.

        The sequences that waited copy what there is.
        """
        while ready := self._done_waiting():
            for sequence in ready:
                sequence.prefix_reader, sequence.prefix_stop = None, 0
                self._reuse_prefix(sequence)

    def _done_waiting(self) -> list[Sequence]:
        """Return the sequences whose wait has ended."""
        reading = {id(sequence) for sequence in self.prefilling}
        return [
            sequence
            for sequence in self.prefilling
            if (reader := sequence.prefix_reader) is not None
            and (id(reader) not in reading or reader.prefilled >= sequence.prefix_stop)
        ]

    def _prefill(self) -> None:
        """Feed one chunk; none if the next round would then end after a deadline."""
        left = self._seconds_left()
        if self.running and left < self.chunks.speed.per_pass:
            return
        self.chunks.awaited = self._awaited
        chosen = self.chunks.choose(self.prefilling, bool(self.running), left)
        parts = [self._until_state_stop(part) for part in chosen]
        timer = Stopwatch(self.batch.device)
        for index in range(len(self.decoders)):
            self._feed(index, parts)
        timer.stop()
        self.chunks.watch(parts, timer)

    def _until_state_stop(self, part: PromptSlice) -> PromptSlice:
        """Return the slice up to the first of its prompt's stops."""
        stops = self.prefilling[part.index].state_stops
        return replace(part, stop=min((stop for stop in stops if part.start < stop <= part.stop), default=part.stop))

    def _seconds_left(self) -> float:
        """Return the seconds until the next round must begin to meet the earliest deadline of a row."""
        deadlines = [s.deadline for s in self.in_use if s.deadline is not None]
        if not deadlines:
            return math.inf
        return min(deadlines) - time.monotonic() - self._round_seconds

    @property
    def _round_seconds(self) -> float:
        """Expected seconds of the next round."""
        return self.chunks.rounds.expected(max(1, len(self.running)))

    @property
    def _awaited(self) -> bool:
        """Whether it matters when each token comes, and not only when all have come."""
        streamed = self.watched and not self.closed
        return streamed or any(s.deadline is not None for s in chain(self.waiting, self.prefilling, self.running))

    def _feed(self, index: int, parts: list[PromptSlice]) -> None:
        """Feed the chunk to one decoder, except tokens that it has copied from another slot."""
        read = [
            (sequence, part.stop)
            for sequence, part in ((self.prefilling[part.index], part) for part in parts)
            if sequence.num_computed[index] < part.stop and (index == 0 or sequence.read_by_draft)
        ]
        for collects in (False, True):
            self._run(
                index, [each for each in read if (index == 0 and each[0].collects(each[1])) == collects], collects
            )

    def _run(self, index: int, read: list[tuple[Sequence, int]], collects: bool) -> None:
        """Run each sequence to its stop in one pass of a decoder. collects: whether they collect hidden states.

        States of recurrent layers are saved only without: a pass that returns hidden states ends like a round, whose
        last tokens may be rejected.
        """
        if not read:
            return
        decoder, stops = self.decoders[index], [stop for _, stop in read]
        slots, starts = [s.slot for s, _ in read], [s.num_computed[index] for s, _ in read]
        if collects:
            hidden = decoder.read(self.batch, slots, starts, stops)
            collect(decoder, list(zip((s.reading for s, _ in read), starts, hidden, strict=True)))
        else:
            decoder.prefill(self.batch, slots, starts, stops)
        for sequence, stop in read:
            sequence.num_computed[index] = stop
            if index == 0 and sequence.scope.kept is not None and not collects:
                # at the end, too, where a draft model may still have to read the prompt
                wanted = stop == sequence.prefill_stop or stop in sequence.state_stops
                self.parts.target.save_state(sequence.slot, apart=0 if wanted else STATES_APART)

    def _join(self) -> list[Sequence]:
        """Let prefilled sequences start to decode, also those that waited for the prefix of another prompt.

        Returns those that end with their prompt.
        """
        self._end_waits()
        ready = [sequence for sequence in self.prefilling if sequence.is_prefilled]
        ended = [sequence for sequence in ready if sequence.only_read]
        for sequence in ready:
            self._keep_reading(sequence)
        for sequence in ended:
            finish(sequence, "length", time.monotonic())
        if len(ready) > len(ended):
            self.prefilling = [each for each in self.prefilling if each.only_read or not each.is_prefilled]
            self._set_running([*self.running, *(each for each in ready if not each.only_read)])
        if ended:
            self._release_finished()
        return ended

    def _keep_reading(self, sequence: Sequence) -> None:
        """Keep what was collected from a text that was read, instead of the one before."""
        if sequence.reading is not None and (kept := sequence.reading.kept()) is not None:
            reading = {other.slot: other.reading for other in self.prefilling if not other.is_prefilled}
            self.readings = {slot: each for slot, each in reading.items() if each is not None}
            self.readings[sequence.slot] = kept

    def _set_running(self, sequences: list[Sequence]) -> None:
        self.running = sorted(sequences, key=lambda sequence: sequence.slot)
        self.batch.set_live([sequence.slot for sequence in self.running])

    def process_outputs(self, verdict: Verdict) -> list[Sequence]:
        """Give each decoding row its new tokens, cut at the sample's end. Finished rows leave.

        Returns all sequences that gained tokens, and the other samples of requests that failed.
        """
        gained = list(self.running)
        now = time.monotonic()
        for row, sequence in enumerate(gained):
            gain_tokens(sequence, verdict, row, now, at_limit=self.batch.positions)
        return gained + self.leave(gained)

    def leave(self, sequences: list[Sequence]) -> list[Sequence]:
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
        failed = [sequence for sequence in sequences if sequence.output.error is not None]
        return [sample for one in failed for sample in self.drop(one.request_id, "error", one.output.error)]

    def _release_finished(self) -> None:
        """Free the slots of finished sequences; they keep their prefixes."""
        ended = [sequence for sequence in self.in_use if sequence.output.finished]
        for sequence in ended:
            prefix, slot = CachedPrefix(self._text(sequence), sequence.scope), sequence.slot
            self.parts.leave(slot)
            self.batch.free_slot(slot, len(prefix.tokens))
            self.parts.target.set_adapter(slot, None)
            self._resize(slot, len(prefix.tokens))
            self.free.put(slot, prefix)
        if ended:
            self.prefilling = [sequence for sequence in self.prefilling if not sequence.output.finished]
            self._set_running([sequence for sequence in self.running if not sequence.output.finished])

    def drop(self, request_id: str, reason: FinishReason, error: Exception | None = None) -> list[Sequence]:
        """Finish every unfinished sequence of a request, in whatever queue. Return them."""
        dropped = [s for s in (*self.waiting, *self.prefilling, *self.running) if s.request_id == request_id]
        for sequence in dropped:
            finish(sequence, reason, time.monotonic())
            sequence.output.error = sequence.output.error or error
        self.sweep()
        return dropped

    def clear(self) -> None:
        """Finish all sequences and empty all rows, whatever state an interrupted round has left."""
        for sequence in (*self.waiting, *self.prefilling, *self.running):
            if not sequence.output.finished:
                finish(sequence, "abort", time.monotonic())
        for sequence in self.in_use:
            self.parts.leave(sequence.slot)
        self.waiting.clear()
        self.prefilling.clear()
        self._set_running([])
        self.forget()

    def forget(self) -> None:
        """Drop the prefixes of free slots, whose caches were overwritten."""
        used = {sequence.slot for sequence in self.in_use}
        self.free.forget(slot for slot in range(self.capacity) if slot not in used)
        self._size_free_slots()

    def overdue(self, now: float) -> list[Sequence]:
        """Finish the sequences that cannot gain another token before their deadline; they keep their tokens.

        A round or chunk that is expected to end too late is not started. The expectation may be wrong after slow
        rounds, and no round would correct it. So the slowest recent round is then forgotten.
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
        if all(sequence.deadline is None for sequence in chain(self.waiting, self.prefilling, self.running)):
            return
        seconds = self._round_seconds
        for sequence in self.running:
            yield sequence, seconds
        for sequence in self.prefilling:
            started = sequence.num_computed[0] > sequence.output.metrics.cached_tokens
            yield sequence, seconds + self.chunks.least_seconds(sequence.prefilled) if started else 0.0
        for sequence in self.waiting:
            yield sequence, 0.0

    def sweep(self) -> None:
        """Remove finished sequences from every queue and slot."""
        self.waiting.keep(s for s in self.waiting if not s.output.finished)
        self._release_finished()

    def check_integrity(self) -> None:
        """Raise AssertionError unless queues, slots and caches agree. Cheap: it runs whenever the engine is idle."""
        slots = [sequence.slot for sequence in self.running]
        assert self.batch.slots == slots, "live rows and running sequences differ"
        assert self.batch.lengths == list(map(self.batch.length_of, slots)), "lengths of live rows disagree"
        every = [*(sequence.slot for sequence in self.in_use), *self.free.prefixes]
        assert sorted(every) == list(range(self.capacity)), "used and free slots are not all slots"
        self._check_room()
        lengths = self.batch.length.tolist()
        for sequence in self.in_use:
            slot = sequence.slot
            assert not sequence.output.finished, f"slot {slot}: its sequence is finished but was not freed"
            size = len(sequence.prompt) + len(sequence.output.token_ids)
            assert self.batch.length_of(slot) == size, f"slot {slot}: lengths disagree"
            assert 0 <= lengths[slot] - size <= self.in_flight, f"slot {slot}: the device's length disagrees"
            text = self.batch.text[slot, :size].tolist()
            assert text == sequence.prompt + sequence.output.token_ids, f"slot {slot}: tokens disagree"
        for slot, prefix in self.free.prefixes.items():
            assert not prefix.tokens or lengths[slot] > len(prefix.tokens), (
                f"slot {slot}: a round would overwrite its prefix"
            )

    def _check_room(self) -> None:
        """Check that each slot has the size reserved for it, or that of its prefix, and that all fit into memory."""
        if not self.room.is_short:
            return
        sizes = {sequence.slot: sequence.reserved_tokens for sequence in self.in_use}
        sizes |= {slot: len(prefix.tokens) for slot, prefix in self.free.prefixes.items()}
        for decoder in self.decoders:
            assert {slot: decoder.capacity_of(slot) for slot in sizes} == sizes, "slot sizes and reservations differ"
        assert sum(map(self.room.bytes_for, sizes.values())) <= self.room.limit, "reservations exceed the memory limit"
