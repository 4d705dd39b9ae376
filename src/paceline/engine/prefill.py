"""Runs chunks of prompts: one pass of each decoder over what its cache lacks."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from paceline.core.batch import Batch
from paceline.core.hardware import Stopwatch
from paceline.engine.chunks import PrefillChunker, PromptSlice
from paceline.engine.prefixes import STATES_APART
from paceline.engine.rounds.round import Speculation
from paceline.engine.scoring import collect
from paceline.engine.sequences import Sequence

Slice = tuple[Sequence, PromptSlice]  # a prompt and the tokens of it that a chunk has


class Prefill:
    """Passes over prompts.

    chunks: learns how long they take. recomputed_tokens: tokens that were read again, after their sequence gave way.
    """

    def __init__(self, batch: Batch, parts: Speculation, chunks: PrefillChunker) -> None:
        self._batch, self._parts, self._chunks = batch, parts, chunks
        self.recomputed_tokens = 0

    def run(self, prefilling: list[Sequence], chosen: list[PromptSlice], *, at_once: bool) -> dict[int, Tensor]:
        """Feed a chunk to all decoders.

        prefilling: the prompts, which ``chosen`` numbers. at_once: whether the pass that ends a prompt also gives its
        first token; a round for the last token alone would read all weights again, and with draft tokens take even
        longer.

        Returns, by slot, the hidden states [width] at the last token of the prompts that were read to their end.
        """
        chunk = [(prefilling[part.index], self._until_state_stop(prefilling[part.index], part)) for part in chosen]
        timer = Stopwatch(self._batch.device)
        ends = self._feed(0, chunk, at_once=at_once and self._parts.target.reads_ends)
        for index in range(1, len(self._parts.decoders)):
            self._feed(index, chunk)
        timer.stop()
        self._chunks.watch([part for _, part in chunk], timer)
        return ends

    def _until_state_stop(self, sequence: Sequence, part: PromptSlice) -> PromptSlice:
        """Return the slice of a prompt up to the first of its stops, else to a multiple of the target's step."""
        step = self._parts.target.prefill_step
        if stops := [stop for stop in sequence.state_stops if part.start < stop <= part.stop]:
            return replace(part, stop=min(stops))
        whole = part.stop - part.stop % step
        return part if part.stop == sequence.prefill_stop or whole <= part.start else replace(part, stop=whole)

    def _feed(self, index: int, chunk: list[Slice], *, at_once: bool = False) -> dict[int, Tensor]:
        """Feed the chunk to one decoder, but no tokens that were copied from another slot. Returns as ``run``."""
        read = [
            (sequence, part.stop)
            for sequence, part in chunk
            if sequence.num_computed[index] < part.stop and (index == 0 or sequence.read_by_draft)
        ]
        ends = self._fill(index, [each for each in read if index > 0 or not each[0].collects(each[1])], at_once=at_once)
        self._collect([each for each in read if index == 0 and each[0].collects(each[1])])
        return ends

    def _fill(self, index: int, read: list[tuple[Sequence, int]], *, at_once: bool) -> dict[int, Tensor]:
        """Run each sequence to its stop in one pass of a decoder. Returns as ``run``."""
        if not read:
            return {}
        decoder = self._parts.decoders[index]
        going_on = [each for each in read if not (at_once and each[0].decodes_from(each[1]))]
        ending = [each for each in read if at_once and each[0].decodes_from(each[1])]
        order = [sequence for sequence, _ in (*going_on, *ending)]
        slots, starts = [s.slot for s in order], [s.num_computed[index] for s in order]
        stops = [*(stop for _, stop in going_on), *(stop + 1 for _, stop in ending)]
        hidden = decoder.end_prompts(self._batch, slots, starts, stops, len(ending)) if ending else ()
        if not ending:
            decoder.prefill(self._batch, slots, starts, stops)
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
        target, starts = self._parts.target, [s.num_computed[0] for s, _ in read]
        hidden = target.read(self._batch, [s.slot for s, _ in read], starts, [stop for _, stop in read])
        collect(target, list(zip((s.reading for s, _ in read), starts, hidden, strict=True)))
        for sequence, stop in read:
            self._count_again(0, sequence, stop)
            sequence.num_computed[0] = stop

    def _count_again(self, index: int, sequence: Sequence, stop: int) -> None:
        """Count the tokens up to ``stop`` that the target reads once more."""
        again = max(0, min(stop, sequence.lost_tokens) - sequence.num_computed[0]) if index == 0 else 0
        self.recomputed_tokens += again
        sequence.output.metrics.recomputed_tokens += again
