"""Ranks in step: processes over gloo, one of which drifts, dies or does not answer; and what the guard launches."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

import cupaged
from cupaged import backends
from cupaged.errors import LockstepError
from cupaged.integrations import distributed
from cupaged.integrations.distributed import LockstepGuard
from cupaged.layout import NEVER_FOLDED
from tests.host_backend import DeviceArray, variant
from tests.test_digest import expected_of

ROOT = Path(__file__).parents[1]


def run_ranks(folder: Path, ranks: int, *scenarios: str, device: str = "cpu", over: str = "gloo", limit: float = 150):
    """Outcomes of scenarios in `tests/ranks.py`: one dict a scenario, by rank."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    children = []
    end = time.monotonic() + limit
    try:
        for rank in range(ranks):
            command = [
                sys.executable,
                "-m",
                "tests.ranks",
                str(rank),
                str(ranks),
                str(folder),
                device,
                over,
                *scenarios,
            ]
            with open(folder / f"{rank}.log", "w") as log:
                children.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log))
        for child in children:
            child.wait(max(0.1, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise AssertionError("hangs:\n" + _tails(folder, ranks)) from None
    finally:
        for child in children:
            child.kill()
            child.wait()
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
    return {name: [mine.get(name) for mine in found] for name in scenarios}


def _tails(folder: Path, ranks: int) -> str:
    return "\n".join((folder / f"{rank}.log").read_text()[-2000:] for rank in range(ranks))


GLOO = (
    *("in_step", "in_step_sorted", "kv_in_step", "marks_do_not_wait", "one_slot", "freed_page", "missed_free"),
    *("missed_free_in_group", "missed_none", "other_every", "other_pool", "other_start", "other_count", "one_rank"),
    *("late", "dies"),
)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    return run_ranks(tmp_path_factory.mktemp("ranks"), 4, *GLOO)


def told(outcomes: list, *keys: str) -> list:
    """One value all ranks agree in, or each rank's."""
    values = [tuple(mine.get(key) for key in keys) for mine in outcomes]
    assert len(set(map(str, values))) == 1, outcomes
    return list(values[0])


@pytest.mark.parametrize("name", ["in_step", "in_step_sorted"])
def test_in_step(outcome, name):
    # 5 turns of 12 ops, and 3; the answer of the mark at op 48 came at the one at op 56
    assert told(outcome[name], "error", "ops", "agreed", "after check", "closed") == [None, 63, 48, 63, 63]


def test_kv_allocators_in_step(outcome):
    # turns of 8 and 10 ops, and a clear
    assert told(outcome["kv_in_step"], "error", "ops") == [None, 2 * 8 + 2 * 10 + 1]


def test_a_step_does_not_wait_at_a_mark(outcome):
    assert outcome["marks_do_not_wait"][0]["seconds"] < 1.0  # the others begin 1.5 s later
    assert all("error" not in mine for mine in outcome["marks_do_not_wait"])


def test_one_slot_is_enough(outcome):
    """Op 20 is between the marks at 16 and 24; the answer of the latter comes at 32, the 31st call of the loop."""
    found = outcome["one_slot"]
    assert told(found, "error", "first", "last", "ranks", "at") == ["LockstepError", 17, 24, [3], 31]
    assert told(found, "message") == [
        "ranks have different slots or free pages in ops 17 to 24: rank 3 against ranks 0, 1, 2"
    ]


def test_a_freed_page_shows_before_it_is_handed_out(outcome):
    assert told(outcome["freed_page"], "error", "first", "last", "ranks", "at") == ["LockstepError", 17, 24, [1], 31]


def test_missed_free(outcome):
    """The rank that missed one call raises one call later: at the same op."""
    found = outcome["missed_free"]
    assert told(found, "error", "first", "last", "ranks") == ["LockstepError", 17, 24, [3]]
    assert [mine["at"] for mine in found] == [31, 31, 31, 31]


def test_missed_free_in_a_group(outcome):
    # the group ends at op 3, and the marks are 2, 4, 6
    found = outcome["missed_free_in_group"]
    assert told(found, "error", "first", "last", "ranks", "at") == ["LockstepError", 3, 4, [0], 4]


def test_none_counts(outcome):
    assert told(outcome["missed_none"], "message") == [
        "ranks made different calls in ops 1 to 1: rank 1 against ranks 0, 2, 3"
    ]


@pytest.mark.parametrize(
    ("name", "ranks", "message"),
    [
        ("other_every", [3], "ranks differ in every from the start: rank 3 (4) against ranks 0, 1, 2 (8)"),
        (
            "other_pool",
            [0, 1, 2, 3],
            "ranks differ in their number of pages from the start: ranks 0, 1 (41) against ranks 2, 3 (42)",
        ),
        ("other_start", [0], "ranks have different slots or free pages from the start: rank 0 against ranks 1, 2, 3"),
        ("other_count", [3], "ranks stand at different ops in ops 1 to 5: rank 3 (3) against ranks 0, 1, 2 (5)"),
    ],
)
def test_ranks_that_cannot_agree(outcome, name, ranks, message):
    assert told(outcome[name], "error", "ranks", "message") == ["LockstepError", ranks, message]


def test_group_of_one_and_of_others(outcome):
    for rank, mine in enumerate(outcome["one_rank"]):
        assert "error" not in mine
        for group, message in enumerate(mine["others"]):
            assert message.startswith("group has one rank" if group == rank else "this rank is not a member"), message


def test_a_rank_that_is_late(outcome):
    for mine in outcome["late"][1:]:
        assert mine["message"].startswith(
            "ranks 0, 1, 2, 3 could not compare in ops 1 to 4: one of them has died, hangs"
        )
        assert mine["ranks"] == []
        assert mine["took"] < 3.5  # timeout 1.5 s


def test_a_rank_that_dies_in_mid_comparison(outcome):
    assert outcome["dies"][3] is None
    for mine in outcome["dies"][:3]:
        assert mine["error"] == "LockstepError"
        assert "could not compare in ops 1 to 4" in mine["message"]
        assert mine["took"] < 12  # timeout 6 s


def test_a_rank_that_makes_no_guard(tmp_path):
    mine = run_ranks(tmp_path, 2, "no_guard")["no_guard"][0]
    assert mine["message"].startswith("ranks 0, 1 did not all make a LockstepGuard")
    assert mine["took"] < 4.5  # timeout 1 s


# ---- in this process: what the guard launches ------------------------------------------------------------------


class Exchange:
    """Two ranks that always agree."""

    def __init__(self, ranks, timeout, device):
        self.busy, self.rows = False, []

    def begin(self, numbers, digest, stream):
        self.busy = True
        self.rows.append([*numbers, int(digest[0])])

    def answer(self):
        self.busy = False
        return [self.rows[-1]] * 2

    def go_on(self):
        pass


class OnTheHost(LockstepGuard):
    """A guard of a pool on the host-run CUDA kernels, whose memory torch does not take for a GPU's."""

    def _make_cells(self):
        self._cells = torch.tensor([0, NEVER_FOLDED])
        self._cells_in = self._cells.data_ptr()


@pytest.fixture
def guarded(monkeypatch):
    monkeypatch.setattr(distributed, "_members", lambda group: [0, 1])
    monkeypatch.setattr(distributed, "_Exchange", Exchange)

    def make(**options):
        with mock.patch.object(backends, "pick", return_value=variant("ascending")):
            pool = cupaged.PagedTokenToKVPoolAllocator(40 * 4, 4, device="cuda")
        guard = OnTheHost(pool, **options)
        pool.backend.launches.clear()
        return pool, guard

    return make


def test_one_launch_more_an_op(guarded):
    pool, guard = guarded(every=3)
    launches = pool.backend.launches
    pool.alloc_decode([1, 1], [-1, -1])
    assert launches == ["decode_small", "fold_digest"]
    assert guard._ops == 1
    launches.clear()
    assert pool.alloc(41 * 4) is None  # the host knows
    assert launches == []
    assert guard._ops == 2
    with pool.free_group():
        pool.free([4])
        pool.free_page_ids([2])
    assert launches[-1] == "fold_digest"
    assert launches.count("fold_digest") == 1
    assert guard._ops == 3
    assert [row[4] for row in guard._exchange.rows] == [0, 3]  # where it was made, and the mark
    launches.clear()
    pool.refresh()
    pool.stats()
    assert "fold_digest" not in launches
    guard.close()
    pool.alloc(4)
    assert "fold_digest" not in launches
    OnTheHost(pool).close()


def calls_of_slots(pool):
    table, rows = np.zeros((4, 40), np.int32), np.array([0, 1, -1])
    first = pool.alloc(8)
    yield first
    yield pool.alloc_extend([0, 0], [5, 3], [-1, -1], 8)
    yield pool.alloc_decode([1, 1, 1], [-1] * 3)
    yield pool.extend_step(table, rows, [0, 0, 0], [6, 2, 1], 9)
    yield pool.decode_step(table, rows, [6, 2, 1])
    pool.retain(pages := first[::4] // 4)
    yield pages
    for free in (
        lambda: pool.trim(table, rows, [7, 3, 2], [1, 3, 2]),
        lambda: pool.release(table, rows, [1, 3, 2]),
        lambda: pool.free(first),
        lambda: pool.free_page_ids(pages[::-1]),
    ):
        free()
        yield ()


def calls_of_rows(kv):
    yield kv.alloc(0, 7, 0)
    yield kv.alloc_batch([1, 2], [5, 9], [0, 0])[0]
    yield kv.decode_step(kv.req_to_page, np.array([1, 2]), np.array([5, 9]))
    yield kv.extend_step(kv.req_to_page, np.array([0, 2]), [7, 10], [9, 20], 12)
    kv.free_req_cache(2, 20)
    kv.free_extra_pages_not_cached(0, 4, 9)
    kv.free_group_end()
    yield ()
    kv.free(1)
    yield ()


@pytest.mark.parametrize("backend", ["numba", "reference"])
@pytest.mark.parametrize("kind", ["slots", "slots, need_sort", "rows"])
def test_what_each_call_folds(guarded, backend, kind):
    """What it returned, the pages that it gave back, and the counts, by the rule as `test_digest` renders it."""
    if kind == "rows":
        pool = cupaged.KVAllocator(41 * 4, "cpu", 4, 80, 4, backend=backend)
        calls = calls_of_rows(pool)
    else:
        sort = kind != "slots"
        pool = cupaged.PagedTokenToKVPoolAllocator(40 * 4, 4, device="cpu", backend=backend, need_sort=sort)
        calls = calls_of_slots(pool)
    guard = LockstepGuard(pool)
    nothing = np.empty(0, np.int64)
    cells = expected_of(pool.pool.snapshot(), 40, [0, NEVER_FOLDED], nothing, pool._where)
    assert guard._cells.tolist() == cells
    for n, entries in enumerate(calls, 1):
        assert guard._ops == n
        cells = expected_of(pool.pool.snapshot(), 40, cells, np.array(entries, np.int64), pool._where)
        assert guard._cells.tolist() == cells, n


def test_captured_folds(guarded):
    pool, guard = guarded(every=2)
    backend = pool.backend
    pool.alloc(4)
    seq, last, out = (DeviceArray(np.array([value])) for value in (2, 4, 0))
    backend.capture = True
    pool.alloc_decode(seq, last, out=out)
    with pytest.raises(cupaged.CaptureError, match="check"):
        guard.check()
    with pytest.raises(cupaged.CaptureError, match="count_replays"):
        guard.count_replays()
    backend.capture = False
    assert backend.launches[-2:] == ["decode_small", "fold_digest"]
    assert guard._ops == 1  # no replay has run yet
    guard.count_replays(3)
    assert guard._ops == 4
    assert len(guard._exchange.rows) == 2  # however many marks were passed, one comparison
    cells = guard._cells
    guard.close()
    assert any(kept is cells for kept in pool.pool.in_graphs)


def test_a_guard_of_a_captured_pool(guarded):
    pool, guard = guarded()
    guard.close()
    pool.backend.capture = True
    with pytest.raises(cupaged.CaptureError, match="making a LockstepGuard"):
        OnTheHost(pool)


def test_error_in_a_call_is_still_folded(guarded):
    """What the device refused, and what debug mode found, is part of the digest like anything else."""
    pool, guard = guarded()
    pool.alloc_decode([2], [4])  # page 1 is free
    first = int(guard._cells[0])
    with pytest.raises(cupaged.FreePageError):
        pool.alloc_decode([1], [-1])  # reads of it: no op
    assert (guard._ops, int(guard._cells[0])) == (1, first)


# ---- what the host can see ---------------------------------------------------------------------------------------


def test_bad_arguments():
    pool = cupaged.PagedTokenToKVPoolAllocator(64, 4, device="cpu")
    with pytest.raises(RuntimeError, match=r"not initialised; call init_process_group\(\)"):
        LockstepGuard(pool)
    with pytest.raises(ValueError, match="every must be at least 1"):
        LockstepGuard(pool, every=0)
    for timeout in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="timeout must be a positive number"):
            LockstepGuard(pool, timeout=timeout)
    for timeout in ("5", None, True):
        with pytest.raises(TypeError, match="timeout must be a number of seconds, not"):
            LockstepGuard(pool, timeout=timeout)
    with pytest.raises(TypeError, match="allocator must be one of cupaged's, not list"):
        LockstepGuard([])
    with mock.patch("torch.distributed.is_initialized", return_value=True):
        for group in ("x", 5, [0, 1]):
            with pytest.raises(TypeError, match=r"group must be a process group of torch.distributed, not"):
                LockstepGuard(pool, group)
    assert pool.pool.watcher is None


def test_two_guards(guarded):
    pool, _ = guarded()
    with pytest.raises(RuntimeError, match="has a guard already"):
        OnTheHost(pool)


def test_without_torch():
    code = (
        "import sys; sys.modules['torch'] = None; import cupaged; from cupaged.integrations.distributed import *\n"
        "try: LockstepGuard(cupaged.PagedTokenToKVPoolAllocator(8, 4, device='cpu'))\n"
        "except ImportError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.stdout.strip() == 'LockstepGuard needs torch: pip install "cupaged[torch]"', done.stderr


def test_without_gloo():
    import torch.distributed as dist

    with (
        mock.patch.object(dist, "is_gloo_available", return_value=False),
        pytest.raises(ImportError, match="built with gloo"),
    ):
        distributed._members(None)


class Event:
    """Comes at the third look, or never."""

    def __init__(self, comes):
        self.looks, self.comes = 0, comes

    def query(self):
        self.looks += 1
        return self.comes and self.looks == 3


def test_a_gpus_digest_is_gathered_a_mark_later(monkeypatch, tmp_path):
    """The order of things over gloo, on a device of which only the events are real, and in a group of one."""
    import torch.distributed as dist

    events = []

    class Recorded(Event):
        def __init__(self):
            super().__init__(comes=True)
            events.append(self)

        def record(self, queue):
            self.looks = 0

    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *shape, pin_memory=False, **options: zeros(*shape, **options))
    monkeypatch.setattr(torch.cuda, "Event", Recorded)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(distributed, "_stream", lambda pointer, device: pointer)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        exchange = distributed._Exchange([0], 5.0, "cuda:0")
        assert not exchange.busy
        exchange.begin([1, 2, 3, 4, 10, 6], torch.tensor([7]), 0)
        assert exchange.busy
        assert exchange.answer() is None  # the next mark: the digest has come, and goes out
        exchange.go_on()
        assert events[1].looks == 3
        exchange.begin([1, 2, 3, 4, 20, 6], torch.tensor([8]), 0)
        assert exchange.answer() == [[1, 2, 3, 4, 10, 6, 7]]
        exchange.go_on()
        assert events[0].looks == 3
        assert exchange.answer() == [[1, 2, 3, 4, 20, 6, 8]]
        assert not exchange.busy
    finally:
        dist.destroy_process_group()


def test_waits_for_the_device_so_long():
    event = Event(comes=True)
    distributed._await(event, 30)
    assert event.looks == 3
    begin = time.monotonic()
    with pytest.raises(TimeoutError, match=r"within 0\.05 s"):
        distributed._await(Event(comes=False), 0.05)
    assert time.monotonic() - begin < 5


def test_error_survives_pickling():
    error = pickle.loads(pickle.dumps(LockstepError("ranks drift", 3, 4, (1,))))
    assert (str(error), error.first_op, error.last_op, error.ranks) == ("ranks drift", 3, 4, (1,))
