"""Slots in, slots out: the allocator that engines keep one of per KV cache."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import numpy as np

from cupaged.base import PoolAllocator, whole
from cupaged.geometry import check_lengths, extend_bounds, pages_begun, pages_taken
from cupaged.interop import host_array, is_on_gpu
from cupaged.layout import INT32_LARGEST, Kind, Where
from cupaged.pool import PoolState

__all__ = ["PagedTokenToKVPoolAllocator"]


class PagedTokenToKVPoolAllocator(PoolAllocator):
    """Decide, for every new token of a batch, which slot of a paged KV cache it goes to.

    Method names, argument names and their order are the classic ones of SGLang's allocator of the same name;
    docs/design.md states every contract.

    Parameters
    ----------
    size : int
        Slots. Pages 1 .. ``size // page_size`` are handed out; page 0 is where padding tokens write.
    page_size : int
        Slots in a page; any positive integer.
    index_dtype : {"int64", "int32"}
        Of the slots that come out.
    device : str, int, torch.device or cupy.cuda.Device
        ``"auto"`` takes the current GPU if one works, else the CPU. With a `torch.device`, calls that are given no
        array return torch tensors.
    backend : {"auto", "cupy", "numba-cuda", "numba", "reference"}
        How the kernels run; all give the same results to the bit. ``CUPAGED_BACKEND`` overrides ``"auto"``.
    need_sort : bool
        Freed pages wait aside, and are merged and sorted ascending when the pages at the front do not suffice.
    refused_slot : {0, -1}
        What a refused op gives for every token: the padding page, or -1 for engines that skip negative slots.
    errors : {"raise", "defer"}
        An error that the device recorded raises at the next mutating call that reads of it, or only in `check`.
    strict : bool
        False: breaches that harm neither memory nor another request's pages are recorded, but carried out.
    max_batch : int
        Requests in a batch that scratch is made for. It grows until something was captured in a graph.
    pad_row : int
        Table row of the padding in a batch, for the steps over request tables.
    debug : bool
        Every call checks the pool, and what it handed out, before it returns; slow.
    freed_to : {"front", "back"}
        Where freed pages go: handed out again first, while they may still be in a cache, or last, so that what was
        unused for longest is overwritten first, as prefix caches want it.

    Raises
    ------
    ValueError
        For a pool with no page, ``page_size < 1``, more pages than int32 counts, slots that `index_dtype` does not
        hold, or an unknown option.
    BackendError
        If the backend or device cannot run here; the message says why and what to install.

    Examples
    --------
    >>> import cupaged
    >>> pool = cupaged.PagedTokenToKVPoolAllocator(1024, 64, device="cpu")
    >>> pool.alloc_extend([0], [3], [-1], 3)
    array([64, 65, 66])
    >>> pool.alloc_decode([4], [66])
    array([67])
    """

    def __init__(
        self,
        size: int,
        page_size: int,
        *,
        index_dtype: Any = "int64",
        device: Any = "auto",
        backend: str = "auto",
        need_sort: bool = False,
        refused_slot: int = 0,
        errors: str = "raise",
        strict: bool = True,
        max_batch: int = 8192,
        pad_row: int = -1,
        debug: bool = False,
        freed_to: str = "front",
    ) -> None:
        if freed_to not in ("front", "back"):
            raise ValueError(f"freed_to must be 'front' or 'back', not {freed_to!r}")
        if need_sort and freed_to == "back":
            raise ValueError(
                "freed_to='back' and need_sort=True exclude each other: sorted pages have no order of use"
            )
        self._freed_to = Where.BACK if freed_to == "back" else Where.FRONT
        page_size, self.size = whole("page_size", page_size, 1), whole("size", size, 0)
        self.num_pages = self.size // page_size
        if self.num_pages < 1:
            raise ValueError(f"size must hold at least one page of {page_size} slots, not {size}")
        self._make(
            self.num_pages,
            page_size,
            index_dtype=_index_dtype(index_dtype),
            device=device,
            backend=backend,
            need_sort=need_sort,
            refused_slot=refused_slot,
            errors=errors,
            strict=strict,
            max_batch=max_batch,
            debug=debug,
            pad_row=pad_row,
        )
        self._group: _Group | None = None

    def __repr__(self) -> str:
        return (
            f"PagedTokenToKVPoolAllocator(size={self.size}, page_size={self.page_size}, device={self.device!r}, "
            f"backend={self.backend.name!r}, at least {self.available_at_least()} slots free)"
        )

    # ---- how much is free --------------------------------------------------------------------------------------

    def available_size(self) -> int:
        """Free slots, exactly.

        Waits only where the figure is not known yet. From another thread than the one that changes the pool: the
        last known figure, without a wait.
        """
        return self.pool.free_pages_count() * self.page_size

    # ---- allocation --------------------------------------------------------------------------------------------

    def alloc(self, need_size: int) -> Any:
        """Take whole pages.

        Parameters
        ----------
        need_size : int
            Slots, a multiple of `page_size`; 0 gives an empty array.

        Returns
        -------
        array or None
            Slots, shape ``(need_size,)``; None if the pool is short, with nothing changed.

        Raises
        ------
        ValueError
            If `need_size` is negative or not a multiple of `page_size`.
        """
        need_size = whole("need_size", need_size, 0)
        pages, rest = divmod(need_size, self.page_size)
        if rest:
            raise ValueError(f"need_size must be a multiple of page_size, {self.page_size}, not {need_size}")
        library = self.backend.library
        self.pool.enter(library)
        try:
            if need_size == 0:
                return self.backend.output(library, 0)[0]
            self._check_capture(None)
            if pages > self.num_pages:
                return self._finish(self.pool.refuse(pages))  # before memory is asked for
            result, slots = self.backend.output(library, need_size)
            granted = self.pool.allocate(Kind.ALLOC, pages, pages, pages, self.backend.alloc_pages, pages, slots)
            return self._finish(result if granted else None)
        finally:
            self.pool.leave()

    def alloc_extend(
        self,
        prefix_lens: Any,
        seq_lens: Any,
        last_loc: Any,
        extend_num_tokens: int,
        *,
        prefix_lens_cpu: Any = None,
        seq_lens_cpu: Any = None,
        out: Any = None,
    ) -> Any:
        """Slots for the new tokens of a batch: first the room in each request's last page, then new pages.

        Parameters
        ----------
        prefix_lens, seq_lens : array of int32 or int64, shape (batch,)
            Tokens of each request in the cache before this batch, and after it. Requests with nothing to add are
            legal. Lists, NumPy, CuPy, torch and numba arrays, and whatever has ``__dlpack__``.
        last_loc : array of int32 or int64, shape (batch,)
            Slot of each request's last cached token; not looked at where no old page is written (-1 is usual).
        extend_num_tokens : int
            Sum of ``seq_lens - prefix_lens``.
        prefix_lens_cpu, seq_lens_cpu : array on the host, optional
            The same lengths. They only keep the host's bounds exact: the device's lengths decide.
        out : array, shape (extend_num_tokens,), optional
            Contiguous, of `index_dtype`, on this allocator's device; written in place and returned. Needed while a
            graph is captured.

        Returns
        -------
        array or None
            Slots, shape ``(extend_num_tokens,)``, request after request, in the library of the inputs; None if the
            pool is short, with nothing changed.

        Raises
        ------
        TypeError, ValueError
            For what the host can see: dtypes, ranks, devices, batch lengths that differ, lengths that are negative
            or shrink, a wrong `extend_num_tokens`.
        DeviceError
            For what an earlier op recorded on the device (``errors="raise"``).
        """
        num_tokens = whole("extend_num_tokens", extend_num_tokens, 0)
        if num_tokens > INT32_LARGEST:
            raise ValueError(f"extend_num_tokens must be at most 2**31 - 1, not {num_tokens}")
        backend = self.backend
        library = backend.use_library(prefix_lens, seq_lens, last_loc)
        self.pool.enter(library)
        try:
            prefix = backend.vector(prefix_lens, "prefix_lens")
            seq = backend.vector(seq_lens, "seq_lens")
            last = backend.vector(last_loc, "last_loc")
            batch = backend.length(seq)
            if backend.length(prefix) != batch or backend.length(last) != batch:
                raise ValueError(
                    "prefix_lens, seq_lens and last_loc must have one entry a request each, not "
                    f"{backend.length(prefix)}, {batch} and {backend.length(last)}"
                )
            least, most = extend_bounds(num_tokens, batch, self.page_size)
            sort_bound = num_tokens // self.page_size + batch + 1
            if self._on_gpu or prefix_lens_cpu is not None or seq_lens_cpu is not None:
                host_prefix = self._host_lengths(prefix_lens, prefix_lens_cpu, "prefix_lens_cpu", batch)
                host_seq = self._host_lengths(seq_lens, seq_lens_cpu, "seq_lens_cpu", batch)
                if host_prefix is not None and host_seq is not None:
                    check_lengths(host_prefix, host_seq, num_tokens)
                    least = most = pages_taken(host_prefix, host_seq, self.page_size)
            else:
                backend.check_lengths(prefix, seq, num_tokens)
            if least > self.num_pages and not self.pool.capturing:
                return self._finish(self.pool.refuse(sort_bound))
            result, slots = self._output(library, num_tokens, out, prefix, seq, last)
            granted = self.pool.allocate(
                Kind.EXTEND, least, most, sort_bound, backend.alloc_extend, prefix, seq, last, num_tokens, slots
            )
            return self._finish(result if granted else None)
        finally:
            self.pool.leave()

    def alloc_decode(self, seq_lens: Any, last_loc: Any, *, seq_lens_cpu: Any = None, out: Any = None) -> Any:
        """One slot for each request of a decode step.

        Parameters
        ----------
        seq_lens : array of int32 or int64, shape (batch,)
            Tokens of each request after this step, its new one included: at least 1.
        last_loc : array of int32 or int64, shape (batch,)
            Slot of each request's last cached token; not looked at where a new page begins.
        seq_lens_cpu : array on the host, optional
            The same lengths. They only keep the host's bounds exact: the device's lengths decide.
        out : array, shape (batch,), optional
            As in `alloc_extend`.

        Returns
        -------
        array or None
            Slots, shape ``(batch,)``, in the library of the inputs; None if the pool is short, with nothing changed.

        Raises
        ------
        TypeError, ValueError, DeviceError
            As in `alloc_extend`.
        """
        backend = self.backend
        library = backend.use_library(seq_lens, last_loc)
        self.pool.enter(library)
        try:
            seq = backend.vector(seq_lens, "seq_lens")
            last = backend.vector(last_loc, "last_loc")
            batch = backend.length(seq)
            if backend.length(last) != batch:
                raise ValueError(
                    "seq_lens and last_loc must have one entry a request each, not "
                    f"{batch} and {backend.length(last)}"
                )
            least, most = 0, batch
            if self._on_gpu or seq_lens_cpu is not None:
                host_seq = self._host_lengths(seq_lens, seq_lens_cpu, "seq_lens_cpu", batch)
                if host_seq is not None:
                    check_lengths(None, host_seq, None)
                    least = most = pages_begun(host_seq - 1, self.page_size)
            else:
                backend.check_lengths(None, seq, None)
            result, slots = self._output(library, batch, out, seq, in_place=last)
            granted = self.pool.allocate(Kind.DECODE, least, most, batch, backend.alloc_decode, seq, last, slots)
            return self._finish(result if granted else None)
        finally:
            self.pool.leave()

    def _host_lengths(self, given: Any, on_cpu: Any, name: str, batch: int) -> np.ndarray | None:
        if on_cpu is None:
            if self._on_gpu and is_on_gpu(given):
                return None
            return host_array(given, name.removesuffix("_cpu"))
        array = host_array(on_cpu, name)
        if array.shape[0] != batch:
            raise ValueError(f"{name} must have one entry a request, {batch}, not {array.shape[0]}")
        return array

    # ---- free --------------------------------------------------------------------------------------------------

    def free(self, free_index: Any, *, num_pages: int | None = None) -> None:
        """Give back slots: every page that they touch loses one owner.

        Parameters
        ----------
        free_index : array of int32 or int64, shape (n,)
            Slots in any order, with any repetition.
        num_pages : int, optional
            The caller's count of the pages that they touch. It keeps the host's figure exact without a wait. In a
            group a page that several calls touch is counted by one of them only.

        Notes
        -----
        Pages without an owner go to the front of the free list, ascending. After a `retain`, the host counts on
        nothing from a plain `free` until the device has reported.
        """
        if num_pages is not None:
            num_pages = whole("num_pages", num_pages, 0)
        vector = self._enter_free(free_index, "free_index")
        try:
            n = self.backend.length(vector)
            if n == 0:
                return
            if num_pages is not None and not 1 <= num_pages <= n:
                raise ValueError(f"num_pages must be between 1 and the {n} slots given, not {num_pages}")
            if self._group is not None:
                self._group.add_slots(self.backend.queue(vector), num_pages)
                return
            self._free_slots([vector], [num_pages])
            self._finish(None)
        finally:
            self.pool.leave()

    def free_segment(self, free_index: Any, *, start_pos: int) -> None:
        """Give back the slots of one request's tokens from a page-aligned position on.

        Parameters
        ----------
        free_index : array of int32 or int64, shape (n,)
            Slots of consecutive tokens.
        start_pos : int
            Position of the first of them in its request; a multiple of `page_size`.

        Raises
        ------
        ValueError
            If `start_pos` is not a multiple of `page_size`.
        """
        if whole("start_pos", start_pos, 0) % self.page_size:
            raise ValueError(f"start_pos must be a multiple of page_size, {self.page_size}, not {start_pos}")
        vector = self._enter_free(free_index, "free_index")
        try:
            self._free_entries(self.backend.segment(vector), self.page_size, Kind.FREE_SEGMENT)
        finally:
            self.pool.leave()

    def free_page_ids(self, page_ids: Any) -> None:
        """Give back pages by id: each entry takes one owner off its page.

        Parameters
        ----------
        page_ids : array of int32 or int64, shape (n,)
            Page ids. Pages without an owner go to the front of the free list in this order.
        """
        vector = self._enter_free(page_ids, "page_ids")
        try:
            self._free_entries(vector, 1, Kind.FREE_PAGES)
        finally:
            self.pool.leave()

    def retain(self, page_ids: Any) -> None:
        """Add an owner to pages, so that a shared prefix outlives its first request.

        Parameters
        ----------
        page_ids : array of int32 or int64, shape (n,)
            Page ids that have an owner.
        """
        vector = self._enter_free(page_ids, "page_ids")
        try:
            if self.backend.length(vector):
                self.pool.run(Kind.RETAIN, 0, 0, self.backend.retain_pages, vector)
                self._finish(None)
        finally:
            self.pool.leave()

    def _enter_free(self, x: Any, name: str) -> Any:
        self.pool.enter(self.backend.use_library(x))
        try:
            return self.backend.vector(x, name)
        except BaseException:
            self.pool.leave()
            raise

    def _free_entries(self, vector: Any, divisor: int, kind: Kind) -> None:
        n = self.backend.length(vector)
        if n == 0:
            return
        if self._group is not None:
            self._group.pages.append((self.backend.queue(vector), divisor))
            return
        self._push_entries(vector, divisor, kind, n)
        self._finish(None)

    def _push_entries(self, vector: Any, divisor: int, kind: Kind, n: int) -> None:
        certain = 0 if self.pool.may_share() else n
        self.pool.run(kind, certain, n, self.backend.free_pages, vector, divisor, self._where)

    def _free_slots(self, vectors: list[Any], counts: list[int | None]) -> None:
        """End calls of `free`: one launch while no page has two owners, else each call for itself."""
        if len(vectors) > 1 and not self.pool.may_share():
            least = sum(n or 0 for n in counts) or 1
            most = sum(self.backend.length(v) if n is None else n for v, n in zip(vectors, counts, strict=True))
            vector = self.backend.queued(vectors)
            self.pool.run(Kind.FREE, least, most, self.backend.free_slots, vector, True, 0, self._where)
            return
        base = most = 0
        for i, (vector, count) in enumerate(zip(vectors, counts, strict=True)):
            n = self.backend.length(vector)
            certain = 0 if self.pool.may_share() else min(n, 1) if count is None else count
            push = i == len(vectors) - 1
            most += n if count is None else count
            self.pool.run(Kind.FREE, certain, most, self.backend.free_slots, vector, push, base, self._where)
            base += n

    # ---- groups of frees ---------------------------------------------------------------------------------------

    def free_group_begin(self) -> None:
        """Let the frees that follow wait for `free_group_end`. What is queued is copied.

        Raises
        ------
        RuntimeError
            If a group is open: groups do not nest.
        """
        if self._group is not None:
            raise RuntimeError("free_group_begin() while a group is open: groups do not nest")
        self.backend.queue_begin()
        self._group = _Group()

    def free_group_end(self) -> None:
        """Free what was queued: slots as one ascending set, then page ids ahead of them. No group: nothing."""
        group = self._group
        if group is None or not (group.slots or group.pages):
            self._group = None
            return
        self.pool.enter("", raising=False)  # what is queued must not be lost, also if a launch fails
        try:
            if group.slots:
                self._free_slots(group.slots, group.counts)
                group.slots, group.counts = [], []
            # A capture must not allocate, as it would to put together what lies apart.
            for divisor, vectors in _runs(group.pages, apart=self.pool.capturing):
                entries = self.backend.queued(vectors)
                kind = Kind.FREE_PAGES if divisor == 1 else Kind.FREE_SEGMENT
                self._push_entries(entries, divisor, kind, self.backend.length(entries))
                del group.pages[-len(vectors) :]
            self._group = None
            self._finish(None)
            self.pool.raise_recorded()
        finally:
            self.pool.leave()

    @contextmanager
    def free_group(self):
        """Frees inside the ``with`` block wait for its end, also if it ends by an exception."""
        self.free_group_begin()
        try:
            yield self
        finally:
            self.free_group_end()

    # ---- the pool as a whole -----------------------------------------------------------------------------------

    def backup_state(self) -> Any:
        """Copy the whole state, reference counts too, for `restore_state`."""
        self.pool.enter("")
        try:
            self.pool.refuse_capture("backup_state()")
            return self.size, self.num_pages, self.pool.backup()
        finally:
            self.pool.leave()

    def restore_state(self, state: Any) -> None:
        """Put back what `backup_state` gave, as often as wanted.

        Raises
        ------
        TypeError
            If `state` is none of this allocator's.
        """
        if not (isinstance(state, tuple) and len(state) == 3 and isinstance(state[2], PoolState)):
            raise TypeError(f"state must come from backup_state(), not {type(state).__name__}")
        if state[2].capacity != self.pool.capacity:
            raise ValueError("state comes from a pool of another capacity")
        if state[0] // self.page_size != state[1]:
            raise ValueError(f"state comes from a pool of another page_size than {self.page_size}")
        self.pool.enter("")
        try:
            self.pool.refuse_capture("restore_state()")
            self.pool.restore(state[2], state[1])
            self.size, self.num_pages = state[:2]
            self._group = None
            self._finish(None)
        finally:
            self.pool.leave()

    def clear(self) -> None:
        """Free every page, in order, whoever owns it; an open group is dropped."""
        self.resize(self.size)

    def resize(self, size: int) -> None:
        """Change the number of slots in place, and clear.

        Parameters
        ----------
        size : int
            Slots, at least one page and at most what the allocator was made with. Addresses never move.

        Raises
        ------
        ValueError
            If it is larger than that, or holds no page.
        """
        size = whole("size", size, 0)
        num_pages = size // self.page_size
        if not 1 <= num_pages <= self.pool.capacity:
            most = self.pool.capacity * self.page_size
            raise ValueError(f"size must be between {self.page_size} and {most}, what was made, not {size}")
        self.pool.enter("")
        try:
            self.pool.refuse_capture("clear() or resize()")
            self.pool.clear(num_pages)
            self.size, self.num_pages, self._group = size, num_pages, None
        finally:
            self.pool.leave()

    @property
    def free_pages(self) -> Any:
        """Snapshot of the free page ids, int64, in the order of allocation; staged ones are not among them."""
        return self._page_ids(0)

    @property
    def staged_pages(self) -> Any:
        """Snapshot of the freed page ids, int64, that wait for a merge (`need_sort`)."""
        return self._page_ids(1)

    def _page_ids(self, which: int) -> Any:
        return self.backend.from_host(self.backend.library, self.pool.free_order()[which].astype(np.int64))


class _Group:
    """Frees that wait."""

    def __init__(self) -> None:
        self.slots: list[Any] = []
        self.counts: list[int | None] = []
        self.pages: list[tuple[Any, int]] = []

    def add_slots(self, vector: Any, num_pages: int | None) -> None:
        self.slots.append(vector)
        self.counts.append(num_pages)


def _runs(pages: list[tuple[Any, int]], apart: bool) -> list[tuple[int, list[Any]]]:
    """Queued page lists that can go in one launch, last run first: what goes to the front last stands first."""
    runs: list[tuple[int, list[Any]]] = []
    for vector, divisor in pages:
        if runs and runs[-1][0] == divisor and not apart:
            runs[-1][1].append(vector)
        else:
            runs.append((divisor, [vector]))
    return runs[::-1]


def _index_dtype(dtype: Any) -> np.dtype:
    name = str(dtype).rpartition(".")[2]
    for choice in (np.int64, np.int32):
        if dtype is choice or name == choice.__name__:
            return np.dtype(choice)
    raise ValueError(f"index_dtype must be 'int64' or 'int32', not {dtype!r}")
