"""Pages of keys and values: which page each slot has for each block of positions, and who else has it."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

PAGE_POSITIONS = 64  # kPagePositions of csrc/kernels.h: a quarter of the keys that attention weighs at once


def pages_for(positions: int) -> int:
    """Pages that hold so many positions."""
    return -(-positions // PAGE_POSITIONS)


def blocks_for(positions: int) -> int:
    """Blocks of a slot of ``positions``, the one that writes beyond its end go to included."""
    return positions // PAGE_POSITIONS + 1


class PagedVectors(NamedTuple):
    """Keys or values of the layers of one shape.

    The vector of a layer, row, head and position lies at layer * layer_stride + page * page_stride
    + head * head_stride + (position modulo PAGE_POSITIONS) * dim elements.

    memory: any tensor whose first element is the first vector's, and whose last size is dim.
    pages: int32 [rows, blocks], the page of each block of PAGE_POSITIONS positions.
    references: int32 [pages], number of rows that have each page: a pass writes only pages that one row has. None: each
        row has its own pages.
    """

    memory: Tensor
    pages: Tensor
    layer_stride: int
    page_stride: int
    head_stride: int
    references: Tensor | None = None


class PageCopy(NamedTuple):
    """A page whose content another page must get before that is read."""

    source: int
    destination: int


class PageTable:
    """The pages of all slots. Slots share the pages of a common prefix; a page is written while one slot has it.

    A slot has pages for its first blocks of ``PAGE_POSITIONS`` positions. Page 0 belongs to no slot: it stands for the
    blocks without a page, and writes beyond a slot's end go there.

    pages: int32 [slots, blocks]. references: int32 [pages], number of slots that have each page. Both stay where they
        are in memory, so that kernels may have their addresses.
    held: number of blocks of each slot that have a page.
    freed: pages that no slot has any more, with the data that they had. unused: those whose memory was given back.
    fresh: the first page that was never used; the following ones were not either.
    changed: slots whose pages have changed since ``take_changed``.

    count: pages beside page 0; None: enough for all slots at their full length.
    """

    def __init__(self, slots: int, positions: int, count: int | None = None) -> None:
        self.pages = torch.zeros(slots, blocks_for(positions), dtype=torch.int32)
        count = slots * pages_for(positions) if count is None else count
        self.references = torch.zeros(1 + count, dtype=torch.int32)
        self.held = [0] * slots
        self.freed: list[int] = []
        self.unused: list[int] = []
        self.fresh = 1
        self.changed: set[int] = set()
        self._pages, self._references = self.pages.numpy().data, self.references.numpy().data

    @property
    def used(self) -> int:
        """Number of pages that slots have. A page that several have counts once."""
        return self.fresh - 1 - len(self.freed) - len(self.unused)

    def repeated(self, slots: Collection[int]) -> int:
        """Return how many more pages these slots have together than they share."""
        if len(slots) == len(self.held):
            return sum(self.held) - self.used
        blocks = max((self.held[slot] for slot in slots), default=0)
        counts = torch.bincount(self.pages[list(slots), :blocks].flatten())[1:]
        return int((counts - 1).clamp(min=0).sum())

    def shared_behind(self, slot: int, positions: int) -> int:
        """Return how many pages a slot has in common with others behind its last whole page of ``positions``."""
        pages = self.pages[slot, positions // PAGE_POSITIONS : self.held[slot]]
        return int((self.references[pages] > 1).sum())

    def pages_of(self, slot: int) -> list[int]:
        """Return the pages of a slot in the order of its blocks."""
        return [self._pages[slot, block] for block in range(self.held[slot])]

    def cover(self, slot: int, first: int, stop: int) -> list[PageCopy]:
        """Give a slot pages of its own for the positions ``first`` to ``stop`` - 1, so that they can be written.

        Returns a copy to make for each page that it had in common with other slots.
        """
        copies = []
        for block in range(first // PAGE_POSITIONS, min(pages_for(stop), self.held[slot])):
            shared = self._pages[slot, block]
            if self._references[shared] > 1:
                self._references[shared] -= 1
                copies.append(PageCopy(shared, self._take(slot, block)))
        for block in range(self.held[slot], pages_for(stop)):
            self._take(slot, block)
        self.held[slot] = max(self.held[slot], pages_for(stop))
        return copies

    def share(self, source: int, slot: int, positions: int) -> list[PageCopy]:
        """Give a slot the source's pages for its first ``positions``, in place of its own ones.

        Returns a copy to make of the last page if that holds more positions, because the slot is going to write them.
        """
        self.cut(slot, 0)
        self.held[slot] = min(pages_for(positions), self.held[source])
        self.changed.add(slot)
        for block in range(self.held[slot]):
            self._pages[slot, block] = page = self._pages[source, block]
            self._references[page] += 1
        return self.cover(slot, positions, min(pages_for(positions), self.held[slot]) * PAGE_POSITIONS)

    def cut(self, slot: int, positions: int) -> None:
        """Free the pages of a slot behind its first ``positions``."""
        for block in range(pages_for(positions), self.held[slot]):
            page = self._pages[slot, block]
            self.changed.add(slot)
            self._pages[slot, block] = 0
            self._references[page] -= 1
            if not self._references[page]:
                self.freed.append(page)
        self.held[slot] = min(self.held[slot], pages_for(positions))

    def take_changed(self) -> set[int]:
        """Return the slots whose pages have changed since the last call."""
        changed, self.changed = self.changed, set()
        return changed

    def take_freed(self) -> list[int]:
        """Return the freed pages in ascending order; they count as pages without data from now on."""
        pages = sorted(self.freed)
        self.unused += reversed(pages)
        self.freed.clear()
        return pages

    def free_around(self, first: int, stop: int, reach: int) -> slice:
        """Return the pages first to stop - 1, which no slot has, with at most ``reach`` such pages on either side.

        Page 0 counts as one of them: what is written there is never read.
        """
        references, low, high = self.references, max(0, first - reach), min(len(self.references), stop + reach)
        before = next((page + 1 for page in range(first - 1, max(0, low - 1), -1) if references[page]), low)
        behind = next((page for page in range(stop, high) if references[page]), high)
        return slice(before, behind)

    def _take(self, slot: int, block: int) -> int:
        if free := self.freed or self.unused:
            page = free.pop()
        else:
            assert self.fresh < len(self.references), "no page is left: more rows were admitted than pages suffice for"
            page, self.fresh = self.fresh, self.fresh + 1
        self._references[page] = 1
        self._pages[slot, block] = page
        self.changed.add(slot)
        return page

    def check_integrity(self) -> None:
        """Raise AssertionError unless every page is free or has as many references as slots have it."""
        pages, references = self.pages.numpy(), self.references.numpy()[: self.fresh]
        held = np.arange(pages.shape[1]) < np.array(self.held)[:, None]
        assert np.array_equal(pages != 0, held), "a slot lacks a page, or has one behind its last one"
        counts = np.bincount(pages[held], minlength=self.fresh)
        assert np.array_equal(counts, references), "references differ from the slots' pages"
        free = np.array([0, *self.freed, *self.unused])
        assert free.max() < self.fresh, "a page is free that was never used"
        places = (counts > 0) + np.bincount(free, minlength=self.fresh)
        assert (places[1:] == 1).all(), "a page is lost, free twice, or free and in use"
