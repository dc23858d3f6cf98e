"""The host harness of the CUDA kernels: right kernels give right results, and every seeded fault is caught."""

import re
import sys
import time

import numpy as np
import pytest

from tests.host_cuda import HERE, ORDERS, HostCudaError, HostModule, exact_copy, exact_empty, kernel_names, run_python

SOURCES = [HERE / "demo" / "right.cu", HERE / "demo" / "faulty.cu"]
ARGS = np.dtype([("in", "u8"), ("out", "u8"), ("partial", "u8"), ("ticket", "u8"), ("n", "i8")])
FULL = (1 << 32) - 1


class Demo:
    def __init__(self, mode="plain"):
        self.module = HostModule(SOURCES, mode)

    def __call__(self, name, grid, block, values, outputs, n=None, **how):
        """Output of a kernel; every buffer has its exact size, and starts as zeros."""
        self.values, self.partial = exact_copy(np.asarray(values, np.int32)), exact_empty(max(grid, block), np.int32)
        self.out, self.ticket = exact_empty(outputs, np.int32), exact_empty(1, np.uint32)
        for array in (self.partial, self.out, self.ticket):
            array[:] = 0
        args = np.zeros((), ARGS)
        for field, array in zip(ARGS.names, (self.values, self.out, self.partial, self.ticket), strict=False):
            args[field] = array.ctypes.data
        args["n"] = len(values) if n is None else n
        self.module.launch(name, grid, block, args, **how)
        return self.out


@pytest.fixture(scope="module")
def demo():
    return Demo()


@pytest.fixture(params=ORDERS)
def order(request):
    return request.param


def signed(words):
    return np.asarray(words, np.uint32).view(np.int32)


# ---- right kernels ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("block", "n"), [(32, 32), (64, 0), (96, 50), (256, 256), (1024, 1000)])
def test_scan(demo, order, block, n):
    x = np.random.default_rng(n).integers(-100, 100, n)
    np.testing.assert_array_equal(demo("scan", 1, block, x, n, order=order, seed=n), np.cumsum(x) - x)


@pytest.mark.parametrize("concurrent", [False, True])
@pytest.mark.parametrize("grid", [1, 3, 40])
def test_grid_sum(demo, order, grid, concurrent):
    x = np.random.default_rng(grid).integers(-100, 100, grid * 64 - 5)
    for seed in range(5):
        assert demo("grid_sum", grid, 64, x, 1, order=order, seed=seed, concurrent=concurrent)[0] == x.sum()


def test_warp_words(demo, order):
    x = np.random.default_rng(1).integers(-100, 100, 32).astype(np.int32)
    lane = np.arange(32)
    rows = demo("warp_words", 1, 32, x, (18, 32), order=order)
    u = x.view(np.uint32)
    group, some = lane & ~7, np.where(lane < 11)[0]
    expected = [
        x[(lane + 5) & 31],
        x[group + (lane + 3) % 8],
        np.where(lane >= 2, x[lane - 2], x),
        np.where(lane % 8 >= 3, x[lane - 3], x),
        np.where(lane < 28, x[(lane + 4) & 31], x),
        np.where(lane % 4 < 3, x[(lane + 1) & 31], x),
        x[lane ^ 9],
        np.where(lane & 8, x[lane ^ 8], x),
        np.full(32, signed(np.sum((x > 0) << lane))),
        np.full(32, (x > 90).any() * 2 + (x > -100).all()),
        signed([np.sum(((x & 3) == (y & 3)) << lane) for y in x]),
        np.full(32, x.sum()),
        np.full(32, x.min()),
        np.full(32, signed(u.max())),
        np.full(32, signed(np.bitwise_xor.reduce(u))),
        np.where(lane < 11, x[some].sum(), signed(np.sum((x & 1) << lane) & FULL & ~0x7FF)),
        np.where(lane & 1, 0, 16),
        np.where(lane & 1, 0, 16),
    ]
    for k, row in enumerate(expected):
        np.testing.assert_array_equal(rows[k], row, err_msg=f"row {k}")


@pytest.mark.parametrize("n", [1, 71, 100, 128])
def test_block_words(demo, order, n):
    rows = demo("block_words", 1, 128, np.zeros(1), (4, 128), n, order=order)
    for row, value in zip(rows, [n > 70, n <= 70, -(-n // 3), 1], strict=True):
        np.testing.assert_array_equal(row, np.where(np.arange(128) < n, value, 0))


def test_atomics_and_arithmetic(demo, order):
    x = np.random.default_rng(2).integers(-100, 100, 96)
    for concurrent in (False, True):
        out = demo("atomics", 3, 32, x, 16, order=order, concurrent=concurrent)
        bits = signed(np.bitwise_or.reduce(1 << (x & 31)))
        assert list(out[:6]) == [x.sum(), -x.sum(), min(x.min(), 0), max(x.max(), 0), bits, 0]
        assert list(out[6:9]) == [1, 1, 96]
        assert out[9] == 5 + 10 * 31 + 1000 * 9
        assert out[10] == 3 + 4 + 5
        assert list(out[12:]) == [1, 2, 3, 4]
        assert demo.partial[:2].view(np.int64)[0] == min(x.min(), 0) << 33


@pytest.mark.parametrize("grid", [1, 3, 8])
def test_cluster(demo, order, grid):
    x = np.arange(grid) + 70
    for _ in range(10):
        assert demo("cluster_ring", grid, 64, x, grid, order=order).tolist() == np.roll(x, 1).tolist()


def test_same_seed_same_run(demo):
    x = np.arange(96)
    first, again = (demo("missing_barrier", 1, 1024, x, 96, order="random", seed=3).copy() for _ in range(2))
    np.testing.assert_array_equal(first, again)


# ---- what a launch refuses --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "grid", "block", "message"),
    [
        ("nothing", 1, 32, "no kernel named nothing"),
        ("grid_sum", 1, 257, "too many threads: 257 a block, bound 256"),
        ("volatile_word", 1, 1025, "bound 1024"),
        ("scan", 0, 32, "empty grid"),
        ("scan", 1, 0, "empty grid or block"),
        ("cluster_ring", 9, 32, "one cluster is all that can be run here: 8 blocks"),
    ],
)
def test_refused(demo, name, grid, block, message):
    with pytest.raises(HostCudaError, match=message):
        demo(name, grid, block, [1], 32)


def test_arguments_of_another_size(demo):
    with pytest.raises(HostCudaError, match="its arguments have 40 bytes, not 16"):
        demo.module.launch("scan", 1, 32, np.zeros(2, np.int64))


def test_kernel_names():
    assert kernel_names(SOURCES)[:2] == ["scan", "grid_sum"]
    assert set(kernel_names(SOURCES)) == set(Demo().module.names)


# ---- faults that show in this process ---------------------------------------------------------------------------


def test_wrong_rank_shows_in_the_result(demo, order):
    x = np.random.default_rng(3).integers(-5, 5, 200)
    assert not np.array_equal(demo("wrong_rank", 1, 256, x, 256, order=order)[: (x > 0).sum()], x[x > 0])


def test_missing_barrier_shows_in_one_order_at_least(demo):
    x = np.random.default_rng(4).integers(1, 5, 256)
    wrong = [
        name
        for name in ORDERS
        if not np.array_equal(demo("missing_barrier", 1, 256, x, 256, order=name), np.cumsum(x) - x)
    ]
    assert "descending" in wrong  # in ascending order every warp finds what it needs


def test_unwritten_shared_is_garbage(demo, order):
    x = np.ones(32)
    assert demo("unwritten_shared", 1, 32, x, 1, order=order)[0] not in range(64)


def test_a_block_that_stops_ends_its_cluster(demo, order):
    for _ in range(5):
        with pytest.raises(HostCudaError, match=r"block 1: thread 3: __trap at .*faulty.cu"):
            demo("cluster_stuck", 8, 64, [0], 1, order=order)
        assert demo("cluster_ring", 2, 64, [5, 6], 2, order=order).tolist() == [6, 5]
    with pytest.raises(HostCudaError, match=r"of a block that is not there at .*faulty.cu"):
        demo("cluster_stranger", 8, 32, [0], 1, order=order)


@pytest.mark.parametrize(
    ("name", "block", "messages"),
    [
        (
            "divergent_barrier",
            64,
            ["divergent barrier", "__syncthreads at .*faulty.cu:.*__syncthreads at .*faulty.cu:"],
        ),
        ("divergent_warp", 32, ["divergent warp", "__shfl_sync at .*faulty.cu:.*__shfl_sync at .*faulty.cu:"]),
        (
            "deadlock",
            32,
            ["deadlock: 31 threads", "mask 0xffffffff", "1 threads, the first is 5, wait in __syncthreads"],
        ),
        ("not_in_mask", 32, ["thread .*its own lane is not in the mask"]),
        ("broken_promise", 32, ["__builtin_assume of what is false at .*faulty.cu"]),
    ],
)
def test_stopped_with_the_place(demo, order, name, block, messages):
    for _ in range(2):  # the second time on what the first left
        with pytest.raises(HostCudaError) as caught:
            demo(name, 1, block, np.ones(block), block, order=order)
        for message in messages:
            caught.match(message)
    x = np.arange(1000)
    np.testing.assert_array_equal(demo("scan", 1, 1024, x, 1000, order=order), np.cumsum(x) - x)


# ---- under the sanitizers, in child processes -------------------------------------------------------------------


def child(mode, *names):
    done = run_python(mode, __file__, mode, *names, timeout=120)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["asan", "tsan"])
def test_right_kernels_are_clean(mode):
    code, output = child(mode, "right")
    assert (code, output) == (0, "right done\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "name", "message"),
    [
        ("asan", "read_past", "heap-buffer-overflow .*faulty.cu"),
        ("asan", "shared_past", "global-buffer-overflow .*faulty.cu"),
        ("asan", "shift_by_width", "faulty.cu.*shift exponent"),
        ("asan", "overflow", "faulty.cu.*signed integer overflow"),
        ("asan", "misaligned", "faulty.cu.*misaligned address"),
        ("tsan", "plain_ticket", "data race .*faulty.cu.* in plain_ticket"),
        ("tsan", "missing_fence", "data race .*faulty.cu.* in missing_fence"),
        ("tsan", "missing_barrier", "data race .*faulty.cu.* in missing_barrier"),
        ("tsan", "missing_syncwarp", "data race .*faulty.cu.* in missing_syncwarp"),
        ("tsan", "cluster_relaxed", "data race .*faulty.cu.* in cluster_relaxed"),
    ],
)
def test_sanitizer_catches(mode, name, message):
    code, output = child(mode, name)
    assert code != 0
    assert f"{name} done" not in output
    assert re.search(message, output, re.S), output


@pytest.mark.parametrize("mode", ["asan", "tsan"])
def test_divergence_is_an_error_there_too(mode):
    code, output = child(mode, "stopped")
    assert (code, output) == (0, "stopped done\n")


# ---- speed ------------------------------------------------------------------------------------------------------


def test_launches_are_quick(demo):
    """A 256-thread scan takes about 0.08 ms, a 1,024-thread one 0.35 ms; the limit allows for a busy machine."""
    x = np.arange(256)
    times = []
    for _ in range(20):
        start = time.perf_counter()
        demo("scan", 1, 256, x, 256)
        times.append(time.perf_counter() - start)
    assert min(times) < 2e-3


# ---- the child --------------------------------------------------------------------------------------------------


def run_right(demo):
    x = np.random.default_rng(5).integers(-100, 100, 300)
    for order in ORDERS:
        np.testing.assert_array_equal(demo("scan", 1, 320, x, 300, order=order), np.cumsum(x) - x)
        for grid, block in ((5, 64), (2, 256)):
            assert demo("grid_sum", grid, block, x, 1, order=order)[0] == x[: grid * block].sum()
        demo("warp_words", 1, 32, x[:32], (18, 32), order=order)
        demo("block_words", 1, 128, [0], (4, 128), 100, order=order)
        demo("atomics", 3, 32, x[:96], 16, order=order)
        demo("volatile_word", 3, 64, [0], 2, order=order)
        demo("cluster_ring", 1 if demo.module.mode == "asan" else 8, 64, np.arange(8), 8, order=order)
    if demo.module.mode == "tsan":
        with pytest.raises(HostCudaError, match="too many threads for ThreadSanitizer"):
            demo("grid_sum", 13, 256, x, 1)
    if demo.module.mode == "asan":
        with pytest.raises(HostCudaError, match="no cluster but one of one block"):
            demo("cluster_ring", 2, 64, x, 2)


def run_stopped(demo):
    for order in ORDERS:
        for name in ("divergent_barrier", "deadlock", "divergent_warp"):
            with pytest.raises(HostCudaError):
                demo(name, 1, 64, np.ones(64), 64, order=order)
        x = np.arange(64)
        np.testing.assert_array_equal(demo("scan", 1, 64, x, 64, order=order), np.cumsum(x) - x)


def run_fault(demo, name):
    grid, block = {
        "plain_ticket": (8, 32),
        "missing_fence": (8, 32),
        "shared_past": (1, 288),
        "cluster_relaxed": (8, 32),
    }.get(name, (1, 64))
    demo(name, grid, block, np.arange(50_000, 50_000 + block), block)


def main(mode, *names):
    demo = Demo(mode)
    for name in names:
        {"right": run_right, "stopped": run_stopped}.get(name, lambda d, name=name: run_fault(d, name))(demo)
        print(name, "done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
