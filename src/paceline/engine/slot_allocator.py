"""Gives slots to sequences: which one, what of the prompt it holds already, and what must give way in memory."""

from __future__ import annotations

import time
from array import array

from paceline.core.batch import Batch, RowStart
from paceline.core.cache_budget import UNLIMITED, KVCacheBudget
from paceline.engine.prefix_files import PrefixFiles
from paceline.engine.prefix_reuse import PrefixReuse
from paceline.engine.prefixes import LEAST, CachedPrefix, FreeSlotPool, PrefixSource, longest_source
from paceline.engine.rounds.round import Speculation
from paceline.engine.sequences import Sequence
from paceline.engine.slot_memory import SlotMemory
from paceline.engine.slot_table import SlotTable
from paceline.engine.stored_prefixes import StoredPrefixes
from paceline.errors import NotFiniteError


class SlotAllocator(SlotTable):
    """Gives slots to sequences and takes them back; free slots keep prefixes.

    A sequence keeps its slot from its first chunk to its end: the place of its keys and values in all caches, of its
    tokens and parameters in the batch, and of what drafter and policy know of it. It starts with the longest prefix of
    its prompt that any slot holds, and waits for a longer one that another sequence is about to read.

    If memory is short, a sequence starts only if it and all others can grow once more. Prefixes give way first, the
    least recently used before others, then the sequences that began last (``by_rank``).

    parts: drafter and policy are told when sequences begin and end. room: memory of the caches.
    files: where prefixes are kept that give way; None: nowhere.
    """

    def __init__(
        self, batch: Batch, parts: Speculation, room: KVCacheBudget = UNLIMITED, files: PrefixFiles | None = None
    ) -> None:
        free = FreeSlotPool(range(batch.capacity), None if files is None else files.counts)
        super().__init__(batch, parts, {}, free)
        self.memory, self.prefixes = SlotMemory(self, room), PrefixReuse(self)
        self.stored = None if files is None else StoredPrefixes(self, files)
        self.size_free_slots()

    def num_free_for(self, sequence: Sequence) -> int:
        """Number of samples like this one that may begin now: of free rows, or one at a time where memory is short."""
        free = self.batch.max_rows - len(self.used)
        if free == 0 or not self.memory.room.is_short:
            return free
        first = self.memory.positions(sequence, len(sequence.prefill_text))
        needed = self.memory.room.bytes_for(first) - self.memory.shareable_bytes(self.prefixes.in_use(sequence))
        spare = self.memory.room.limit - self.memory.reserved_bytes - needed
        spare -= sum(self.memory.growth(other, other.reserved_tokens) for other in self.used.values())
        return int(spare >= 0)  # one at a time: what the next ones share depends on the slot that this one gets

    @property
    def by_rank(self) -> list[Sequence]:
        """The sequences that have a slot. Each gives way to those before it; the first to none, so that it ends."""
        return sorted(self.used.values(), key=lambda sequence: sequence.priority)

    def grow(self, sequence: Sequence, in_flight: int) -> bool:
        """Reserve what a sequence's next round may write. Return False if there is no memory, even without prefixes.

        in_flight: tokens that it may gain in rounds that were launched.
        """
        length = self.batch.length_of(sequence.slot) + in_flight
        positions = self.memory.positions(sequence, length)
        if sequence.reserved_tokens >= min(self.batch.positions_for(length), positions):
            return True
        more = self.memory.room.bytes_for(positions) - self.memory.room.bytes_for(sequence.reserved_tokens)
        while more > self.memory.spare_bytes and self.free.prefixes:
            self._empty(self.free.by_use[0])
        if more > self.memory.spare_bytes:
            return False
        sequence.reserved_tokens = positions
        self.memory.resize(sequence.slot, positions)
        return True

    def take(self, sequence: Sequence) -> None:
        """Give a slot to a sequence, with the part of its text that the slot holds."""
        sequence.reserved_tokens = self.memory.positions(sequence, len(sequence.prefill_text))
        slot, cached = self._choose(sequence)
        self._forget(slot, cached)  # the slot is overwritten, even if the start fails
        self.memory.resize(slot, sequence.reserved_tokens)
        self._set_row(slot, sequence)
        if sequence.output.metrics.first_scheduled is None:
            sequence.output.metrics.first_scheduled = time.monotonic()
        self.parts.join(slot)
        for decoder in self.decoders:
            decoder.cut_row(slot, cached)
        sequence.num_computed = self.cached(slot, cached)
        sequence.note_cached(cached)
        self.prefixes.begin_reading(slot, sequence, cached)
        self.free.take(slot)
        sequence.slot, self.used[slot] = slot, sequence
        self._limit_states()

    def reuse_prefix(self, sequence: Sequence) -> None:
        """Copy the longest prefix of a prompt that any slot holds; wait for a longer one being read, or in a file."""
        self.prefixes.copy_longest(sequence)
        if self.stored is not None:
            self.stored.look_for(sequence)

    def describe(self) -> str:
        """Say what prefixes are kept, and what became of others; empty before there are any."""
        files = "" if self.stored is None else f", {self.stored.files.describe()}"
        return self.free.describe() + files

    def end_waits(self) -> None:
        """End the waits whose prefix has been read, or whose reader has left, until none is left to end.

        The sequences that waited copy what there is.
        """
        while ready := [sequence for sequence in self.used.values() if sequence.wait_is_over]:
            for sequence in ready:
                if self.stored is not None and (found := sequence.prefix_file) is not None:
                    self.stored.restore(sequence, found)
                    continue
                sequence.prefix_reader, sequence.prefix_stop = None, 0
                self.prefixes.copy_longest(sequence)

    def release(self, sequence: Sequence) -> None:
        """Free the slot of a sequence that has ended; it keeps its prefix, unless that may have NaN."""
        text, slot, sequence.prefix_file = self.text(sequence), sequence.slot, None
        if isinstance(sequence.output.error, NotFiniteError):
            text = []
            for decoder in self.decoders:
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
        self.memory.resize(slot, len(prefix.tokens))
        prefix.bytes = self.memory.room.prefix_bytes(len(prefix.tokens))
        del self.used[slot]
        self.free.put(slot, prefix)
        while self.memory.spare_bytes < 0:  # a prefix's recurrent states count, a row's do not
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
            self.memory.resize(slot, 0 if prefix is None else len(prefix.tokens))

    def _choose(self, sequence: Sequence) -> tuple[int, int]:
        """Choose a free slot. Return it, and how many of the prompt's tokens it holds."""
        common = self.free.reusable_by(sequence.prefill_text, sequence.scope)
        reusable = self.prefixes.cut(sequence, common)
        self.prefixes.stop_where_others_part(
            sequence, max(common.values(), default=0), max(reusable.values(), default=0)
        )
        in_use = self.prefixes.in_use(sequence)
        source = longest_source(in_use, reusable)
        needed = self.memory.room.bytes_for(sequence.reserved_tokens)
        is_full = needed - self.memory.shareable_bytes(source) > self.memory.spare_bytes
        slot = self.free.choose(reusable, in_use.tokens, is_full=is_full)
        slot = self._make_way(slot, reusable, in_use, needed)
        return slot, reusable.get(slot, 0)

    def _set_row(self, slot: int, sequence: Sequence) -> None:
        stop_tokens = tuple(sorted(sequence.stop_tokens))
        start = sequence.prefill_text, sequence.params, sequence.seed, stop_tokens, sequence.constraint, sequence.member
        self.batch.set_row(slot, RowStart(*start, sequence.deadline, len(sequence.output.token_ids)))
        self.parts.target.set_adapter(slot, sequence.params.adapter)

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
            return self.memory.new_bytes(slot, reusable.get(slot, 0), best, needed) <= self.memory.spare_bytes

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

    def _empty(self, slot: int) -> None:
        """Drop the prefix of a free slot, and its memory."""
        self._forget(slot, 0)
        self.batch.free_slot(slot, 0)
        self.memory.resize(slot, 0)

    def _forget(self, slot: int, reused: int) -> None:
        """Forget the prefix of a free slot, of which a sequence in this slot reuses the first tokens."""
        prefix, counts = self.free.prefixes.get(slot), self.free.counts
        if reused:
            counts.reused, counts.tokens = counts.reused + 1, counts.tokens + reused
        if prefix is not None and prefix.loss(reused) >= LEAST:
            counts.dropped += 1
            if self.stored is not None:
                self.stored.begin_write(slot, prefix)
        self.free.drop(slot)

    def _limit_states(self) -> None:
        """Let one recurrent state be saved for each row and each slot with a text, and one more."""
        texts = len(self.used) + len(self.free.prefixes)
        self.parts.target.limit_saved_states(max(self.batch.max_rows, texts) + 1)

    def check_integrity(self) -> None:
        """Raise AssertionError unless slots, prefixes and reserved memory agree."""
        free = self.free
        assert sorted([*self.used, *free]) == list(range(self.batch.capacity)), "used and free slots are not all slots"
        assert len(self.used) <= self.batch.max_rows, "more slots in use than rows"
        sizes = {slot: len(prefix.tokens) for slot, prefix in free.prefixes.items()}
        needed = {slot: self.memory.room.prefix_bytes(size) for slot, size in sizes.items()}
        assert {slot: prefix.bytes for slot, prefix in free.prefixes.items()} == needed, "bytes of prefixes are wrong"
        assert sum(needed.values()) == free.bytes, "bytes of prefixes are not counted"
        lengths = self.batch.length.tolist()
        for slot, size in sizes.items():
            assert lengths[slot] > size > 0, f"slot {slot}: a round would overwrite its prefix"
        for decoder in self.decoders:
            decoder.cache.check_integrity()
        if not self.memory.room.is_short:
            return
        sizes |= {slot: sequence.reserved_tokens for slot, sequence in self.used.items()}
        sizes |= dict.fromkeys(free.empty, 0)
        for decoder in self.decoders:
            assert {slot: decoder.capacity_of(slot) for slot in sizes} == sizes, "slot sizes and reservations differ"
        assert self.memory.spare_bytes >= 0, "reservations exceed the memory limit"
        assert free.empty.isdisjoint(self.parts.target.slots_with_states), "empty slots hold recurrent states"
