"""Proof, step by step, that no slot has two owners and that no page is lost."""

from __future__ import annotations

import numpy as np

NOBODY = -1


class VerificationError(RuntimeError):
    """The allocator broke its contract. The message names the step, the request and the slot."""


class Ledger:
    """Who owns which slot, kept apart from the allocator from the slots that it hands out and takes back.

    An entry costs time in proportion to the tokens that change hands. The number of free pages is compared at
    every step; the whole free list, which costs more, whenever as many tokens as the pool has pages have
    changed hands, and at the end.

    Parameters
    ----------
    num_pages, page_size, requests : int
        Pages of the pool without the padding page, slots in a page, and requests of the trace.
    """

    def __init__(self, num_pages: int, page_size: int, requests: int):
        self.num_pages, self.page_size = num_pages, page_size
        self.step = 0
        self.changed = 0  # tokens that changed hands since the last audit
        self._owner = np.full((num_pages + 1) * page_size, NOBODY, np.int32)
        self._mark = np.zeros(len(self._owner), np.int64)
        self._last = np.full(requests, NOBODY, np.int64)
        self._held = np.zeros(requests, np.int64)
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

        self._demand((slots >= self.page_size) & (slots < len(self._owner)), owner, slots, "is not in the pool")
        self._demand(self._owner[slots] == NOBODY, owner, slots, "has an owner already: request {owner}")
        self._demand(self._once(slots), owner, slots, "is handed out twice")
        aligned = np.where(fresh, slots % self.page_size == 0, slots == previous + 1)
        self._demand(aligned, owner, slots, "does not follow from the token before it")

        self._owner[slots] = owner
        self._held[request] += count
        self._last[request[count > 0]] = slots[(starts + count - 1)[count > 0]]
        self._pages += int(np.count_nonzero(fresh))
        self.changed += len(slots)

    def take_back(self, request: int, slots: np.ndarray) -> None:
        """Enter that all slots of a request are free again."""
        owner = np.full(len(slots), request)
        self._demand(self._owner[slots] == request, owner, slots, "is freed for a request that does not own it")
        self._demand(self._once(slots), owner, slots, "is freed twice")
        if len(slots) != self._held[request]:
            raise self._breach(f"request {request} owns {self._held[request]} slots but frees {len(slots)}")
        self._owner[slots] = NOBODY
        self._held[request] = 0
        self._last[request] = NOBODY
        self._pages -= int(np.count_nonzero(slots % self.page_size == 0))
        self.changed += len(slots)

    def settle(self, free_pages: int) -> None:
        """End a step: owned and free pages must make up the pool."""
        if self._pages + free_pages != self.num_pages:
            raise self._breach(
                f"{self._pages} pages owned and {free_pages} free do not make {self.num_pages}: "
                f"{self.num_pages - self._pages - free_pages} pages are lost"
            )

    def audit(self, free_list: np.ndarray) -> None:
        """Compare the allocator's free list with the pages that nobody owns."""
        self.changed = 0
        expected = np.flatnonzero(self._owner[self.page_size :: self.page_size] == NOBODY) + 1
        listed = np.sort(free_list)
        if np.array_equal(expected, listed):
            return
        for page in np.setdiff1d(expected, listed)[:1]:
            raise self._breach(f"page {page}, slot {page * self.page_size}, is lost: neither owned nor free")
        for page in np.setdiff1d(listed, expected)[:1]:
            owner = self._owner[page * self.page_size] if 0 < page <= self.num_pages else NOBODY
            raise self._breach(f"request {owner}, slot {page * self.page_size}: page {page} is listed as free")
        page = listed[1:][listed[1:] == listed[:-1]][0]
        raise self._breach(f"page {page}, slot {page * self.page_size}, is in the free list twice")

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
