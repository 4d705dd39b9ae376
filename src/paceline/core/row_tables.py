"""Tables that keep a vector for every token of every row. On CPUs under Linux and macOS they use memory page by page.

Each row has address space for its maximum length. The system allocates a page when it is first written, and frees it on
request. A row is therefore contiguous at any length, and readers of a table need not know that rows grow.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import cache

import torch
from torch import Tensor

from paceline.core.eight_bits import stored, vector_width
from paceline.core.pages import PAGE_POSITIONS, PagedVectors, blocks_for
from paceline.errors import CapacityError

GROWS = sys.platform in ("linux", "darwin")  # on Windows a table's memory is allocated as a whole
# madvise(2): there MADV_DONTNEED frees pages, which then read as zeros. On macOS it only advises.
ADVICE_FREES = sys.platform == "linux"
_UNRESERVED = 0x4000 if sys.platform == "linux" else 0  # MAP_NORESERVE, which Python 3.11 does not name
_FIXED = 0x10  # MAP_FIXED, on Linux and macOS
_GIB = 2**30


def grows_on(device: torch.device) -> bool:
    """Whether rows take only the memory that they use. On other devices each takes the maximum from the start."""
    return GROWS and device.type == "cpu"


def zeros_by_page(*shape: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """A tensor of zeros. Where rows grow, its pages take memory when they are first written. Raises CapacityError."""
    if not grows_on(torch.device(device)) or 0 in shape:
        return torch.zeros(shape, dtype=dtype, device=device)
    return _zeros_in(_reserve(math.prod(shape) * dtype.itemsize), dtype).view(shape)


def return_pages(part: Tensor) -> None:
    """Free the whole pages of a contiguous part of a tensor of ``zeros_by_page``; they then read as zeros.

    Does nothing where rows do not grow. Raises CapacityError if the system refuses.
    """
    page, start = mmap.PAGESIZE, part.data_ptr()
    first, stop = _up(start, page), (start + part.nbytes) // page * page
    if grows_on(part.device) and first < stop:
        _free(first, stop - first)


def _free(address: int, size: int) -> None:
    """Free whole pages by advice, or by mapping new ones in their place; they then read as zeros."""
    libc = _libc()
    if ADVICE_FREES:
        is_free = libc.madvise(address, size, mmap.MADV_DONTNEED) == 0
    else:
        access = mmap.PROT_READ | mmap.PROT_WRITE
        is_free = libc.mmap(address, size, access, _FIXED | _anonymous(), -1, 0) == address
    if not is_free:
        raise CapacityError(f"the system does not free {size} bytes of the rows' caches (error {ctypes.get_errno()})")


def _anonymous() -> int:
    """Flags of zeroed memory of this process."""
    return mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _UNRESERVED


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.madvise.argtypes = (pointer, size, number)
    libc.mmap.argtypes, libc.mmap.restype = (pointer, size, number, number, number, ctypes.c_int64), pointer
    return libc


def _zeros_in(memory: mmap.mmap, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype)


class RowTables:
    """Tables [outer, row, inner, slot, dim], initially zero.

    A row is written only at its own slots, and only ``erase_row`` clears it, after NaN. Slots at or beyond a row's
    length are overwritten before they are read. Each row has one additional trash slot, which is never read: writes
    beyond the end (padding at a row's tail) go there.

    shapes: outer, inner and dim of each table.
    sizes: number of slots of each row, ``positions`` unless ``resize`` was called.
    pages, page_bytes, has_pool: what ``PagedTables`` have; there are none.
    """

    pages, page_bytes, has_pool = None, 0, False

    def __init__(
        self,
        shapes: Sequence[tuple[int, int, int]],
        rows: int,
        positions: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.rows, self.positions, self.grows = rows, positions, grows_on(device)
        whole = [(outer, rows, inner, self._width(dim, dtype, device), dim) for outer, inner, dim in shapes]
        # Zeros, because uninitialized memory may hold NaN, and NaN x 0 is NaN even where attention is masked.
        self._pages = [_Pages(shape, dtype) for shape in whole] if self.grows else []
        on_device = [] if self.grows else [torch.zeros(shape, dtype=dtype, device=device) for shape in whole]
        self.tables = [pages.tensor for pages in self._pages] or on_device
        self.sizes = [self.positions] * self.rows
        self._ends = torch.full((self.rows,), self.positions, device=device)  # sizes as a tensor
        self._is_sized = False
        self._page_tables: dict[int, Tensor] = {}  # the kernels have their addresses

    def _width(self, dim: int, dtype: torch.dtype, device: torch.device) -> int:
        """Slots of a row's part of a table, the trash slot included. On a CPU they fill pages of the kernels."""
        slots = self.positions + 1
        if device.type != "cpu":
            return slots
        return _padded(slots, dim * dtype.itemsize) if self.grows else _up(slots, PAGE_POSITIONS)

    def paged(self, table: int) -> PagedVectors:
        """A table of a CPU as the kernels read it: each row has its own pages, side by side."""
        tensor = self.tables[table]
        outer_stride, row_stride, inner_stride, dim, _ = tensor.stride()
        page_stride = PAGE_POSITIONS * dim
        if table not in self._page_tables:
            rows, blocks = (torch.arange(n, dtype=torch.int32) for n in (self.rows, blocks_for(self.positions)))
            self._page_tables[table] = rows[:, None] * (row_stride // page_stride) + blocks
        return PagedVectors(tensor, self._page_tables[table], outer_stride, page_stride, inner_stride)

    @staticmethod
    def row_bytes(shape: tuple[int, int, int], positions: int, dtype: torch.dtype) -> int:
        """Bytes that a row of ``positions`` slots takes in a table where rows grow. shape: outer, inner, dim."""
        outer, inner, dim = shape
        return outer * inner * _up((positions + 1) * dim * dtype.itemsize if positions else 0, mmap.PAGESIZE)

    def resize(self, row: int, positions: int) -> None:
        """Set the number of slots of a row. Where rows grow, the memory of slots beyond is freed.

        Elsewhere rows keep their memory; the size is noted for those that compare it with other caches'.
        """
        assert 0 <= positions <= self.positions
        if not self.grows:
            self.sizes[row] = positions
            return
        shrinks, self._is_sized = positions < self.sizes[row], True
        self.sizes[row] = self._ends[row] = positions
        if shrinks:
            self._give_back(row)

    def _give_back(self, row: int) -> None:
        """Free the memory beyond the row's end."""
        slots = self.sizes[row]
        for pages in self._pages:
            pages.give_back(row, slots + 1 if slots else 0)

    def of_layer(self, table: Tensor, layer: int) -> Tensor:
        """Return the vectors of an outer index, [row, inner, slot, dim]."""
        return table[layer]

    layer = of_layer

    def by_row(self, table: Tensor) -> Tensor:
        """Return a table, [outer, row, inner, slot, dim]."""
        return table

    def write(self, table: Tensor, layer: int, index: Tensor, vectors: Tensor) -> None:
        """Store vectors [B, inner, L, dim], as they are in the table, of an outer index at ``vector_index``."""
        lines, vectors = (each.reshape(-1, each.shape[-1]) for each in (table[layer], vectors))
        if table.dtype.itemsize == 1:
            lines, vectors = lines.view(torch.int8), vectors.view(torch.int8)  # torch copies no float8 by index
        lines.index_copy_(0, index, vectors)

    def vector_index(self, table: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
        """Numbers of the vectors at ``slots`` [B, L] of ``rows`` [B]: [B * inner * L] int64.

        Those beyond a row's end are its trash slot's.
        """
        inner, width = table.shape[2:4]
        line = rows[:, None, None] * inner + torch.arange(inner, device=slots.device)[None, :, None]
        return (line * width + self.within(rows[:, None], slots)[:, None, :]).flatten()

    def cover(self, rows: Sequence[int], firsts: Sequence[int], stops: Sequence[int]) -> None:
        """Prepare for writes at the slots firsts[i] to stops[i] - 1: each row has its slots."""

    def cut(self, row: int, slots: int) -> None:
        """Forget what a row has behind its first ``slots`` slots, which is overwritten later."""

    def repeated_bytes(self, rows: Collection[int]) -> int:
        """Return the bytes that these rows share: none."""
        return 0

    def shared_bytes_behind(self, row: int, slots: int) -> int:
        """Return the bytes that a row shares with others behind its first ``slots`` slots: none."""
        return 0

    def shareable_bytes(self, slots: int) -> int:
        """Return the bytes that a row shares which begins as another one does: none."""
        return 0

    def check_integrity(self) -> None:
        """Raise AssertionError unless the tables are in order, as these always are."""

    def randomise(self, rows: int, slots: int, generator: torch.Generator) -> None:
        """Fill the first slots of the first rows with random numbers."""
        for table in self.tables:
            for row in (row for layer in table for row in layer[:rows]):
                numbers = row.new_empty(len(row), slots, vector_width(table), dtype=torch.float32)
                row[:, :slots] = stored(numbers.uniform_(-1, 1, generator=generator), table.dtype)

    def within(self, rows: Tensor, slots: Tensor) -> Tensor:
        """Replace slots beyond a row's end by its trash slot.

        slots: [...] int64. rows: int64, broadcastable to ``slots``. Returns the shape of ``slots``.
        """
        return torch.minimum(slots, self._ends[rows]) if self._is_sized else slots.clamp(max=self.positions)

    def keep(self, rows: Tensor, text: Tensor, paths: Tensor) -> None:
        """Move the vectors of accepted nodes to the slots right after their rows' texts.

        rows: [B] int64. text: [B] int64, first slot after each row's text, which holds node 0. paths: [B, k] int64, the
        node for each slot in order; a node's own index where nothing moves.
        """
        order = torch.arange(paths.shape[1], device=paths.device)
        column = rows[:, None]
        source, destination = (self.within(column, text[:, None] + nodes) for nodes in (paths, order))
        for table in self.tables:
            table[:, column, :, destination] = table[:, column, :, source]

    def copy_row(self, source: int, destination: int, length: int) -> None:
        """Copy the first ``length`` slots of one row to another, to fill a free slot or to share a prefix."""
        for table in self.tables:
            table[:, destination, :, :length] = table[:, source, :, :length]

    def row(self, row: int, length: int) -> list[Tensor]:
        """Return a copy of the first ``length`` slots of a row in each table: [outer, inner, length, dim]."""
        return [table[:, row, :, :length].clone(memory_format=torch.contiguous_format) for table in self.tables]

    def is_row(self, tensors: Sequence[Tensor], length: int) -> bool:
        """Whether these are what ``row`` returns for ``length`` slots of such tables."""
        wanted = [(table.dtype, (table.shape[0], table.shape[2], length, table.shape[4])) for table in self.tables]
        return [(tensor.dtype, tuple(tensor.shape)) for tensor in tensors] == wanted

    def set_row(self, row: int, tensors: Sequence[Tensor], length: int) -> None:
        """Write the first ``length`` slots of a row from what ``row`` returned, which may be longer."""
        for table, tensor in zip(self.tables, tensors, strict=True):
            table[:, row, :, :length] = tensor[:, :, :length]

    def erase_row(self, row: int) -> None:
        """Set a row to zeros, which keeps a failed text's NaN out of the next one."""
        for pages in self._pages:
            pages.give_back(row, 0)
        for table in [] if self._pages else self.tables:
            table[:, row] = 0


class _Pages:
    """One table in reserved address space, in which only written pages take memory."""

    def __init__(self, shape: tuple[int, int, int, int, int], dtype: torch.dtype) -> None:
        self._outer, self._rows, self._inner, width, dim = shape
        self._slot = dim * dtype.itemsize
        self._stripe = width * self._slot
        self.tensor = _zeros_in(_reserve(math.prod(shape) * dtype.itemsize), dtype).view(shape)

    def give_back(self, row: int, slots: int) -> None:
        """Free all of a row but its first ``slots`` slots. Freed slots read as zeros."""
        kept = _up(slots * self._slot, mmap.PAGESIZE)
        start = self.tensor.data_ptr()
        if kept == self._stripe:
            return
        for outer in range(self._outer):
            first = (outer * self._rows + row) * self._inner
            if kept == 0:
                _free(start + first * self._stripe, self._inner * self._stripe)
                continue
            for stripe in range(first, first + self._inner):
                _free(start + stripe * self._stripe + kept, self._stripe - kept)


def _reserve(size: int) -> mmap.mmap:
    """Reserve address space of ``size`` bytes, without huge pages, which would span the unused tails of several rows.

    Raises CapacityError if the system refuses.
    """
    try:
        memory = mmap.mmap(-1, size, flags=_anonymous())
    except (OSError, OverflowError, ValueError) as error:
        raise CapacityError(
            f"the system gives no {size / _GIB:.1f} GiB of address space for the rows' caches ({error}); lower "
            "max_batch_size or max_model_len, or look at `ulimit -v` and at vm.overcommit_memory"
        ) from error
    with suppress(AttributeError, OSError):  # macOS, and kernels without huge pages
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return memory


def _padded(slots: int, slot: int) -> int:
    """Number of slots, at least ``slots``, of ``slot`` bytes each that fills whole pages of the system and the kernels.

    Whole pages mean that no page belongs to two rows. With an odd number of steps, equal slots of neighbouring rows do
    not map to the same sets of the CPU cache.
    """
    step = math.lcm(mmap.PAGESIZE // math.gcd(mmap.PAGESIZE, slot), PAGE_POSITIONS)
    width = _up(slots, step)
    return width if width // step % 2 else width + step


def _up(size: int, step: int) -> int:
    return -(-size // step) * step
