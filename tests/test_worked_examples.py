"""Layer 1: the worked examples, by numbers computed by hand."""

from __future__ import annotations

import numpy as np
import pytest

from tests.allocators import HOSTED, make


@pytest.fixture(params=HOSTED)
def backend(request):
    return request.param


def test_two_requests_of_the_design(backend):
    # Page size 64. A has 70 tokens, pages 1 and 2: its last slot is 2 * 64 + 5. B has 128, pages 3 and 4.
    pool = make(backend, 64 * 20, 64)
    first = pool.alloc_extend([0, 0], [70, 128], [-1, -1], 198)
    assert first[69] == 133
    assert first[-1] == 4 * 64 + 63
    slots = pool.alloc_extend([70, 128], [190, 260], [133, 319], 252)
    rest_of_a = list(range(134, 192))  # 58
    new_page_of_a = list(range(5 * 64, 5 * 64 + 62))
    pages_of_b = list(range(6 * 64, 8 * 64)) + list(range(8 * 64, 8 * 64 + 4))
    assert slots.tolist() == rest_of_a + new_page_of_a + pages_of_b
    assert int(pool.ret_values) == 4 << 32 | 252
    assert pool.available_size() == (20 - 8) * 64


def test_decode_takes_a_page_exactly_at_the_boundary(backend):
    pool = make(backend, 40, 4)
    slots = pool.alloc_extend([0, 0, 0], [4, 3, 5], [-1, -1, -1], 12)
    assert slots.tolist() == [4, 5, 6, 7, 8, 9, 10, 12, 13, 14, 15, 16]
    # after this step: 5 tokens (new page 5), 4 (room in page 2), 6 (room in page 4)
    assert pool.alloc_decode([5, 4, 6], [7, 10, 16]).tolist() == [20, 11, 17]
    assert int(pool.ret_values) == 1 << 32 | 3


def test_page_size_one_and_an_odd_one(backend):
    pool = make(backend, 6, 1)
    assert pool.alloc_extend([0, 0], [2, 1], [-1, -1], 3).tolist() == [1, 2, 3]
    assert pool.alloc_decode([3], [2]).tolist() == [4]
    pool = make(backend, 9, 3)
    assert pool.alloc_extend([0], [4], [-1], 4).tolist() == [3, 4, 5, 6]
    assert pool.alloc_extend([4], [8], [6], 4).tolist() == [7, 8, 9, 10]


def test_frees_go_to_the_front_ascending(backend):
    pool = make(backend, 8 * 2, 2)
    pool.alloc(12)
    pool.free([9, 4, 9, 13, 12])  # pages 4, 2, 4, 6, 6
    assert pool.free_pages.tolist() == [2, 4, 6, 7, 8]
    pool.free_page_ids([5, 1])
    assert pool.free_pages.tolist() == [5, 1, 2, 4, 6, 7, 8]
    assert pool.alloc(4).tolist() == [10, 11, 2, 3]


def test_segment_in_the_callers_order(backend):
    pool = make(backend, 6 * 4, 4)
    slots = pool.alloc_extend([0, 0], [8, 10], [-1, -1], 18)
    pool.free_segment(slots[8 + 4 :], start_pos=4)  # pages 4 and 5 of the second request
    assert pool.free_pages.tolist() == [4, 5, 6]


def test_group_slots_as_one_set_then_page_ids_ahead(backend):
    pool = make(backend, 10 * 2, 2)
    pool.alloc(20)
    with pool.free_group():
        pool.free([2 * 7])
        pool.free_page_ids([9, 1])
        pool.free([2 * 3, 2 * 7 + 1])  # two segments share page 7
        pool.free_page_ids([4])
        assert pool.available_size() == 0
    assert pool.free_pages.tolist() == [9, 1, 4, 3, 7]
    pool.check()


def test_need_sort_merges_when_the_bound_exceeds_the_front(backend):
    pool = make(backend, 6 * 2, 2, need_sort=True)
    pool.alloc(10)
    pool.free([2 * 4, 2 * 2])
    assert pool.free_pages.tolist() == [6]
    assert pool.staged_pages.tolist() == [2, 4]
    assert pool.available_size() == 6
    assert pool.alloc(2).tolist() == [12, 13]  # one page suffices: no merge
    pool.free([13])
    assert pool.alloc(4).tolist() == [4, 5, 8, 9]
    assert pool.free_pages.tolist() == [6]
    # an extend's bound is extend_num_tokens // page_size + batch + 1 = 2 > 1, though one page would do
    pool.free([4])
    assert pool.alloc_extend([0], [1], [-1], 1).tolist() == [4]


def test_none_may_have_merged(backend):
    pool = make(backend, 4 * 2, 2, need_sort=True)
    pool.alloc(6)
    pool.free([2 * 1])
    assert pool.alloc(6) is None
    assert pool.free_pages.tolist() == [1, 4]


def test_retained_page_outlives_its_first_owner(backend):
    pool = make(backend, 4 * 2, 2)
    slots = pool.alloc(4)
    pool.retain([1])
    pool.free(slots)
    assert pool.free_pages.tolist() == [2, 3, 4]
    pool.free([3])
    assert pool.free_pages.tolist() == [1, 2, 3, 4]


def test_each_queued_call_takes_one_owner(backend):
    pool = make(backend, 4 * 2, 2)
    pool.alloc(4)
    pool.retain([1])
    with pool.free_group():
        pool.free([2, 3, 4])
        pool.free([2])
        pool.free([4])  # beyond page 2's count: no error in a group
    assert pool.free_pages.tolist() == [1, 2, 3, 4]
    pool.check()


def test_short_pool_is_none_and_changes_nothing(backend):
    pool = make(backend, 3 * 4, 4)
    slots = pool.alloc_extend([0], [5], [-1], 5)
    before = pool.free_pages.tolist()
    assert pool.alloc_extend([5, 0], [12, 5], [slots[-1], -1], 12) is None
    assert pool.alloc(8) is None
    assert pool.alloc_decode([9, 9], [slots[-1], slots[-1]]) is None
    assert pool.free_pages.tolist() == before == [3]
    assert pool.alloc_decode([6], [slots[-1]]).tolist() == [9]


def test_backup_restore_clear_resize(backend):
    pool = make(backend, 5 * 2, 2)
    pool.alloc(4)
    pool.retain([2])
    state = pool.backup_state()
    pool.free([2, 4])
    pool.alloc(6)
    pool.restore_state(state)
    assert pool.free_pages.tolist() == [3, 4, 5]
    pool.free([4])
    pool.check()
    assert pool.free_pages.tolist() == [3, 4, 5]  # page 2 still has its second owner
    pool.resize(4)
    assert (pool.size, pool.num_pages, pool.available_size()) == (4, 2, 4)
    assert pool.free_pages.tolist() == [1, 2]
    pool.restore_state(state)
    assert pool.num_pages == 5
    pool.clear()
    assert pool.free_pages.tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_dtype_out(backend, dtype):
    pool = make(backend, 64, 4, index_dtype=dtype)
    assert pool.alloc(4).dtype == np.dtype(dtype)
    assert pool.alloc_extend(np.array([0], np.int32), np.array([2]), [-1], 2).dtype == np.dtype(dtype)
