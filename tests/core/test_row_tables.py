"""Rows take only the memory that they use and free the rest, as counted by the system in pages."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.core import row_tables
from paceline.core.cache import KVCache, KVHeads
from paceline.core.row_tables import RowTables
from paceline.errors import CapacityError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is counted by Linux' /proc")


@pytest.fixture(params=["Linux", "macOS"])
def freeing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Free pages by advice, and as macOS does."""
    monkeypatch.setattr(row_tables, "ADVICE_FREES", request.param == "Linux")


LAYERS, ROWS, HEADS, POSITIONS, DIM = 2, 5, 3, 900, 16
PAGE = mmap.PAGESIZE


def taken(*tables: Tensor) -> int:
    """Bytes of physical memory that these tables take, without pages that were only read.

    /proc/self/pagemap has two bits per page: present (63) and exclusively mapped (56). The shared zero page, which
    backs pages that were only read, is not exclusive.
    """
    pages = 0
    with Path("/proc/self/pagemap").open("rb", buffering=0) as file:
        for table in tables:
            file.seek(table.data_ptr() // PAGE * 8)
            entries = np.frombuffer(file.read(table.nbytes // PAGE * 8), np.uint64)
            pages += int((entries >> 63 & entries >> 56 & 1).sum())
    return pages * PAGE


def cache_of(positions: int = POSITIONS, dim: int = DIM) -> KVCache:
    return KVCache([KVHeads(HEADS, dim)] * LAYERS, ROWS, positions)


def fill(cache: KVCache, row: int, first: int, stop: int) -> None:
    places = torch.arange(first, stop)[None]
    index = cache.write_index(torch.tensor([row]), places)
    for layer in range(LAYERS):
        kept = torch.randn(1, HEADS, stop - first, cache.keys.shape[-1])
        cache.write(layer, index, kept, -kept)


def bytes_of(positions: int, dim: int = DIM) -> int:
    return 2 * RowTables.row_bytes((LAYERS, HEADS, dim), positions, torch.float32)


@pytest.mark.parametrize("dim", [16, 20, 80])
def test_a_row_takes_memory_for_its_tokens_only(dim: int) -> None:
    cache = cache_of(dim=dim)
    assert taken(*cache.tables) == 0
    fill(cache, 1, 0, 1)
    assert taken(*cache.tables) == bytes_of(1, dim) == 2 * LAYERS * HEADS * PAGE
    fill(cache, 3, 0, 301)
    assert taken(*cache.tables) == bytes_of(1, dim) + bytes_of(300, dim)


@pytest.mark.usefixtures("freeing")
@pytest.mark.parametrize("dim", [16, 20, 80])
def test_a_row_that_shrinks_frees_memory_and_keeps_its_first_slots(dim: int) -> None:
    cache = cache_of(dim=dim)
    for row in range(ROWS):
        fill(cache, row, 0, POSITIONS + 1)
    before = cache.keys.clone(), cache.values.clone()
    cache.resize(2, 200)
    assert taken(*cache.tables) == 4 * bytes_of(POSITIONS, dim) + bytes_of(200, dim)
    for now, then in zip(cache.tables, before, strict=True):
        assert torch.equal(now[:, 2, :, :200], then[:, 2, :, :200])
        others = [0, 1, 3, 4]
        assert torch.equal(now[:, others], then[:, others])
    cache.resize(2, 0)
    assert taken(*cache.tables) == 4 * bytes_of(POSITIONS, dim)
    assert not cache.keys[:, 2].any()


@pytest.mark.usefixtures("freeing")
def test_whole_pages_of_a_tensor_are_returned() -> None:
    tensor = row_tables.zeros_by_page(4 * PAGE, dtype=torch.uint8, device="cpu").fill_(7)
    row_tables.return_pages(tensor[PAGE - 1 : 3 * PAGE + 1])
    assert taken(tensor) == 2 * PAGE
    assert tensor.view(4, PAGE).sum(1).tolist() == [7 * PAGE, 0, 0, 7 * PAGE]


def test_memory_that_is_not_freed_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_tables, "_libc", lambda: SimpleNamespace(madvise=lambda *_: -1))
    with pytest.raises(CapacityError, match=r"does not free .* bytes of the rows' caches"):
        cache_of().erase_row(0)


def test_writes_beyond_a_rows_end_take_no_memory_and_overwrite_nothing() -> None:
    cache = cache_of()
    for row in range(ROWS):
        cache.resize(row, 0)
    cache.resize(1, 100)
    fill(cache, 1, 0, 100)
    saved = cache.keys[:, 1, :, :100].clone()
    fill(cache, 1, 100, 700)
    assert torch.equal(cache.keys[:, 1, :, :100], saved)
    assert taken(*cache.tables) == bytes_of(100)
    cache.keep(torch.tensor([1]), torch.tensor([90]), torch.tensor([[40, 500]]))
    assert taken(*cache.tables) == bytes_of(100)


def test_tables_reserve_address_space_and_take_memory_on_use() -> None:
    tables = RowTables([(1, 1, 64)], 1024, 2**20, torch.float32, torch.device("cpu"))
    assert tables.tables[0].nbytes > 2**38
    tables.tables[0][0, 1023, 0, 5] = 1
    assert tables.tables[0][0, 1023, 0, :7, 0].tolist() == [0, 0, 0, 0, 0, 1, 0]


def test_missing_address_space_raises_an_error_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> mmap.mmap:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(row_tables.mmap, "mmap", refuse)  # type: ignore[attr-defined]
    with pytest.raises(CapacityError, match=r"address space .* lower max_batch_size or max_model_len, .*overcommit"):
        cache_of()
