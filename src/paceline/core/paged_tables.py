"""Tables that keep a vector for every token of every row in pages, which rows share where their texts begin alike."""

from __future__ import annotations

import math
import mmap
from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor

from paceline.core.eight_bits import random_vectors
from paceline.core.pages import PAGE_POSITIONS, PageCopy, PagedVectors, PageTable, pages_for
from paceline.core.row_tables import grows_on, reserved, zeros_in

_FREED_BYTES = 2**26  # memory of freed pages that is kept for the next ones: clearing it anew takes longer than a round


class PagedTables:
    """Tables [page, outer, inner, position of the page, dim], initially zero. Implements what ``RowTables`` does.

    There are enough pages for all rows at their full length, without any that is shared. On Linux a page takes memory
    when it is first written, and gives it back some time after its last row.

    shapes: outer, inner and dim of each table.
    table: which pages each row has; all tables have the same ones.
    sizes: positions that each row may have, ``positions`` unless ``resize`` was called.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, int, int]],
        rows: int,
        positions: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.rows, self.positions, self.grows = rows, positions, grows_on(device)
        self.table = PageTable(rows, positions)
        self.sizes = [positions] * rows
        self._page_bytes = [page_bytes(shape, dtype) for shape in shapes]
        pages, sizes = len(self.table.references), zip(shapes, self._page_bytes, strict=True)
        self._memory = [reserved(pages * size) for size in self._page_bytes] if self.grows else []
        flat = [zeros_in(memory, dtype) for memory in self._memory] or [
            torch.zeros(pages * size // dtype.itemsize, dtype=dtype, device=device) for size in self._page_bytes
        ]
        self.tables = [
            whole.view(pages, -1)[:, : math.prod(shape) * PAGE_POSITIONS].view(pages, *shape[:2], PAGE_POSITIONS, -1)
            for whole, (shape, _) in zip(flat, sizes, strict=True)
        ]

    @staticmethod
    def row_bytes(shape: tuple[int, int, int], positions: int, dtype: torch.dtype) -> int:
        """Bytes that a row of ``positions`` takes in a table if it shares no page. shape: outer, inner, dim."""
        return pages_for(positions) * page_bytes(shape, dtype)

    def paged(self, table: int) -> PagedVectors:
        """A table as the kernels read it."""
        strides, of = self.tables[table].stride(), self.table
        return PagedVectors(self.tables[table], of.pages, strides[1], strides[0], strides[2], of.references)

    def layer(self, table: Tensor, layer: int) -> Tensor:
        """Return a copy of the vectors of an outer index, [row, inner, position, dim]: for tests and in torch."""
        return self.by_row(table[:, layer : layer + 1])[0]

    def by_row(self, table: Tensor) -> Tensor:
        """Return a copy of a table as ``RowTables`` has it, [outer, row, inner, position, dim]."""
        return table[self.table.pages.long()].permute(2, 0, 3, 1, 4, 5).flatten(3, 4)

    def vectors(self, table: Tensor, layer: int) -> Tensor:
        """Return the parts of vectors from an outer index on, [N, part], which ``vector_index`` numbers.

        A part divides a vector and a page: that of 8 bits with its scale does not fill pages of the system.
        """
        part, first = _part(table), layer * table.stride(1)
        count = (table.shape[0] * table.stride(0) - first) // part
        return table.as_strided((count, part), (part, 1), table.storage_offset() + first)

    def vector_index(self, table: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
        """Numbers of the parts at ``slots`` [B, L] of ``rows`` [B], [B * inner * L * parts of a vector] int64."""
        slots = self.within(rows[:, None], slots)
        pages, places = self._where(rows[:, None], slots)
        inner = torch.arange(table.shape[2], device=slots.device)[None, :, None] * PAGE_POSITIONS
        part, parts = _part(table), table.shape[4] // _part(table)
        first = pages[:, None] * (table.stride(0) // part) + (inner + places[:, None]) * parts
        return (first[..., None] + torch.arange(parts, device=slots.device)).flatten()

    def within(self, rows: Tensor, slots: Tensor) -> Tensor:
        """Replace slots beyond the last position by the one behind it; see ``RowTables``."""
        return slots.clamp(max=self.positions)

    def _where(self, rows: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Pages of the slots, and places in them."""
        return self.table.pages[rows, slots // PAGE_POSITIONS].long(), slots % PAGE_POSITIONS

    def cover(self, rows: Sequence[int], firsts: Sequence[int], stops: Sequence[int]) -> None:
        """Give rows pages of their own for the positions firsts[i] to stops[i] - 1, which are going to be written."""
        for row, first, stop in zip(rows, firsts, stops, strict=True):
            self._copy(self.table.cover(row, first, min(stop, self.positions)))

    def keep(self, rows: Tensor, text: Tensor, paths: Tensor) -> None:
        """Move the vectors of accepted nodes to the slots right after their rows' texts; see ``RowTables``."""
        order, column = torch.arange(paths.shape[1]), rows[:, None]
        nodes = (self.within(column, text[:, None] + places) for places in (paths, order))
        source, destination = (self._where(column, slots) for slots in nodes)
        for table in self.tables:
            table[destination[0], :, :, destination[1]] = table[source[0], :, :, source[1]]

    def copy_row(self, source: int, destination: int, length: int) -> None:
        """Let a row begin as another one does: whole pages of the first ``length`` slots are shared."""
        self._copy(self.table.share(source, destination, length))
        self._bound_freed()

    def _copy(self, copies: Iterable[PageCopy]) -> None:
        for source, destination in copies:
            for table in self.tables:
                table[destination] = table[source]

    def cut(self, row: int, slots: int) -> None:
        """Free what a row has behind its first ``slots`` slots, where it is going to be written."""
        self.table.cut(row, slots)
        self._copy(self.table.cover(row, slots, self.table.held[row] * PAGE_POSITIONS))
        self._bound_freed()

    def resize(self, row: int, positions: int) -> None:
        """Set the positions that a row may have. The memory of those beyond is given back, unless others share it."""
        assert self.grows
        assert 0 <= positions <= self.positions
        self.sizes[row] = positions
        self.table.cut(row, positions)
        self.give_back()

    def erase_row(self, row: int) -> None:
        """Free a row. Pages that no other row has are cleared, which keeps a failed text's NaN out of the next one."""
        before = len(self.table.freed)
        self.table.cut(row, 0)
        if self.grows:
            self.give_back()
            return
        for table in self.tables:
            table[self.table.freed[before:]] = 0

    def _bound_freed(self) -> None:
        if len(self.table.freed) * sum(self._page_bytes) > _FREED_BYTES:
            self.give_back()

    def repeated_bytes(self, rows: Collection[int]) -> int:
        """Return the bytes of pages that these rows share, without their first time."""
        return self.table.repeated(rows) * sum(self._page_bytes)

    def shared_bytes_behind(self, row: int, slots: int) -> int:
        """Return the bytes of pages that a row shares with others behind its last whole page of ``slots``."""
        return self.table.shared_behind(row, slots) * sum(self._page_bytes)

    def shareable_bytes(self, slots: int) -> int:
        """Return the bytes that a row shares which begins with the first ``slots`` of another one: of whole pages."""
        return slots // PAGE_POSITIONS * sum(self._page_bytes)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every page is counted once."""
        self.table.check_integrity()

    def give_back(self) -> None:
        """Give the memory of freed pages back to the system, which clears them."""
        runs = list(_runs(self.table.take_freed() if self.grows else []))
        for memory, size in zip(self._memory, self._page_bytes, strict=False):
            for first, count in runs:
                memory.madvise(mmap.MADV_DONTNEED, first * size, count * size)

    def randomise(self, rows: int, positions: int, generator: torch.Generator) -> None:
        """Give the first rows pages of their own for ``positions``, and fill these with random numbers."""
        self.cover(range(rows), [0] * rows, [positions] * rows)
        for page in {page for row in range(rows) for page in self.table.pages_of(row)}:
            for table in self.tables:
                table[page] = random_vectors(table[page], generator)


def _part(table: Tensor) -> int:
    return math.gcd(table.stride(0), table.shape[4])


def page_bytes(shape: tuple[int, int, int], dtype: torch.dtype) -> int:
    """Bytes of a page of a table: whole pages of the system. shape: outer, inner, dim."""
    return -(-math.prod(shape) * PAGE_POSITIONS * dtype.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE


def _runs(pages: Sequence[int]) -> list[tuple[int, int]]:
    """First page and length of each run of consecutive pages, which ascend."""
    runs: list[tuple[int, int]] = []
    for page in pages:
        if runs and sum(runs[-1]) == page:
            runs[-1] = runs[-1][0], runs[-1][1] + 1
        else:
            runs.append((page, 1))
    return runs
