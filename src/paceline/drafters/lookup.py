"""Where the end of a row's text stood before, and what followed it there. B rows, T tokens of text, k guesses.

Searched are the row's own text and, where there are any, texts that its request brought along (references), the other
answers of its request (siblings), and texts that serve all rows (documents). The longest match wins; of equally long
ones the first of these sources, and within a source the latest place.

Two ways to the same answer: natively, a round's search takes some microseconds; in numpy, where there is no extension,
some hundred.
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Sequence
from itertools import chain
from typing import Generic, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from paceline.kernels import native

LONGEST_SUFFIX = 5
MOST_PLACES = 4096  # of a pair of tokens that are looked at
OWN, REFERENCES, SIBLINGS, DOCUMENTS = range(4)  # sources

Tokens: TypeAlias = NDArray[np.int64]


class Texts(Protocol):
    """Texts to copy from, which may grow; where their tokens stand is noted as they come."""

    def append(self, number: int, tokens: Sequence[int]) -> None:
        """Tokens for the end of a text; one that is not there yet begins."""
        ...


T = TypeVar("T", bound=Texts)


class Beside(NamedTuple, Generic[T]):
    """What a row may be guessed from beside its own text and the documents.

    In ``siblings`` its own text is that of ``number``, which begins where the row's has ``first``.
    """

    references: T | None = None
    siblings: T | None = None
    number: int = 0
    first: int = 0


class Found(NamedTuple):
    """Of each row: its guesses, at most k; tokens matched; the source."""

    guesses: list[list[int]]
    matched: list[int]
    sources: list[int]


class Way(NamedTuple):
    """One of a row's continuations: its guesses, at least one; tokens matched; the source."""

    guesses: list[int]
    matched: int
    source: int


class Lookup(Protocol[T]):
    """Finds guesses for all rows of a batch."""

    def texts(self, contents: Sequence[Sequence[int]] = ()) -> T:
        """Texts for ``find``, with these to begin with."""
        ...

    def find(
        self,
        text: Tensor,
        length: Tensor,
        rows: int,
        longest: int,
        k: int,
        beside: Sequence[Beside[T] | None] | None = None,
    ) -> Found:
        """For the first ``rows`` = B rows of text [R, T], of which row i ends at length[i] [R].

        longest: the greatest of their lengths. beside: of each row; their siblings learn what the rows have gained
        first. All of it lies on the CPU, in int64, a text's tokens side by side.
        """
        ...

    def find_all(
        self,
        text: Tensor,
        length: Tensor,
        rows: int,
        longest: int,
        k: int,
        ways: int,
        beside: Sequence[Beside[T] | None] | None = None,
    ) -> list[list[Way]]:
        """Of each row up to ``ways`` continuations, none of them the beginning of one before it.

        Those of longer matches come first, then by source, then the later ones: the first is what ``find`` finds.
        """
        ...


def make_lookup(documents: Sequence[Sequence[int]]) -> Lookup[NativeTexts] | Lookup[HostTexts]:
    """The faster way on this machine."""
    kernels = native.select()
    return HostLookup(documents) if kernels is None else NativeLookup(documents, kernels)


def _with_contents(texts: T, contents: Sequence[Sequence[int]]) -> T:
    for number, tokens in enumerate(contents):
        texts.append(number, tokens)
    return texts


class NativeTexts:
    """In the extension."""

    def __init__(self, kernels: native.Kernels) -> None:
        self._append = kernels.library.pl_texts_append
        self.handle: int = kernels.library.pl_texts_new()
        weakref.finalize(self, kernels.library.pl_texts_free, self.handle)

    def append(self, number: int, tokens: Sequence[int]) -> None:
        """As ``Texts`` says."""
        array = np.array(tokens, dtype=np.int64)
        self._append(self.handle, number, array.ctypes.data, len(array))


class NativeLookup:
    """One call of the extension."""

    def __init__(self, documents: Sequence[Sequence[int]], kernels: native.Kernels) -> None:
        self._search, self._search_all = kernels.library.pl_lookup, kernels.library.pl_lookup_all
        self._kernels = kernels
        self._documents = self.texts(documents)
        self._found = memoryview(array("q"))
        self._address = 0

    def texts(self, contents: Sequence[Sequence[int]] = ()) -> NativeTexts:
        """As ``Lookup`` says."""
        return _with_contents(NativeTexts(self._kernels), contents)

    def find(
        self,
        text: Tensor,
        length: Tensor,
        rows: int,
        longest: int,
        k: int,
        beside: Sequence[Beside[NativeTexts] | None] | None = None,
    ) -> Found:
        """As ``Lookup`` says. Raises ValueError if a length lies beyond the text."""
        width, step = min(longest, text.shape[1]), 8 * rows
        self._make_room(rows * (3 + k))
        place = self._address  # of counts, tokens matched, sources and guesses
        given = None if beside is None else array("q", chain.from_iterable(map(_numbers, beside)))
        widest = self._search(
            self._documents.handle,
            None if given is None else given.buffer_info()[0],
            *(text.data_ptr(), text.stride(0), width, length.data_ptr(), rows, k),
            *(place + 3 * step, place, place + step, place + 2 * step),
        )
        if widest < 0:
            raise _beyond(length[:rows], width)
        return self._read(rows, k)

    def find_all(
        self,
        text: Tensor,
        length: Tensor,
        rows: int,
        longest: int,
        k: int,
        ways: int,
        beside: Sequence[Beside[NativeTexts] | None] | None = None,
    ) -> list[list[Way]]:
        """As ``Lookup`` says. Raises ValueError if a length lies beyond the text."""
        width = min(longest, text.shape[1])
        guesses, counts, matched, sources = np.zeros((rows, ways, k), np.int64), *np.zeros((3, rows, ways), np.int64)
        made = np.zeros(rows, np.int64)
        given = None if beside is None else array("q", chain.from_iterable(map(_numbers, beside)))
        problem = self._search_all(
            self._documents.handle,
            None if given is None else given.buffer_info()[0],
            *(text.data_ptr(), text.stride(0), width, length.data_ptr(), rows, ways, k),
            *(table.ctypes.data for table in (guesses, counts, matched, sources, made)),
        )
        if problem < 0:
            raise _beyond(length[:rows], width)
        return [
            [
                Way(guesses[row, way, : counts[row, way]].tolist(), int(matched[row, way]), int(sources[row, way]))
                for way in range(count)
            ]
            for row, count in enumerate(made.tolist())
        ]

    def _make_room(self, numbers: int) -> None:
        if numbers > len(self._found):
            made = array("q", bytes(8 * numbers))
            self._found, self._address = memoryview(made), made.buffer_info()[0]

    def _read(self, rows: int, k: int) -> Found:
        numbers = self._found[: 3 * rows].tolist()
        starts = range(3 * rows, (3 + k) * rows, k)
        guesses = [
            self._found[start : start + count].tolist() for start, count in zip(starts, numbers[:rows], strict=True)
        ]
        return Found(guesses, numbers[rows : 2 * rows], numbers[2 * rows :])


def _beyond(length: Tensor, width: int) -> ValueError:
    return ValueError(f"the rows' lengths {length.tolist()} do not lie between 0 and {width}")


def _numbers(beside: Beside[NativeTexts] | None) -> tuple[int, int, int, int]:
    """csrc: Beside."""
    if beside is None:
        return 0, 0, 0, 0
    references, siblings = beside.references, beside.siblings
    handles = (0 if texts is None else texts.handle for texts in (references, siblings))
    return *handles, beside.number, beside.first  # type: ignore[return-value]


class HostTexts:
    """In Python: the native ones' twin."""

    def __init__(self) -> None:
        self.texts: list[list[int]] = []
        self._pairs: dict[tuple[int, int], list[tuple[int, int]]] = {}
        self._singles: dict[int, tuple[int, int]] = {}

    def append(self, number: int, tokens: Sequence[int]) -> None:
        """As ``Texts`` says."""
        self.texts += [[] for _ in range(number + 1 - len(self.texts))]
        text = self.texts[number]
        for token in tokens:
            if text:
                self._note(number, text)
            text.append(int(token))

    def _note(self, number: int, text: list[int]) -> None:
        """The text's last token is about to be followed by another."""
        here = number, len(text) - 1
        self._singles[text[-1]] = here
        if len(text) > 1:
            self._pairs.setdefault((text[-2], text[-1]), []).append(here)

    def longer(self, suffix: list[int], size: int) -> tuple[int, list[int]]:
        """Tokens that match at most, if more than ``size``, and what follows them; else ``size`` and nothing."""
        following: list[int] = []
        for number, place in reversed(self._pairs.get((suffix[1], suffix[0]), [])[-MOST_PLACES:]):
            text = self.texts[number]
            found = _agreeing(text[max(0, place - LONGEST_SUFFIX + 1) : place + 1], suffix)
            if found > size:
                size, following = found, text[place + 1 :]
        if size == 0 and suffix[0] in self._singles:
            number, place = self._singles[suffix[0]]
            return 1, self.texts[number][place + 1 :]
        return size, following

    def every(self, suffix: list[int]) -> list[tuple[int, list[int]]]:
        """All places of the last two tokens, the latest first, else the latest of the last: tokens matched, sequel."""
        places = self._pairs.get((suffix[1], suffix[0]), [])[-MOST_PLACES:]
        if not places:
            places = [self._singles[suffix[0]]] if suffix[0] in self._singles else []
        texts = [(self.texts[number], place) for number, place in reversed(places)]
        return [(_agreeing(text[: place + 1], suffix), text[place + 1 :]) for text, place in texts]


def _agreeing(text: list[int], suffix: list[int]) -> int:
    """How many tokens at the end of ``text`` are those of ``suffix``, the last one first."""
    size = 0
    for token, wanted in zip(reversed(text), suffix, strict=False):
        if token != wanted:
            break
        size += 1
    return size


class HostLookup:
    """Compares only the places where the row's last token stands: the native search's twin."""

    def __init__(self, documents: Sequence[Sequence[int]]) -> None:
        self._documents = self.texts(documents)

    def texts(self, contents: Sequence[Sequence[int]] = ()) -> HostTexts:
        """As ``Lookup`` says."""
        return _with_contents(HostTexts(), contents)

    def find(
        self,
        text: Tensor,
        length: Tensor,
        rows: int,
        longest: int,
        k: int,
        beside: Sequence[Beside[HostTexts] | None] | None = None,
    ) -> Found:
        """As ``Lookup`` says."""
        numbers, lengths = text[:rows, :longest].numpy(), length[:rows].numpy()
        return self._find(numbers, lengths, k, _caught_up(numbers, lengths, beside))

    def find_all(
        self,
        text: Tensor,
        length: Tensor,
        rows: int,
        longest: int,
        k: int,
        ways: int,
        beside: Sequence[Beside[HostTexts] | None] | None = None,
    ) -> list[list[Way]]:
        """As ``Lookup`` says."""
        numbers, lengths = text[:rows, :longest].numpy(), length[:rows].numpy()
        each = zip(numbers, lengths.tolist(), _caught_up(numbers, lengths, beside), strict=True)
        return [_unlike(self._ways(line[:end].tolist(), k, one), ways) for line, end, one in each]

    def _ways(self, text: list[int], k: int, beside: Beside[HostTexts]) -> list[Way]:
        """All continuations of a text, the best first."""
        if not text:
            return []
        suffix = [*text[: -LONGEST_SUFFIX - 1 : -1], *[-2] * LONGEST_SUFFIX][:LONGEST_SUFFIX]
        last = len(text) - 1
        own = [place for place in range(last - 1, -1, -1) if text[place] == text[-1]][:MOST_PLACES]
        ways = [
            Way(
                [text[place + 1 + step % (last - place)] for step in range(k)],
                _agreeing(text[: place + 1], suffix),
                OWN,
            )
            for place in own
        ]
        for source, texts in (
            (REFERENCES, beside.references),
            (SIBLINGS, beside.siblings),
            (DOCUMENTS, self._documents),
        ):
            every = [] if texts is None else texts.every(suffix)
            ways += [Way(following[:k], size, source) for size, following in every]
        return sorted(ways, key=lambda way: -way.matched)

    def _find(self, text: Tokens, length: Tokens, k: int, beside: Sequence[Beside[HostTexts]]) -> Found:
        suffix = _suffixes(text, length)
        row, place = np.nonzero(text == suffix[:, :1])
        before = place < length[row] - 1
        row, place = row[before], place[before]
        matched, at = _longest(text, row, place, suffix)
        own = zip(matched.tolist(), _continued(text, length, at, k).tolist(), strict=True)
        found = [(size, OWN, guesses if size else []) for size, guesses in own]
        for number, one in enumerate(beside):
            for source, texts in ((REFERENCES, one.references), (SIBLINGS, one.siblings), (DOCUMENTS, self._documents)):
                if texts is None or length[number] == 0:
                    continue
                size, following = texts.longer(suffix[number].tolist(), found[number][0])
                if size > found[number][0]:
                    found[number] = size, source, following[:k]
        sizes, sources, guesses = map(list, zip(*found, strict=True))
        return Found(guesses, sizes, sources)


def _unlike(ways: Sequence[Way], most: int) -> list[Way]:
    """The first so many of which none is the beginning of one before it."""
    kept: list[Way] = []
    for way in ways:
        known = any(before.guesses[: len(way.guesses)] == way.guesses for before in kept)
        if not known and len(kept) < most:
            kept.append(way)
    return kept


def _caught_up(
    text: Tokens, length: Tokens, beside: Sequence[Beside[HostTexts] | None] | None
) -> list[Beside[HostTexts]]:
    """What each row may be guessed from; the siblings know what the rows have gained."""
    each = [Beside[HostTexts]() if one is None else one for one in beside or [None] * len(text)]
    for row, (one, end) in enumerate(zip(each, length.tolist(), strict=True)):
        if one.siblings is not None:
            _catch_up(one.siblings, one.number, text[row, one.first : end].tolist())
    return each


def _catch_up(siblings: HostTexts, number: int, text: list[int]) -> None:
    """Append what a text has that they do not know yet."""
    known = len(siblings.texts[number]) if number < len(siblings.texts) else 0
    siblings.append(number, text[known:])


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
