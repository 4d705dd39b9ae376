"""Tables that keep a vector for every token of every row in pages, which rows share where their texts begin alike."""

from __future__ import annotations

import math
import mmap
from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor

from paceline.core.eight_bits import stored, vector_width
from paceline.core.pages import PAGE_POSITIONS, PageCopy, PagedVectors, PageTable, pages_for
from paceline.core.row_tables import grows_on, return_pages, zeros_by_page

# Memory of freed pages that is kept for the next ones, where rows have no sizes: clearing it anew takes milliseconds.
_FREED_BYTES = 2**26


class PagedTables:
    """Tables [page, outer, inner, position of the page, dim], initially zero. Implements what ``RowTables`` does.

    In memory the pages of one outer and inner index lie side by side, so that a row whose pages follow each other is
    read as if there were none: with whole pages side by side, attention over 4,000 tokens took 10 % longer.

    Without a pool there are enough pages for all rows at their full length, without any that is shared. On the CPUs of
    Linux a page takes memory when it is first written, and gives it back some time after its last row.

    shapes: outer, inner and dim of each table. pool: number of pages, allocated at once; None: see above.
    table: which pages each row has; all tables have the same ones. pages: the same [rows, blocks] int32 on the tables'
        device, where captured programs read it. A change is sent there when it is made, behind what was launched.
    sizes: positions that each row may have, ``positions`` unless ``resize`` was called.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, int, int]],
        rows: int,
        positions: int,
        dtype: torch.dtype,
        device: torch.device,
        pool: int | None = None,
    ) -> None:
        self.rows, self.positions, self.has_pool = rows, positions, pool is not None
        self._returns_memory = grows_on(device)
        self.grows = self.has_pool or self._returns_memory
        self.table = PageTable(rows, positions, pool)
        self.pages = self.table.pages if device.type == "cpu" else self.table.pages.to(device)
        self.sizes = [positions] * rows
        self._is_sized = False
        self.page_bytes = sum(page_bytes(shape, dtype) for shape in shapes)
        pages = len(self.table.references)
        self._stripes = [
            zeros_by_page(outer, inner, pages, PAGE_POSITIONS, dim, dtype=dtype, device=device)
            for outer, inner, dim in shapes
        ]
        self.tables = [stripes.permute(2, 0, 1, 3, 4) for stripes in self._stripes]

    @staticmethod
    def row_bytes(shape: tuple[int, int, int], positions: int, dtype: torch.dtype) -> int:
        """Bytes that a row of ``positions`` takes in a table if it shares no page. shape: outer, inner, dim."""
        return pages_for(positions) * page_bytes(shape, dtype)

    def paged(self, table: int) -> PagedVectors:
        """A table as the kernels read it."""
        strides, of = self.tables[table].stride(), self.table
        return PagedVectors(self.tables[table], of.pages, strides[1], strides[0], strides[2], of.references)

    def of_layer(self, table: Tensor, layer: int) -> Tensor:
        """Return the vectors of an outer index, [page, inner, place, dim]."""
        return table[:, layer]

    def layer(self, table: Tensor, layer: int) -> Tensor:
        """Return a copy of the vectors of an outer index, [row, inner, position, dim]: for tests and in torch."""
        return self.by_row(table[:, layer : layer + 1])[0]

    def by_row(self, table: Tensor) -> Tensor:
        """Return a copy of a table as ``RowTables`` has it, [outer, row, inner, position, dim]."""
        return table[self.pages.long()].permute(2, 0, 3, 1, 4, 5).flatten(3, 4)

    def write(self, table: Tensor, layer: int, index: Tensor, vectors: Tensor) -> None:
        """Store vectors [B, inner, L, dim], as they are in the table, of an outer index at ``vector_index``."""
        pages, places = index
        vectors = vectors.transpose(1, 2)
        if table.dtype.itemsize == 1:
            table, vectors = table.view(torch.int8), vectors.view(torch.int8)  # torch copies no float8 by index
        table[pages, layer, :, places] = vectors

    def vector_index(self, table: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
        """Return the pages of ``slots`` [B, L] of ``rows`` [B], and the places in them: [2, B, L] int64."""
        column = rows[:, None]
        return torch.stack(self._where(column, self.within(column, slots)))

    def within(self, rows: Tensor, slots: Tensor) -> Tensor:
        """Replace slots beyond the last position by the one behind it; see ``RowTables``."""
        return slots.clamp(max=self.positions)

    def _where(self, rows: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Pages of the slots, and places in them."""
        return self.pages[rows, slots // PAGE_POSITIONS].long(), slots % PAGE_POSITIONS

    def cover(self, rows: Sequence[int], firsts: Sequence[int], stops: Sequence[int]) -> None:
        """Give rows pages of their own for the positions firsts[i] to stops[i] - 1, which are going to be written."""
        for row, first, stop in zip(rows, firsts, stops, strict=True):
            self._copy(self.table.cover(row, first, min(stop, self.positions)))
        self._send()

    def _send(self) -> None:
        """Send the rows whose pages have changed to the device; see ``core.uploads``."""
        for row in self.table.take_changed():
            if self.pages is not self.table.pages:
                self.pages[row].copy_(self.table.pages[row], non_blocking=True)

    def keep(self, rows: Tensor, text: Tensor, paths: Tensor) -> None:
        """Move the vectors of accepted nodes to the slots right after their rows' texts; see ``RowTables``."""
        order, column = torch.arange(paths.shape[1], device=paths.device), rows[:, None]
        nodes = (self.within(column, text[:, None] + places) for places in (paths, order))
        source, destination = (self._where(column, slots) for slots in nodes)
        for table in self.tables:
            numbers = table.view(torch.int8) if table.dtype.itemsize == 1 else table
            numbers[destination[0], :, :, destination[1]] = numbers[source[0], :, :, source[1]]

    def copy_row(self, source: int, destination: int, length: int) -> None:
        """Let a row begin as another one does: whole pages of the first ``length`` slots are shared."""
        self._copy(self.table.share(source, destination, length))
        self._send()
        self._bound_freed()

    def _copy(self, copies: Iterable[PageCopy]) -> None:
        for source, destination in copies:
            for table in self.tables:
                table[destination] = table[source]

    def cut(self, row: int, slots: int) -> None:
        """Free what a row has behind its first ``slots`` slots, where it is going to be written."""
        self.table.cut(row, slots)
        self._copy(self.table.cover(row, slots, self.table.held[row] * PAGE_POSITIONS))
        self._send()
        self._bound_freed()

    def resize(self, row: int, positions: int) -> None:
        """Set the positions that a row may have. The memory of those beyond is given back, unless others share it."""
        assert self.grows
        assert 0 <= positions <= self.positions
        self.sizes[row], self._is_sized = positions, True
        self.table.cut(row, positions)
        self._send()
        self.give_back()

    def erase_row(self, row: int) -> None:
        """Free a row. Pages that no other row has are cleared, which keeps a failed text's NaN out of the next one."""
        before = len(self.table.freed)
        self.table.cut(row, 0)
        self._send()
        for table in self.tables:
            table[self.table.freed[before:]] = 0
        self.give_back()

    def _bound_freed(self) -> None:
        if len(self.table.freed) * self.page_bytes > (0 if self._is_sized else _FREED_BYTES):
            self.give_back()

    def repeated_bytes(self, rows: Collection[int]) -> int:
        """Return the bytes of pages that these rows share, without their first time."""
        return self.table.repeated(rows) * self.page_bytes

    def shared_bytes_behind(self, row: int, slots: int) -> int:
        """Return the bytes of pages that a row shares with others behind its last whole page of ``slots``."""
        return self.table.shared_behind(row, slots) * self.page_bytes

    def shareable_bytes(self, slots: int) -> int:
        """Return the bytes that a row shares which begins with the first ``slots`` of another one: of whole pages."""
        return slots // PAGE_POSITIONS * self.page_bytes

    def check_integrity(self) -> None:
        """Raise AssertionError unless every page is counted once."""
        self.table.check_integrity()

    def give_back(self) -> None:
        """Give the memory of freed pages back to the system, which clears them.

        Where a page of the system also belongs to a neighbour, it goes with the last of them.
        """
        if not self._returns_memory:
            return
        for first, count in _runs(self.table.take_freed()):
            for stripes in self._stripes:
                reach = -(-mmap.PAGESIZE // (stripes[0, 0, 0].nbytes))
                part = self.table.free_around(first, first + count, reach)
                for stripe in stripes.flatten(0, 1):
                    return_pages(stripe[part])

    def randomise(self, rows: int, positions: int, generator: torch.Generator) -> None:
        """Give the first rows pages of their own for ``positions``, and fill these with random numbers."""
        self.cover(range(rows), [0] * rows, [positions] * rows)
        for page in {page for row in range(rows) for page in self.table.pages_of(row)}:
            for table in self.tables:
                numbers = table.new_empty(*table.shape[1:4], vector_width(table), dtype=torch.float32)
                table[page] = stored(numbers.uniform_(-1, 1, generator=generator), table.dtype)

    def row(self, row: int, length: int) -> list[Tensor]:
        """Return a copy of the first ``length`` slots of a row in each table: [outer, inner, length, dim]."""
        pages = self.pages[row, : pages_for(length)].long()
        whole = [table[pages].permute(1, 2, 0, 3, 4).flatten(2, 3) for table in self.tables]
        return [table[:, :, :length].contiguous() for table in whole]

    def is_row(self, tensors: Sequence[Tensor], length: int) -> bool:
        """Whether these are what ``row`` returns for ``length`` slots of such tables."""
        wanted = [(table.dtype, (*table.shape[1:3], length, table.shape[4])) for table in self.tables]
        return [(tensor.dtype, tuple(tensor.shape)) for tensor in tensors] == wanted

    def set_row(self, row: int, tensors: Sequence[Tensor], length: int) -> None:
        """Write the first ``length`` slots of a row from what ``row`` returned, which may be longer."""
        self.cover([row], [0], [length])
        for number, page in enumerate(self.table.pages_of(row)[: pages_for(length)]):
            part = slice(number * PAGE_POSITIONS, min((number + 1) * PAGE_POSITIONS, length))
            for table, tensor in zip(self.tables, tensors, strict=True):
                table[page, :, :, : part.stop - part.start] = tensor[:, :, part]


def page_bytes(shape: tuple[int, int, int], dtype: torch.dtype) -> int:
    """Bytes of a page of a table. shape: outer, inner, dim."""
    return math.prod(shape) * PAGE_POSITIONS * dtype.itemsize


def _runs(pages: Sequence[int]) -> list[tuple[int, int]]:
    """First page and length of each run of consecutive pages, which ascend."""
    runs: list[tuple[int, int]] = []
    for page in pages:
        if runs and sum(runs[-1]) == page:
            runs[-1] = runs[-1][0], runs[-1][1] + 1
        else:
            runs.append((page, 1))
    return runs
