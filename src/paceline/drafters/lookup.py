"""n-gram lookup: where the last tokens of a row occurred before, and what followed them there.

Shapes: R slots for rows, B live rows, T tokens of text, k draft tokens.

Sources are the row's own text, the request's references, answers of this and of other requests, and documents that
serve all rows. The longest match wins, then the first of these sources. Among equally long matches in the row's own
text the latest wins; elsewhere the latest that goes on as most of them do.

There are two implementations with the same results. The native one takes microseconds per round, the one in Python
about a hundred microseconds per row.
"""

from __future__ import annotations

import weakref
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice, product, takewhile
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from paceline.kernels import abi, native

LONGEST_SUFFIX = 8  # tokens of the longest match; with 16 recorded rounds gain 0.7 % more, with 5 they lose 2 to 5 %
GRAMS = 4, 2, 1  # lengths of indexed n-grams: matches of the first that occurs are compared
MAX_POSITIONS = 16  # latest occurrences of an n-gram that are compared; 64 gain 0.3 %
MAX_OWN_POSITIONS = 4096  # the same of a row's last token in its own text, for trees
OWN, REFERENCES, ANSWERS, DOCUMENTS = range(4)  # sources, in order of preference
WHOLE = 100  # a share of all, in percent
UNLIMITED = 2**62  # tokens


class TextContents(NamedTuple):
    """Texts end to end, the oldest first.

    tokens: [T] int32, of all texts. sizes: [N] int64, the number of tokens of each text.
    """

    tokens: NDArray[np.int32]
    sizes: NDArray[np.int64]


class TextIndex(Protocol):
    """Indexed texts to copy from. They may grow; beyond a number of tokens those with the lowest numbers go."""

    @property
    def held(self) -> int:
        """Number of tokens in all texts."""
        ...

    def append(self, number: int, tokens: Sequence[int]) -> None:
        """Append tokens to text ``number``, which is created if it does not exist, unless it was forgotten."""
        ...

    def size(self, number: int) -> int:
        """Tokens of a text; 0 if it does not exist or was forgotten."""
        ...

    def contents(self) -> TextContents:
        """A copy of all texts."""
        ...


T = TypeVar("T", bound=TextIndex)


class CopySources(NamedTuple, Generic[T]):
    """Sources of one row beside its own text and the documents.

    number: of the row's own text in ``answers``. first: position in the row where that text starts.
    """

    references: T | None = None
    answers: T | None = None
    number: int = 0
    first: int = 0


class SearchedRows(NamedTuple, Generic[T]):
    """B rows to search for.

    text: [R, T] int64 on the CPU, with contiguous rows. length: [R] int64, tokens of each slot. slots: of the B rows.
    beside: sources of each row; tokens that rows have gained are first added to their answers, except for
        the last, which the model has not read: if that gives NaN, no other row should have drafted it.
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
    """Draft tokens of each row (at most k), the number of matched tokens, and the source.

    shares: percent of the equally long matches that go on with the first draft token.
    """

    draft_tokens: list[list[int]]
    matched: list[int]
    shares: list[int]
    sources: list[int]


class Continuation(NamedTuple):
    """One continuation of a row: draft tokens (at least one), the number of matched tokens, and the source."""

    draft_tokens: list[int]
    matched: int
    source: int


class Lookup(Protocol[T]):
    """Finds draft tokens for all rows of a batch."""

    def texts(self, contents: Sequence[Sequence[int]] = (), most: int = UNLIMITED) -> T:
        """An index of texts for ``find``, with these contents. most: tokens that it holds."""
        ...

    def find(self, rows: SearchedRows[T], k: int) -> LookupResult:
        """Find the best match of each row, with at most k tokens after it."""
        ...

    def find_all(self, rows: SearchedRows[T], k: int, ways: int) -> list[list[Continuation]]:
        """Find up to ``ways`` continuations of each row, at most k tokens long, none a prefix of an earlier one.

        The order is by match length, then source; of each source the match that ``find`` prefers comes first.
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

    def __init__(self, kernels: native.Kernels, most: int) -> None:
        self._library = kernels.library
        self.handle: int = kernels.library.pl_texts_new(most)
        weakref.finalize(self, kernels.library.pl_texts_free, self.handle)

    @property
    def held(self) -> int:
        return int(self._library.pl_texts_held(self.handle))

    def size(self, number: int) -> int:
        return int(self._library.pl_texts_size(self.handle, number))

    def append(self, number: int, tokens: Sequence[int]) -> None:
        array = np.array(tokens, dtype=np.int64)
        self._library.pl_texts_append(self.handle, number, array.ctypes.data, len(array))

    def contents(self) -> TextContents:
        sizes = np.empty(self._library.pl_texts_count(self.handle), np.int64)
        tokens = np.empty(self.held, np.int32)
        self._library.pl_texts_copy(self.handle, tokens.ctypes.data, sizes.ctypes.data)
        return TextContents(tokens, sizes)


class NativeLookup:
    """Searches by one call of the native extension."""

    def __init__(self, documents: Sequence[Sequence[int]], kernels: native.Kernels) -> None:
        self._search, self._search_all = kernels.library.pl_lookup, kernels.library.pl_lookup_all
        self._kernels = kernels
        self._documents = self.texts(documents)
        self._found = memoryview(array("q"))
        self._address = 0
        self._beside: tuple[object, Any] = None, None  # the last rows' sources, and the same for the extension

    def texts(self, contents: Sequence[Sequence[int]] = (), most: int = UNLIMITED) -> NativeTextIndex:
        return _filled(NativeTextIndex(self._kernels, most), contents)

    def find(self, rows: SearchedRows[NativeTextIndex], k: int) -> LookupResult:
        """See ``Lookup``. Raises ValueError if a length exceeds the text."""
        count = len(rows.slots)
        if count * (4 + k) > len(self._found):
            results = array("q", bytes(8 * count * (4 + k)))
            self._found, self._address = memoryview(results), results.buffer_info()[0]
        place, step = self._address, 8 * count  # of counts, tokens matched, shares, sources and draft tokens
        found = place + 4 * step, place, place + step, place + 2 * step, place + 3 * step
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
        if beside is not self._beside[0]:
            structs = None if beside is None else (abi.CRowSources * len(beside))(*map(_row_sources, beside))
            self._beside = beside, structs
        return search(
            self._documents.handle,
            self._beside[1],
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
        numbers = self._found[: 4 * rows].tolist()
        starts = range(4 * rows, (4 + k) * rows, k)
        draft_tokens = [
            self._found[start : start + count].tolist() for start, count in zip(starts, numbers[:rows], strict=True)
        ]
        return LookupResult(draft_tokens, numbers[rows : 2 * rows], numbers[2 * rows : 3 * rows], numbers[3 * rows :])


def _row_sources(beside: CopySources[NativeTextIndex] | None) -> abi.CRowSources:
    """The other sources of a row as the extension reads them."""
    if beside is None:
        return abi.CRowSources()
    return abi.CRowSources(
        references=None if beside.references is None else beside.references.handle,
        answers=None if beside.answers is None else beside.answers.handle,
        number=beside.number,
        first=beside.first,
    )


class HostTextIndex:
    """Texts indexed in Python: for machines without the extension, and the reference of its tests."""

    def __init__(self, most: int) -> None:
        self.texts: dict[int, list[int]] = {}
        self.held = self._oldest = 0
        self._most = most
        self._places: dict[tuple[int, ...], list[tuple[int, int]]] = {}  # (text, position) where an n-gram ends

    def size(self, number: int) -> int:
        return len(self.texts.get(number, ()))

    def contents(self) -> TextContents:
        tokens = np.array([*chain.from_iterable(self.texts.values())], np.int32)
        return TextContents(tokens, np.array([len(text) for text in self.texts.values()], np.int64))

    def append(self, number: int, tokens: Sequence[int]) -> None:
        if self.has_forgotten(number):
            return
        for between in range(self._oldest + len(self.texts), number + 1):
            self.texts[between] = []
        text = self.texts[number]
        for token in tokens:
            for gram in GRAMS:
                if len(text) >= gram:
                    self._places.setdefault(tuple(text[-gram:]), []).append((number, len(text) - 1))
            text.append(int(token))
        self.held += len(tokens)
        while self.held > self._most and len(self.texts) > 1:
            self._forget_oldest()

    def has_forgotten(self, number: int) -> bool:
        return number < self._oldest

    def _forget_oldest(self) -> None:
        text = self.texts.pop(self._oldest)
        for gram, end in product(GRAMS, range(1, len(text))):
            places = self._places.get(tuple(text[end - gram : end]), []) if end >= gram else []
            if (self._oldest, end - 1) in places:
                del places[: places.index((self._oldest, end - 1)) + 1]  # none beyond a forgotten one is found
        self.held -= len(text)
        self._oldest += 1

    def matches(self, row: list[int], source: int, gram: int) -> list[SuffixMatch]:
        """Matches of the row's last ``gram`` tokens, the latest first, up to a text that was forgotten."""
        latest = reversed(self._places.get(tuple(row[-gram:]), [])[-MAX_POSITIONS:]) if len(row) >= gram else ()
        known = takewhile(lambda place: not self.has_forgotten(place[0]), latest)
        texts = ((self.texts[number], place) for number, place in known)
        return [SuffixMatch(_agreeing(row, text, place), source, text, place) for text, place in texts]

    def best(self, row: list[int], source: int) -> SuffixMatch | None:
        """The longest match; of equally long ones the latest that goes on as most of them do."""
        matches = next(filter(None, (self.matches(row, source, gram) for gram in GRAMS)), [])
        longest = max((match.matched for match in matches), default=0)
        equal = [match for match in matches if match.matched == longest]
        votes = Counter(match.text[match.place + 1] for match in equal)
        best = max(equal, key=lambda match: votes[match.text[match.place + 1]], default=None)
        return best and best._replace(share=WHOLE * votes[best.text[best.place + 1]] // len(equal))

    def all(self, row: list[int], source: int) -> list[SuffixMatch]:
        """The best match, then those of all n-grams; of single tokens only if there are no others."""
        best = self.best(row, source)
        if best is None:
            return []
        grams = GRAMS if best.matched == 1 else GRAMS[:-1]
        return [best, *(match for gram in grams for match in self.matches(row, source, gram))]


class SuffixMatch(NamedTuple):
    """An occurrence of a row's last ``matched`` tokens. place: position of the last of them in ``text``.

    share: percent of the equally long matches that go on with the same token.
    """

    matched: int
    source: int
    text: list[int]
    place: int
    share: int = WHOLE

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

    def texts(self, contents: Sequence[Sequence[int]] = (), most: int = UNLIMITED) -> HostTextIndex:
        return _filled(HostTextIndex(most), contents)

    def find(self, rows: SearchedRows[HostTextIndex], k: int) -> LookupResult:
        nothing = SuffixMatch(0, OWN, [], 0)
        found = [self._longest(*row) or nothing for row in _caught_up(rows)]
        draft_tokens = [match.continuation(k).draft_tokens if match.matched else [] for match in found]
        matched, sources = [match.matched for match in found], [match.source for match in found]
        return LookupResult(draft_tokens, matched, [match.share for match in found], sources)

    def find_all(self, rows: SearchedRows[HostTextIndex], k: int, ways: int) -> list[list[Continuation]]:
        each = [self._all(*row) for row in _caught_up(rows)]
        ranked = [sorted(matches, key=lambda match: -match.matched) for matches in each]
        return [_distinct((match.continuation(k) for match in matches), ways) for matches in ranked]

    def _longest(self, row: list[int], beside: CopySources[HostTextIndex]) -> SuffixMatch | None:
        own = max(_own_matches(row), key=lambda match: match.matched, default=None)
        others = [texts.best(row, source) for source, texts in self._others(beside)]
        return max((match for match in (own, *others) if match), key=lambda match: match.matched, default=None)

    def _all(self, row: list[int], beside: CopySources[HostTextIndex]) -> list[SuffixMatch]:
        own = islice(_own_matches(row), MAX_OWN_POSITIONS)
        return [*own, *(match for source, texts in self._others(beside) for match in texts.all(row, source))]

    def _others(self, beside: CopySources[HostTextIndex]) -> list[tuple[int, HostTextIndex]]:
        others = {REFERENCES: beside.references, ANSWERS: beside.answers, DOCUMENTS: self._documents}
        return [(source, texts) for source, texts in others.items() if texts is not None]


def _own_matches(row: list[int]) -> Iterator[SuffixMatch]:
    """Where the row's last token occurs before, the latest first."""
    places = (place for place in range(len(row) - 2, -1, -1) if row[place] == row[-1])
    return (SuffixMatch(_agreeing(row, row, place), OWN, row, place) for place in places)


def _distinct(ways: Iterator[Continuation], most: int) -> list[Continuation]:
    """The first ``most`` continuations that are not prefixes of earlier ones."""
    distinct: list[Continuation] = []
    while len(distinct) < most and (way := next(ways, None)) is not None:
        if all(before.draft_tokens[: len(way.draft_tokens)] != way.draft_tokens for before in distinct):
            distinct.append(way)
    return distinct


def _caught_up(rows: SearchedRows[HostTextIndex]) -> list[tuple[list[int], CopySources[HostTextIndex]]]:
    """Text and other sources of each row, after all rows' new tokens but the last were added to their answers."""
    lines = [rows.text[slot, : int(rows.length[slot])].tolist() for slot in rows.slots]
    each = [CopySources[HostTextIndex]() if one is None else one for one in rows.beside or [None] * len(lines)]
    for line, one in zip(lines, each, strict=True):
        if one.answers is not None:
            one.answers.append(one.number, line[one.first + one.answers.size(one.number) : -1])
    return list(zip(lines, each, strict=True))
