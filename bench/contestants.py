"""Who is timed: cupaged on each backend, and other ways to write the same rule, each an allocator of its own.

All have the members of `Contestant`, so that a case is written once. Nobody but this file knows how a contestant is
called or what it keeps. The others keep a free list and nothing else: no owners, no counters, no checks.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np

from cupaged import KVAllocator, PagedTokenToKVPoolAllocator

__all__ = ["OURS", "Batch", "KVChain", "Setup", "kv", "make", "names", "slots_by_rule"]

OURS = ("cupy", "numba-cuda", "numba", "reference")
PAGE_SIZE = 64


# ---- what they are given -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setup:
    """A pool as all contestants start with it: pages 1 .. owned are taken, the rest is free in a random order.

    A pool that has served for a while has no order left; one that starts ascending would flatter whoever touches
    state page by page.
    """

    owned: int
    free: int
    page_size: int = PAGE_SIZE
    max_batch: int = 8192

    @functools.cached_property
    def order(self) -> np.ndarray:
        """Free page ids in the order of allocation."""
        return np.random.default_rng(7).permutation(self.free) + self.owned + 1

    @property
    def num_pages(self) -> int:
        """Pages, page 0 not counted."""
        return self.owned + self.free


@dataclass(frozen=True)
class Batch:
    """Requests whose last pages are 1, 2, .. in batch order; those without a prefix own none."""

    prefix: np.ndarray
    seq: np.ndarray
    page_size: int = PAGE_SIZE

    @functools.cached_property
    def last(self) -> np.ndarray:
        """Slot of each request's last cached token."""
        has = self.prefix > 0
        page = np.cumsum(has)
        return np.where(has, page * self.page_size + (self.prefix - 1) % self.page_size, -1)

    @property
    def owned(self) -> int:
        """Pages that the requests own."""
        return int((self.prefix > 0).sum())

    @property
    def tokens(self) -> int:
        """New tokens of the whole batch."""
        return int((self.seq - self.prefix).sum())

    @property
    def new_pages(self) -> int:
        """New pages of the whole batch."""
        return int((-(-self.seq // self.page_size) - -(-self.prefix // self.page_size)).sum())

    def table(self) -> np.ndarray:
        """Request table of slots with each last cached token in it."""
        table = np.zeros((self.seq.size, int(self.seq.max()) + 1), np.int32)
        has = self.prefix > 0
        table[np.flatnonzero(has), self.prefix[has] - 1] = self.last[has]
        return table


# ---- the rule, vectorised ------------------------------------------------------------------------------------------


def slots_by_rule(
    free: np.ndarray, prefix: np.ndarray, seq: np.ndarray, last: np.ndarray, page_size: int
) -> np.ndarray:
    """What every contestant must answer, in NumPy: one expression for old and new pages.

    Parameters
    ----------
    free, prefix, seq, last : numpy.ndarray of int64
        Free page ids, and a batch.
    page_size : int
        Slots in a page.

    Returns
    -------
    numpy.ndarray of int64, shape (tokens,)
        Slots, request after request.
    """
    counts = seq - prefix
    before, after = -(-prefix // page_size), -(-seq // page_size)
    ends = np.cumsum(after - before)
    token = np.arange(int(counts.sum())) + np.repeat(prefix - (np.cumsum(counts) - counts), counts)
    rank = token // page_size + np.repeat(ends - after, counts)
    # Tokens of old pages have no rank, and look up a page that is not used.
    new = free[np.where(rank < 0, 0, rank)] * page_size + token % page_size
    return np.where(token >= np.repeat(before * page_size, counts), new, np.repeat(last + 1 - prefix, counts) + token)


class _ArrayOps:
    """The rule as array operations of NumPy or CuPy, with the free list as an array."""

    name = "numpy ops"
    waits = True
    queue_calls = 5

    def __init__(self, setup: Setup) -> None:
        self.page_size = setup.page_size
        self.xp = self._library()
        self.start = self.free_pages = self.load(setup.order)
        self.offsets = self.xp.arange(setup.page_size)

    @staticmethod
    def _library() -> Any:
        return np

    def load(self, array: np.ndarray) -> Any:
        return self.xp.asarray(array)

    def fetch(self, array: Any) -> np.ndarray:
        return array

    def reset(self) -> None:
        self.free_pages = self.start

    def _repeat(self, values: Any, counts: Any, total: int) -> Any:
        return np.repeat(values, counts)

    def _take(self, pages: int) -> None:
        self.free_pages = self.free_pages[pages:]

    def decode(self, seq: Any, last: Any, seq_cpu: np.ndarray, out: Any = None) -> Any:
        xp, size = self.xp, self.page_size
        new = (seq - 1) % size == 0
        rank = xp.cumsum(new) - 1
        pages = int(((seq_cpu - 1) % size == 0).sum())
        slots = xp.where(new, self.free_pages[rank] * size, last + 1)
        self._take(pages)
        return slots

    def extend(
        self, prefix: Any, seq: Any, last: Any, tokens: int, prefix_cpu: np.ndarray, seq_cpu: np.ndarray
    ) -> Any:
        xp, size = self.xp, self.page_size
        counts = seq - prefix
        before, after = -(-prefix // size), -(-seq // size)
        shift = prefix - (xp.cumsum(counts) - counts)
        token = xp.arange(tokens) + self._repeat(shift, counts, tokens)
        rank = token // size + self._repeat(xp.cumsum(after - before) - after, counts, tokens)
        # A rank below 0 is of an old page, and picks some page that is not used: indices from the end are legal.
        new = self.free_pages[rank] * size + token % size
        old = self._repeat(last + 1 - prefix, counts, tokens) + token
        slots = xp.where(token >= self._repeat(before * size, counts, tokens), new, old)
        self._take(int((-(-seq_cpu // size) - -(-prefix_cpu // size)).sum()))
        return slots

    def free(self, slots: Any, pages: int) -> None:
        self.free_pages = self.xp.concatenate([self.xp.unique(slots // self.page_size), self.free_pages])

    def alloc(self, need: int) -> Any:
        pages = need // self.page_size
        slots = (self.free_pages[:pages, None] * self.page_size + self.offsets).reshape(-1)
        self._take(pages)
        return slots

    def step(self, table: Any, rows: Any, seq: Any, seq_cpu: np.ndarray, out: Any = None) -> Any:
        last = table[rows, seq - 1].astype(np.int64)
        slots = self.decode(seq + 1, last, seq_cpu + 1)
        table[rows, seq] = slots
        return slots


class _CupyOps(_ArrayOps):
    """The same in CuPy, without a wait: `repeat` needs counts on the host there, a search does not."""

    name = "cupy ops"
    waits = False

    @staticmethod
    def _library() -> Any:
        import cupy

        return cupy

    def fetch(self, array: Any) -> np.ndarray:
        return array.get()

    def extend(
        self, prefix: Any, seq: Any, last: Any, tokens: int, prefix_cpu: np.ndarray, seq_cpu: np.ndarray
    ) -> Any:
        ends = self.xp.cumsum(seq - prefix)
        self._owner = self.xp.searchsorted(ends, self.xp.arange(tokens), side="right")
        return super().extend(prefix, seq, last, tokens, prefix_cpu, seq_cpu)

    def _repeat(self, values: Any, counts: Any, total: int) -> Any:
        return values[self._owner]


class _TorchOps:
    """The rule as torch operations; also what a chain of engine calls is made of."""

    name = "torch ops"
    waits = False
    queue_calls = 5

    def __init__(self, setup: Setup, device: str) -> None:
        import torch

        self.torch, self.device, self.page_size = torch, device, setup.page_size
        self.start = self.free_pages = self.load(setup.order)

    def load(self, array: np.ndarray) -> Any:
        return self.torch.from_numpy(array.copy()).to(self.device)

    def on_host(self, array: np.ndarray) -> Any:
        return self.torch.from_numpy(array)

    def fetch(self, array: Any) -> np.ndarray:
        return array.cpu().numpy()

    def reset(self) -> None:
        self.free_pages = self.start

    def _count(self, prefix_cpu: Any, seq_cpu: Any) -> int:
        size = self.page_size
        return int(((seq_cpu + size - 1) // size - (prefix_cpu + size - 1) // size).sum().item())

    def decode(self, seq: Any, last: Any, seq_cpu: Any, out: Any = None) -> Any:
        torch, size = self.torch, self.page_size
        new = (seq - 1) % size == 0
        rank = torch.cumsum(new, 0) - 1
        slots = torch.where(new, self.free_pages[rank] * size, last + 1)
        self.free_pages = self.free_pages[int(((seq_cpu - 1) % size == 0).sum().item()) :]
        return slots

    def extend(self, prefix: Any, seq: Any, last: Any, tokens: int, prefix_cpu: Any, seq_cpu: Any) -> Any:
        torch, size = self.torch, self.page_size
        counts = seq - prefix
        before, after = (prefix + size - 1) // size, (seq + size - 1) // size
        repeat = functools.partial(torch.repeat_interleave, repeats=counts, output_size=tokens)
        token = torch.arange(tokens, device=self.device) + repeat(prefix - (torch.cumsum(counts, 0) - counts))
        rank = token // size + repeat(torch.cumsum(after - before, 0) - after)
        # As in NumPy, a rank below 0 picks some page that is not used.
        new = self.free_pages[rank] * size + token % size
        slots = torch.where(token >= repeat(before * size), new, repeat(last + 1 - prefix) + token)
        self.free_pages = self.free_pages[self._count(prefix_cpu, seq_cpu) :]
        return slots

    def free(self, slots: Any, pages: int) -> None:
        self.free_pages = self.torch.cat([self.torch.unique(slots // self.page_size), self.free_pages])

    def free_segment(self, slots: Any) -> None:
        self.free_pages = self.torch.cat([slots[:: self.page_size] // self.page_size, self.free_pages])

    def alloc(self, need: int) -> Any:
        pages = need // self.page_size
        taken = self.free_pages[:pages]
        self.free_pages = self.free_pages[pages:]
        return (taken[:, None] * self.page_size + self.torch.arange(self.page_size, device=self.device)).reshape(-1)

    def step(self, table: Any, rows: Any, seq: Any, seq_cpu: Any, out: Any = None) -> Any:
        last = table[rows, seq - 1].to(self.torch.int64)
        slots = self.decode(seq + 1, last, seq_cpu + 1)
        table[rows, seq] = slots.to(self.torch.int32)
        return slots


class _Engine(_TorchOps):
    """What engines ship: a Triton kernel a batch shape, torch around it, and the count of pages on the host."""

    name = "engine"
    block = 1024

    def __init__(self, setup: Setup, device: str) -> None:
        super().__init__(setup, device)
        # With this file as a module of whatever package it was loaded in.
        from . import triton_kernels

        self.kernels = triton_kernels

    def launch_decode(self, seq: Any, last: Any, free: Any, out: Any) -> None:
        """The kernel alone."""
        n = seq.shape[0]
        self.kernels.decode_kernel[(n,)](seq, last, free, out, _bound(n), self.page_size)

    def launch_extend(self, prefix: Any, seq: Any, last: Any, free: Any, out: Any) -> None:
        """The kernel alone."""
        n = seq.shape[0]
        self.kernels.extend_kernel[(n,)](prefix, seq, last, free, out, _bound(n), self.page_size, self.block)

    def decode(self, seq: Any, last: Any, seq_cpu: Any, out: Any = None) -> Any:
        slots = self.torch.empty(seq.shape[0], dtype=self.torch.int64, device=self.device)
        self.launch_decode(seq, last, self.free_pages, slots)
        pages = int((seq_cpu % self.page_size == 1 % self.page_size).int().sum().item())
        if pages > len(self.free_pages):
            return None
        self.free_pages = self.free_pages[pages:]
        return slots

    def extend(self, prefix: Any, seq: Any, last: Any, tokens: int, prefix_cpu: Any, seq_cpu: Any) -> Any:
        slots = self.torch.empty(tokens, dtype=self.torch.int64, device=self.device)
        self.launch_extend(prefix, seq, last, self.free_pages, slots)
        pages = self._count(prefix_cpu, seq_cpu)
        if pages > len(self.free_pages):
            return None
        self.free_pages = self.free_pages[pages:]
        return slots


def _bound(n: int) -> int:
    return 1 << (n - 1).bit_length()


class _SGLang(_TorchOps):
    """SGLang's own allocator, where that package is installed."""

    name = "sglang"

    def __init__(self, setup: Setup, device: str) -> None:
        super().__init__(setup, device)
        from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator as Theirs

        size = setup.num_pages * setup.page_size
        self.theirs = Theirs(size, setup.page_size, self.torch.int64, device, None, need_sort=False)
        self.reset()

    def reset(self) -> None:
        self.theirs.free_pages = self.start

    def decode(self, seq: Any, last: Any, seq_cpu: Any, out: Any = None) -> Any:
        return self.theirs.alloc_decode(seq, seq_cpu, last)

    def extend(self, prefix: Any, seq: Any, last: Any, tokens: int, prefix_cpu: Any, seq_cpu: Any) -> Any:
        return self.theirs.alloc_extend(prefix, prefix_cpu, seq, seq_cpu, last, tokens)

    def free(self, slots: Any, pages: int) -> None:
        self.theirs.free(slots)

    def free_segment(self, slots: Any) -> None:
        self.theirs.free_segment(slots, start_pos=0)

    def alloc(self, need: int) -> Any:
        return self.theirs.alloc(need)


# ---- cupaged -------------------------------------------------------------------------------------------------------


class _Ours:
    """cupaged on one backend; torch tensors in and out on a GPU, NumPy arrays on the CPU."""

    waits = False
    queue_calls = 5

    def __init__(self, setup: Setup, backend: str, exact: bool = False) -> None:
        self.name = f"{backend}, lengths known" if exact else backend
        self.exact = exact
        self.on_gpu = backend in ("cupy", "numba-cuda")
        size = setup.num_pages * setup.page_size
        self.pool = PagedTokenToKVPoolAllocator(
            size,
            setup.page_size,
            device=_torch_device() if self.on_gpu else "cpu",
            backend=backend,
            max_batch=setup.max_batch,
        )
        self.pool.alloc(size)
        self.pool.free_page_ids(self.load(setup.order))
        self.state = self.pool.backup_state()
        self.reset()
        self.pool.check()

    def load(self, array: np.ndarray) -> Any:
        if not self.on_gpu:
            return array.copy()
        import torch

        return torch.from_numpy(array.copy()).cuda()

    def fetch(self, array: Any) -> np.ndarray:
        return array.cpu().numpy() if self.on_gpu else array

    def reset(self) -> None:
        self.pool.restore_state(self.state)

    def decode(self, seq: Any, last: Any, seq_cpu: np.ndarray, out: Any = None) -> Any:
        return self.pool.alloc_decode(seq, last, seq_lens_cpu=seq_cpu if self.exact else None, out=out)

    def extend(
        self, prefix: Any, seq: Any, last: Any, tokens: int, prefix_cpu: Any, seq_cpu: Any, out: Any = None
    ) -> Any:
        if self.exact:
            known = {"prefix_lens_cpu": prefix_cpu, "seq_lens_cpu": seq_cpu}
            return self.pool.alloc_extend(prefix, seq, last, tokens, out=out, **known)
        return self.pool.alloc_extend(prefix, seq, last, tokens, out=out)

    def free(self, slots: Any, pages: int) -> None:
        self.pool.free(slots, num_pages=pages if self.exact else None)

    def free_segment(self, slots: Any) -> None:
        self.pool.free_segment(slots, start_pos=0)

    def alloc(self, need: int) -> Any:
        return self.pool.alloc(need)

    def step(self, table: Any, rows: Any, seq: Any, seq_cpu: Any, out: Any = None) -> Any:
        return self.pool.decode_step(table, rows, seq, out=out)


def _torch_device() -> Any:
    import torch

    return torch.device("cuda")


# ---- who there is --------------------------------------------------------------------------------------------------


def names(device: str, works: Any) -> list[str]:
    """Contestants that can be made here.

    Parameters
    ----------
    device : {"cuda", "cpu"}
        Where they shall run.
    works : callable
        From a backend's name to whether it works, as ``cupaged.backends.probe(name).works``.
    """
    if device == "cpu":
        others = ["numpy ops", *(["torch ops"] if find_spec("torch") else [])]
        return ["numba", *others, "reference"]
    others = ["engine"] if find_spec("triton") else []
    others += ["torch ops", *(["cupy ops"] if works("cupy") else []), *(["sglang"] if find_spec("sglang") else [])]
    return [name for name in ("cupy", "numba-cuda") if works(name)] + others


def make(name: str, setup: Setup, device: str) -> Any:
    """A contestant in the state that `setup` describes.

    Parameters
    ----------
    name : str
        One of `names`, or a backend's name with ``", lengths known"`` behind it.
    setup : Setup
        The pool.
    device : {"cuda", "cpu"}
        Where it shall run.
    """
    backend, _, exact = name.partition(", ")
    if backend in OURS:
        return _Ours(setup, backend, exact == "lengths known")
    others = {"torch ops": _TorchOps, "engine": _Engine, "sglang": _SGLang}
    if name in others:
        return others[name](setup, device)
    return {"numpy ops": _ArrayOps, "cupy ops": _CupyOps}[name](setup)


# ---- request by request --------------------------------------------------------------------------------------------


class KVChain:
    """`KVAllocator` as engines ship it: the free list and a copy of the table on the host, torch for the rest.

    Each allocation makes its slots on the host and sends them and the new cells over; each free queues a slice of its
    row, and the end of the group concatenates them, lowers counts by a gather and a mask, and brings them back.
    """

    name = "engine"

    def __init__(self, pages: int, rows: int, pages_a_row: int, device: str, page_size: int = PAGE_SIZE) -> None:
        import torch

        self.torch, self.device, self.page_size, self.pages = torch, device, page_size, pages
        self.table = torch.zeros(rows, pages_a_row, dtype=torch.int32, device=device)
        self.table_cpu = torch.zeros(rows, pages_a_row, dtype=torch.int32, pin_memory=device != "cpu")
        self.refs = torch.zeros((pages + 1) * page_size, dtype=torch.int32, device=device)
        self.reset()

    def reset(self) -> None:
        self.free = self.torch.arange(1, self.pages + 1, dtype=self.torch.int32)
        self.table.zero_()
        self.table_cpu.zero_()
        self.queue: list[Any] = []

    def fetch(self, array: Any) -> np.ndarray:
        return array.cpu().numpy()

    def fill(self, rows: list[int], tokens: int) -> None:
        for row in rows:
            self.alloc(row, tokens, 0)

    def alloc(self, row: int, need: int, have: int) -> Any:
        torch, size = self.torch, self.page_size
        first = -(-have // size)
        room = first * size - have
        last_page = self.table_cpu[row, first - 1].item()
        old = last_page * size + have % size + torch.arange(min(room, need), dtype=torch.int32)
        if room >= need:
            return old.to(self.device, non_blocking=True)
        rest = need - room
        pages = -(-rest // size)
        if pages > len(self.free):
            return None
        new, self.free = self.free[:pages], self.free[pages:]
        self.table[row, first : first + pages] = new.to(self.device)
        self.table_cpu[row, first : first + pages] = new
        slots = (new[:, None] * size + torch.arange(size, dtype=torch.int32)).flatten()[:rest]
        return torch.cat([old, slots]).to(self.device, non_blocking=True)

    def free_rows(self, rows: list[int], stay: int, have: int) -> None:
        """Queue what `rows` have beyond `stay` tokens, and end the group."""
        torch, size = self.torch, self.page_size
        for row in rows:
            self.queue.append(self.table[row, stay // size : -(-have // size)])
        pages = torch.cat(self.queue)
        slots = (pages[:, None] * size + torch.arange(size, device=self.device)).flatten()
        counted = slots[self.refs[slots] >= 1]
        self.refs[counted] += -1
        self.free = torch.cat([self.free, pages.cpu()])
        self.queue = []

    def free_order(self) -> np.ndarray:
        return self.free.numpy()


class _OurKV:
    """cupaged's `KVAllocator` on one backend."""

    def __init__(self, backend: str, pages: int, rows: int, pages_a_row: int, page_size: int = PAGE_SIZE) -> None:
        self.name = backend
        device = _torch_device() if backend in ("cupy", "numba-cuda") else "cpu"
        size = (pages + 1) * page_size
        self.kv = KVAllocator(size, device, rows, pages_a_row * page_size, page_size, backend=backend)
        self.alloc, self.reset = self.kv.alloc, self.kv.clear

    def fetch(self, array: Any) -> np.ndarray:
        return array if isinstance(array, np.ndarray) else array.cpu().numpy()

    def fill(self, rows: list[int], tokens: int) -> None:
        self.kv.alloc_batch(rows, [tokens] * len(rows), [0] * len(rows))

    def free_rows(self, rows: list[int], stay: int, have: int) -> None:
        free = self.kv.free_extra_pages_not_cached
        for row in rows:
            free(row, stay, have)
        self.kv.free_group_end()

    def free_order(self) -> np.ndarray:
        return self.fetch(self.kv.free_slots)


def kv(name: str, pages: int, rows: int, pages_a_row: int, device: str) -> Any:
    """A contestant that allocates request by request: ``"engine"``, or a backend's name."""
    if name == "engine":
        return KVChain(pages, rows, pages_a_row, device)
    return _OurKV(name, pages, rows, pages_a_row)
