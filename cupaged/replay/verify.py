"""Proof, step by step, that no slot is written for two requests and that no page is lost."""

from __future__ import annotations

import numpy as np

NOBODY = -1


class VerificationError(RuntimeError):
    """The allocator broke its contract. The message names the step, the request and the slot."""


class Ledger:
    """Who owns which page and for whom each slot was written, kept apart from the allocator.

    A page may have several owners: requests, and the prefix cache. A slot is written for one request, and not again
    before its page has had no owner. The cache may keep full pages only, and requests share what the cache keeps: so
    a write to a shared page is always one to a slot that is written.

    An entry costs time in proportion to the tokens that change hands. The number of free pages is compared at
    every step; the whole free list and the allocator's counts of owners, which cost more, whenever as many tokens
    as the pool has pages have changed hands, and at the end.

    Parameters
    ----------
    num_pages, page_size, requests : int
        Pages of the pool without the padding page, slots in a page, and requests of the trace.
    """

    def __init__(self, num_pages: int, page_size: int, requests: int):
        self.num_pages, self.page_size = num_pages, page_size
        self.step = 0
        self.changed = 0  # tokens that changed hands since the last audit
        self._owner = np.full((num_pages + 1) * page_size, NOBODY, np.int32)  # for whom each slot was written
        self._mark = np.zeros(len(self._owner), np.int64)
        self._owners = np.zeros(num_pages + 1, np.int32)
        self._cached = np.zeros(num_pages + 1, bool)  # the cache is one of them
        self._last = np.full(requests, NOBODY, np.int64)
        self._held = np.zeros(requests, np.int64)
        self._shared: dict[int, np.ndarray] = {}  # pages that a request took from the cache
        self._pages = 0

    def hand_out(self, request: np.ndarray, before: np.ndarray, after: np.ndarray, slots: np.ndarray) -> None:
        """Enter the slots of a batch, request after request: each now has `after` tokens and had `before`."""
        count = after - before
        starts = np.cumsum(count) - count
        owner = np.repeat(request, count)
        position = np.arange(len(slots)) + np.repeat(before - starts, count)
        previous = np.empty_like(slots)
        previous[1:] = slots[:-1]
        previous[starts[count > 0]] = self._last[request[count > 0]]
        fresh = position % self.page_size == 0
        behind = self._held[request] != before
        for i in np.flatnonzero(behind)[:1]:
            raise self._breach(
                f"request {request[i]} owns {self._held[request[i]]} slots, but goes on from {before[i]}"
            )

        self._demand((slots >= self.page_size) & (slots < len(self._owner)), owner, slots, "is not in the pool")
        self._demand(self._owner[slots] == NOBODY, owner, slots, "has an owner already: request {owner}")
        self._demand(self._once(slots), owner, slots, "is handed out twice")
        aligned = np.where(fresh, slots % self.page_size == 0, slots == previous + 1)
        self._demand(aligned, owner, slots, "does not follow from the token before it")

        self._owner[slots] = owner
        self._owners[slots[fresh] // self.page_size] = 1
        self._held[request] += count
        self._last[request[count > 0]] = slots[(starts + count - 1)[count > 0]]
        self._pages += int(np.count_nonzero(fresh))
        self.changed += len(slots)

    def share(self, request: int, pages: np.ndarray) -> None:
        """Enter that a request begins with pages that the cache holds."""
        if not self._cached[pages].all():
            page = pages[np.argmin(self._cached[pages])]
            raise self._breach(f"request {request} takes page {page} from the cache, which does not hold it")
        self._owners[pages] += 1
        self._shared[request] = pages
        self._held[request] = len(pages) * self.page_size
        self._last[request] = (pages[-1] + 1) * self.page_size - 1
        self.changed += len(pages) * self.page_size

    def keep(self, request: int, pages: np.ndarray) -> None:
        """Enter that the cache becomes an owner of pages that a request has filled."""
        slots = (pages[:, None] * self.page_size + np.arange(self.page_size)).ravel()
        owner = np.full(len(slots), request)
        self._demand(self._owner[slots] == request, owner, slots, "is cached for a request that did not write it")
        self._demand(~self._cached[slots // self.page_size], owner, slots, "is cached twice")
        self._owners[pages] += 1
        self._cached[pages] = True
        self.changed += len(slots)

    def evict(self, pages: np.ndarray) -> None:
        """Enter that the cache is an owner of pages no more."""
        if not self._cached[pages].all():
            page = pages[np.argmin(self._cached[pages])]
            raise self._breach(f"page {page} is evicted, but the cache does not hold it")
        self._cached[pages] = False
        self._lose(pages)

    def take_back(self, request: int, slots: np.ndarray) -> None:
        """Enter that a request owns its slots no more."""
        shared = self._shared.pop(request, np.empty(0, np.int64))
        own = slots[len(shared) * self.page_size :]
        owner = np.full(len(slots), request)
        self._demand(self._owner[own] == request, owner, own, "is freed for a request that does not own it")
        pages = slots[:: self.page_size] // self.page_size
        if not np.array_equal(pages[: len(shared)], shared):
            raise self._breach(f"request {request} frees other pages than those that it took from the cache")
        self._demand(self._once(slots), owner, slots, "is freed twice")
        if len(slots) != self._held[request]:
            raise self._breach(f"request {request} owns {self._held[request]} slots but frees {len(slots)}")
        self._held[request] = 0
        self._last[request] = NOBODY
        self._lose(pages)

    def _lose(self, pages: np.ndarray) -> None:
        """Take one owner off pages, and forget what is in those that have none left."""
        self._owners[pages] -= 1
        free = pages[self._owners[pages] == 0]
        self._owner.reshape(-1, self.page_size)[free] = NOBODY
        self._pages -= len(free)
        self.changed += len(pages) * self.page_size

    def settle(self, free_pages: int) -> None:
        """End a step: owned and free pages must make up the pool."""
        if self._pages + free_pages != self.num_pages:
            raise self._breach(
                f"{self._pages} pages owned and {free_pages} free do not make {self.num_pages}: "
                f"{self.num_pages - self._pages - free_pages} pages are lost"
            )

    def audit(self, free_list: np.ndarray, owners: np.ndarray) -> None:
        """Compare the allocator's free list with the pages that nobody owns, and its counts of owners with these."""
        self.changed = 0
        expected = np.flatnonzero(self._owners[1:] == 0) + 1
        listed = np.sort(free_list)
        if not np.array_equal(expected, listed):
            raise self._wrong_list(expected, listed)
        for page in np.flatnonzero(self._owners[1:] != owners[1 : self.num_pages + 1])[:1] + 1:
            raise self._breach(
                f"page {page}, slot {page * self.page_size}, has {self._owners[page]} owners, "
                f"but the allocator counts {owners[page]}"
            )

    def _wrong_list(self, expected: np.ndarray, listed: np.ndarray) -> VerificationError:
        for page in np.setdiff1d(expected, listed)[:1]:
            return self._breach(f"page {page}, slot {page * self.page_size}, is lost: neither owned nor free")
        for page in np.setdiff1d(listed, expected)[:1]:
            owner = self._owner[page * self.page_size] if 0 < page <= self.num_pages else NOBODY
            return self._breach(f"request {owner}, slot {page * self.page_size}: page {page} is listed as free")
        page = listed[1:][listed[1:] == listed[:-1]][0]
        return self._breach(f"page {page}, slot {page * self.page_size}, is in the free list twice")

    def _once(self, slots: np.ndarray) -> np.ndarray:
        """Which entries are the last to name their slot: all of them, if each names another."""
        index = np.arange(len(slots))
        self._mark[slots] = index
        return self._mark[slots] == index

    def _demand(self, holds: np.ndarray, owner: np.ndarray, slots: np.ndarray, otherwise: str) -> None:
        if holds.all():
            return
        i = int(np.argmin(holds))
        present = self._owner[slots[i]] if 0 <= slots[i] < len(self._owner) else NOBODY
        raise self._breach(f"request {owner[i]}, slot {slots[i]}: {otherwise.format(owner=present)}")

    def _breach(self, what: str) -> VerificationError:
        return VerificationError(f"step {self.step}: {what}")
