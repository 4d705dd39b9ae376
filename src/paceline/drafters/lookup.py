"""Where the end of a row's text stood before, and what followed it there. B rows, T tokens of text, k draft tokens.

Searched are the row's own text and, where there are any, texts that its request brought along (references), the other
answers of its request (siblings), and texts that serve all rows (documents). The longest match wins; of equally long
ones the first of these sources, and within a source the latest place.

Two ways to the same answer: natively, a round's search takes some microseconds; in Python, where there is no extension,
some hundred a row.
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from torch import Tensor

from paceline.kernels import native

LONGEST_SUFFIX = 5
MOST_PLACES = 4096  # of a pair of tokens that are looked at
OWN, REFERENCES, SIBLINGS, DOCUMENTS = range(4)  # sources


class Texts(Protocol):
    """Texts to copy from, which may grow; where their tokens stand is noted as they come."""

    def append(self, number: int, tokens: Sequence[int]) -> None:
        """Tokens for the end of a text; one that is not there yet begins."""
        ...


T = TypeVar("T", bound=Texts)


class Beside(NamedTuple, Generic[T]):
    """What a row may be drafted from beside its own text and the documents.

    In ``siblings`` its own text is that of ``number``, which begins where the row's has ``first``.
    """

    references: T | None = None
    siblings: T | None = None
    number: int = 0
    first: int = 0


class Found(NamedTuple):
    """Of each row: its draft tokens, at most k; tokens matched; the source."""

    draft_tokens: list[list[int]]
    matched: list[int]
    sources: list[int]


class Way(NamedTuple):
    """One of a row's continuations: its draft tokens, at least one; tokens matched; the source."""

    draft_tokens: list[int]
    matched: int
    source: int


class Lookup(Protocol[T]):
    """Finds draft tokens for all rows of a batch."""

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
        place = self._address  # of counts, tokens matched, sources and draft tokens
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
        draft_tokens, counts, matched, sources = (
            np.zeros((rows, ways, k), np.int64),
            *np.zeros((3, rows, ways), np.int64),
        )
        made = np.zeros(rows, np.int64)
        given = None if beside is None else array("q", chain.from_iterable(map(_numbers, beside)))
        problem = self._search_all(
            self._documents.handle,
            None if given is None else given.buffer_info()[0],
            *(text.data_ptr(), text.stride(0), width, length.data_ptr(), rows, ways, k),
            *(table.ctypes.data for table in (draft_tokens, counts, matched, sources, made)),
        )
        if problem < 0:
            raise _beyond(length[:rows], width)
        return [
            [
                Way(draft_tokens[row, way, : counts[row, way]].tolist(), int(matched[row, way]), int(sources[row, way]))
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
        draft_tokens = [
            self._found[start : start + count].tolist() for start, count in zip(starts, numbers[:rows], strict=True)
        ]
        return Found(draft_tokens, numbers[rows : 2 * rows], numbers[2 * rows :])


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
    """Texts in Python, for machines without the extension and as the reference of its tests."""

    def __init__(self) -> None:
        self.texts: list[list[int]] = []
        self._places: dict[tuple[int, ...], list[tuple[int, int]]] = {}  # of two tokens all, of one the latest

    def append(self, number: int, tokens: Sequence[int]) -> None:
        """As ``Texts`` says."""
        self.texts += [[] for _ in range(number + 1 - len(self.texts))]
        text = self.texts[number]
        for token in tokens:
            if text:
                self._note((number, len(text) - 1), text[-2:])
            text.append(int(token))

    def _note(self, place: tuple[int, int], last: list[int]) -> None:
        """Another token is about to follow the last ones of a text."""
        self._places[last[-1],] = [place]
        if len(last) > 1:
            self._places.setdefault((last[0], last[1]), []).append(place)

    def places(self, row: list[int]) -> Iterator[tuple[list[int], int]]:
        """Texts and places in them where the row's last two tokens stand, the latest first, else its last one."""
        found = self._places.get(tuple(row[-2:])) or self._places.get(tuple(row[-1:]), [])
        return ((self.texts[number], place) for number, place in reversed(found[-MOST_PLACES:]))


class Match(NamedTuple):
    """Where a row's last tokens stand. matched: how many of them; place: of the last one in ``text``."""

    matched: int
    source: int
    text: list[int]
    place: int

    def way(self, k: int) -> Way:
        """What follows there, at most k tokens. In the row's own text it is repeated up to k."""
        start = self.place + 1
        period = len(self.text) - start
        steps = range(k) if self.source == OWN else range(min(k, period))
        return Way([self.text[start + step % period] for step in steps], self.matched, self.source)


def _agreeing(row: list[int], text: list[int], place: int) -> int:
    """How many tokens up to ``place`` are the row's last ones."""
    size = 0
    while size < min(LONGEST_SUFFIX, len(row), place + 1) and text[place - size] == row[-1 - size]:
        size += 1
    return size


class HostLookup:
    """Compares, token by token, the places where the row's last token stands."""

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
        found = [_longest(self._matches(*row)) for row in _caught_up(text, length, rows, beside)]
        ways = [Way([], 0, OWN) if match is None else match.way(k) for match in found]
        return Found([way.draft_tokens for way in ways], [way.matched for way in ways], [way.source for way in ways])

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
        each = [self._matches(*row, MOST_PLACES) for row in _caught_up(text, length, rows, beside)]
        ranked = [sorted(matches, key=lambda match: -match.matched) for matches in each]
        return [_unlike((match.way(k) for match in matches), ways) for matches in ranked]

    def _matches(self, row: list[int], beside: Beside[HostTexts], most: int | None = None) -> Iterator[Match]:
        """All matches of a row, source by source, the latest first. most: places of its own text that are looked at."""
        if not row:
            return
        own = (place for place in range(len(row) - 2, -1, -1) if row[place] == row[-1])
        for place in islice(own, most):
            yield Match(_agreeing(row, row, place), OWN, row, place)
        others = {REFERENCES: beside.references, SIBLINGS: beside.siblings, DOCUMENTS: self._documents}
        for source, texts in others.items():
            for text, place in () if texts is None else texts.places(row):
                yield Match(_agreeing(row, text, place), source, text, place)


def _longest(matches: Iterator[Match]) -> Match | None:
    """The first of the longest ones; nothing is longer than LONGEST_SUFFIX."""
    best = None
    for match in matches:
        if best is None or match.matched > best.matched:
            best = match
        if best.matched == LONGEST_SUFFIX:
            break
    return best


def _unlike(ways: Iterator[Way], most: int) -> list[Way]:
    """The first so many of which none is the beginning of one before it."""
    kept: list[Way] = []
    while len(kept) < most and (way := next(ways, None)) is not None:
        if all(before.draft_tokens[: len(way.draft_tokens)] != way.draft_tokens for before in kept):
            kept.append(way)
    return kept


def _caught_up(
    text: Tensor, length: Tensor, rows: int, beside: Sequence[Beside[HostTexts] | None] | None
) -> list[tuple[list[int], Beside[HostTexts]]]:
    """Each row's text and what else it may be copied from; the siblings know what all rows have gained."""
    lines = [line[:end].tolist() for line, end in zip(text[:rows], length[:rows].tolist(), strict=True)]
    each = [Beside[HostTexts]() if one is None else one for one in beside or [None] * rows]
    for line, one in zip(lines, each, strict=True):
        if one.siblings is not None:
            known = len(one.siblings.texts[one.number]) if one.number < len(one.siblings.texts) else 0
            one.siblings.append(one.number, line[one.first + known :])
    return list(zip(lines, each, strict=True))
