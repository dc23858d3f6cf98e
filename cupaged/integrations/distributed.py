"""Ranks in step: tensor-parallel ranks, each with an allocator of its own, must hand out the same slots.

Where one drifts, it reads and writes other tokens' K and V than its peers, and nothing says so. `LockstepGuard` does.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from itertools import chain
from typing import Any

import numpy as np

from cupaged.base import PoolAllocator, whole
from cupaged.errors import LockstepError
from cupaged.layout import DIGEST_CELLS, NEVER_FOLDED, DigestCell, Kind

__all__ = ["LockstepError", "LockstepGuard"]

_REFUSED, _REPLAYED = 30, 31  # beside the kinds: None without a launch, and replays
# A bit a kind: an enum's members are slow to look up.
_ALLOCATIONS = sum(
    1 << kind
    for kind in (
        Kind.ALLOC,
        Kind.EXTEND,
        Kind.DECODE,
        Kind.DECODE_STEP,
        Kind.EXTEND_STEP,
        Kind.KV_ALLOC,
        Kind.KV_BATCH,
    )
)
_UNCOUNTED = 1 << Kind.REFRESH | 1 << Kind.BACKUP  # they change nothing, and one rank may make them alone
_FACTOR, _MASK = 0x100000001B3, (1 << 64) - 1  # of FNV-1a: an odd factor loses nothing

# What a comparison carries of each rank, int64 each.
_FIXED = ("every", "their number of pages", "page_size", "their kind of allocator or need_sort")
_OPS, _CALLS, _DIGEST = range(len(_FIXED), len(_FIXED) + 3)
_WIDTH = len(_FIXED) + 3


class LockstepGuard:
    """Compare what ranks hand out and take back, every so many ops, without blocking a step.

    Behind each call that changes the pool, one launch folds into a digest on the device: the slots that it handed
    out, or the pages that it made free, in their order, and how many pages are free, staged and shared. An owner
    taken off a page that others still own shows when the last one goes. Which calls were made is folded on the host,
    and so is a None. Every `every` ops, at a mark, the ranks begin to compare, and the calling step goes on: the
    answer is read at the next mark. By then it is there, unless a rank is as far behind; nothing else is waited for.
    Where the pool is on a GPU, the digest first comes to the host, and the answer takes two marks.

    ::

        op        1 .. 64 | 65 .. 128 | 129 ..
        mark             64         128
                          | compare    | read the answer: raises here, at the end of op 128, on every rank
                          |  1 .. 64   | compare 1 .. 128

    A digest that differs once differs ever after, so no mark can miss a drift: the error names the ops since the
    last mark at which all ranks agreed.

    Parameters
    ----------
    allocator : PagedTokenToKVPoolAllocator or KVAllocator
        This rank's. Its peers' may run on other backends.
    group : torch.distributed.ProcessGroup, optional
        Ranks that must be in step, over NCCL, gloo or whatever else; the default group if not given. The guard makes
        a group of its own with the same ranks, over gloo, so that its traffic cannot be taken for anybody else's and
        puts no work on the GPU.
    every : int
        Ops between two marks; the same on all ranks.
    timeout : float
        Most seconds to wait for an answer.

    Raises
    ------
    TypeError, ValueError
        For no allocator of this package, a group of one, or one that this rank is not in.
    ImportError
        Without torch, or with one that has no ``torch.distributed`` or no gloo.
    RuntimeError
        If ``torch.distributed`` is not initialised, or the allocator has a guard already.
    LockstepError
        If the ranks differ in `every`, in their pools, or in what is free at the start; or if they do not all make
        a guard within `timeout`. So can every call of the allocator afterwards, at a mark, on each rank at the same
        op. That op itself was carried out; its result is lost, and the guard is closed.

    Notes
    -----
    Making a guard, and `check`, are collective: all ranks must call them at the same place, and wait there.

    An op is a call, as far as it changes the pool: an allocation, also one that is told None for a short pool; a
    free or a `retain` outside a group; the end of a group of frees; ``clear``, ``resize``, ``restore_state``. Calls
    that change nothing (``refresh``, ``backup_state``, hand-offs, whatever reads) do not count, so that a rank may
    make them alone.

    In a CUDA graph the fold is captured with the op, and each replay folds: the cells lie at a fixed address, which
    lives as long as the allocator once something was captured. But the host sees no replay, so replays do not bring
    a mark any nearer: tell of them by `count_replays`. What was captured before the guard was made is not folded;
    of its replays, the guard sees at the next op only how many pages they left free.

    Examples
    --------
    ::

        guard = LockstepGuard(allocator, cpu_group, every=64)
        ...  # steps, as ever; a LockstepError ends them
        guard.check()  # all ranks: the rest, before the results are believed
        guard.close()
    """

    def __init__(self, allocator: Any, group: Any = None, *, every: int = 64, timeout: float = 300.0) -> None:
        self._every = whole("every", every, 1)
        if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
            raise TypeError(f"timeout must be a number of seconds, not {type(timeout).__name__}")
        if not 0 < timeout < 1e7:
            raise ValueError(f"timeout must be a positive number of seconds, not {timeout}")
        if not isinstance(allocator, PoolAllocator):
            raise TypeError(f"allocator must be one of cupaged's, not {type(allocator).__name__}")
        if allocator.pool.watcher is not None:
            raise RuntimeError("this allocator has a guard already; close() that one first")
        self._allocator, self._pool, self._backend = allocator, allocator.pool, allocator.backend
        self._on_gpu = allocator.device != "cpu"
        self._ranks = _members(group)
        self._ops = self._agreed = self._calls = 0
        self._next = self._every
        self._kind: int | None = None
        self._args: tuple = ()
        self._captured = False
        self._make_cells()
        self._exchange = _Exchange(self._ranks, float(timeout), allocator.device)
        self._fold_start()
        self._compare_now()
        self._pool.watcher = self

    # ---- what the pool tells ------------------------------------------------------------------------------------

    def launched(self, args: tuple) -> None:
        """Keep what the fold at the end of this call needs. The pool calls it."""
        kind = self._backend.kind
        if not _UNCOUNTED >> kind & 1:
            self._kind, self._args = kind, args

    def refused(self) -> None:
        """Note that a call is told None. The pool calls it."""
        self._kind, self._args = _REFUSED, ()

    def call_ends(self) -> None:
        """Fold what the call did, and compare at a mark. The pool calls it."""
        kind, args = self._kind, self._args
        if kind is None:
            return
        self._kind, self._args = None, ()
        if kind != _REFUSED:
            self._backend.fold(self._entries(kind, args), self._allocator._where, self._cells_in)
        if self._pool.capturing:
            self._captured = True
        else:
            self._count(kind, 1)

    def _entries(self, kind: int, args: tuple) -> Any:
        backend = self._backend
        if _ALLOCATIONS >> kind & 1:
            if kind == Kind.DECODE:
                n = backend.length(args[0])
            elif kind == Kind.ALLOC:
                n = args[0] * self._allocator.page_size
            else:
                n = args[-2]
            return backend.handed_out(args[-1], n)
        return args[0] if kind == Kind.RETAIN else self._nothing

    def _count(self, code: int, ops: int) -> None:
        self._calls = (self._calls * _FACTOR ^ (code << 32 | ops)) & _MASK
        self._ops += ops
        if self._ops >= self._next:
            self._next += self._every * ((self._ops - self._next) // self._every + 1)
            self._at_mark()

    # ---- what ranks do ------------------------------------------------------------------------------------------

    def count_replays(self, ops: int = 1) -> None:
        """Count ops that a replay of a graph has run, which the host cannot see; behind the replay, on its stream.

        Parameters
        ----------
        ops : int
            How many; the same on all ranks.

        Raises
        ------
        LockstepError
            As every op of the allocator.
        """
        ops = whole("ops", ops, 1)
        self._pool.enter(self._backend.library, raising=False, changing=False)
        try:
            self._pool.refuse_capture("count_replays()")
            self._count(_REPLAYED, ops)
        finally:
            self._pool.leave()

    def check(self) -> None:
        """Compare all ops so far and wait for the answer. Collective: on all ranks, at the same op.

        Raises
        ------
        LockstepError
            If ranks differ, stand at different ops, or do not answer in time.
        """
        self._pool.enter(self._backend.library, raising=False, changing=False)
        try:
            self._pool.refuse_capture("check()")
            self._read_all()
            self._compare_now()
        finally:
            self._pool.leave()

    def close(self) -> None:
        """Leave the allocator alone. Not collective; a comparison that runs is dropped.

        The guard's own group, some sockets and threads, stays until ``destroy_process_group()``: torch names a group
        by how many there are, so ranks that destroyed theirs at different times could not make another one.
        """
        if self._pool.watcher is self:
            self._pool.watcher = None
        if self._captured:
            self._pool.in_graphs.append(self._cells)  # replays go on folding

    def __enter__(self) -> LockstepGuard:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- comparisons --------------------------------------------------------------------------------------------

    def _make_cells(self) -> None:
        import torch

        self._cells = torch.zeros(DIGEST_CELLS, dtype=torch.int64, device=self._allocator.device)
        self._cells[DigestCell.FREED_SEEN] = NEVER_FOLDED
        if self._on_gpu:
            torch.cuda.synchronize(self._cells.device)  # the fold may come on any stream
        self._cells_in, _ = self._backend.given_array(self._cells, "cells", np.dtype(np.int64), DIGEST_CELLS)

    def _fold_start(self) -> None:
        """Take in the whole free list, so that ranks that start unlike are told at once."""
        self._pool.enter(self._backend.library, raising=False, changing=False)
        try:
            self._pool.refuse_capture("making a LockstepGuard")
            self._nothing = self._backend.vector(np.empty(0, np.int64), "entries")
            self._backend.fold(self._nothing, self._allocator._where, self._cells_in)
        finally:
            self._pool.leave()

    def _compare_now(self) -> None:
        self._ask()
        self._read_all()

    def _read_all(self) -> None:
        while self._exchange.busy:
            self._read()

    def _at_mark(self) -> None:
        if self._exchange.busy:
            self._read()
        self._ask()

    def _ask(self) -> None:
        fixed = self._every, self._pool.num_pages, self._allocator.page_size, int(self._allocator._where)
        calls = self._calls - (self._calls >> 63 << 64)
        try:
            stream = self._backend._stream if self._on_gpu else 0
            self._exchange.begin([*fixed, self._ops, calls], self._cells[:1], stream)
        except Exception as error:
            raise self._no_answer(error) from error

    def _read(self) -> None:
        """Go on with what is under way; raises if an answer is there and shows that ranks differ."""
        try:
            rows = self._exchange.answer()
            if rows is not None:
                self._judge(rows)
            self._exchange.go_on()
        except LockstepError:
            raise
        except Exception as error:
            raise self._no_answer(error) from error

    def _no_answer(self, error: Exception) -> LockstepError:
        self.close()
        ops = f"in ops {self._agreed + 1} to {self._ops}" if self._ops else "where the guard was made"
        return LockstepError(
            f"{_named(self._ranks)} could not compare {ops}: one of them has died, hangs, or makes fewer calls "
            f"than this one ({_first_line(error)})",
            min(self._agreed + 1, self._ops),
            self._ops,
        )

    def _judge(self, rows: list[list[int]]) -> None:
        for i, name in enumerate(_FIXED):
            if len({row[i] for row in rows}) > 1:
                raise self._differ(rows, [row[i] for row in rows], f"differ in {name}", tell=True)
        if len({row[_OPS] for row in rows}) > 1:
            raise self._differ(rows, [row[_OPS] for row in rows], "stand at different ops", tell=True)
        for i, what in ((_CALLS, "made different calls"), (_DIGEST, "have different slots or free pages")):
            if len({row[i] for row in rows}) > 1:
                raise self._differ(rows, [row[i] for row in rows], what)
        self._agreed = rows[0][_OPS]

    def _differ(self, rows: list[list[int]], values: list[int], what: str, tell: bool = False) -> LockstepError:
        self.close()
        last = max(row[_OPS] for row in rows)
        groups: dict[int, list[int]] = {}
        for rank, value in zip(self._ranks, values, strict=True):
            groups.setdefault(value, []).append(rank)
        few_first = sorted(groups.items(), key=lambda item: len(item[1]))
        tied = len(few_first[-1][1]) == len(few_first[-2][1])
        odd = sorted(chain.from_iterable(members for _, members in (few_first if tied else few_first[:-1])))
        against = " against ".join(_named(members) + (f" ({value})" if tell else "") for value, members in few_first)
        where = f"in ops {self._agreed + 1} to {last}" if last else "from the start"
        return LockstepError(f"ranks {what} {where}: {against}", min(self._agreed + 1, last), last, tuple(odd))


def _members(group: Any) -> list[int]:
    """Global ranks of a group."""
    try:
        import torch.distributed as dist
    except ImportError:
        raise ImportError('LockstepGuard needs torch: pip install "cupaged[torch]"') from None
    if not dist.is_available():
        raise ImportError("LockstepGuard needs a torch that was built with torch.distributed")
    if not dist.is_gloo_available():
        raise ImportError("LockstepGuard needs a torch that was built with gloo, over which it compares")
    if not dist.is_initialized():
        raise RuntimeError("torch.distributed is not initialised; call init_process_group() before LockstepGuard")
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("this rank is not a member of group")
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group must be a process group of torch.distributed, not {type(group).__name__}")
    ranks = sorted(dist.get_process_group_ranks(group))
    if len(ranks) < 2:
        raise ValueError("group has one rank, which has nobody to be in step with; make no guard for it")
    return ranks


def _own_group(ranks: Sequence[int], seconds: float) -> Any:
    """A group that nobody else uses, whose making is no business of other ranks.

    Always over gloo: NCCL's watchdog ends the process of a rank whose peer has died, before it can say so, and its
    collectives would be work for the GPU.
    """
    import torch.distributed as dist

    return dist.new_group(
        list(ranks), backend="gloo", timeout=timedelta(seconds=seconds), use_local_synchronization=True
    )


class _Exchange:
    """Comparisons over gloo: the digest comes to the host, and a mark later rows are gathered by gloo's threads."""

    def __init__(self, ranks: Sequence[int], timeout: float, device: str) -> None:
        import torch

        self._timeout, self._on_gpu = timeout, device != "cpu"
        try:
            self._group = _own_group(ranks, timeout)
        except Exception as error:
            raise _not_made(ranks, error) from error
        # Two of each: while one row is gathered, the next one's digest is on its way.
        self._rows = [torch.zeros(_WIDTH, dtype=torch.int64, pin_memory=self._on_gpu) for _ in range(2)]
        self._events = [torch.cuda.Event() if self._on_gpu else None for _ in range(2)]
        self._turn = 0
        self._all = torch.zeros(len(ranks), _WIDTH, dtype=torch.int64)
        self._coming = False
        self._work: Any = None

    @property
    def busy(self) -> bool:
        return self._coming or self._work is not None

    def begin(self, numbers: list[int], digest: Any, stream: int) -> None:
        """Begin a comparison, behind what is queued on a stream."""
        import torch

        self._turn ^= 1
        row, event = self._rows[self._turn], self._events[self._turn]
        row[:_DIGEST] = torch.tensor(numbers)
        self._coming = True
        if event is None:
            row[_DIGEST:] = digest
            self.go_on()
            return
        queue = _stream(stream, digest.device)
        with torch.cuda.stream(queue):
            row[_DIGEST:].copy_(digest, non_blocking=True)
            event.record(queue)

    def go_on(self) -> None:
        """Gather the row whose digest has come."""
        import torch.distributed as dist

        if not self._coming:
            return
        if self._on_gpu:
            _await(self._events[self._turn], self._timeout)
        self._coming = False
        self._work = dist.all_gather(list(self._all), self._rows[self._turn], group=self._group, async_op=True)

    def answer(self) -> list[list[int]] | None:
        """Rows of all ranks, if they were asked for."""
        work, self._work = self._work, None
        if work is None:
            return None
        work.wait(timedelta(seconds=self._timeout))
        return self._all.tolist()


def _stream(pointer: int, device: Any) -> Any:
    import torch

    return torch.cuda.ExternalStream(pointer, device) if pointer else torch.cuda.default_stream(device)


def _await(event: Any, timeout: float) -> None:
    """Poll an event for so long."""
    begin = time.monotonic()
    pause = 20e-6
    while not event.query():
        if time.monotonic() - begin > timeout:
            raise TimeoutError(f"the device did not get there within {timeout:g} s")
        time.sleep(pause)
        pause = min(2 * pause, 2e-3)


def _not_made(ranks: Sequence[int], error: Exception) -> LockstepError:
    return LockstepError(
        f"{_named(ranks)} did not all make a LockstepGuard: one of them has died, hangs, or failed before "
        f"({_first_line(error)})",
        0,
        0,
    )


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:200] or type(error).__name__
