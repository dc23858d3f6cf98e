"""What both allocators are: a pool with its host's bounds, and whole steps over request tables."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupaged import backends
from cupaged.admission import Admission
from cupaged.errors import CaptureError, IntegrityError
from cupaged.geometry import check_lengths, extend_bounds, largest, pages_begun, pages_taken, smallest, whole
from cupaged.handoff import HandOffs
from cupaged.interop import host_array, is_on_gpu, library_of, parse_device, to_host
from cupaged.layout import INT32_LARGEST, Kind, Where, Word
from cupaged.pool import PagePool, Stats

__all__ = ["PoolAllocator", "whole"]


class PoolAllocator(Admission, HandOffs):
    """Base of `PagedTokenToKVPoolAllocator` and `KVAllocator`; not made by itself.

    A subclass says where freed pages go (`_freed_to`) and whether its request tables hold pages or slots
    (`_paged_table`).
    """

    _freed_to = Where.FRONT
    _paged_table = False

    def _make(
        self,
        num_pages: int,
        page_size: int,
        *,
        index_dtype: np.dtype,
        device: Any,
        backend: str,
        need_sort: bool,
        refused_slot: int,
        errors: str,
        strict: bool,
        max_batch: int,
        debug: bool,
        pad_row: int,
    ) -> None:
        if num_pages >= INT32_LARGEST:
            raise ValueError(f"size makes {num_pages} pages, but page ids are int32; use a larger page_size")
        if page_size > INT32_LARGEST:
            raise ValueError(f"page_size must be at most 2**31 - 1, not {page_size}")
        self._last_possible_slot = (num_pages + 1) * page_size - 1
        if self._last_possible_slot > np.iinfo(index_dtype).max:
            raise ValueError(
                f"{num_pages} pages of {page_size} slots, by size, have slots that do not fit {index_dtype}"
            )
        if isinstance(refused_slot, bool) or refused_slot not in (0, -1):
            raise ValueError(f"refused_slot must be 0 or -1, not {refused_slot!r}")
        if errors not in ("raise", "defer"):
            raise ValueError(f"errors must be 'raise' or 'defer', not {errors!r}")
        kind, index = parse_device(device)
        self.page_size = page_size
        self.need_sort = bool(need_sort)
        self.debug_mode = bool(debug)
        self.pad_row = whole("pad_row", pad_row, -(2**63))
        if self.pad_row >= 2**63:
            raise ValueError(f"pad_row must fit int64, not {pad_row}")
        self.backend = backends.pick(backend, kind)(
            num_pages=num_pages,
            page_size=page_size,
            index_dtype=index_dtype,
            max_batch=whole("max_batch", max_batch, 1),
            need_sort=self.need_sort,
            strict=bool(strict),
            refused_slot=refused_slot,
            device_index=index,
            library="torch" if library_of(device) == "torch" else "",
        )
        self.device = self.backend.device
        self._on_gpu = self.device != "cpu"
        self._where = Where.STAGE if self.need_sort else self._freed_to
        self.pool = PagePool(self.backend, errors)
        self._places = np.zeros(0, np.int64)  # scratch: where a batch names each row

    # ---- whole steps over a request table ----------------------------------------------------------------------

    def decode_step(self, table: Any, req_pool_indices: Any, seq_lens: Any, *, out: Any = None) -> Any:
        """One decode step: find each last slot, allocate, write the table, return the new slots. One launch.

        Engines do the same in five: gather ``last_loc``, add one to the lengths, allocate, scatter.

        Parameters
        ----------
        table : array of int32, shape (rows, columns)
            ``req_to_token`` for `PagedTokenToKVPoolAllocator`, ``req_to_page`` for `KVAllocator`; rows contiguous,
            on this allocator's device; written in place.
        req_pool_indices : array of int32 or int64, shape (batch,)
            Table row of each request; distinct, except for rows equal to `pad_row`, which take nothing and get
            slot 0.
        seq_lens : array of int32 or int64, shape (batch,)
            Tokens of each request before this step.
        out : array, shape (batch,), optional
            Contiguous, of the allocator's index dtype; written in place and returned. Needed in a graph.

        Returns
        -------
        array or None
            Slots, shape ``(batch,)``, in the library of the inputs; None if the pool is short, with nothing changed.

        Raises
        ------
        TypeError, ValueError
            For what the host can see.
        DeviceError
            For what an earlier op recorded on the device (``errors="raise"``); a row or length out of the table is
            recorded, and the whole step refused.
        """
        return self._step(Kind.DECODE_STEP, table, req_pool_indices, None, seq_lens, None, out)

    def extend_step(
        self,
        table: Any,
        req_pool_indices: Any,
        prefix_lens: Any,
        seq_lens: Any,
        extend_num_tokens: int,
        *,
        out: Any = None,
    ) -> Any:
        """Like `decode_step` for any number of new tokens a request: prefill chunks, or k speculative tokens.

        Parameters
        ----------
        table, req_pool_indices, out
            As in `decode_step`; the prefixes are already in the table.
        prefix_lens, seq_lens : array of int32 or int64, shape (batch,)
            Tokens of each request before and after this step. A padded row's difference only says how many zeros
            it gets.
        extend_num_tokens : int
            Sum of ``seq_lens - prefix_lens``.

        Returns
        -------
        array or None
            Slots, shape ``(extend_num_tokens,)``, request after request.

        Raises
        ------
        TypeError, ValueError, DeviceError
            As in `decode_step`.
        """
        num_tokens = whole("extend_num_tokens", extend_num_tokens, 0)
        if num_tokens > INT32_LARGEST:
            raise ValueError(f"extend_num_tokens must be at most 2**31 - 1, not {num_tokens}")
        _check_given("prefix_lens", prefix_lens)
        return self._step(Kind.EXTEND_STEP, table, req_pool_indices, prefix_lens, seq_lens, num_tokens, out)

    def _step(
        self, kind: Kind, table: Any, rows: Any, prefix: Any, seq: Any, num_tokens: int | None, out: Any
    ) -> Any:
        backend, size = self.backend, self.page_size
        self._check_table_holds_slots()
        library = backend.use_library(seq, rows, table)
        self._before_step(table, rows)
        self.pool.enter(library)
        try:
            cells = backend.table(table, "table")
            on_host = self._are_on_host(rows, seq, prefix)
            if on_host:
                rows, seq = host_array(rows, "req_pool_indices"), host_array(seq, "seq_lens")
                prefix = None if prefix is None else host_array(prefix, "prefix_lens")
            row_vector = backend.vector(rows, "req_pool_indices")
            seq_vector = backend.vector(seq, "seq_lens")
            prefix_vector = None if prefix is None else backend.vector(prefix, "prefix_lens")
            batch = backend.length(row_vector)
            self._check_length(seq_vector, "seq_lens", batch)
            if prefix_vector is not None:
                self._check_length(prefix_vector, "prefix_lens", batch)
            if num_tokens is None:
                num_tokens, (least, most) = batch, (0, batch)
                sort_bound = batch
            else:
                least, most = extend_bounds(num_tokens, batch, size)
                sort_bound = num_tokens // size + batch + 1
                least = 0  # padded rows take none
            after = None
            if on_host:
                before, after, padding_tokens = self._real_lengths(rows, prefix, seq)
                self._check_distinct(rows, backend.shape(cells)[0])
                check_lengths(before, after, None if prefix is None else num_tokens - padding_tokens)
                if self._on_gpu or num_tokens > self.pool.num_pages * size:
                    least = most = pages_begun(before, size) if prefix is None else pages_taken(before, after, size)
            if least > self.pool.num_pages and not self.pool.capturing:
                return self._finish(self.pool.refuse(sort_bound))  # before memory is asked for
            read = [v for v in (row_vector, prefix_vector, seq_vector) if v is not None]
            result, slots = self._output(library, num_tokens, out, *read)
            if out is not None and backend.table_overlaps(cells, slots, num_tokens):
                raise ValueError("out must not overlap the table")
            granted = self.pool.allocate(
                kind,
                least,
                most,
                sort_bound,
                backend.step,
                cells,
                self._paged_table,
                self.pad_row,
                row_vector,
                prefix_vector,
                seq_vector,
                num_tokens,
                slots,
            )
            if granted:
                self._after_step(table, rows, after)
            self._finish(result if granted else None, padding=True)
            if granted and self.debug_mode and not self.pool.capturing:
                lengths = to_host(seq) if is_on_gpu(seq) else host_array(seq, "seq_lens")
                self._check_rows_unique(table, rows, lengths + (prefix is None), self.pad_row)
            return result if granted else None
        finally:
            self.pool.leave()

    def _are_on_host(self, rows: Any, seq: Any, other: Any) -> bool:
        """Whether the host can read what a step is given."""
        return not self._on_gpu or not (is_on_gpu(rows) or is_on_gpu(seq) or (other is not None and is_on_gpu(other)))

    def _real_lengths(
        self, rows: np.ndarray, prefix: np.ndarray | None, seq: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, int]:
        """Lengths before and after of the rows that do not pad, and the padded ones' tokens."""
        real = rows != self.pad_row
        before, after = (seq, seq + np.int64(1)) if prefix is None else (prefix, seq)
        if np.count_nonzero(real) == real.size:
            return before, after, 0
        # Differences only of those that hold: others may not fit their type.
        holds = ~real & (before >= 0) & (after >= before) & (after <= INT32_LARGEST)
        return before[real], after[real], int((after[holds] - before[holds]).sum(dtype=np.int64))

    def trim(self, table: Any, req_pool_indices: Any, seq_lens: Any, new_seq_lens: Any) -> None:
        """Give back what speculation did not keep: the pages past the new lengths. One launch.

        Parameters
        ----------
        table, req_pool_indices
            As in `decode_step`; the table is read, not written.
        seq_lens, new_seq_lens : array of int32 or int64, shape (batch,)
            Tokens of each request now, and what shall stay of them. The page that holds the boundary goes only if
            none of its tokens stays.

        Raises
        ------
        TypeError, ValueError, DeviceError
            As in `decode_step`; also recorded: a new length that is negative or larger than the old one.
        """
        _check_given("new_seq_lens", new_seq_lens)
        self._free_rows(Kind.TRIM, table, req_pool_indices, seq_lens, new_seq_lens)

    def release(self, table: Any, req_pool_indices: Any, seq_lens: Any) -> None:
        """Give back all pages of requests: each page in their rows loses one owner. One launch.

        Parameters
        ----------
        table, req_pool_indices
            As in `decode_step`; the table is read, not written.
        seq_lens : array of int32 or int64, shape (batch,)
            Tokens of each request.

        Raises
        ------
        TypeError, ValueError, DeviceError
            As in `decode_step`.
        """
        self._free_rows(Kind.RELEASE, table, req_pool_indices, seq_lens, None)

    def _free_rows(self, kind: Kind, table: Any, rows: Any, seq: Any, keep: Any) -> None:
        backend = self.backend
        self._check_table_holds_slots()
        self.pool.enter(backend.use_library(seq, rows, table))
        try:
            cells = backend.table(table, "table")
            on_host = self._are_on_host(rows, seq, keep)
            if on_host:
                rows, seq = host_array(rows, "req_pool_indices"), host_array(seq, "seq_lens")
                keep = None if keep is None else host_array(keep, "new_seq_lens")
            row_vector = backend.vector(rows, "req_pool_indices")
            seq_vector = backend.vector(seq, "seq_lens")
            keep_vector = None if keep is None else backend.vector(keep, "new_seq_lens")
            batch = backend.length(row_vector)
            self._check_length(seq_vector, "seq_lens", batch)
            if keep_vector is not None:
                self._check_length(keep_vector, "new_seq_lens", batch)
            certain, most, before = 0, self.pool.num_pages, None
            if on_host:
                real = rows != self.pad_row
                after = seq[real]
                before = np.zeros(after.size, after.dtype) if keep is None else keep[real]
                _check_trim(before, after)
                most = pages_taken(before, after, self.page_size)
                certain = 0 if self.pool.may_share() else most
            self.pool.run(
                kind,
                certain,
                most,
                backend.free_rows,
                cells,
                self._paged_table,
                self.pad_row,
                row_vector,
                keep_vector,
                seq_vector,
                self._where,
            )
            if before is not None:
                self._after_step(table, rows, before)
            self._finish(None)
        finally:
            self.pool.leave()

    def _check_length(self, vector: Any, name: str, batch: int) -> None:
        n = self.backend.length(vector)
        if n != batch:
            raise ValueError(f"{name} must have one entry for each of the {batch} req_pool_indices, not {n}")

    def _check_distinct(self, rows: np.ndarray, count: int) -> None:
        """Raise if a row of the table comes twice: its request would be given two pages for one cell.

        Rows out of the table are left to the device, which refuses the batch.
        """
        n = rows.size
        if n < 2:
            return
        real = rows if np.count_nonzero(rows == self.pad_row) == 0 else rows[rows != self.pad_row]
        if not real.size or smallest(real) < 0 or largest(real) >= count:
            return
        if self._places.size < count:
            self._places = np.zeros(count, np.int64)
        places, numbers = self._places, np.arange(real.size)
        places[real] = numbers  # of a row that comes twice, the last place stays
        again = places[real] != numbers
        if np.count_nonzero(again):
            raise ValueError(f"req_pool_indices names row {real[again][0]} twice")

    def _before_step(self, table: Any, rows: Any) -> None:
        """Hear that a step will read these rows of a table."""

    def _after_step(self, table: Any, rows: Any, lengths: np.ndarray | None) -> None:
        """Hear that a step has written to a table; the lengths of rows that do not pad, if the host knows them."""

    # ---- results -----------------------------------------------------------------------------------------------

    def _output(self, library: str, n: int, out: Any, *read: Any, in_place: Any = None) -> tuple[Any, Any]:
        """A result's array, new or the caller's, which may be `in_place` but overlap nothing else that is read."""
        self._check_capture(out)
        if out is None:
            return self.backend.output(library, n)
        slots = self.backend.given_output(out, n)
        for vector in read:
            if self.backend.overlaps(vector, slots, n):
                raise ValueError("out must not overlap an argument that is read: slots would be taken for lengths")
        if in_place is not None and self.backend.overlaps(in_place, slots, n, same_is_fine=True):
            raise ValueError("out may be last_loc itself, but must not overlap it in part")
        return out, slots

    def _check_capture(self, out: Any) -> None:
        if out is None and self.pool.capturing:
            raise CaptureError("while a graph is captured, the call needs out=: a capture must not allocate")

    def _finish(self, result: Any, padding: bool = False) -> Any:
        """What a mutating call returns; in debug mode, after everything was checked."""
        if self.debug_mode and not self.pool.capturing:
            self.pool.check()
            self.pool.check_integrity()
            if result is not None:
                slots = to_host(result)
                _check_unique(slots[slots != 0] if padding else slots)
        return result

    def _check_rows_unique(self, table: Any, rows: Any, lengths: Any, pad_row: int | None) -> None:
        """In debug mode: no row comes twice in a batch, and none holds a page or slot twice."""
        rows = to_host(rows) if is_on_gpu(rows) else host_array(rows, "req_pool_indices")
        cells, what, first = to_host(table), "page", 1
        if not self._paged_table:
            what, first = "slot", self.page_size
        seen: set[int] = set()
        for row, length in zip(rows.tolist(), lengths.tolist(), strict=True):
            if row == pad_row:
                continue
            if row in seen:
                raise IntegrityError(f"req_pool_indices names row {row} twice")
            seen.add(row)
            entries = np.sort(cells[row, : -(-length // self.page_size) if self._paged_table else length])
            twice = entries[1:][(entries[1:] == entries[:-1]) & (entries[1:] >= first)]
            if twice.size:
                raise IntegrityError(f"row {row} of the table holds {what} {twice[0]} twice")

    # ---- upkeep ------------------------------------------------------------------------------------------------

    def available_at_least(self) -> int:
        """Lower bound of what `available_size` says. Never waits; depends on timing: ranks must not decide by it."""
        return self.pool.free_at_least() * self.page_size

    def merge_and_sort_free(self) -> None:
        """Merge the pages that wait aside (`need_sort`) with the front, ascending."""
        self.pool.enter("")
        try:
            self.pool.sort()
        finally:
            self.pool.leave()

    @property
    def ret_values(self) -> Any:
        """``new_pages << 32 | tokens`` of the last allocation: int64, shape (), on the device; a view."""
        return self.backend.words_array(self.backend.library, Word.RET)

    @property
    def ok(self) -> Any:
        """1 if the last op was carried out, else 0: int64, shape (), on the device; later kernels may read it."""
        return self.backend.words_array(self.backend.library, Word.OK)

    def note_replay(self, pages_at_most: int) -> None:
        """Tell of the replay of a captured graph, so that the host's bounds stay true without a wait.

        Parameters
        ----------
        pages_at_most : int
            Most pages that the replay can have taken. Once called, it is relied on for every later replay too.
        """
        self.pool.note_replay(whole("pages_at_most", pages_at_most, 0))

    def refresh(self) -> None:
        """Wait for all queued ops and replays, and make the host's figures exact."""
        self.pool.enter("")
        try:
            self.pool.refresh()
        finally:
            self.pool.leave()

    def check(self) -> None:
        """Wait for all queued ops and raise the recorded error, if there is one.

        Raises
        ------
        DeviceError
            The error with the lowest op and index since the last one that was raised.
        """
        self.pool.check()

    def check_integrity(self) -> None:
        """Prove that no page is lost, in the free list twice, or both free and owned; waits.

        Raises
        ------
        IntegrityError
            Naming the first page that is wrong.
        """
        self.pool.check_integrity()

    def stats(self) -> Stats:
        """Counters of ops, pages, the peak and refusals, after all queued ops."""
        return self.pool.stats()

    def warmup(self) -> None:
        """Compile and load every kernel, so that no later call does."""
        self.backend.warmup()


def _check_given(name: str, x: Any) -> None:
    if x is None:
        raise TypeError(f"{name} must be an array or a list of integers, not None")


def _check_trim(before: np.ndarray, after: np.ndarray) -> None:
    if not after.size or (
        smallest(before) >= 0 and largest(after) <= INT32_LARGEST and not np.count_nonzero(before > after)
    ):
        return
    for i in np.flatnonzero((before < 0) | (before > after) | (after > INT32_LARGEST))[:1]:
        raise ValueError(
            f"a request of {after[i]} tokens cannot be cut to {before[i]}: new_seq_lens must lie between 0 and "
            "seq_lens, which is at most 2**31 - 1"
        )


def _check_unique(slots: np.ndarray) -> None:
    ordered = np.sort(slots)
    twice = np.flatnonzero(ordered[1:] == ordered[:-1])
    if twice.size:
        raise IntegrityError(f"slot {ordered[twice[0]]} was handed out twice in one call")
