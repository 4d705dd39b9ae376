"""Assigns rows: waiting sequences get rows, prompts are prefilled in chunks, finished sequences leave at once."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain

from paceline.core.batch import Batch, RowStart
from paceline.core.cache_budget import UNLIMITED, CacheUsage, KVCacheBudget
from paceline.core.draft import Verdict
from paceline.core.hardware import Stopwatch
from paceline.core.outputs import FinishReason
from paceline.engine.chunks import PrefillChunker, PromptSlice
from paceline.engine.prefixes import (
    WORTH_WAITING,
    CachedPrefix,
    FreeSlotPool,
    Scope,
    best_source,
    common_prefix_length,
    may_share_prefix,
)
from paceline.engine.round import Speculation
from paceline.engine.sequences import Sequence, end_if_outranked, finish, gain_tokens, log_failure
from paceline.engine.waiting import Waiting
from paceline.models.decoder import Decoder


@dataclass
class Scheduler:
    """Assigns rows to sequences and runs their prefill.

    Rows 0 .. len(running) - 1 decode and the next len(prefilling) are in prefill, in the order of the lists. The other
    rows are free and keep their cached prefixes. A prefilled row starts to decode by changing places with the first row
    that does not decode. A row that leaves changes places with the last row of its kind. On the CPU kernels rows change
    places without a copy of their caches. A new row starts with the longest prefix of its prompt that any row holds.

    parts: their decoders hold the rows' caches; drafter and policy are told when rows begin, move and end.
    chunks: decides what is prefilled next.
    in_flight: upper bound of tokens that a row has gained on the device, but not yet on the host.
    closed: whether no caller reads results before they end, and no requests will come before the present ones have
        ended.
    watched: whether a caller reads results before they end; other requests may come in any case.
    room: memory of the rows' caches. If it is short, a row starts only if its largest size fits beside the largest
        sizes of all rows in use, so that every row can finish. Free rows give way, the least recently used first.
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

    def __post_init__(self) -> None:
        self.free = FreeSlotPool(self.capacity)
        self._size_free_rows()

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
        """Rows that decode or are being prefilled."""
        return len(self.running) + len(self.prefilling)

    def admit(self) -> list[Sequence]:
        """Give free rows to waiting sequences, feed a chunk of prompts, and let finished prefills start to decode.

        Returns the sequences that have ended: their time is over, or they failed to start.
        """
        ended = self.overdue(time.monotonic())
        while (limit := self.admissible) > 0:
            ended += self._begin(self.waiting.turn(limit))
        if not self.prefilling:
            return ended
        self._join()
        if self.prefilling:
            self._prefill()
            self._join()
        return ended + self.overdue(time.monotonic())  # the chunk may have taken their time

    @property
    def admissible(self) -> int:
        """Number of samples of the next request that there are free rows and memory for."""
        free = self.capacity - self.num_used_rows if self.waiting else 0
        if free == 0 or not self.room.is_short:
            return free
        return min(free, self.room.max_rows(self._max_cache_tokens(self.waiting.first), self.reserved_bytes))

    def _max_cache_tokens(self, sequence: Sequence) -> int:
        """Return the cache positions that the sequence's row may need."""
        return self.batch.slots_for(len(sequence.prompt) + sequence.params.max_tokens)

    @property
    def reserved_bytes(self) -> int:
        """Bytes reserved for the caches of the rows in use."""
        return sum(self.room.bytes_for(sequence.reserved_tokens) for sequence in (*self.running, *self.prefilling))

    def _begin(self, turn: list[Sequence]) -> list[Sequence]:
        """Give rows to samples of one request. If one fails to start, only its request ends; return its samples."""
        for number, sequence in enumerate(turn):
            try:
                self._start(sequence, self._rows_soon(len(turn) - number))
            except Exception as error:  # noqa: BLE001 (any kind: it ends one request)
                log_failure(sequence, error)
                self._size_free_rows()
                self.waiting.extend(turn[number:])
                return self.drop(sequence.request_id, "error", error)
        return []

    def _start(self, sequence: Sequence, rows_soon: int) -> None:
        sequence.reserved_tokens = self._max_cache_tokens(sequence)
        row, cached = self.num_used_rows, self._choose_row(sequence)
        self.free.rows[0] = CachedPrefix()  # the row is overwritten, even if the start fails
        self._resize(row, sequence.reserved_tokens)
        self._set_row(row, sequence)
        sequence.output.metrics.first_scheduled = time.monotonic()
        sequence.read_by_draft = self.parts.policy.expects_to_draft(rows_soon)
        self.parts.join(row)
        for decoder in self.decoders:
            decoder.cut_row(row, cached)
        sequence.num_computed, sequence.output.metrics.cached_tokens = self._cached(row, cached), cached
        self.free.rows.pop(0)
        self.prefilling.append(sequence)
        self._reuse_prefix(row)

    def _choose_row(self, sequence: Sequence) -> int:
        """Move the best free row to the first free place. Return how many of the prompt's tokens it holds."""
        prompt, scope = sequence.prompt, sequence.scope
        reusable = self.free.reusable_by(prompt, scope)
        index = self.free.choose(reusable, best_source(self._texts_in_use(prompt), prompt, scope)[1])
        if self.room.is_short:
            index = self._make_way(index, reusable, sequence.reserved_tokens)
        if index > 0:
            first, length = self.num_used_rows, self.free.longest(0, index)
            for decoder in self.decoders:
                decoder.swap_rows(first, first + index, length)
            self.free.swap(0, index)
            for free in (0, index):
                self.batch.free_slot(first + free, len(self.free.rows[free].tokens))
        return reusable[index]

    def _make_way(self, index: int, reusable: list[int], tokens: int) -> int:
        """Empty free rows until a row of ``tokens`` positions fits. Return the index of the free row to use.

        The row that holds most of the prompt goes last. If it cannot stay to be copied from, it is used itself.
        """
        source = max(range(len(reusable)), key=reusable.__getitem__)
        victims = (other for other in self.free.by_use if other not in (index, source))
        spare = (
            self.room.limit
            - self.reserved_bytes
            - self.room.bytes_for(tokens)
            - self._free_row_bytes(except_index=index)
        )
        while spare < 0 and (victim := next(victims, None)) is not None:
            spare += self._empty(victim)
        if spare < 0 and source != index:
            index, source = (source, index) if reusable[source] > reusable[index] else (index, source)
            self._empty(source)
        return index

    def _free_row_bytes(self, except_index: int = -1) -> int:
        """Return the bytes that free rows hold, except the one at ``except_index``."""
        lengths = [len(prefix.tokens) for index, prefix in enumerate(self.free.rows) if index != except_index]
        return sum(map(self.room.bytes_for, lengths))

    def filled(self, scored: int) -> CacheUsage:
        """Return the memory that caches hold now. scored: bytes of texts that are scored."""
        lengths = [*self.batch.lengths[: len(self.running)], *(sequence.prefilled for sequence in self.prefilling)]
        return CacheUsage(sum(map(self.room.bytes_for, lengths)), self._free_row_bytes(), scored, self.room.limit)

    def _empty(self, index: int) -> int:
        """Drop the prefix of a free row. Return the bytes that this frees."""
        row, tokens = self.num_used_rows + index, len(self.free.rows[index].tokens)
        self.free.rows[index] = CachedPrefix()
        self.batch.free_slot(row, 0)
        self._resize(row, 0)
        return self.room.bytes_for(tokens)

    def _resize(self, row: int, positions: int) -> None:
        """Resize a row in all caches, if memory is short."""
        for decoder in self.decoders if self.room.is_short else ():
            decoder.resize_row(row, positions)

    def _size_free_rows(self) -> None:
        """Resize the free rows to the prefixes that they hold."""
        for row, prefix in enumerate(self.free.rows, self.num_used_rows):
            self._resize(row, len(prefix.tokens))

    def _texts_in_use(self, prompt: list[int]) -> Iterator[tuple[int, list[int], Scope]]:
        """Yield (row, tokens in its caches, scope) of rows in use that may have a common prefix with the prompt."""
        for row, sequence in enumerate([*self.running, *self.prefilling]):
            if may_share_prefix(sequence.prompt, prompt):
                yield row, self._text(row), sequence.scope

    def _text(self, row: int) -> list[int]:
        """Return the tokens of a row in use that the target's cache holds, without rejected draft tokens."""
        if row >= len(self.running):
            sequence = self.prefilling[row - len(self.running)]
            return sequence.prompt[: sequence.num_computed[0]]
        sequence = self.running[row]
        return [*sequence.prompt, *sequence.output.token_ids][: max(0, self.batch.lengths[row] - 1)]

    def _cached(self, row: int, tokens: int) -> list[int]:
        """Return how many of a row's first ``tokens`` each decoder's cache holds; the target's holds all of them."""
        drafts = self.decoders[1:]
        return [tokens, *(min(tokens, decoder.num_computed(row)) if tokens else 0 for decoder in drafts)]

    def _set_row(self, row: int, sequence: Sequence) -> None:
        stop_tokens = tuple(sorted(sequence.stop_tokens))
        start = sequence.prompt, sequence.params, sequence.seed, stop_tokens, sequence.constraint, sequence.member
        deadline = math.inf if sequence.deadline is None else sequence.deadline
        self.batch.set_row(row, RowStart(*start, deadline))
        self.parts.target.set_adapter(row, sequence.params.adapter)

    def _rows_soon(self, begun_now: int) -> int:
        """Number of rows decoding once the sequences being started and all waiting sequences have been admitted."""
        return min(self.capacity, self.num_used_rows + begun_now + len(self.waiting))

    def _reuse_prefix(self, row: int) -> None:
        """Copy the longest prefix of a prefilling row's prompt that any row holds; wait for a prefix being read."""
        sequence, live = self.prefilling[row - len(self.running)], self.num_used_rows
        free = ((row, prefix.tokens, prefix.scope) for row, prefix in enumerate(self.free.rows, live))
        source, tokens = best_source(chain(free, self._texts_in_use(sequence.prompt)), sequence.prompt, sequence.scope)
        if tokens > sequence.num_computed[0]:
            self._copy(source, row, tokens)
        self._wait_for_common_prefix(sequence)

    def _copy(self, source: int, row: int, tokens: int) -> None:
        """Copy the first ``tokens`` of a row to a prefilling row, in all decoders' caches."""
        sequence, live = self.prefilling[row - len(self.running)], self.num_used_rows
        sequence.output.metrics.cached_tokens += tokens - sequence.num_computed[0]
        for index, cached in enumerate(self._cached(source, tokens)):
            if cached > sequence.num_computed[index]:
                self.decoders[index].copy_row(source, row, cached)
                sequence.num_computed[index] = cached
        if source >= live:
            self.free.use(self.free.rows[source - live])

    def _wait_for_common_prefix(self, sequence: Sequence) -> None:
        """If two prompts have a prefix that neither has read, the one that is fed first reads it for both.

        Only sequences that do not wait themselves are waited for, so there are no cycles.
        """
        for other in self.prefilling:
            if other is sequence or other.waits:
                continue
            first, second = sorted((other, sequence), key=lambda prompt: prompt.feeding_order)
            stop = common_prefix_length(first.prompt, second.prompt, min(first.prefill_stop, second.prefill_stop))
            gain = stop - max(second.num_computed[0], second.prefix_stop)
            min_gain = 1 if stop == second.prefill_stop else WORTH_WAITING
            already_read = second is sequence and first.prefilled >= stop  # just copied, as far as it was worth it
            if second.scope.may_copy(first.scope) and gain >= min_gain and not already_read:
                second.prefix_reader, second.prefix_stop = first, stop

    def _end_waits(self) -> None:
        """End the waits whose prefix has been read, or whose reader has left, until none is left to end.

        The sequences that waited copy what there is.
        """
        while ready := self._rows_done_waiting():
            for row in ready:
                sequence = self.prefilling[row - len(self.running)]
                sequence.prefix_reader, sequence.prefix_stop = None, 0
                self._reuse_prefix(row)

    def _rows_done_waiting(self) -> list[int]:
        """Return the rows whose wait has ended."""
        reading = {id(sequence) for sequence in self.prefilling}
        return [
            row
            for row, sequence in enumerate(self.prefilling, len(self.running))
            if (reader := sequence.prefix_reader) is not None
            and (id(reader) not in reading or reader.prefilled >= sequence.prefix_stop)
        ]

    def _prefill(self) -> None:
        """Feed one chunk; none if the next round would then end after a deadline."""
        left = self._seconds_left()
        if self.running and left < self.chunks.speed.per_pass:
            return
        self.chunks.awaited = self._awaited
        parts = self.chunks.choose(self.prefilling, bool(self.running), left)
        timer = Stopwatch(self.batch.device)
        for index in range(len(self.decoders)):
            self._feed(index, parts)
        timer.stop()
        self.chunks.watch(parts, timer)

    def _seconds_left(self) -> float:
        """Return the seconds until the next round must begin to meet the earliest deadline of a row."""
        deadlines = [s.deadline for s in (*self.running, *self.prefilling) if s.deadline is not None]
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
        """Feed the chunk to one decoder, except tokens that it has copied from another row."""
        read = [
            (sequence, part)
            for sequence, part in ((self.prefilling[part.index], part) for part in parts)
            if sequence.num_computed[index] < part.stop and (index == 0 or sequence.read_by_draft)
        ]
        if not read:
            return
        rows = [len(self.running) + part.index for _, part in read]
        starts, stops = [sequence.num_computed[index] for sequence, _ in read], [part.stop for _, part in read]
        self.decoders[index].prefill_rows(self.batch, rows, starts, stops)
        for sequence, part in read:
            sequence.num_computed[index] = part.stop

    def _join(self) -> None:
        """Let prefilled rows start to decode, also rows that waited for the prefix of another prompt."""
        self._end_waits()
        ready = 0
        for index, sequence in enumerate(self.prefilling):
            if sequence.is_prefilled:
                self._swap(ready, index)
                ready += 1
        self.running += self.prefilling[:ready]
        del self.prefilling[:ready]
        self.batch.set_rows(len(self.running))

    def _swap(self, first: int, index: int) -> None:
        """Exchange two prefilling rows, of which the one at ``first`` holds nothing but its prompt."""
        if first == index:
            return
        start, prefilling = len(self.running), self.prefilling
        length = max(prefilling[first].num_computed[0], prefilling[index].num_computed[0])
        for decoder in self.decoders:
            decoder.swap_rows(start + first, start + index, length)
        self.batch.copy_row(start + index, start + first)
        self.parts.move(start + index, start + first)
        self.parts.join(start + index)
        prefilling[first], prefilling[index] = prefilling[index], prefilling[first]
        self._set_row(start + index, prefilling[index])

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
        """Free the rows of finished sequences among ``sequences``. Return the other samples of requests that failed.

        Sequences that cannot become one of the returned samples any more are finished, too.
        """
        for sequence in sequences:
            if sequence.rivals and not sequence.output.finished:
                end_if_outranked(sequence, self.batch.positions)
        for row in range(len(self.running) - 1, -1, -1):
            if self.running[row].output.finished:
                self.release(row)
        failed = [sequence for sequence in sequences if sequence.output.error is not None]
        return [sample for one in failed for sample in self.drop(one.request_id, "error", one.output.error)]

    def release(self, row: int) -> None:
        """Free a decoding or prefilling row, which keeps its prefix. Other rows change places with it."""
        self.parts.leave(row)
        prefix = CachedPrefix(self._text(row), [*self.running, *self.prefilling][row].scope)
        if row < len(self.running):
            last = len(self.running) - 1
            self._move(last, row, max(self.batch.lengths[last] + self.in_flight, len(prefix.tokens)))
            self.prefilling.insert(0, self.running[row])  # the free slot is now between decoding and prefilling rows
            self.running[row] = self.running[last]
            self.running.pop()
            row = last
        index, last = row - len(self.running), self.num_used_rows - 1
        self._move(last, row, max(self.prefilling[-1].num_computed[0], len(prefix.tokens)))
        self.prefilling[index] = self.prefilling[-1]
        self.prefilling.pop()
        self.batch.free_slot(last, len(prefix.tokens))
        self.parts.target.set_adapter(last, None)
        self._resize(last, len(prefix.tokens))
        self.free.put(prefix)
        self.batch.set_rows(len(self.running))

    def _move(self, source: int, destination: int, length: int) -> None:
        """Exchange a row with a free one, ``length`` positions of their caches."""
        if source == destination:
            return
        self.batch.copy_row(source, destination)
        self.parts.move(source, destination)
        for decoder in self.decoders:
            decoder.swap_rows(source, destination, length)

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
        for row in range(self.num_used_rows):
            self.parts.leave(row)
        self.waiting.clear()
        self.prefilling.clear()
        self.running.clear()
        for decoder in self.decoders:
            decoder.clear()
        self.forget()
        self.batch.set_rows(0)

    def forget(self) -> None:
        """Drop the prefixes of free rows, whose caches were overwritten."""
        self.free.forget(self.capacity - self.num_used_rows)
        self._size_free_rows()

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
        """Remove finished sequences from every queue and row."""
        self.waiting.keep(s for s in self.waiting if not s.output.finished)
        rows = [*self.running, *self.prefilling]
        for row in range(len(rows) - 1, -1, -1):
            if rows[row].output.finished:
                self.release(row)

    def check_integrity(self) -> None:
        """Raise AssertionError unless queues, rows and caches agree. Cheap: it runs whenever the engine is idle."""
        for decoder in self.decoders:
            decoder.check_integrity()
        assert self.batch.rows == len(self.running), "decoding rows and running sequences differ"
        live = self.num_used_rows
        assert live + len(self.free.rows) == self.capacity, "used and free rows do not add up to the capacity"
        self._check_room()
        lengths = self.batch.length.tolist()
        for row, sequence in enumerate([*self.running, *self.prefilling]):
            assert not sequence.output.finished, f"row {row} is finished but was not freed"
            size = len(sequence.prompt) + len(sequence.output.token_ids)
            assert self.batch.lengths[row] == size, f"row {row}: lengths disagree"
            assert 0 <= lengths[row] - size <= self.in_flight, f"row {row}: the device's length disagrees"
            text = self.batch.tokens[row, :size].tolist()
            assert text == sequence.prompt + sequence.output.token_ids, f"row {row}: tokens disagree"
        for row, prefix in enumerate(self.free.rows, live):
            assert not prefix.tokens or lengths[row] > len(prefix.tokens), (
                f"row {row}: a round would overwrite its prefix"
            )

    def _check_room(self) -> None:
        """Check that each row has the size reserved for it, or that of its prefix, and that all fit into memory."""
        if not self.room.is_short:
            return
        rows = [sequence.reserved_tokens for sequence in (*self.running, *self.prefilling)]
        rows += [len(prefix.tokens) for prefix in self.free.rows]
        for decoder in self.decoders:
            assert [decoder.capacity_of(row) for row in range(self.capacity)] == rows, (
                "row sizes and reservations differ"
            )
        assert sum(map(self.room.bytes_for, rows)) <= self.room.limit, "reservations exceed the memory limit"
