"""Pages are shared, copied before they are written, and never lost."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.test_row_tables import taken
from paceline.core.cache import KVCache, KVHeads
from paceline.core.paged_tables import PagedTables, page_bytes
from paceline.core.pages import PAGE_POSITIONS, PageTable, pages_for
from paceline.kernels import abi

ROWS, POSITIONS, SHAPES = 4, 200, [KVHeads(2, 4), KVHeads(1, 20), KVHeads(2, 4), KVHeads(1, 12, 8, values_in_keys=True)]


def test_kernels_and_tables_agree_on_the_size_of_a_page() -> None:
    assert abi.PAGE_POSITIONS == PAGE_POSITIONS
    assert abi.KEY_BLOCK % PAGE_POSITIONS == 0


def write(cache: KVCache, row: int, first: int, values: list[float]) -> None:
    cache.cover([row], [first], [first + len(values)])
    places = torch.arange(first, first + len(values))[None]
    for layer, shape in enumerate(SHAPES):
        index = cache.write_index(torch.tensor([row]), places, cache.places[layer][0])
        keys = torch.tensor(values)[None, None, :, None].expand(1, shape.heads, -1, shape.dim) + layer
        cache.write(layer, index, keys, keys[..., -shape.value_width :])


def check(cache: KVCache, texts: list[list[float]]) -> None:
    assert isinstance(cache.storage, PagedTables)
    table = cache.storage.table
    table.check_integrity()
    for row, text in enumerate(texts):
        assert table.held[row] >= pages_for(len(text))
        for layer in range(len(SHAPES)):
            for tensor in cache.layer(layer):
                expected = torch.tensor(text)[None, :, None].expand_as(tensor[row, :, : len(text)]) + layer
                assert torch.equal(tensor[row, :, : len(text)], expected)


ACTIONS = ("grow", "grow", "cut", "fork", "keep", "erase", "resize")


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_rows_that_share_pages_keep_their_own_texts(data: st.DataObject) -> None:
    cache = KVCache(SHAPES, ROWS, POSITIONS, paged=True)
    texts: list[list[float]] = [[] for _ in range(ROWS)]
    counter = iter(range(1, 10**6))
    row = st.integers(0, ROWS - 1)
    for _ in range(data.draw(st.integers(1, 25))):
        here, action = (
            data.draw(row),
            data.draw(st.sampled_from(["grow", "grow", "cut", "fork", "keep", "erase", "resize"])),
        )
        text = texts[here]
        size = data.draw(st.integers(0, len(text)))
        if action == "grow":
            new = [float(next(counter)) for _ in range(data.draw(st.integers(0, POSITIONS - len(text))))]
            write(cache, here, len(text), new)
            text += new
        elif action == "keep" and text:  # a path of the last token, from its own slot to an earlier one
            rows, start = torch.tensor([here]), torch.tensor([size])
            if size < len(text):
                cache.cover([here], [size], [len(text)])
                cache.keep(rows, start, torch.tensor([[len(text) - 1 - size]]))
                texts[here] = [*text[:size], text[-1]]
        elif action == "fork":
            other = (here + data.draw(st.integers(1, ROWS - 1))) % ROWS
            cache.copy_row(here, other, size)
            texts[other] = text[:size]
        elif action != "keep":
            {"cut": cache.cut, "erase": lambda row, _: cache.erase_row(row), "resize": cache.resize}[action](here, size)
            texts[here] = [] if action == "erase" else text[:size]
        check(cache, texts)


def test_writes_beyond_the_end_and_of_rows_without_pages_change_nothing() -> None:
    cache = KVCache(SHAPES, ROWS, POSITIONS, paged=True)
    write(cache, 1, 0, [float(i + 1) for i in range(POSITIONS)])
    for row in (1, 2):
        places = torch.tensor([[POSITIONS, POSITIONS + 300]])
        index = cache.write_index(torch.tensor([row]), places)
        cache.write(0, index, torch.full((1, 2, 2, 4), 9.0), torch.full((1, 2, 2, 4), 9.0))
    check(cache, [[], [float(i + 1) for i in range(POSITIONS)], [], []])


@pytest.mark.skipif(sys.platform != "linux", reason="memory is counted by Linux' /proc")
def test_memory_is_what_the_pages_in_use_take() -> None:
    cache = KVCache([KVHeads(2, 32)] * 3, ROWS, 1000, paged=True)
    each = 2 * page_bytes((3, 2, 32), torch.float32)
    assert each == KVCache.growing_bytes([KVHeads(2, 32)] * 3, 1, torch.float32, paged=True)
    cache.randomise(1, 640, torch.Generator())
    assert taken(*cache.tables) == 10 * each
    for row in (1, 2, 3):
        cache.copy_row(0, row, 600)
    assert taken(*cache.tables) == 13 * each  # the last page is each row's own
    cache.resize(0, 0)
    assert taken(*cache.tables) == 12 * each
    for row in (1, 2):
        cache.resize(row, 100)
    assert taken(*cache.tables) == 10 * each
    cache.erase_row(3)
    assert taken(*cache.tables) == 2 * each
    cache.randomise(4, 64, torch.Generator())
    assert taken(*cache.tables) == 5 * each  # a row still shares the second page of another


def forked() -> PageTable:
    table = PageTable(3, 500)
    table.cover(0, 0, 300)
    table.share(0, 1, 200)
    table.check_integrity()
    return table


@pytest.mark.parametrize(
    "damage",
    [
        lambda table: table.references.add_(1),
        lambda table: table.unused.append(table.fresh),
        lambda table: table.pages[0, :1].zero_(),
        lambda table: table.freed.append(table.pages_of(0)[0]),
    ],
)
def test_integrity_is_checked(damage: Callable[[PageTable], object]) -> None:
    table = forked()
    damage(table)
    with pytest.raises(AssertionError):
        table.check_integrity()


def test_what_rows_share_is_counted_once() -> None:
    table = forked()  # five pages, and three of them with the second slot, which has a copy of the fourth
    assert table.used == 6
    assert table.repeated([0, 1, 2]) == 3
    assert table.repeated([0, 2]) == 0
    assert [table.shared_behind(1, positions) for positions in (0, 63, 64, 191, 192, 500)] == [3, 3, 2, 1, 0, 0]
    table.cut(0, 100)
    assert table.repeated([0, 1]) == 2
    assert table.used == 4
