"""Prompt lookup against a naive search, row by row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batches import filled, new_batch
from paceline.config import MAX_SPECULATION_LENGTH, SamplingParams
from paceline.core.batch import RowStart, SpeculationPlan
from paceline.core.draft import SIBLING_KIND
from paceline.core.draft_tensors import DraftTensors
from paceline.drafters.lookup import GRAMS, MAX_POSITIONS, OWN
from paceline.drafters.ngram import LONGEST_SUFFIX, NgramDrafter

pytestmark = pytest.mark.usefixtures("one_thread")


def match_ending_at(text: Sequence[int], end: int, row: Sequence[int]) -> int:
    """Number of the row's last tokens (at most 8) that occur in ``text`` up to and including position ``end``."""
    size = 0
    while size < min(LONGEST_SUFFIX, len(row), end + 1) and text[end - size] == row[len(row) - 1 - size]:
        size += 1
    return size


def naive(row: Sequence[int], documents: Sequence[Sequence[int]], k: int) -> list[int]:
    """The longest match wins, then the row's own text and the latest in it, then what most matches go on with.

    A match at a document's end has no draft.
    """
    best, draft_token = 0, []
    for end in range(len(row) - 1):
        size = match_ending_at(row, end, row)
        if size > 0 and size >= best:
            stretch = row[end + 1 :]
            best, draft_token = size, [stretch[i % len(stretch)] for i in range(k)]
    places = [(document, end) for document in documents for end in range(len(document) - 1)]
    matches = [(match_ending_at(document, end, row), document[end + 1 :]) for document, end in places]
    for gram in GRAMS:
        if latest := [match for match in matches if match[0] >= gram][-MAX_POSITIONS:]:
            longest = max(size for size, _ in latest)
            follow = [text for size, text in latest if size == longest]
            votes = Counter(text[0] for text in follow)
            most = [text for text in follow if votes[text[0]] == max(votes.values())]
            return list(most[-1][:k]) if longest > best else draft_token
    return draft_token


def propose(rows: Sequence[Sequence[int]], documents: Sequence[Sequence[int]], k: int) -> list[list[int]]:
    batch = new_batch(len(rows) + 1, 40, 10)
    batch.text.fill_(1)  # beyond a row's end lies what looks like text
    for place, row in enumerate(rows):
        batch.set_row(place, RowStart(list(row), SamplingParams(), 0))
    batch.set_live(range(len(rows)))
    draft = NgramDrafter(documents).propose(batch, SpeculationPlan(k))
    assert draft.probabilities is None
    assert len(draft.draft_tokens) == len(rows)
    assert draft.k <= k
    assert all(0 <= token < 10 for line in draft.draft_tokens for token in line)
    return draft.draft_tokens


token = st.integers(0, 3)
texts = st.lists(st.lists(token, min_size=1, max_size=20), min_size=1, max_size=4)


@settings(max_examples=200, deadline=None)
@given(rows=texts, documents=st.lists(st.lists(token, max_size=12), max_size=3), k=st.integers(1, 7))
def test_draft_tokens_equal_a_naive_search(rows: list[list[int]], documents: list[list[int]], k: int) -> None:
    assert propose(rows, documents, k) == [naive(row, documents, k) for row in rows]


def test_a_row_without_a_match_gets_no_draft_tokens_beside_one_that_has() -> None:
    assert propose([[1, 2, 3], [1, 2, 1], [5]], [], 2) == [[], [2, 1], []]


def test_no_match_at_all_is_an_empty_draft() -> None:
    assert propose([[1, 2, 3]], [[7, 8, 9]], 4) == [[]]


def test_a_repeating_text_is_continued_cyclically() -> None:
    assert propose([[9, 1, 2, 3, 1, 2, 3]], [], 7) == [[1, 2, 3, 1, 2, 3, 1]]


def test_of_equal_matches_the_later_one_wins() -> None:
    assert propose([[1, 5, 1, 6, 1]], [], 1) == [[6]]


def test_the_longer_match_in_a_document_beats_the_rows_own() -> None:
    assert propose([[1, 2, 9, 8, 2, 0, 1, 2]], [[0, 1, 2, 4, 4, 4]], 2) == [[4, 4]]


def test_the_rows_own_match_beats_an_equal_one_in_a_document() -> None:
    assert propose([[1, 2, 7, 1, 2]], [[1, 2, 4]], 1) == [[7]]


def test_copying_stops_where_the_document_ends() -> None:
    assert propose([[1, 2]], [[1, 2, 3], [4, 5, 6]], 5) == [[3]]


def test_a_match_never_crosses_from_one_document_into_the_next() -> None:
    assert propose([[1, 2]], [[9, 1], [2, 3]], 2) == [[3]]


def test_a_match_at_a_documents_very_end_hides_no_shorter_one() -> None:
    assert propose([[5, 1, 2, 3, 2]], [[1, 2, 3, 2]], 2) == [[3, 2]]


def test_continuations_that_part_ways_are_merged_into_a_tree() -> None:
    row = [1, 2, 5, 6, 7, 9, 1, 2, 5, 8, 9, 1, 2]
    batch = filled([RowStart(row, SamplingParams(), 0)], 40, 10)
    draft = NgramDrafter(width=2).propose(batch, SpeculationPlan(3))
    assert draft.draft_tokens == [[5, 8, 9, 6, 7]]
    assert draft.parents == [[-1, 0, 1, 0, 3]]
    assert draft.confidence is not None
    assert draft.kinds == [[OWN, OWN, OWN, SIBLING_KIND + OWN, OWN]]
    assert NgramDrafter(width=1).propose(batch, SpeculationPlan(3)).draft_tokens == [[5, 8, 9]]


@settings(max_examples=100, deadline=None)
@given(row=st.lists(token, min_size=1, max_size=20), k=st.integers(1, 32), width=st.integers(2, 8))
def test_a_tree_is_no_deeper_and_no_wider_than_asked_and_begins_with_the_chain(
    row: list[int], k: int, width: int
) -> None:
    batch = filled([RowStart(row, SamplingParams(), 0)], 40, 10)
    draft = NgramDrafter(width=width).propose(batch, SpeculationPlan(k))
    (ways,) = DraftTensors.of(draft, batch.device).paths
    depths = Counter(len(way) for way in ways[1:])
    assert max(depths, default=0) <= k
    assert max(depths.values(), default=0) <= width
    assert len(draft.draft_tokens[0]) <= MAX_SPECULATION_LENGTH
    assert len(set(map(tuple, ways))) == len(ways)  # no two draft tokens say the same
    assert draft.draft_tokens[0][:k] == NgramDrafter().propose(batch, SpeculationPlan(k)).draft_tokens[0]
