"""Guesses copied from text: LLMA (2304.04487) over reference documents, prompt lookup over the row's own tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.batch import Batch, Draft, Verdict
from paceline.decoder import Decoder
from paceline.drafters.lookup import LONGEST_SUFFIX, make_lookup
from paceline.params import MAX_SPECULATION_LENGTH

__all__ = ["LONGEST_SUFFIX", "STRONG", "NgramDrafter"]

# Tokens of context that agree, n, growing by one with each right guess -> n^2 / (n^2 + 8): a score between 0 and 1.
# What it is worth, the rounds tell (``reliability``).
_CONFIDENCE = [
    [n**2 / (n**2 + 8) for n in range(matched, matched + MAX_SPECULATION_LENGTH)]
    for matched in range(LONGEST_SUFFIX + 1)
]
STRONG = _CONFIDENCE[LONGEST_SUFFIX][0]  # of the first guess after the longest match


class NgramDrafter:
    """Finds the longest suffix (5 down to 1 tokens) of each row elsewhere and guesses what followed it there.

    Looks in the row's own tokens and in ``documents``; the longer match wins, then the row's own, then the later one.
    A match whose continuation ends at the row's end is continued cyclically (the text repeats itself). Rows without a
    match have an empty draft.

    scored: whether guesses have a confidence; None: where the host need not wait for a device to tell.
    """

    name = "ngram"
    decoders: Sequence[Decoder] = ()

    def __init__(
        self,
        documents: Sequence[Sequence[int]] = (),
        device: torch.device | str = "cpu",
        scored: bool | None = None,
    ) -> None:
        self._lookup = make_lookup(documents, device)
        self._scored = torch.device(device).type == "cpu" if scored is None else scored

    def propose(self, batch: Batch, k: int) -> Draft:
        guesses, counts, matched = self._lookup.find(batch.tokens, batch.live_length, batch.longest, k)
        if not self._scored:
            return Draft(guesses, counts)
        return Draft(guesses, counts, confidence=[_CONFIDENCE[size] for size in matched.tolist()])

    def observe(self, batch: Batch, verdict: Verdict) -> None:
        pass
