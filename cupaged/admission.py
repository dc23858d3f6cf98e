"""Admission: what a scheduler asks before it makes a batch, without a launch."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupaged.geometry import check_lengths, largest, pages_taken
from cupaged.interop import host_array, is_on_gpu
from cupaged.layout import INT32_LARGEST

__all__ = ["Admission"]

_INT32 = np.dtype(np.int32)


class Admission:
    """Questions about pages, of both allocators. Schedulers count tokens, and pools count pages."""

    backend: Any
    pool: Any
    page_size: int
    _most_tokens = INT32_LARGEST  # of one request

    def pages_needed(self, prefix_lens: Any, seq_lens: Any) -> int:
        """New pages that a batch would take: the sum of ``ceil(seq / page_size) - ceil(prefix / page_size)``. Exact.

        Parameters
        ----------
        prefix_lens, seq_lens : array of int32 or int64, or list, shape (batch,), on the host
            Tokens of each request that have a slot already, and those that it grows to.

        Returns
        -------
        int
            Pages. Nothing is launched, and nothing is waited for.

        Raises
        ------
        TypeError, ValueError
            For arrays that are no integers, are on a GPU, or differ in length, and for lengths that are negative,
            shrink, or exceed 2**31 - 1.
        """
        return self._pages_needed(prefix_lens, seq_lens)[0]

    def fits(self, prefix_lens: Any, seq_lens: Any) -> bool:
        """Whether an allocation for this batch would be granted now, instead of answered with ``None``.

        Parameters
        ----------
        prefix_lens, seq_lens
            As in `pages_needed`.

        Returns
        -------
        bool
            Exact. Pages that wait for a merge (`need_sort`) count as free, and frees that are still queued do not.
            For `KVAllocator` a request that a row of its table cannot hold does not fit either. Waits only where
            `available_size` would, and only if what is known without a wait does not suffice.

        Raises
        ------
        TypeError, ValueError
            As in `pages_needed`.
        """
        pages, longest = self._pages_needed(prefix_lens, seq_lens)
        if longest > self._most_tokens:
            return False
        return pages <= self.pool.free_at_least() or pages <= self.pool.free_pages_count()

    def _pages_needed(self, prefix_lens: Any, seq_lens: Any) -> tuple[int, int]:
        """Pages that a batch takes, and its longest request."""
        before, after = _lengths(prefix_lens, "prefix_lens"), _lengths(seq_lens, "seq_lens")
        if before.size != after.size:
            raise ValueError(
                f"prefix_lens and seq_lens must have one entry a request each, not {before.size} and {after.size}"
            )
        if not after.size:
            return 0, 0
        check_lengths(before, after, int(np.subtract(after, before).sum(dtype=np.int64)))
        return pages_taken(before, after, self.page_size), largest(after)

    def reference_counts(self, page_ids: Any, *, out: Any = None) -> Any:
        """How many owners each of these pages has; 0 for a page that is free. One launch, and nothing is waited for.

        Parameters
        ----------
        page_ids : array of int32 or int64, shape (n,)
            Page ids, in any order and as often as wanted.
        out : array of int32, shape (n,), optional
            Contiguous, on this allocator's device; written and returned. Needed while a graph is captured.

        Returns
        -------
        array of int32, shape (n,)
            In the library of `page_ids`; -1 for an id that is no page of the pool, as 0 is none.

        Raises
        ------
        TypeError, ValueError
            For what the host can see.
        CaptureError
            If `out` is missing while a graph is captured.
        """
        backend = self.backend
        library = backend.use_library(page_ids)
        self.pool.enter(library, raising=False, changing=False)
        try:
            pages = backend.vector(page_ids, "page_ids")
            n = backend.length(pages)
            self._check_capture(out)
            if out is None:
                out, counts = backend.new_array(library, (n,), _INT32)
            else:
                counts, _ = backend.given_array(out, "out", _INT32, n)
            backend.reference_counts(pages, counts)
            return out
        finally:
            self.pool.leave()

    def _check_capture(self, out: Any) -> None:
        raise NotImplementedError


def _lengths(x: Any, name: str) -> np.ndarray:
    if is_on_gpu(x):
        raise ValueError(f"{name} is on a GPU, but admission is decided on the host; give a copy on the host")
    return host_array(x, name)
