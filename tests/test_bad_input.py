"""What bad input gets: every row of the table in docs/design.md, and every mistake that the host can see."""

from __future__ import annotations

import re
from unittest import mock

import numpy as np
import pytest
import torch

import cupaged
from cupaged import PagedTokenToKVPoolAllocator
from tests.allocators import HOSTED, make
from tests.host_backend import DeviceArray, HostCudaBackend

FRONTS = ("reference", "numba", "cuda-ascending")


@pytest.fixture(autouse=True)
def _torch_of_the_cpu(monkeypatch):
    """torch built for the CPU has no streams for the GPU that the host plays."""
    monkeypatch.setattr(HostCudaBackend, "use_library", lambda self, *arrays: self.native)


def facts(pool):
    return pool.free_pages.tolist(), pool.stats().ops, pool.available_size(), pool.stats().refusals


def refused(pool, call, kind: type[Exception], *words: str) -> None:
    """The call raises exactly this type, says all of these words, changes nothing, and leaves the pool usable."""
    before = facts(pool)
    with pytest.raises((TypeError, ValueError)) as caught:
        call()
    message = str(caught.value)
    assert type(caught.value) is kind, message
    for word in words:
        assert word in message, message
    assert facts(pool) == before
    assert not pool.pool._lock.locked()


@pytest.fixture(params=FRONTS)
def pool(request):
    made = make(request.param, 16 * 4, 4)
    made.alloc(8)
    return made


# ---- arrays ------------------------------------------------------------------------------------------------------

BAD_ARRAYS = {
    "none": (None, TypeError, "NoneType"),
    "text": ("12", TypeError, "str"),
    "bytes": (b"12", TypeError, "bytes"),
    "number": (5, TypeError, "int"),
    "set": ({1}, TypeError, "set"),
    "dict": ({1: 1}, TypeError, "dict"),
    "generator": ((i for i in [1]), TypeError, "generator"),
    "zero-dim": (np.array(3), ValueError, "shape ()"),
    "numpy-scalar": (np.int64(3), ValueError, "shape ()"),
    "two-dim": (np.zeros((1, 1), np.int64), ValueError, "shape (1, 1)"),
    "nested-list": ([[1]], ValueError, "shape (1, 1)"),
    "ragged-list": ([[1], [2, 3]], ValueError, "flat list"),
    "float": (np.zeros(1), TypeError, "float64"),
    "float-list": ([1.0], TypeError, "float64"),
    "bool": (np.zeros(1, bool), TypeError, "bool"),
    "bool-list": ([True], TypeError, "bool"),
    "uint8": (np.zeros(1, np.uint8), TypeError, "uint8"),
    "uint32": (np.zeros(1, np.uint32), TypeError, "uint32"),
    "uint64": (np.zeros(1, np.uint64), TypeError, "uint64"),
    "int16": (np.zeros(1, np.int16), TypeError, "int16"),
    "big-endian": (np.zeros(1, ">i8"), TypeError, ">i8"),
    "object": (np.array([1], object), TypeError, "object"),
    "strings": (["a"], TypeError, "integers"),
    "none-in-list": ([None], TypeError, "integers"),
    "timedelta": (np.zeros(1, "m8[s]"), TypeError, "timedelta64"),
    "complex": (np.zeros(1, complex), TypeError, "complex128"),
    "structured": (np.zeros(1, [("a", "i8")]), TypeError, "int64"),
    "over-int64": ([2**63], ValueError, "int64"),
    "torch-float": (torch.zeros(1), TypeError, "float32"),
    "torch-bool": (torch.zeros(1, dtype=torch.bool), TypeError, "bool"),
    "torch-int16": (torch.zeros(1, dtype=torch.int16), TypeError, "int16"),
    "torch-two-dim": (torch.zeros((1, 1), dtype=torch.int64), ValueError, "shape (1, 1)"),
    "torch-zero-dim": (torch.tensor(3), ValueError, "shape ()"),
}
# These have no NumPy view at all, or are no arrays though they come from torch.
BAD_TORCH = {
    "meta": torch.zeros(1, dtype=torch.int64, device="meta"),
    "sparse": torch.zeros(1, dtype=torch.int64).to_sparse(),
    "bfloat16": torch.zeros(1, dtype=torch.bfloat16),
    "dtype": torch.int64,
    "device": torch.device("cpu"),
}
HUGE_LISTS = {"2**64": [2**64], "2**200": [2**200], "below": [-(2**63) - 1], "mixed": [2**63, -1]}

CALLS = {
    "prefix_lens": lambda p, x: p.alloc_extend(x, [1], [-1], 1),
    "seq_lens": lambda p, x: p.alloc_decode(x, [-1]),
    "last_loc": lambda p, x: p.alloc_decode([1], x),
    "prefix_lens_cpu": lambda p, x: p.alloc_extend([0], [1], [-1], 1, prefix_lens_cpu=x),
    "seq_lens_cpu": lambda p, x: p.alloc_decode([1], [-1], seq_lens_cpu=x),
    "free_index": lambda p, x: p.free(x),
    "page_ids": lambda p, x: p.retain(x),
}


@pytest.mark.parametrize("name", BAD_ARRAYS)
@pytest.mark.parametrize("argument", CALLS)
def test_what_is_no_vector_of_integers(pool, name, argument):
    value, kind, said = BAD_ARRAYS[name]
    if name == "none" and argument.endswith("_cpu"):
        assert CALLS[argument](pool, None) is not None
        return
    refused(pool, lambda: CALLS[argument](pool, value), kind, argument, said)


@pytest.mark.parametrize("name", BAD_TORCH)
@pytest.mark.parametrize("argument", ["seq_lens", "free_index"])
def test_torch_objects_without_numbers_on_the_host(pool, name, argument):
    refused(pool, lambda: CALLS[argument](pool, BAD_TORCH[name]), TypeError, argument)


@pytest.mark.parametrize("name", HUGE_LISTS)
def test_integers_beyond_int64_in_a_list(pool, name):
    refused(pool, lambda: pool.free(HUGE_LISTS[name]), ValueError, "free_index", "int64")


@pytest.mark.parametrize("method", ["free_segment", "free_page_ids"])
def test_the_other_frees_name_their_argument_too(pool, method):
    kwargs = {"start_pos": 0} if method == "free_segment" else {}
    name = "free_index" if method == "free_segment" else "page_ids"
    refused(pool, lambda: getattr(pool, method)([0.5], **kwargs), TypeError, name, "float64")


def test_batches_of_different_lengths(pool):
    refused(pool, lambda: pool.alloc_extend([0], [1, 1], [-1, -1], 2), ValueError, "prefix_lens", "1, 2 and 2")
    refused(pool, lambda: pool.alloc_extend([0, 0], [1, 1], [-1], 2), ValueError, "last_loc", "2, 2 and 1")
    refused(pool, lambda: pool.alloc_decode([1, 1], [-1]), ValueError, "seq_lens", "2 and 1")
    refused(pool, lambda: pool.alloc_decode([1], [-1], seq_lens_cpu=[1, 1]), ValueError, "seq_lens_cpu", "1", "2")


def test_lengths_that_no_allocation_can_mean(pool):
    extend = pool.alloc_extend
    refused(pool, lambda: extend([-1], [1], [-1], 2), ValueError, "prefix_lens[0] is -1")
    refused(pool, lambda: extend([5, 3], [5, 2], [9, 9], 0), ValueError, "seq_lens[1] is 2", "prefix_lens[1], 3")
    refused(pool, lambda: extend([0], [2**31], [-1], 2**31 - 1), ValueError, "seq_lens[0] is 2147483648", "2**31 - 1")
    refused(pool, lambda: extend([0], [3], [-1], 4), ValueError, "extend_num_tokens is 4", "sums to 3")
    refused(pool, lambda: extend([0], [3], [-1], -1), ValueError, "extend_num_tokens", "-1")
    refused(pool, lambda: extend([0], [3], [-1], 2**31), ValueError, "extend_num_tokens", "2147483648")
    refused(pool, lambda: extend([], [], [], 1), ValueError, "extend_num_tokens is 1", "sums to 0")
    refused(pool, lambda: pool.alloc_decode([3, 0], [4, 4]), ValueError, "seq_lens[1] is 0", "at least 1")
    refused(pool, lambda: pool.alloc_decode([1], [-1], seq_lens_cpu=[0]), ValueError, "seq_lens[0] is 0")


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_the_smallest_integer_is_a_negative_length(pool, dtype):
    smallest = np.array([np.iinfo(dtype).min], dtype)
    text = str(int(smallest[0]))
    refused(pool, lambda: pool.alloc_decode(smallest, [4]), ValueError, "seq_lens[0]", text)
    refused(pool, lambda: pool.alloc_extend(np.array([1], dtype), smallest, [4], 1), ValueError, "seq_lens[0]", text)


def test_empty_batches_are_legal(pool):
    before = pool.free_pages.tolist()
    for empty in ([], np.zeros(0, np.int32), torch.zeros(0, dtype=torch.int64)):
        assert len(pool.alloc_extend(empty, empty, empty, 0)) == 0
        assert len(pool.alloc_decode(empty, empty)) == 0
        pool.free(empty)
        pool.free_segment(empty, start_pos=0)
        pool.free_page_ids(empty)
        pool.retain(empty)
        with pool.free_group():
            pool.free(empty)
    assert len(pool.alloc(0)) == 0
    pool.check()
    assert pool.free_pages.tolist() == before


# ---- numbers -----------------------------------------------------------------------------------------------------

BAD_INTEGERS = [True, np.True_, 4.0, np.float64(4), "4", None, [4], np.array([4]), torch.tensor(4.0), 4j]


@pytest.mark.parametrize("value", BAD_INTEGERS, ids=repr)
def test_numbers_that_are_no_integers(pool, value):
    refused(pool, lambda: pool.alloc(value), TypeError, "need_size", "integer")
    refused(pool, lambda: pool.alloc_extend([0], [4], [-1], value), TypeError, "extend_num_tokens", "integer")
    refused(pool, lambda: pool.free_segment([4], start_pos=value), TypeError, "start_pos", "integer")
    refused(pool, lambda: pool.resize(value), TypeError, "size", "integer")
    if value is not None:
        refused(pool, lambda: pool.free([4], num_pages=value), TypeError, "num_pages", "integer")
    for name in ("size", "page_size", "max_batch"):
        with pytest.raises(TypeError, match=rf"\b{name} must be an integer"):
            PagedTokenToKVPoolAllocator(**{"size": 16, "page_size": 4, "backend": "reference"} | {name: value})


def test_numpy_integers_are_integers():
    pool = PagedTokenToKVPoolAllocator(np.int32(16), np.uint8(4), backend="numba", max_batch=np.int64(1))
    assert pool.alloc(np.int16(4)).tolist() == [4, 5, 6, 7]
    assert pool.alloc_extend([0], [1], [-1], np.uint8(1)).tolist() == [8]


def test_sizes(pool):
    refused(pool, lambda: pool.alloc(-4), ValueError, "need_size", "-4")
    refused(pool, lambda: pool.alloc(6), ValueError, "need_size", "multiple of page_size, 4", "6")
    refused(pool, lambda: pool.free_segment([4], start_pos=2), ValueError, "start_pos", "multiple of page_size, 4")
    refused(pool, lambda: pool.free_segment([4], start_pos=-4), ValueError, "start_pos", "-4")
    refused(pool, lambda: pool.resize(3), ValueError, "size", "3", "between 4 and 64")
    refused(pool, lambda: pool.resize(68), ValueError, "size", "68", "between 4 and 64")
    refused(pool, lambda: pool.note_replay(-1), ValueError, "pages_at_most", "-1")
    refused(pool, lambda: pool.free([4], num_pages=-1), ValueError, "num_pages", "-1")


def test_a_count_of_pages_that_the_slots_cannot_have(pool):
    refused(pool, lambda: pool.free([4], num_pages=2), ValueError, "num_pages", "2", "1")
    refused(pool, lambda: pool.free([4, 5], num_pages=0), ValueError, "num_pages", "0")


@pytest.mark.parametrize("backend", HOSTED)
@pytest.mark.parametrize("need_sort", [False, True])
def test_more_than_the_pool_is_none_however_much(backend, need_sort):
    pool = make(backend, 16, 2, need_sort=need_sort)
    pool.alloc(4)
    pool.free([2])
    for need in (18, 2**32, 2**63, 2**70):
        assert pool.alloc(need) is None
    pool.check()
    assert pool.available_size() == 14
    assert pool.alloc(14) is not None


@pytest.mark.parametrize("backend", HOSTED)
def test_a_huge_extend_is_none_before_its_output_is_made(backend):
    pool = make(backend, 16, 1)
    asked = []
    real = pool.backend.output

    def output(library, n):
        asked.append(n)
        return real(library, min(n, 1000))  # never take the 16 GB

    with mock.patch.object(pool.backend, "output", output):
        assert pool.alloc_extend([0], [2**31 - 1], [-1], 2**31 - 1) is None
    assert not asked
    pool.check()


CONSTRUCTOR = [
    ({"page_size": 0}, ValueError, "page_size must be at least 1, not 0"),
    ({"page_size": -4}, ValueError, "page_size must be at least 1, not -4"),
    ({"size": -1}, ValueError, "size must be at least 0, not -1"),
    ({"size": 0}, ValueError, "size must hold at least one page of 4 slots, not 0"),
    ({"size": 3}, ValueError, "size must hold at least one page of 4 slots, not 3"),
    ({"size": 2**33, "page_size": 1}, ValueError, "8589934592 pages, but page ids are int32"),
    ({"size": 2**31 - 1, "page_size": 1}, ValueError, "2147483647 pages, but page ids are int32"),
    ({"size": 2**40, "page_size": 2**31}, ValueError, "page_size must be at most 2**31 - 1, not 2147483648"),
    ({"size": 2**31, "page_size": 64, "index_dtype": "int32"}, ValueError, "do not fit int32"),
    ({"max_batch": 0}, ValueError, "max_batch must be at least 1, not 0"),
    ({"refused_slot": 1}, ValueError, "refused_slot must be 0 or -1, not 1"),
    ({"refused_slot": None}, ValueError, "refused_slot must be 0 or -1, not None"),
    ({"refused_slot": False}, ValueError, "refused_slot must be 0 or -1, not False"),
    ({"errors": "ignore"}, ValueError, "errors must be 'raise' or 'defer', not 'ignore'"),
    ({"errors": None}, ValueError, "errors must be 'raise' or 'defer', not None"),
    (
        {"backend": "Numba"},
        ValueError,
        "backend must be one of auto, cupy, numba-cuda, numba, reference, not 'Numba'",
    ),
    ({"backend": None}, ValueError, "backend must be one of"),
    ({"backend": ["numba"]}, ValueError, "backend must be one of"),
    ({"backend": "numba", "device": "cuda"}, ValueError, "backend 'numba' does not run on device 'cuda'"),
    ({"device": "gpu"}, ValueError, "device must be 'auto', 'cpu', 'cuda' or 'cuda:N', not 'gpu'"),
    ({"device": "cuda:x"}, ValueError, "device must be"),
    ({"device": "cuda:\u00b2"}, ValueError, "device must be"),
    ({"device": "auto:0"}, ValueError, "device must be"),
    ({"device": ""}, ValueError, "device must be"),
    ({"device": None}, ValueError, "device must be"),
    ({"device": True}, ValueError, "device must be"),
    ({"device": -1}, ValueError, "device must be"),
    ({"device": torch.device("meta")}, ValueError, "device must be"),
    ({"index_dtype": "int16"}, ValueError, "index_dtype must be 'int64' or 'int32', not 'int16'"),
    ({"index_dtype": "uint64"}, ValueError, "index_dtype must be"),
    ({"index_dtype": np.float32}, ValueError, "index_dtype must be"),
    ({"index_dtype": torch.int16}, ValueError, "index_dtype must be"),
    ({"index_dtype": None}, ValueError, "index_dtype must be"),
    ({"index_dtype": np.dtype(">i8")}, ValueError, "index_dtype must be"),
]


@pytest.mark.parametrize(("options", "kind", "message"), CONSTRUCTOR, ids=lambda x: str(x) if type(x) is dict else "")
def test_options_that_make_no_pool(options, kind, message):
    options = {"size": 16, "page_size": 4, "backend": "reference"} | options
    with pytest.raises((TypeError, ValueError), match=re.escape(message)) as caught:
        PagedTokenToKVPoolAllocator(**options)
    assert type(caught.value) is kind


def test_a_backend_that_cannot_run_says_why():
    probe = cupaged.backends.Probe(False, "no GPU was found", "get one")
    with (
        mock.patch.object(cupaged.backends, "probe", return_value=probe),
        pytest.raises(cupaged.BackendError, match="'cupy' cannot run here: no GPU was found; get one"),
    ):
        PagedTokenToKVPoolAllocator(16, 4, backend="cupy")


def test_extremes_that_do_make_a_pool():
    pool = PagedTokenToKVPoolAllocator(2**40, 2**20, backend="numba")
    assert pool.available_size() == 2**40
    slots = pool.alloc_extend([0], [2**20 + 1], [-1], 2**20 + 1)
    assert (int(slots[0]), int(slots[-1])) == (2**20, 2**21)
    pool = PagedTokenToKVPoolAllocator(3 * (2**31 - 1), 2**31 - 1, backend="numba")
    assert pool.alloc_extend([0, 0, 0], [1, 1, 1], [-1] * 3, 3).tolist() == [2**31 - 1, 2**32 - 2, 3 * (2**31 - 1)]
    assert pool.alloc_decode([2], [3 * (2**31 - 1)]).tolist() == [3 * (2**31 - 1) + 1]
    # The last slot of the last page is 2**31 - 1: it just fits.
    pool = PagedTokenToKVPoolAllocator(2**31 - 2**20, 2**20, backend="numba", index_dtype="int32")
    pool.alloc_extend([0] * 2046, [1] * 2046, [-1] * 2046, 2046)
    assert pool.alloc_decode([1], [-1]).tolist() == [2047 * 2**20]
    assert pool.alloc_decode([2**20], [2**31 - 2]).tolist() == [2**31 - 1] or pool.check() is None


# ---- out ---------------------------------------------------------------------------------------------------------


def _read_only():
    array = np.zeros(1, np.int64)
    array.flags.writeable = False
    return array


BAD_OUT = {
    "list": ([0], TypeError),
    "number": (0, TypeError),
    "int32": (np.zeros(1, np.int32), TypeError),
    "float": (np.zeros(1), TypeError),
    "big-endian": (np.zeros(1, ">i8"), TypeError),
    "torch-int32": (torch.zeros(1, dtype=torch.int32), TypeError),
    "torch-dtype": (torch.int64, TypeError),
    "torch-meta": (torch.zeros(1, dtype=torch.int64, device="meta"), (TypeError, ValueError)),
    "long": (np.zeros(2, np.int64), ValueError),
    "empty": (np.zeros(0, np.int64), ValueError),
    "two-dim": (np.zeros((1, 1), np.int64), ValueError),
    "zero-dim": (np.array(0), ValueError),
    "read-only": (_read_only(), ValueError),
}


@pytest.mark.parametrize("backend", ["reference", "numba"])
@pytest.mark.parametrize("name", BAD_OUT)
def test_out_that_cannot_be_written(backend, name):
    pool = make(backend, 16, 1)
    value, kinds = BAD_OUT[name]
    for call in (
        lambda: pool.alloc_decode([1], [-1], out=value),
        lambda: pool.alloc_extend([0], [1], [-1], 1, out=value),
    ):
        before = facts(pool)
        with pytest.raises(kinds, match="out"):
            call()
        assert facts(pool) == before
        assert not pool.pool._lock.locked()


@pytest.mark.parametrize("backend", ["reference", "numba"])
def test_out_with_gaps(backend):
    pool = make(backend, 16, 1)
    for gaps in (np.zeros(6, np.int64)[::2], np.zeros(3, np.int64)[::-1], np.zeros((3, 2), np.int64)[:, 0]):
        refused(
            pool, lambda gaps=gaps: pool.alloc_extend([0], [3], [-1], 3, out=gaps), ValueError, "out", "contiguous"
        )
    stuck = np.lib.stride_tricks.as_strided(np.zeros(1, np.int64), (3,), (0,))
    refused(pool, lambda: pool.alloc_extend([0], [3], [-1], 3, out=stuck), ValueError, "out", "contiguous")


class ReadOnlyDeviceArray(DeviceArray):
    @property
    def __cuda_array_interface__(self):
        interface = super().__cuda_array_interface__
        return {**interface, "data": (interface["data"][0], True)}


def test_out_on_the_device():
    pool = make("cuda-ascending", 16, 1)

    def decode(out):
        return lambda: pool.alloc_decode([1], [-1], out=out)

    def extend(out):
        return lambda: pool.alloc_extend([0], [3], [-1], 3, out=out)

    refused(pool, decode(np.zeros(1, np.int64)), ValueError, "out", "cuda:0")
    refused(pool, decode(DeviceArray(np.zeros(1, np.int32))), TypeError, "out", "int64", "int32")
    refused(pool, decode(DeviceArray(np.zeros(1))), TypeError, "out", "float64")
    refused(pool, decode(DeviceArray(np.zeros(2, np.int64))), ValueError, "out", "(1,)", "(2,)")
    refused(pool, decode(DeviceArray(np.zeros((1, 1), np.int64))), ValueError, "out", "(1, 1)")
    refused(pool, extend(DeviceArray(np.zeros(6, np.int64)[::2])), ValueError, "out", "contiguous", "16")
    refused(pool, extend(DeviceArray(np.zeros(3, np.int64)[::-1])), ValueError, "out", "contiguous", "-8")
    refused(pool, decode(ReadOnlyDeviceArray(np.zeros(1, np.int64))), ValueError, "out", "read-only")


@pytest.mark.parametrize("backend", HOSTED)
@pytest.mark.parametrize(("argument", "value"), [("prefix", 0), ("seq", 2), ("last", -1)])
def test_out_may_not_overlap_what_is_read(backend, argument, value):
    # Slots written for the first request would be read as lengths of the next: writes past the end of `out`.
    pool = make(backend, 64, 1)
    form = DeviceArray if backend.startswith("cuda") else np.asarray
    buffer = np.full(12, value)
    arrays = {"prefix": np.zeros(3, np.int64), "seq": np.full(3, 2), "last": np.full(3, -1)} | {argument: buffer[:3]}

    def extend(out):
        return pool.alloc_extend(*(form(arrays[k]) for k in ("prefix", "seq", "last")), 6, out=form(out))

    for out in (buffer[:6], buffer[2:8]):
        refused(pool, lambda out=out: extend(out), ValueError, "out", "overlap")
    assert buffer.tolist() == [value] * 12
    assert extend(buffer[3:9]) is not None
    assert buffer.tolist() == [value] * 3 + [1, 2, 3, 4, 5, 6] + [value] * 3


@pytest.mark.parametrize("backend", HOSTED)
def test_a_decode_may_write_its_last_locations_in_place(backend):
    pool = make(backend, 64, 4)
    form = DeviceArray if backend.startswith("cuda") else np.asarray
    slots = np.asarray(pool.alloc_extend([0, 0], [3, 4], [-1, -1], 7))
    last = slots[[2, 6]]
    pool.alloc_decode(form(np.array([4, 5])), form(last), out=form(last))
    assert last.tolist() == [7, 12]
    pool.check()


# ---- what only the device can see --------------------------------------------------------------------------------


def device_pool(**options):
    """Its host knows no lengths: arrays go in as if they were on a GPU."""
    pool = make("cuda-random", 8 * 4, 4, **options)
    pool.alloc_extend([0, 0], [5, 4], [-1, -1], 9)  # pages 1, 2 (one slot: 8) and 3 (full)
    return pool


def on_device(values):
    return DeviceArray(np.array(values, np.int64))


REFUSALS = {
    # name: prefix, seq, last, tokens, error, index, value
    "misaligned": ([5], [6], [9], 1, "MisalignedError", 0, 9),
    "in-the-page-before": ([5], [6], [4], 1, "MisalignedError", 0, 4)
    if False
    else ([5], [6], [7], 1, "MisalignedError", 0, 7),
    "negative": ([5], [6], [-1], 1, "OutOfRangeError", 0, -1),
    "page-0": ([5], [6], [0], 1, "OutOfRangeError", 0, 0),
    "past-the-pool": ([5], [6], [36], 1, "OutOfRangeError", 0, 36),
    "largest": ([5], [6], [2**63 - 1], 1, "OutOfRangeError", 0, 2**63 - 1),
    "smallest": ([5], [6], [-(2**63)], 1, "OutOfRangeError", 0, -(2**63)),
    "second": ([0, 5], [1, 6], [-1, 2**32 + 8], 2, "OutOfRangeError", 1, 2**32 + 8),
    "free-page": ([5], [6], [16], 1, "FreePageError", 0, 16),
    "shrinks": ([5, 5], [6, 4], [8, 8], 1, "LengthError", 1, 4),
    "negative-prefix": ([-1], [1], [8], 2, "LengthError", 0, 1),
    "too-long": ([0], [2**31], [-1], 9, "LengthError", 0, 2**31),
    "far-too-long": ([0], [2**63 - 1], [-1], 9, "LengthError", 0, 2**63 - 1),
    "wraps": ([1], [-(2**63)], [-1], 9, "LengthError", 0, -(2**63)),
    "sum-more": ([0], [3], [-1], 2, "TokenCountError", -1, 3),
    "sum-less": ([0], [3], [-1], 4, "TokenCountError", -1, 3),
    "first-of-two": ([5, 5], [6, 6], [9, -1], 2, "MisalignedError", 0, 9),
}


@pytest.mark.parametrize("refused_slot", [0, -1])
@pytest.mark.parametrize("name", REFUSALS)
def test_the_whole_op_is_refused_and_the_error_recorded(name, refused_slot):
    prefix, seq, last, tokens, error, index, value = REFUSALS[name]
    pool = device_pool(refused_slot=refused_slot)
    before = pool.free_pages.tolist()
    out = pool.alloc_extend(on_device(prefix), on_device(seq), on_device(last), tokens)
    assert out.tolist() == [refused_slot] * tokens
    assert int(pool.ok) == 0
    with pytest.raises(getattr(cupaged, error)) as caught:
        pool.check()
    assert (caught.value.kind, caught.value.index, caught.value.value) == ("alloc_extend", index, value)
    assert str(value) in str(caught.value)
    assert pool.free_pages.tolist() == before
    pool.check_integrity()


@pytest.mark.parametrize(("seq", "value"), [(0, 0), (-1, -1), (-(2**63), -(2**63)), (2**31, 2**31)])
def test_a_decode_of_no_length(seq, value):
    pool = device_pool()
    assert pool.alloc_decode(on_device([6, seq]), on_device([8, -1])).tolist() == [0, 0]
    with pytest.raises(cupaged.LengthError) as caught:
        pool.check()
    assert (caught.value.kind, caught.value.index, caught.value.value) == ("alloc_decode", 1, value)
    assert pool.alloc_decode(on_device([6]), on_device([8])).tolist() == [9]


def test_a_page_with_two_owners_is_not_written():
    pool = device_pool()
    pool.retain([2])
    assert pool.alloc_decode(on_device([6]), on_device([8])).tolist() == [0]
    with pytest.raises(cupaged.SharedPageError) as caught:
        pool.check()
    assert (caught.value.index, caught.value.value) == (0, 8)
    # Where the old page is full, or nothing is added, last_loc is not looked at.
    assert pool.alloc_extend(on_device([4, 5]), on_device([5, 5]), on_device([2**62, -9]), 1).tolist() == [16]
    pool.check()


def test_a_short_pool_is_none_whatever_else_is_wrong():
    for form in (on_device, list):
        pool = make("cuda-random", 4 * 4, 4)
        pool.alloc_extend([0, 0], [5, 4], [-1, -1], 9)
        assert pool.alloc_extend(form([5]), form([12]), form([-1]), 7) is not None  # 1 page: refused
        with pytest.raises(cupaged.OutOfRangeError):
            pool.check()
        assert pool.alloc_extend(form([5]), form([16]), form([-1]), 11) is None  # 2 pages
        pool.check()
    for backend in ("reference", "numba"):
        pool = make(backend, 4 * 4, 4)
        pool.alloc_extend([0, 0], [5, 4], [-1, -1], 9)
        assert pool.alloc_extend([5], [16], [-1], 11) is None
        pool.check()


def test_a_lenient_pool_carries_out_what_harms_nobody():
    pool = device_pool(strict=False)
    assert pool.alloc_decode(on_device([6]), on_device([9])).tolist() == [10]  # not the next slot, but in its page
    with pytest.raises(cupaged.MisalignedError):
        pool.check()
    assert pool.alloc_decode(on_device([6]), on_device([11])).tolist() == [0]  # its page is full: 12 is another's
    with pytest.raises(cupaged.MisalignedError):
        pool.check()
    assert pool.alloc_extend(on_device([0]), on_device([2]), on_device([-1]), 4).tolist() == [16, 17, 0, 0]
    with pytest.raises(cupaged.TokenCountError):
        pool.check()
    assert pool.alloc_extend(on_device([0]), on_device([4]), on_device([-1]), 2).tolist() == [0, 0]
    with pytest.raises(cupaged.TokenCountError):
        pool.check()
    assert pool.free_pages.tolist() == [5, 6, 7, 8]


@pytest.mark.parametrize("backend", HOSTED)
@pytest.mark.parametrize(
    ("slot", "error"),
    [
        (0, "OutOfRangeError"),
        (3, "OutOfRangeError"),
        (-1, "OutOfRangeError"),
        (36, "OutOfRangeError"),
        (2**31, "OutOfRangeError"),
        (2**33 + 4, "OutOfRangeError"),
        (2**63 - 1, "OutOfRangeError"),
        (-(2**63), "OutOfRangeError"),
        (20, "DoubleFreeError"),
    ],
)
def test_a_bad_slot_or_page_is_skipped_and_the_rest_done(backend, slot, error):
    made = make(backend, 8 * 4, 4)
    made.alloc(12)
    made.free([4, slot, 8])
    with pytest.raises(getattr(cupaged, error)) as caught:
        made.check()
    assert (caught.value.index, caught.value.value) == (1, slot)
    assert made.free_pages.tolist() == [1, 2, 4, 5, 6, 7, 8]
    page = slot // 4 if abs(slot) < 2**40 else slot
    made.free_page_ids([page, 3])
    with pytest.raises(getattr(cupaged, error)) as caught:
        made.check()
    assert (caught.value.index, caught.value.value) == (0, page)
    assert made.free_pages.tolist() == [3, 1, 2, 4, 5, 6, 7, 8]
    made.alloc(4)
    made.retain([page, 3])
    with pytest.raises(cupaged.FreePageError if error == "DoubleFreeError" else cupaged.OutOfRangeError) as caught:
        made.check()
    assert (caught.value.index, caught.value.value) == (0, page)
    made.free_page_ids([3])
    assert made.available_size() == 28
    made.check()
    made.check_integrity()


# ---- states ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [None, 5, (), (1, 2, 3), ("a", "b", None), {}], ids=repr)
def test_a_state_that_is_none(pool, state):
    refused(pool, lambda: pool.restore_state(state), TypeError, "state", "backup_state()")


def test_a_state_of_another_pool(pool):
    other = make("numba", 17 * 4, 4).backup_state()
    refused(pool, lambda: pool.restore_state(other), ValueError, "state", "capacity")
    other = make("numba", 16 * 2, 2).backup_state()
    refused(pool, lambda: pool.restore_state(other), ValueError, "state", "page_size")
    assert (pool.size, pool.num_pages) == (64, 16)
