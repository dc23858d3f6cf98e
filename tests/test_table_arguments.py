"""What every call over a request table refuses before anything happens. Values worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from cupaged import KVAllocator, PagedTokenToKVPoolAllocator
from cupaged.interop import to_host
from tests.allocators import HOSTED, make

LARGE = 2**30  # slots of a page: those of page 2 begin at 2147483648, which int32 cannot hold


@pytest.mark.parametrize("backend", HOSTED)
@pytest.mark.parametrize(
    "call",
    [
        lambda pool, table: pool.decode_step(table, [0], [1]),
        lambda pool, table: pool.extend_step(table, [0], [1], [2], 1),
        lambda pool, table: pool.trim(table, [0], [2], [1]),
        lambda pool, table: pool.release(table, [0], [1]),
        lambda pool, table: pool.flashinfer_tables(table, [0], [1]),
        lambda pool, table: pool.block_table(table, [0], [1], 1),
        lambda pool, table: pool.expand_page_table(table, [0], [1], 2**29),
        lambda pool, table: pool.slot_mapping(table, [0], [0], [1], 1),
    ],
    ids=["decode_step", "extend_step", "trim", "release", "flashinfer", "block_table", "expand", "slot_mapping"],
)
def test_slots_that_an_int32_table_cannot_hold(backend, call):
    """A cell of 1 stands for slot 1 as well as for slot 2**32 + 1 of a larger pool: no call may guess."""
    pool = make(backend, 3 * LARGE, LARGE)
    pool.alloc_extend([0], [1], [-1], 1)
    with pytest.raises(ValueError, match="slots up to 4294967295, which an int32 request table cannot hold"):
        call(pool, np.ones((1, 4), np.int32))
    assert pool.available_size() == 2 * LARGE
    pool.check()


@pytest.mark.parametrize("backend", HOSTED)
def test_a_required_array_that_is_none_selects_no_other_op(backend):
    pool = make(backend, 64, 16)
    table = np.zeros((1, 64), np.int32)
    slots = pool.extend_step(table, [0], [0], [48], 48)
    assert slots is not None
    with pytest.raises(TypeError, match="new_seq_lens must be an array or a list of integers, not None"):
        pool.trim(table, [0], [40], None)
    with pytest.raises(TypeError, match="prefix_lens must be an array or a list of integers, not None"):
        pool.extend_step(table, [0], None, [49], 1)
    for call in (
        lambda: pool.decode_step(table, None, [48]),
        lambda: pool.decode_step(table, [0], None),
        lambda: pool.decode_step(None, [0], [48]),
        lambda: pool.trim(table, [0], None, [1]),
        lambda: pool.release(table, [0], None),
        lambda: pool.release(None, [0], [48]),
        lambda: pool.slot_mapping(table, [0], None, [48], 48),
        lambda: pool.block_table(table, None, [48], 3),
        lambda: pool.alloc_extend([0], [1], None, 1),
        lambda: pool.alloc_decode(None, [16]),
        lambda: pool.free(None),
        lambda: pool.free_page_ids(None),
        lambda: pool.retain(None),
    ):
        with pytest.raises((TypeError, ValueError), match=r"table|req_pool_indices|lens|loc|index|page_ids"):
            call()
    assert pool.available_size() == 16
    assert pool.alloc(64) is None
    assert to_host(pool.free_pages).tolist() == [4]


@pytest.mark.parametrize("paged", [False, True], ids=["slots", "pages"])
@pytest.mark.parametrize("rows", [[1, 2, 1], [-1, 2, 2, -1]], ids=["apart", "beside padding"])
def test_a_row_that_comes_twice_raises_and_takes_nothing(paged, rows):
    if paged:
        pool = KVAllocator(8 * 4, "cpu", 4, 16, 4)
        table = pool.req_to_page
    else:
        pool, table = PagedTokenToKVPoolAllocator(7 * 4, 4, device="cpu"), np.zeros((4, 16), np.int32)
    before, n = pool.available_size(), len(rows)
    twice = f"req_pool_indices names row {rows[1] if -1 in rows else 1} twice"
    with pytest.raises(ValueError, match=twice):
        pool.decode_step(table, rows, [0] * n)
    with pytest.raises(ValueError, match=twice):
        pool.extend_step(table, rows, [0] * n, [1] * n, n)
    assert pool.available_size() == before
    assert pool.stats().ops == 1
    assert to_host(pool.decode_step(table, [-1, 2, 1, -1], [0] * 4)).tolist() == [0, 4, 8, 0], "padding repeats"
