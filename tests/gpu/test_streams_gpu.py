"""Streams, waits, libraries and devices on a real GPU."""

from __future__ import annotations

import time

import numpy as np
import pytest

import cupaged

cupy = pytest.importorskip("cupy")
torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

SLEEP = 800_000_000  # GPU cycles: about 0.4 s


@pytest.fixture(scope="module", autouse=True)
def _warm():
    pool = cupaged.PagedTokenToKVPoolAllocator(1024, 16, device="cuda")
    pool.free(pool.alloc(64))
    pool.check()
    torch.cuda._sleep(1000)
    torch.cuda.synchronize()


def tensor(values, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype, device="cuda")


def behind_a_long_kernel(work) -> None:
    """Run `work` while the stream is busy; fail if it waited. A first run leaves nothing to be loaded or grown."""
    work()
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP)
    busy = torch.cuda.Event()
    busy.record()
    work()
    assert not busy.query(), "the call waited for the GPU"
    torch.cuda.synchronize()


def test_no_call_waits_while_the_pool_is_not_nearly_full():
    size = 16
    pool = cupaged.PagedTokenToKVPoolAllocator(size * 4096, size, device="cuda")
    prefix, seq, none = tensor([0] * 8), tensor([20] * 8), tensor([-1] * 8)
    slots = pool.alloc_extend(prefix, seq, none, 160)
    last = slots.view(8, 20)[:, -1].contiguous()
    table = torch.zeros(8, 64, dtype=torch.int32, device="cuda")
    rows = torch.arange(8, device="cuda")
    pool.extend_step(table, rows, prefix, seq, 160)
    state = pool.backup_state()
    pool.check()

    def ops():
        pool.alloc(size * 3)
        pool.alloc_extend(prefix, seq, none, 160)
        pool.alloc_extend(prefix, seq, none, 160, prefix_lens_cpu=[0] * 8, seq_lens_cpu=[20] * 8)
        pool.alloc_decode(seq + 1, last)
        pool.decode_step(table, rows, seq)
        pool.trim(table, rows, seq + 1, seq)
        pool.release(table, rows, seq)
        pool.free(pool.alloc(size * 2))
        pool.free(pool.alloc(size * 2), num_pages=2)
        pool.free_page_ids(pool.alloc(size)[:1] // size)
        page = pool.alloc(size)
        pool.retain(page[:1] // size)
        with pool.free_group():
            pool.free(page)
            pool.free(page)
            pool.free_segment(pool.alloc(size), start_pos=0)
        pool.available_at_least()
        pool.backup_state()
        pool.clear()
        pool.restore_state(state)

    behind_a_long_kernel(ops)
    pool.check()
    pool.check_integrity()


def test_available_size_does_not_wait_where_counts_are_known():
    pool = cupaged.PagedTokenToKVPoolAllocator(16 * 100, 16, device="cuda")
    found = []

    def ops():
        slots = pool.alloc_extend([0, 0], [20, 30], [-1, -1], 50)
        found.append(pool.available_size())
        pool.free(slots, num_pages=4)
        found.append(pool.available_size())

    behind_a_long_kernel(ops)
    assert found == [16 * 96, 16 * 100] * 2


def test_kv_allocator_never_waits():
    kv = cupaged.KVAllocator(16 * 1000, torch.device("cuda"), 64, 1024, 16)
    for row in range(64):
        kv.alloc(row, 16 if row < 16 else 20, 0)
    kv.check()
    found, rows = [], iter(range(31, 64))

    def ops():
        for row in range(8):
            assert kv.alloc(row, 24, 16) is not None
        kv.alloc_batch(list(range(8, 16)), [24] * 8, [16] * 8)
        for row in range(16):
            kv.free_extra_pages_not_cached(row, 16, 40)
        kv.free_with_diff(kv.req_to_page[30, :2].clone(), kv.req_to_page[30, :2])
        kv.append_to_later_free(kv.req_to_page[next(rows), :2])
        kv.free_group_end()
        kv.free(next(rows))
        found.append(kv.available_at_least())

    behind_a_long_kernel(ops)
    kv.check()
    kv.check_integrity()


def test_a_full_pool_is_told_as_none_and_only_then():
    pool = cupaged.PagedTokenToKVPoolAllocator(16 * 10, 16, device="cuda")
    prefix, none = tensor([0, 0]), tensor([-1, -1])
    torch.cuda._sleep(SLEEP // 10)
    assert pool.alloc_extend(prefix, tensor([80, 64]), none, 144) is not None  # 9 pages; the bound says 11
    assert pool.alloc_extend(prefix, tensor([16, 16]), none, 32) is None
    assert pool.alloc_extend(prefix, tensor([16, 0]), none, 16) is not None
    assert pool.alloc_decode(tensor([1]), tensor([-1])) is None
    assert pool.available_size() == 0
    pool.check()


def test_ops_on_changing_streams_are_ordered():
    pool = cupaged.PagedTokenToKVPoolAllocator(16 * 64, 16, device="cuda")
    streams = [torch.cuda.Stream() for _ in range(3)] + [torch.cuda.default_stream()]
    seen = []
    for i in range(60):
        stream = streams[i % 4]
        with torch.cuda.stream(stream):
            torch.cuda._sleep(300_000)
            slots = pool.alloc_extend(tensor([0]), tensor([16]), tensor([-1]), 16)
            seen.append(slots)
            if i % 3 == 2:
                pool.free(slots)
    torch.cuda.synchronize()
    pool.check()
    pool.check_integrity()
    assert pool.stats().owned_pages == 40
    first = [int(s[0]) // 16 for s in seen]
    expected, free = [], list(range(1, 65))
    for i in range(60):
        expected.append(free.pop(0))
        if i % 3 == 2:
            free.insert(0, expected[-1])
    assert first == expected


def test_same_library_out_and_no_copy():
    pool = cupaged.PagedTokenToKVPoolAllocator(16 * 64, 16, device="cuda")
    out = torch.empty(3, dtype=torch.int64, device="cuda")
    found = pool.alloc_extend(tensor([0]), tensor([3]), tensor([-1]), 3, out=out)
    assert found.data_ptr() == out.data_ptr()
    got = pool.alloc_extend(cupy.zeros(1, "i4"), cupy.array([3]), cupy.array([-1]), 3)
    assert isinstance(got, cupy.ndarray)
    assert cupaged.to_torch(got).data_ptr() == got.data.ptr
    assert isinstance(pool.alloc_extend([0], [3], [-1], 3), cupy.ndarray)
    as_torch = cupaged.PagedTokenToKVPoolAllocator(64, 16, device=torch.device("cuda"))
    assert isinstance(as_torch.alloc(16), torch.Tensor)
    assert int(as_torch.ret_values) == 1 << 32 | 16
    numba_like = type("X", (), {"__cuda_array_interface__": cupy.array([1, 0, 2]).__cuda_array_interface__})()
    assert pool.alloc_decode(numba_like, cupy.array([-1, 0, 0])) is not None  # length 0 is refused on the device
    with pytest.raises(cupaged.LengthError):
        pool.check()


def test_strides_and_narrow_dtypes_from_torch():
    pool = cupaged.PagedTokenToKVPoolAllocator(16 * 64, 16, device="cuda", index_dtype="int32")
    lengths = torch.tensor([[0, 20], [0, 3]], dtype=torch.int32, device="cuda")
    slots = pool.alloc_extend(lengths[:, 0], lengths[:, 1].long(), tensor([-1, -1], torch.int32), 23)
    assert slots.dtype == torch.int32
    assert slots.tolist() == [*range(16, 36), *range(48, 51)]


def test_errors_come_from_the_device():
    pool = cupaged.PagedTokenToKVPoolAllocator(16 * 8, 16, device="cuda", refused_slot=-1)
    slots = pool.alloc_extend(tensor([0]), tensor([5]), tensor([-1]), 5)
    wrong = pool.alloc_decode(tensor([6]), slots[-2:-1])
    assert wrong.tolist() == [-1]
    with pytest.raises(cupaged.MisalignedError) as info:
        pool.alloc(16)
    assert (info.value.kind, info.value.index, info.value.value) == ("alloc_decode", 0, 19)
    assert pool.alloc(16) is not None
    pool.free(tensor([5, 16, 10**12]))
    with pytest.raises(cupaged.OutOfRangeError):
        pool.check()
    pool.check_integrity()


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_devices():
    pools = [cupaged.PagedTokenToKVPoolAllocator(16 * 64, 16, device=f"cuda:{i}") for i in range(2)]
    for i, pool in enumerate(pools):
        with torch.cuda.device(1 - i):  # not the current one
            seq = torch.tensor([3], device=f"cuda:{i}")
            slots = pool.alloc_extend(seq * 0, seq, seq * 0 - 1, 3)
            assert torch.cuda.current_device() == 1 - i
        assert slots.device.index == i
        assert slots.tolist() == [16, 17, 18]
        with pytest.raises(ValueError, match="cuda:"):
            pool.alloc_decode(seq.to(f"cuda:{1 - i}"), slots[-1:])
        pool.check()
        pool.check_integrity()


def test_host_time_of_a_wait_is_bounded(monkeypatch):
    monkeypatch.setattr("cupaged.pool.WAIT_LIMIT_S", 0.05)
    pool = cupaged.PagedTokenToKVPoolAllocator(16 * 4, 16, device="cuda")
    pool.check()
    seq, last = tensor([2]), tensor([16])
    torch.cuda._sleep(SLEEP)
    begin = time.perf_counter()
    pool.alloc_decode(seq, last)
    with pytest.raises(cupaged.DeviceTimeoutError):
        pool.check()
    assert time.perf_counter() - begin < 0.35
    torch.cuda.synchronize()
    monkeypatch.undo()
    with pytest.raises(cupaged.FreePageError):
        pool.check()


def test_numpy_agrees_over_a_random_run():
    rng = np.random.default_rng(3)
    gpu = cupaged.PagedTokenToKVPoolAllocator(48 * 500, 48, device="cuda")
    cpu = cupaged.PagedTokenToKVPoolAllocator(48 * 500, 48, device="cpu")
    for _ in range(200):
        n = int(rng.integers(1, 20))
        seq = rng.integers(1, 200, n)
        total = int(seq.sum())
        zeros, none = np.zeros(n, np.int64), np.full(n, -1)
        want = cpu.alloc_extend(zeros, seq, none, total)
        got = gpu.alloc_extend(tensor(zeros), tensor(seq), tensor(none), total)
        assert (want is None) == (got is None)
        if want is None:
            cpu.clear()
            gpu.clear()
            continue
        np.testing.assert_array_equal(got.cpu().numpy(), want)
        if rng.random() < 0.7:
            cpu.free(want)
            gpu.free(got)
    gpu.check()
