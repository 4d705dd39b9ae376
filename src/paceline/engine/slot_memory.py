"""Memory of the rows' caches: what each sequence has reserved, what prefixes take, and what rows share."""

from __future__ import annotations

from collections.abc import Iterable

from paceline.core.cache_budget import KVCacheBudget
from paceline.engine.prefixes import PrefixSource
from paceline.engine.sequences import Sequence
from paceline.engine.slot_table import SlotTable

# Tokens that a row's memory grows by at least, or by a quarter of its text: what a preempted row reads again is then
# a few times what others have gained by it.
STRETCH = 256
_GROWTH = 4


class SlotMemory:
    """Counts the bytes of slots, and sets their sizes.

    room: memory of the caches. If it is short, each sequence has a reservation, for its text and a stretch of its
        answer, which grows with it.
    """

    def __init__(self, slots: SlotTable, room: KVCacheBudget) -> None:
        self._slots, self.room = slots, room

    def positions(self, sequence: Sequence, length: int) -> int:
        """Return the cache positions to reserve when the sequence has ``length`` tokens."""
        longest = len(sequence.prompt) + sequence.params.max_tokens
        return self._slots.batch.positions_for(min(length + max(STRETCH, length // _GROWTH), longest))

    def growth(self, sequence: Sequence, reserved: int) -> int:
        """Return the bytes by which a reservation of ``reserved`` positions would grow next."""
        return self.room.bytes_for(self.positions(sequence, reserved)) - self.room.bytes_for(reserved)

    @property
    def reserved_bytes(self) -> int:
        """Bytes reserved for the caches of the sequences that have a slot. What several share counts once."""
        each = sum(self.room.bytes_for(sequence.reserved_tokens) for sequence in self._slots.used.values())
        return each - self.shared_bytes

    @property
    def prefix_bytes(self) -> int:
        """Bytes that only the prefixes in free slots hold."""
        every = range(self._slots.batch.capacity)
        shared = self._together([decoder.cache.repeated_bytes(every) for decoder in self._slots.decoders])
        return self._slots.free.bytes - (shared - self.shared_bytes)

    @property
    def shared_bytes(self) -> int:
        """Bytes that sequences share, without their first time."""
        if not self._slots.used:
            return 0
        return self._together([decoder.cache.repeated_bytes(self._slots.used) for decoder in self._slots.decoders])

    @property
    def spare_bytes(self) -> int:
        """Bytes that neither rows nor prefixes take."""
        return self.room.limit - self.reserved_bytes - self.prefix_bytes

    def shareable_bytes(self, source: PrefixSource) -> int:
        """Return the bytes that a sequence shares which copies from a source into an empty slot."""
        copied = zip(self._slots.decoders, self._slots.cached(source.slot, source.tokens), strict=True)
        return self._together([decoder.cache.shareable_bytes(each) for decoder, each in copied])

    def new_bytes(self, slot: int, cached: int, source: PrefixSource, needed: int) -> int:
        """Return the bytes that a sequence of ``needed`` bytes adds to those of a free slot's prefix.

        It keeps the prefix's first ``cached`` tokens, unless it copies more from the source, and shares whole pages.
        """
        prefix, kept = self._slots.free.prefixes.get(slot), self._slots.cached(slot, cached)
        copied = self._slots.cached(source.slot, source.tokens) if source.tokens > cached else kept
        spared = [
            decoder.cache.shareable_bytes(other) - decoder.cache.shared_bytes_behind(slot, 0)
            if other > own
            else -decoder.cache.shared_bytes_behind(slot, own)
            for decoder, own, other in zip(self._slots.decoders, kept, copied, strict=True)
        ]
        return needed - (0 if prefix is None else prefix.bytes) - self._together(spared)

    def resize(self, slot: int, positions: int) -> None:
        """Free what all caches hold of a slot behind these positions, and if memory is short, set its size."""
        for decoder in self._slots.decoders:
            if self.room.is_short:
                decoder.resize_row(slot, positions)
            else:
                decoder.cache.cut(slot, positions)

    def _together(self, spared: Iterable[int]) -> int:
        """Return the bytes that rows spare others by sharing, where they spare so many in each cache.

        If a draft model has a pool of pages of its own, none: no other cache can use its pages, and how many rows will
        share is not known when they begin, because its caches lag behind.
        """
        pools = sum(decoder.cache.has_pool for decoder in self._slots.decoders)
        return 0 if pools > 1 else sum(spared)
