"""Request rows in, slots and page tables out: the allocator that keeps every request's pages itself."""

from __future__ import annotations

import logging
import sys
from contextlib import contextmanager
from typing import Any

import numpy as np

from cupaged.base import PoolAllocator, whole
from cupaged.geometry import largest, pages_for, pages_taken, smallest
from cupaged.interop import differing, host_array, is_on_gpu, library_of, to_host
from cupaged.layout import INT32_LARGEST, SKIPPED_PAGE, Kind, Where

__all__ = ["KVAllocator"]

log = logging.getLogger("cupaged")


class KVAllocator(PoolAllocator):
    """Allocate KV slots request by request, with the page table of every request kept on the device.

    Method names, argument names and their order are the classic ones of TokenSpeed's allocator of the same name;
    docs/design.md states every contract. A request is a row of `req_to_page`; how many tokens it has is the caller's
    to know. ``alloced_len`` counts tokens that have a slot, ``real_seq_len`` those that hold something.

    ::

        req_to_page[row]:  | page 7 | page 3 | page 9 | (stale cells)
        tokens:            |0 .. 63 |64..127 |128..150|
                                      real_seq_len ^100       alloced_len ^151
        free_extra_pages_not_cached(row, 100, 151) queues pages 3 and 9: page 7 is the only full one

    Parameters
    ----------
    size : int
        Slots, page 0 included: pages 1 .. ``size // page_size - 1`` are handed out.
    device : str, int, torch.device or cupy.cuda.Device
        As in `PagedTokenToKVPoolAllocator`. With a `torch.device`, tables and results are torch tensors; else NumPy
        arrays on the CPU and CuPy arrays on a GPU.
    max_batch_size : int
        Rows of the request table.
    max_context_len : int
        Most tokens of one request.
    page_size : int
        Slots in a page; any positive integer.
    backend, need_sort, errors, strict, pad_row, debug
        As in `PagedTokenToKVPoolAllocator`.

    Attributes
    ----------
    req_to_page : array of int32, shape (max_batch_size, max_page_num)
        Pages of each request, on the device. The truth; engines may write to it too.
    token_slot_refs : array of int32, shape (size,)
        Counts that engines keep for each slot, on the device. `free_group_end` lowers them in freed pages.
    num_pages, last_slot : array of int32, shape (max_batch_size,)
        On the host: pages of each row as `alloc`, `alloc_batch`, or a step with lengths on the host left them, and
        the offset of its last token in its page; ``page_size - 1`` for a row without pages. A step whose lengths
        only the device knows leaves them as they are: free such rows by `free_req_cache` or `release`.

    Raises
    ------
    TypeError, ValueError, BackendError
        As in `PagedTokenToKVPoolAllocator`.

    Examples
    --------
    >>> import cupaged
    >>> kv = cupaged.KVAllocator(1024, "cpu", 8, 256, 16)
    >>> kv.alloc(0, 3, 0)
    array([16, 17, 18], dtype=int32)
    >>> kv.alloc(0, 2, 3)
    array([19, 20], dtype=int32)
    >>> kv.free_req_cache(0, 5)
    >>> kv.free_group_end()
    >>> kv.available_size()
    63
    """

    _freed_to = Where.BACK
    _paged_table = True

    def __init__(
        self,
        size: int,
        device: Any,
        max_batch_size: int,
        max_context_len: int,
        page_size: int,
        *,
        backend: str = "auto",
        need_sort: bool = False,
        errors: str = "raise",
        strict: bool = True,
        pad_row: int = -1,
        debug: bool = False,
    ) -> None:
        page_size, self.size = whole("page_size", page_size, 1), whole("size", size, 0)
        pages = self.size // page_size - 1
        if pages < 1:
            raise ValueError(f"size must hold page 0 and at least one page more, {2 * page_size} slots, not {size}")
        self.max_batch_size = whole("max_batch_size", max_batch_size, 1)
        self.max_context_len = whole("max_context_len", max_context_len, 1)
        if self.max_context_len > INT32_LARGEST:
            raise ValueError(f"max_context_len must be at most 2**31 - 1, not {max_context_len}")
        self.max_page_num = pages_for(self.max_context_len, page_size)
        self._make(
            pages,
            page_size,
            index_dtype=np.dtype(np.int32),
            device=device,
            backend=backend,
            need_sort=need_sort,
            refused_slot=0,
            errors=errors,
            strict=strict,
            max_batch=max(8192, self.max_batch_size),
            debug=debug,
            pad_row=pad_row,
        )
        self.pool.enter("")
        try:
            shape = (self.max_batch_size, self.max_page_num)
            self.req_to_page = self.backend.zeros(shape)
            self.token_slot_refs = self.backend.zeros((self.size,))
            self._slot_refs = self.backend.slot_refs(self.token_slot_refs)
            self._cells = self.backend.table(self.req_to_page, "req_to_page")
            self._on_host = self.backend.pinned(shape)
        finally:
            self.pool.leave()
        as_torch = self.backend.library == "torch"
        self._num_pages = np.zeros(self.max_batch_size, np.int32)
        self._last_slot = np.full(self.max_batch_size, page_size - 1, np.int32)
        self._num_pages_view = _host_view(self._num_pages, as_torch)
        self._last_slot_view = _host_view(self._last_slot, as_torch)
        self._tokens_a_row = self.max_page_num * page_size
        self._most_tokens = min(self._tokens_a_row, INT32_LARGEST)
        self._in_group = False
        self._changed = np.zeros(self.max_batch_size, bool)  # rows that _on_host lacks
        self._any_changed = False
        # What is queued, three numbers each: row, tokens that stay, tokens that have a slot; or -1 and a range of the
        # entries, in tokens. Told without the lock, so nobody may take more of it than they have seen.
        self._told: list[int] = []
        self._heard = 0  # of what was told, taken up in the counts
        self._waiting: set[int] = set()  # rows with frees in the queue
        self._in_graphs = False  # replays, which nobody tells of, may write to req_to_page
        self._forget_queue(0)

    def __repr__(self) -> str:
        return (
            f"KVAllocator(size={self.size}, page_size={self.page_size}, device={self.device!r}, "
            f"backend={self.backend.name!r}, rows={self.max_batch_size}, pages a row={self.max_page_num})"
        )

    # ---- how much is free --------------------------------------------------------------------------------------

    def available_size(self) -> int:
        """Free PAGES, exactly; queued ones are not free yet. Waits only where the figure is not known."""
        return self.pool.free_pages_count()

    def available_at_least(self) -> int:
        """Lower bound of the free pages. Never waits."""
        return self.pool.free_at_least()

    @property
    def free_slots(self) -> Any:
        """Snapshot of the free page ids, int32, on the host, in the order of allocation; waits."""
        return _host_view(self.pool.free_order()[0].astype(np.int32), self.backend.library == "torch")

    # ---- allocation --------------------------------------------------------------------------------------------

    def alloc(self, req_pool_index: int, need_size: int, alloced_len: int) -> Any:
        """Slots of the next tokens of one request: first the room in its last page, then new pages.

        Parameters
        ----------
        req_pool_index : int
            The request's row. New pages are written into it.
        need_size : int
            Tokens to find slots for; 0 gives an empty array.
        alloced_len : int
            Tokens of the request that have a slot already.

        Returns
        -------
        array of int32, shape (need_size,), or None
            ``kv_loc``; None, with nothing changed, if the pool is short, or, with a logged warning, if the row is
            full.

        Raises
        ------
        TypeError, ValueError
            For a row that does not exist, or a negative number.
        """
        row, before = self._row(req_pool_index), whole("alloced_len", alloced_len, 0)
        need = whole("need_size", need_size, 0)
        after = before + need
        pages = pages_for(after, self.page_size)
        if after > self._most_tokens:
            self._warn_full(row, before, need)
            return None
        if self._told and row in self._queued_rows():
            self._flush()
        backend, library = self.backend, self.backend.library
        self.pool.enter(library)
        try:
            self._check_capture(None)
            if need == 0:
                return backend.output(library, 0)[0]
            new = pages - pages_for(before, self.page_size)
            if new > self.pool.num_pages:
                return self._finish(self.pool.refuse(new))  # before memory is asked for
            result, slots = backend.output(library, need)
            constant = backend.constant
            granted = self._take(Kind.KV_ALLOC, new, constant(row), constant(before), constant(after), need, slots)
            if not granted:
                return None
            self._num_pages[row] = pages
            self._last_slot[row] = (after - 1) % self.page_size
            if new:
                self._changed[row] = self._any_changed = True
            self._finish(result)
            if self.debug_mode:
                self._check_rows_unique(self.req_to_page, np.array([row]), np.array([after]), pad_row=None)
            return result
        finally:
            self.pool.leave()

    def alloc_batch(self, req_pool_indices: Any, need_sizes: Any, alloced_lens: Any) -> tuple[Any, Any] | None:
        """`alloc` for many requests: one launch, all or nothing.

        Parameters
        ----------
        req_pool_indices, need_sizes, alloced_lens : array of int32 or int64, or list, shape (batch,)
            On the host; arrays on a GPU are waited for. Rows are distinct.

        Returns
        -------
        (array of int32, shape (sum of need_sizes,); array of int64, shape (batch + 1,)), or None
            ``kv_loc`` of all requests, one after the other, and on the host the offsets: those of request i are
            ``kv_loc[offsets[i]:offsets[i + 1]]``. None as in `alloc`.

        Raises
        ------
        TypeError, ValueError
            For rows that do not exist or come twice, negative numbers, lengths that differ.
        """
        names = ("req_pool_indices", "need_sizes", "alloced_lens")
        given = (req_pool_indices, need_sizes, alloced_lens)
        rows, needs, before = (_on_host(x, name) for x, name in zip(given, names, strict=True))
        if not rows.shape == needs.shape == before.shape:
            sizes = f"{rows.size}, {needs.size} and {before.size}"
            raise ValueError(f"{', '.join(names)} must be of one length, not {sizes}")
        self._check_rows(rows, needs, before)
        after, size = before + needs, self.page_size
        offsets = np.zeros(rows.size + 1, np.int64)
        np.add.accumulate(needs, out=offsets[1:])
        total = int(offsets[-1])
        if rows.size and largest(after) > self._most_tokens:
            i = int((after > self._most_tokens).argmax())
            self._warn_full(int(rows[i]), int(before[i]), int(needs[i]))
            return None
        if self._told and not self._queued_rows().isdisjoint(rows.tolist()):
            self._flush()
        backend, library = self.backend, self.backend.library
        self.pool.enter(library)
        try:
            self._check_capture(None)
            as_torch = library == "torch"
            if total == 0:
                return backend.output(library, 0)[0], _host_view(offsets, as_torch)
            new = pages_taken(before, after, size)
            if new > self.pool.num_pages:
                return self._finish(self.pool.refuse(new))
            result, slots = backend.output(library, total)
            row_vector, befores, afters = backend.vectors(np.array((rows, before, after)))
            if not self._take(Kind.KV_BATCH, new, row_vector, befores, afters, total, slots):
                return None
            # rows that were given nothing keep what they had
            some = slice(None) if smallest(needs) > 0 else needs > 0
            self._note_rows(rows[some], after[some])
            self._finish(result)
            if self.debug_mode:
                self._check_rows_unique(self.req_to_page, rows, after, pad_row=None)
            return result, _host_view(offsets, as_torch)
        finally:
            self.pool.leave()

    def _take(self, kind: Kind, new: int, rows: Any, before: Any, after: Any, tokens: int, slots: Any) -> bool:
        table, step = self._cells, self.backend.step
        # No row is -1 here, so nothing is padding.
        return self.pool.allocate(kind, new, new, new, step, table, True, -1, rows, before, after, tokens, slots)

    def _row(self, req_pool_index: int) -> int:
        row = whole("req_pool_index", req_pool_index, 0)
        if row >= self.max_batch_size:
            raise ValueError(f"req_pool_index must be less than max_batch_size, {self.max_batch_size}, not {row}")
        return row

    def _check_rows(self, rows: np.ndarray, needs: np.ndarray, before: np.ndarray) -> None:
        if not rows.size:
            return
        if (
            min(smallest(rows), smallest(needs), smallest(before)) < 0
            or max(largest(needs), largest(before)) > INT32_LARGEST
            or largest(rows) >= self.max_batch_size
        ):
            self._name_wrong_row(rows, needs, before)
        self._check_distinct(rows, self.max_batch_size)

    def _name_wrong_row(self, rows: np.ndarray, needs: np.ndarray, before: np.ndarray) -> None:
        for name, given in (("need_sizes", needs), ("alloced_lens", before), ("req_pool_indices", rows)):
            for i in np.flatnonzero(given < 0)[:1]:
                raise ValueError(f"{name}[{i}] is {given[i]}, but must not be negative")
            for i in np.flatnonzero(given > INT32_LARGEST)[:1]:
                raise ValueError(f"{name}[{i}] is {given[i]}, but must be at most 2**31 - 1")
        for i in np.flatnonzero(rows >= self.max_batch_size)[:1]:
            raise ValueError(f"req_pool_indices[{i}] is {rows[i]}, but max_batch_size is {self.max_batch_size}")

    def _warn_full(self, row: int, before: int, need: int) -> None:
        log.warning(
            "row %d is full: %d tokens more than its %d need %d pages, but a row has %d",
            row,
            need,
            before,
            pages_for(before + need, self.page_size),
            self.max_page_num,
        )

    # ---- frees: a queue that is always on ----------------------------------------------------------------------

    def free_extra_pages_not_cached(self, req_pool_index: int, real_seq_len: int, alloced_len: int) -> None:
        """Queue the pages past the full ones: a prefix cache keeps those.

        Parameters
        ----------
        req_pool_index : int
            The request's row.
        real_seq_len, alloced_len : int
            Its tokens, and those that have a slot; ``real_seq_len // page_size`` pages are full and stay.

        Raises
        ------
        ValueError
            If `alloced_len` is less than `real_seq_len`, or more than a row holds.
        """
        # One test for the common case: engines call this for every request that ends.
        if not (
            type(req_pool_index) is type(real_seq_len) is type(alloced_len) is int
            and 0 <= req_pool_index < self.max_batch_size
            and 0 <= real_seq_len <= alloced_len <= self._tokens_a_row
        ):
            real, alloced = whole("real_seq_len", real_seq_len, 0), whole("alloced_len", alloced_len, 0)
            if alloced < real:
                raise ValueError(f"alloced_len must be at least real_seq_len, {real}, not {alloced}")
            req_pool_index, real_seq_len, alloced_len = self._row(req_pool_index), real, self._fits_row(alloced)
        self._told.extend((req_pool_index, real_seq_len, alloced_len))

    def free_req_cache(self, req_pool_index: int, alloced_len: int) -> None:
        """Queue all pages of a request.

        Parameters
        ----------
        req_pool_index : int
            The request's row.
        alloced_len : int
            Its tokens that have a slot.

        Raises
        ------
        ValueError
            If `alloced_len` is more than a row holds.
        """
        if not (
            type(req_pool_index) is type(alloced_len) is int
            and 0 <= req_pool_index < self.max_batch_size
            and 0 <= alloced_len <= self._tokens_a_row
        ):
            alloced = whole("alloced_len", alloced_len, 0)
            req_pool_index, alloced_len = self._row(req_pool_index), self._fits_row(alloced)
        self._told.extend((req_pool_index, 0, alloced_len))

    def _fits_row(self, alloced: int) -> int:
        if alloced > self._tokens_a_row:
            raise ValueError(f"alloced_len must be at most {self._tokens_a_row}, what a row holds, not {alloced}")
        return alloced

    def _queued_rows(self) -> set[int]:
        """Rows with frees in the queue; those told of since the last look lose their counts."""
        told = self._told[self._heard :]
        if told:
            self._heard += len(told)
            new = [entry for entry in zip(told[::3], told[1::3], told[2::3], strict=True) if entry[0] >= 0]
            size = self.page_size
            self._waiting.update(row for row, stay, have in new if stay // size * size < have)
            rows = [row for row, _, _ in new]
            self._num_pages[rows] = 0
            self._last_slot[rows] = self.page_size - 1
        return self._waiting

    @property
    def num_pages(self) -> Any:
        """Pages of each row as the host knows them: int32, shape (max_batch_size,), on the host."""
        self._queued_rows()
        return self._num_pages_view

    @property
    def last_slot(self) -> Any:
        """Offset of each row's last token in its page: int32, shape (max_batch_size,), on the host."""
        self._queued_rows()
        return self._last_slot_view

    def free_with_diff(self, new_prefix_page_ids: Any, old_page_ids: Any) -> Any:
        """Queue those of a request's old pages that a prefix cache did not take over.

        Parameters
        ----------
        new_prefix_page_ids, old_page_ids : array of int32 or int64, shape (n,)
            Pages that the cache holds for the same tokens, and the request's own.

        Returns
        -------
        array of bool, shape (n,)
            Where they differ, in the library of the arguments.

        Raises
        ------
        ValueError
            If their lengths differ. How many pages differ the host does not know: until the device has reported,
            it counts on none.
        """
        new, old = self._same_library(new_prefix_page_ids, old_page_ids)
        if new.shape != old.shape or len(old.shape) != 1:
            raise ValueError(
                "new_prefix_page_ids and old_page_ids must be of one length and one dimension, not of shapes "
                f"{tuple(new.shape)} and {tuple(old.shape)}"
            )
        mask, entries = differing(new, old, SKIPPED_PAGE)
        self._queue_entries(entries, "old_page_ids", exact=False)
        return mask

    def _same_library(self, *arrays: Any) -> list[Any]:
        """The arguments as arrays that can be compared where they are."""
        names = ("new_prefix_page_ids", "old_page_ids")
        if any(is_on_gpu(x) for x in arrays) or any(library_of(x) == "torch" for x in arrays):
            if len({library_of(x) for x in arrays}) > 1:
                raise TypeError("new_prefix_page_ids and old_page_ids must be arrays of one library")
            if library_of(arrays[0]) in ("torch", "cupy"):
                for x, name in zip(arrays, names, strict=True):
                    if str(x.dtype).rpartition(".")[2] not in ("int32", "int64"):
                        raise TypeError(f"{name} must be int32 or int64, not {x.dtype}")
                return list(arrays)
        return [host_array(to_host(x) if is_on_gpu(x) else x, n) for x, n in zip(arrays, names, strict=True)]

    def append_to_later_free(self, page_ids: Any) -> None:
        """Queue pages by id.

        Parameters
        ----------
        page_ids : array of int32 or int64, shape (n,)
            Copied: the caller may overwrite it.
        """
        self._queue_entries(page_ids, "page_ids", exact=True)

    def _queue_entries(self, page_ids: Any, name: str, exact: bool) -> None:
        backend = self.backend
        self.pool.enter(backend.use_library(page_ids))
        try:
            vector = backend.vector(page_ids, name)
            n = backend.length(vector)
            if n == 0:
                return
            begin = sum(backend.length(v) for v in self._entries)
            if not self._entries:
                backend.queue_begin()
            self._entries.append(backend.queue(vector))
            self._told.extend((-1, begin * self.page_size, (begin + n) * self.page_size))
            self._uncertain += 0 if exact else n
        finally:
            self.pool.leave()

    def free_group_begin(self) -> None:
        """Let `free` wait for `free_group_end` too; all other frees always do."""
        self._in_group = True

    def free_group_end(self) -> None:
        """Free all that is queued: at the back of the free list, in queued order, in one launch.

        Lowers `token_slot_refs` by one, never below 0, in every slot of the pages that nobody owns any more.
        """
        self._in_group = False
        self._flush()

    @contextmanager
    def free_group(self):
        """`free_group_begin` and `free_group_end` around a ``with`` block."""
        self.free_group_begin()
        try:
            yield self
        finally:
            self.free_group_end()

    def free(self, req_pool_index: int, indices: Any = None) -> None:
        """Free the ``num_pages[row]`` pages of a request: at once, or at the end of the group.

        Parameters
        ----------
        req_pool_index : int
            The request's row.
        indices
            Not looked at; engines pass it.
        """
        row = self._row(req_pool_index)
        self._queued_rows()
        pages = int(self._num_pages[row])
        if self._in_group:
            self._told.extend((row, 0, pages * self.page_size))
            return
        if not pages:
            return
        self.pool.enter("")
        try:
            self._run_queue(np.array([[row], [0], [pages]]), [], 0)
            self._num_pages[row] = 0
            self._last_slot[row] = self.page_size - 1
            self._finish(None)
        finally:
            self.pool.leave()

    def _flush(self) -> None:
        if not self._told:
            return
        self.pool.enter("", raising=False)  # what is queued must not be lost
        try:
            queued = len(self._told)
            told = np.fromiter(self._told, np.int64, queued).reshape(-1, 3).T.copy()
            rows, begins, ends = told
            begins //= self.page_size
            ends += self.page_size - 1
            ends //= self.page_size
            fresh = rows[self._heard // 3 :]  # rows heard of before may have been allocated to since
            fresh = fresh[fresh >= 0] if self._entries else fresh
            some = begins < ends
            all_some = np.count_nonzero(some) == some.size
            self._run_queue(told if all_some else told[:, some], self._entries, self._uncertain)
            self._num_pages[fresh] = 0
            self._last_slot[fresh] = self.page_size - 1
            self._forget_queue(queued)
            self._finish(None)
            self.pool.raise_recorded()
        finally:
            self.pool.leave()

    def _forget_queue(self, told: int) -> None:
        del self._told[:told]
        self._heard = 0
        self._waiting = set()
        self._entries: list[Any] = []
        self._uncertain = 0

    def _run_queue(self, ranges: np.ndarray, entries: list[Any], uncertain: int) -> None:
        """Free pages of rows: `ranges` holds the rows, the first pages and the ends."""
        backend = self.backend
        if self.pool.captured and ranges.shape[1] > backend.max_batch:  # scratch cannot grow any more
            for begin in range(0, ranges.shape[1], backend.max_batch):
                part = np.ascontiguousarray(ranges[:, begin : begin + backend.max_batch])
                self._run_queue(part, entries, uncertain)
            return
        most = int(np.add.reduce(ranges[2] - ranges[1]))
        if most == 0:
            return
        rows, begins, ends = backend.vectors(ranges)
        self.pool.run(
            Kind.FREE_QUEUE,
            0 if self.pool.may_share() else max(0, most - uncertain),
            most,
            backend.free_queue,
            self._cells,
            rows,
            begins,
            ends,
            backend.queued(entries) if entries else None,
            self._where,
            self._slot_refs,
        )

    # ---- the whole ---------------------------------------------------------------------------------------------

    def retain(self, page_ids: Any) -> None:
        """Add an owner to pages that have one, so that a shared prefix outlives its first request.

        Parameters
        ----------
        page_ids : array of int32 or int64, shape (n,)
            Page ids that have an owner.
        """
        self.pool.enter(self.backend.use_library(page_ids))
        try:
            vector = self.backend.vector(page_ids, "page_ids")
            if self.backend.length(vector):
                self.pool.run(Kind.RETAIN, 0, 0, self.backend.retain_pages, vector)
                self._finish(None)
        finally:
            self.pool.leave()

    def clear(self) -> None:
        """Free every page, in order, and zero all tables; what is queued is dropped."""
        self.pool.enter(self.backend.library)
        try:
            self.pool.clear(self.pool.capacity)
            self._forget_queue(len(self._told))
            self._in_group = False
            self._num_pages[:] = 0
            self._last_slot[:] = self.page_size - 1
            for array in (self.req_to_page, self.token_slot_refs, self._on_host):
                self.backend.fill_zero(array)
            self._up_to_date()
        finally:
            self.pool.leave()

    def _up_to_date(self) -> None:
        """Hear that `_on_host` lacks nothing, as far as anybody can know."""
        self._changed[:] = self._any_changed = self._in_graphs

    @property
    def req_to_page_cpu(self) -> Any:
        """Copy of `req_to_page` on the host, always the same pinned array.

        Reading the attribute brings the rows that changed since the last time up to date, and waits for them.
        Engines may write to it; the device's table is the truth.
        """
        if self._any_changed:
            self.pool.enter("")
            try:
                rows = slice(None) if self._changed.all() else np.flatnonzero(self._changed).tolist()
                host = self._on_host if isinstance(self._on_host, np.ndarray) else self._on_host.numpy()
                host[rows] = self.backend.rows_to_host(self.req_to_page, rows)
            finally:
                self.pool.leave()
            self._up_to_date()
        return self._on_host

    def _before_step(self, table: Any, rows: Any) -> None:
        """What is queued in these rows is freed before they get new pages."""
        if not self._told or not self._is_mine(table, in_part=True):
            return
        unknown = not self._is_mine(table) or is_on_gpu(rows)
        if unknown or not self._queued_rows().isdisjoint(host_array(rows, "req_pool_indices").tolist()):
            self._flush()

    def _is_mine(self, table: Any, in_part: bool = False) -> bool:
        """Whether this is `req_to_page`, maybe as another array over its memory, or at least shares cells with it."""
        if table is self.req_to_page:
            return True
        backend = self.backend
        given, mine = backend.table(table, "table"), self._cells
        return backend.tables_overlap(given, mine) if in_part else backend.tables_equal(given, mine)

    def _after_step(self, table: Any, rows: Any, lengths: np.ndarray | None) -> None:
        if not self._is_mine(table, in_part=True):
            return
        self._in_graphs = self._in_graphs or self.pool.capturing
        if lengths is None or not self._is_mine(table):
            self._changed[:] = self._any_changed = True
            return
        listed = host_array(rows, "req_pool_indices")
        real = listed[listed != self.pad_row]
        if not real.size:
            return
        if smallest(real) < 0 or largest(real) >= self.max_batch_size or largest(lengths) > self._tokens_a_row:
            inside = (real >= 0) & (real < self.max_batch_size) & (lengths <= self._tokens_a_row)
            real, lengths = real[inside], lengths[inside]
        self._note_rows(real, lengths)

    def _note_rows(self, rows: np.ndarray, lengths: np.ndarray) -> None:
        pages = -(-lengths // self.page_size)
        self._num_pages[rows] = pages
        self._last_slot[rows] = lengths - pages * self.page_size + (self.page_size - 1)
        self._changed[rows] = self._any_changed = True


def _on_host(x: Any, name: str) -> np.ndarray:
    return host_array(to_host(x) if is_on_gpu(x) else x, name).astype(np.int64, copy=False)


def _host_view(array: np.ndarray, as_torch: bool) -> Any:
    if not as_torch:
        return array
    return sys.modules["torch"].from_numpy(array)
