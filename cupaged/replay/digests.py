"""Hashes by which two replays compare: of the slots themselves, and of what requests own, whatever it is called."""

from __future__ import annotations

import hashlib

import numpy as np


class SlotDigest:
    """Hash of all slots handed out, as little-endian int64, in order. Allocators of one kind agree in it."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)

    def add(self, values: np.ndarray) -> None:
        """Fold integers in."""
        self._hash.update(np.ascontiguousarray(values, "<i8").data)

    @property
    def text(self) -> str:
        """The hash so far, in hexadecimal."""
        return self._hash.hexdigest()


class OwnedDigest(SlotDigest):
    """Hash of what each request owns when it ends or is retracted, free of page names.

    Two allocators that hand out pages in different orders agree in it if, and only if, they lay out each request
    alike. Folded in for each ending, as little-endian int64:

    1. the request's number, its tokens, its pages, and how many of these it took from the prefix cache;
    2. for each token its slot, once the request's pages are numbered from 0 on in the order of their first use:
       ``number * page_size + offset``. In a right layout that is 0, 1, 2, ...;
    3. for each page, in that order, the request for which it was allocated: the request itself, or, for a shared
       page, the one that computed it.

    Parameters
    ----------
    num_pages, page_size : int
        Pages of the pool without the padding page, and slots in a page.
    """

    def __init__(self, num_pages: int, page_size: int):
        super().__init__()
        self.page_size = page_size
        self._first_use = np.zeros(num_pages + 1, np.int64)
        self._allocated_for = np.full(num_pages + 1, -1, np.int64)

    def hand_out(self, request: np.ndarray, before: np.ndarray, after: np.ndarray, slots: np.ndarray) -> None:
        """Note for whom new pages are: each request now has `after` tokens and had `before`."""
        if len(slots) == len(request):
            starts_page = before % self.page_size == 0
            self._allocated_for[slots[starts_page] // self.page_size] = request[starts_page]
            return
        start = 0
        for i, first, end in zip(request.tolist(), before.tolist(), after.tolist(), strict=True):
            new = slots[start + -first % self.page_size : start + end - first : self.page_size]
            self._allocated_for[new // self.page_size] = i
            start += end - first

    def end(self, request: int, slots: np.ndarray, shared: int) -> None:
        """Fold in a request that gives up these slots, of which `shared` pages came from the cache."""
        pages = slots // self.page_size
        token = np.arange(len(slots))
        # Where an index comes twice, NumPy keeps the value that comes last.
        self._first_use[pages[::-1]] = token[::-1]
        first_use = self._first_use[pages]
        fresh = first_use == token
        number = np.cumsum(fresh) - 1
        self.add(np.array([request, len(slots), np.count_nonzero(fresh), shared]))
        self.add(number * self.page_size + slots % self.page_size)
        self.add(self._allocated_for[pages[fresh]])
