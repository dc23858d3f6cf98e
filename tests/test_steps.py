"""Whole steps over request tables: by hand, against the chain of calls that they replace, and with bad input."""

from __future__ import annotations

import logging
from typing import ClassVar

import numpy as np
import pytest
import torch

import cupaged
from cupaged.base import PoolAllocator
from tests.allocators import HOSTED, make
from tests.host_backend import DeviceArray
from tests.test_kv import make_kv

KINDS = ("slots", "pages")


@pytest.fixture(params=HOSTED)
def backend(request):
    return request.param


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def make_pool(kind: str, backend: str, pages: int, page_size: int, **options) -> PoolAllocator:
    """Pages 1 .. `pages`, slots as int32."""
    if kind == "pages":
        return make_kv(backend, pages, page_size, 2, 2, **options)
    return make(backend, pages * page_size, page_size, index_dtype="int32", **options)


def cells_for(kind: str, tokens: int, page_size: int) -> int:
    return tokens if kind == "slots" else -(-tokens // page_size)


def on_device(pool: PoolAllocator, values, dtype=np.int64):
    array = np.array(values, dtype)
    return DeviceArray(array) if pool._on_gpu else array


def everything(pool: PoolAllocator, table: np.ndarray) -> tuple:
    """All that a refused step must leave as it is."""
    _ring, refs, _ = pool.pool.snapshot()
    return [pages.tolist() for pages in pool.pool.free_order()], refs.tolist(), table.tolist()


def error_of(pool: PoolAllocator) -> tuple | None:
    try:
        pool.check()
    except cupaged.DeviceError as error:
        return type(error).__name__, error.kind, error.index, error.value
    return None


# ---- by hand -------------------------------------------------------------------------------------------------------


def test_a_slot_table_by_hand(backend):
    pool = make_pool("slots", backend, 9, 4)
    table = np.full((3, 12), -1, np.int32)
    # Row 2 takes pages 1 and 2, row 0 page 3.
    assert pool.extend_step(table, [2, 0], [0, 0], [5, 3], 8).tolist() == [4, 5, 6, 7, 8, 12, 13, 14]
    assert table.tolist() == [[12, 13, 14] + [-1] * 9, [-1] * 12, [4, 5, 6, 7, 8] + [-1] * 7]
    assert int(pool.ret_values) == 3 << 32 | 8
    # Row 0 has room, row 1 is new, row 2 has room.
    assert pool.decode_step(table, [0, 1, 2], [3, 0, 5]).tolist() == [15, 16, 9]
    assert table[0].tolist() == [12, 13, 14, 15] + [-1] * 8
    assert table[1].tolist() == [16] + [-1] * 11
    # Speculation: 3 tokens each. Row 0 is at a page's end (page 5), row 2 fills page 2 and begins page 6.
    assert pool.extend_step(table, [0, 2], [4, 6], [7, 9], 6).tolist() == [20, 21, 22, 10, 11, 24]
    # Row 0 keeps 1 of the 3, so page 5 stays; row 2 keeps 2, so page 6 goes.
    pool.trim(table, [0, 2], [7, 9], [5, 8])
    assert pool.free_pages.tolist() == [6, 7, 8, 9]
    assert pool.decode_step(table, [2, 0], [8, 5]).tolist() == [24, 21]
    pool.release(table, [2, 0], [9, 6])
    # At the front, in the order of the rows: 1, 2, 6, then 3, 5.
    assert pool.free_pages.tolist() == [1, 2, 6, 3, 5, 7, 8, 9]
    pool.check()
    pool.check_integrity()


def test_a_page_table_by_hand(backend):
    kv = make_kv(backend, 9, 4, 3, 3)
    table = kv.req_to_page
    assert kv.extend_step(table, [2, 0], [0, 0], [5, 3], 8).tolist() == [4, 5, 6, 7, 8, 12, 13, 14]
    assert table.tolist() == [[3, 0, 0], [0, 0, 0], [1, 2, 0]]
    assert kv.decode_step(table, [0, 1, 2], [3, 0, 5]).tolist() == [15, 16, 9]
    assert kv.extend_step(table, [0, 2], [4, 6], [7, 9], 6).tolist() == [20, 21, 22, 10, 11, 24]
    assert table.tolist() == [[3, 5, 0], [4, 0, 0], [1, 2, 6]]
    kv.trim(table, [0, 2], [7, 9], [5, 8])
    assert kv.free_slots.tolist() == [7, 8, 9, 6]
    assert kv.decode_step(table, [2, 0], [8, 5]).tolist() == [28, 21]
    kv.release(table, [2, 0], [9, 6])
    assert kv.free_slots.tolist() == [8, 9, 6, 1, 2, 7, 3, 5]
    assert kv.alloc(0, 1, 0).tolist() == [32]  # steps and single calls live on one pool
    kv.check()
    kv.check_integrity()


def test_padded_rows_by_hand(backend, kind):
    pool = make_pool(kind, backend, 9, 4)
    table = np.full((2, 12), 3, np.int32)
    # Lengths of padding say only how many zeros it gets, and nothing at all where they say nothing.
    rows = [-1, 1, -1, 0, -1, -1]
    assert pool.extend_step(table, rows, [0, 0, 7, 0, -3, 9], [2, 5, 7, 1, 2, 4], 8).tolist() == [
        0, 0, 4, 5, 6, 7, 8, 12,
    ]  # fmt: skip
    assert pool.decode_step(table, rows, [-5, 5, 2**31 - 1, 1, 0, -(2**31)]).tolist() == [0, 9, 0, 13, 0, 0]
    assert int(pool.ret_values) == 6
    before = everything(pool, table)
    pool.trim(table, [-1, -1], [5, -2], [9, 3])
    pool.release(table, [-1, -1], [2**40, -9])
    assert pool.decode_step(table, [-1, -1], [0, 0]).tolist() == [0, 0]
    assert everything(pool, table) == before
    pool.trim(table, [-1, 1], [0, 6], [0, 4])
    pool.check()
    assert pool.available_at_least() == (7 if kind == "pages" else 28)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_padding_whose_lengths_no_type_can_subtract(backend, kind, dtype):
    least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
    pool = make_pool(kind, backend, 9, 4)
    table = np.zeros((2, 12), np.int32)
    rows = np.array([-1, 0, -1])
    prefix, seq = np.array([1, 0, most], dtype), np.array([least, 2, least], dtype)
    assert pool.extend_step(table, rows, prefix, seq, 2).tolist() == [4, 5]
    assert pool.decode_step(table, rows, np.array([most, 2, least], dtype)).tolist() == [0, 6, 0]
    pool.check()


@pytest.mark.parametrize("pad_row", [0, 1, -9, 77, 2**63 - 1, -(2**63)])
def test_another_pad_row(backend, kind, pad_row):
    pool = make_pool(kind, backend, 9, 4, pad_row=pad_row, errors="defer")
    table = np.zeros((3, 12), np.int32)
    assert pool.decode_step(table, [pad_row, 2], [5, 0]).tolist() == [0, 4]
    pool.release(table, [pad_row], [11])
    pool.check()
    before = everything(pool, table)
    assert pool.decode_step(table, [-1], [0]).tolist() == [0]  # -1 is no row here
    assert error_of(pool) == ("TableRowError", "decode_step", 0, -1)
    assert everything(pool, table) == before


def test_padding_is_slot_0_and_refusal_is_refused_slot(backend):
    pool = make_pool("slots", backend, 9, 4, refused_slot=-1, errors="defer")
    table = np.zeros((2, 12), np.int32)
    assert pool.decode_step(table, [-1, 0], [0, 0]).tolist() == [0, 4]
    assert pool.decode_step(table, [-1, 5], [0, 0]).tolist() == [-1, -1]


# ---- against the chain that it replaces ----------------------------------------------------------------------------


class Chain:
    """What engines do today: gather `last_loc`, allocate, scatter; with the pages of each row in a plain list."""

    def __init__(self, kind: str, pages: int, page_size: int, rows: int, pad_row: int) -> None:
        self.pool = make("reference", pages * page_size, page_size, index_dtype="int32")
        self.kind, self.size, self.pad_row = kind, page_size, pad_row
        self.slots: list[list[int]] = [[] for _ in range(rows)]
        self.free = list(range(1, pages + 1))

    def step(self, rows: list[int], added: list[int]) -> list[int] | None:
        """Slots, zeros for padding. The free list is this class's own, so the pool is put in its order first."""
        real = [(row, new) for row, new in zip(rows, added, strict=True) if row != self.pad_row]
        prefix = [len(self.slots[row]) for row, _ in real]
        seq = [before + new for before, (_, new) in zip(prefix, real, strict=True)]
        last = [self.slots[row][-1] if self.slots[row] else -1 for row, _ in real]
        self._order_pool()
        if all(new == 1 for _, new in real):
            found = self.pool.alloc_decode(seq, last)
        else:
            found = self.pool.alloc_extend(prefix, seq, last, sum(new for _, new in real))
        if found is None:
            return None
        self.free = self.pool.free_pages.tolist()
        given, out = found.tolist(), []
        for row, new in zip(rows, added, strict=True):
            if row == self.pad_row:
                out += [0] * new
                continue
            mine, given = given[:new], given[new:]
            self.slots[row] += mine
            out += mine
        return out

    def _order_pool(self) -> None:
        """Whatever is free leaves and comes back in this order."""
        self.pool.alloc(self.pool.available_size())
        if self.free:
            self.pool.free_page_ids(self.free)

    def cut(self, rows: list[int], kept: list[int]) -> None:
        gone = []
        for row, keep in zip(rows, kept, strict=True):
            if row == self.pad_row:
                continue
            first = -(-keep // self.size) * self.size
            gone += [slot // self.size for slot in self.slots[row][first :: self.size]]
            del self.slots[row][keep:]
        self.free = self.free + gone if self.kind == "pages" else gone + self.free

    def cells(self, row: int) -> list[int]:
        slots = self.slots[row]
        return slots if self.kind == "slots" else [slot // self.size for slot in slots[:: self.size]]


def in_some_form(rng: np.random.Generator, pool: PoolAllocator, values):
    """int32 or int64, list, NumPy, torch or on the device, contiguous or not."""
    dtype = rng.choice([np.int32, np.int64])
    spaced = np.full(3 * len(values) + 1, -55, dtype)
    spaced[1::3] = values
    strided = spaced[1::3]
    forms = [list(values), np.array(values, dtype), strided, strided[::-1].copy()[::-1]]
    forms.append(DeviceArray(strided) if pool._on_gpu else torch.from_numpy(np.array(values, dtype)))
    return forms[int(rng.integers(len(forms)))]


@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
@pytest.mark.parametrize("pad_row", [-1, 2, -7])
def test_like_the_chain(backend, kind, page_size, pad_row, caplog):
    caplog.set_level(logging.CRITICAL, "cupaged")
    rng = np.random.default_rng([page_size, pad_row + 9, len(kind)])
    rows, pages, tokens = 7, 30, 8 * page_size
    pool = make_pool(kind, backend, pages, page_size, pad_row=pad_row)
    chain = Chain(kind, pages, page_size, rows, pad_row)
    table = np.full((rows, cells_for(kind, tokens, page_size)), -77, np.int32)
    real_rows = [row for row in range(rows) if row != pad_row]
    none = 0
    for _ in range(60):
        picked = [int(row) for row in rng.permutation(real_rows)[: rng.integers(0, 6)]]
        for _ in range(int(rng.integers(0, 3))):
            picked.insert(int(rng.integers(0, len(picked) + 1)), pad_row)
        lens = [0 if row == pad_row else len(chain.slots[row]) for row in picked]
        what = rng.choice(["decode", "extend", "speculate", "trim", "release"], p=[0.3, 0.2, 0.2, 0.2, 0.1])
        given_rows, given_lens = in_some_form(rng, pool, picked), in_some_form(rng, pool, lens)
        if what in ("trim", "release"):
            kept = [int(rng.integers(0, n + 1)) if what == "trim" else 0 for n in lens]
            chain.cut(picked, kept)
            if what == "trim":
                pool.trim(table, given_rows, given_lens, in_some_form(rng, pool, kept))
            else:
                pool.release(table, given_rows, given_lens)
        else:
            most = {"decode": 1, "extend": 2 * page_size + 1, "speculate": 4}[what]
            added = [int(rng.integers(0, most + 1)) if what == "extend" else most for _ in picked]
            if any(before + new > tokens for before, new in zip(lens, added, strict=True)):
                continue
            expected = chain.step(picked, added)
            none += expected is None
            if what == "decode":
                found = pool.decode_step(table, given_rows, given_lens)
            else:
                after = [before + new for before, new in zip(lens, added, strict=True)]
                found = pool.extend_step(table, given_rows, given_lens, in_some_form(rng, pool, after), sum(added))
            assert (found is None) == (expected is None)
            if found is not None:
                assert found.tolist() == expected
        pool.check()
        pool.check_integrity()
        assert pool.pool.free_order()[0].tolist() == chain.free
        for row in real_rows:
            cells = chain.cells(row)
            assert table[row, : len(cells)].tolist() == cells
    assert none or page_size > 1 or kind == "pages"


@pytest.mark.parametrize("padded", [False, True])
def test_large_batches(backend, kind, padded):
    """More requests than one block has threads, and more tokens than it writes."""
    n, size = 2500 if backend != "reference" else 1100, 3
    rng = np.random.default_rng(8)
    pool = make_pool(kind, backend, 4 * n, size)
    chain = Chain(kind, 4 * n, size, n, -1)
    table = np.zeros((n, cells_for(kind, 12, size)), np.int32)
    rows = rng.permutation(n)
    if padded:
        rows[rng.random(n) < 0.2] = -1
    rows, added = rows.tolist(), rng.integers(0, 7, n).tolist()
    lens = np.zeros(n, np.int64)
    for step_added in (added, [1] * n, [2] * n):
        after = lens + step_added
        found = (
            pool.decode_step(table, rows, lens)
            if max(step_added) == 1
            else pool.extend_step(table, on_device(pool, rows, np.int32), lens, after, sum(step_added))
        )
        assert found.tolist() == chain.step(rows, step_added)
        lens = after
    kept = rng.integers(0, lens + 1)
    lens[np.array(rows) == -1] = kept[np.array(rows) == -1] = 0
    pool.trim(table, rows, lens, kept)
    chain.cut(rows, kept.tolist())
    assert pool.pool.free_order()[0].tolist() == chain.free
    pool.release(table, rows, kept)
    chain.cut(rows, [0] * n)
    assert pool.pool.free_order()[0].tolist() == chain.free
    assert len(chain.free) == 4 * n
    pool.check()
    pool.check_integrity()


def test_one_launch_each():
    pool = make_pool("slots", "cuda-ascending", 9, 4)
    table = np.zeros((4, 12), np.int32)
    pool.backend.launches.clear()
    pool.decode_step(table, [0, 1, 2, 3], [0, 0, 0, 0])
    pool.extend_step(table, [0, 1], [1, 1], [5, 5], 8)
    pool.trim(table, [0, 1], [5, 5], [2, 2])
    pool.release(table, [0, 1, 2, 3], [2, 2, 1, 1])
    assert pool.backend.launches == ["decode_step_small", "extend_step_small", "free_rows", "free_rows"]


def test_empty_batches_and_tables(backend, kind):
    pool = make_pool(kind, backend, 9, 4)
    for shape in ((0, 0), (0, 5), (3, 0), (3, 5)):
        table = np.zeros(shape, np.int32)
        assert pool.decode_step(table, [], []).shape == (0,)
        assert pool.extend_step(table, [], [], [], 0).shape == (0,)
        pool.trim(table, [], [], [])
        pool.release(table, np.zeros(0, np.int32), [])
        assert pool.decode_step(table, [-1], [4]).tolist() == [0]
    table = np.zeros((3, 0), np.int32)
    assert pool.extend_step(table, [1], [0], [0], 0).shape == (0,)
    pool.release(table, [2], [0])
    pool.check()
    assert pool.pool.free_pages_count() == 9


def test_library_of_the_result(kind):
    pool = make_pool(kind, "numba", 9, 4)
    table = torch.zeros((2, 12), dtype=torch.int32)
    found = pool.decode_step(table, torch.tensor([1]), torch.tensor([0]))
    assert isinstance(found, torch.Tensor)
    assert found.dtype is torch.int32
    assert found.tolist() == [4]
    assert table[1, 0] == (4 if kind == "slots" else 1)
    assert isinstance(pool.decode_step(table, [0], [0]), torch.Tensor)
    assert isinstance(pool.decode_step(table.numpy(), [0], [1]), np.ndarray)


def test_out_is_written_and_returned(backend, kind):
    pool = make_pool(kind, backend, 9, 4)
    table = np.zeros((2, 12), np.int32)
    array = np.full(4, 55, np.int32)
    out = DeviceArray(array[1:3]) if pool._on_gpu else array[1:3]
    assert pool.decode_step(table, [0, 1], [0, 0], out=out) is out
    assert array.tolist() == [55, 4, 8, 55]
    assert pool.extend_step(table, [1, -1], [1, 0], [2, 1], 2, out=out) is out
    assert array.tolist() == [55, 9, 0, 55]
    wide, short = np.zeros(2, np.int64), np.zeros(1, np.int32)
    for bad, error in ((wide, TypeError), (short, ValueError), (np.zeros(4, np.int32)[::2], ValueError)):
        with pytest.raises(error, match="out"):
            pool.decode_step(table, [0, 1], [1, 2], out=DeviceArray(bad) if pool._on_gpu else bad)
    pool.check()


# ---- short pools ---------------------------------------------------------------------------------------------------


def test_none_exactly_when_short(backend, kind):
    pool = make_pool(kind, backend, 3, 4)
    table = np.zeros((4, 12), np.int32)
    pool.extend_step(table, [0, 1], [0, 0], [5, 4], 9)
    before = everything(pool, table)
    for rows in ([1], on_device(pool, [1])):
        lens = [4] if isinstance(rows, list) else on_device(pool, [4])
        assert pool.decode_step(table, rows, lens) is None
        assert pool.extend_step(table, rows, lens, [6], 2) is None
    assert pool.decode_step(table, [0, 2], [5, 0]) is None
    assert everything(pool, table) == before
    pool.check()
    assert pool.extend_step(table, [0, 1, -1], [5, 4, 0], [8, 4, 30], 33).tolist() == [9, 10, 11] + [0] * 30
    pool.release(table, [1], [4])
    assert pool.decode_step(table, [3], [0]).tolist() == [12]


def test_huge_steps_make_no_array_first(backend, kind, monkeypatch):
    pool = make_pool(kind, backend, 3, 4)
    columns = 2**31 - 1 if kind == "slots" else 2**29
    table = np.lib.stride_tricks.as_strided(np.zeros(1, np.int32), (1, columns), (4 * columns, 4))  # never touched
    monkeypatch.setattr(pool.backend, "output", lambda *_: pytest.fail("memory was asked for"))
    assert pool.extend_step(table, [0], [0], [2**31 - 1], 2**31 - 1) is None
    assert pool.pool.free_pages_count() == 3


def test_need_sort(backend, kind):
    pool = make_pool(kind, backend, 6, 2, need_sort=True)
    table = np.zeros((4, 12), np.int32)
    pool.extend_step(table, [0, 1], [0, 0], [4, 5], 9)  # pages 1, 2 and 3, 4, 5
    pool.release(table, [1, 0], [5, 4])
    assert [pages.tolist() for pages in pool.pool.free_order()] == [[6], [3, 4, 5, 1, 2]]
    assert pool.decode_step(table, [2], [0]).tolist() == [12]  # bound 1: no merge
    pool.trim(table, [2], [1], [0])
    assert pool.decode_step(table, [2], [0]).tolist() == [2]
    assert [pages.tolist() for pages in pool.pool.free_order()] == [[2, 3, 4, 5, 6], []]
    pool.check_integrity()


# ---- tables of all kinds -------------------------------------------------------------------------------------------

VIEWS = {
    "every other row": lambda a: a[1::2],
    "backwards": lambda a: a[::-1],
    "backwards by two": lambda a: a[-2::-2],
    "columns inside": lambda a: a[:, 3:-2],
    "one row": lambda a: a[4:5],
    "Fortran order of one column": lambda a: np.asfortranarray(a[:, :1]),
}


@pytest.mark.parametrize("view", VIEWS)
def test_views_as_tables(backend, kind, view):
    pool = make_pool(kind, backend, 30, 4)
    whole = np.full((10, 15), -5, np.int32)
    table = VIEWS[view](whole)
    mine = np.full(table.shape, -5, np.int32)
    chain = Chain(kind, 30, 4, len(table), -1)
    rows = list(range(len(table)))
    most = table.shape[1] if kind == "slots" else 4 * table.shape[1]
    lens = [0] * len(rows)
    for added in (1, min(5, most - 1), 1 if most > 6 else 0):
        found = pool.extend_step(table, rows, lens, [n + added for n in lens], added * len(rows))
        assert found.tolist() == chain.step(rows, [added] * len(rows))
        lens = [n + added for n in lens]
    for row in rows:
        mine[row, : len(chain.cells(row))] = chain.cells(row)
    assert table.tolist() == mine.tolist()
    outside = np.ones(whole.shape, bool)
    VIEWS[view](outside)[:] = view.startswith("Fortran")
    assert (whole[outside] == -5).all()
    pool.trim(table, rows, lens, [1] * len(rows))
    chain.cut(rows, [1] * len(rows))
    assert pool.pool.free_order()[0].tolist() == chain.free
    pool.check()


def test_tables_that_are_none(backend, kind):
    pool = make_pool(kind, backend, 9, 4)
    good = np.zeros((4, 12), np.int32)
    readonly = good.copy()
    readonly.flags.writeable = False
    bad = [
        (TypeError, good.astype(np.int64)),
        (TypeError, good.astype(np.uint32)),
        (TypeError, good.astype(np.float32)),
        (TypeError, good.astype(">i4")),
        (ValueError, good[0]),
        (ValueError, good[None]),
        (ValueError, good.T),
        (ValueError, np.asfortranarray(good)),
        (ValueError, good[:, ::2]),
        (ValueError, good[:, ::-1]),
        (ValueError, np.lib.stride_tricks.as_strided(good, (4, 12), (16, 4))),
        (ValueError, np.lib.stride_tricks.as_strided(good, (4, 12), (0, 4))),
        (ValueError, np.zeros(4 * 49 + 4, np.int8)[:196].reshape(4, 49)[:, :48].view(np.int32)),
    ]
    if not pool._on_gpu:
        bad += [
            (ValueError, readonly),
            (ValueError, DeviceArray(good)),
            (TypeError, good.tolist()),
            (TypeError, None),
            (TypeError, torch.zeros((4, 12), dtype=torch.int64)),
            (ValueError, torch.zeros((12, 4), dtype=torch.int32).T),
        ]
    else:
        bad += [
            (ValueError, good.tolist()),
            (ValueError, None),
        ]
    before = everything(pool, good)
    for error, table in bad:
        calls = [
            lambda t=table: pool.decode_step(t, [0], [0]),
            lambda t=table: pool.extend_step(t, [0], [0], [2], 2),
            lambda t=table: pool.trim(t, [0], [2], [1]),
            lambda t=table: pool.release(t, [0], [2]),
        ]
        for call in calls:
            with pytest.raises(error, match="table"):
                call()
    assert everything(pool, good) == before
    pool.check()
    assert pool.decode_step(good, [0], [0]).tolist() == [4]


def test_slots_that_a_table_cannot_hold():
    pool = cupaged.PagedTokenToKVPoolAllocator(2**31, 2**20, device="cpu", backend="numba")
    with pytest.raises(ValueError, match="int32 request table"):
        pool.decode_step(np.zeros((1, 4), np.int32), [0], [0])


def test_the_largest_slots_that_a_table_holds(backend):
    size = 2**29
    pool = make(backend, 3 * size, size)
    table = np.zeros((3, 4), np.int32)
    assert pool.decode_step(table, [0, 1, 2], [0, 0, 0]).tolist() == [size, 2 * size, 3 * size]
    table[2, 1] = 2**31 - 3  # as if all but two of its tokens were there, in a table as short as this
    assert pool.pool.free_pages_count() == 0
    assert pool.decode_step(table, [2, 0], [1, 1]).tolist() == [3 * size + 1, size + 1]
    assert table[2, :2].tolist() == [3 * size, 3 * size + 1]
    pool.release(table, [2], [2])
    assert pool.free_pages.tolist() == [3]


# ---- bad batches ---------------------------------------------------------------------------------------------------


def test_what_the_host_sees_raises_and_changes_nothing(backend, kind):
    pool = make_pool(kind, backend, 9, 4)
    table = np.zeros((4, 12), np.int32)
    pool.extend_step(table, [0, 1], [0, 0], [5, 4], 9)
    before = everything(pool, table)
    step, decode, trim, release = pool.extend_step, pool.decode_step, pool.trim, pool.release
    calls = [
        (ValueError, "seq_lens", lambda: decode(table, [0, 1], [5])),
        (ValueError, "seq_lens", lambda: decode(table, [0], [-1])),
        (ValueError, "seq_lens", lambda: decode(table, [0], np.array([2**31 - 1], np.int32))),
        (ValueError, "seq_lens", lambda: decode(table, [0], [2**31 - 1])),
        (ValueError, "seq_lens", lambda: decode(table, [0], [2**63 - 1])),
        (ValueError, "seq_lens", lambda: decode(table, [0], [2**64])),
        (TypeError, "seq_lens", lambda: decode(table, [0], [5.0])),
        (TypeError, "req_pool_indices", lambda: decode(table, [True], [5])),
        (TypeError, "req_pool_indices", lambda: decode(table, np.array([0], np.uint8), [5])),
        (ValueError, "req_pool_indices", lambda: decode(table, [[0]], [5])),
        (TypeError, "req_pool_indices", lambda: decode(table, 0, [5])),
        (ValueError, "prefix_lens", lambda: step(table, [0], [5, 5], [6], 1)),
        (ValueError, "prefix_lens", lambda: step(table, [0], [-1], [6], 7)),
        (ValueError, "seq_lens", lambda: step(table, [0], [5], [4], 1)),
        (ValueError, "seq_lens", lambda: step(table, [0], [0], [2**31], 2**31 - 1)),
        (ValueError, "extend_num_tokens", lambda: step(table, [0], [5], [7], 1)),
        (ValueError, "extend_num_tokens", lambda: step(table, [0, -1], [5, 0], [7, 1], 2)),
        (ValueError, "extend_num_tokens", lambda: step(table, [0], [5], [7], -2)),
        (ValueError, "extend_num_tokens", lambda: step(table, [0], [5], [7], 2**31)),
        (TypeError, "extend_num_tokens", lambda: step(table, [0], [5], [7], 2.0)),
        (ValueError, "new_seq_lens", lambda: trim(table, [0], [5], [6])),
        (ValueError, "new_seq_lens", lambda: trim(table, [0], [5], [-1])),
        (ValueError, "new_seq_lens", lambda: trim(table, [0], [5], [1, 1])),
        (ValueError, "seq_lens", lambda: trim(table, [0], [2**31], [1])),
        (ValueError, "seq_lens", lambda: release(table, [0], [-1])),
        (ValueError, "seq_lens", lambda: release(table, [0, 1], [5])),
        (TypeError, "seq_lens", lambda: release(table, [0], None)),
    ]
    for error, match, call in calls:
        with pytest.raises(error, match=match):
            call()
    assert everything(pool, table) == before
    pool.check()


ROWS = [4, 5, -2, 2**31, -(2**31), 2**40, 2**63 - 1, -(2**63)]


@pytest.mark.parametrize("row", ROWS)
def test_rows_out_of_the_table(backend, kind, row):
    pool = make_pool(kind, backend, 9, 4, errors="defer")
    table = np.zeros((4, 12), np.int32)
    pool.extend_step(table, [0, 1], [0, 0], [5, 4], 9)
    before = everything(pool, table)
    batch = [1, row, 0]
    assert pool.decode_step(table, batch, [4, 0, 5]).tolist() == [0, 0, 0]
    assert error_of(pool) == ("TableRowError", "decode_step", 1, row)
    assert pool.extend_step(table, on_device(pool, batch), [4, 0, 5], [5, 1, 6], 3).tolist() == [0, 0, 0]
    assert error_of(pool) == ("TableRowError", "extend_step", 1, row)
    pool.trim(table, batch, [4, 1, 5], [1, 0, 2])
    assert error_of(pool) == ("TableRowError", "trim", 1, row)
    pool.release(table, batch, [4, 0, 5])
    assert error_of(pool) == ("TableRowError", "release", 1, row)
    assert everything(pool, table) == before
    assert pool.pool.free_pages_count() == 6
    pool.check_integrity()
    pool.release(table, [1, 0], [4, 5])
    assert pool.pool.free_pages_count() == 9


def test_columns_out_of_the_table(backend, kind):
    pool = make_pool(kind, backend, 90, 4, errors="defer")
    table = np.zeros((2, 6), np.int32)
    most = 6 if kind == "slots" else 24
    assert pool.extend_step(table, [0, 1], [0, 0], [most, most - 1], 2 * most - 1) is not None
    assert pool.decode_step(table, [1], [most - 1]) is not None
    before = everything(pool, table)
    assert pool.decode_step(table, [0], [most]).tolist() == [0]
    assert error_of(pool) == ("TableColumnError", "decode_step", 0, most + 1)
    assert pool.extend_step(table, [0, 1], [most, most], [most, most + 3], 3).tolist() == [0, 0, 0]
    assert error_of(pool) == ("TableColumnError", "extend_step", 1, most + 3)
    pool.trim(table, [1], [most + 1], [most])
    assert error_of(pool) == ("TableColumnError", "trim", 0, most + 1)
    pool.release(table, [1], [2**31 - 1])
    assert error_of(pool) == ("TableColumnError", "release", 0, 2**31 - 1)
    assert everything(pool, table) == before
    pool.release(table, [0, 1], [most, most])
    assert pool.pool.free_pages_count() == 90


@pytest.mark.parametrize(
    ("prefix", "seq"), [(-1, 1), (5, 4), (0, 2**31), (-(2**63), 1), (2**63 - 1, -(2**63)), (-(2**31), 0)]
)
def test_lengths_that_only_the_device_sees(kind, prefix, seq):
    pool = make_pool(kind, "cuda-random", 9, 4, errors="defer")
    table = np.zeros((4, 12), np.int32)
    pool.extend_step(table, [0, 1], [0, 0], [5, 4], 9)
    before = everything(pool, table)
    found = pool.extend_step(
        table, on_device(pool, [1, 0]), on_device(pool, [4, prefix]), on_device(pool, [6, seq]), 2
    )
    assert found.tolist() == [0, 0]
    assert error_of(pool) == ("LengthError", "extend_step", 1, seq)
    pool.trim(table, on_device(pool, [1, 0]), on_device(pool, [4, seq]), on_device(pool, [1, prefix]))
    assert error_of(pool)[:3] == ("LengthError", "trim", 1)
    assert pool.decode_step(table, on_device(pool, [0]), on_device(pool, [min(prefix, -1)])).tolist() == [0]
    assert error_of(pool)[:3] == ("LengthError", "decode_step", 0)
    pool.release(table, on_device(pool, [0]), on_device(pool, [-1]))
    assert error_of(pool)[:3] == ("LengthError", "release", 0)
    assert everything(pool, table) == before


def test_a_sum_that_only_the_device_sees(kind):
    pool = make_pool(kind, "cuda-random", 9, 4, errors="defer")
    table = np.zeros((4, 12), np.int32)
    before = everything(pool, table)
    for tokens in (1, 3, 700):
        found = pool.extend_step(table, on_device(pool, [0]), on_device(pool, [0]), on_device(pool, [2]), tokens)
        assert found.tolist() == [0] * tokens
        assert error_of(pool) == ("TokenCountError", "extend_step", -1, 2)
    assert everything(pool, table) == before


@pytest.mark.parametrize(
    ("cell", "error"),
    [
        ({"slots": -1, "pages": -1}, "OutOfRangeError"),
        ({"slots": 0, "pages": 0}, "OutOfRangeError"),
        ({"slots": 40, "pages": 10}, "OutOfRangeError"),
        ({"slots": 2**31 - 1, "pages": 2**31 - 1}, "OutOfRangeError"),
        ({"slots": -(2**31), "pages": -(2**31)}, "OutOfRangeError"),
        ({"slots": 36, "pages": 9}, "FreePageError"),
        ({"slots": 12, "pages": 3}, "SharedPageError"),
        ({"slots": 9, "pages": None}, "MisalignedError"),
        ({"slots": 7, "pages": None}, "MisalignedError"),
    ],
)
def test_garbage_in_the_table(backend, kind, cell, error):
    if cell[kind] is None:
        pytest.skip("a page cannot be misaligned")
    pool = make_pool(kind, backend, 9, 4, errors="defer")
    table = np.zeros((4, 12), np.int32)
    pool.extend_step(table, [0, 1], [0, 0], [5, 4], 9)
    pool.retain([3])
    at = 4 if kind == "slots" else 1
    table[0, at] = cell[kind]
    before = everything(pool, table)
    last = cell[kind] * (1 if kind == "slots" or cell[kind] < 0 else 4)
    assert pool.decode_step(table, [2, 0], [0, 5]).tolist() == [0, 0]
    assert error_of(pool) == (error, "decode_step", 1, last)
    assert pool.extend_step(table, [2, 0], [0, 5], [3, 9], 7).tolist() == [0] * 7
    assert error_of(pool) == (error, "extend_step", 1, last)
    assert everything(pool, table) == before
    pool.check_integrity()


def test_garbage_that_a_free_meets(backend, kind):
    pool = make_pool(kind, backend, 9, 4, errors="defer")
    table = np.zeros((4, 12), np.int32)
    pool.extend_step(table, [0, 1], [0, 0], [12, 4], 16)  # pages 1, 2, 3 and 4
    at = 4 if kind == "slots" else 1
    for cell in (-1, 0, 4 * 10 if kind == "slots" else 10, -(2**31), 2**31 - 1):
        table[2] = table[0]
        table[2, at] = cell
        pool.retain([1, 3])
        pool.release(table, [2], [12])
        assert error_of(pool) == ("OutOfRangeError", "release", 0, cell)
        assert pool.pool.free_pages_count() == 5
    table[2, at] = 4 * 9 if kind == "slots" else 9
    pool.trim(table, [1, 2], [4, 12], [4, 4])
    assert error_of(pool) == ("DoubleFreeError", "trim", 1, table[2, at])
    assert sorted(pool.pool.free_order()[0].tolist()) == [3, 5, 6, 7, 8, 9]  # the rest is freed
    pool.check_integrity()


def test_a_cell_is_not_looked_at_where_no_old_page_is_written(backend, kind):
    pool = make_pool(kind, backend, 9, 4)
    table = np.full((4, 12), -9, np.int32)
    assert pool.decode_step(table, [0], [4]).tolist() == [4]
    assert pool.extend_step(table, [1, 2], [8, 3], [9, 3], 1).tolist() == [8]
    pool.check()


def test_rows_released_twice(backend, kind):
    pool = make_pool(kind, backend, 9, 4, errors="defer")
    table = np.zeros((4, 12), np.int32)
    pool.extend_step(table, [0, 1], [0, 0], [5, 4], 9)
    pool.release(table, [0, 1, 0], [5, 4, 5])
    assert error_of(pool)[:3] == ("DoubleFreeError", "release", 2)
    assert pool.pool.free_pages_count() == 9
    pool.release(table, [1], [4])
    assert error_of(pool)[:3] == ("DoubleFreeError", "release", 0)
    pool.check_integrity()


def test_shared_prefixes_lose_one_owner_a_row(backend, kind):
    pool = make_pool(kind, backend, 9, 4)
    table = np.zeros((4, 12), np.int32)
    pool.extend_step(table, [0], [0], [8], 8)
    pool.retain([1, 2])
    table[1] = table[0]
    assert pool.extend_step(table, [0, 1], [8, 8], [9, 10], 3).tolist() == [12, 16, 17]
    pool.release(table, [0], [9])
    assert sorted(pool.pool.free_order()[0].tolist()) == [3, 5, 6, 7, 8, 9]
    pool.trim(table, [1], [10], [4])
    assert sorted(pool.pool.free_order()[0].tolist()) == [2, 3, 4, 5, 6, 7, 8, 9]
    pool.release(table, [1], [4])
    assert pool.pool.free_pages_count() == 9
    pool.check()
    pool.check_integrity()


def test_out_must_not_overlap_what_is_read(backend, kind):
    dtype = np.int32
    pool = make_pool(kind, backend, 9, 4)
    if not pool._on_gpu:
        pytest.skip("here int32 arguments are copied, and slots are int32")
    table = np.zeros((2, 12), dtype)
    rows, lens, more = np.zeros((3, 2), dtype)
    rows[1] = 1
    for out in (rows, lens):
        with pytest.raises(ValueError, match="overlap"):
            pool.decode_step(table, DeviceArray(rows), DeviceArray(lens), out=DeviceArray(out))
    with pytest.raises(ValueError, match="overlap"):
        pool.extend_step(table, DeviceArray(rows), DeviceArray(lens), DeviceArray(more), 2, out=DeviceArray(more))


@pytest.mark.parametrize("view", [lambda a: a, lambda a: a[::-1], lambda a: a[:1], lambda a: a[2:0:-1]])
def test_out_must_not_overlap_the_table(backend, kind, view):
    pool = make_pool(kind, backend, 9, 4)
    whole = np.zeros((4, 12), np.int32)
    table = view(whole)
    before = everything(pool, whole)
    out = table[-1, 5:6]
    with pytest.raises(ValueError, match="overlap"):
        pool.decode_step(table, [0], [0], out=DeviceArray(out) if pool._on_gpu else out)
    assert everything(pool, whole) == before


def test_lenient_pools_carry_out_what_harms_nobody(backend):
    pool = make_pool("slots", backend, 9, 4, strict=False, errors="defer")
    table = np.zeros((4, 12), np.int32)
    pool.extend_step(table, [0], [0], [6], 6)  # slots 4 .. 9
    table[0, 5] = 8  # one too low
    assert pool.decode_step(table, [0], [6]).tolist() == [9]
    assert error_of(pool) == ("MisalignedError", "decode_step", 0, 8)
    assert table[0, 6] == 9
    table[0, 5] = 11  # would run out of the page
    assert pool.decode_step(table, [0], [6]).tolist() == [0]
    assert error_of(pool) == ("MisalignedError", "decode_step", 0, 11)


# ---- debug, threads ------------------------------------------------------------------------------------------------


def test_debug_finds_duplicates(backend, kind):
    what = kind[:-1]

    def fresh():
        pool = make_pool(kind, backend, 9, 4, debug=True)
        table = np.zeros((4, 12), np.int32)
        pool.extend_step(table, [0, 1, -1], [0, 0, 0], [8, 4, 2], 14)
        return pool, table

    pool, table = fresh()
    pool.decode_step(table, [0, -1, 1, -1], [8, 0, 4, 9])
    table[0, 1] = table[0, 0]
    with pytest.raises(cupaged.IntegrityError, match=f"row 0 of the table holds {what} {table[0, 0]} twice"):
        pool.decode_step(table, [1, 0], [5, 9])
    pool, table = fresh()
    with pytest.raises(ValueError, match="row 1 twice"):
        pool.extend_step(table, [1, 0, 1], [4, 8, 4], [5, 9, 5], 3)
    pool, table = fresh()
    table[1] = 0  # cells of page 0 and below stand for nothing
    assert pool.decode_step(table, [1], [8]) is not None
    assert pool.decode_step(table, [-1, -1], [8, 8]).tolist() == [0, 0]
    assert pool.extend_step(table, [3], [0], [40], 40) is None
    with pytest.raises(cupaged.TableRowError):
        pool.release(table, [9], [1])


def test_debug_catches_a_step_at_once(backend, kind):
    pool = make_pool(kind, backend, 9, 4, debug=True)
    table = np.zeros((4, 12), np.int32)
    with pytest.raises(cupaged.OutOfRangeError):
        pool.decode_step(table, [0], [1])
    table[0] = 4 if kind == "slots" else 1
    with pytest.raises(cupaged.DoubleFreeError):
        pool.release(table, [0], [1])


def test_overlapping_calls_raise(backend, kind):
    pool = make_pool(kind, backend, 9, 4)
    table = np.zeros((4, 12), np.int32)
    pool.pool.enter("")
    try:
        for call in (
            lambda: pool.decode_step(table, [0], [0]),
            lambda: pool.extend_step(table, [0], [0], [2], 2),
            lambda: pool.trim(table, [0], [2], [1]),
            lambda: pool.release(table, [0], [2]),
        ):
            with pytest.raises(cupaged.ConcurrentCallError):
                call()
    finally:
        pool.pool.leave()
    assert pool.decode_step(table, [0], [0]).tolist() == [4]


def test_a_capture_needs_out():
    pool = make_pool("pages", "cuda-ascending", 9, 4)
    table = np.zeros((4, 12), np.int32)
    rows, lens = DeviceArray(np.zeros(1, np.int64)), DeviceArray(np.zeros(1, np.int64))
    pool.backend.capture = True
    with pytest.raises(cupaged.CaptureError, match="out="):
        pool.decode_step(table, rows, lens)
    with pytest.raises(cupaged.CaptureError, match="req_pool_indices"):
        pool.decode_step(table, [0], lens, out=DeviceArray(np.zeros(1, np.int32)))
    pool.backend.capture = False
    assert pool.decode_step(table, rows, lens).tolist() == [4]


# ---- what wide and small launches once got wrong -----------------------------------------------------------------


@pytest.mark.parametrize("name", HOSTED)
@pytest.mark.parametrize("n", [1, 1025])
def test_a_short_pool_is_told_first_whatever_row_a_request_names(name, n):
    pool = make(name, 16, 4)
    assert pool.alloc(16) is not None
    rows = [5] + [-1] * (n - 1)  # of two
    table = on_device(pool, np.zeros((2, 8)), np.int32)
    assert pool.decode_step(table, on_device(pool, rows), on_device(pool, [0] * n)) is None
    pool.check()


@pytest.mark.parametrize("name", HOSTED)
def test_the_offending_value_is_read_before_out_is_written(name):
    pool = make(name, 200 * 4, 4)
    last = np.full(100, -1)
    last[70] = 777  # in page 194, which is free
    seq = np.ones(100, np.int64)
    seq[70] = 3
    given = DeviceArray(last) if pool.device != "cpu" else last
    pool.alloc_decode(seq, given, out=given)
    with pytest.raises(cupaged.FreePageError) as caught:
        pool.check()
    assert (caught.value.index, caught.value.value) == (70, 777)
    assert last.tolist() == [0] * 100


@pytest.mark.parametrize("name", HOSTED)
@pytest.mark.parametrize("n", [0, 1, 4096, 4097, 9000])
def test_extends_of_nothing(name, n):
    pool = make(name, 64 * 16, 16)
    zeros = np.zeros(n, np.int64)
    assert pool.alloc_extend(zeros, zeros, zeros - 1, 0).size == 0
    assert pool.alloc_decode([1], [-1]).tolist() == [16]
    pool.check()


class Nothing:
    """An empty array on a GPU, at address 0, as torch and CuPy make them."""

    __cuda_array_interface__: ClassVar[dict] = {
        "data": (0, False),
        "shape": (0,),
        "typestr": "<i8",
        "strides": None,
        "version": 3,
    }


@pytest.mark.parametrize("tokens", [1, 4096, 5000, 100_000])
def test_an_empty_batch_on_the_device_is_not_read(tokens):
    pool = make("cuda-ascending", 200_000, 1, errors="defer")
    assert pool.alloc_extend(Nothing(), Nothing(), Nothing(), tokens).tolist() == [0] * tokens
    with pytest.raises(cupaged.TokenCountError):
        pool.check()
    assert pool.alloc_decode(Nothing(), Nothing()).size == 0
