"""Where the end of a row's text stood before, and what followed it there. B rows, T tokens of text, k guesses.

Three ways to the same answer: natively, a round's search takes some microseconds; in numpy, where there is no
extension, some hundred; on a device, nothing is read back.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.kernels import abi, native

LONGEST_SUFFIX = 5
_SEPARATOR = -1  # equals no token: a match never crosses from one document into the next

Tokens: TypeAlias = NDArray[np.int64]


class Lookup(Protocol):
    """Finds guesses for all rows of a batch."""

    def find(self, text: Tensor, length: Tensor, longest: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
        """text [B or more, T], whose row i ends at length[i] [B] -> guesses [B, <= k], counts [B], tokens matched [B].

        longest: the greatest length. Guesses beyond a row's count mean nothing, but they are tokens.
        """
        ...


def make_lookup(documents: Sequence[Sequence[int]], device: torch.device | str) -> Lookup:
    """The fastest way on that device."""
    if torch.device(device).type != "cpu":
        return DeviceLookup(documents, device)
    kernels = native.select()
    return HostLookup(documents) if kernels is None else NativeLookup(documents, kernels)


def _joined(documents: Sequence[Sequence[int]]) -> list[int]:
    return [token for document in documents for token in (*document, _SEPARATOR)]


class _Documents:
    """The documents' tokens, each document followed by a separator; where each token stands and leads on.

    tokens[i] stands at places[i] and something follows it; by token, then from first to last.
    """

    def __init__(self, documents: Sequence[Sequence[int]]) -> None:
        self.text: Tokens = np.array(_joined(documents), dtype=np.int64)
        places = np.flatnonzero((self.text[:-1] >= 0) & (self.text[1:] >= 0))
        self.places = places[np.argsort(self.text[places], kind="stable")]
        self.tokens = self.text[self.places]


class NativeLookup:
    """One call of the extension."""

    def __init__(self, documents: Sequence[Sequence[int]], kernels: native.Kernels) -> None:
        self._search, self._documents = kernels.library.pl_lookup, _Documents(documents)
        arrays = self._documents.text, self._documents.places, self._documents.tokens
        self._handed_over = abi.CDocuments(*(array.ctypes.data for array in arrays), len(self._documents.places))
        self._address = ctypes.addressof(self._handed_over)

    def find(self, text: Tensor, length: Tensor, longest: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
        """As ``Lookup`` says. Raises ValueError if a length lies beyond the text."""
        rows, width = len(length), min(longest, text.shape[1])
        guesses, counts, matched = (text.new_empty(shape) for shape in ((rows, k), rows, rows))
        given = text.data_ptr(), text.stride(0), width, length.data_ptr(), rows, k
        widest = self._search(self._address, *given, guesses.data_ptr(), counts.data_ptr(), matched.data_ptr())
        if widest < 0:
            raise ValueError(f"the rows' lengths {length.tolist()} do not lie between 0 and {width}")
        return guesses if widest == k else guesses[:, :widest], counts, matched


class HostLookup:
    """Compares only the places where the row's last token stands: the native search's twin."""

    def __init__(self, documents: Sequence[Sequence[int]]) -> None:
        self._documents = _Documents(documents)

    def find(self, text: Tensor, length: Tensor, longest: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
        """As ``Lookup`` says."""
        found = self._find(text.numpy()[: len(length), :longest], length.numpy(), k)
        guesses, counts, matched = (torch.from_numpy(array) for array in found)
        return guesses, counts, matched

    def _find(self, text: Tokens, length: Tokens, k: int) -> tuple[Tokens, Tokens, Tokens]:
        suffix = _suffixes(text, length)
        row, place = np.nonzero(text == suffix[:, :1])
        before = place < length[row] - 1
        row, place = row[before], place[before]
        matched, at = _longest(text, row, place, suffix)
        guesses = _continued(text, length, at, k)
        counts = np.where(matched > 0, k, 0)
        for number, (size, copied) in self._copied(suffix, matched, k).items():
            guesses[number, : len(copied)] = copied
            matched[number], counts[number] = size, len(copied)
        return guesses[:, : counts.max()], counts, matched

    def _copied(self, suffix: Tokens, matched: Tokens, k: int) -> dict[int, tuple[int, Tokens]]:
        """Rows that match better in a document: tokens matched, and what follows them there."""
        found: dict[int, tuple[int, Tokens]] = {}
        documents = self._documents
        if not len(documents.places):
            return found
        for row, (own, line) in enumerate(zip(matched.tolist(), suffix, strict=True)):
            first, stop = np.searchsorted(documents.tokens, [line[0], line[0] + 1])
            places = documents.places[first:stop]
            sizes, at = _longest(documents.text[None], np.zeros_like(places), places, line[None])
            if sizes[0] > own:
                copied = documents.text[at[0] + 1 : at[0] + 1 + k]
                ends = np.flatnonzero(copied < 0)
                found[row] = int(sizes[0]), copied[: ends[0]] if len(ends) else copied
        return found


def _suffixes(text: Tokens, length: Tokens) -> Tokens:
    """[B, 5]: each row's last tokens, the last one first; -2 (equal to nothing) where the row is shorter."""
    place = length[:, None] - 1 - np.arange(LONGEST_SUFFIX)
    return np.where(place >= 0, np.take_along_axis(text, np.maximum(place, 0), axis=1), -2)


def _longest(text: Tokens, row: Tokens, place: Tokens, suffix: Tokens) -> tuple[Tokens, Tokens]:
    """Of the places (row, place) where a suffix' last token stands: most tokens matched, and where; each [B].

    Of several, the latest. 0 tokens where a row has no place.
    """
    rows, size = text.shape
    agrees, score = np.ones(len(place), dtype=bool), np.ones(len(place), dtype=np.int64)
    for n in range(1, LONGEST_SUFFIX):
        agrees = agrees & (place >= n) & (text[row, place - n] == suffix[row, n])
        if not agrees.any():
            break
        score += agrees
    best = np.zeros(rows, dtype=np.int64)
    np.maximum.at(best, row, score * size + place)
    return best // size, best % size


def _continued(text: Tokens, length: Tokens, place: Tokens, k: int) -> Tokens:
    """[B, k]: the tokens after ``place``; beyond the row's end the stretch from ``place`` on repeats."""
    period = np.maximum(length - 1 - place, 1)
    step = np.arange(k) % period[:, None]
    return np.take_along_axis(text, np.minimum(place[:, None] + 1 + step, text.shape[1] - 1), axis=1)


class DeviceLookup:
    """Compares everything, in a handful of tensor operations; never reads the device."""

    def __init__(self, documents: Sequence[Sequence[int]], device: torch.device | str) -> None:
        self._documents = torch.tensor(_joined(documents), dtype=torch.int64, device=device)
        self._leads_on = (self._documents >= 0) & (self._documents.roll(-1) >= 0)

    def find(self, text: Tensor, length: Tensor, longest: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
        """As ``Lookup`` says."""
        text = text[: len(length), :longest]
        suffix = _suffix(text, length)
        earlier = torch.arange(text.shape[1], device=text.device) < length[:, None] - 1
        matched, place = _best_match(text, suffix, earlier)
        guesses = _continue_cyclically(text, length, place, k)
        counts = torch.where(matched > 0, k, 0)
        if self._documents.numel():
            score, place = _best_match(self._documents[None], suffix, self._leads_on[None])
            following = place[:, None] + 1 + torch.arange(k, device=place.device)
            copied = self._documents[following.clamp(max=len(self._documents) - 1)]
            better = score > matched
            guesses = torch.where(better[:, None], copied.clamp(min=0), guesses)
            counts = torch.where(better, (copied >= 0).cumprod(1).sum(1), counts)
            matched = torch.where(better, score, matched)
        return guesses, counts, matched


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
