"""Hand-offs: what attention kernels read, made of a request table. One launch each; nothing of the pool changes."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupaged.geometry import pages_for, whole
from cupaged.interop import host_array, is_on_gpu
from cupaged.layout import INT32_LARGEST

__all__ = ["HandOffs"]

_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)


class HandOffs:
    """The hand-offs of both allocators.

    They only read, so they are no ops of the pool: they have no op number, record no error and send no mail, and
    errors that earlier ops recorded do not raise here. None waits for the device. With ``out=`` each can be captured
    in a graph. What `out` holds must not overlap an argument.

    The table is a page table (`KVAllocator`) or a slot table (`PagedTokenToKVPoolAllocator`), whose every
    ``page_size``-th cell names a page. Rows that equal ``pad_row`` are padding and hold nothing. A row out of the
    table, or a length that is negative or more than a row holds, raises where the host knows it; where only the
    device does, such a request holds nothing either, and no memory out of range is touched. A cell that names no page
    of this pool stands for page 0, or slot -1.
    """

    backend: Any
    pool: Any
    page_size: int
    pad_row: int
    _paged_table: bool
    _on_gpu: bool
    _last_possible_slot: int

    def flashinfer_tables(
        self, table: Any, req_pool_indices: Any, seq_lens: Any, *, seq_lens_cpu: Any = None, out: Any = None
    ) -> tuple[Any, Any, Any]:
        """Page table of a batch in FlashInfer's ragged layout: ``kv_indptr``, ``kv_indices``, ``kv_last_page_len``.

        The layout is that of FlashInfer's tutorial "KV-Cache Layout in FlashInfer", section "Page Table Layout", as
        ``plan`` of its paged wrappers and `append_paged_kv_cache` take it. Request i has ``(pages - 1) * page_size +
        kv_last_page_len[i]`` tokens; FlashInfer's kernels take one without pages as empty before they look at
        its last page.

        Parameters
        ----------
        table : array of int32, shape (rows, columns)
            Rows contiguous, on this allocator's device.
        req_pool_indices : array of int32 or int64, shape (batch,)
            Table row of each request.
        seq_lens : array of int32 or int64, shape (batch,)
            Tokens of each request; 0 is legal.
        seq_lens_cpu : array on the host, optional
            `seq_lens` again, where those live on a GPU; only serves the length of ``kv_indices``.
        out : tuple of three arrays of int32, optional
            Contiguous, of shapes ``(batch + 1,)``, ``(n,)`` and ``(batch,)`` with any sufficient n; written and
            returned. Needed in a graph.

        Returns
        -------
        kv_indptr : array of int32, shape (batch + 1,)
            Where in ``kv_indices`` the pages of each request begin; the last entry counts all pages.
        kv_indices : array of int32, shape (n,)
            Page ids, request after request; 0 from ``kv_indptr[-1]`` on. Without `out`, n is the number of pages
            where the host knows the lengths (rows that pad count by theirs if only the device knows that they
            pad); else as many as the table could hold, batch times the pages of a row, because the number is not
            waited for.
        kv_last_page_len : array of int32, shape (batch,)
            Tokens in each last page, 1 .. `page_size`; 0 for a request without pages.

        Raises
        ------
        TypeError, ValueError
            For what the host can see, an `out` that is too short included. Where only the device can, the pages
            that do not fit are cut off as if the requests ended there.
        CaptureError
            If `out` is missing while a graph is captured.
        """
        backend = self.backend
        library = backend.use_library(seq_lens, req_pool_indices, table)
        self._check_table_holds_slots()
        self.pool.enter(library, raising=False, changing=False)
        try:
            cells = backend.table(table, "table")
            rows = backend.vector(req_pool_indices, "req_pool_indices")
            seq = backend.vector(seq_lens, "seq_lens")
            batch = self._same_batch(rows, seq_lens=seq)
            most, known = self._pages_at_most(cells, req_pool_indices, seq_lens, seq_lens_cpu, batch)
            self._check_capture(out)
            if out is None:
                if most > INT32_LARGEST:
                    raise ValueError(f"kv_indices may need {most} entries; give out=, or seq_lens_cpu=")
                shapes = ((batch + 1,), (most,), (batch,))
                made = [backend.new_array(library, shape, _INT32) for shape in shapes]
                out, (indptr, indices, last), length = tuple(x for x, _ in made), (x for _, x in made), most
            else:
                indptr, indices, last, length = self._given_tables(out, batch, most if known else 0)
            backend.flashinfer_tables(
                cells, self._paged_table, self.pad_row, rows, seq, indptr, indices, length, last
            )
            return out
        finally:
            self.pool.leave()

    def _given_tables(self, out: Any, batch: int, needed: int) -> tuple[Any, Any, Any, int]:
        if not isinstance(out, tuple | list) or len(out) != 3:
            raise TypeError("out must be a tuple of three arrays: kv_indptr, kv_indices, kv_last_page_len")
        given = self.backend.given_array
        indptr, _ = given(out[0], "out[0], kv_indptr,", _INT32, batch + 1)
        indices, length = given(out[1], "out[1], kv_indices,", _INT32, None)
        last, _ = given(out[2], "out[2], kv_last_page_len,", _INT32, batch)
        if length > INT32_LARGEST:
            raise ValueError(f"out[1], kv_indices, must have at most 2**31 - 1 entries, not {length}")
        if length < needed:
            raise ValueError(f"out[1], kv_indices, must have room for {needed} pages, not {length}")
        return indptr, indices, last, length

    def _pages_at_most(self, cells: Any, rows: Any, seq: Any, on_cpu: Any, batch: int) -> tuple[int, bool]:
        """Pages that the batch has at most, and whether the host knows that it has them."""
        name = "seq_lens"
        if self._on_gpu and is_on_gpu(seq):
            if on_cpu is None:
                return batch * self._row_pages(cells), False
            seq, name = on_cpu, "seq_lens_cpu"
            if is_on_gpu(seq):
                raise ValueError("seq_lens_cpu must be on the host")
        lengths = host_array(seq, name)
        if lengths.size != batch:
            raise ValueError(f"{name} must have one entry for each of the {batch} requests, not {lengths.size}")
        if not self._on_gpu or not is_on_gpu(rows):
            real = self._real_rows(cells, rows)
            self._check_held(cells, lengths, real, name)
            return _sum_of_pages(lengths[real], self.page_size), True
        held = (lengths >= 0) & (lengths <= self._row_tokens(cells))
        return _sum_of_pages(lengths[held], self.page_size), False

    def block_table(
        self, table: Any, req_pool_indices: Any, seq_lens: Any, max_pages: int, *, out: Any = None
    ) -> Any:
        """Dense block table of a batch, as FlashAttention (``block_table``), FlashMLA and vLLM read it.

        Parameters
        ----------
        table, req_pool_indices, seq_lens
            As in `flashinfer_tables`.
        max_pages : int
            Columns.
        out : array of int32, shape (batch, max_pages), optional
            Rows contiguous, any distance apart: a corner of a larger buffer is fine. Written and returned. Needed
            in a graph.

        Returns
        -------
        array of int32, shape (batch, max_pages)
            Page ids of each request, 0 past its length.

        Raises
        ------
        TypeError, ValueError
            For what the host can see, a request of more than `max_pages` pages included; where only the device can,
            its first `max_pages` are listed.
        CaptureError
            If `out` is missing while a graph is captured.
        """
        width = whole("max_pages", max_pages, 0)
        return self._dense(table, req_pool_indices, seq_lens, 1, width, "max_pages", out)

    def expand_page_table(
        self, table: Any, req_pool_indices: Any, seq_lens: Any, kernel_page_size: int, *, out: Any = None
    ) -> Any:
        """`block_table` for a kernel whose pages are smaller than the allocator's.

        Page p of the allocator is kernel pages ``p * r`` .. ``p * r + r - 1``, ``r = page_size // kernel_page_size``,
        as vLLM splits a block for a kernel with smaller ones: the same memory, seen as ``r`` times as many pages.

        Parameters
        ----------
        table, req_pool_indices, seq_lens
            As in `flashinfer_tables`.
        kernel_page_size : int
            Tokens in a page of the kernel; must divide `page_size`.
        out : array of int32, shape (batch, n), optional
            As in `block_table`, with n kernel pages a request.

        Returns
        -------
        array of int32, shape (batch, n)
            Kernel page ids of each request, ``ceil(seq_len / kernel_page_size)`` of them, then 0. Without `out`, n
            is what a row of the table can hold.

        Raises
        ------
        TypeError, ValueError, CaptureError
            As in `block_table`; also if `kernel_page_size` does not divide `page_size`.
        """
        kernel_size = whole("kernel_page_size", kernel_page_size, 1)
        if self.page_size % kernel_size:
            raise ValueError(f"kernel_page_size must divide page_size, {self.page_size}, but {kernel_size} does not")
        parts = self.page_size // kernel_size
        return self._dense(table, req_pool_indices, seq_lens, parts, None, "out.shape[1]", out)

    def _dense(self, table: Any, rows: Any, seq: Any, parts: int, width: int | None, name: str, out: Any) -> Any:
        backend = self.backend
        library = backend.use_library(seq, rows, table)
        self._check_table_holds_slots()
        self.pool.enter(library, raising=False, changing=False)
        try:
            cells = backend.table(table, "table")
            row_vector = backend.vector(rows, "req_pool_indices")
            seq_vector = backend.vector(seq, "seq_lens")
            batch = self._same_batch(row_vector, seq_lens=seq_vector)
            self._check_capture(out)
            if out is None:
                if width is None:
                    width = self._row_pages(cells) * parts
                out, to = backend.new_table(library, batch, width)
            else:
                to = backend.table(out, "out")
                given_rows, given_width = backend.shape(to)
                if given_rows != batch or (width is not None and given_width != width):
                    expected = f"({batch}, {'n' if width is None else width})"
                    raise ValueError(f"out must be of shape {expected}, not ({given_rows}, {given_width})")
                width = given_width
            if self._host_knows(rows, seq):
                lengths, real = host_array(seq, "seq_lens"), self._real_rows(cells, rows)
                self._check_held(cells, lengths, real, "seq_lens")
                longest = int(lengths[real].max(initial=0))
                needed = pages_for(longest, self.page_size // parts)
                if needed > width:
                    raise ValueError(f"{name} must be at least {needed} for {longest} tokens, not {width}")
            backend.block_table(cells, self._paged_table, self.pad_row, row_vector, seq_vector, parts, to)
            return out
        finally:
            self.pool.leave()

    def slot_mapping(
        self,
        table: Any,
        req_pool_indices: Any,
        prefix_lens: Any,
        seq_lens: Any,
        num_tokens: int,
        *,
        out: Any = None,
    ) -> Any:
        """Slot of every new token of a batch, as vLLM's ``slot_mapping``: K and V of token t go to ``slots[t]``.

        vLLM's `reshape_and_cache` skips tokens whose slot is negative, and pads with -1.

        Parameters
        ----------
        table, req_pool_indices
            As in `flashinfer_tables`.
        prefix_lens, seq_lens : array of int32 or int64, shape (batch,)
            Tokens ``prefix_lens[i] .. seq_lens[i] - 1`` of request i are mapped, request after request. The lengths
            of a row that pads only say how many entries it gets; lengths that no request can have, none.
        num_tokens : int
            Entries in all, at least the sum of ``seq_lens - prefix_lens``.
        out : array of int64, shape (num_tokens,), optional
            Contiguous; written and returned. Needed in a graph.

        Returns
        -------
        array of int64, shape (num_tokens,)
            Slots; -1 for rows that pad, for requests that the table does not hold, and past the sum.

        Raises
        ------
        TypeError, ValueError
            For what the host can see, more than `num_tokens` tokens included; where only the device can, the
            first `num_tokens` are mapped.
        CaptureError
            If `out` is missing while a graph is captured.
        """
        num_tokens = whole("num_tokens", num_tokens, 0)
        if num_tokens > INT32_LARGEST:
            raise ValueError(f"num_tokens must be at most 2**31 - 1, not {num_tokens}")
        backend = self.backend
        library = backend.use_library(seq_lens, req_pool_indices, table)
        self._check_table_holds_slots()
        self.pool.enter(library, raising=False, changing=False)
        try:
            cells = backend.table(table, "table")
            rows = backend.vector(req_pool_indices, "req_pool_indices")
            prefix = backend.vector(prefix_lens, "prefix_lens")
            seq = backend.vector(seq_lens, "seq_lens")
            self._same_batch(rows, prefix_lens=prefix, seq_lens=seq)
            if self._host_knows(req_pool_indices, prefix_lens, seq_lens):
                self._check_tokens(cells, req_pool_indices, prefix_lens, seq_lens, num_tokens)
            self._check_capture(out)
            if out is None:
                out, slots = backend.new_array(library, (num_tokens,), _INT64)
            else:
                slots, _ = backend.given_array(out, "out", _INT64, num_tokens)
            backend.slot_mapping(cells, self._paged_table, self.pad_row, rows, prefix, seq, num_tokens, slots)
            return out
        finally:
            self.pool.leave()

    def _check_tokens(self, cells: Any, rows: Any, prefix_lens: Any, seq_lens: Any, num_tokens: int) -> None:
        before, after = host_array(prefix_lens, "prefix_lens"), host_array(seq_lens, "seq_lens")
        real = self._real_rows(cells, rows)
        self._check_held(cells, after, real, "seq_lens")
        for i in np.flatnonzero(real & ((before < 0) | (before > after)))[:1]:
            raise ValueError(f"prefix_lens[{i}] is {before[i]}, but must lie between 0 and seq_lens[{i}], {after[i]}")
        holds = (before >= 0) & (before <= after) & (after <= INT32_LARGEST)
        total = int((after.astype(np.int64) - before)[holds].sum())
        if total > num_tokens:
            raise ValueError(f"num_tokens is {num_tokens}, but seq_lens - prefix_lens sums to {total}")

    def _check_table_holds_slots(self) -> None:
        """Raise for a slot table that cannot hold this pool's slots: every call that reads a table begins here."""
        if not self._paged_table and self._last_possible_slot > INT32_LARGEST:
            raise ValueError(
                f"this pool has slots up to {self._last_possible_slot}, which an int32 request table cannot hold; "
                "keep page tables (KVAllocator), or make the pool smaller"
            )

    # ---- what the host can see ---------------------------------------------------------------------------------

    def _host_knows(self, *arrays: Any) -> bool:
        return not self._on_gpu or not any(is_on_gpu(x) for x in arrays)

    def _row_pages(self, cells: Any) -> int:
        columns = self.backend.shape(cells)[1]
        return columns if self._paged_table else pages_for(columns, self.page_size)

    def _row_tokens(self, cells: Any) -> int:
        """Most tokens that a row of the table can hold."""
        columns = self.backend.shape(cells)[1] * (self.page_size if self._paged_table else 1)
        return min(columns, INT32_LARGEST)

    def _real_rows(self, cells: Any, req_pool_indices: Any) -> np.ndarray:
        """Which requests do not pad; raises for a row that the table has not."""
        rows, count = host_array(req_pool_indices, "req_pool_indices"), self.backend.shape(cells)[0]
        real = rows != self.pad_row
        for i in np.flatnonzero(real & ((rows < 0) | (rows >= count)))[:1]:
            raise ValueError(f"req_pool_indices[{i}] is {rows[i]}, but the table has {count} rows")
        return real

    def _check_held(self, cells: Any, lengths: np.ndarray, real: np.ndarray, name: str) -> None:
        most = self._row_tokens(cells)
        for i in np.flatnonzero(real & ((lengths < 0) | (lengths > most)))[:1]:
            raise ValueError(f"{name}[{i}] is {lengths[i]}, but must lie between 0 and {most}, what a row holds")

    def _same_batch(self, rows: Any, **vectors: Any) -> int:
        batch: int = self.backend.length(rows)
        for name, vector in vectors.items():
            self._check_length(vector, name, batch)
        return batch

    def _check_length(self, vector: Any, name: str, batch: int) -> None:
        raise NotImplementedError

    def _check_capture(self, out: Any) -> None:
        raise NotImplementedError


def _sum_of_pages(lengths: np.ndarray, page_size: int) -> int:
    return int((-(-lengths.astype(np.int64) // page_size)).sum())
