"""KVAllocator: every member of its contract by numbers worked out by hand, and what it must refuse."""

from __future__ import annotations

import itertools
import logging
import threading
from unittest import mock

import numpy as np
import pytest
import torch

import cupaged
from cupaged import KVAllocator, backends
from tests.allocators import _CUDA, HOSTED
from tests.host_backend import DeviceArray


def make_kv(
    backend: str, pages: int = 9, page_size: int = 4, rows: int = 4, columns: int = 5, **options
) -> KVAllocator:
    """A KVAllocator with pages 1 .. `pages`, whose rows hold `columns` pages."""
    size = (pages + 1) * page_size
    given = ("cpu", rows, columns * page_size, page_size)
    if backend in _CUDA:
        with mock.patch.object(backends, "pick", return_value=_CUDA[backend]):
            return KVAllocator(size, *given, **options)
    return KVAllocator(size, *given, backend=backend, **options)


@pytest.fixture(params=HOSTED)
def backend(request):
    return request.param


@pytest.fixture
def kv(backend):
    return make_kv(backend)


def on_device(kv: KVAllocator, values, dtype=np.int64):
    """An array whose elements the host cannot read where the backend is one of a device."""
    array = np.array(values, dtype)
    return DeviceArray(array) if kv._on_gpu else array


def refs_of(kv: KVAllocator) -> list[int]:
    return kv.pool.snapshot()[1].tolist()


def everything(kv: KVAllocator) -> tuple:
    """All that a refused call must leave as it is."""
    ring = [pages.tolist() for pages in kv.pool.free_order()]
    tables = kv.req_to_page.tolist(), kv.token_slot_refs.tolist()
    return ring, refs_of(kv), tables, kv.num_pages.tolist(), kv.last_slot.tolist()


def error_of(kv: KVAllocator) -> tuple | None:
    try:
        kv.check()
    except cupaged.DeviceError as error:
        return type(error).__name__, error.kind, error.index, error.value
    return None


# ---- the members, by hand ------------------------------------------------------------------------------------------


def test_what_it_is_made_of(kv):
    assert (kv.size, kv.page_size, kv.max_context_len, kv.max_page_num, kv.max_batch_size) == (40, 4, 20, 5, 4)
    assert kv.available_size() == 9  # pages, and page 0 is none of them
    assert kv.available_at_least() == 9
    assert kv.free_slots.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert kv.num_pages.tolist() == [0, 0, 0, 0]
    assert kv.last_slot.tolist() == [3, 3, 3, 3]
    assert kv.req_to_page.shape == (4, 5)
    assert kv.token_slot_refs.shape == (40,)
    for array in (kv.req_to_page, kv.token_slot_refs, kv.req_to_page_cpu, kv.free_slots, kv.alloc(0, 1, 0)):
        assert array.dtype == np.int32


def test_size_that_fills_no_page(backend):
    # 43 // 4 - 1 = 9 pages; the spare 3 slots are nobody's. 18 tokens need 5 columns.
    with mock.patch.object(backends, "pick", return_value=_CUDA.get(backend) or backends.pick(backend, "cpu")):
        kv = KVAllocator(43, "cpu", 2, 18, 4, backend="auto" if backend in _CUDA else backend)
    assert (kv.available_size(), kv.max_page_num, kv.token_slot_refs.shape) == (9, 5, (43,))


def test_alloc_fills_the_last_page_then_takes_new_ones(kv):
    assert kv.alloc(2, 3, 0).tolist() == [4, 5, 6]
    assert kv.alloc(0, 2, 0).tolist() == [8, 9]
    # Row 2 has room for one token in page 1, then takes page 3 whole, and begins page 4.
    assert kv.alloc(2, 6, 3).tolist() == [7, 12, 13, 14, 15, 16]
    assert kv.req_to_page.tolist() == [[2, 0, 0, 0, 0], [0] * 5, [1, 3, 4, 0, 0], [0] * 5]
    assert kv.num_pages.tolist() == [1, 0, 3, 0]
    assert kv.last_slot.tolist() == [1, 3, 0, 3]  # 2 tokens: offset 1; 9 tokens: offset 0
    assert kv.available_size() == 5
    # up to the page's end: nothing is left, so the next token opens a page
    assert kv.alloc(2, 3, 9).tolist() == [17, 18, 19]
    assert kv.last_slot[2] == 3
    assert kv.alloc(2, 1, 12).tolist() == [20]
    kv.check()
    kv.check_integrity()


def test_alloc_from_nothing_does_not_read_the_rows_last_column(kv):
    # The implementation before took page alloced_len // page_size - 1 = -1, the last column, for the last page.
    kv.req_to_page[0] = [0, 0, 0, 0, 7]
    assert kv.alloc(0, 2, 0).tolist() == [4, 5]
    assert kv.req_to_page[0].tolist() == [1, 0, 0, 0, 7]


def test_alloc_behind_a_cached_prefix(kv):
    kv.alloc(0, 8, 0)  # pages 1 and 2
    kv.free_extra_pages_not_cached(0, 8, 8)  # the cache has both
    kv.retain([1, 2])
    kv.req_to_page[1, :2] = [1, 2]
    assert kv.alloc(1, 2, 8).tolist() == [12, 13]
    assert kv.req_to_page[1].tolist() == [1, 2, 3, 0, 0]
    assert kv.num_pages.tolist() == [0, 3, 0, 0]
    kv.free_req_cache(1, 10)
    kv.free_group_end()
    assert kv.free_slots.tolist() == [4, 5, 6, 7, 8, 9, 3]
    assert refs_of(kv)[1:4] == [1, 1, 0]


def test_nothing_needed(kv):
    before = everything(kv)
    assert kv.alloc(0, 0, 0).shape == (0,)
    assert kv.alloc(0, 0, 5).shape == (0,)
    slots, offsets = kv.alloc_batch([1, 2], [0, 0], [0, 9])
    assert (slots.shape, offsets.tolist()) == ((0,), [0, 0, 0])
    slots, offsets = kv.alloc_batch([], [], [])
    assert (slots.shape, offsets.tolist()) == ((0,), [0])
    assert everything(kv) == before


def test_none_exactly_when_short(kv):
    kv.alloc(0, 20, 0)
    kv.alloc(1, 11, 0)  # pages 6, 7, 8; one page is left, and a slot in page 8
    before = everything(kv)
    assert kv.alloc(2, 5, 0) is None
    assert kv.alloc(1, 6, 11) is None
    assert kv.alloc_batch([2, 3], [1, 1], [0, 0]) is None
    assert everything(kv) == before
    assert kv.alloc(1, 5, 11).tolist() == [35, 36, 37, 38, 39]
    assert kv.available_size() == 0
    assert kv.alloc(2, 1, 0) is None
    kv.check()


def test_a_full_row_is_told_once(kv, caplog):
    kv.alloc(0, 19, 0)
    before = everything(kv)
    with caplog.at_level(logging.WARNING, "cupaged"):
        assert kv.alloc(0, 2, 19) is None
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "row 0" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING, "cupaged"):
        assert kv.alloc_batch([1, 0, 2], [1, 2, 1], [0, 19, 0]) is None
    assert len(caplog.records) == 1
    assert "row 0" in caplog.text
    caplog.clear()
    assert kv.alloc(0, 10**30, 0) is None
    assert everything(kv) == before
    caplog.clear()
    assert kv.alloc(0, 1, 19).tolist() == [23]
    assert not caplog.records


def test_a_short_pool_gives_no_warning(kv, caplog):
    kv.alloc(0, 20, 0), kv.alloc(1, 16, 0)
    assert kv.alloc(2, 1, 0) is None
    assert not caplog.records


def test_alloc_batch_equals_single_allocs(backend):
    one, many = make_kv(backend), make_kv(backend)
    for kv in (one, many):
        kv.alloc(0, 3, 0), kv.alloc(1, 4, 0), kv.alloc(3, 2, 0)
    rows, needs, before = [3, 0, 2, 1], [3, 9, 0, 1], [2, 3, 0, 4]
    singles = [one.alloc(*each).tolist() for each in zip(rows, needs, before, strict=True)]
    slots, offsets = many.alloc_batch(rows, needs, before)
    # row 3: pages 3, 4; row 0: page 1 has one slot, then pages 5 and 6; row 1: page 7
    assert singles == [[14, 15, 16], [7, *range(20, 28)], [], [28]]
    assert offsets.tolist() == [0, 3, 12, 12, 13]
    assert offsets.dtype == np.int64
    assert [slots[a:b].tolist() for a, b in itertools.pairwise(offsets)] == singles
    assert everything(one) == everything(many)


def test_alloc_batch_takes_any_integers(kv):
    slots, offsets = kv.alloc_batch(np.array([1, 0], np.int32), (2, 1), torch.tensor([0, 0]))
    assert slots.tolist() == [4, 5, 8]
    assert offsets.tolist() == [0, 2, 3]
    wide = np.array([3, -7, 2, -7])[::2]
    assert kv.alloc_batch(wide, np.array([1, 1], np.int32), [0, 0])[0].tolist() == [12, 16]


def test_alloc_batch_is_one_launch(backend):
    if backend not in _CUDA:
        pytest.skip("launches are counted on the CUDA C")
    kv = make_kv(backend)
    kv.backend.launches.clear()
    kv.alloc_batch([0, 1, 2], [5, 5, 5], [0, 0, 0])
    assert kv.backend.launches == ["extend_step_small"]
    for row in range(3):
        kv.free_req_cache(row, 5)
    assert kv.backend.launches == ["extend_step_small"]
    kv.free_group_end()
    assert kv.backend.launches == ["extend_step_small", "free_rows"]


def test_extra_pages_go_and_full_ones_stay(kv):
    kv.alloc(0, 14, 0)  # pages 1 .. 4
    kv.free_extra_pages_not_cached(0, 7, 14)  # one page is full
    assert kv.available_size() == 5  # queued is not free
    assert (kv.num_pages[0], kv.last_slot[0]) == (0, 3)
    kv.free_group_end()
    assert kv.free_slots.tolist() == [5, 6, 7, 8, 9, 2, 3, 4]
    assert refs_of(kv)[1] == 1
    kv.free_group_end()
    assert kv.available_size() == 8


@pytest.mark.parametrize(
    ("real", "alloced", "gone"), [(0, 0, 0), (0, 1, 1), (4, 4, 0), (8, 8, 0), (3, 4, 1), (4, 5, 1)]
)
def test_how_many_extra_pages(kv, real, alloced, gone):
    kv.alloc(0, 8, 0)
    kv.free_extra_pages_not_cached(0, real, alloced)
    kv.free_group_end()
    assert kv.available_size() == 7 + gone
    kv.check()


def test_frees_go_to_the_back_in_queued_order(kv):
    kv.alloc(0, 8, 0)  # 1, 2
    kv.alloc(1, 12, 0)  # 3, 4, 5
    kv.alloc(2, 4, 0)  # 6
    kv.alloc(3, 4, 0)  # 7
    kv.append_to_later_free([6])
    kv.free_req_cache(1, 12)
    mask = kv.free_with_diff(np.array([7]), np.array([7]))
    kv.append_to_later_free(np.array([2, 1], np.int32))
    assert mask.tolist() == [False]
    assert kv.available_size() == 2
    kv.free_group_end()
    assert kv.free_slots.tolist() == [8, 9, 6, 3, 4, 5, 2, 1]
    assert kv.alloc(0, 13, 0).tolist() == [*range(32, 40), *range(24, 28), 12]
    kv.check_integrity()


def test_need_sort(backend):
    kv = make_kv(backend, need_sort=True)
    kv.alloc(0, 20, 0), kv.alloc(1, 12, 0)  # 1 .. 5 and 6 .. 8
    kv.free_req_cache(1, 12)
    kv.append_to_later_free([4, 2])
    kv.free_group_end()
    assert kv.available_size() == 6
    assert kv.free_slots.tolist() == [9]
    assert kv.alloc(2, 4, 0).tolist() == [36, 37, 38, 39]  # one page is at the front
    assert kv.alloc(2, 5, 4).tolist() == [8, 9, 10, 11, 16]
    assert kv.free_slots.tolist() == [6, 7, 8]
    kv.check_integrity()


def test_slot_refs_go_down_in_freed_pages_only(kv):
    kv.alloc(0, 8, 0), kv.alloc(1, 8, 0)
    kv.retain([2])
    kv.token_slot_refs[:] = 5
    kv.token_slot_refs[4:8] = [0, 1, 2, 3]  # page 1
    kv.free_req_cache(0, 8)  # page 1 goes, page 2 keeps an owner
    assert kv.token_slot_refs[4:8].tolist() == [0, 1, 2, 3]  # not before the end
    kv.free_group_end()
    assert kv.token_slot_refs.tolist() == [5] * 4 + [0, 0, 1, 2] + [5] * 32
    kv.free(1)
    assert kv.token_slot_refs.tolist() == [5] * 4 + [0, 0, 1, 2] + [5] * 4 + [4] * 8 + [5] * 20


def test_slot_refs_below_zero_stay(kv):
    kv.alloc(0, 4, 0)
    kv.token_slot_refs[4:8] = [-3, -1, 0, 2**31 - 1]
    kv.free(0)
    assert kv.token_slot_refs[4:8].tolist() == [-3, -1, 0, 2**31 - 2]


def test_a_page_queued_twice_is_free_once(backend):
    kv = make_kv(backend, errors="defer")
    kv.alloc(0, 8, 0)
    kv.token_slot_refs[:] = 9
    kv.append_to_later_free([1])
    kv.free_req_cache(0, 8)
    kv.append_to_later_free([2, 1])
    kv.free_group_end()
    assert error_of(kv) == ("DoubleFreeError", "free_group_end", 1, 1)
    assert kv.free_slots.tolist() == [3, 4, 5, 6, 7, 8, 9, 1, 2]
    assert kv.token_slot_refs[4:12].tolist() == [8] * 8
    assert kv.available_size() == 9
    kv.check_integrity()


def test_a_page_with_two_owners_may_be_queued_twice(kv):
    kv.alloc(0, 4, 0)
    kv.retain([1])
    kv.append_to_later_free([1, 1])
    kv.free_group_end()
    kv.check()
    assert kv.free_slots.tolist() == [2, 3, 4, 5, 6, 7, 8, 9, 1]


@pytest.mark.parametrize("page", [0, -1, 10, 2**31 - 1, 2**40, -(2**63), 2**63 - 1])
def test_a_queued_page_out_of_range(backend, page):
    kv = make_kv(backend, errors="defer")
    kv.alloc(0, 8, 0)
    kv.append_to_later_free([1, page, 2])
    kv.free_group_end()
    assert error_of(kv) == ("OutOfRangeError", "free_group_end", 0, page)
    assert kv.free_slots.tolist()[-2:] == [1, 2]
    kv.check_integrity()


def test_free_frees_the_pages_of_the_row(kv):
    kv.alloc(0, 6, 0), kv.alloc(1, 5, 0)
    kv.free(0, indices=[99, 98])  # not looked at
    assert kv.free_slots.tolist() == [5, 6, 7, 8, 9, 1, 2]
    assert kv.num_pages.tolist() == [0, 2, 0, 0]
    assert kv.last_slot.tolist() == [3, 0, 3, 3]
    kv.free(0)  # twice: it has no pages any more
    kv.free(3)
    kv.check()
    assert kv.available_size() == 7


def test_free_waits_in_a_group(kv):
    kv.alloc(0, 6, 0), kv.alloc(1, 5, 0)
    kv.free_group_begin()
    kv.free(1)
    kv.free(1)
    kv.free(0)
    assert kv.available_size() == 5
    assert kv.num_pages.tolist() == [0, 0, 0, 0]
    kv.free_group_end()
    assert kv.free_slots.tolist() == [5, 6, 7, 8, 9, 3, 4, 1, 2]
    kv.alloc(2, 1, 0)
    kv.free(2)  # the group is over
    assert kv.free_slots.tolist() == [6, 7, 8, 9, 3, 4, 1, 2, 5]
    kv.check()


def test_groups_as_a_context_and_begun_twice(kv):
    kv.alloc(0, 4, 0), kv.alloc(1, 4, 0)
    kv.free_group_end()  # legal without a begin
    with kv.free_group() as same:
        assert same is kv
        kv.free_group_begin()
        kv.free(1)
        assert kv.available_size() == 7
    assert kv.available_size() == 8
    with pytest.raises(ZeroDivisionError), kv.free_group():  # noqa: PT012
        kv.free(0)
        raise ZeroDivisionError
    assert kv.available_size() == 9


def test_free_after_a_queued_free_takes_nothing(kv):
    kv.alloc(0, 8, 0)
    kv.free_extra_pages_not_cached(0, 4, 8)
    kv.free(0)  # what the cache has is not the row's any more
    kv.free_group_end()
    kv.check()
    assert refs_of(kv)[1:3] == [1, 0]


def test_the_queue_frees_what_was_there_when_it_was_told(kv):
    kv.alloc(0, 8, 0)  # pages 1, 2
    kv.alloc(1, 8, 0)  # pages 3, 4
    kv.free_req_cache(0, 8)
    kv.alloc(1, 1, 8)  # another row: nothing is flushed
    assert kv.free_slots.tolist() == [6, 7, 8, 9]
    assert kv.alloc(0, 5, 0).tolist() == [24, 25, 26, 27, 28]  # pages 6, 7 come from the front
    assert kv.free_slots.tolist() == [8, 9, 1, 2]
    kv.free_group_end()
    assert kv.free_slots.tolist() == [8, 9, 1, 2]
    assert kv.req_to_page[0].tolist()[:2] == [6, 7]
    kv.check()


def test_the_queue_is_flushed_by_a_batch(kv):
    kv.alloc(0, 8, 0), kv.alloc(1, 8, 0)
    kv.free_req_cache(1, 8)
    kv.alloc_batch([0], [1], [8])
    assert kv.free_slots.tolist() == [6, 7, 8, 9]
    kv.alloc_batch([2, 1], [1, 1], [0, 0])
    assert kv.free_slots.tolist() == [8, 9, 3, 4]
    kv.check()


@pytest.mark.parametrize("how", ["list", "array", "device", "view", "rows of it"])
@pytest.mark.parametrize("step", ["decode", "extend"])
def test_the_queue_is_flushed_by_a_step(kv, step, how):
    kv.alloc(0, 8, 0), kv.alloc(1, 8, 0)
    kv.free_req_cache(1, 8)
    table = {"view": kv.req_to_page[:], "rows of it": kv.req_to_page[1:2]}.get(how, kv.req_to_page)
    rows: list = [0] if how == "rows of it" else [1]
    given = {"list": rows, "array": np.array(rows, np.int32)}.get(how, on_device(kv, rows))
    lens = [on_device(kv, [0]), on_device(kv, [1])] if how == "device" else [[0], [1]]
    slots = kv.decode_step(table, given, lens[0]) if step == "decode" else kv.extend_step(table, given, *lens, 1)
    assert slots.tolist() == [20]
    kv.free_group_end()
    kv.check()
    assert kv.free_slots.tolist() == [6, 7, 8, 9, 3, 4]
    assert refs_of(kv)[5] == 1
    assert kv.req_to_page_cpu.tolist() == kv.req_to_page.tolist()


def test_a_step_on_another_table_flushes_nothing(kv):
    kv.alloc(1, 8, 0)
    kv.free_req_cache(1, 8)
    other = np.zeros((2, 3), np.int32)
    assert kv.decode_step(other, [1], [0]).tolist() == [12]
    assert kv.free_slots.tolist() == [4, 5, 6, 7, 8, 9]
    assert kv.num_pages.tolist() == [0] * 4


def test_a_flush_before_a_short_alloc_may_make_it_fit(kv):
    kv.alloc(0, 20, 0), kv.alloc(1, 16, 0)
    kv.free_req_cache(0, 20)
    assert kv.alloc(2, 1, 0) is None  # row 2 has nothing in the queue
    assert kv.alloc(0, 9, 0).tolist() == list(range(4, 13))
    kv.free_group_end()
    assert kv.free_slots.tolist() == [4, 5]


def test_a_full_row_flushes_nothing(kv):
    kv.alloc(0, 8, 0)
    kv.free_req_cache(0, 8)
    assert kv.alloc(0, 21, 0) is None
    assert kv.alloc_batch([0], [21], [0]) is None
    assert kv.available_size() == 7


@pytest.mark.parametrize("library", ["list", "numpy", "torch", "mixed"])
def test_free_with_diff(kv, library):
    kv.alloc(0, 16, 0)  # pages 1 .. 4
    new, old = [1, 9, 3, 8], [1, 2, 3, 4]
    if library == "numpy":
        new, old = np.array(new, np.int32), np.array(old, np.int64)
    elif library == "torch":
        if kv._on_gpu:
            pytest.skip("torch on a GPU: see tests/gpu")
        new, old = torch.tensor(new), torch.tensor(old, dtype=torch.int32)
    elif library == "mixed":
        new = np.array(new)
    mask = kv.free_with_diff(new, old)
    assert isinstance(mask, torch.Tensor if library == "torch" else np.ndarray)
    assert mask.tolist() == [False, True, False, True]
    assert mask.dtype in (np.bool_, torch.bool)
    if library in ("numpy", "torch"):
        old[:] = 7  # what was queued is owned
        new[:] = 7
    kv.free_group_end()
    assert kv.free_slots.tolist() == [5, 6, 7, 8, 9, 2, 4]
    assert kv.available_size() == 7
    kv.check()


def test_free_with_diff_refuses(kv):
    for new, old in (([1], [1, 2]), ([], [1]), (np.zeros((1, 1), np.int32), np.zeros((1, 1), np.int32))):
        with pytest.raises(ValueError):
            kv.free_with_diff(new, old)
    for bad in ([1.5], np.array([1.0]), torch.tensor([1.0]), torch.tensor([True]), "x", None):
        with pytest.raises(TypeError):
            kv.free_with_diff(bad, bad)
        good = torch.tensor([1]) if isinstance(bad, torch.Tensor) else np.array([1])
        with pytest.raises(TypeError):
            kv.free_with_diff(bad, good)
    assert kv.free_with_diff([], []).tolist() == []
    kv.free_group_end()
    assert kv.available_size() == 9


def test_the_host_promises_nothing_for_a_diff():
    kv = make_kv("cuda-delayed")
    kv.alloc(0, 16, 0)
    kv.check()
    kv.free_with_diff([9, 9], [1, 2])
    kv.free_extra_pages_not_cached(0, 12, 16)  # page 4
    kv.free_group_end()
    assert kv.available_at_least() == 6  # 5 and page 4
    assert kv.pool.at_most == 8
    assert kv.available_size() == 8


def test_exact_on_the_host_without_a_wait():
    kv = make_kv("cuda-delayed", rows=8)
    launched = kv.backend.queue_of_launches
    for row in range(3):
        kv.alloc(row, 5, 0)
    kv.alloc_batch([3, 0], [4, 3], [0, 5])  # one page, none
    assert kv.available_size() == 2
    kv.free_extra_pages_not_cached(0, 5, 8)
    kv.append_to_later_free([3])
    kv.free_req_cache(3, 4)
    assert kv.available_size() == 2
    kv.free_group_end()
    kv.free(2)
    assert kv.available_size() == 7
    assert kv.decode_step(kv.req_to_page, [4, 5], [0, 0]) is not None
    assert kv.extend_step(kv.req_to_page, [4, -1, 5], [1, 0, 1], [2, 3, 5], 8) is not None
    assert kv.available_size() == 4
    kv.trim(kv.req_to_page, [5], [5], [4])
    kv.release(kv.req_to_page, [4], [2])
    assert kv.available_size() == 6
    assert len(launched) == 12  # after the pool's first: nothing has run, nobody has waited
    kv.check()
    assert kv.available_size() == 6
    kv.check_integrity()


def test_a_retained_page_makes_frees_uncertain_until_the_mail():
    kv = make_kv("cuda-delayed")
    kv.alloc(0, 8, 0)
    kv.retain([1])
    kv.free(0)
    assert (kv.available_at_least(), kv.pool.at_most) == (7, 9)
    assert kv.available_size() == 8


# ---- the copy on the host ------------------------------------------------------------------------------------------


class Copies:
    """Counts what is copied to the host, and stands in for nothing."""

    def __init__(self, kv: KVAllocator) -> None:
        self.rows: list = []
        self.real, kv.backend.rows_to_host = kv.backend.rows_to_host, self

    def __call__(self, table, rows):
        self.rows.append(rows)
        return self.real(table, rows)


def test_the_host_copy_costs_nothing_unread(kv):
    copies = Copies(kv)
    host = kv.req_to_page_cpu
    assert not copies.rows  # nothing has changed yet
    for length in range(9):
        kv.alloc(1, 1, length)
    kv.alloc_batch([0, 2], [1, 1], [0, 0])
    kv.decode_step(kv.req_to_page, [0], [1])
    kv.free_req_cache(2, 1)
    kv.free_group_end()
    assert not copies.rows
    assert host.tolist() == [[0] * 5] * 4
    assert kv.req_to_page_cpu is host
    assert copies.rows == [[0, 1, 2]]
    assert host.tolist() == [[4, 0, 0, 0, 0], [1, 2, 3, 0, 0], [5, 0, 0, 0, 0], [0] * 5]
    assert kv.req_to_page_cpu is host
    assert len(copies.rows) == 1
    kv.alloc(1, 2, 9)  # room in page 3: no cell changes
    assert kv.req_to_page_cpu is host
    assert len(copies.rows) == 1


def test_engines_may_write_to_the_host_copy(kv):
    host = kv.req_to_page_cpu
    host[3] = 77
    host[1] = 66
    kv.alloc(1, 1, 0)
    kv.decode_step(kv.req_to_page, [2], [0])
    assert kv.req_to_page_cpu is host
    assert host.tolist() == [[0] * 5, [1, 0, 0, 0, 0], [2, 0, 0, 0, 0], [77] * 5]


def test_rows_that_only_the_device_knows(backend):
    kv = make_kv(backend)
    assert kv.decode_step(kv.req_to_page, on_device(kv, [2]), on_device(kv, [0])).tolist() == [4]
    assert kv.req_to_page_cpu[2].tolist() == [1, 0, 0, 0, 0]


@pytest.mark.parametrize("backend", ["cuda-ascending"])
def test_the_host_copy_follows_replays(backend):
    kv = make_kv(backend)
    rows, lengths, out = (DeviceArray(np.zeros(1, d)) for d in (np.int64, np.int64, np.int32))
    kv.backend.capture = True
    kv.decode_step(kv.req_to_page, rows, lengths, out=out)
    kv.backend.capture = False
    assert kv.req_to_page_cpu[0].tolist() == [0] * 5
    for page in (5, 6):
        kv.req_to_page[0, 0] = page  # what a replay would write
        assert kv.req_to_page_cpu[0, 0] == page


@pytest.mark.parametrize("backend", ["cuda-ascending"])
def test_a_queue_longer_than_scratch_is_freed_after_a_capture(backend):
    kv = make_kv(backend)
    rows, lengths, out = (DeviceArray(np.zeros(1, d)) for d in (np.int64, np.int64, np.int32))
    kv.backend.capture = True
    kv.decode_step(kv.req_to_page, rows, lengths, out=out)
    kv.backend.capture = False
    kv.backend.max_batch = 3  # as if 8,192 were that few
    for row in range(4):
        kv.alloc(row, 8, 0)
    kv.append_to_later_free(np.array([1]))
    for row in (1, 2, 3):
        kv.free_req_cache(row, 8)
    kv.free_extra_pages_not_cached(0, 4, 8)
    kv.free_group_end()
    assert kv.free_slots.tolist() == [9, 1, 3, 4, 5, 6, 7, 8, 2]
    kv.check()


def test_what_another_thread_queues_during_a_flush_stays_queued(kv):
    for row in (0, 1):
        kv.alloc(row, 4, 0)
    run_queue = kv._run_queue

    def and_meanwhile(*arguments):
        run_queue(*arguments)
        thread = threading.Thread(target=kv.free_req_cache, args=(1, 4))
        thread.start()
        thread.join()

    kv.free_req_cache(0, 4)
    with mock.patch.object(kv, "_run_queue", and_meanwhile):
        kv.free_group_end()
    assert kv.available_size() == 8
    kv.free_group_end()
    assert kv.available_size() == 9
    kv.check_integrity()


def test_what_another_thread_queues_while_rows_are_looked_up(kv):
    class Grows(list):
        def __getitem__(self, part):
            found = super().__getitem__(part)
            kv.free_req_cache(2, 4)
            kv._told = list(self)  # once
            return found

    for row in (1, 2):
        kv.alloc(row, 4, 0)
    kv.free_req_cache(1, 4)
    kv._told = Grows(kv._told)
    assert kv.num_pages.tolist() == [0, 0, 1, 0]
    assert kv.num_pages.tolist() == [0, 0, 0, 0]
    kv.free_group_end()
    assert kv.available_size() == 9


def test_torch_tables():
    kv = KVAllocator(40, torch.device("cpu"), 4, 20, 4)
    host = kv.req_to_page_cpu
    slots, offsets = kv.alloc_batch([0, 1], [5, 1], [0, 0])
    for tensor in (
        slots,
        offsets,
        host,
        kv.req_to_page,
        kv.token_slot_refs,
        kv.num_pages,
        kv.last_slot,
        kv.free_slots,
    ):
        assert isinstance(tensor, torch.Tensor)
    assert kv.alloc(1, 1, 1).tolist() == [13]
    assert kv.num_pages.tolist() == [2, 1, 0, 0]
    assert kv.req_to_page_cpu is host
    assert host[0].tolist() == [1, 2, 0, 0, 0]
    kv.free_extra_pages_not_cached(0, 4, 5)
    kv.free_group_end()
    assert kv.free_slots.tolist() == [4, 5, 6, 7, 8, 9, 2]
    out = kv.decode_step(kv.req_to_page, torch.tensor([2]), torch.tensor([0], dtype=torch.int32))
    assert isinstance(out, torch.Tensor)
    assert out.tolist() == [16]


# ---- clear, and counts that steps keep -----------------------------------------------------------------------------


def test_clear(kv):
    host = kv.req_to_page_cpu
    table, refs, pages, last = kv.req_to_page, kv.token_slot_refs, kv.num_pages, kv.last_slot
    kv.alloc(0, 20, 0)
    kv.token_slot_refs[:] = 3
    kv.free_group_begin()
    kv.free_req_cache(0, 20)
    kv.append_to_later_free([1])
    host[2] = 5
    kv.clear()
    assert kv.available_size() == 9
    assert kv.free_slots.tolist() == list(range(1, 10))
    assert (kv.req_to_page is table, kv.token_slot_refs is refs, kv.req_to_page_cpu is host) == (True,) * 3
    assert (kv.num_pages is pages, kv.last_slot is last) == (True, True)
    for array in (table, refs, pages, host):
        assert not array.any()
    assert last.tolist() == [3] * 4
    kv.free_group_end()  # what was queued is gone
    assert kv.available_size() == 9
    kv.alloc(0, 1, 0)
    kv.free(0)  # at once: the group was dropped too
    assert kv.available_size() == 9
    kv.check()


def test_steps_keep_the_counts_that_free_goes_by(kv):
    table = kv.req_to_page
    kv.extend_step(table, [0, 1], [0, 0], [5, 4], 9)  # pages 1, 2 and 3
    assert kv.num_pages.tolist() == [2, 1, 0, 0]
    kv.decode_step(table, [1, -1], [4, 0])  # page 4
    assert (kv.num_pages[1], kv.last_slot[1]) == (2, 0)
    kv.trim(table, [1], [5], [4])  # page 4 goes
    assert (kv.num_pages[1], kv.last_slot[1]) == (1, 3)
    assert kv.alloc(2, 24 - 4, 0) is not None  # 5 .. 9: the others' pages
    kv.free(1)  # only page 3
    kv.check()
    assert kv.free_slots.tolist() == [4, 3]
    kv.release(table, [0], [5])
    assert (kv.num_pages[0], kv.last_slot[0]) == (0, 3)
    kv.free(0)  # nothing any more
    kv.check()
    assert kv.free_slots.tolist() == [4, 3, 1, 2]


# ---- bad input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "options"),
    [
        (ValueError, {"size": 7}),  # page 0 only
        (ValueError, {"size": -1}),
        (TypeError, {"size": 40.0}),
        (TypeError, {"size": True}),
        (ValueError, {"page_size": 0}),
        (ValueError, {"max_batch_size": 0}),
        (ValueError, {"max_context_len": 0}),
        (ValueError, {"max_context_len": 2**31}),
        (TypeError, {"max_context_len": "20"}),
        (ValueError, {"size": 2**31 + 4}),  # a slot that int32 does not hold
        (ValueError, {"size": 2**62}),
        (ValueError, {"page_size": 2**31, "size": 2**34}),
        (ValueError, {"errors": "ignore"}),
        (ValueError, {"backend": "abacus"}),
        (ValueError, {"device": "tpu"}),
        (TypeError, {"pad_row": 1.5}),
        (TypeError, {"pad_row": "x"}),
        (ValueError, {"pad_row": 2**70}),
    ],
)
def test_what_cannot_be_made(error, options):
    given = {"size": 40, "device": "cpu", "max_batch_size": 4, "max_context_len": 20, "page_size": 4}
    with pytest.raises(error, match="|".join([*options, "slots"])):
        KVAllocator(**(given | options))


def test_what_the_host_sees_raises_and_changes_nothing(kv):
    kv.alloc(0, 5, 0)
    before = everything(kv)
    calls = [
        (ValueError, "req_pool_index", lambda: kv.alloc(4, 1, 0)),
        (ValueError, "req_pool_index", lambda: kv.alloc(-1, 1, 0)),
        (ValueError, "need_size", lambda: kv.alloc(0, -1, 0)),
        (ValueError, "alloced_len", lambda: kv.alloc(0, 1, -1)),
        (TypeError, "need_size", lambda: kv.alloc(0, 1.0, 0)),
        (TypeError, "alloced_len", lambda: kv.alloc(0, 1, None)),
        (TypeError, "req_pool_index", lambda: kv.alloc("0", 1, 0)),
        (TypeError, "req_pool_index", lambda: kv.alloc(True, 1, 0)),
        (ValueError, "req_pool_indices", lambda: kv.alloc_batch([0, 4], [1, 1], [0, 0])),
        (ValueError, "req_pool_indices", lambda: kv.alloc_batch([0, -1], [1, 1], [0, 0])),
        (ValueError, "req_pool_indices.*twice", lambda: kv.alloc_batch([1, 1], [1, 1], [0, 0])),
        (ValueError, "need_sizes", lambda: kv.alloc_batch([0, 1], [1, -1], [0, 0])),
        (ValueError, "need_sizes", lambda: kv.alloc_batch([0], [2**31], [0])),
        (ValueError, "alloced_lens", lambda: kv.alloc_batch([0, 1], [1, 1], [0, -9])),
        (ValueError, "one length", lambda: kv.alloc_batch([0, 1], [1], [0, 0])),
        (ValueError, "one length", lambda: kv.alloc_batch([0], [1], [])),
        (TypeError, "need_sizes", lambda: kv.alloc_batch([0], [1.5], [0])),
        (ValueError, "dimension", lambda: kv.alloc_batch([[0]], [[1]], [[0]])),
        (ValueError, "alloced_len", lambda: kv.free_extra_pages_not_cached(0, 5, 4)),
        (ValueError, "alloced_len", lambda: kv.free_extra_pages_not_cached(0, 5, 21)),
        (ValueError, "real_seq_len", lambda: kv.free_extra_pages_not_cached(0, -1, 4)),
        (ValueError, "req_pool_index", lambda: kv.free_extra_pages_not_cached(4, 0, 4)),
        (ValueError, "alloced_len", lambda: kv.free_req_cache(0, 21)),
        (ValueError, "alloced_len", lambda: kv.free_req_cache(0, -1)),
        (ValueError, "req_pool_index", lambda: kv.free_req_cache(9, 1)),
        (ValueError, "req_pool_index", lambda: kv.free(4)),
        (TypeError, "req_pool_index", lambda: kv.free(None)),
        (TypeError, "page_ids", lambda: kv.append_to_later_free([1.0])),
        (ValueError, "page_ids", lambda: kv.append_to_later_free([[1]])),
        (TypeError, "page_ids", lambda: kv.append_to_later_free(3)),
        (ValueError, "page_ids", lambda: kv.append_to_later_free([2**64])),
        (TypeError, "page_ids", lambda: kv.retain(["a"])),
    ]
    for error, match, call in calls:
        with pytest.raises(error, match=match):
            call()
    kv.free_group_end()
    assert everything(kv) == before
    kv.check()


@pytest.mark.parametrize(
    ("cell", "error", "value"),
    [
        (0, "OutOfRangeError", 0),  # slot 0 * 4 + 0
        (-1, "OutOfRangeError", -1),
        (10, "OutOfRangeError", 40),
        (2**31 - 1, "OutOfRangeError", (2**31 - 1) * 4),
        (9, "FreePageError", 36),
        (3, "SharedPageError", 12),
    ],
)
@pytest.mark.parametrize("batch", [False, True])
def test_garbage_in_the_row_refuses(backend, cell, error, value, batch):
    kv = make_kv(backend, errors="defer")
    kv.alloc(0, 5, 0), kv.alloc(1, 1, 0)
    kv.retain([3])
    kv.req_to_page[0, 1] = cell
    ring, refs, tables, *_ = everything(kv)
    found = kv.alloc_batch([1, 0], [3, 6], [1, 5])[0] if batch else kv.alloc(0, 6, 5)
    if batch and cell != 3:
        # page 3 is shared: row 1 is at fault as well, and first
        assert error_of(kv) == ("SharedPageError", "alloc_batch", 0, 12)
    else:
        assert error_of(kv) == (error, "alloc_batch" if batch else "alloc", 0, 12 if batch else value)
    assert found.tolist() == [0] * (9 if batch else 6)
    assert (ring, refs, tables) == everything(kv)[:3]
    assert kv.available_size() == 6
    kv.check_integrity()


def test_garbage_in_the_row_is_not_looked_at_where_no_old_page_is_written(kv):
    kv.alloc(0, 4, 0)
    kv.req_to_page[0, 0] = -9
    assert kv.alloc(0, 2, 4).tolist() == [8, 9]
    assert kv.alloc(1, 2, 12).tolist() == [12, 13]  # a prefix that somebody else keeps account of
    assert kv.req_to_page[1].tolist() == [0, 0, 0, 3, 0]
    kv.check()


def test_errors_raise_at_the_next_call_and_lose_nothing(kv):
    kv.alloc(0, 8, 0), kv.alloc(1, 8, 0), kv.alloc(2, 4, 0)
    kv.append_to_later_free([9])
    kv.free_group_end()  # page 9 is free: recorded
    kv.free_req_cache(0, 8)
    with pytest.raises(cupaged.DoubleFreeError, match=r"free_group_end\(\), index 0.*value 9"):
        kv.free_group_end()
    kv.free_group_end()
    assert kv.free_slots.tolist() == [6, 7, 8, 9, 1, 2]  # what was queued is not lost
    kv.append_to_later_free([0])
    kv.free_group_end()
    with pytest.raises(cupaged.OutOfRangeError):
        kv.free(1)
    kv.free(1)
    assert kv.free_slots.tolist() == [6, 7, 8, 9, 1, 2, 3, 4]
    kv.check()
    kv.check_integrity()


def test_a_deferred_error_raises_in_check_only(backend, caplog):
    kv = make_kv(backend, errors="defer")
    kv.append_to_later_free([9])
    kv.free_group_end()
    assert kv.alloc(0, 1, 0).tolist() == [4]
    kv.free(0)
    assert "freed more often" in caplog.text
    assert kv.stats().errors == 1
    with pytest.raises(cupaged.DoubleFreeError):
        kv.check()
    kv.check()


def test_debug_raises_at_once(backend):
    kv = make_kv(backend, debug=True)
    kv.alloc(0, 8, 0)
    kv.append_to_later_free([1, 1])
    with pytest.raises(cupaged.DoubleFreeError):
        kv.free_group_end()
    kv.req_to_page[1, 0] = -1
    with pytest.raises(cupaged.OutOfRangeError):
        kv.alloc(1, 1, 1)


def test_debug_finds_duplicates_in_a_row(backend):
    kv = make_kv(backend, debug=True)
    kv.alloc(0, 16, 0)
    kv.req_to_page[0, 1] = 1
    with pytest.raises(cupaged.IntegrityError, match=r"row 0.*page 1 twice"):
        kv.alloc(0, 1, 16)
    kv = make_kv(backend, debug=True)
    kv.alloc_batch([0, 1], [8, 4], [0, 0])
    kv.req_to_page[0, 1] = 1
    with pytest.raises(cupaged.IntegrityError, match=r"row 0.*page 1 twice"):
        kv.alloc_batch([1, 0], [1, 1], [4, 8])
    kv = make_kv(backend, debug=True)
    kv.alloc_batch([0, 1], [8, 8], [0, 0])
    kv.retain([1])
    kv.req_to_page[1, 0] = 1  # of two rows: they share it
    kv.alloc(1, 1, 8)


def test_huge_needs_make_no_array_first(backend):
    kv = make_kv(backend, pages=3, page_size=2**20, columns=2**11 - 1)
    with mock.patch.object(kv.backend, "output", side_effect=AssertionError("memory was asked for")):
        assert kv.alloc(0, 2**31 - 2**21, 0) is None
        assert kv.alloc_batch([0, 1], [2**31 - 2**21] * 2, [0, 0]) is None
    assert kv.available_size() == 3


def test_more_tokens_than_int32_counts_is_a_full_row(backend, caplog):
    kv = make_kv(backend, pages=3, page_size=2**20, rows=1, columns=2**11 - 1)
    with mock.patch.object(backends, "pick", return_value=type(kv.backend)):
        kv = KVAllocator(2**22, "cpu", 1, 2**31 - 1, 2**20)
    assert kv.max_page_num == 2**11  # 2**31 slots, but lengths end at 2**31 - 1
    assert kv.alloc(0, 1, 2**31 - 1) is None
    assert kv.alloc_batch([0], [1], [2**31 - 1]) is None
    assert len(caplog.records) == 2
    kv.check()


def test_overlapping_calls_raise(kv):
    kv.alloc(0, 8, 0)
    kv.free_req_cache(0, 4)
    kv.free_extra_pages_not_cached(0, 4, 8)
    kv.alloc(1, 4, 0)
    kv.pool.enter("")
    calls = [
        lambda: kv.alloc(2, 1, 0),
        lambda: kv.alloc_batch([2], [1], [0]),
        lambda: kv.free_group_end(),
        lambda: kv.free(1),
        lambda: kv.append_to_later_free([1]),
        lambda: kv.decode_step(kv.req_to_page, [2], [0]),
        lambda: kv.clear(),
    ]
    try:
        for call in calls:
            with pytest.raises(cupaged.ConcurrentCallError):
                call()
    finally:
        kv.pool.leave()
    assert kv.num_pages.tolist() == [0, 1, 0, 0]
    kv.free_group_end()
    kv.free(1)
    assert kv.free_slots.tolist() == [4, 5, 6, 7, 8, 9, 1, 2, 3]
    kv.check_integrity()


def test_another_thread_may_look(kv):
    kv.alloc(0, 8, 0)
    seen = []
    watch = threading.Thread(target=lambda: seen.append((kv.available_size(), kv.available_at_least())))
    watch.start(), watch.join()
    assert seen == [(7, 7)]


@pytest.mark.parametrize("page_size", [1, 3, 64])
def test_a_lap_around_the_ring(backend, page_size):
    """Pages come back in the order in which they went, again and again."""
    kv = make_kv(backend, pages=7, page_size=page_size, rows=2, columns=3)
    expected = list(range(1, 8))
    for turn in range(12):
        row, pages = turn % 2, 1 + turn % 3
        slots = kv.alloc(row, pages * page_size, 0)
        taken = expected[:pages]
        assert slots.tolist() == [page * page_size + j for page in taken for j in range(page_size)]
        kv.free(row)
        expected = expected[pages:] + taken
        assert kv.free_slots.tolist() == expected
    kv.check_integrity()


def test_many_requests_end_in_one_launch(backend):
    n = 300
    kv = make_kv(backend, pages=2 * n, page_size=2, rows=n, columns=2)
    slots, offsets = kv.alloc_batch(list(range(n)), [3] * n, [0] * n)
    assert slots.tolist() == [s for i in range(n) for s in (4 * i + 2, 4 * i + 3, 4 * i + 4)]
    assert offsets[-1] == 3 * n
    assert kv.available_size() == 0
    order = [(7 * i) % n for i in range(n)]
    for row in order:
        kv.free_extra_pages_not_cached(row, 1, 3)
    kv.free_group_end()
    assert kv.free_slots.tolist() == [page for row in order for page in (2 * row + 1, 2 * row + 2)]
    kv.check_integrity()


def test_long_queues_of_entries(backend):
    kv = make_kv(backend, pages=9000, page_size=1, rows=1, columns=9000)
    kv.alloc(0, 9000, 0)
    pages = np.random.default_rng(5).permutation(9000) + 1
    for chunk in np.array_split(pages, 7):  # more than the first buffer holds
        given = chunk.copy()
        kv.append_to_later_free(given)
        given[:] = 0
    kv.free_group_end()
    kv.check()
    assert kv.free_slots.tolist() == pages.tolist()
