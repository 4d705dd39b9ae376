"""The native search and its numpy twin find the same, whatever the shapes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.drafters.lookup import DeviceLookup, HostLookup, NativeLookup, make_lookup
from paceline.kernels import native

pytestmark = pytest.mark.usefixtures("one_thread")

KERNELS = native.available()
needs_extension = pytest.mark.skipif(not KERNELS, reason=f"no C++ kernels: {native.why_none()}")

token = st.integers(0, 3)
random_text = st.lists(token, max_size=30)
periodic_text = st.builds(lambda part, times: part * times, st.lists(token, min_size=1, max_size=7), st.integers(1, 5))
texts = st.lists(random_text | periodic_text, min_size=1, max_size=5)
documents = st.lists(st.lists(token, max_size=12), max_size=3)


def table(rows: list[list[int]], spare: int) -> tuple[Tensor, Tensor]:
    """A text with more rows and places, cut from a wider one; beyond a row's end lies what looks like text."""
    width = max(1, *map(len, rows)) + spare
    wide = torch.ones(len(rows) + spare, width + 3, dtype=torch.int64)
    for place, row in enumerate(rows):
        wide[place, : len(row)] = torch.tensor(row, dtype=torch.int64)
    return wide[:, :width], torch.tensor([len(row) for row in rows])


@needs_extension
@settings(max_examples=300, deadline=None)
@given(rows=texts, documents=documents, k=st.integers(1, 9), spare=st.integers(0, 4))
def test_the_native_search_equals_its_twin(
    rows: list[list[int]], documents: list[list[int]], k: int, spare: int
) -> None:
    text, length = table(rows, spare)
    longest = max(1, *map(len, rows))
    guesses, counts, matched = NativeLookup(documents, KERNELS[0]).find(text, length, longest, k)
    expected, expected_counts, expected_matched = HostLookup(documents).find(text, length, longest, k)
    assert counts.tolist() == expected_counts.tolist()
    assert matched.tolist() == expected_matched.tolist()
    assert guesses.shape == expected.shape == (len(rows), int(counts.max()))
    for own, twin, count in zip(guesses.tolist(), expected.tolist(), counts.tolist(), strict=True):
        assert own[:count] == twin[:count]
        assert not any(own[count:])


@needs_extension
@pytest.mark.parametrize("length", [-1, 4])
def test_a_length_beyond_the_text_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match="between 0 and 3"):
        NativeLookup([], KERNELS[0]).find(torch.zeros(1, 3, dtype=torch.int64), torch.tensor([length]), 9, 2)


def test_the_machine_decides_who_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(native.VARIABLE, raising=False)
    assert isinstance(make_lookup([], "cpu"), NativeLookup if KERNELS else HostLookup)
    assert isinstance(make_lookup([], "meta"), DeviceLookup)
    monkeypatch.setenv(native.VARIABLE, "off")
    assert isinstance(make_lookup([], "cpu"), HostLookup)
