"""Hand-offs to attention kernels, against a plain NumPy rendering of each."""

from __future__ import annotations

import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numba.core import config

import cupaged
from cupaged import backends
from cupaged.backends import numba_cpu
from cupaged.backends.gpu import GpuBackend
from cupaged.backends.numba_cpu import NumbaBackend
from cupaged.backends.reference import ReferenceBackend
from cupaged.interop import to_host
from tests.host_backend import DeviceArray, variant
from tests.host_cuda import exact_empty, run_python

PAGE_SIZES = (1, 2, 3, 16, 48, 64, 256)
CONTESTANTS = {
    "reference": ReferenceBackend,
    "numba": NumbaBackend,
    "cuda-ascending": variant("ascending"),
    "cuda-descending": variant("descending"),
    "cuda-random": variant("random"),
}
SIMULATED = bool(config.ENABLE_CUDASIM)  # tests/test_numba_cuda.py starts this file in such a process
if SIMULATED:
    from cupaged.backends.numba_cuda import NumbaCudaBackend
    from tests.test_numba_cuda import honest_simulator  # noqa: F401, a fixture that every test uses

    CONTESTANTS["numba-cuda"] = NumbaCudaBackend
LARGEST = 2**31 - 1
GARBAGE = (-1, -(2**31), LARGEST, -(2**63), 2**63 - 1, 2**40)


# ---- the rendering: arrays and repeats, no loop over pages -------------------------------------------------------


def held(table, paged, pad_row, size, rows, seq):
    """Tokens of each request, 0 where there is nothing to read."""
    room = min(table.shape[1] * (size if paged else 1), LARGEST)
    return np.where((rows != pad_row) & (rows >= 0) & (rows < len(table)) & (seq >= 0) & (seq <= room), seq, 0)


def cells(table, rows, columns):
    return table[rows, columns].astype(np.int64)


def ragged(counts, room):
    """Request and position in it of every entry, the first `room` of them."""
    counts = [min(int(c), room) for c in counts]
    request = np.repeat(np.arange(len(counts)), counts)
    nth = np.concatenate([np.zeros(0, np.int64), *(np.arange(c) for c in counts)]).astype(np.int64)
    return request[:room], nth[:room]


def pages_at(table, paged, size, num_pages, rows, nth):
    page = cells(table, rows, nth) if paged else np.floor_divide(cells(table, rows, nth * size), size)
    return np.where((page < 0) | (page > num_pages), 0, page)


def render_flashinfer(table, paged, pad_row, size, num_pages, rows, seq, room):
    tokens = held(table, paged, pad_row, size, rows, seq)
    counts = -(-tokens // size)
    request, nth = ragged(counts, room)
    indices = np.zeros(room, np.int64)
    indices[: len(nth)] = pages_at(table, paged, size, num_pages, rows[request], nth)
    given = np.bincount(request, minlength=len(rows))[: len(rows)]
    last = np.where(given == counts, tokens - (counts - 1) * size, size)
    return np.concatenate([[0], np.cumsum(given)]), indices, np.where(given == 0, 0, last)


def render_block_table(table, paged, pad_row, size, num_pages, rows, seq, parts, width):
    tokens = held(table, paged, pad_row, size, rows, seq)
    column = np.arange(width)[None, :]
    filled = column < -(-tokens // (size // parts))[:, None]
    i, k = np.nonzero(filled)
    out = np.zeros((len(rows), width), np.int64)
    out[i, k] = pages_at(table, paged, size, num_pages, rows[i], k // parts) * parts + k % parts
    return out


def render_slots(table, paged, pad_row, size, num_pages, rows, prefix, seq, num_tokens):
    holds = (prefix >= 0) & (seq >= prefix) & (seq <= LARGEST)
    counts = np.where(holds, seq - np.where(holds, prefix, 0), 0)
    request, nth = ragged(np.where(holds, counts, 0), num_tokens)
    read = (held(table, paged, pad_row, size, rows, seq) > 0)[request]
    token, row = (prefix[request] + nth)[read], rows[request][read]
    slot = cells(table, row, token // size) * size + token % size if paged else cells(table, row, token)
    out = np.full(num_tokens, -1, np.int64)
    out[np.flatnonzero(read)] = np.where((slot < 0) | (slot >= (num_pages + 1) * size), -1, slot)
    return out


# ---- every backend, good input and bad ---------------------------------------------------------------------------


def exact_table(rows, columns):
    """Table of garbage whose rows lie further apart than they are long, and whose last cell ends its memory."""
    stride = columns + 3
    flat = exact_empty(max(0, rows - 1) * stride + columns * min(1, rows), np.int32)
    return np.ndarray((rows, columns), np.int32, flat, 0, (4 * stride, 4))


class Case:
    """One backend, one table; each check runs a hand-off into garbage and compares it with the rendering."""

    def __init__(self, contestant, rng, page_size, paged, rows=9, columns=7, num_pages=50, pad_row=-1):
        self.rng, self.size, self.paged, self.num_pages, self.pad_row = rng, page_size, paged, num_pages, pad_row
        dtype = np.dtype(rng.choice(["int32", "int64"]))
        self.backend = contestant(
            num_pages=num_pages,
            page_size=page_size,
            index_dtype=dtype,
            max_batch=4,
            need_sort=False,
            strict=True,
            refused_slot=0,
            device_index=0,
        )
        if paged:
            table = rng.integers(-2, num_pages + 3, (rows, columns))
        else:
            table = rng.integers(-3, (num_pages + 1) * page_size + 4, (rows, columns * page_size - page_size // 2))
        self.table = exact_table(*table.shape)
        self.table[:] = table
        self.on_gpu = issubclass(contestant, GpuBackend)
        self.words = to_host(self.backend.words).copy()

    def lend(self, array):
        return DeviceArray(array) if self.on_gpu else array

    def vector(self, values):
        """The values as the kernels take them, of a dtype that holds them and any stride."""
        narrow = values.size == 0 or (values.min() >= -(2**31) and values.max() <= LARGEST)
        dtype = np.int32 if narrow and self.rng.integers(2) else np.int64
        step = int(self.rng.choice([1, 1, 3, -1]))
        spread = exact_empty(max(0, values.size - 1) * abs(step) + min(1, values.size), dtype)[::step]
        spread[:] = values
        return self.backend.vector(self.lend(spread), "argument")

    def output(self, n, dtype):
        out = exact_empty(n, dtype)
        out[:] = 123
        return out, self.backend.given_array(self.lend(out), "out", np.dtype(dtype), n)[0]

    def output_table(self, rows, width):
        out = exact_table(rows, width)
        out.base[:] = 123
        return out, self.backend.table(self.lend(out), "out")

    @property
    def common(self):
        return self.table, self.paged, self.pad_row, self.size, self.num_pages

    def lengths(self, n, bad):
        rng = self.rng
        rows = rng.integers(0, len(self.table), n)
        most = self.table.shape[1] * (self.size if self.paged else 1)
        seq = rng.integers(0, most + 1, n) * (rng.random(n) < 0.8)
        prefix = (seq * rng.random(n)).astype(np.int64)
        rows[rng.random(n) < 0.15] = self.pad_row
        if bad and n:
            for array in (rows, seq, prefix):
                for i in np.flatnonzero(rng.random(n) < 0.2):
                    array[i] = int(rng.choice([*GARBAGE[:3], len(self.table), most + 1, *GARBAGE[3:]]))
        return rows, prefix, seq

    def check(self, n, bad):
        rows, prefix, seq = self.lengths(n, bad)
        total = render_flashinfer(*self.common, rows, seq, n * self.table.shape[1])[0][-1]
        for room in {int(total), int(total) + 5, int(total) // 2, 0}:
            self.flashinfer(rows, seq, room)
        for parts in {1, *(p for p in (2, 3, 16, self.size) if self.size % p == 0)}:
            for width in {0, 3 * parts, self.table.shape[1] * parts}:
                if n * width < 40_000:
                    self.block_table(rows, seq, parts, width)
        holds = (prefix >= 0) & (prefix <= seq) & (seq <= LARGEST)
        tokens = min(int((seq - np.where(holds, prefix, 0))[holds].sum()), 20_000)
        for num_tokens in {tokens, tokens + 5, tokens // 2}:
            self.slots(rows, prefix, seq, num_tokens)
        np.testing.assert_array_equal(to_host(self.backend.words), self.words)  # no op, no error, no mail

    def read(self, rows, *vectors):
        cells = self.backend.table(self.lend(self.table), "table")
        return cells, self.paged, self.pad_row, self.vector(rows), *map(self.vector, vectors)

    def flashinfer(self, rows, seq, room):
        indptr, a = self.output(len(rows) + 1, np.int32)
        indices, b = self.output(room, np.int32)
        last, c = self.output(len(rows), np.int32)
        self.backend.flashinfer_tables(*self.read(rows, seq), a, b, room, c)
        expected = render_flashinfer(*self.common, rows, seq, room)
        for found, wanted in zip((indptr, indices, last), expected, strict=True):
            np.testing.assert_array_equal(found, wanted, err_msg=f"{rows} {seq} {room}")

    def block_table(self, rows, seq, parts, width):
        found, out = self.output_table(len(rows), width)
        self.backend.block_table(*self.read(rows, seq), parts, out)
        expected = render_block_table(*self.common, rows, seq, parts, width)
        np.testing.assert_array_equal(found, expected, err_msg=f"{rows} {seq} {parts}")
        assert (found.base == 123).sum() == found.base.size - (found != 123).sum()

    def slots(self, rows, prefix, seq, num_tokens):
        found, out = self.output(num_tokens, np.int64)
        self.backend.slot_mapping(*self.read(rows, prefix, seq), num_tokens, out)
        expected = render_slots(*self.common, rows, prefix, seq, num_tokens)
        np.testing.assert_array_equal(found, expected, err_msg=f"{rows} {prefix} {seq}")


def play(contestant, seed, page_size):
    rng = np.random.default_rng(seed)
    paged, pad_row = bool(rng.integers(2)), int(rng.choice([-1, -1, 0, 4, 99]))
    case = Case(contestant, rng, page_size, paged, pad_row=pad_row)
    case.check(int(rng.choice([0, 1, 2, 5, 12])), bad=bool(rng.integers(2)))


@pytest.mark.parametrize("name", CONTESTANTS)
@settings(max_examples=3 if SIMULATED else 40, deadline=None)
@given(seed=st.integers(0, 2**32), page_size=st.sampled_from(PAGE_SIZES))
def test_same_as_rendering(name, seed, page_size):
    play(CONTESTANTS[name], seed, page_size)


def large(contestant, n):
    """More requests than a block has threads, more output than one block writes."""
    rng = np.random.default_rng(n)
    for paged in (True, False):
        case = Case(contestant, rng, 3, paged, rows=50, columns=6)
        rows, prefix, seq = case.lengths(n, bad=True)
        pages = int(render_flashinfer(*case.common, rows, seq, n * 6)[0][-1])
        for room in (pages, pages + 4000, pages // 2):
            case.flashinfer(rows, seq, room)
        case.block_table(rows, seq, 3, 7)
        # few long requests: one's entries are many blocks' work
        case.slots(rows[:300], prefix[:300], seq[:300], 3000)
        seq = np.minimum(prefix + 3, case.table.shape[1])
        case.slots(rows, prefix, seq, 2 * n)
    long = Case(contestant, rng, 16, True, rows=3, columns=400)
    long.slots(np.array([2, -1, 0]), np.array([7, 0, 1]), np.array([5000, 3000, 6400]), 14_500)
    long.flashinfer(np.array([0, 1, 2] * 6), np.array([6400, 0, 6399] * 6), 18 * 400)


@pytest.mark.parametrize("name", CONTESTANTS)
def test_large(name):
    large(CONTESTANTS[name], 60 if SIMULATED else 2500)


def test_each_is_one_launch():
    case = Case(CONTESTANTS["cuda-ascending"], np.random.default_rng(1), 16, True)
    case.backend.launches.clear()
    rows, seq = np.array([1, 2]), np.array([20, 30])
    case.flashinfer(rows, seq, 4)
    case.block_table(rows, seq, 1, 4)
    case.block_table(rows, seq, 4, 28)
    case.slots(rows, seq - 3, seq, 6)
    assert case.backend.launches == ["handoff_pages", "handoff_block_table", "handoff_block_table", "handoff_slots"]
    # and no launch reads a table that is gone
    assert not case.backend._args["table"][0]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["asan", "tsan"])
def test_kernels_are_clean(mode):
    done = run_python(mode, Path(__file__), mode)
    assert done.returncode == 0, done.stderr[-4000:]


# ---- the methods ---------------------------------------------------------------------------------------------------


def make(name, page_size, paged, size=None, **options):
    """An allocator of either kind on a named backend."""
    size = size or 50 * page_size
    with mock.patch.object(backends, "pick", return_value=CONTESTANTS[name]):
        if paged:
            return cupaged.KVAllocator(size + page_size, "cpu", 8, 5 * page_size, page_size, **options)
        return cupaged.PagedTokenToKVPoolAllocator(size, page_size, **options)


HOST = ("reference", "numba")


@pytest.mark.parametrize("name", HOST)
@pytest.mark.parametrize("paged", [True, False])
def test_worked_example(name, paged):
    pool = make(name, 4, paged)
    table = np.array([[5, 2, 9], [7, 0, 0], [1, 3, 0]], np.int32)
    if not paged:
        table = (table[:, :, None] * 4 + np.arange(4)).reshape(3, 12).astype(np.int32)
    rows, seq = np.array([2, -1, 0, 1]), np.array([8, 3, 9, 0])
    indptr, indices, last = pool.flashinfer_tables(table, rows, seq)
    assert indptr.tolist() == [0, 2, 2, 5, 5]
    assert indices.tolist() == [1, 3, 5, 2, 9]
    assert last.tolist() == [4, 0, 1, 0]
    assert {x.dtype for x in (indptr, indices, last)} == {np.dtype(np.int32)}
    found = pool.block_table(table, rows, seq, 3)
    assert found.tolist() == [[1, 3, 0], [0, 0, 0], [5, 2, 9], [0, 0, 0]]
    found = pool.expand_page_table(table, rows, seq, 2)
    assert found.dtype == np.int32
    assert found.tolist() == [[2, 3, 6, 7, 0, 0], [0] * 6, [10, 11, 4, 5, 18, 0], [0] * 6]
    found = pool.slot_mapping(table, rows, np.array([6, 1, 7, 0]), seq, 9)
    assert found.dtype == np.int64
    assert found.tolist() == [14, 15, -1, -1, 11, 36, -1, -1, -1]


@pytest.mark.parametrize("name", HOST)
def test_library_and_out(name):
    pool = make(name, 4, True)
    table = torch.tensor([[5, 2, 9]], dtype=torch.int32)
    rows, seq = torch.tensor([0]), torch.tensor([6], dtype=torch.int32)
    for found in (*pool.flashinfer_tables(table, rows, seq), pool.block_table(table, rows, seq, 2)):
        assert isinstance(found, torch.Tensor)
        assert found.dtype == torch.int32
    assert pool.slot_mapping(table, rows, seq - 1, seq, 1).dtype == torch.int64
    out = torch.empty(2, dtype=torch.int32), torch.full((5,), 7, dtype=torch.int32), torch.empty(1, dtype=torch.int32)
    assert pool.flashinfer_tables(table, rows, seq, out=out) is out
    assert [x.tolist() for x in out] == [[0, 2], [5, 2, 0, 0, 0], [2]]
    buffer = torch.full((3, 8), 7, dtype=torch.int32)
    assert pool.expand_page_table(table, rows, seq, 1, out=buffer[:1, :7]).tolist() == [[20, 21, 22, 23, 8, 9, 0]]
    assert buffer[0, 7] == 7


def test_nothing_at_all():
    for name in HOST:
        pool, none = make(name, 4, True), np.zeros(0, np.int64)
        table = np.zeros((0, 3), np.int32)
        assert [x.tolist() for x in pool.flashinfer_tables(table, none, none)] == [[0], [], []]
        assert pool.block_table(table, none, none, 3).shape == (0, 3)
        assert pool.expand_page_table(table, none, none, 2).shape == (0, 6)
        assert pool.slot_mapping(table, none, none, none, 2).tolist() == [-1, -1]


def on_device(*values):
    return [DeviceArray(np.array(v)) for v in values]


def test_number_of_pages_is_not_waited_for():
    pool = make("cuda-random", 4, False)
    table = np.arange(2 * 10, dtype=np.int32).reshape(2, 10)
    rows, seq = on_device([1, -1, 0], [5, 1, 9])
    indptr, indices, last = pool.flashinfer_tables(table, rows, seq)
    assert indices.tolist() == [2, 3, 0, 1, 2, 0, 0, 0, 0]  # 3 requests of at most ceil(10 / 4) pages
    assert (indptr.tolist(), last.tolist()) == ([0, 2, 2, 5], [1, 0, 1])
    assert len(pool.flashinfer_tables(table, rows, seq, seq_lens_cpu=[5, 0, 9])[1]) == 5
    assert len(pool.flashinfer_tables(table, rows, seq, seq_lens_cpu=[5, 1, 9])[1]) == 6  # may be no padding
    assert len(pool.flashinfer_tables(table, [1, -1, 0], seq, seq_lens_cpu=[5, 1, 9])[1]) == 5
    with pytest.raises(ValueError, match="one entry for each of the 3 requests"):
        pool.flashinfer_tables(table, rows, seq, seq_lens_cpu=[5, 0])
    with pytest.raises(ValueError, match="seq_lens_cpu must be on the host"):
        pool.flashinfer_tables(table, rows, seq, seq_lens_cpu=seq)
    # what the device finds otherwise than it was told is cut off
    indptr, indices, last = pool.flashinfer_tables(table, rows, seq, seq_lens_cpu=[5, 0, 8])
    assert (indptr.tolist(), indices.tolist(), last.tolist()) == ([0, 2, 2, 4], [2, 3, 0, 1], [1, 0, 4])


def test_capture_needs_out():
    pool = make("cuda-ascending", 4, True)
    table = np.zeros((2, 3), np.int32)
    rows, seq = on_device([1, 0], [5, 9])
    pool.backend.capture = True
    with pytest.raises(cupaged.CaptureError, match="out="):
        pool.flashinfer_tables(table, rows, seq)
    with pytest.raises(cupaged.CaptureError, match="out="):
        pool.block_table(table, rows, seq, 3)
    with pytest.raises(cupaged.CaptureError, match="out="):
        pool.expand_page_table(table, rows, seq, 2)
    with pytest.raises(cupaged.CaptureError, match="out="):
        pool.slot_mapping(table, rows, rows, seq, 3)
    with pytest.raises(cupaged.CaptureError, match="on the host"):
        pool.block_table(table, [0, 1], seq, 3, out=DeviceArray(np.zeros((2, 3), np.int32)))
    pool.backend.launches.clear()
    outs = [DeviceArray(np.zeros(n, np.int32)) for n in (3, 6, 2)]
    pool.flashinfer_tables(table, rows, seq, out=outs)
    pool.block_table(table, rows, seq, 3, out=DeviceArray(np.zeros((2, 3), np.int32)))
    pool.slot_mapping(table, rows, rows, seq, 3, out=DeviceArray(np.zeros(3, np.int64)))
    assert len(pool.backend.launches) == 3


def test_no_call_compiles():
    kernels = [x for x in vars(numba_cpu).values() if hasattr(x, "signatures")]
    pool = make("numba", 4, False)
    pool.warmup()
    before = [len(kernel.signatures) for kernel in kernels]
    whole = np.zeros((3, 20), np.int32)
    for table in (whole, whole[::2, :15]):
        pool.extend_step(table, [0, 1], [0, 0], [6, 3], 9)
        pool.flashinfer_tables(table, [0, 1], [6, 3])
        pool.block_table(table, [0, 1], [6, 3], 2)
        pool.slot_mapping(table, [0, 1], [0, 0], [6, 3], 9)
        pool.release(table, [0, 1], [6, 3])
    assert [len(kernel.signatures) for kernel in kernels] == before


def test_nothing_of_the_pool_changes():
    pool = make("numba", 4, False)
    table = np.zeros((2, 8), np.int32)
    pool.extend_step(table, [0, 1], [0, 0], [6, 3], 9)
    before = pool.stats(), pool.backend.snapshot()[2].tolist()
    pool.flashinfer_tables(table, [0, 1], [6, 3])
    pool.slot_mapping(table, [0, 1], [0, 0], [6, 3], 9)
    assert (pool.stats(), pool.backend.snapshot()[2].tolist()) == before


BAD = {
    "row": (lambda p, t: p.block_table(t, [3], [1], 2), r"req_pool_indices\[0\] is 3, but the table has 2 rows"),
    "negative row": (lambda p, t: p.slot_mapping(t, [0, -5], [0, 0], [1, 1], 2), r"req_pool_indices\[1\] is -5"),
    "length": (lambda p, t: p.flashinfer_tables(t, [0, 1], [4, 13]), r"seq_lens\[1\] is 13.* between 0 and 12"),
    "negative length": (lambda p, t: p.expand_page_table(t, [0], [-1], 2), r"seq_lens\[0\] is -1"),
    "prefix": (lambda p, t: p.slot_mapping(t, [0], [3], [2], 2), r"prefix_lens\[0\] is 3"),
    "sum": (lambda p, t: p.slot_mapping(t, [0, -1], [0, 0], [2, 2], 3), "num_tokens is 3, but .* sums to 4"),
    "lengths": (lambda p, t: p.flashinfer_tables(t, [0, 1], [4]), "seq_lens must have one entry for each"),
    "too narrow": (lambda p, t: p.block_table(t, [0], [9], 2), "max_pages must be at least 3 for 9 tokens, not 2"),
    "no divisor": (lambda p, t: p.expand_page_table(t, [0], [9], 3), "must divide page_size, 4, but 3 does not"),
    "negative": (lambda p, t: p.block_table(t, [0], [9], -1), "max_pages must be at least 0"),
    "many tokens": (lambda p, t: p.slot_mapping(t, [0], [0], [1], 2**31), "num_tokens must be at most"),
    "narrow out": (
        lambda p, t: p.expand_page_table(t, [0], [9], 1, out=np.zeros((1, 8), np.int32)),
        r"out.shape\[1\] must be at least 9",
    ),
    "out's shape": (
        lambda p, t: p.block_table(t, [0], [9], 3, out=np.zeros((2, 3), np.int32)),
        r"out must be of shape \(1, 3\), not \(2, 3\)",
    ),
    "out's rows": (
        lambda p, t: p.expand_page_table(t, [0], [9], 1, out=np.zeros((2, 12), np.int32)),
        r"out must be of shape \(1, n\), not \(2, 12\)",
    ),
    "short out": (
        lambda p, t: p.flashinfer_tables(t, [0], [9], out=[np.zeros(n, np.int32) for n in (2, 2, 1)]),
        "kv_indices, must have room for 3 pages, not 2",
    ),
    "short indptr": (
        lambda p, t: p.flashinfer_tables(t, [0], [9], out=[np.zeros(n, np.int32) for n in (1, 3, 1)]),
        r"kv_indptr, must be contiguous, writeable and of shape \(2,\)",
    ),
}


@pytest.mark.parametrize("name", HOST)
@pytest.mark.parametrize("what", BAD)
def test_host_visible_mistakes_raise(name, what):
    call, message = BAD[what]
    pool, table = make(name, 4, True), np.ones((2, 3), np.int32)
    with pytest.raises(ValueError, match=message):
        call(pool, table)
    pool.block_table(table, [0], [9], 3)  # and the allocator goes on


def test_mistakes_of_type_raise():
    pool, table = make("numba", 4, True), np.ones((2, 3), np.int32)
    with pytest.raises(TypeError, match="max_pages must be an integer"):
        pool.block_table(table, [0], [9], 3.0)
    with pytest.raises(TypeError, match="out must be a tuple of three arrays"):
        pool.flashinfer_tables(table, [0], [9], out=np.zeros(3, np.int32))
    with pytest.raises(TypeError, match="kv_indices, must be int32, not int64"):
        pool.flashinfer_tables(table, [0], [9], out=[np.zeros(2, np.int32), np.zeros(3, np.int64), np.zeros(1, "i4")])
    with pytest.raises(TypeError, match="out must be int64, not int32"):
        pool.slot_mapping(table, [0], [0], [1], 1, out=np.zeros(1, np.int32))
    with pytest.raises(TypeError, match="table must be int32"):
        pool.block_table(table.astype(np.int64), [0], [9], 3)


def test_largest_kernel_page_id():
    # Counts a slot that nobody touches take no memory.
    with mock.patch.object(CONTESTANTS["cuda-ascending"], "_native_zeros", lambda self, shape: np.zeros(shape, "i4")):
        pool = make("cuda-ascending", 2**20, True, size=2**20 * 2046)
    rows, seq = on_device([0], [2])
    out = pool.expand_page_table(np.full((1, 4), 2046, np.int32), rows, seq, 1, out=np.zeros((1, 2), np.int32))
    assert out.tolist() == [[2046 * 2**20, 2046 * 2**20 + 1]]


def test_upper_bound_must_fit():
    pool = make("cuda-ascending", 1, True)
    table = np.lib.stride_tricks.as_strided(np.zeros(1, np.int32), (1, 2**30), (4, 4))
    rows, seq = on_device([0, 0], [0, 0])
    with pytest.raises(ValueError, match="kv_indices may need 2147483648 entries; give out="):
        pool.flashinfer_tables(table, rows, seq)


# ---- what it is for ------------------------------------------------------------------------------------------------


def attention(query, keys, values):
    return torch.softmax(query @ keys.T / keys.shape[1] ** 0.5, dim=-1) @ values


def through_flashinfer(cache, size, indptr, indices, last, i):
    pages = indices[indptr[i] : indptr[i + 1]].long()
    tokens = (len(pages) - 1) * size + int(last[i])
    return cache.view(-1, size, cache.shape[1])[pages].flatten(0, 1)[:tokens]


def through_blocks(cache, size, blocks, tokens, i):
    return cache.view(-1, size, cache.shape[1])[blocks[i].long()].flatten(0, 1)[:tokens]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("paged", [True, False])
def test_attention_over_the_paged_cache(device, paged):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    size, kernel_size, width, where = 12, 4, 16, torch.device(device)
    if paged:
        pool = cupaged.KVAllocator(40 * size, where, 8, 5 * size, size)
        table = pool.req_to_page
    else:
        pool = cupaged.PagedTokenToKVPoolAllocator(40 * size, size, device=where)
        table = torch.zeros(8, 5 * size, dtype=torch.int32, device=where)
    torch.manual_seed(0)
    rows = torch.tensor([3, -1, 0, 6, 5], device=where)
    prefix = torch.tensor([0, 0, 0, 0, 0], device=where)
    caches = [torch.full((41 * size, width), float("nan"), device=where) for _ in range(2)]
    contiguous = [[torch.zeros(0, width, device=where) for _ in range(5)] for _ in caches]
    # three chunks of each request's prompt, so that its pages lie apart
    for added in ([7, 1, 12, 30, 0], [20, 1, 1, 5, 0], [24, 1, 11, 13, 0]):
        seq = prefix + torch.tensor(added, device=where)
        pool.extend_step(table, rows, prefix, seq, sum(added))
        slots = pool.slot_mapping(table, rows, prefix, seq, sum(added) + 3)
        new = [torch.randn(len(slots), width, device=where) for _ in caches]
        for cache, parts, of_new in zip(caches, contiguous, new, strict=True):
            cache[slots[slots >= 0]] = of_new[slots >= 0]
            begin = 0
            for i, n in enumerate(added):
                parts[i] = torch.cat([parts[i], of_new[begin : begin + n]])
                begin += n
        prefix = seq
    pool.check()
    indptr, indices, last = pool.flashinfer_tables(table, rows, seq)
    blocks = pool.block_table(table, rows, seq, 5)
    small = pool.expand_page_table(table, rows, seq, kernel_size)
    assert small.shape == (5, 5 * size // kernel_size)
    assert (int(indptr[2] - indptr[1]), int(last[1])) == (0, 0)
    query = torch.randn(2, width, device=where)
    for i in (0, 2, 3):
        tokens = int(seq[i])
        wanted = attention(query, contiguous[0][i], contiguous[1][i])
        for gather, arguments in (
            (through_flashinfer, (size, indptr, indices, last, i)),
            (through_blocks, (size, blocks, tokens, i)),
            (through_blocks, (kernel_size, small, tokens, i)),
        ):
            keys, values = (gather(cache, *arguments) for cache in caches)
            assert keys.shape == (tokens, width)
            torch.testing.assert_close(attention(query, keys, values), wanted, rtol=0, atol=0)


@pytest.mark.gpu
def test_replays_on_a_gpu_follow_their_inputs():
    cupy = pytest.importorskip("cupy")
    if not cupy.cuda.is_available():
        pytest.skip("needs a GPU")
    rng = np.random.default_rng(5)
    size, n, columns = 16, 3000, 40
    pool = cupaged.PagedTokenToKVPoolAllocator(5000 * size, size, device=torch.device("cuda"))
    host = rng.integers(-3, 5000 * size, (n, columns * size)).astype(np.int32)
    table = torch.from_numpy(host).cuda()
    rows, seq, prefix = (torch.zeros(n, dtype=torch.int64, device="cuda") for _ in range(3))
    made = {k: torch.empty(k, dtype=torch.int32, device="cuda") for k in (n + 1, n * columns, n)}
    blocks = torch.empty(n, columns, dtype=torch.int32, device="cuda")
    slots = torch.empty(20_000, dtype=torch.int64, device="cuda")
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        graph.capture_begin()
        pool.flashinfer_tables(table, rows, seq, out=tuple(made.values()))
        pool.block_table(table, rows, seq, columns, out=blocks)
        pool.slot_mapping(table, rows, prefix, seq, len(slots), out=slots)
        graph.capture_end()
    for bad in (False, True, True):
        r, s = rng.integers(-1, n, n), rng.integers(0, columns * size + 1, n)
        p = np.maximum(0, s - rng.integers(0, 9, n))
        if bad:
            for x in (r, s, p):
                x[rng.integers(0, n, 50)] = rng.choice(GARBAGE, 50)
        for tensor, values in ((rows, r), (seq, s), (prefix, p)):
            tensor.copy_(torch.from_numpy(values))
        graph.replay()
        torch.cuda.synchronize()
        common = host, False, -1, size, 5000
        for found, wanted in zip(made.values(), render_flashinfer(*common, r, s, n * columns), strict=True):
            np.testing.assert_array_equal(to_host(found), wanted)
        np.testing.assert_array_equal(to_host(blocks), render_block_table(*common, r, s, 1, columns))
        np.testing.assert_array_equal(to_host(slots), render_slots(*common, r, p, s, len(slots)))


def main(mode):
    """Child process: the kernels under a sanitizer. ThreadSanitizer has room for few threads and blocks."""
    for seed in range(4 if mode == "tsan" else 25):
        order = ("ascending", "descending", "random")[seed % 3]
        play(variant(order, mode), seed, int(np.random.default_rng(seed).choice(PAGE_SIZES[:4])))
    if mode == "asan":
        large(variant("random", mode), 1100)
    else:
        blocks = Case(variant("random", mode), np.random.default_rng(1), 1, True, rows=2, columns=2500)
        blocks.slots(np.array([1, 0]), np.array([3, 0]), np.array([2000, 900]), 3000)
        blocks.flashinfer(np.array([1, 0]), np.array([1500, 700]), 2300)


if __name__ == "__main__":
    main(sys.argv[1])
