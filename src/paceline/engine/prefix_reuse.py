"""Reuse of prefixes: what a prompt copies from other slots, and which prompt reads what several have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from paceline.engine.prefixes import (
    WORTH_WAITING,
    PrefixSource,
    Scope,
    best_source,
    common_prefix_length,
    longest_source,
    may_share_prefix,
)
from paceline.engine.scoring import PromptReading
from paceline.engine.sequences import Sequence
from paceline.engine.slot_table import SlotTable


class PrefixReuse:
    """Copies prefixes between slots, and lets a prompt wait for a longer one that another is about to read."""

    def __init__(self, slots: SlotTable) -> None:
        self._slots = slots
        # By slot, what is collected from the hidden states of its text during prefill. Only the last finished text's is
        # kept, because it may be far larger than the text.
        self._readings: dict[int, PromptReading] = {}

    def copy_longest(self, sequence: Sequence) -> None:
        """Copy the longest prefix of a prefilling prompt that any slot holds; wait for a prefix being read."""
        free = self.cut(sequence, self._slots.free.reusable_by(sequence.prefill_text, sequence.scope))
        source, tokens = longest_source(self.in_use(sequence), free)
        if tokens > sequence.num_computed[0]:
            self._copy(source, sequence, tokens)
        self._wait_for_common_prefix(sequence)

    def in_use(self, sequence: Sequence) -> PrefixSource:
        """Return the slot in use that holds most of what the sequence can copy."""
        return best_source(self._texts_in_use(sequence), sequence.prefill_text, sequence.scope, self._cut_for(sequence))

    def cut(self, sequence: Sequence, common: Mapping[int, int]) -> dict[int, int]:
        """Return how many tokens the sequence can copy from slots that have its first ``common[slot]``; never 0."""
        cut = self._cut_for(sequence)
        return {slot: least for slot, tokens in common.items() if (least := cut(slot, tokens)) > 0}

    def _cut_for(self, sequence: Sequence) -> Callable[[int, int], int]:
        """Return a function that returns how many of a slot's first tokens the sequence can copy."""
        cut, reading = self._slots.parts.target.reusable, sequence.reading
        if reading is None:
            return cut
        return lambda slot, tokens: cut(slot, reading.reusable(tokens, self._readings.get(slot)))

    def stop_where_others_part(self, sequence: Sequence, common: int, reusable: int) -> None:
        """Let prefill pause where the prompt parts from a text whose state was not saved there: others may part there.

        common: first tokens that a free slot's text has, too. reusable: those of them that can be copied.
        """
        if self._slots.parts.target.cuts_anywhere:
            return
        if sequence.reading is not None:  # before the first token that is scored, where other choices may part
            sequence.state_stops.add(sequence.reading.reusable(len(sequence.prompt), None))
        in_use = best_source(self._texts_in_use(sequence), sequence.prefill_text, sequence.scope)[1]
        stop = max(common, in_use)
        stop -= stop % self._slots.parts.target.prefill_step
        if stop - reusable >= WORTH_WAITING:
            sequence.state_stops.add(stop)

    def _copy(self, source: int, sequence: Sequence, tokens: int) -> None:
        """Copy the first ``tokens`` of a slot to a prefilling sequence's, in all decoders' caches."""
        before = sequence.num_computed[0]
        sequence.note_cached(tokens - before)
        for index, cached in enumerate(self._slots.cached(source, tokens)):
            if cached > sequence.num_computed[index]:
                self._slots.decoders[index].copy_row(source, sequence.slot, cached)
                sequence.num_computed[index] = cached
        self._copy_reading(source, sequence, tokens)
        if (prefix := self._slots.free.prefixes.get(source)) is not None:
            self._slots.free.use(prefix)
            self._slots.free.counts.tokens += tokens - before
            self._slots.free.counts.reused += before == 0

    def begin_reading(self, slot: int, sequence: Sequence, cached: int) -> None:
        """Collect from a sequence that gets this slot, and whose first ``cached`` tokens the slot holds."""
        self._copy_reading(slot, sequence, cached)
        self._readings.pop(slot, None)
        if sequence.reading is not None:
            self._readings[slot] = sequence.reading

    def _copy_reading(self, source: int, sequence: Sequence, tokens: int) -> None:
        if sequence.reading is not None:
            sequence.reading.copy(tokens, self._readings.get(source))

    def keep_reading(self, sequence: Sequence) -> None:
        """Keep what was collected from a text that was read, instead of the one before."""
        if sequence.reading is not None and (kept := sequence.reading.kept()) is not None:
            reading = {other.slot: other.reading for other in self._slots.used.values() if not other.is_prefilled}
            self._readings = {slot: each for slot, each in reading.items() if each is not None}
            self._readings[sequence.slot] = kept

    def _wait_for_common_prefix(self, sequence: Sequence) -> None:
        """If two prompts have a prefix that neither has read, the one that is fed first reads it for both.

        Only sequences that do not wait themselves are waited for, so there are no cycles.
        """
        for other in self._slots.used.values():
            if other is sequence or other.waits or other.is_prefilled:
                continue
            first, second = sorted((other, sequence), key=lambda prompt: prompt.feeding_order)
            stops = first.prefill_stop, second.prefill_stop
            stop = common_prefix_length(first.prefill_text, second.prefill_text, min(stops))
            if stop < first.prefill_stop:
                stop -= stop % self._slots.parts.target.prefill_step
            min_gain = 1 if stop == second.prefill_stop else second.scope.worth_waiting
            if second.reading is not None:
                stop = second.reading.reusable(stop, first.reading)
            gain = stop - max(second.num_computed[0], second.prefix_stop)
            already_read = second is sequence and first.prefilled >= stop  # just copied, as far as it was worth it
            if second.scope.may_copy(first.scope) and gain >= min_gain and not already_read:
                if not self._slots.parts.target.cuts_anywhere:
                    first.state_stops.add(stop)
                second.prefix_reader, second.prefix_stop = first, stop

    def _texts_in_use(self, sequence: Sequence) -> Iterator[tuple[int, list[int], Scope]]:
        """Yield (slot, tokens in its caches, scope) of sequences that may have a common prefix with this one."""
        for slot, other in self._slots.used.items():
            if may_share_prefix(other.prefill_text, sequence.prefill_text, sequence.scope.least):
                yield slot, self._slots.text(other), other.scope
