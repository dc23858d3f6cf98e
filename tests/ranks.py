"""Child process: one of several ranks with guarded allocators. RANK RANKS FOLDER DEVICE GROUP-BACKEND SCENARIO...

Each scenario's outcome goes to FOLDER/RANK.json; a scenario that kills its rank comes last.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import cupaged
from cupaged.errors import LockstepError
from cupaged.integrations.distributed import LockstepGuard

SIZE = 4
EVERY = 8


class Rank:
    """What a scenario is told."""

    def __init__(self, rank: int, device: str) -> None:
        self.rank, self.device = rank, torch.device(device)
        self.last = dist.get_world_size() - 1
        self.log: dict = {}
        # Ranks that must agree need not run the same backend.
        self.backend = "auto" if device != "cpu" else ("reference", "numba")[rank % 2]

    def slots(self, pages: int = 40, **options):
        chosen = {"device": self.device, "backend": self.backend} | options
        return cupaged.PagedTokenToKVPoolAllocator(pages * SIZE, SIZE, **chosen)

    def kv(self):
        return cupaged.KVAllocator(41 * SIZE, self.device, 8, 20 * SIZE, SIZE, backend=self.backend)

    def guard(self, allocator, **options) -> LockstepGuard:
        return LockstepGuard(allocator, **({"every": EVERY, "timeout": 20.0} | options))

    def tensor(self, values):
        return torch.tensor(values, device=self.device)

    def table(self, rows: int = 4, columns: int = 40):
        return torch.zeros(rows, columns, dtype=torch.int32, device=self.device)


def raise_in(steps) -> None:
    """Run calls, one op each, until one raises, and note which, counted from 1."""
    for n, step in enumerate(steps, 1):
        try:
            step()
        except LockstepError as error:
            error.at = n
            raise
    raise AssertionError("nothing was raised")


# ---- ranks that are in step ----------------------------------------------------------------------------------------


def life(me: Rank, need_sort: bool) -> None:
    """Every call of the slot allocator that changes the pool, the same on all ranks: 12 ops a turn, and 3."""
    pool = me.slots(need_sort=need_sort, errors="defer")
    guard = me.guard(pool)
    table, rows = me.table(), me.tensor([0, 1, -1])
    rng = np.random.default_rng(7)
    for _ in range(5):
        lengths = rng.integers(1, 9, 3)
        seq = me.tensor(lengths)
        pool.extend_step(table, rows, torch.zeros_like(seq), seq, int(lengths.sum()))
        pool.decode_step(table, rows, seq)
        pool.trim(table, rows, seq + 1, seq)
        first = pool.alloc_extend([0, 0], me.tensor([5, 3]), me.tensor([-1, -1]), 8)
        pool.alloc_decode(me.tensor([6, 4]), torch.stack([first[4], first[7]]))
        assert pool.alloc(50 * SIZE) is None
        whole = pool.alloc(2 * SIZE)
        assert pool.alloc_extend([0], [37 * SIZE], [-1], 37 * SIZE) is None
        pages = whole[::SIZE] // SIZE
        pool.retain(pages)
        with pool.free_group():
            pool.free(whole)
            pool.free(whole[:SIZE])
            pool.free_page_ids(pages[1:])
        pool.free(first)
        pool.release(table, rows, seq)
        if me.rank == 1:  # reading is a rank's own affair
            pool.refresh()
            pool.backup_state()
            pool.stats()
    pool.merge_and_sort_free()
    state = pool.backup_state()
    pool.alloc(SIZE)
    pool.restore_state(state)
    pool.clear()
    me.log["ops"] = guard._ops
    me.log["agreed"] = guard._agreed
    guard.check()
    me.log["after check"] = guard._agreed
    guard.close()
    pool.alloc(SIZE)
    me.log["closed"] = guard._ops


def in_step(me: Rank) -> None:
    life(me, need_sort=False)


def in_step_sorted(me: Rank) -> None:
    life(me, need_sort=True)


def kv_in_step(me: Rank) -> None:
    kv = me.kv()
    guard = me.guard(kv, every=3)
    for turn in range(4):
        kv.alloc(0, 7, 0)
        kv.alloc_batch([1, 2], [5, 9], [0, 0])
        assert kv.alloc(3, 200, 0) is None  # full row: no op
        assert kv.alloc_batch([3, 4], [70, 70], [0, 0]) is None  # short pool: an op
        kv.decode_step(kv.req_to_page, me.tensor([1, 2]), me.tensor([5, 9]))
        kv.free_req_cache(0, 7)
        kv.free_extra_pages_not_cached(1, 4, 6)
        kv.append_to_later_free(kv.req_to_page[1, :1])
        kv.free_group_end()
        kv.alloc(0, 3, 0)
        kv.free(0)
        kv.free_req_cache(2, 10)
        if turn % 2:
            kv.alloc(2, 1, 0)  # ends the queue first: two ops
            kv.free(2)
        else:
            kv.free_group_end()
    kv.clear()
    me.log["ops"] = guard._ops
    guard.check()
    assert kv.available_size() == 40


def marks_do_not_wait(me: Rank) -> None:
    """The step at a mark goes on while others are late; only the next mark needs their answer."""
    pool = me.slots()
    guard = me.guard(pool)
    if me.rank:
        time.sleep(1.5)
    begin = time.monotonic()
    for _ in range(2 * EVERY - 1):
        pool.alloc(SIZE)
    me.log["seconds"] = time.monotonic() - begin
    guard.check()


# ---- ranks that drift ----------------------------------------------------------------------------------------------


def one_slot(me: Rank) -> None:
    """At op 20, the last rank goes on in another page of its own: one slot differs, and nothing else ever."""
    pool = me.slots()
    me.guard(pool)
    pages = pool.alloc(3 * SIZE)
    last = [int(pages[0]), int(pages[SIZE])]

    def step(op):
        place = last[1] if me.rank == me.last and op == 20 else last[0]
        me.log["slot"] = int(pool.alloc_decode(me.tensor([2]), me.tensor([place]))[0])

    raise_in([lambda op=op: step(op) for op in range(2, 99)])


def freed_page(me: Rank) -> None:
    """At op 21, rank 1 frees one page where the others free another; both had been allocated alike."""
    pool = me.slots()
    me.guard(pool)
    held = pool.alloc(30 * SIZE)

    def step(op):
        page = op + (me.rank == 1 and op == 21) - (me.rank == 1 and op == 22)
        pool.free(held[SIZE * page : SIZE * page + 1])

    raise_in([lambda op=op: step(op) for op in range(2, 30)] + [lambda: pool.alloc(SIZE)] * 20)


def missed_free(me: Rank) -> None:
    """The last rank never makes its op 20."""
    pool = me.slots()
    me.guard(pool)
    held = pool.alloc(30 * SIZE)

    def step(op):
        pool.free(held[SIZE * op : SIZE * op + 1])

    calls = [lambda op=op: step(op) for op in range(2, 29)] + [lambda: pool.alloc(SIZE)] * 20
    if me.rank == me.last:
        del calls[18]
    raise_in(calls)


def missed_free_in_group(me: Rank) -> None:
    """The same calls, but rank 0's queue lacks a request at op 3."""
    kv = me.kv()
    me.guard(kv, every=2)
    kv.alloc(0, 5, 0)
    kv.alloc(1, 5, 0)
    kv.free_req_cache(0, 5)
    if me.rank:
        kv.free_req_cache(1, 5)
    raise_in([kv.free_group_end, *[lambda: kv.alloc(2, 1, 0)] * 9])


def missed_none(me: Rank) -> None:
    """Rank 1 asks for less, and gets it, where the others are told None."""
    pool = me.slots(pages=4)
    guard = me.guard(pool)
    assert (pool.alloc(4 * SIZE if me.rank == 1 else 5 * SIZE) is None) == (me.rank != 1)
    guard.check()


# ---- ranks that cannot compare -------------------------------------------------------------------------------------


def other_every(me: Rank) -> None:
    me.guard(me.slots(), every=4 if me.rank == me.last else 8)


def other_pool(me: Rank) -> None:
    me.guard(me.slots(pages=41 + me.rank // 2))


def other_start(me: Rank) -> None:
    pool = me.slots()
    pages = pool.alloc(2 * SIZE)[::SIZE] // SIZE
    pool.free_page_ids(pages if me.rank else pages.flip(0))
    me.guard(pool)


def other_count(me: Rank) -> None:
    pool = me.slots()
    guard = me.guard(pool)
    for _ in range(3 if me.rank == me.last else 5):
        pool.alloc(SIZE)
    guard.check()


def one_rank(me: Rank) -> None:
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    me.log["others"] = []
    for group in groups:
        try:
            LockstepGuard(me.slots(), group)
        except ValueError as error:
            me.log["others"].append(str(error))


def no_guard(me: Rank) -> None:
    if me.rank:
        time.sleep(5)
        return
    me.guard(me.slots(), timeout=1.0)


def late(me: Rank) -> None:
    """Rank 0 stops before its mark for longer than the others wait."""
    pool = me.slots()
    me.guard(pool, every=2, timeout=1.5)
    if me.rank == 0:
        time.sleep(4)
        return
    raise_in([lambda: pool.alloc(SIZE)] * 9)


def dies(me: Rank) -> None:
    """The last rank dies at its first mark, where all begin to compare."""
    pool = me.slots()
    me.guard(pool, every=2, timeout=6.0)
    if me.rank == me.last:
        pool.alloc(SIZE)
        os._exit(9)
    raise_in([lambda: pool.alloc(SIZE)] * 9)


# ---- in graphs, on a GPU -------------------------------------------------------------------------------------------


def replays(me: Rank) -> None:
    """Captured folds run in each replay; rank 1 goes on in another page in the 6th."""
    pool = me.slots()
    guard = me.guard(pool, every=4)
    pages = pool.alloc(2 * SIZE)
    seq, last = me.tensor([2]), pages[:1].clone()
    out = torch.empty(1, dtype=torch.int64, device=me.device)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pool.alloc_decode(seq, last, out=out)
    me.log["ops"] = guard._ops

    def step(n):
        last.copy_(pages[SIZE : SIZE + 1] if me.rank == 1 and n == 6 else pages[:1])
        graph.replay()
        guard.count_replays()

    try:
        raise_in([lambda n=n: step(n) for n in range(1, 20)])
    finally:
        graph.replay()  # the cells are still there
        torch.cuda.synchronize()
        me.log["kept"] = len(pool.pool.in_graphs)


def main(rank: int, ranks: int, folder: str, device: str, over: str, names: list[str]) -> None:
    if device == "cuda":
        torch.cuda.set_device(rank if over == "nccl" else 0)
        device = f"cuda:{torch.cuda.current_device()}"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(str(Path(folder) / "store"), ranks)
    dist.init_process_group(over, store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    found: dict = {}
    for name in names:
        me = Rank(rank, device)
        begin = time.monotonic()
        try:
            globals()[name](me)
        except Exception as error:
            traceback.print_exc()
            me.log |= {"error": type(error).__name__, "message": str(error)}
            if isinstance(error, LockstepError):
                me.log |= {"first": error.first_op, "last": error.last_op, "ranks": error.ranks}
                me.log["at"] = getattr(error, "at", None)
        me.log["took"] = time.monotonic() - begin
        found[name] = me.log
        (Path(folder) / f"{rank}.json").write_text(json.dumps(found))
    os._exit(0)  # a group whose member has died must not be waited for


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:6], sys.argv[6:])
