"""Who runs: waiting sequences become rows, rows that finish leave at once."""

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
from paceline.engine.chunks import Part, PrefillChunker
from paceline.engine.prefixes import WORTH_WAITING, CachedPrefix, FreeSlotPool, Scope, may_share, most_shared, shared
from paceline.engine.round import Speculation
from paceline.engine.sequences import Sequence, end_if_outranked, finish, gain_tokens, log_failure
from paceline.engine.waiting import Waiting
from paceline.models.decoder import Decoder


@dataclass
class Scheduler:
    """Rows 0 .. len(running) - 1 decode, the next len(prefilling) are being prefilled, both in the order of their rows.

    The others are free, and hold what they held. A prefilled row joins the decoding ones by changing places with the
    first that is not. When a row leaves, it changes places with the last of its kind; on the CPU kernels rows change
    places without their caches being copied. A row that begins has copied the longest beginning of its prompt that any
    row holds.

    parts: their decoders keep the rows' caches; they are told when rows begin, move and end.
    chunks: decides what is prefilled next.
    in_flight: most tokens that a row may have gained on the device without the host knowing yet.
    closed: whether nobody looks at an answer before it ends, and no request will come before those here have ended.
    watched: whether anybody looks at an answer before it ends; others may come all the same.
    room: the memory of the rows' caches. Where it is short, a row begins when all that it may come to hold fits beside
        what those in use may: so each of them can end. Free rows make way, those first that were of no use for the
        longest time.
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
        """Whether the rows that decode are the last ones."""
        return self.closed and not self.waiting and not self.prefilling

    @property
    def decoders(self) -> list[Decoder]:
        """The target's first."""
        return [self.parts.target, *self.parts.drafter.decoders]

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.prefilling or self.running)

    def admit(self) -> list[Sequence]:
        """Give free rows to those who wait, feed the next chunk of prompts, let finished prefills join the batch.

        Returns those that have ended: those whose time is over, and those that could not be begun.
        """
        ended = self.overdue(time.monotonic())
        while (most := self.may_begin) > 0:
            ended += self._begin(self.waiting.turn(most))
        if not self.prefilling:
            return ended
        self._join()
        if self.prefilling:
            self._prefill()
            self._join()
        return ended + self.overdue(time.monotonic())  # those whose time the chunk took, and those that it let join

    @property
    def may_begin(self) -> int:
        """How many answers to the request whose turn it is there are rows and memory for."""
        free = self.capacity - len(self.running) - len(self.prefilling) if self.waiting else 0
        if free == 0 or not self.room.is_short:
            return free
        return min(free, self.room.max_rows(self._reach(self.waiting.first), self.promised))

    def _reach(self, sequence: Sequence) -> int:
        """Tokens that its row may come to hold."""
        return self.batch.slots_for(len(sequence.prompt) + sequence.params.max_tokens)

    @property
    def promised(self) -> int:
        """Bytes that the rows in use may come to take."""
        return sum(self.room.bytes_for(sequence.reach) for sequence in (*self.running, *self.prefilling))

    def _begin(self, turn: list[Sequence]) -> list[Sequence]:
        """Give rows to answers of one request. Where what it asks makes that fail, it ends, alone; its answers then."""
        for number, sequence in enumerate(turn):
            try:
                self._start(sequence, self._rows_soon(len(turn) - number))
            except Exception as error:  # noqa: BLE001 (of whatever kind: it ends one request)
                log_failure(sequence, error)
                self._size_free_rows()
                self.waiting.extend(turn[number:])
                return self.drop(sequence.request_id, "error", error)
        return []

    def _start(self, sequence: Sequence, rows_soon: int) -> None:
        sequence.reach = self._reach(sequence)
        row, has = len(self.running) + len(self.prefilling), self._bring_a_row(sequence)
        self.free.rows[0] = CachedPrefix()  # whatever becomes of the sequence
        self._resize(row, sequence.reach)
        self._set_row(row, sequence)
        sequence.output.metrics.first_scheduled = time.monotonic()
        sequence.read_by_draft = self.parts.policy.expects_to_draft(rows_soon)
        self.parts.join(row)
        for decoder in self.decoders:
            decoder.cut_row(row, has)
        sequence.cached, sequence.output.metrics.cached_tokens = self._cached(row, has), has
        self.free.rows.pop(0)
        self.prefilling.append(sequence)
        self._share(row)

    def _bring_a_row(self, sequence: Sequence) -> int:
        """The free row to begin in changes places with the first one; how many of the prompt's tokens it holds."""
        prompt, scope = sequence.prompt, sequence.scope
        fits = self.free.shared_with(prompt, scope)
        place = self.free.choose(fits, most_shared(self._texts_in_use(prompt), prompt, scope)[1])
        if self.room.is_short:
            place = self._make_way(place, fits, sequence.reach)
        if place > 0:
            first, length = len(self.running) + len(self.prefilling), self.free.longest(0, place)
            for decoder in self.decoders:
                decoder.swap_rows(first, first + place, length)
            self.free.swap(0, place)
            for free in (0, place):
                self.batch.free_slot(first + free, len(self.free.rows[free].tokens))
        return fits[place]

    def _make_way(self, place: int, fits: list[int], reach: int) -> int:
        """Free rows lose what they hold until a row of ``reach`` tokens fits; the place of the free row to begin in.

        Last goes the one that has most of the prompt: where it cannot stay to be copied, it is taken as it is.
        """
        source = max(range(len(fits)), key=fits.__getitem__)
        victims = (other for other in self.free.by_use if other not in (place, source))
        spare = self.room.limit - self.promised - self.room.bytes_for(reach) - self._kept(beside=place)
        while spare < 0 and (victim := next(victims, None)) is not None:
            spare += self._empty(victim)
        if spare < 0 and source != place:
            place, source = (source, place) if fits[source] > fits[place] else (place, source)
            self._empty(source)
        return place

    def _kept(self, beside: int = -1) -> int:
        """Bytes that free rows take, the one at a place not counted."""
        held = [len(each.tokens) for place, each in enumerate(self.free.rows) if place != beside]
        return sum(map(self.room.bytes_for, held))

    def filled(self, scored: int) -> CacheUsage:
        """What caches hold now. scored: bytes beside those of rows."""
        lengths = [*self.batch.lengths[: len(self.running)], *(sequence.prefilled for sequence in self.prefilling)]
        return CacheUsage(sum(map(self.room.bytes_for, lengths)), self._kept(), scored, self.room.limit)

    def _empty(self, place: int) -> int:
        """A free row holds nothing any more: so many bytes are free."""
        row, tokens = len(self.running) + len(self.prefilling) + place, len(self.free.rows[place].tokens)
        self.free.rows[place] = CachedPrefix()
        self.batch.free_slot(row, 0)
        self._resize(row, 0)
        return self.room.bytes_for(tokens)

    def _resize(self, row: int, positions: int) -> None:
        """Where memory is short: what a row may take, of all caches."""
        for decoder in self.decoders if self.room.is_short else ():
            decoder.resize_row(row, positions)

    def _size_free_rows(self) -> None:
        """They take what they hold."""
        for row, held in enumerate(self.free.rows, len(self.running) + len(self.prefilling)):
            self._resize(row, len(held.tokens))

    def _texts_in_use(self, prompt: list[int]) -> Iterator[tuple[int, list[int], Scope]]:
        """(row, the tokens that its caches hold, whose they are) of rows that the prompt may share something with."""
        for row, sequence in enumerate([*self.running, *self.prefilling]):
            if may_share(sequence.prompt, prompt):
                yield row, self._text(row), sequence.scope

    def _text(self, row: int) -> list[int]:
        """What the target has read of a row in use, as far as it belongs to the answer."""
        if row >= len(self.running):
            sequence = self.prefilling[row - len(self.running)]
            return sequence.prompt[: sequence.cached[0]]
        sequence = self.running[row]
        return [*sequence.prompt, *sequence.output.token_ids][: max(0, self.batch.lengths[row] - 1)]

    def _cached(self, row: int, tokens: int) -> list[int]:
        """Of the first ``tokens`` of a row, which the target's cache holds, how many each decoder's does."""
        drafts = self.decoders[1:]
        return [tokens, *(min(tokens, decoder.held(row)) if tokens else 0 for decoder in drafts)]

    def _set_row(self, row: int, sequence: Sequence) -> None:
        stop_tokens = tuple(sorted(sequence.stop_tokens))
        begin = sequence.prompt, sequence.params, sequence.seed, stop_tokens, sequence.constraint, sequence.member
        deadline = math.inf if sequence.deadline is None else sequence.deadline
        self.batch.set_row(row, RowStart(*begin, deadline))

    def _rows_soon(self, begun_now: int) -> int:
        """That will decode when those have begun who do so now, and those who wait."""
        return min(self.capacity, len(self.running) + len(self.prefilling) + begun_now + len(self.waiting))

    def _share(self, row: int) -> None:
        """Copy the longest beginning of a prefilling row's prompt that any row holds; wait for what another reads."""
        sequence, live = self.prefilling[row - len(self.running)], len(self.running) + len(self.prefilling)
        free = ((live + place, held.tokens, held.scope) for place, held in enumerate(self.free.rows))
        source, tokens = most_shared(chain(free, self._texts_in_use(sequence.prompt)), sequence.prompt, sequence.scope)
        if tokens > sequence.cached[0]:
            self._copy(source, row, tokens)
        self._line_up(sequence)

    def _copy(self, source: int, row: int, tokens: int) -> None:
        """Give a prefilling row the first tokens of another."""
        sequence, live = self.prefilling[row - len(self.running)], len(self.running) + len(self.prefilling)
        sequence.output.metrics.cached_tokens += tokens - sequence.cached[0]
        for index, has in enumerate(self._cached(source, tokens)):
            if has > sequence.cached[index]:
                self.decoders[index].copy_row(source, row, has)
                sequence.cached[index] = has
        if source >= live:
            self.free.use(self.free.rows[source - live])

    def _line_up(self, sequence: Sequence) -> None:
        """Of two prompts with a beginning that neither has read, the one that is fed first reads it for both.

        Nobody who waits is waited for at that moment, so they never wait in a circle.
        """
        for other in self.prefilling:
            if other is sequence or other.waits:
                continue
            first, second = sorted((other, sequence), key=lambda each: each.feeding_order)
            until = shared(first.prompt, second.prompt, min(first.prefill_stop, second.prefill_stop))
            gain = until - max(second.cached[0], second.until)
            enough = 1 if until == second.prefill_stop else WORTH_WAITING
            in_vain = second is sequence and first.prefilled >= until  # it has just copied what was worth it
            if second.scope.may_copy(first.scope) and gain >= enough and not in_vain:
                second.follows, second.until = first, until

    def _go_on(self) -> None:
        """Those whose wait has ended, or is in vain, copy what there is; then those who have waited for these."""
        while ready := self._ready():
            for row in ready:
                sequence = self.prefilling[row - len(self.running)]
                sequence.follows, sequence.until = None, 0
                self._share(row)

    def _ready(self) -> list[int]:
        """The rows of those whose wait has ended."""
        reading = {id(sequence) for sequence in self.prefilling}
        return [
            row
            for row, sequence in enumerate(self.prefilling, len(self.running))
            if (reader := sequence.follows) is not None
            and (id(reader) not in reading or reader.prefilled >= sequence.until)
        ]

    def _prefill(self) -> None:
        """One chunk; none if the round must come first, to be in time."""
        left = self._seconds_left()
        if self.running and left < self.chunks.speed.per_pass:
            return
        self.chunks.awaited = self._awaited
        parts = self.chunks.choose(self.prefilling, bool(self.running), left)
        watch = Stopwatch(self.batch.device)
        for index in range(len(self.decoders)):
            self._feed(index, parts)
        watch.stop()
        self.chunks.watch(parts, watch)

    def _seconds_left(self) -> float:
        """Seconds until the next round must begin, for the sequence with a row whose time is over first."""
        deadlines = [s.deadline for s in (*self.running, *self.prefilling) if s.deadline is not None]
        if not deadlines:
            return math.inf
        return min(deadlines) - time.monotonic() - self._round_seconds

    @property
    def _round_seconds(self) -> float:
        """What the next round takes, as far as is known."""
        return self.chunks.rounds.expected(max(1, len(self.running)))

    @property
    def _awaited(self) -> bool:
        """Whether it matters when tokens come, and not only when all have come."""
        everybody = chain(self.waiting, self.prefilling, self.running)
        looked_at = self.watched and not self.closed
        return looked_at or any(sequence.deadline is not None for sequence in everybody)

    def _feed(self, index: int, parts: list[Part]) -> None:
        """Of a chunk one decoder reads what its cache does not hold already: it may have been copied farther."""
        fed = [(self.prefilling[part.place], part) for part in parts]
        read = [each for each in fed if each[0].cached[index] < each[1].stop and (index == 0 or each[0].read_by_draft)]
        if not read:
            return
        rows = [len(self.running) + part.place for _, part in read]
        starts, stops = [sequence.cached[index] for sequence, _ in read], [part.stop for _, part in read]
        self.decoders[index].prefill_rows(self.batch, rows, starts, stops)
        for sequence, part in read:
            sequence.cached[index] = part.stop

    def _join(self) -> None:
        """Rows that are prefilled decode from now on, and those that wait for a sibling's prompt with them."""
        self._go_on()
        ready = 0
        for place, sequence in enumerate(self.prefilling):
            if sequence.is_prefilled:
                self._swap(ready, place)
                ready += 1
        self.running += self.prefilling[:ready]
        del self.prefilling[:ready]
        self.batch.set_rows(len(self.running))

    def _swap(self, first: int, place: int) -> None:
        """Two prefilling rows change places, of which the one at ``first`` has nothing yet but its prompt."""
        if first == place:
            return
        start, prefilling = len(self.running), self.prefilling
        length = max(prefilling[first].cached[0], prefilling[place].cached[0])
        for decoder in self.decoders:
            decoder.swap_rows(start + first, start + place, length)
        self.batch.copy_row(start + place, start + first)
        self.parts.move(start + place, start + first)
        self.parts.join(start + place)
        prefilling[first], prefilling[place] = prefilling[place], prefilling[first]
        self._set_row(start + place, prefilling[place])

    def settle(self, verdict: Verdict) -> list[Sequence]:
        """Give each decoding row its new tokens, cut where the answer ends; rows that ended leave. All who gained."""
        gained = list(self.running)
        now = time.monotonic()
        for row, sequence in enumerate(gained):
            gain_tokens(sequence, verdict, row, now, at_limit=self.batch.positions)
        return gained + self.leave(gained)

    def leave(self, played: list[Sequence]) -> list[Sequence]:
        """Free the rows of those who have ended, who are some of these; returns the siblings of those who failed.

        Who cannot become one of the answers given back any more has ended, too.
        """
        for sequence in played:
            if sequence.rivals and not sequence.output.finished:
                end_if_outranked(sequence, self.batch.positions)
        for row in range(len(self.running) - 1, -1, -1):
            if self.running[row].output.finished:
                self.release(row)
        failed = [sequence for sequence in played if sequence.output.error is not None]
        return [other for one in failed for other in self.drop(one.request_id, "error", one.output.error)]

    def release(self, row: int) -> None:
        """Free a row (decoding or prefilling), which keeps what it holds; others change places with it."""
        self.parts.leave(row)
        held = CachedPrefix(self._text(row), [*self.running, *self.prefilling][row].scope)
        if row < len(self.running):
            last = len(self.running) - 1
            self._move(last, row, max(self.batch.lengths[last] + self.in_flight, len(held.tokens)))
            self.prefilling.insert(0, self.running[row])  # the hole is now at the border to the prefilling rows
            self.running[row] = self.running[last]
            self.running.pop()
            row = last
        place, last = row - len(self.running), len(self.running) + len(self.prefilling) - 1
        self._move(last, row, max(self.prefilling[-1].cached[0], len(held.tokens)))
        self.prefilling[place] = self.prefilling[-1]
        self.prefilling.pop()
        self.batch.free_slot(last, len(held.tokens))
        self._resize(last, len(held.tokens))
        self.free.put(held)
        self.batch.set_rows(len(self.running))

    def _move(self, source: int, destination: int, length: int) -> None:
        """A row changes places with one that is free, ``length`` positions of their caches."""
        if source == destination:
            return
        self.batch.copy_row(source, destination)
        self.parts.move(source, destination)
        for decoder in self.decoders:
            decoder.swap_rows(source, destination, length)

    def drop(self, request_id: str, reason: FinishReason, error: Exception | None = None) -> list[Sequence]:
        """End every unfinished sequence of a request, wherever it is; returns them."""
        dropped = [s for s in (*self.waiting, *self.prefilling, *self.running) if s.request_id == request_id]
        for sequence in dropped:
            finish(sequence, reason, time.monotonic())
            sequence.output.error = sequence.output.error or error
        self.sweep()
        return dropped

    def clear(self) -> None:
        """Drop everything at once, whatever state an interrupted round left behind."""
        for sequence in (*self.waiting, *self.prefilling, *self.running):
            if not sequence.output.finished:
                finish(sequence, "abort", time.monotonic())
        for row in range(len(self.running) + len(self.prefilling)):
            self.parts.leave(row)
        self.waiting.clear()
        self.prefilling.clear()
        self.running.clear()
        for decoder in self.decoders:
            decoder.clear()
        self.forget()
        self.batch.set_rows(0)

    def forget(self) -> None:
        """What free rows hold is of no use any more: somebody has written there."""
        self.free.forget(self.capacity - len(self.running) - len(self.prefilling))
        self._size_free_rows()

    def overdue(self, now: float) -> list[Sequence]:
        """End the sequences that gain nothing more before their deadline; what they have so far stays theirs.

        A round or chunk that cannot end in time is not begun. It would be, had it not been slow lately: so what is
        known of rounds is doubted, or no round might show that it takes less.
        """
        late = [sequence for sequence, needed in self._limited() if sequence.ends_by(now + needed)]
        for sequence in late:
            finish(sequence, "deadline", now)
        if not all(sequence.ends_by(now) for sequence in late):
            self.chunks.rounds.doubt(max(1, len(self.running)))
        if late:
            self.sweep()
        return late

    def _limited(self) -> Iterator[tuple[Sequence, float]]:
        """Sequences with a deadline, and the seconds until each gains its next token: of those begun, as far as known.

        Each prompt may be begun, whatever a chunk took before: that shows what one takes now.
        """
        if all(sequence.deadline is None for sequence in chain(self.waiting, self.prefilling, self.running)):
            return
        seconds = self._round_seconds
        for sequence in self.running:
            yield sequence, seconds
        for sequence in self.prefilling:
            begun = sequence.cached[0] > sequence.output.metrics.cached_tokens
            yield sequence, seconds + self.chunks.least_seconds(sequence.prefilled) if begun else 0.0
        for sequence in self.waiting:
            yield sequence, 0.0

    def sweep(self) -> None:
        """Remove finished sequences from every queue."""
        self.waiting.keep(s for s in self.waiting if not s.output.finished)
        rows = [*self.running, *self.prefilling]
        for row in range(len(rows) - 1, -1, -1):
            if rows[row].output.finished:
                self.release(row)

    def check_integrity(self) -> None:
        """Raise AssertionError unless queues, rows and caches agree; cheap, called by tests and whenever idle."""
        for decoder in self.decoders:
            decoder.check_integrity()
        assert self.batch.rows == len(self.running), "decoding rows and running sequences differ"
        live = len(self.running) + len(self.prefilling)
        assert live + len(self.free.rows) == self.capacity, "rows in use and free rows are not all there are"
        self._check_room()
        lengths = self.batch.length.tolist()
        for row, sequence in enumerate([*self.running, *self.prefilling]):
            assert not sequence.output.finished, f"row {row} is finished but was not freed"
            size = len(sequence.prompt) + len(sequence.output.token_ids)
            assert self.batch.lengths[row] == size, f"row {row}: lengths disagree"
            assert 0 <= lengths[row] - size <= self.in_flight, f"row {row}: the device's length disagrees"
            text = self.batch.tokens[row, :size].tolist()
            assert text == sequence.prompt + sequence.output.token_ids, f"row {row}: tokens disagree"
        for row, held in enumerate(self.free.rows, live):
            assert not held.tokens or lengths[row] > len(held.tokens), f"row {row}: what it holds would be overwritten"

    def _check_room(self) -> None:
        """Each row has what it was promised, or what it holds, and all together have no more than there is."""
        if not self.room.is_short:
            return
        rows = [sequence.reach for sequence in (*self.running, *self.prefilling)]
        rows += [len(held.tokens) for held in self.free.rows]
        for decoder in self.decoders:
            assert [decoder.room_of(row) for row in range(self.capacity)] == rows, (
                "rows are not as large as they may be"
            )
        assert sum(map(self.room.bytes_for, rows)) <= self.room.limit, "rows may take more memory than there is"
