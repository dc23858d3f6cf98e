"""What the host believes and what it waits for: bounds, mail, errors, threads, captures, on a device that lags."""

from __future__ import annotations

import contextlib
import copy
import logging
import pickle
import threading
import weakref
from unittest import mock

import numpy as np
import pytest

import cupaged
import cupaged.pool
from cupaged import PagedTokenToKVPoolAllocator, backends
from cupaged.layout import Word
from tests.allocators import HOSTED, make
from tests.host_backend import DeviceArray, variant


class Lagging(variant("random", delayed=True)):  # type: ignore[misc]
    """A device that runs launches only when it is told to, remembers captured ones, and can be one of two."""

    def __init__(self, **options) -> None:
        self.recorded: list = []
        self.current = 0
        super().__init__(**options)

    def _current_device(self) -> int:
        return self.current

    def _set_device(self, index: int) -> None:
        self.current = index

    def _launch(self, kernel: str, blocks: int, threads: int) -> None:
        if self.capture:
            self.recorded.append((kernel, blocks, threads, self._args.tobytes()))
        super()._launch(kernel, blocks, threads)

    def replay(self) -> None:
        self.queue_of_launches.extend(self.recorded)

    def run_some(self, launches: int) -> None:
        rest = list(self.queue_of_launches)[launches:]
        for _ in rest:
            self.queue_of_launches.pop()
        self.run_launches()
        self.queue_of_launches.extend(rest)


class Waited(AssertionError):
    pass


def make_lagging(size: int, page_size: int, **options) -> PagedTokenToKVPoolAllocator:
    with mock.patch.object(backends, "pick", return_value=Lagging):
        return PagedTokenToKVPoolAllocator(size, page_size, **options)


in_use: list[DeviceArray] = []  # what a launch that has not run yet may still read


@pytest.fixture(autouse=True)
def _nothing_in_use():
    yield
    in_use.clear()


def on_device(*values: int) -> DeviceArray:
    in_use.append(DeviceArray(np.array(values, np.int64)))
    return in_use[-1]


@contextlib.contextmanager
def no_wait(pool):
    """Fails if the host polls: nothing queued may have to run inside."""

    def poll():
        raise Waited("the host waited")

    with mock.patch.object(pool.backend, "poll", poll):
        yield


@pytest.fixture
def short_limit(monkeypatch):
    monkeypatch.setattr(cupaged.pool, "WAIT_LIMIT_S", 0.05)


def bounds(pool) -> tuple[int, int]:
    """In pages; neither waits nor reads mail beyond what `available_at_least` does."""
    at_least = pool.available_at_least() // pool.page_size
    return at_least, pool.pool.at_most


# ---- the common step ---------------------------------------------------------------------------------------------


def test_a_common_step_never_waits_and_nothing_of_it_need_have_run():
    pool, twin = make_lagging(400 * 4, 4), make("reference", 400 * 4, 4)
    with no_wait(pool):
        outs = [pool.alloc_extend(on_device(0, 0), on_device(6, 9), on_device(-1, -1), 15)]
        expected = [twin.alloc_extend([0, 0], [6, 9], [-1, -1], 15)]
        first, second = int(expected[0][5]), int(expected[0][14])
        outs.append(pool.alloc_decode(on_device(7, 10), on_device(first, second)))
        expected.append(twin.alloc_decode([7, 10], [first, second]))
        outs.append(pool.alloc(20))
        expected.append(twin.alloc(20))
        for p, given in ((pool, on_device), (twin, lambda *x: list(x))):
            p.free(given(*expected[2][:8].tolist()), num_pages=2)
            p.free(given(int(expected[2][8])))
            p.free_page_ids(given(int(expected[2][12]) // 4))
            p.free_segment(given(*expected[2][16:].tolist()), start_pos=4)
            with p.free_group():
                p.free(given(first))
                p.free_page_ids(given(second // 4))
        outs.append(pool.alloc(8))
        expected.append(twin.alloc(8))
        ran = pool.backend.words[Word.OP]
    assert ran == 0  # not even the clear at construction
    assert len(pool.backend.queue_of_launches) >= 9
    pool.backend.run_launches()
    for out, slots in zip(outs, expected, strict=True):
        assert out.tolist() == slots.tolist()
    assert pool.free_pages.tolist() == twin.free_pages.tolist()
    pool.check()


def test_available_size_does_not_wait_where_the_counts_are_host_known():
    pool = make_lagging(100 * 8, 8)
    with no_wait(pool):
        assert pool.available_size() == 800
        pool.alloc_extend([0, 0, 5], [17, 8, 5], [-1, -1, -1], 25)  # 3 + 1 + 0 pages
        assert pool.available_size() == 96 * 8
        pool.alloc_decode([9, 16, 1], [15, 23, -1])  # a page each for 9 = 8 + 1 and for 1
        assert pool.available_size() == 94 * 8
        pool.alloc(24)
        assert pool.available_size() == 91 * 8
        pool.alloc_decode(
            on_device(17, 24), on_device(0, 0), seq_lens_cpu=np.array([17, 24], np.int32)
        )  # refused later, but the host takes the lengths' word
        assert pool.available_size() == 90 * 8
        pool.free_page_ids(on_device(3, 4))
        pool.free(on_device(8, 9, 16), num_pages=2)
        assert pool.available_size() == 94 * 8
        pool.free_segment(on_device(*range(40, 57)), start_pos=0)  # 17 slots: entries 0, 8 and 16
        assert pool.available_size() == 97 * 8


@pytest.mark.parametrize(
    ("page_size", "tokens", "most", "least"), [(4, 10, 2 + 3, 1), (1, 10, 10, 10), (16, 2, 2, 0)]
)
def test_lengths_of_the_device_lower_the_bound_by_what_they_can_take(page_size, tokens, most, least):
    pool = make_lagging(100 * page_size, page_size)
    with no_wait(pool):
        pool.alloc_extend(on_device(0, 0, 0), on_device(1, 1, tokens - 2), on_device(-1, -1, -1), tokens)
        assert bounds(pool) == (100 - most, 100 - least)
        pool.alloc_decode(on_device(*[1] * 7), on_device(*[-1] * 7))
        assert bounds(pool) == (100 - most - 7, 100 - least)


def test_what_a_plain_free_gives_is_certain_only_by_one_page():
    pool = make_lagging(100 * 2, 2)
    pool.alloc(100)
    with no_wait(pool):
        pool.free(on_device(2, 3, 4, 9))
        assert bounds(pool) == (51, 54)
        pool.free(on_device())
        assert bounds(pool) == (51, 54)
    assert pool.available_size() == 2 * 53


def test_a_retain_makes_the_host_promise_nothing_until_mail_says_that_no_page_is_shared():
    pool = make_lagging(100, 1)
    pool.alloc(50)
    pool.refresh()
    with no_wait(pool):
        pool.retain(on_device(7))
        pool.free(on_device(1), num_pages=1)
        pool.free(on_device(2))
        pool.free_page_ids(on_device(3, 4))
        pool.free_segment(on_device(5, 6), start_pos=0)
        assert bounds(pool) == (50, 56)
    assert pool.available_size() == 56
    with no_wait(pool):
        pool.free(on_device(8), num_pages=1)  # page 7 still has two owners
        assert bounds(pool) == (56, 57)
        pool.free_page_ids(on_device(7))
    assert pool.available_size() == 57
    with no_wait(pool):
        pool.free(on_device(9, 10), num_pages=2)
        assert bounds(pool) == (59, 59)
        pool.free_page_ids(on_device(7))
        assert bounds(pool) == (60, 60)
        assert pool.available_size() == 60


def test_a_restored_state_with_shared_pages_promises_nothing_either():
    pool = make_lagging(16, 1)
    pool.alloc(16)
    pool.retain(on_device(1, 2, 3))
    state = pool.backup_state()
    pool.refresh()
    pool.restore_state(state)
    with no_wait(pool):
        pool.free_page_ids(on_device(1, 2, 3))
        assert bounds(pool)[0] == 0
    assert pool.alloc(3) is None
    pool.check()
    assert pool.available_size() == 0


def test_of_queued_segments_that_share_a_page_one_counts_it():
    pool = make_lagging(16 * 2, 2)
    pool.alloc(32)
    pool.refresh()
    with no_wait(pool), pool.free_group():
        pool.free(on_device(4, 6), num_pages=2)
        pool.free(on_device(5, 8), num_pages=1)
    assert bounds(pool) == (3, 3)
    assert pool.alloc(8) is None
    assert pool.alloc(6) is not None
    pool.check()


def test_at_most_holds_between_the_ops_of_a_group():
    pool = make_lagging(16 * 2, 2)
    pool.alloc(32)
    pool.retain(on_device(9))
    pool.refresh()
    with pool.free_group():
        pool.free(on_device(4, 6, 8), num_pages=3)
        pool.free(on_device(10), num_pages=1)
    pool.backend.run_some(1)  # the mail of the first call, which pushes nothing yet
    at_least, at_most = bounds(pool)
    assert at_least == 0
    assert at_most >= 4
    assert pool.available_size() == 8


# ---- near full ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("need_sort", [False, True])
def test_none_exactly_if_the_pool_is_short(need_sort):
    rng = np.random.default_rng(5)
    pool = make_lagging(12 * 4, 4, need_sort=need_sort)
    free, held, nones, kept_waiting = 12, [], 0, 0
    pages_held: list[list[int]] = []
    for step in range(150):
        if rng.random() < 0.45 and held:
            slots = held.pop(int(rng.integers(len(held))))
            pages = sorted({int(s) // 4 for s in slots})
            free += len(pages)
            pool.free(on_device(*slots))
            continue
        lengths = rng.integers(1, 14, int(rng.integers(1, 4)))
        needed = int((-(-lengths // 4)).sum())
        zeros = np.zeros(lengths.size, np.int64)
        before = pool.stats().refusals if step % 10 == 0 else None
        out = pool.alloc_extend(on_device(*zeros), on_device(*lengths), on_device(*zeros - 1), int(lengths.sum()))
        assert (out is None) == (needed > free), (step, needed, free)
        kept_waiting += not pool.backend.queue_of_launches
        if out is None:
            nones += 1
            if before is not None:
                assert pool.stats().refusals == before + 1
            continue
        free -= needed
        pool.backend.run_launches()
        ends = np.cumsum(lengths)
        held += [out[e - n : e] for e, n in zip(ends, lengths, strict=True)]
        pages_held = [[int(s) // 4 for s in h] for h in held]
        every = [p for pages in pages_held for p in set(pages)]
        assert len(every) == len(set(every))
    assert nones > 10
    assert kept_waiting > 10
    pool.check()
    pool.check_integrity()


def test_a_bound_that_does_not_fit_waits_and_an_exact_one_does_not():
    pool = make_lagging(4 * 16, 16)
    with no_wait(pool):
        # At most 3 pages, says the host, but it takes 1.
        assert pool.alloc_decode(on_device(1, 18, 19), on_device(-1, 16, 17)) is not None
        with pytest.raises(Waited):
            pool.alloc(32)
    assert not pool.pool._lock.locked()
    pool = make_lagging(4 * 16, 16)
    with no_wait(pool):
        pool.alloc(48)
        assert pool.alloc(32) is None
        assert pool.alloc(16) is not None
        assert pool.alloc_decode([1], [-1]) is None
        assert pool.available_size() == 0


def test_need_sort_counts_the_staged_pages_but_not_at_the_front():
    pool = make_lagging(8, 1, need_sort=True)
    pool.alloc(8)
    with no_wait(pool):
        pool.free_page_ids(on_device(5, 3))
        assert bounds(pool) == (2, 2)
        pool.backend.launches.clear()
        out = pool.alloc(1)
        assert pool.backend.launches[0] == "sort_free"
    pool.backend.run_launches()
    assert out.tolist() == [3]
    assert pool.free_pages.tolist() == [5]
    pool.free_page_ids(on_device(1))
    pool.refresh()
    pool.backend.launches.clear()
    pool.alloc(1)
    assert "sort_free" not in pool.backend.launches  # the mail says: one page at the front, and one suffices


@pytest.mark.parametrize("backend", HOSTED)
def test_stats_after_a_merge(backend):
    pool = make(backend, 16, 2, need_sort=True)
    pool.alloc(16)
    pool.free([2, 4])
    pool.merge_and_sort_free()
    found = pool.stats()
    assert (found.free_pages, found.staged_pages, found.owned_pages) == (2, 0, 6)


# ---- mail --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ran", [0, 1, 3, 8, 9, 40, 70, 73, 74, 75, 79, 80])
def test_more_pending_ops_than_are_kept_and_mail_in_their_midst(ran):
    pool = make_lagging(1000, 1)
    pool.refresh()
    with no_wait(pool):
        for i in range(80):
            pool.free(on_device(1)) if i == 40 else pool.alloc_decode(on_device(1), on_device(-1))
    assert len(pool.pool._pending) <= cupaged.pool.MOST_PENDING
    pool.backend.run_some(ran)
    at_least, at_most = bounds(pool)
    truth = 1000 - 79 + 1
    assert at_least <= truth <= at_most
    # What is certain of single ops, as far as they are not merged: each takes 0 or 1 page, so 1 is what is unknown.
    assert at_least >= 1000 - 79
    if ran == 80:
        assert (at_least, at_most) == (truth, truth)
    pool.backend.run_launches()
    assert bounds(pool) == (truth, truth)
    assert pool.available_size() == truth


def test_torn_mail_is_not_read():
    pool = make_lagging(100, 1)
    pool.alloc(10)
    pool.retain(on_device(1))
    assert pool.stats().free_pages == 90
    mail = pool.backend.mailbox
    old = mail.copy()
    pool.free_page_ids(on_device(2, 3, 50))  # with an error, so that more words differ
    pool.alloc_decode(on_device(1, 1, 1), on_device(-1, -1, -1))
    before = bounds(pool)
    pool.backend.run_launches()
    new = mail.copy()
    rng = np.random.default_rng(3)
    for _ in range(200):
        arrived = rng.random(mail.size) < rng.choice([0.1, 0.5, 0.9])
        arrived[rng.integers(5)] = False  # what the host looks at is not whole
        mail[:] = np.where(arrived, new, old)
        assert bounds(pool) == before
        assert elsewhere(pool.available_at_least) <= 89
        assert elsewhere(pool.available_size) == 90
        assert elsewhere(pool.stats).free_pages == 90
    mail[:] = new
    assert bounds(pool) == (89, 89)
    with pytest.raises(cupaged.DoubleFreeError) as caught:
        pool.check()
    assert (caught.value.index, caught.value.value) == (2, 50)


@pytest.mark.parametrize("reset", ["clear", "restore", "resize"])
def test_old_mail_does_not_correct_newer_bounds(reset):
    pool = make_lagging(50, 1)
    pool.alloc(10)
    state = pool.backup_state()
    pool.refresh()
    pool.alloc(30)
    pool.refresh()
    old, ops = pool.backend.mailbox.copy(), pool.stats().ops
    assert pool.available_size() == 10
    with no_wait(pool):
        if reset == "clear":
            pool.clear()
        elif reset == "resize":
            pool.resize(20)
        else:
            pool.restore_state(state)
        expected = {"clear": 50, "resize": 20, "restore": 40}[reset]
        pool.alloc(2)
        pool.backend.mailbox[:] = old  # it comes late
        pool.pool._read_mail()
        assert bounds(pool) == (expected - 2, expected - 2)
        assert pool.available_size() == expected - 2
    assert pool.stats().ops > ops
    assert pool.available_size() == expected - 2


def test_ops_and_error_numbers_only_grow():
    pool = make_lagging(8, 1)
    state = pool.backup_state()
    before = pool.stats().ops
    pool.restore_state(state)
    pool.clear()
    pool.free_page_ids(on_device(3))
    with pytest.raises(cupaged.DoubleFreeError) as caught:
        pool.check()
    assert caught.value.op == before + 3
    assert pool.stats().ops == before + 3


# ---- threads -----------------------------------------------------------------------------------------------------


def elsewhere(function):
    found: list = []

    def call():
        try:
            found.append(function())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(2)
    assert not thread.is_alive()
    return found[0]


def test_other_threads_read_the_last_known_figures_without_a_wait():
    pool = make_lagging(100, 1)
    pool.alloc(10)
    pool.refresh()
    with no_wait(pool):
        pool.alloc_decode(on_device(*[1] * 5), on_device(*[-1] * 5))
        queued = len(pool.backend.queue_of_launches)
        assert elsewhere(pool.available_size) == 90
        assert elsewhere(pool.available_at_least) == 85
        assert elsewhere(pool.stats).free_pages == 90
        assert elsewhere(pool.check) is None
        assert "85 slots free" in elsewhere(lambda: repr(pool))
        assert len(pool.backend.queue_of_launches) == queued
    pool.free(on_device(99))
    pool.backend.run_launches()
    assert elsewhere(pool.available_size) == 85


@contextlib.contextmanager
def another_thread_changes(pool):
    """While a `clear` in another thread is stuck in its launch."""
    inside, go_on = threading.Event(), threading.Event()

    def slow_launch(*args):
        inside.set()
        go_on.wait(10)

    with mock.patch.object(pool.backend, "clear", slow_launch):
        thread = threading.Thread(target=pool.clear)
        thread.start()
        assert inside.wait(10)
        try:
            yield
        finally:
            go_on.set()
            thread.join()


@pytest.mark.parametrize("name", ["alloc", "alloc_extend", "alloc_decode", "free", "retain", "clear", "refresh"])
def test_calls_that_overlap_raise_and_change_nothing(name):
    pool = make_lagging(64, 4)
    call = {
        "alloc": lambda: pool.alloc(4),
        "alloc_extend": lambda: pool.alloc_extend([0], [1], [-1], 1),
        "alloc_decode": lambda: pool.alloc_decode([1], [-1]),
        "free": lambda: pool.free([4]),
        "retain": lambda: pool.retain([1]),
        "clear": lambda: pool.clear(),
        "refresh": lambda: pool.refresh(),
    }[name]
    with another_thread_changes(pool):
        op = pool.pool._op
        with pytest.raises(cupaged.ConcurrentCallError, match="serialise"):
            call()
        assert pool.pool._op == op
    pool.clear()
    call()


def test_the_free_list_is_not_read_while_a_call_changes_it():
    pool = make("numba", 16, 1)
    with another_thread_changes(pool):
        for read in (pool.check_integrity, pool.pool.free_order, pool.pool.snapshot):
            with pytest.raises(cupaged.ConcurrentCallError, match="at rest"):
                read()
    pool.check_integrity()


def test_a_call_waits_for_a_reader_in_another_thread():
    pool = make("numba", 16, 1)
    inside, go_on, order = threading.Event(), threading.Event(), []
    snapshot = pool.backend.snapshot

    def slow_snapshot():
        inside.set()
        go_on.wait(10)
        order.append("read")
        return snapshot()

    with mock.patch.object(pool.backend, "snapshot", slow_snapshot):
        thread = threading.Thread(target=pool.check_integrity)
        thread.start()
        assert inside.wait(10)
        threading.Timer(0.1, go_on.set).start()
        pool.alloc(1)
        order.append("changed")
        thread.join()
    assert order == ["read", "changed"]


def test_a_call_from_inside_a_call_raises_and_the_outer_one_ends_well():
    pool = make("numba", 16, 1)

    class Nasty:
        def __array__(self, dtype=None, copy=None):
            pool.alloc(1)
            return np.array([1])

    with pytest.raises(cupaged.ConcurrentCallError):
        pool.alloc_decode(Nasty(), [-1])
    assert pool.alloc(1).tolist() == [1]


def test_threads_that_take_turns_lose_nothing():
    pool = make("numba", 256, 1)
    lock, failures = threading.Lock(), []

    def work(seed):
        rng = np.random.default_rng(seed)
        mine: list[int] = []
        for _ in range(150):
            with lock:
                if rng.integers(2) and mine:
                    pool.free(mine)
                    mine = []
                else:
                    slots = pool.alloc(int(rng.integers(1, 20)))
                    if slots is not None:
                        mine += slots.tolist()
            if len(set(mine)) != len(mine):
                failures.append(mine)
        with lock:
            pool.free(mine)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    pool.check()
    pool.check_integrity()
    assert pool.available_size() == 256


def test_threads_that_do_not_take_turns_get_an_error_or_a_result():
    pool = make("numba", 4096, 1)
    taken: list[list[int]] = [[] for _ in range(4)]

    def work(i):
        for _ in range(300):
            with contextlib.suppress(cupaged.ConcurrentCallError):
                taken[i] += pool.alloc(2).tolist()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    every = [slot for slots in taken for slot in slots]
    assert len(every) == len(set(every))
    pool.check_integrity()
    assert pool.available_size() == 4096 - len(every)


def test_copies_are_refused():
    pool = make("numba", 16, 1)
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError):
            copied(pool)


# ---- waits -------------------------------------------------------------------------------------------------------


def test_a_stuck_device_is_told_and_the_lock_released(short_limit):
    pool = make_lagging(4, 1)
    pool.alloc(4)
    pool.free(on_device(1, 2))
    with mock.patch.object(pool.backend, "poll"):
        for call in (pool.available_size, lambda: pool.alloc(2), pool.check, pool.stats, pool.refresh):
            with pytest.raises(cupaged.DeviceTimeoutError, match="has not finished op"):
                call()
            assert not pool.pool._lock.locked()
        assert pool.available_at_least() == 1
    assert pool.available_size() == 2


def test_a_failed_device_raises_its_own_error():
    pool = make_lagging(4, 1)
    pool.alloc(4)
    pool.free(on_device(1, 2))
    with mock.patch.object(pool.backend, "poll", side_effect=OSError("illegal address")), pytest.raises(OSError):
        pool.alloc(2)
    assert not pool.pool._lock.locked()


@pytest.mark.parametrize("name", ["numba", "lagging"])
def test_a_call_whose_launch_failed_leaves_nothing_to_wait_for(name, short_limit):
    pool = make_lagging(16, 1) if name == "lagging" else make("numba", 16, 1)
    with (
        mock.patch.object(pool.backend, "backup", side_effect=MemoryError("out of memory")),
        pytest.raises(MemoryError),
    ):
        pool.backup_state()
    pool.check()
    assert pool.stats().free_pages == 16
    assert pool.alloc(16) is not None


@pytest.mark.parametrize("call", ["available_size", "check", "stats", "check_integrity", "free_pages", "refresh"])
def test_the_callers_device_is_current_afterwards(call):
    pool = make_lagging(16, 1)
    pool.alloc_decode(on_device(1), on_device(-1))
    pool.free(on_device(1))
    pool.backend.current = 1
    pool.free_pages if call == "free_pages" else getattr(pool, call)()
    assert pool.backend.current == 1


# ---- recorded errors ---------------------------------------------------------------------------------------------


def test_an_error_is_raised_once_by_the_next_call_that_reads_of_it():
    pool = make_lagging(16, 1)
    pool.free_page_ids(on_device(7))
    pool.alloc(1)  # its mail has not come: nothing to tell
    pool.backend.run_launches()
    with pytest.raises(cupaged.DoubleFreeError) as caught:
        pool.alloc(1)
    error = caught.value
    assert (error.op, error.kind, error.index, error.value) == (2, "free_page_ids", 0, 7)
    assert "op 2, free_page_ids(), index 0" in str(error)
    pool.alloc(1)
    pool.check()
    assert pool.available_size() == 14
    pool.retain(on_device(1, 2, 16))
    with pytest.raises(cupaged.FreePageError) as caught:
        pool.check()
    assert (caught.value.kind, caught.value.index, caught.value.value) == ("retain", 2, 16)
    pool.check()
    assert pool.stats().errors == 2


@pytest.mark.parametrize("backend", HOSTED)
def test_the_first_error_is_the_one_that_is_told(backend):
    pool = make(backend, 16, 2)
    pool.alloc(4)
    pool.free([4, 1000, 4, 8, 14])
    with pytest.raises(cupaged.OutOfRangeError) as caught:
        pool.check()
    assert (caught.value.index, caught.value.value, caught.value.kind) == (1, 1000, "free")
    assert pool.free_pages.tolist() == [2, 3, 4, 5, 6, 7, 8]
    pool.free_page_ids([1, 1, -5])
    with pytest.raises(cupaged.DoubleFreeError) as caught:
        pool.check()
    assert (caught.value.index, caught.value.value, caught.value.kind) == (1, 1, "free_page_ids")
    assert pool.free_pages.tolist() == list(range(1, 9))


@pytest.mark.parametrize("backend", HOSTED)
def test_deferred_errors_are_logged_counted_and_raised_by_check_only(backend, caplog):
    pool = make(backend, 16, 1, errors="defer")
    with caplog.at_level(logging.ERROR, "cupaged"):
        pool.free([3])
        assert pool.alloc(1).tolist() == [1]
        pool.retain([9])
        pool.alloc(1)
    assert len(caplog.records) == 2
    assert "free(), index 0" in caplog.records[0].message
    assert pool.stats().errors == 2
    with pytest.raises(cupaged.DoubleFreeError):
        pool.check()
    pool.check()


@pytest.mark.parametrize("backend", HOSTED)
def test_an_earlier_error_does_not_lose_a_groups_frees(backend):
    pool = make(backend, 16, 1)
    pool.alloc(16)
    pool.free_group_begin()
    pool.free([1, 2, 3])
    pool.retain([77])
    with pytest.raises(cupaged.OutOfRangeError):
        pool.free_group_end()
    with contextlib.suppress(cupaged.DeviceError):
        pool.free_group_end()
    assert pool.available_size() == 3
    pool.free_group_begin()
    pool.free_group_end()


@pytest.mark.parametrize("backend", HOSTED)
def test_an_exception_inside_a_group_still_frees_and_ends_it(backend):
    pool = make(backend, 16, 1)
    pool.alloc(16)

    def end_early():
        with pool.free_group():
            pool.free([1, 2])
            raise KeyError("x")

    with pytest.raises(KeyError):
        end_early()
    assert pool.available_size() == 2
    with pool.free_group(), pytest.raises(RuntimeError, match="nest"):
        pool.free_group_begin()
    pool.free([3])
    assert pool.free_pages.tolist() == [3, 1, 2]


def test_a_group_is_dropped_by_clear_resize_and_restore():
    pool = make("numba", 16, 1)
    state = pool.backup_state()
    for drop in (pool.clear, lambda: pool.resize(16), lambda: pool.restore_state(state)):
        pool.alloc(4)
        with pool.free_group():
            pool.free([1])
            drop()
        assert pool.available_size() == 16
        pool.check()


@pytest.mark.parametrize("backend", HOSTED)
def test_debug_mode_tells_at_once(backend):
    pool = make(backend, 16, 2, debug=True)
    slots = pool.alloc_extend([0], [3], [-1], 3)
    with pytest.raises(cupaged.DoubleFreeError):
        pool.free([14])
    with pool.free_group():
        pool.free(slots)
        with pytest.raises(RuntimeError):
            pool.free_group_begin()
    with pytest.raises(cupaged.FreePageError):
        pool.alloc_decode([4], slots[-1:])
    assert pool.alloc(18) is None
    assert pool.alloc(16) is not None
    assert not pool.pool._lock.locked()


def test_integrity_names_what_is_wrong():
    def spoilt(change):
        pool = make("numba", 8, 1)
        pool.alloc(3)
        change(pool.backend)
        with pytest.raises(cupaged.IntegrityError) as caught:
            pool.check_integrity()
        return str(caught.value)

    def set_ring(b, i, page):
        b.free_ring[i] = page

    def set_refs(b, page, count):
        b.ref_count[page] = count

    def set_word(b, word, value):
        b.words[word] = value

    assert "page 5 is in the free list more than once" in spoilt(lambda b: set_ring(b, 3, 5))
    assert "page 4 is both free and owned" in spoilt(lambda b: set_refs(b, 4, 1))
    assert "page 2 is lost" in spoilt(lambda b: set_refs(b, 2, 0))
    assert "page 2 has a negative count" in spoilt(lambda b: set_refs(b, 2, -1))
    assert "page 9 in the free list is not in 1 .. 8" in spoilt(lambda b: set_ring(b, 3, 9))
    assert "1 pages have more than one owner" in spoilt(lambda b: set_refs(b, 2, 2))
    assert "counters out of range" in spoilt(lambda b: set_word(b, Word.FREE, -1))
    assert "counters out of range" in spoilt(lambda b: set_word(b, Word.HEAD, 8))


# ---- launches that fail --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HOSTED)
@pytest.mark.parametrize("ran", [False, True])
def test_a_launch_that_fails_may_have_run_or_not(name, ran):
    pool = make(name, 16, 4)
    launch = pool.backend.alloc_extend

    def fails(*arguments):
        if ran:
            launch(*arguments)
        raise KeyboardInterrupt

    with mock.patch.object(pool.backend, "alloc_extend", fails), pytest.raises(KeyboardInterrupt):
        pool.alloc_extend([0], [8], [-1], 8)
    assert pool.available_at_least() <= (8 if ran else 16)
    pool.check()  # waits for nothing that does not come
    assert pool.available_size() == (8 if ran else 16)
    assert pool.alloc(12 if ran else 20) is None
    assert pool.alloc(8).tolist() == ([12, 13, 14, 15, 16, 17, 18, 19] if ran else [4, 5, 6, 7, 8, 9, 10, 11])
    pool.check_integrity()


@pytest.mark.parametrize("name", HOSTED)
def test_a_group_whose_launch_fails_is_kept(name):
    pool = make(name, 16, 4)
    slots = pool.alloc(16)
    pool.free_group_begin()
    pool.free(slots[:4])
    pool.free_page_ids([2])
    with (
        mock.patch.object(pool.backend, "free_slots", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        pool.free_group_end()
    with (
        mock.patch.object(pool.backend, "free_pages", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        pool.free_group_end()
    assert pool.available_size() == 4
    pool.free_group_end()
    assert pool.free_pages.tolist() == [2, 1]
    pool.free_group_begin()  # the other one has ended
    pool.free_group_end()
    pool.check()
    pool.check_integrity()


# ---- captures ----------------------------------------------------------------------------------------------------


def captured_decode(size=16, **options):
    """A pool with one decode of one new page captured, and where it writes."""
    pool = make_lagging(size, 1, **options)
    pool.refresh()
    lengths, last, out = on_device(1), on_device(-1), DeviceArray(np.full(1, -77, np.int64))
    pool.backend.capture = True
    assert pool.alloc_decode(lengths, last, out=out) is out
    pool.backend.capture = False
    pool.keep = (lengths, last)
    return pool, out


def test_a_capture_moves_no_bounds_launches_nothing_and_needs_out():
    pool = make_lagging(16, 1)
    pool.refresh()
    backend = pool.backend
    backend.capture = True
    for call in (
        lambda: pool.alloc_decode(on_device(1), on_device(-1)),
        lambda: pool.alloc_extend(on_device(0), on_device(1), on_device(-1), 1),
        lambda: pool.alloc(1),
    ):
        with pytest.raises(cupaged.CaptureError, match="out="):
            call()
    out = DeviceArray(np.zeros(1, np.int64))
    with pytest.raises(cupaged.CaptureError, match="seq_lens is on the host"):
        pool.alloc_decode([1], on_device(-1), out=out)
    assert backend.recorded == []
    pool.alloc_decode(on_device(1), on_device(-1), out=out)
    pool.free_page_ids(on_device(1))
    assert [r[0] for r in backend.recorded] == ["decode_small", "free_page_ids"]
    assert (pool.pool.at_least, pool.pool.at_most) == (16, 16)
    assert not backend.queue_of_launches
    assert not pool.pool._lock.locked()


def test_a_captured_group_of_pages_that_lie_apart_allocates_nothing():
    pool = make_lagging(16, 1)
    backend = pool.backend
    with pool.free_group():
        pool.free_page_ids(on_device(16))  # makes the buffer; and is no owned page
    with pytest.raises(cupaged.DeviceError):
        pool.check()
    pool.alloc(4)
    pool.refresh()
    backend.capture = True
    with mock.patch.object(backend, "_empty", side_effect=AssertionError), pool.free_group():
        pool.free_page_ids(on_device(1))
        pool.free(on_device(3))
        pool.free_page_ids(on_device(2))
    backend.capture = False
    names = [r[0] for r in backend.recorded]
    assert names == ["queue_entries"] * 3 + ["free_slots_small", "free_page_ids", "free_page_ids"]
    backend.replay()
    assert pool.free_pages.tolist() == [1, 2, 3, *range(5, 17)]


@pytest.mark.parametrize("name", ["refresh", "check", "stats", "backup_state", "clear", "resize", "restore_state"])
def test_what_would_wait_allocate_or_move_the_bounds_raises_during_a_capture(name):
    pool = make_lagging(16, 1)
    state = pool.backup_state()
    pool.alloc(4)
    pool.refresh()
    pool.backend.capture = True
    arguments = {"resize": (8,), "restore_state": (state,)}.get(name, ())
    with pytest.raises(cupaged.CaptureError):
        getattr(pool, name)(*arguments)
    pool.backend.capture = False
    assert (pool.size, pool.num_pages) == (16, 16)
    pool.refresh()
    assert pool.available_size() == 12


@pytest.mark.parametrize("name", ["available_size", "check", "stats", "free_pages", "check_integrity"])
def test_read_only_calls_work_after_a_capture(name):
    pool, _ = captured_decode()
    pool.backend.replay()
    found = pool.free_pages if name == "free_pages" else getattr(pool, name)()
    if name == "available_size":
        assert found == 15
    if name == "stats":
        assert found.free_pages == 15
    if name == "free_pages":
        assert found.tolist() == list(range(2, 17))


def test_replays_are_unknown_until_a_refresh_or_a_note():
    pool, out = captured_decode()
    pool.alloc(4)
    pool.backend.replay()
    assert pool.available_at_least() == 0
    with no_wait(pool), pytest.raises(Waited):
        pool.alloc(1)
    pool.refresh()
    assert out.array.tolist() == [5]
    assert pool.available_at_least() == pool.available_size() == 11
    with no_wait(pool):
        assert pool.alloc(2) is not None


def test_every_replay_that_nobody_told_of_is_seen_by_the_next_call():
    pool, _ = captured_decode(size=16)
    for left in (15, 14, 13):
        pool.backend.replay()
        assert pool.available_size() == left
    for left in (12, 11):
        pool.backend.replay()
        assert pool.available_at_least() == 0
        assert pool.stats().free_pages == left
    for _ in range(8):
        pool.backend.replay()
    assert pool.alloc(4) is None
    assert pool.alloc(3) is not None
    pool.check()
    assert pool.available_size() == 0


def test_noted_replays_keep_the_bounds_true_without_a_wait():
    pool, _ = captured_decode(size=100)
    with no_wait(pool):
        for _ in range(3):
            pool.backend.replay()
            pool.note_replay(1)
        assert pool.available_at_least() == 97
        assert pool.alloc(10) is not None
        assert pool.available_at_least() == 87
    assert pool.available_size() == 87
    with no_wait(pool):
        pool.backend.replay()
        pool.note_replay(5)
        assert pool.available_at_least() == 82
        pool.alloc(1)
    pool.backend.run_launches()
    assert pool.available_at_least() == 85


def test_a_noted_replay_on_a_pool_that_captured_nothing_is_cleared_up_too():
    pool = make_lagging(16, 1)
    pool.note_replay(3)
    assert pool.available_at_least() == 13
    assert pool.available_size() == 16
    pool.note_replay(3)
    assert pool.alloc(16) is not None


def test_a_replayed_step_that_does_not_fit_is_refused_and_recorded():
    pool, out = captured_decode(size=2)
    for expected in (1, 2, 0):
        pool.backend.replay()
        pool.backend.run_launches()
        assert out.array.tolist() == [expected]
        assert int(pool.ok) == (expected > 0)
    with pytest.raises(cupaged.PoolShortError) as caught:
        pool.check()
    assert (caught.value.kind, caught.value.index, caught.value.value) == ("alloc_decode", -1, 1)
    pool.check_integrity()
    assert pool.available_size() == 0
    assert pool.stats().refusals == 1


def test_scratch_grows_in_stream_order_and_lives_while_launches_use_it():
    pool = make_lagging(64, 1, max_batch=2)
    pool.alloc_decode(on_device(1), on_device(-1))
    alive = [weakref.ref(array) for array, _ in pool.backend._scratch]
    # Cleared on the stream of the pool's own library, it could be overwritten while the op's stream uses it.
    with mock.patch.object(pool.backend, "_zeros", side_effect=AssertionError("not in the order of the op's stream")):
        padding = DeviceArray(np.zeros((1, 1), np.int32)), *(on_device(*[x] * 30) for x in (-1, 0, 0))
        pool.trim(*padding)
    assert pool.backend.max_batch >= 30
    # A queued launch has its address, and nothing orders what takes this memory next behind that launch.
    assert all(array() is not None for array in alive)
    assert pool.available_size() == 64 - 1


def test_scratch_does_not_grow_after_a_capture():
    pool, _ = captured_decode(size=64, max_batch=4)
    table = DeviceArray(np.zeros((1, 1), np.int32))
    with pytest.raises(cupaged.CaptureError, match="max_batch"):
        pool.trim(table, *(on_device(*[x] * 5) for x in (-1, 0, 0)))
    assert not pool.pool._lock.locked()
    assert pool.available_size() == 64
    assert pool.alloc_decode(on_device(*[1] * 4), on_device(*[-1] * 4)) is not None
    assert pool.available_size() == 60


# ---- memory ------------------------------------------------------------------------------------------------------


def test_at_most_24_bytes_a_page():
    pages = 1 << 20
    for pool in (make_lagging(pages, 1), make("numba", pages, 1)):
        backend = pool.backend
        if pool.device == "cpu":
            total = backend.memory()
        else:
            total = sum(a.nbytes for a in backend._keep) + sum(a.nbytes for a, _ in backend._scratch)
        assert total <= 24 * pages + 8192 * 8


# ---- states that are made up -------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", HOSTED)
def test_a_state_made_up_on_the_host_is_restored(backend):
    pool = make(backend, 24, 4, need_sort=True)
    pool.alloc(24)
    state = pool.pool.state_with(np.array([5, 2]), np.array([4, 1]))
    pool.restore_state((pool.size, pool.num_pages, state))
    assert pool.available_size() == 16
    assert [pages.tolist() for pages in pool.pool.free_order()] == [[5, 2], [4, 1]]
    pool.check_integrity()
    assert pool.alloc(4).tolist() == [20, 21, 22, 23]
    assert pool.alloc(8).tolist() == [4, 5, 6, 7, 8, 9, 10, 11]  # 1 and 2 of 1, 2 and 4, which were merged
    pool.free_page_ids([3, 6])
    pool.check()


@pytest.mark.parametrize("pages", [[2, 2], [0], [7], [-1], [2**40]])
def test_states_that_no_pool_can_have_are_refused(pages):
    pool = make("numba", 24, 4).pool
    with pytest.raises(ValueError, match=r"some of 1 \.\. 6, each named once"):
        pool.state_with(np.array(pages), np.zeros(0, np.int64))
