"""Guesses copied from text: LLMA (2304.04487) over reference documents, prompt lookup over the row's own tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.batch import Batch, Draft, Verdict
from paceline.decoder import Decoder

LONGEST_SUFFIX = 5
_SEPARATOR = -1  # equals no token: a match never crosses from one document into the next


class NgramDrafter:
    """Finds the longest suffix (5 down to 1 tokens) of each row elsewhere and guesses what followed it there.

    Looks in the row's own tokens and in ``documents``; the longer match wins, then the row's own, then the later one.
    A match whose continuation ends at the row's end is continued cyclically (the text repeats itself). Rows without a
    match have an empty draft.
    """

    name = "ngram"
    decoders: Sequence[Decoder] = ()

    def __init__(self, documents: Sequence[Sequence[int]] = (), device: torch.device | str = "cpu") -> None:
        joined = [token for document in documents for token in (*document, _SEPARATOR)]
        self._documents = torch.tensor(joined, dtype=torch.int64, device=device)
        self._leads_on = (self._documents >= 0) & (self._documents.roll(-1) >= 0)  # something follows in the document

    def propose(self, batch: Batch, k: int) -> Draft:
        longest = batch.longest
        text, length = batch.tokens[: batch.rows, :longest], batch.live_length
        suffix = _suffix(text, length)
        own_score, own_place = self._search_rows(text, length, suffix)
        guesses = _continue_cyclically(text, length, own_place, k)
        counts = torch.where(own_score > 0, k, 0)
        if self._documents.numel():
            score, place = _best_match(self._documents[None], suffix, self._leads_on[None])
            copied = self._documents[
                (place[:, None] + 1 + torch.arange(k, device=place.device)).clamp(max=len(self._documents) - 1)
            ]
            better = score > own_score
            guesses = torch.where(better[:, None], copied.clamp(min=0), guesses)
            counts = torch.where(better, (copied >= 0).cumprod(1).sum(1), counts)
        if counts.device.type == "cpu":  # reading costs nothing here, verifying guesses that nobody made does
            k = int(counts.max())
        return Draft(guesses[:, :k], counts)

    @staticmethod
    def _search_rows(text: Tensor, length: Tensor, suffix: Tensor) -> tuple[Tensor, Tensor]:
        earlier = torch.arange(text.shape[1], device=text.device) < length[:, None] - 1
        return _best_match(text, suffix, earlier)

    def observe(self, batch: Batch, verdict: Verdict) -> None:
        pass


def _suffix(text: Tensor, length: Tensor) -> Tensor:
    """[B, 5]: each row's last tokens, the last one first; -2 (equal to nothing) where the row is shorter."""
    place = length[:, None] - 1 - torch.arange(LONGEST_SUFFIX, device=text.device)
    return torch.where(place >= 0, text.gather(1, place.clamp(min=0)), -2)


def _best_match(text: Tensor, suffix: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
    """Where in text [B or 1, T] the suffix [B, 5] matches longest, ending at an ``allowed`` [B or 1, T] place.

    Of several, the latest. Returns the length matched (0: none) and the place of the match's last token, each [B].
    """
    size = text.shape[1]
    matching = allowed.expand(suffix.shape[0], size)
    score = torch.zeros(matching.shape, dtype=torch.int64, device=text.device)
    for n in range(LONGEST_SUFFIX):
        shifted = torch.nn.functional.pad(text, (n, 0), value=-3)[:, :size]
        matching = matching & (shifted == suffix[:, n, None])
        score += matching
    ranked = score * size + torch.arange(size, device=text.device)
    place = ranked.argmax(1)
    return score.gather(1, place[:, None]).squeeze(1), place


def _continue_cyclically(text: Tensor, length: Tensor, place: Tensor, k: int) -> Tensor:
    """[B, k]: the tokens after ``place``; beyond the row's end the stretch from ``place`` on repeats."""
    period = (length - 1 - place).clamp(min=1)
    step = torch.arange(k, device=text.device) % period[:, None]
    return text.gather(1, (place[:, None] + 1 + step).clamp(max=text.shape[1] - 1))
