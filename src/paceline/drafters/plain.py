"""No guesses: plain decoding, as a drafter."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.batch import Batch, Wish
from paceline.decoder import Decoder
from paceline.draft import Draft, Verdict


class NoDrafter:
    """Never guesses; every round is one plain decoding step."""

    name = "none"
    decoders: Sequence[Decoder] = ()

    def propose(self, batch: Batch, wish: Wish) -> Draft:
        return batch.no_guesses

    def observe(self, batch: Batch, verdict: Verdict) -> None:
        pass
