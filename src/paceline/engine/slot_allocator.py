"""Gives slots to sequences: which one, what of the prompt it holds already, and what must give way in memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from paceline.core.batch import Batch, RowStart
from paceline.core.cache_budget import UNLIMITED, KVCacheBudget
from paceline.engine.prefixes import (
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


class PrefixSource(NamedTuple):
    """A slot, and how many of its first tokens a prompt can copy; (-1, 0): there is none."""

    slot: int
    tokens: int


@dataclass
class SlotAllocator:
    """The sequences that have a slot, and the cached prefixes that the free slots hold.

    A sequence keeps its slot from its first chunk to its end: the place of its keys and values in all caches, of its
    tokens and parameters in the batch, and of what drafter and policy know of it. It starts with the longest prefix of
    its prompt that any slot holds, and waits for a longer one that another sequence is about to read.

    parts: their decoders hold the caches; drafter and policy are told when sequences begin and end.
    room: memory of the caches. If it is short, a sequence starts only if its largest size fits beside the largest
        sizes of all others, so that each can finish. Free slots give way, the least recently used first.
    used: the sequences that have a slot, in the order in which they began.
    readings: by slot, what is collected from the hidden states of its text during prefill. Only the last finished
        text's is kept, because it may be far larger than the text.
    """

    batch: Batch
    parts: Speculation
    room: KVCacheBudget = UNLIMITED
    used: dict[int, Sequence] = field(default_factory=dict)
    readings: dict[int, PromptReading] = field(default_factory=dict)
    free: FreeSlotPool = field(init=False)

    def __post_init__(self) -> None:
        self.free = FreeSlotPool(self.batch.capacity)
        self.size_free_slots()

    def num_free_for(self, sequence: Sequence) -> int:
        """Number of samples like this one that there are free slots and memory for."""
        free = len(self.free.prefixes)
        if free == 0 or not self.room.is_short:
            return free
        each = self.room.bytes_for(self._max_cache_tokens(sequence))
        source = self._source_in_use(sequence)
        for decoder, copied in zip(self.parts.decoders, self._cached(source.slot, source.tokens), strict=True):
            each -= decoder.cache.shareable_bytes(copied)
        return min(free, max(0, self.room.limit - self.reserved_bytes) // max(1, each))

    @property
    def reserved_bytes(self) -> int:
        """Bytes reserved for the caches of the sequences that have a slot. What several share counts once."""
        each = sum(self.room.bytes_for(sequence.reserved_tokens) for sequence in self.used.values())
        return each - self.repeated_bytes(self.used)

    @property
    def prefix_bytes(self) -> int:
        """Bytes that only the prefixes in free slots hold."""
        repeated = self.repeated_bytes(range(self.batch.capacity)) - self.repeated_bytes(self.used)
        return sum(map(self._prefix_bytes, self.free.prefixes)) - repeated

    def repeated_bytes(self, slots: Collection[int]) -> int:
        """Return the bytes that slots share in all caches, without their first time."""
        return sum(decoder.cache.repeated_bytes(slots) for decoder in self.parts.decoders) if slots else 0

    def take(self, sequence: Sequence) -> None:
        """Give a slot to a sequence, with the part of its prompt that the slot holds."""
        sequence.reserved_tokens = self._max_cache_tokens(sequence)
        slot, cached = self._choose(sequence)
        self.free.prefixes[slot] = CachedPrefix()  # the slot is overwritten, even if the start fails
        self._resize(slot, sequence.reserved_tokens)
        self._set_row(slot, sequence)
        sequence.output.metrics.first_scheduled = time.monotonic()
        self.parts.join(slot)
        for decoder in self.parts.decoders:
            decoder.cut_row(slot, cached)
        sequence.num_computed, sequence.output.metrics.cached_tokens = self._cached(slot, cached), cached
        self._copy_reading(slot, sequence, cached)
        self.readings.pop(slot, None)
        if sequence.reading is not None:
            self.readings[slot] = sequence.reading
        del self.free.prefixes[slot]
        sequence.slot, self.used[slot] = slot, sequence

    def reuse_prefix(self, sequence: Sequence) -> None:
        """Copy the longest prefix of a prefilling prompt that any slot holds; wait for a prefix being read."""
        free = ((slot, prefix.tokens, prefix.scope) for slot, prefix in self.free.prefixes.items())
        texts, cut = chain(free, self._texts_in_use(sequence)), self._cut_for(sequence)
        source, tokens = best_source(texts, sequence.prompt, sequence.scope, cut)
        if tokens > sequence.num_computed[0]:
            self._copy(source, sequence, tokens)
        self._wait_for_common_prefix(sequence)

    def end_waits(self) -> None:
        """End the waits whose prefix has been read, or whose reader has left, until none is left to end.

        The sequences that waited copy what there is.
        """
        while ready := [sequence for sequence in self.used.values() if sequence.wait_is_over]:
            for sequence in ready:
                sequence.prefix_reader, sequence.prefix_stop = None, 0
                self.reuse_prefix(sequence)

    def keep_reading(self, sequence: Sequence) -> None:
        """Keep what was collected from a text that was read, instead of the one before."""
        if sequence.reading is not None and (kept := sequence.reading.kept()) is not None:
            reading = {other.slot: other.reading for other in self.used.values() if not other.is_prefilled}
            self.readings = {slot: each for slot, each in reading.items() if each is not None}
            self.readings[sequence.slot] = kept

    def release(self, sequence: Sequence) -> None:
        """Free the slot of a sequence; it keeps its prefix, unless that may have NaN."""
        prefix, slot = CachedPrefix(self.text(sequence), sequence.scope), sequence.slot
        if isinstance(sequence.output.error, NotFiniteError):
            prefix = CachedPrefix()
            for decoder in self.parts.decoders:
                decoder.erase_row(slot)
        elif sequence.member is not None and sequence.output.token_ids:
            answer = sequence.prompt[sequence.member.prompt_tail :] + sequence.output.token_ids
            self.parts.drafter.end(slot, sequence.member, answer)
        self.parts.leave(slot)
        self.batch.free_slot(slot, len(prefix.tokens))
        self.parts.target.set_adapter(slot, None)
        self._resize(slot, len(prefix.tokens))
        self.free.put(slot, prefix)
        del self.used[slot]

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
        for slot, prefix in self.free.prefixes.items():
            self._resize(slot, len(prefix.tokens))

    def _choose(self, sequence: Sequence) -> tuple[int, int]:
        """Choose a free slot. Return it, and how many of the prompt's tokens it holds."""
        prompt, scope = sequence.prompt, sequence.scope
        cut, common = self._cut_for(sequence), self.free.reusable_by(prompt, scope)
        reusable = {slot: cut(slot, tokens) for slot, tokens in common.items()}
        self._stop_where_others_part(sequence, max(common.values()), max(reusable.values()))
        in_use = self._source_in_use(sequence)
        slot = self.free.choose(reusable, in_use.tokens)
        if self.room.is_short:
            slot = self._make_way(slot, reusable, in_use, sequence.reserved_tokens)
        return slot, reusable[slot]

    def _source_in_use(self, sequence: Sequence) -> PrefixSource:
        """Return the slot in use that holds most of what the sequence can copy."""
        texts, cut = self._texts_in_use(sequence), self._cut_for(sequence)
        return PrefixSource(*best_source(texts, sequence.prompt, sequence.scope, cut))

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

    def _set_row(self, slot: int, sequence: Sequence) -> None:
        stop_tokens = tuple(sorted(sequence.stop_tokens))
        start = sequence.prompt, sequence.params, sequence.seed, stop_tokens, sequence.constraint, sequence.member
        self.batch.set_row(slot, RowStart(*start, sequence.deadline))
        self.parts.target.set_adapter(slot, sequence.params.adapter)

    def _max_cache_tokens(self, sequence: Sequence) -> int:
        """Return the cache positions that the sequence's row may need."""
        return self.batch.positions_for(len(sequence.prompt) + sequence.params.max_tokens)

    def _make_way(self, slot: int, reusable: dict[int, int], in_use: PrefixSource, tokens: int) -> int:
        """Empty free slots until a sequence of ``tokens`` positions fits. Return the free slot to use.

        reusable: tokens of the prompt that each free slot holds; 0 afterwards for those that are emptied.
        in_use: the slot in use that holds most of the prompt.

        The slot that holds most of the prompt goes last. If it cannot stay to be copied from, it is used itself.
        """
        source = max(reusable, key=reusable.__getitem__)
        victims = [other for other in self.free.by_use if other not in (slot, source)]

        def fits() -> bool:
            others = in_use, PrefixSource(source, 0 if source == slot else reusable[source])
            new = self._new_bytes(slot, reusable[slot], max(others, key=lambda other: other.tokens), tokens)
            return self.reserved_bytes + self.prefix_bytes + new <= self.room.limit

        while not fits() and victims:
            self._empty(victims[0])
            reusable[victims.pop(0)] = 0
        if source != slot and not fits():
            slot, source = (source, slot) if reusable[source] > reusable[slot] else (slot, source)
            self._empty(source)
            reusable[source] = 0
        if not fits():  # it shares more with the slot in use than with its own pages
            self._empty(slot)
            reusable[slot] = 0
        return slot

    def _new_bytes(self, slot: int, cached: int, source: PrefixSource, tokens: int) -> int:
        """Return the bytes that a sequence of ``tokens`` positions adds to those of a free slot's prefix.

        It keeps the prefix's first ``cached`` tokens, unless it copies more from the source, and shares whole pages.
        """
        new = self.room.bytes_for(tokens) - self._prefix_bytes(slot)
        kept, copied = self._cached(slot, cached), self._cached(source.slot, source.tokens)
        for decoder, own, other in zip(self.parts.decoders, kept, copied, strict=True):
            if other > own:
                new += decoder.cache.shared_bytes_behind(slot, 0) - decoder.cache.shareable_bytes(other)
            else:
                new += decoder.cache.shared_bytes_behind(slot, own)
        return new

    def _prefix_bytes(self, slot: int) -> int:
        return self.room.bytes_for(len(self.free.prefixes[slot].tokens))

    def _empty(self, slot: int) -> None:
        """Drop the prefix of a free slot."""
        self.free.prefixes[slot] = CachedPrefix()
        self.batch.free_slot(slot, 0)
        self._resize(slot, 0)

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
            return sequence.prompt[: sequence.num_computed[0]]
        computed = max(0, self.batch.length_of(sequence.slot) - 1)
        return [*sequence.prompt, *sequence.output.token_ids][:computed]

    def _texts_in_use(self, sequence: Sequence) -> Iterator[tuple[int, list[int], Scope]]:
        """Yield (slot, tokens in its caches, scope) of sequences that may have a common prefix with this one."""
        for slot, other in self.used.items():
            if may_share_prefix(other.prompt, sequence.prompt, sequence.scope.least):
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
        sequence.output.metrics.cached_tokens += tokens - sequence.num_computed[0]
        for index, cached in enumerate(self._cached(source, tokens)):
            if cached > sequence.num_computed[index]:
                self.parts.decoders[index].copy_row(source, sequence.slot, cached)
                sequence.num_computed[index] = cached
        self._copy_reading(source, sequence, tokens)
        if source in self.free.prefixes:
            self.free.use(self.free.prefixes[source])

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

    def check_integrity(self) -> None:
        """Raise AssertionError unless slots, prefixes and reserved memory agree."""
        assert sorted([*self.used, *self.free.prefixes]) == list(range(self.batch.capacity)), (
            "used and free slots are not all slots"
        )
        lengths = self.batch.length.tolist()
        for slot, prefix in self.free.prefixes.items():
            assert not prefix.tokens or lengths[slot] > len(prefix.tokens), (
                f"slot {slot}: a round would overwrite its prefix"
            )
        for decoder in self.parts.decoders:
            decoder.cache.check_integrity()
        if not self.room.is_short:
            return
        sizes = {slot: sequence.reserved_tokens for slot, sequence in self.used.items()}
        sizes |= {slot: len(prefix.tokens) for slot, prefix in self.free.prefixes.items()}
        for decoder in self.parts.decoders:
            assert {slot: decoder.capacity_of(slot) for slot in sizes} == sizes, "slot sizes and reservations differ"
        assert self.reserved_bytes + self.prefix_bytes <= self.room.limit, "reservations exceed the memory limit"
