"""The native lookup, the one in Python and a naive search agree, for all shapes and as texts grow."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.drafters.lookup import (
    ANSWERS,
    DOCUMENTS,
    LONGEST_SUFFIX,
    MAX_POSITIONS,
    OWN,
    REFERENCES,
    WHOLE,
    Continuation,
    CopySources,
    HostLookup,
    Lookup,
    LookupResult,
    NativeLookup,
    SearchedRows,
    make_lookup,
)
from paceline.kernels import native

pytestmark = pytest.mark.usefixtures("one_thread")

KERNELS = native.available()
needs_extension = pytest.mark.skipif(not KERNELS, reason=f"no C++ kernels: {native.why_none()}")
Text = Sequence[int]

token = st.integers(0, 3)
random_text = st.lists(token, max_size=30)
periodic_text = st.builds(lambda part, times: part * times, st.lists(token, min_size=1, max_size=7), st.integers(1, 5))
texts = st.lists(random_text | periodic_text, min_size=1, max_size=5)
documents = st.lists(st.lists(token, max_size=12), max_size=3)


def lookups(given_documents: Sequence[Text]) -> list[Lookup[Any]]:
    """All implementations available here, the one in Python first."""
    return [HostLookup(given_documents), *(NativeLookup(given_documents, kernels) for kernels in KERNELS[:1])]


def table(rows: Sequence[Text], spare: int) -> tuple[Tensor, Tensor]:
    """Texts in slots 1, 3, ... of a larger tensor; beyond a row's end and between lie plausible tokens."""
    width = max(1, *map(len, rows)) + spare
    wide = torch.ones(2 * len(rows) + spare, width + 3, dtype=torch.int64)
    length = torch.ones(2 * len(rows) + spare, dtype=torch.int64)
    for slot, row in zip(slots_of(rows), rows, strict=True):
        wide[slot, : len(row)] = torch.tensor(row, dtype=torch.int64)
        length[slot] = len(row)
    return wide[:, :width], length


def slots_of(rows: Sequence[Text]) -> range:
    return range(1, 2 * len(rows), 2)


def found_in(lookup: Lookup[Any], rows: Sequence[Text], k: int, beside: Any = None, spare: int = 0) -> LookupResult:
    text, length = table(rows, spare)
    return lookup.find(SearchedRows(text, length, slots_of(rows), beside), k)


@needs_extension
@settings(max_examples=200, deadline=None)
@given(rows=texts, documents=documents, references=documents, k=st.integers(1, 9), spare=st.integers(0, 4))
def test_the_native_search_equals_the_one_in_python(
    rows: list[list[int]], documents: list[list[int]], references: list[list[int]], k: int, spare: int
) -> None:
    beside = [CopySources(references=references) if number % 2 else None for number in range(len(rows))]
    both = []
    for lookup in lookups(documents):
        noted = lookup.texts(references)
        both.append(found_in(lookup, rows, k, [each and CopySources(references=noted) for each in beside], spare))
    assert both[0] == both[1]
    assert all(
        len(draft_tokens) <= k and bool(draft_tokens) == (size > 0)
        for draft_tokens, size, *_ in zip(*both[0], strict=True)
    )


def ways_in(
    lookup: Lookup[Any], rows: Sequence[Text], k: int, ways: int, beside: Any = None
) -> list[list[Continuation]]:
    text, length = table(rows, 2)
    return lookup.find_all(SearchedRows(text, length, slots_of(rows), beside), k, ways)


@needs_extension
@settings(max_examples=200, deadline=None)
@given(rows=texts, documents=documents, references=documents, k=st.integers(1, 9), ways=st.integers(1, 5))
def test_several_continuations_are_the_same_in_both_and_the_first_is_the_one_of_a_chain(
    rows: list[list[int]], documents: list[list[int]], references: list[list[int]], k: int, ways: int
) -> None:
    numbers, both = range(len(rows)), []
    for lookup in lookups(documents):
        noted = lookup.texts(references)
        beside = [CopySources(references=noted) if number % 2 else None for number in numbers]
        both.append(ways_in(lookup, rows, k, ways, beside))
        chain = found_in(lookup, rows, k, beside)
        firsts = [each[0] if each else Continuation([], 0, OWN) for each in both[-1]]
        assert [way.draft_tokens for way in firsts] == chain.draft_tokens
        assert [way.matched for way in firsts] == chain.matched
        assert [way.source for way in firsts] == chain.sources
    assert both[0] == both[1]
    for each in both[0]:
        assert len(each) <= ways
        assert [way.matched for way in each] == sorted((way.matched for way in each), reverse=True)
        for number, way in enumerate(each):
            assert all(before.draft_tokens[: len(way.draft_tokens)] != way.draft_tokens for before in each[:number])


@pytest.mark.parametrize("kind", range(len(lookups([]))))
def test_continuations_come_from_all_sources_the_longer_match_first(kind: int) -> None:
    lookup = lookups([[9, 1, 2, 3, 40]])[kind]
    references, answers = lookup.texts([[7, 2, 3, 50]]), lookup.texts([[1, 2, 3, 60]])
    row = [2, 3, 70, 1, 2, 3]
    (ways,) = ways_in(lookup, [row], 2, 9, [CopySources(references, answers, 1)])
    found = [(way.draft_tokens[0], way.matched, way.source) for way in ways]
    assert found == [(60, 3, ANSWERS), (40, 3, DOCUMENTS), (70, 2, OWN), (50, 2, REFERENCES)]


# --- as answers grow --------------------------------------------------------------------------------------------------


def matching(text: Text, end: int, row: Text) -> int:
    """Number of the row's last tokens that occur in ``text`` up to and including position ``end``."""
    size = 0
    while size < min(LONGEST_SUFFIX, len(row), end + 1) and text[end - size] == row[len(row) - 1 - size]:
        size += 1
    return size


@pytest.mark.parametrize("seed", range(6))
def test_growing_answers_are_drafted_from_each_other_and_the_oldest_are_forgotten(seed: int) -> None:
    """Answers to two prompts, which grow in turn, skip rounds, end, and are replaced in their rows.

    All implementations find the same, and each draft follows as long a match as they say.
    """
    rng = random.Random(seed)
    vocab, k, most = rng.choice([2, 3, 6]), rng.randint(1, 6), rng.choice([40, 150, 10**6])
    prompts = [[rng.randrange(vocab) for _ in range(size)] for size in (3, 12)]
    searched = [(lookup, [lookup.texts((), most) for _ in prompts]) for lookup in lookups([[0, 1, 2, 0, 1], [1]])]
    answers: list[list[list[int]]] = [[[] for _ in range(9)] for _ in prompts]
    for step in range(40):
        numbers = range(min(5, step // 4), min(5, step // 4) + 4)
        playing = rng.sample([(family, number) for family in (0, 1) for number in numbers], 4)
        rows = [prompts[family] + answers[family][number] for family, number in playing]
        results = []
        for lookup, noted in searched:
            beside = [
                CopySources(None, noted[family], number, max(0, len(prompts[family]) - LONGEST_SUFFIX))
                for family, number in playing
            ]
            results.append(found_in(lookup, rows, k, beside))
            assert all(texts.held <= max(most, max(map(len, rows))) for texts in noted)
        assert all(found == results[0] for found in results)
        for row, drafted, matched, source in zip(rows, *results[0][:2], results[0].sources, strict=True):
            others = [prompt + answer for prompt, group in zip(prompts, answers, strict=True) for answer in group]
            places = [(text, end) for text in (row, *others, [0, 1, 2, 0, 1]) for end in range(len(text) - 1)]
            follows = [text[end + 1 :] for text, end in places if matching(text, end, row) == matched]
            assert not drafted or source == OWN or any(text[: len(drafted)] == drafted for text in follows)
        for family, number in playing:
            answers[family][number] += [rng.randrange(vocab) for _ in range(rng.randint(0, 3))]
    sizes = [[texts.size(number) for texts in noted for number in range(9)] for _, noted in searched]
    assert all(each == sizes[0] for each in sizes)
    contents = [[[table.tolist() for table in texts.contents()] for texts in noted] for _, noted in searched]
    assert all(each == contents[0] for each in contents)
    for texts, (tokens, each) in zip(searched[0][1], contents[0], strict=True):
        assert sum(each) == len(tokens) == texts.held


@pytest.mark.parametrize("kind", range(len(lookups([]))))
def test_of_equally_long_matches_the_latest_that_goes_on_as_most_do_is_copied(kind: int) -> None:
    lookup = lookups([])[kind]
    answers = lookup.texts([[1, 2, 3, 50, 4], [9, 2, 3, 60, 5], [1, 2, 3, 50, 6], [1, 2, 3, 70, 7]])
    found = found_in(lookup, [[1, 2, 3]], 2, [CopySources(answers=answers, number=4)])
    assert found == LookupResult([[50, 6]], [3], [66], [ANSWERS]), "two of three; 60 follows a shorter match"


@pytest.mark.parametrize("kind", range(len(lookups([]))))
def test_at_equal_length_the_rows_own_text_counts_then_references_answers_documents(kind: int) -> None:
    def found(own: Text, sources: dict[int, Text]) -> tuple[int, list[int]]:
        lookup = lookups([sources[DOCUMENTS]] if DOCUMENTS in sources else [])[kind]
        answers = lookup.texts([[], sources.get(ANSWERS, [])])
        beside = CopySources(lookup.texts([sources.get(REFERENCES, [])]), answers, 0, 0)
        one = found_in(lookup, [own], 1, [beside])
        return one.sources[0], one.draft_tokens[0]

    others = {REFERENCES: [1, 2, 11], ANSWERS: [1, 2, 12], DOCUMENTS: [1, 2, 13]}
    assert found([1, 2, 10, 1, 2], others) == (OWN, [10])
    assert found([9, 1, 2], others) == (REFERENCES, [11])
    assert found([9, 1, 2], {**others, REFERENCES: [2, 11]}) == (ANSWERS, [12])
    assert found([9, 1, 2], {DOCUMENTS: [1, 2, 13]}) == (DOCUMENTS, [13])
    assert found([1, 2, 10, 9, 1, 2], {**others, DOCUMENTS: [9, 1, 2, 14]}) == (DOCUMENTS, [14]), "the longer match"


@pytest.mark.parametrize("kind", range(len(lookups([]))))
def test_what_every_answer_said_first_is_drafted_for_the_next(kind: int) -> None:
    lookup, prompt = lookups([])[kind], [*range(LONGEST_SUFFIX + 2)]
    answers = lookup.texts()
    first = len(prompt) - LONGEST_SUFFIX
    found_in(lookup, [[*prompt, 80, 90, 99]], 3, [CopySources(None, answers, 0, first)])
    found = found_in(lookup, [prompt], 3, [CopySources(None, answers, 1, first)])
    assert found == LookupResult([[80, 90]], [LONGEST_SUFFIX], [WHOLE], [ANSWERS])


@pytest.mark.parametrize("kind", range(len(lookups([]))))
def test_the_number_of_places_compared_per_ngram_is_limited(kind: int) -> None:
    lookup = lookups([])[kind]
    for others, size in ((MAX_POSITIONS - 1, 3), (MAX_POSITIONS, 2)):
        references = lookup.texts([[7, 1, 2, *([9, 1, 2] * others), 0]])
        found = found_in(lookup, [[7, 1, 2]], 1, [CopySources(references)])
        assert found.matched == [size]


@needs_extension
@pytest.mark.parametrize("length", [-1, 4])
def test_a_length_beyond_the_text_is_refused(length: int) -> None:
    rows = SearchedRows[Any](torch.zeros(1, 3, dtype=torch.int64), torch.tensor([length]), [0])
    with pytest.raises(ValueError, match="between 0 and 3"):
        NativeLookup([], KERNELS[0]).find_all(rows, 2, 2)
    with pytest.raises(ValueError, match="between 0 and 3"):
        NativeLookup([], KERNELS[0]).find(rows, 2)


def test_the_machine_decides_which_implementation_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(native.VARIABLE, raising=False)
    assert isinstance(make_lookup([]), NativeLookup if KERNELS else HostLookup)
    monkeypatch.setenv(native.VARIABLE, "off")
    assert isinstance(make_lookup([]), HostLookup)
