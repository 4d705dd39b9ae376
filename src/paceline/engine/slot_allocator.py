"""Gives slots to sequences: which one, what of the prompt it holds already, and what must give way in memory."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from paceline.core.batch import Batch, RowStart
from paceline.core.cache_budget import UNLIMITED, KVCacheBudget
from paceline.engine.prefix_files import FileInReading, PrefixFiles
from paceline.engine.prefixes import (
    LEAST,
    WORTH_WAITING,
    CachedPrefix,
    FreeSlotPool,
    Scope,
    best_source,
    common_prefix_length,
    may_share_prefix,
)
from paceline.engine.rounds.round import Speculation
from paceline.engine.scoring import PromptReading
from paceline.engine.sequences import Sequence
from paceline.errors import NotFiniteError

# Tokens that a row's memory grows by at least, or by a quarter of its text: what a preempted row reads again is then
# a few times what others have gained by it.
STRETCH = 256
_GROWTH = 4


class PrefixSource(NamedTuple):
    """A slot, and how many of its first tokens a prompt can copy; (-1, 0): there is none."""

    slot: int
    tokens: int


@dataclass
class SlotAllocator:
    """The sequences that have a slot, and the cached prefixes that the free slots keep.

    At most ``batch.max_rows`` slots have a sequence; the others are free.

    A sequence keeps its slot from its first chunk to its end: the place of its keys and values in all caches, of its
    tokens and parameters in the batch, and of what drafter and policy know of it. It starts with the longest prefix of
    its prompt that any slot holds, and waits for a longer one that another sequence is about to read.

    parts: their decoders hold the caches; drafter and policy are told when sequences begin and end.
    room: memory of the caches. If it is short, each sequence has a reservation, for its text and a stretch of its
        answer, which grows with it. A sequence starts only if it and all others can grow once more. Prefixes give way
        first, the least recently used before others, then the sequences that began last (``by_rank``).
    used: the sequences that have a slot, in the order in which they got it.
    files: where prefixes are kept that give way; None: nowhere.
    readings: by slot, what is collected from the hidden states of its text during prefill. Only the last finished
        text's is kept, because it may be far larger than the text.
    """

    batch: Batch
    parts: Speculation
    room: KVCacheBudget = UNLIMITED
    files: PrefixFiles | None = None
    used: dict[int, Sequence] = field(default_factory=dict)
    readings: dict[int, PromptReading] = field(default_factory=dict)
    free: FreeSlotPool = field(init=False)

    def __post_init__(self) -> None:
        self.free = FreeSlotPool(range(self.batch.capacity), None if self.files is None else self.files.counts)
        self.size_free_slots()

    def num_free_for(self, sequence: Sequence) -> int:
        """Number of samples like this one that may begin now: of free rows, or one at a time where memory is short."""
        free = self.batch.max_rows - len(self.used)
        if free == 0 or not self.room.is_short:
            return free
        first = self._positions(sequence, len(sequence.prefill_text))
        needed = self.room.bytes_for(first) - self._shareable_bytes(self._source_in_use(sequence))
        spare = self.room.limit - self.reserved_bytes - needed
        spare -= sum(self._growth(other, other.reserved_tokens) for other in self.used.values())
        return int(spare >= 0)  # one at a time: what the next ones share depends on the slot that this one gets

    @property
    def by_rank(self) -> list[Sequence]:
        """The sequences that have a slot. Each gives way to those before it; the first to none, so that it ends."""
        return sorted(self.used.values(), key=lambda sequence: sequence.priority)

    def _positions(self, sequence: Sequence, length: int) -> int:
        """Return the cache positions to reserve when the sequence has ``length`` tokens."""
        longest = len(sequence.prompt) + sequence.params.max_tokens
        return self.batch.positions_for(min(length + max(STRETCH, length // _GROWTH), longest))

    def _growth(self, sequence: Sequence, reserved: int) -> int:
        """Return the bytes by which a reservation of ``reserved`` positions would grow next."""
        return self.room.bytes_for(self._positions(sequence, reserved)) - self.room.bytes_for(reserved)

    def grow(self, sequence: Sequence, in_flight: int) -> bool:
        """Reserve what a sequence's next round may write. Return False if there is no memory, even without prefixes.

        in_flight: tokens that it may gain in rounds that were launched.
        """
        length = self.batch.length_of(sequence.slot) + in_flight
        positions = self._positions(sequence, length)
        if sequence.reserved_tokens >= min(self.batch.positions_for(length), positions):
            return True
        more = self.room.bytes_for(positions) - self.room.bytes_for(sequence.reserved_tokens)
        while more > self._spare_bytes and self.free.prefixes:
            self._empty(self.free.by_use[0])
        if more > self._spare_bytes:
            return False
        sequence.reserved_tokens = positions
        self._resize(sequence.slot, positions)
        return True

    @property
    def reserved_bytes(self) -> int:
        """Bytes reserved for the caches of the sequences that have a slot. What several share counts once."""
        each = sum(self.room.bytes_for(sequence.reserved_tokens) for sequence in self.used.values())
        return each - self.shared_bytes

    @property
    def prefix_bytes(self) -> int:
        """Bytes that only the prefixes in free slots hold."""
        every = range(self.batch.capacity)
        shared = self._together([decoder.cache.repeated_bytes(every) for decoder in self.parts.decoders])
        return self.free.bytes - (shared - self.shared_bytes)

    @property
    def shared_bytes(self) -> int:
        """Bytes that sequences share, without their first time."""
        if not self.used:
            return 0
        return self._together([decoder.cache.repeated_bytes(self.used) for decoder in self.parts.decoders])

    def _together(self, spared: Iterable[int]) -> int:
        """Return the bytes that rows spare others by sharing, where they spare so many in each cache.

        If a draft model has a pool of pages of its own, none: no other cache can use its pages, and how many rows will
        share is not known when they begin, because its caches lag behind.
        """
        pools = sum(decoder.cache.has_pool for decoder in self.parts.decoders)
        return 0 if pools > 1 else sum(spared)

    def take(self, sequence: Sequence) -> None:
        """Give a slot to a sequence, with the part of its text that the slot holds."""
        sequence.reserved_tokens = self._positions(sequence, len(sequence.prefill_text))
        slot, cached = self._choose(sequence)
        self._forget(slot, cached)  # the slot is overwritten, even if the start fails
        self._resize(slot, sequence.reserved_tokens)
        self._set_row(slot, sequence)
        if sequence.output.metrics.first_scheduled is None:
            sequence.output.metrics.first_scheduled = time.monotonic()
        self.parts.join(slot)
        for decoder in self.parts.decoders:
            decoder.cut_row(slot, cached)
        sequence.num_computed = self._cached(slot, cached)
        sequence.note_cached(cached)
        self._copy_reading(slot, sequence, cached)
        self.readings.pop(slot, None)
        if sequence.reading is not None:
            self.readings[slot] = sequence.reading
        self.free.take(slot)
        sequence.slot, self.used[slot] = slot, sequence
        self._limit_states()

    def reuse_prefix(self, sequence: Sequence) -> None:
        """Copy the longest prefix of a prefilling prompt that any slot holds; wait for a prefix being read."""
        cut = self._cut_for(sequence)
        free = {
            slot: cut(slot, tokens)
            for slot, tokens in self.free.reusable_by(sequence.prefill_text, sequence.scope).items()
        }
        used, most = best_source(self._texts_in_use(sequence), sequence.prefill_text, sequence.scope, cut)
        source, tokens = max([(used, most), *free.items()], key=lambda each: each[1])
        if tokens > sequence.num_computed[0]:
            self._copy(source, sequence, tokens)
        self._wait_for_common_prefix(sequence)

    def read_back(self, sequence: Sequence) -> None:
        """Let a sequence wait for a file with more of its prompt than slots hold, if there is one."""
        if self.files is None or sequence.reading is not None:
            return
        file, length = self.files.find(sequence.prefill_text, sequence.scope)
        known = max(sequence.num_computed[0], sequence.prefix_stop)
        if file is not None and length - known >= sequence.scope.worth_waiting:
            sequence.prefix_reader, sequence.prefix_stop = None, 0
            sequence.prefix_file = self.files.begin_read(file, length)

    def _restore(self, sequence: Sequence, found: FileInReading) -> None:
        """Fill a sequence's slot from a file, unless that was damaged."""
        tensors, counts, decoders = found.tensors.result(), self.free.counts, self.parts.decoders
        sequence.prefix_file = None
        if tensors is None:
            return
        parts = [_part(tensors, index) for index in range(len(decoders))]
        computed = [len(found.file.tokens), *map(_computed, parts[1:])]
        if not all(
            each.is_row(part, tokens, computed[0]) for each, part, tokens in zip(decoders, parts, computed, strict=True)
        ):
            assert self.files is not None
            self.files.refuse(found.file, "its tensors have other shapes")
            return
        for decoder, part, tokens in zip(decoders, parts, computed, strict=True):
            decoder.restore_row(sequence.slot, part, min(tokens, found.length), found.length)
        sequence.note_cached(found.length - sequence.num_computed[0])
        counts.read, counts.tokens = counts.read + 1, counts.tokens + found.length - sequence.num_computed[0]
        sequence.num_computed = self._cached(sequence.slot, found.length)

    def wait_for_file(self, seconds: float) -> None:
        """Wait until a file is read that a sequence waits for, but no longer than ``seconds``."""
        files = [each.prefix_file.tensors for each in self.used.values() if each.prefix_file is not None]
        wait(files, seconds, FIRST_COMPLETED)

    def write_all(self) -> None:
        """Write all prefixes that later requests may reuse, the most recently used first."""
        for age, slot in enumerate(reversed(self.free.by_use)):
            prefix = self.free.prefixes[slot]
            if self.files is not None and self._is_worth_a_file(prefix):
                self.files.write(prefix.tokens, prefix.scope, self._tensors(slot, prefix), age)

    def describe(self) -> str:
        """Say what prefixes are kept, and what became of others; empty before there are any."""
        files = "" if self.files is None else f", {self.files.describe()}"
        return self.free.describe() + files

    def end_waits(self) -> None:
        """End the waits whose prefix has been read, or whose reader has left, until none is left to end.

        The sequences that waited copy what there is.
        """
        while ready := [sequence for sequence in self.used.values() if sequence.wait_is_over]:
            for sequence in ready:
                if (found := sequence.prefix_file) is not None:
                    self._restore(sequence, found)
                    continue
                sequence.prefix_reader, sequence.prefix_stop = None, 0
                self.reuse_prefix(sequence)

    def keep_reading(self, sequence: Sequence) -> None:
        """Keep what was collected from a text that was read, instead of the one before."""
        if sequence.reading is not None and (kept := sequence.reading.kept()) is not None:
            reading = {other.slot: other.reading for other in self.used.values() if not other.is_prefilled}
            self.readings = {slot: each for slot, each in reading.items() if each is not None}
            self.readings[sequence.slot] = kept

    def release(self, sequence: Sequence) -> None:
        """Free the slot of a sequence that has ended; it keeps its prefix, unless that may have NaN."""
        text, slot, sequence.prefix_file = self.text(sequence), sequence.slot, None
        if isinstance(sequence.output.error, NotFiniteError):
            text = []
            for decoder in self.parts.decoders:
                decoder.erase_row(slot)
        elif sequence.member is not None and sequence.output.token_ids:
            answer = sequence.prompt[sequence.member.prompt_tail :] + sequence.output.token_ids
            self.parts.drafter.end(slot, sequence.member, answer)
        self._vacate(sequence, text)

    def preempt(self, sequence: Sequence) -> None:
        """Free the slot of a sequence that goes on later. Its text is a prefix like others, which may give way."""
        text = self.text(sequence)
        self._vacate(sequence, text)
        sequence.lose_slot(len(text))

    def _vacate(self, sequence: Sequence, text: list[int]) -> None:
        """Free the slot of a sequence, which keeps ``text``."""
        prefix, slot = CachedPrefix(array("i", text), sequence.scope), sequence.slot
        prefix.has_adapter = sequence.params.adapter is not None
        self.parts.leave(slot)
        self.batch.free_slot(slot, len(prefix.tokens))
        self.parts.target.set_adapter(slot, None)
        self._resize(slot, len(prefix.tokens))
        prefix.bytes = self.room.prefix_bytes(len(prefix.tokens))
        del self.used[slot]
        self.free.put(slot, prefix)
        while self._spare_bytes < 0:  # a prefix's recurrent states count, a row's do not
            self._empty(self.free.by_use[0])
        self._limit_states()

    def clear(self) -> None:
        """Free all slots, whatever state an interrupted round has left."""
        for slot in self.used:
            self.parts.leave(slot)
        self.used.clear()
        self.forget()

    def forget(self) -> None:
        """Drop the prefixes of free slots, whose caches were overwritten."""
        self.free.forget(slot for slot in range(self.batch.capacity) if slot not in self.used)
        self.size_free_slots()

    def size_free_slots(self) -> None:
        """Resize the free slots to the prefixes that they hold."""
        for slot in self.free:
            prefix = self.free.prefixes.get(slot)
            self._resize(slot, 0 if prefix is None else len(prefix.tokens))

    def _choose(self, sequence: Sequence) -> tuple[int, int]:
        """Choose a free slot. Return it, and how many of the prompt's tokens it holds."""
        prompt, scope = sequence.prefill_text, sequence.scope
        cut, common = self._cut_for(sequence), self.free.reusable_by(prompt, scope)
        reusable = {slot: least for slot, tokens in common.items() if (least := cut(slot, tokens)) > 0}
        self._stop_where_others_part(sequence, max(common.values(), default=0), max(reusable.values(), default=0))
        in_use = self._source_in_use(sequence)
        source = max([in_use, *map(PrefixSource._make, reusable.items())], key=lambda each: each.tokens)
        needed = self.room.bytes_for(sequence.reserved_tokens)
        is_full = needed - self._shareable_bytes(source) > self._spare_bytes
        slot = self.free.choose(reusable, in_use.tokens, is_full=is_full)
        slot = self._make_way(slot, reusable, in_use, needed)
        return slot, reusable.get(slot, 0)

    def _source_in_use(self, sequence: Sequence) -> PrefixSource:
        """Return the slot in use that holds most of what the sequence can copy."""
        texts, cut = self._texts_in_use(sequence), self._cut_for(sequence)
        return PrefixSource(*best_source(texts, sequence.prefill_text, sequence.scope, cut))

    def _stop_where_others_part(self, sequence: Sequence, common: int, reusable: int) -> None:
        """Let prefill pause where the prompt parts from a text whose state was not saved there: others may part there.

        common: first tokens that a free slot's text has, too. reusable: those of them that can be copied.
        """
        if self.parts.target.cuts_anywhere:
            return
        if sequence.reading is not None:  # before the first token that is scored, where other choices may part
            sequence.state_stops.add(sequence.reading.reusable(len(sequence.prompt), None))
        in_use = best_source(self._texts_in_use(sequence), sequence.prefill_text, sequence.scope)[1]
        stop = max(common, in_use)
        stop -= stop % self.parts.target.prefill_step
        if stop - reusable >= WORTH_WAITING:
            sequence.state_stops.add(stop)

    def _set_row(self, slot: int, sequence: Sequence) -> None:
        stop_tokens = tuple(sorted(sequence.stop_tokens))
        start = sequence.prefill_text, sequence.params, sequence.seed, stop_tokens, sequence.constraint, sequence.member
        self.batch.set_row(slot, RowStart(*start, sequence.deadline, len(sequence.output.token_ids)))
        self.parts.target.set_adapter(slot, sequence.params.adapter)

    @property
    def _spare_bytes(self) -> int:
        """Bytes that neither rows nor prefixes take."""
        return self.room.limit - self.reserved_bytes - self.prefix_bytes

    def _make_way(self, slot: int, reusable: dict[int, int], in_use: PrefixSource, needed: int) -> int:
        """Drop prefixes until a sequence of ``needed`` bytes fits. Return the free slot to use.

        reusable: tokens of the prompt that each free slot holds; 0 afterwards for those that are emptied.
        in_use: the slot in use that holds most of the prompt.

        The slot that holds most of the prompt goes last. If it cannot stay to be copied from, it is used itself.
        """
        source = max(reusable, key=reusable.__getitem__, default=slot)

        def fits() -> bool:
            others = in_use, PrefixSource(source, 0 if source == slot else reusable[source])
            best = max(others, key=lambda other: other.tokens)
            return self._new_bytes(slot, reusable.get(slot, 0), best, needed) <= self._spare_bytes

        for victim in () if fits() else self.free.by_use:
            if victim not in (slot, source) and not fits():
                self._empty(victim)
                reusable[victim] = 0
        if source != slot and not fits():
            slot, source = (source, slot) if reusable[source] > reusable.get(slot, 0) else (slot, source)
            self._empty(source)
            reusable[source] = 0
        if not fits():  # it shares more with the slot in use than with its own pages
            self._empty(slot)
            reusable[slot] = 0
        return slot

    def _new_bytes(self, slot: int, cached: int, source: PrefixSource, needed: int) -> int:
        """Return the bytes that a sequence of ``needed`` bytes adds to those of a free slot's prefix.

        It keeps the prefix's first ``cached`` tokens, unless it copies more from the source, and shares whole pages.
        """
        kept = self._cached(slot, cached)
        copied = self._cached(source.slot, source.tokens) if source.tokens > cached else kept
        spared = [
            decoder.cache.shareable_bytes(other) - decoder.cache.shared_bytes_behind(slot, 0)
            if other > own
            else -decoder.cache.shared_bytes_behind(slot, own)
            for decoder, own, other in zip(self.parts.decoders, kept, copied, strict=True)
        ]
        return needed - self._bytes_of(slot) - self._together(spared)

    def _shareable_bytes(self, source: PrefixSource) -> int:
        """Return the bytes that a sequence shares which copies from a source into an empty slot."""
        copied = zip(self.parts.decoders, self._cached(source.slot, source.tokens), strict=True)
        return self._together([decoder.cache.shareable_bytes(each) for decoder, each in copied])

    def _bytes_of(self, slot: int) -> int:
        """Bytes of a free slot's prefix."""
        prefix = self.free.prefixes.get(slot)
        return 0 if prefix is None else prefix.bytes

    def _empty(self, slot: int) -> None:
        """Drop the prefix of a free slot, and its memory."""
        self._forget(slot, 0)
        self.batch.free_slot(slot, 0)
        self._resize(slot, 0)

    def _forget(self, slot: int, reused: int) -> None:
        """Forget the prefix of a free slot, of which a sequence in this slot reuses the first tokens."""
        prefix, counts = self.free.prefixes.get(slot), self.free.counts
        if reused:
            counts.reused, counts.tokens = counts.reused + 1, counts.tokens + reused
        if prefix is not None and prefix.loss(reused) >= LEAST:
            counts.dropped += 1
            if self.files is not None and self._is_worth_a_file(prefix):
                self.files.begin_write(prefix.tokens, prefix.scope, lambda: self._tensors(slot, prefix))
        self.free.drop(slot)

    def _tensors(self, slot: int, prefix: CachedPrefix) -> dict[str, Tensor]:
        """Return a copy of what all caches hold of a prefix."""
        computed = self._cached(slot, len(prefix.tokens))
        rows = [
            decoder.row(slot, tokens, computed[0])
            for decoder, tokens in zip(self.parts.decoders, computed, strict=True)
        ]
        return {f"{index}.{name}": tensor for index, row in enumerate(rows) for name, tensor in row.items()}

    def _is_worth_a_file(self, prefix: CachedPrefix) -> bool:
        """Whether a prefix is long enough. Adapters are not in the fingerprint of files."""
        return prefix.is_kept and not prefix.has_adapter and len(prefix.tokens) >= WORTH_WAITING

    def _limit_states(self) -> None:
        """Let one recurrent state be saved for each row and each slot with a text, and one more."""
        texts = len(self.used) + len(self.free.prefixes)
        self.parts.target.limit_saved_states(max(self.batch.max_rows, texts) + 1)

    def _resize(self, slot: int, positions: int) -> None:
        """Free what all caches hold of a slot behind these positions, and if memory is short, set its size."""
        for decoder in self.parts.decoders:
            if self.room.is_short:
                decoder.resize_row(slot, positions)
            else:
                decoder.cache.cut(slot, positions)

    def text(self, sequence: Sequence) -> list[int]:
        """Return the tokens of a sequence that the target's cache holds, without rejected draft tokens."""
        if not sequence.is_prefilled:
            return sequence.prefill_text[: sequence.num_computed[0]]
        computed = max(0, self.batch.length_of(sequence.slot) - 1)
        return [*sequence.prompt, *sequence.output.token_ids][:computed]

    def _texts_in_use(self, sequence: Sequence) -> Iterator[tuple[int, list[int], Scope]]:
        """Yield (slot, tokens in its caches, scope) of sequences that may have a common prefix with this one."""
        for slot, other in self.used.items():
            if may_share_prefix(other.prefill_text, sequence.prefill_text, sequence.scope.least):
                yield slot, self.text(other), other.scope

    def _cut_for(self, sequence: Sequence) -> Callable[[int, int], int]:
        """Return a function that returns how many of a slot's first tokens the sequence can copy."""
        cut, reading = self.parts.target.reusable, sequence.reading
        if reading is None:
            return cut
        return lambda slot, tokens: cut(slot, reading.reusable(tokens, self.readings.get(slot)))

    def _cached(self, slot: int, tokens: int) -> list[int]:
        """Return how many of a slot's first ``tokens`` each decoder's cache holds; the target's holds all of them."""
        drafts = self.parts.drafter.decoders
        return [tokens, *(min(tokens, decoder.num_computed(slot)) if tokens else 0 for decoder in drafts)]

    def _copy(self, source: int, sequence: Sequence, tokens: int) -> None:
        """Copy the first ``tokens`` of a slot to a prefilling sequence's, in all decoders' caches."""
        before = sequence.num_computed[0]
        sequence.note_cached(tokens - before)
        for index, cached in enumerate(self._cached(source, tokens)):
            if cached > sequence.num_computed[index]:
                self.parts.decoders[index].copy_row(source, sequence.slot, cached)
                sequence.num_computed[index] = cached
        self._copy_reading(source, sequence, tokens)
        if (prefix := self.free.prefixes.get(source)) is not None:
            self.free.use(prefix)
            self.free.counts.tokens += tokens - before
            self.free.counts.reused += before == 0

    def _copy_reading(self, source: int, sequence: Sequence, tokens: int) -> None:
        if sequence.reading is not None:
            sequence.reading.copy(tokens, self.readings.get(source))

    def _wait_for_common_prefix(self, sequence: Sequence) -> None:
        """If two prompts have a prefix that neither has read, the one that is fed first reads it for both.

        Only sequences that do not wait themselves are waited for, so there are no cycles.
        """
        for other in self.used.values():
            if other is sequence or other.waits or other.is_prefilled:
                continue
            first, second = sorted((other, sequence), key=lambda prompt: prompt.feeding_order)
            stops = first.prefill_stop, second.prefill_stop
            stop = common_prefix_length(first.prefill_text, second.prefill_text, min(stops))
            if stop < first.prefill_stop:
                stop -= stop % self.parts.target.prefill_step
            min_gain = 1 if stop == second.prefill_stop else second.scope.worth_waiting
            if second.reading is not None:
                stop = second.reading.reusable(stop, first.reading)
            gain = stop - max(second.num_computed[0], second.prefix_stop)
            already_read = second is sequence and first.prefilled >= stop  # just copied, as far as it was worth it
            if second.scope.may_copy(first.scope) and gain >= min_gain and not already_read:
                if not self.parts.target.cuts_anywhere:
                    first.state_stops.add(stop)
                second.prefix_reader, second.prefix_stop = first, stop

    def check_integrity(self) -> None:
        """Raise AssertionError unless slots, prefixes and reserved memory agree."""
        free = self.free
        assert sorted([*self.used, *free]) == list(range(self.batch.capacity)), "used and free slots are not all slots"
        assert len(self.used) <= self.batch.max_rows, "more slots in use than rows"
        sizes = {slot: len(prefix.tokens) for slot, prefix in free.prefixes.items()}
        needed = {slot: self.room.prefix_bytes(size) for slot, size in sizes.items()}
        assert {slot: prefix.bytes for slot, prefix in free.prefixes.items()} == needed, "bytes of prefixes are wrong"
        assert sum(needed.values()) == free.bytes, "bytes of prefixes are not counted"
        lengths = self.batch.length.tolist()
        for slot, size in sizes.items():
            assert lengths[slot] > size > 0, f"slot {slot}: a round would overwrite its prefix"
        for decoder in self.parts.decoders:
            decoder.cache.check_integrity()
        if not self.room.is_short:
            return
        sizes |= {slot: sequence.reserved_tokens for slot, sequence in self.used.items()}
        sizes |= dict.fromkeys(free.empty, 0)
        for decoder in self.parts.decoders:
            assert {slot: decoder.capacity_of(slot) for slot in sizes} == sizes, "slot sizes and reservations differ"
        assert self._spare_bytes >= 0, "reservations exceed the memory limit"
        assert free.empty.isdisjoint(self.parts.target.slots_with_states), "empty slots hold recurrent states"


def _part(tensors: Mapping[str, Tensor], index: int) -> dict[str, Tensor]:
    """Return the tensors of one decoder from those of a file."""
    front = f"{index}."
    return {name.removeprefix(front): tensor for name, tensor in tensors.items() if name.startswith(front)}


def _computed(part: Mapping[str, Tensor]) -> int:
    """Return for how many tokens a decoder's part has keys, whatever else is wrong with it."""
    table = part.get("table0")
    return 0 if table is None or table.dim() != 4 else table.shape[2]
