"""The two sides from which a replay can drive an allocator: slots in and out, or request tables and whole steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np

from cupaged.geometry import pages_for
from cupaged.interop import to_host
from cupaged.replay.verify import VerificationError

NO_PAGES = np.empty(0, np.int64)


@dataclass(frozen=True)
class Ending:
    """A request that gives up its row.

    Attributes
    ----------
    row, length : int
        Its row, and its tokens.
    shared : int
        Pages at its start that it took from the prefix cache.
    cached : numpy.ndarray
        int64, the pages that the cache holds for its first tokens now. Behind the shared ones, where such a page
        is the request's own, the cache becomes its owner in the request's place.
    """

    row: int
    length: int
    shared: int = 0
    cached: np.ndarray = field(default_factory=lambda: NO_PAGES)


class Engine(ABC):
    """The allocator's side of a serving engine: allocates for rows, and remembers which slots each row holds.

    Parameters
    ----------
    allocator : PagedTokenToKVPoolAllocator or KVAllocator
        Where the slots come from; nobody else uses it.
    rows, longest : int
        Requests at a time, and tokens that any of them can reach.
    sharing : bool
        Whether pages may come to have several owners.

    Attributes
    ----------
    seconds : float
        Time spent in calls of the allocator so far, as the host sees it.
    allocations : int
        Calls that allocate so far.
    """

    def __init__(self, allocator: Any, rows: int, longest: int, *, sharing: bool = False):
        self.allocator, self.page_size, self.sharing = allocator, allocator.page_size, sharing
        self.seconds = 0.0
        self.allocations = 0
        # Token j of a row stands in column j + 1, so that column 0 is what `last_loc` is before any token.
        self._stride = longest + 1
        self._cells = np.empty(rows * self._stride, np.int64)
        self._cells[:: self._stride] = -1

    @abstractmethod
    def free_pages(self) -> int:
        """Pages that nobody owns."""

    @abstractmethod
    def free_list(self) -> np.ndarray:
        """Ids of those pages."""

    def owners(self) -> np.ndarray:
        """Owners of each page, as the allocator counts them; page 0 first."""
        return np.asarray(self.allocator.pool.snapshot()[1])

    def slots(self, row: int, length: int) -> np.ndarray:
        """Slots of a row's first `length` tokens."""
        start = row * self._stride + 1
        return self._cells[start : start + length]

    def pages(self, row: int, length: int) -> np.ndarray:
        """Pages of a row's first `length` tokens."""
        return self.slots(row, length)[:: self.page_size] // self.page_size

    def decode(self, rows: np.ndarray, seq_lens: np.ndarray) -> np.ndarray | None:
        """Allocate one slot a row, which then has `seq_lens` tokens; None if the pool is short."""
        cells = rows * self._stride + seq_lens
        slots = self._decode(rows, seq_lens, cells)
        if slots is not None:
            self._cells[cells] = slots
        return slots

    def extend(self, rows: np.ndarray, before: np.ndarray, after: np.ndarray) -> np.ndarray | None:
        """Allocate the tokens from `before` to `after` of each row; None if the pool is short."""
        slots = self._extend(rows, before, after, int((after - before).sum()))
        if slots is not None:
            start = 0
            for row, first, end in zip(rows.tolist(), before.tolist(), after.tolist(), strict=True):
                self.slots(row, end)[first:] = slots[start : start + end - first]
                start += end - first
        return slots

    def adopt(self, rows: Sequence[int], pages: Sequence[np.ndarray]) -> None:
        """Make cached pages the first ones of rows, each of which becomes an owner more of them."""
        for row, shared in zip(rows, pages, strict=True):
            slots = self.slots(row, len(shared) * self.page_size).reshape(-1, self.page_size)
            slots[:] = shared[:, None] * self.page_size + np.arange(self.page_size)
        self._timed(self.allocator.retain, np.concatenate(pages))

    @abstractmethod
    def release(self, endings: Sequence[Ending]) -> None:
        """Free what these rows hold, but for what the cache takes over."""

    @abstractmethod
    def evict(self, pages: np.ndarray) -> None:
        """Take the cache's ownership off these pages."""

    def wrong_table(self, row: int, length: int) -> str:
        """Where the allocator's own table of a row says something else than its slots; nothing where it does not."""
        return ""

    @abstractmethod
    def _decode(self, rows: np.ndarray, seq_lens: np.ndarray, cells: np.ndarray) -> np.ndarray | None: ...

    @abstractmethod
    def _extend(self, rows: np.ndarray, before: np.ndarray, after: np.ndarray, total: int) -> np.ndarray | None: ...

    def _timed(self, call: Callable[..., Any], *arguments: Any) -> Any:
        start = perf_counter()
        result = call(*arguments)
        self.seconds += perf_counter() - start
        return result

    def _allocate(self, expected: int, call: Callable[..., Any], *arguments: Any) -> np.ndarray | None:
        slots = self._timed(call, *arguments)
        self.allocations += 1
        if slots is None:
            return None
        slots = to_host(slots[0] if isinstance(slots, tuple) else slots)
        if slots.shape != (expected,):
            raise VerificationError(f"{call.__name__} returned shape {slots.shape} for {expected} tokens")
        return slots


class SlotsEngine(Engine):
    """Drives `PagedTokenToKVPoolAllocator`: `alloc_extend`, `alloc_decode`, and frees by slots.

    Where pages are shared, frees are by page: a row's own pages and those of others end in one call.
    """

    def free_pages(self) -> int:
        """Pages that nobody owns."""
        return self.allocator.available_size() // self.page_size

    def free_list(self) -> np.ndarray:
        """Ids of those pages."""
        return to_host(self.allocator.free_pages)

    def release(self, endings: Sequence[Ending]) -> None:
        """Free what these rows hold, but for what the cache takes over; one launch."""
        if self.sharing:
            pages = np.concatenate([self._lost(ending) for ending in endings])
            self._timed(self.allocator.free_page_ids, pages)
        else:
            self._timed(self._free_rows, endings)

    def _lost(self, ending: Ending) -> np.ndarray:
        """Pages of which the row ceases to be an owner."""
        pages = self.pages(ending.row, ending.length)
        kept = len(ending.cached)
        taken_over = np.zeros(len(pages), bool)
        taken_over[ending.shared : kept] = pages[ending.shared : kept] == ending.cached[ending.shared :]
        return pages[~taken_over]

    def _free_rows(self, endings: Sequence[Ending]) -> None:
        with self.allocator.free_group():
            for ending in endings:
                if ending.length:
                    slots = self.slots(ending.row, ending.length)
                    self.allocator.free(slots, num_pages=pages_for(ending.length, self.page_size))

    def evict(self, pages: np.ndarray) -> None:
        """Take the cache's ownership off these pages."""
        self._timed(self.allocator.free_page_ids, pages)

    def _decode(self, rows: np.ndarray, seq_lens: np.ndarray, cells: np.ndarray) -> np.ndarray | None:
        return self._allocate(len(rows), self.allocator.alloc_decode, seq_lens, self._cells[cells - 1])

    def _extend(self, rows: np.ndarray, before: np.ndarray, after: np.ndarray, total: int) -> np.ndarray | None:
        last = self._cells[rows * self._stride + before]
        return self._allocate(total, self.allocator.alloc_extend, before, after, last, total)


class KvEngine(Engine):
    """Drives `KVAllocator`, which keeps the page tables itself.

    All running requests decode by one `decode_step`. Prompts that begin go through `alloc_batch`, and through
    `extend_step` together with one that goes on. Frees are queued row by row, and end in one launch a step.
    """

    def free_pages(self) -> int:
        """Pages that nobody owns."""
        return self.allocator.available_size()

    def free_list(self) -> np.ndarray:
        """Ids of those pages."""
        return to_host(self.allocator.free_slots)

    def adopt(self, rows: Sequence[int], pages: Sequence[np.ndarray]) -> None:
        """Make cached pages the first ones of rows, each of which becomes an owner more of them."""
        super().adopt(rows, pages)
        backend, table = self.allocator.backend, self.allocator.req_to_page
        for row, shared in zip(rows, pages, strict=True):
            table[row, : len(shared)] = backend.from_host(backend.library, shared.astype(np.int32))

    def release(self, endings: Sequence[Ending]) -> None:
        """Free what these rows hold, but for what the cache takes over; one launch."""
        self._timed(self._free_rows, endings)

    def _free_rows(self, endings: Sequence[Ending]) -> None:
        kv = self.allocator
        for ending in endings:
            row, shared, kept = ending.row, ending.shared, len(ending.cached)
            if not kept:
                kv.free_req_cache(row, ending.length)
                continue
            if shared:
                kv.append_to_later_free(ending.cached[:shared])
            if kept > shared:
                kv.free_with_diff(ending.cached[shared:], self.pages(row, kept * self.page_size)[shared:])
            kv.free_extra_pages_not_cached(row, kept * self.page_size, ending.length)
        kv.free_group_end()

    def evict(self, pages: np.ndarray) -> None:
        """Take the cache's ownership off these pages."""
        self._timed(self.allocator.append_to_later_free, pages)
        self._timed(self.allocator.free_group_end)

    def wrong_table(self, row: int, length: int) -> str:
        """Where `req_to_page` says something else than the slots of a row."""
        expected = self.pages(row, length)
        if not len(expected):
            return ""
        table = to_host(self.allocator.req_to_page[row, : len(expected)])
        for i in np.flatnonzero(table != expected)[:1]:
            return f"row {row}, column {i} of req_to_page is {table[i]}, but the slots are in page {expected[i]}"
        return ""

    def _decode(self, rows: np.ndarray, seq_lens: np.ndarray, cells: np.ndarray) -> np.ndarray | None:
        table = self.allocator.req_to_page
        return self._allocate(len(rows), self.allocator.decode_step, table, rows, seq_lens - 1)

    def _extend(self, rows: np.ndarray, before: np.ndarray, after: np.ndarray, total: int) -> np.ndarray | None:
        kv = self.allocator
        if before.any():
            return self._allocate(total, kv.extend_step, kv.req_to_page, rows, before, after, total)
        return self._allocate(total, kv.alloc_batch, rows, after - before, before)
