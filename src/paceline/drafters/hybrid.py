"""Guesses copied from text where they will do, else a draft model's."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.batch import Batch, Draft, Verdict
from paceline.decoder import Decoder
from paceline.drafters.model import ModelDrafter
from paceline.drafters.ngram import STRONG, NgramDrafter


class HybridDrafter:
    """Looks for copies first, which costs nothing; where they do not suffice, the draft model guesses for all rows.

    Whether they suffice the round says (``Batch.instead``); where it does not, they must follow a match of the longest
    kind in every row. (SuffixDecoding, 2411.04975, falls back on a draft model in the same way.) A round of copies
    leaves the draft model's cache behind; it reads what it missed when it is asked next.
    """

    name = "hybrid"

    def __init__(self, copying: NgramDrafter, model: ModelDrafter) -> None:
        self._copying, self._model = copying, model

    @property
    def decoders(self) -> Sequence[Decoder]:
        return self._model.decoders

    def propose(self, batch: Batch, k: int) -> Draft:
        copied = self._copying.propose(batch, k)
        asked = self._asked(batch, copied, k)
        if asked > 0:
            return self._model.propose(batch, asked)
        self._model.sit_out()
        return copied

    def _asked(self, batch: Batch, copied: Draft, k: int) -> int:
        """Guesses to ask of the draft model; 0: the copies suffice."""
        if batch.instead is not None:
            return batch.instead(batch, copied)
        return 0 if all(scores[0] >= STRONG for scores in copied.confidence or [[0.0]]) else k

    def observe(self, batch: Batch, verdict: Verdict) -> None:
        self._model.observe(batch, verdict)
