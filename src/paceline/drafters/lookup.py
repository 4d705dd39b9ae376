"""n-gram lookup: where the last tokens of a row occurred before, and what followed them there.

Shapes: R slots for rows, B live rows, T tokens of text, k draft tokens.

Sources are the row's own text, the request's references, parallel samples of the request (siblings), and documents that
serve all rows. The longest match wins; then the first of these sources, then the latest position in it.

There are two implementations with the same results. The native one takes microseconds per round, the one in Python
about a hundred microseconds per row.
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from torch import Tensor

from paceline.kernels import abi, native

LONGEST_SUFFIX = 5  # tokens of the longest match
MAX_POSITIONS = 4096  # latest occurrences of a pair of tokens that are compared: bounds the search in long texts
OWN, REFERENCES, SIBLINGS, DOCUMENTS = range(4)  # sources, in order of preference


class TextIndex(Protocol):
    """Indexed texts to copy from. They may grow."""

    def append(self, number: int, tokens: Sequence[int]) -> None:
        """Append tokens to text ``number``, which is created if it does not exist."""
        ...


T = TypeVar("T", bound=TextIndex)


class CopySources(NamedTuple, Generic[T]):
    """Sources of one row beside its own text and the documents.

    number: of the row's own text in ``siblings``. first: position in the row where that text starts.
    """

    references: T | None = None
    siblings: T | None = None
    number: int = 0
    first: int = 0


class SearchedRows(NamedTuple, Generic[T]):
    """B rows to search for.

    text: [R, T] int64 on the CPU, with contiguous rows. length: [R] int64, tokens of each slot. slots: of the B rows.
    beside: sources of each row; tokens that rows have gained are first added to their siblings.
    """

    text: Tensor
    length: Tensor
    slots: Sequence[int]
    beside: Sequence[CopySources[T] | None] | None = None

    def outside(self) -> ValueError:
        """The error for a length that exceeds the text."""
        lengths = self.length[list(self.slots)].tolist()
        return ValueError(f"the rows' lengths {lengths} are not all between 0 and {self.text.shape[1]}")


class LookupResult(NamedTuple):
    """Draft tokens of each row (at most k), the number of matched tokens, and the source."""

    draft_tokens: list[list[int]]
    matched: list[int]
    sources: list[int]


class Continuation(NamedTuple):
    """One continuation of a row: draft tokens (at least one), the number of matched tokens, and the source."""

    draft_tokens: list[int]
    matched: int
    source: int


class Lookup(Protocol[T]):
    """Finds draft tokens for all rows of a batch."""

    def texts(self, contents: Sequence[Sequence[int]] = ()) -> T:
        """An index of texts for ``find``, with these contents."""
        ...

    def find(self, rows: SearchedRows[T], k: int) -> LookupResult:
        """Find the best match of each row, with at most k tokens after it."""
        ...

    def find_all(self, rows: SearchedRows[T], k: int, ways: int) -> list[list[Continuation]]:
        """Find up to ``ways`` continuations of each row, at most k tokens long, none a prefix of an earlier one.

        The order is by match length, then source, then position, so the first is the result of ``find``.
        """
        ...


def make_lookup(documents: Sequence[Sequence[int]]) -> Lookup[NativeTextIndex] | Lookup[HostTextIndex]:
    """The native implementation if the extension is available, otherwise the one in Python."""
    kernels = native.select()
    return HostLookup(documents) if kernels is None else NativeLookup(documents, kernels)


def _filled(texts: T, contents: Sequence[Sequence[int]]) -> T:
    for number, tokens in enumerate(contents):
        texts.append(number, tokens)
    return texts


class NativeTextIndex:
    """Texts indexed by the native extension."""

    def __init__(self, kernels: native.Kernels) -> None:
        self._append = kernels.library.pl_texts_append
        self.handle: int = kernels.library.pl_texts_new()
        weakref.finalize(self, kernels.library.pl_texts_free, self.handle)

    def append(self, number: int, tokens: Sequence[int]) -> None:
        array = np.array(tokens, dtype=np.int64)
        self._append(self.handle, number, array.ctypes.data, len(array))


class NativeLookup:
    """Searches by one call of the native extension."""

    def __init__(self, documents: Sequence[Sequence[int]], kernels: native.Kernels) -> None:
        self._search, self._search_all = kernels.library.pl_lookup, kernels.library.pl_lookup_all
        self._kernels = kernels
        self._documents = self.texts(documents)
        self._found = memoryview(array("q"))
        self._address = 0

    def texts(self, contents: Sequence[Sequence[int]] = ()) -> NativeTextIndex:
        return _filled(NativeTextIndex(self._kernels), contents)

    def find(self, rows: SearchedRows[NativeTextIndex], k: int) -> LookupResult:
        """See ``Lookup``. Raises ValueError if a length exceeds the text."""
        count = len(rows.slots)
        if count * (3 + k) > len(self._found):
            results = array("q", bytes(8 * count * (3 + k)))
            self._found, self._address = memoryview(results), results.buffer_info()[0]
        place, step = self._address, 8 * count  # of counts, tokens matched, sources and draft tokens
        found = place + 3 * step, place, place + step, place + 2 * step
        if self._call(self._search, rows, (count, k), found) is not None:
            raise rows.outside()
        return self._read(count, k)

    def _call(
        self,
        search: Callable[..., str | None],
        rows: SearchedRows[NativeTextIndex],
        sizes: Sequence[int],
        results: Iterable[int],
    ) -> str | None:
        """Call a search of the extension; returns an error message about the rows' lengths, or None.

        sizes: its numbers of rows and tokens. results: their addresses.
        """
        text, beside, where = rows.text, rows.beside, array("q", rows.slots)
        return search(
            self._documents.handle,
            None if beside is None else (abi.CRowSources * len(beside))(*map(_row_sources, beside)),
            *(where.buffer_info()[0], text.data_ptr(), text.stride(0), text.shape[1], rows.length.data_ptr()),
            *sizes,
            *results,
        )

    def find_all(self, rows: SearchedRows[NativeTextIndex], k: int, ways: int) -> list[list[Continuation]]:
        """See ``Lookup``. Raises ValueError if a length exceeds the text."""
        size = len(rows.slots)
        draft_tokens = np.zeros((size, ways, k), np.int64)
        counts, matched, sources = np.zeros((3, size, ways), np.int64)
        made = np.zeros(size, np.int64)
        tables = (table.ctypes.data for table in (draft_tokens, counts, matched, sources, made))
        if self._call(self._search_all, rows, (size, ways, k), tables) is not None:
            raise rows.outside()
        return [
            [
                Continuation(
                    draft_tokens[row, way, : counts[row, way]].tolist(), int(matched[row, way]), int(sources[row, way])
                )
                for way in range(count)
            ]
            for row, count in enumerate(made.tolist())
        ]

    def _read(self, rows: int, k: int) -> LookupResult:
        numbers = self._found[: 3 * rows].tolist()
        starts = range(3 * rows, (3 + k) * rows, k)
        draft_tokens = [
            self._found[start : start + count].tolist() for start, count in zip(starts, numbers[:rows], strict=True)
        ]
        return LookupResult(draft_tokens, numbers[rows : 2 * rows], numbers[2 * rows :])


def _row_sources(beside: CopySources[NativeTextIndex] | None) -> abi.CRowSources:
    """The other sources of a row as the extension reads them."""
    if beside is None:
        return abi.CRowSources()
    return abi.CRowSources(
        references=None if beside.references is None else beside.references.handle,
        siblings=None if beside.siblings is None else beside.siblings.handle,
        number=beside.number,
        first=beside.first,
    )


class HostTextIndex:
    """Texts indexed in Python: for machines without the extension, and the reference of its tests."""

    def __init__(self) -> None:
        self.texts: list[list[int]] = []
        # (text, position) by the tokens that end there: all of them for two tokens, the latest for one
        self._places: dict[tuple[int, ...], list[tuple[int, int]]] = {}

    def append(self, number: int, tokens: Sequence[int]) -> None:
        self.texts += [[] for _ in range(number + 1 - len(self.texts))]
        text = self.texts[number]
        for token in tokens:
            if text:
                self._note((number, len(text) - 1), text[-2:])
            text.append(int(token))

    def _note(self, place: tuple[int, int], last: list[int]) -> None:
        """Index a position whose last one or two tokens are ``last``, and which another token follows."""
        self._places[last[-1],] = [place]
        if len(last) > 1:
            self._places.setdefault((last[0], last[1]), []).append(place)

    def places(self, row: list[int]) -> Iterator[tuple[list[int], int]]:
        """Texts and positions where the row's last two tokens occur, latest first; without any, its last token."""
        positions = self._places.get(tuple(row[-2:])) or self._places.get(tuple(row[-1:]), [])
        return ((self.texts[number], place) for number, place in reversed(positions[-MAX_POSITIONS:]))


class SuffixMatch(NamedTuple):
    """An occurrence of a row's last ``matched`` tokens. place: position of the last of them in ``text``."""

    matched: int
    source: int
    text: list[int]
    place: int

    def continuation(self, k: int) -> Continuation:
        """At most k tokens that follow. Those from the row's own text are repeated up to k."""
        start = self.place + 1
        period = len(self.text) - start
        steps = range(k) if self.source == OWN else range(min(k, period))
        return Continuation([self.text[start + step % period] for step in steps], self.matched, self.source)


def _agreeing(row: list[int], text: list[int], place: int) -> int:
    """Number of tokens that agree, backwards from ``place`` and from the row's end; at most ``LONGEST_SUFFIX``."""
    size = 0
    while size < min(LONGEST_SUFFIX, len(row), place + 1) and text[place - size] == row[-1 - size]:
        size += 1
    return size


class HostLookup:
    """Compares tokens in Python at each position where the row's last token occurs."""

    def __init__(self, documents: Sequence[Sequence[int]]) -> None:
        self._documents = self.texts(documents)

    def texts(self, contents: Sequence[Sequence[int]] = ()) -> HostTextIndex:
        return _filled(HostTextIndex(), contents)

    def find(self, rows: SearchedRows[HostTextIndex], k: int) -> LookupResult:
        found = [_longest(self._matches(*row)) for row in _caught_up(rows)]
        ways = [Continuation([], 0, OWN) if match is None else match.continuation(k) for match in found]
        return LookupResult(
            [way.draft_tokens for way in ways], [way.matched for way in ways], [way.source for way in ways]
        )

    def find_all(self, rows: SearchedRows[HostTextIndex], k: int, ways: int) -> list[list[Continuation]]:
        each = [self._matches(*row, MAX_POSITIONS) for row in _caught_up(rows)]
        ranked = [sorted(matches, key=lambda match: -match.matched) for matches in each]
        return [_distinct((match.continuation(k) for match in matches), ways) for matches in ranked]

    def _matches(
        self, row: list[int], beside: CopySources[HostTextIndex], most: int | None = None
    ) -> Iterator[SuffixMatch]:
        """All matches of a row, source by source, latest first. most: positions of its own text to compare."""
        if not row:
            return
        own = (place for place in range(len(row) - 2, -1, -1) if row[place] == row[-1])
        for place in islice(own, most):
            yield SuffixMatch(_agreeing(row, row, place), OWN, row, place)
        others = {REFERENCES: beside.references, SIBLINGS: beside.siblings, DOCUMENTS: self._documents}
        for source, texts in others.items():
            for text, place in () if texts is None else texts.places(row):
                yield SuffixMatch(_agreeing(row, text, place), source, text, place)


def _longest(matches: Iterator[SuffixMatch]) -> SuffixMatch | None:
    """The first of the longest matches."""
    best = None
    for match in matches:
        if best is None or match.matched > best.matched:
            best = match
        if best.matched == LONGEST_SUFFIX:
            break
    return best


def _distinct(ways: Iterator[Continuation], most: int) -> list[Continuation]:
    """The first ``most`` continuations that are not prefixes of earlier ones."""
    distinct: list[Continuation] = []
    while len(distinct) < most and (way := next(ways, None)) is not None:
        if all(before.draft_tokens[: len(way.draft_tokens)] != way.draft_tokens for before in distinct):
            distinct.append(way)
    return distinct


def _caught_up(rows: SearchedRows[HostTextIndex]) -> list[tuple[list[int], CopySources[HostTextIndex]]]:
    """Text and other sources of each row, after all rows' new tokens were added to their siblings."""
    lines = [rows.text[slot, : int(rows.length[slot])].tolist() for slot in rows.slots]
    each = [CopySources[HostTextIndex]() if one is None else one for one in rows.beside or [None] * len(lines)]
    for line, one in zip(lines, each, strict=True):
        if one.siblings is not None:
            known = len(one.siblings.texts[one.number]) if one.number < len(one.siblings.texts) else 0
            one.siblings.append(one.number, line[one.first + known :])
    return list(zip(lines, each, strict=True))
