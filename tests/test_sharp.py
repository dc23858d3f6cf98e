"""Values worked out by hand where a fault hides from small numbers: far slots, many pages, seldom paths.

`tests/mutants` breaks the sources systematically; what nothing else notices is caught here.
"""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest

import cupaged
from cupaged import PagedTokenToKVPoolAllocator, backends
from cupaged.backends.numba_cpu import NumbaBackend
from cupaged.backends.reference import ReferenceBackend
from cupaged.interop import to_host
from cupaged.layout import Breach, Kind, Where, Word
from tests.host_backend import variant
from tests.operations import Runner, options, state

CUDA = {
    "cuda-one-block": variant("ascending", cluster=1),
    "cuda-clusters": variant("random", small=False),
    "cuda-two-launches": variant("descending", small=False, cluster=0, tiles=False),
}
CONTESTANTS = {"reference": ReferenceBackend, "numba": NumbaBackend, **CUDA}


@pytest.fixture(params=CONTESTANTS)
def contestant(request):
    return CONTESTANTS[request.param]


def make(contestant, size: int, page_size: int, **options) -> PagedTokenToKVPoolAllocator:
    with mock.patch.object(backends, "pick", return_value=contestant):
        return PagedTokenToKVPoolAllocator(size, page_size, **options)


def free_only(pool, free, staged=()) -> None:
    """All other pages have one owner."""
    state = pool.pool.state_with(np.array(free, np.int64), np.array(staged, np.int64))
    pool.restore_state((pool.size, pool.num_pages, state))


def runner(contestant, page_size: int, **fixed) -> Runner:
    """A backend for operations by hand, without an allocator that would refuse them first."""
    chosen = {"num_pages": 8, "strict": True, "need_sort": False, "refused_slot": -1} | fixed
    backend = contestant(**options(np.random.default_rng(0), page_size, **chosen))
    backend.native_library = backend.library
    return Runner(backend)


def run(player: Runner, kind: Kind, quiet: int = 0, **given) -> list[int] | None:
    arrays = {key: np.array(x, np.int64) if isinstance(x, list) else x for key, x in given.items()}
    out = player.run(kind, arrays, quiet, False, 1)
    return None if out is None else to_host(out).tolist()


# ---- slots past 2^32 ---------------------------------------------------------------------------------------------

# Page 32769 begins at 2^32 + 2^17 where a page has 2^17 slots: whatever is cut to 32 bits is page 1.
FAR = 32769


@pytest.mark.parametrize("size", [2**17, 2**17 + 1])
def test_slots_that_32_bits_do_not_hold(contestant, size):
    pool = make(contestant, (FAR + 4) * size, size)
    free_only(pool, [FAR, FAR + 1, FAR + 2, FAR + 3])
    first = FAR * size
    assert pool.alloc_extend([0], [3], [-1], 3).tolist() == [first, first + 1, first + 2]
    assert pool.alloc_decode([4, 1], [first + 2, -1]).tolist() == [first + 3, first + size]
    assert pool.alloc_extend([4, 1], [6, 1], [first + 3, first + size], 2).tolist() == [first + 4, first + 5]
    whole = pool.alloc(size)
    assert (whole[0], whole[-1]) == (first + 2 * size, first + 3 * size - 1)
    table = np.array([[FAR, 7]], np.int32)
    with mock.patch.object(pool, "_paged_table", True):
        found = pool.slot_mapping(table, [0], [size - 1], [size], 1)
    assert to_host(found).tolist() == [first + size - 1]
    assert pool.available_size() == size
    pool.free([first + size - 1, first + size])
    assert pool.free_pages.tolist() == [FAR, FAR + 1, FAR + 3]
    pool.free_segment(whole, start_pos=0)
    assert pool.free_pages.tolist() == [FAR + 2, FAR, FAR + 1, FAR + 3]
    pool.check_integrity()
    pool.alloc_decode([2], [size])  # in page 1, where page FAR lies in 32 bits
    pool.alloc_decode([2], [first + 2**32])
    with pytest.raises(cupaged.OutOfRangeError, match=str(first + 2**32)):
        pool.check()


@pytest.mark.parametrize("size", [2**17, 2**17 + 1])
def test_steps_over_pages_whose_slots_32_bits_do_not_hold(contestant, size):
    player = runner(contestant, size, num_pages=FAR + 1, index_dtype=np.dtype(np.int64))
    table = np.array([[FAR, 5], [FAR - 1, 6]], np.int32)
    player.take_tables([(table, None), (table, None)])
    run(player, Kind.ALLOC, pages=0)
    pool = player.backend
    ring, refs = np.zeros(FAR + 1, np.int32), np.ones(FAR + 2, np.int32)
    ring[0], refs[FAR + 1] = FAR + 1, 0
    player.saved = np.concatenate([ring, refs, np.array([0, 1, 0, 0, FAR + 1], np.int32)])
    run(player, Kind.RESTORE)
    first = FAR * size
    step = {"which": 1, "rows": [0, 1], "prefix": None}
    assert run(player, Kind.DECODE_STEP, seq=[2, size], num_tokens=2, **step) == [first + 2, first + size]
    assert to_host(player.tables[1]).tolist() == [[FAR, 5], [FAR - 1, FAR + 1]]
    step["prefix"] = [3, size + 1]
    assert run(player, Kind.EXTEND_STEP, seq=[5, size + 2], num_tokens=3, **step) == [
        *(first + 3, first + 4),
        first + size + 1,
    ]
    assert state(pool)["error"] == []
    run(player, Kind.TRIM, which=1, rows=[1], keep=[size], seq=[size + 2], where=Where.FRONT)
    assert state(pool)["order"] == [FAR + 1]


def test_a_block_table_whose_columns_begin_past_2_32(contestant):
    pool = make(contestant, 8 * 2**30, 2**30)
    table = np.array([[1, 2, 3, 4, 5]], np.int32)
    with mock.patch.object(pool, "_paged_table", True):
        found = pool.block_table(table, [0], [2**31 - 1], 5)
    assert to_host(found).tolist() == [[1, 2, 0, 0, 0]]  # column 4 begins at token 2^32


# ---- many pages --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["numba", "cuda-one-block"])
def test_slots_freed_on_both_sides_of_page_2_20(name):
    """The marks of 2^20 pages are what a warp looks through at once."""
    far = 2**20
    pages = [3, 1024, 32768, far - 1, far, far + 1, far + 33000]
    pool = make(CONTESTANTS[name], far + 40000, 1)
    free_only(pool, [2])
    pool.free(pages[::-1])
    assert pool.free_pages.tolist() == [*pages, 2]
    pool.free_page_ids([far + 39999])
    assert pool.alloc(3).tolist() == [far + 39999, 3, 1024]
    pool.check_integrity()
    slots = np.concatenate([np.arange(far + 50, far + 20050), [far + 39999]])  # more than one block frees
    pool.free(slots)
    assert pool.available_size() == 6 + 20001
    assert pool.free_pages[: slots.size].tolist() == slots.tolist()
    pool.check_integrity()


# ---- tiles of a large batch --------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [4, 5])
def test_tiles_that_begin_behind_requests_without_tokens(contestant, tokens):
    """Requests 1 to 4,500 take nothing; 300 at the end a page each, or one and a bit."""
    n, some, pages = 4800, 300, -(-tokens // 4)
    seq = np.zeros(n, np.int64)
    seq[0] = seq[-some:] = tokens
    pool = make(contestant, (some + 1) * pages * 4, 4)
    expected = [(1 + pages * i) * 4 + j for i in range(some + 1) for j in range(tokens)]
    zeros = np.zeros(n, np.int64)
    assert pool.alloc_extend(zeros, seq, zeros - 1, len(expected)).tolist() == expected
    assert pool.available_size() == 0
    pool.clear()
    table = np.zeros((n, 8), np.int32)
    lent = table if pool.backend.synchronous else pool.backend.lend(table)[0]
    assert pool.extend_step(lent, np.arange(n), zeros, seq, len(expected)).tolist() == expected
    assert to_host(lent)[[0, *range(n - some, n)], :tokens].ravel().tolist() == expected
    assert not to_host(lent)[1 : n - some].any()


def test_the_lowest_of_two_breaches_that_one_thread_finds(contestant):
    """A thread of 1,024 plans requests 7 and 1031; the second one is wrong in another way."""
    n = 2500
    player = runner(contestant, 4, num_pages=n)
    seq = [4] * n
    seq[7], seq[1031] = -3, 2**31
    out = run(player, Kind.EXTEND, prefix=[0] * n, seq=seq, last=[-1] * n, num_tokens=4 * n - 8)
    assert set(out) == {-1}
    assert state(player.backend)["error"][2:] == [7, -3]
    assert state(player.backend)["FREE"] == n


@pytest.mark.parametrize("n", [600, 1030, 9000])
def test_padding_whose_lengths_are_garbage(contestant, n):
    player = runner(contestant, 4)
    table = np.full((2, 8), 9, np.int32)
    player.take_tables([(table, None), (table, None)])
    rows, seq = [-1] * n, [(-5, 2**31, 2**40, -(2**63), 2**63 - 1)[i % 5] for i in range(n)]
    rows[n - 1], seq[n - 1] = 1, 0
    given = {"which": 0, "rows": rows, "prefix": None, "seq": seq, "num_tokens": n}
    assert run(player, Kind.DECODE_STEP, **given) == [0] * (n - 1) + [4]
    assert to_host(player.tables[0]).tolist() == [[9] * 8, [4] + [9] * 7]
    assert state(player.backend)["error"] == []


# ---- what one op must not leave to the next ------------------------------------------------------------------------


def test_clear_forgets_a_group_that_was_cut_off(contestant):
    player = runner(contestant, 4)
    run(player, Kind.ALLOC, pages=8)
    player._begin(Kind.FREE, 0)
    player.backend.free_slots(player.backend.vector(np.array([4, 8]), "x"), False, 0, Where.FRONT)  # and no next call
    run(player, Kind.CLEAR, num_pages=8)
    run(player, Kind.ALLOC, pages=8)
    run(player, Kind.FREE, groups=[np.array([20])], where=Where.FRONT)
    assert state(player.backend)["order"] == [5]
    assert state(player.backend)["error"] == []


def test_a_lenient_pool_grants_nothing_into_a_page_that_it_should_not(contestant):
    """Misaligned last slots inside their page, which is what a lenient pool carries out, but nobody's or shared."""
    player = runner(contestant, 8, strict=False)
    run(player, Kind.ALLOC, pages=2)
    run(player, Kind.RETAIN, entries=np.array([2]))
    for page, breach in ((3, Breach.FREE_PAGE), (2, Breach.SHARED_PAGE)):
        given = {"seq": [7], "last": [8 * page + 1]}
        assert run(player, Kind.DECODE, **given) == [-1]
        assert state(player.backend)["error"][0] == Kind.DECODE << 8 | breach
        player.ack = state(player.backend)["error"][1]
        assert run(player, Kind.EXTEND, prefix=[6], num_tokens=1, **given) == [-1]
        assert state(player.backend)["error"][0] == Kind.EXTEND << 8 | breach
        player.ack = state(player.backend)["error"][1]
    assert run(player, Kind.DECODE, seq=[7], last=[9]) == [10]  # page 1 has one owner
    assert state(player.backend)["error"][0] == Kind.DECODE << 8 | Breach.MISALIGNED


def test_staged_pages_are_merged_only_for_more_than_the_front_has(contestant):
    player = runner(contestant, 1, need_sort=True)
    run(player, Kind.ALLOC, pages=8)
    run(player, Kind.FREE_PAGES, entries=np.array([7, 5]), divisor=1, where=Where.FRONT)
    run(player, Kind.FREE_PAGES, entries=np.array([1]), divisor=1, where=Where.STAGE)
    run(player, Kind.REFRESH, sort=2)
    assert [state(player.backend)[word] for word in ("FREE", "STAGED")] == [2, 1]
    assert state(player.backend)["order"] == [7, 5, 1]
    run(player, Kind.REFRESH, sort=3)
    assert [state(player.backend)[word] for word in ("FREE", "STAGED")] == [3, 0]
    assert state(player.backend)["order"] == [1, 5, 7]
    assert to_host(player.backend.words)[Word.HEAD] == 0


# ---- what the host believes --------------------------------------------------------------------------------------


def test_a_failed_launch_takes_its_pages_off_the_front_too():
    """It may have run, so a merge must be asked for as if it had."""
    pool = make(NumbaBackend, 8, 1, need_sort=True)
    pool.alloc(8)
    free_only(pool, [1, 2, 3], staged=[8])
    pool.refresh()
    pool.alloc(1)
    assert pool.pool.front_at_least == 2
    with mock.patch.object(pool.backend, "alloc_pages", side_effect=OSError), pytest.raises(OSError):
        pool.alloc(2)
    assert pool.pool.front_at_least == 0


@pytest.mark.parametrize("size", [1, 2])
def test_a_page_that_two_frees_of_a_group_name_is_counted_once(size):
    """Without `num_pages` the host is sure of one page of all that a group frees by slot."""
    pool = make(variant("ascending", delayed=True), 8 * size, size)
    pool.alloc(8 * size)
    pool.refresh()
    with pool.free_group():
        pool.free([3 * size])
        pool.free([4 * size - 1])
    assert (pool.pool._low, pool.pool.at_most) == (1, 2)
    assert pool.available_size() == size
    pool.refresh()
    with pool.free_group():
        pool.free([4 * size], num_pages=1)
        pool.free([5 * size - 1])
    assert (pool.pool._low, pool.pool.at_most) == (2, 3)
    assert pool.alloc(2 * size) is not None
    assert pool.alloc(size) is None
