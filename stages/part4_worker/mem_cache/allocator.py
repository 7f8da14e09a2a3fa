"""Hands out KV slots in pages. Restates sglang/srt/mem_cache/allocator.py, which at v0.4.6 was
still two files, memory_pool.py for single tokens and paged_allocator.py.

The free list is a stack in a fixed host array: taking pages lowers `top`, giving them back raises it.
So `backup_state` need save no more than the top: what was taken still stands above it, and putting it
back undoes any allocations, as long as nothing was freed in between (counted, and checked).
"""

from __future__ import annotations

import numpy as np


class TokenToKVPoolAllocator:
    """Slots 1·page_size … size + page_size − 1; page 0 pads. `size` is a multiple of `page_size`."""

    def __init__(self, size: int, page_size: int):
        self.page_size = page_size
        self.size = size // page_size * page_size
        self.clear()

    def clear(self) -> None:
        pages = self.size // self.page_size
        self._stack = np.arange(pages, 0, -1, dtype=np.int64)
        self._top = pages
        # Page 0 and one behind the last stand as free for ever: nobody may give them back either.
        self._is_free = np.ones(pages + 2, dtype=bool)
        self._frees = 0

    def available_size(self) -> int:
        """Free slots, whole pages only."""
        return self._top * self.page_size

    def new_slots(self, prefix_lens: np.ndarray, seq_lens: np.ndarray) -> int:
        """Free slots that growing each request from prefix_lens[i] to seq_lens[i] takes, in whole pages."""
        page = self.page_size
        return int((-(-seq_lens // page) - -(-prefix_lens // page)).sum()) * page

    def backup_state(self) -> tuple[int, int]:
        return self._top, self._frees

    def restore_state(self, state: tuple[int, int]) -> None:
        """Undo every allocation since `backup_state`."""
        top, frees = state
        if frees != self._frees:
            raise RuntimeError("slots were freed between backup_state and restore_state")
        self._is_free[self._stack[self._top : top]] = True
        self._top = top

    def alloc(self, need_size: int) -> np.ndarray | None:
        """Any free slots, [need_size], where a page is one slot; None, with nothing taken, if too few."""
        return self._take(need_size)

    def alloc_extend(
        self, prefix_lens: np.ndarray, seq_lens: np.ndarray, last_locs: np.ndarray
    ) -> np.ndarray | None:
        """Slots for positions prefix_lens[i] … seq_lens[i] − 1 of each request, one after the other.

        A partly filled last page is continued from `last_locs[i]`, the slot of position
        prefix_lens[i] − 1 (ignored where the prefix ends on a page boundary).
        Returns int64 [sum(seq_lens − prefix_lens)], or None, with nothing taken, if too few are free.
        """
        page = self.page_size
        first_new_page = -(-prefix_lens // page)  # [bs] page number of the first page not yet owned
        new_pages = -(-seq_lens // page) - first_new_page  # [bs]
        taken = self._take(int(new_pages.sum()))
        if taken is None:
            return None
        counts = seq_lens - prefix_lens
        row = np.repeat(np.arange(len(counts)), counts)
        offset = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
        position = prefix_lens[row] + offset
        nth_new = position // page - first_new_page[row]  # < 0: still inside the partial page
        page_start = np.cumsum(new_pages) - new_pages
        slots = last_locs[row] + 1 + offset
        new = nth_new >= 0
        slots[new] = taken[(page_start[row] + nth_new)[new]] * page + position[new] % page
        return slots

    def free(self, slots: np.ndarray) -> None:
        """Give back every page that one of `slots`, all different, lies in."""
        if len(slots) == 0:
            return
        pages = slots if self.page_size == 1 else np.unique(slots // self.page_size)
        is_free = self._is_free.take(pages, mode="clip")
        if np.count_nonzero(is_free):  # several times as fast as any(), min() or max() on so few
            wrong = pages[is_free]
            if wrong.min() <= 0 or wrong.max() > self.size // self.page_size:
                raise RuntimeError(f"freed slots lie outside the pool of {self.size}: pages {wrong.tolist()}")
            raise RuntimeError(f"pages freed twice: {wrong.tolist()}")
        self._is_free[pages] = True
        self._stack[self._top : self._top + len(pages)] = pages
        self._top += len(pages)
        self._frees += 1

    def _take(self, pages: int) -> np.ndarray | None:
        if pages > self._top:
            return None
        taken = self._stack[self._top - pages : self._top][::-1]
        self._top -= pages
        self._is_free[taken] = False
        return taken.copy()
