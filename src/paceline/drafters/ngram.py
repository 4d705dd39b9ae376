"""Guesses copied from text: LLMA (2304.04487) over reference documents, prompt lookup over the row's own tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.batch import Batch, Draft, Verdict
from paceline.decoder import Decoder
from paceline.drafters.lookup import LONGEST_SUFFIX, DeviceLookup, HostLookup, Tokens

__all__ = ["LONGEST_SUFFIX", "NgramDrafter"]


class NgramDrafter:
    """Finds the longest suffix (5 down to 1 tokens) of each row elsewhere and guesses what followed it there.

    Looks in the row's own tokens and in ``documents``; the longer match wins, then the row's own, then the later one.
    A match whose continuation ends at the row's end is continued cyclically (the text repeats itself). Rows without a
    match have an empty draft.
    """

    name = "ngram"
    decoders: Sequence[Decoder] = ()

    def __init__(self, documents: Sequence[Sequence[int]] = (), device: torch.device | str = "cpu") -> None:
        on_host = torch.device(device).type == "cpu"
        self._lookup = HostLookup(documents) if on_host else DeviceLookup(documents, device)

    def propose(self, batch: Batch, k: int) -> Draft:
        if isinstance(self._lookup, DeviceLookup):
            there = self._lookup.find(batch.tokens[: batch.rows, : batch.longest], batch.live_length, k)
            return Draft(there[0], there[1])
        text = batch.tokens.numpy()[: batch.rows, : batch.longest]
        found = self._lookup.find(text, batch.lengths[: batch.rows], k)
        if found is None:
            return Draft.empty(batch)
        guesses, counts, matched = found
        confidence = _confidence(matched, guesses.shape[1])
        return Draft(torch.from_numpy(guesses), torch.from_numpy(counts), confidence=confidence)

    def observe(self, batch: Batch, verdict: Verdict) -> None:
        pass


def _confidence(matched: Tokens, k: int) -> NDArray[np.float64]:
    """matched [B], tokens of context that agree -> [B, k]: n^2 / (n^2 + 8), n growing by one with each right guess.

    A score between 0 and 1; what it is worth, the rounds tell (``reliability``).
    """
    context = matched[:, None] + np.arange(k)
    return context**2 / (context**2 + 8.0)
