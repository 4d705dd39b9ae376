"""Tables of what is kept of every token of every row. On Linux's CPUs they take the memory that rows use, page by page.

Address space is there for every row at its longest, memory is not: the system gives a page when it is first written,
and takes it back when it is told that nobody needs it (Linux, madvise(2): MADV_DONTNEED). So a row lies in one piece
whatever its length, and what reads tables need not know that they grow.
"""

from __future__ import annotations

import math
import mmap
import sys
from contextlib import suppress

import torch
from torch import Tensor

from paceline.errors import CapacityError

GROWS = sys.platform == "linux"  # elsewhere all of a table's memory counts as taken from the start
_UNRESERVED = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python 3.11 does not name it
_GIB = 2**30


def grows_on(device: torch.device) -> bool:
    """Whether rows take the memory that they use; on other devices each takes that of the longest from the start."""
    return GROWS and device.type == "cpu"


class RowTables:
    """Tables [outer, row, inner, slot, dim] of zeros, alike in shape, whose rows have as many slots each.

    A row is written only at its own slots and nothing is ever erased: what lies at or beyond a row's length is
    overwritten before anything may look at it. One slot more than a row's own exists: writes beyond the end (the
    padding at a row's tail) land there, and nothing ever reads it.

    sizes: slots that each row has: ``positions`` of them, unless it was given fewer.
    """

    def __init__(
        self, tables: int, shape: tuple[int, int, int, int, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        outer, self.rows, inner, self.positions, dim = shape
        self.grows = grows_on(device)
        width = _padded(self.positions + 1, dim * dtype.itemsize) if self.grows else self.positions + 1
        whole = outer, self.rows, inner, width, dim
        # Zeros, not garbage, that may hold NaN: NaN x 0 is NaN, also where attention is masked.
        self._pages = [_Pages(whole, dtype) for _ in range(tables)] if self.grows else []
        on_device = [] if self.grows else [torch.zeros(whole, dtype=dtype, device=device) for _ in range(tables)]
        self.tables = [pages.tensor for pages in self._pages] or on_device
        self.sizes = [self.positions] * self.rows
        self._ends = torch.full((self.rows,), self.positions, device=device)  # the sizes, where somebody has set them
        self._is_sized = False

    @staticmethod
    def row_bytes(tables: int, shape: tuple[int, int, int], positions: int, dtype: torch.dtype) -> int:
        """Memory that a row of so many slots takes where rows grow, in bytes. shape: outer, inner, dim."""
        outer, inner, dim = shape
        return tables * outer * inner * _up((positions + 1) * dim * dtype.itemsize if positions else 0, mmap.PAGESIZE)

    def resize(self, row: int, positions: int) -> None:
        """From now on the row has so many slots; the memory of others is given back, and what they held is lost.

        It must not be asked of tables that do not grow.
        """
        assert self.grows
        assert 0 <= positions <= self.positions
        shrinks, self._is_sized = positions < self.sizes[row], True
        self.sizes[row] = self._ends[row] = positions
        if shrinks:
            self._give_back(row)

    def _give_back(self, row: int) -> None:
        """What lies beyond the row's end."""
        slots = self.sizes[row]
        for pages in self._pages:
            pages.give_back(row, slots + 1 if slots else 0)

    def within(self, rows: Tensor, slots: Tensor) -> Tensor:
        """The slots of these rows [...], those beyond a row's end at its trash slot. rows: broadcasts to the slots."""
        return torch.minimum(slots, self._ends[rows]) if self._is_sized else slots.clamp(max=self.positions)

    def keep(self, rows: Tensor, text: Tensor, paths: Tensor) -> None:
        """Move what is kept of accepted nodes behind their rows' texts.

        rows, text [B]: rows, and the first slot behind each one's text, that of its node 0. paths [B, k]: the nodes to
        be there, one slot after the other, a node's own number where nothing is to move.
        """
        order = torch.arange(paths.shape[1], device=paths.device)
        of_row = rows[:, None]
        source, place = (self.within(of_row, text[:, None] + nodes) for nodes in (paths, order))
        for table in self.tables:
            table[:, of_row, :, place] = table[:, of_row, :, source]

    def copy_row(self, source: int, destination: int, length: int) -> None:
        """Copy the first ``length`` slots of one row over another: to fill a hole, or to share a prefill."""
        for table in self.tables:
            table[:, destination, :, :length] = table[:, source, :, :length]

    def swap_rows(self, one: int, other: int, length: int) -> None:
        """Exchange two rows, the first ``length`` slots of them, and their sizes."""
        sizes = self.sizes
        ones, others = min(length, sizes[one]), min(length, sizes[other])
        for table in self.tables:
            held = table[:, one, :, :ones].clone()
            table[:, one, :, :others] = table[:, other, :, :others]
            table[:, other, :, :ones] = held
        if sizes[one] != sizes[other]:
            sizes[one], sizes[other] = sizes[other], sizes[one]
            self._ends[[one, other]] = self._ends[[other, one]]
            self._give_back(one if sizes[one] < sizes[other] else other)


class _Pages:
    """One table in memory of its own: pages that nobody has written do not exist."""

    def __init__(self, shape: tuple[int, int, int, int, int], dtype: torch.dtype) -> None:
        self._outer, self._rows, self._inner, width, dim = shape
        self._slot = dim * dtype.itemsize
        self._stripe = width * self._slot
        self._memory = _reserve(math.prod(shape) * dtype.itemsize)
        self.tensor = torch.frombuffer(self._memory, dtype=torch.uint8).view(dtype).view(shape)

    def give_back(self, row: int, slots: int) -> None:
        """All of a row but its first slots; they are zeros again."""
        kept = _up(slots * self._slot, mmap.PAGESIZE)
        if kept == self._stripe:
            return
        for outer in range(self._outer):
            first = (outer * self._rows + row) * self._inner
            if kept == 0:
                self._memory.madvise(mmap.MADV_DONTNEED, first * self._stripe, self._inner * self._stripe)
                continue
            for stripe in range(first, first + self._inner):
                self._memory.madvise(mmap.MADV_DONTNEED, stripe * self._stripe + kept, self._stripe - kept)


def _reserve(size: int) -> mmap.mmap:
    """Address space. In small pages: one of 2 MiB would reach over the tails of several rows, and be taken for each."""
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _UNRESERVED)
    except (OSError, OverflowError, ValueError) as error:
        raise CapacityError(
            f"the system gives no {size / _GIB:.1f} GiB of address space for the rows' caches ({error}); lower "
            "max_batch_size or max_model_len, or look at `ulimit -v` and at vm.overcommit_memory"
        ) from error
    with suppress(OSError):  # a system that was built without huge pages
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return memory


def _padded(slots: int, slot: int) -> int:
    """So many slots of ``slot`` bytes, or a few more, as fill an odd number of pages.

    Then no page belongs to two rows, and equal slots of neighbouring rows do not share the few places of a processor's
    cache that addresses a power of two apart have.
    """
    page = mmap.PAGESIZE
    step = page // math.gcd(page, slot)
    width = _up(slots, step)
    return width if width * slot // page % 2 else width + step


def _up(size: int, step: int) -> int:
    return -(-size // step) * step
