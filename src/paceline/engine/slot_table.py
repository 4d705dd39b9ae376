"""The slots of the caches: those that sequences have, and free ones, which keep prefixes."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.batch import Batch
from paceline.engine.prefixes import FreeSlotPool
from paceline.engine.rounds.round import Speculation
from paceline.engine.sequences import Sequence
from paceline.models.decoding.decoder import Decoder


@dataclass
class SlotTable:
    """At most ``batch.max_rows`` slots have a sequence; the others are free.

    parts: their decoders hold the caches. used: the sequences that have a slot, in the order in which they got it.
    """

    batch: Batch
    parts: Speculation
    used: dict[int, Sequence]
    free: FreeSlotPool

    @property
    def decoders(self) -> list[Decoder]:
        """The decoders with caches, the target's first."""
        return self.parts.decoders

    def text(self, sequence: Sequence) -> list[int]:
        """Return the tokens of a sequence that the target's cache holds, without rejected draft tokens."""
        if not sequence.is_prefilled:
            return sequence.prefill_text[: sequence.num_computed[0]]
        computed = max(0, self.batch.length_of(sequence.slot) - 1)
        return [*sequence.prompt, *sequence.output.token_ids][:computed]

    def cached(self, slot: int, tokens: int) -> list[int]:
        """Return how many of a slot's first ``tokens`` each decoder's cache holds; the target's holds all of them."""
        drafts = self.parts.drafter.decoders
        return [tokens, *(min(tokens, decoder.num_computed(slot)) if tokens else 0 for decoder in drafts)]
