"""What a scheduler asks before a batch, counts of owners, and where freed pages go: values worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cupaged import KVAllocator, PagedTokenToKVPoolAllocator
from cupaged.interop import to_host
from tests.allocators import HOSTED, make


@pytest.mark.parametrize(
    ("size", "prefix", "seq", "pages"),
    [
        (64, [70, 128], [190, 260], 4),  # docs/design.md: 2 pages to 3, and 2 to 5
        (64, [0], [1], 1),
        (64, [64], [64], 0),
        (64, [63], [64], 0),
        (64, [64], [65], 1),
        (3, [2, 3, 4], [3, 4, 10], 3),  # 1 to 1, 1 to 2, 2 to 4
        (1, [5, 0], [9, 2], 6),
        (64, [0], [2**31 - 1], 2**25),
        (16, [], [], 0),
    ],
)
def test_pages_needed(size, prefix, seq, pages):
    pool = PagedTokenToKVPoolAllocator(64 * size, size, device="cpu")
    kv = KVAllocator(64 * size, "cpu", 4, 64, size)
    for dtype in (np.int32, np.int64):
        assert pool.pages_needed(np.array(prefix, dtype), np.array(seq, dtype)) == pages
    assert pool.pages_needed(prefix, seq) == kv.pages_needed(torch.tensor(prefix, dtype=torch.int64), seq) == pages
    assert pool.stats().ops == 1, "clear() of the new pool alone"


def test_fits_says_what_an_allocation_will_say():
    pool = PagedTokenToKVPoolAllocator(4 * 8, 8, device="cpu")  # 4 pages
    assert pool.fits([0, 0], [8, 24])
    assert not pool.fits([0, 0], [9, 24])
    slots = pool.alloc_extend([0, 0], [8, 17], [-1, -1], 25)
    assert slots is not None
    assert pool.fits([8, 17], [8, 24]), "the last page has room"
    assert not pool.fits([8], [9])
    assert pool.alloc_decode([9], [int(slots[7])]) is None
    pool.free_page_ids([1])
    assert pool.fits([8], [9])
    assert not pool.fits([8, 24], [9, 25])


def test_fits_counts_staged_pages_and_no_queued_frees():
    pool = PagedTokenToKVPoolAllocator(4 * 8, 8, device="cpu", need_sort=True)
    slots = pool.alloc(32)
    with pool.free_group():
        pool.free(slots[:16])
        assert not pool.fits([0], [1])
    assert pool.fits([0], [16])
    assert not pool.fits([0], [17])


def test_fits_knows_what_a_row_can_hold():
    kv = KVAllocator(64 * 16, "cpu", 4, 32, 16)  # rows of two pages
    assert kv.fits([0], [32])
    assert not kv.fits([0], [33])
    assert kv.alloc(0, 33, 0) is None


@pytest.mark.parametrize(
    ("prefix", "seq", "message"),
    [
        ([1, 2], [3], "prefix_lens and seq_lens must have one entry a request each, not 2 and 1"),
        ([3], [2], r"seq_lens\[0\] is 2, less than prefix_lens\[0\], 3"),
        ([-1], [2], r"prefix_lens\[0\] is -1"),
        ([0], [2**31], "at most 2\\*\\*31 - 1 tokens"),
    ],
)
def test_lengths_that_no_batch_can_have(prefix, seq, message):
    pool = PagedTokenToKVPoolAllocator(64, 8, device="cpu")
    for ask in (pool.pages_needed, pool.fits):
        with pytest.raises(ValueError, match=message):
            ask(prefix, seq)


@pytest.mark.parametrize("backend", HOSTED)
def test_reference_counts(backend):
    pool = make(backend, 6 * 4, 4)
    pool.alloc(4 * 4)  # pages 1 to 4
    pool.retain([2, 3, 3])
    pool.free_page_ids([4])
    asked = [3, 1, 2, 2, 4, 6, 0, 7, -1, 2**40, -(2**40)]
    expected = [3, 1, 2, 2, 0, 0, -1, -1, -1, -1, -1]
    counts = to_host(pool.reference_counts(np.array(asked)))
    assert counts.dtype == np.int32
    assert counts.tolist() == expected
    assert to_host(pool.reference_counts([])).tolist() == []
    pool.resize(4 * 4)
    assert to_host(pool.reference_counts([4, 5])).tolist() == [0, -1]


def test_reference_counts_in_the_library_and_array_of_the_caller():
    kv = KVAllocator(64, torch.device("cpu"), 2, 32, 8)
    kv.alloc(0, 9, 0)
    out = torch.full((3,), 7, dtype=torch.int32)
    assert kv.reference_counts(torch.tensor([2, 1, 3]), out=out) is out
    assert out.tolist() == [1, 1, 0]
    with pytest.raises(TypeError, match="out must be int32, not int64"):
        kv.reference_counts([1], out=np.zeros(1, np.int64))
    with pytest.raises(ValueError, match=r"shape \(2,\)"):
        kv.reference_counts([1, 2], out=np.zeros(1, np.int32))


@pytest.mark.parametrize("backend", HOSTED)
def test_pages_freed_to_the_back_are_handed_out_last(backend):
    pool = make(backend, 6 * 4, 4, freed_to="back")
    slots = to_host(pool.alloc(16))  # pages 1 to 4
    pool.free(np.concatenate([slots[12:16], slots[4:8]]))  # pages 4 and 2: a free by slot is ascending
    pool.free_page_ids([3, 1])
    assert to_host(pool.free_pages).tolist() == [5, 6, 2, 4, 3, 1]
    assert to_host(pool.alloc(12))[::4].tolist() == [20, 24, 8]
    with pool.free_group():
        pool.free(np.array([24, 8]))
        pool.free_segment(np.arange(20, 24), start_pos=0)
    assert to_host(pool.free_pages).tolist() == [4, 3, 1, 2, 6, 5]
    pool.check_integrity()


def test_freed_to_says_what_it_takes():
    with pytest.raises(ValueError, match="freed_to must be 'front' or 'back', not 'tail'"):
        PagedTokenToKVPoolAllocator(64, 8, device="cpu", freed_to="tail")
    with pytest.raises(ValueError, match="exclude each other"):
        PagedTokenToKVPoolAllocator(64, 8, device="cpu", freed_to="back", need_sort=True)
