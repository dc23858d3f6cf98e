"""Layer 5: the numba.cuda kernels against the reference, in numba's simulator, or on a real GPU.

The simulator must be asked for before numba is imported, so an ordinary run starts this file again in a process of
its own. On a machine with a GPU, ``pytest -m gpu`` runs the same tests on real blocks.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from cupaged import PagedTokenToKVPoolAllocator
from cupaged.backends import numba_cuda
from cupaged.backends.numba_cuda import KERNELS, SIMULATED, NumbaCudaBackend
from cupaged.errors import CaptureError
from cupaged.interop import to_host
from cupaged.layout import MAIL_WORDS, NUM_WORDS, Kind, Where, Word, unpack_mail
from tests.test_backends import play

ROOT = Path(__file__).parent.parent
HAS_GPU = not SIMULATED and numba_cuda.cuda is not None


def on_device(test):
    """A test that runs in the simulator's process, or with ``-m gpu``."""
    if SIMULATED:
        return test
    return pytest.mark.gpu(pytest.mark.skipif(not HAS_GPU, reason=numba_cuda.probe()[1])(test))


def on_gpu(test):
    return pytest.mark.gpu(pytest.mark.skipif(not HAS_GPU, reason=numba_cuda.probe()[1])(test))


def child(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        # what the outer run asks of its own coverage is not asked of this part
        env=os.environ | {"NUMBA_ENABLE_CUDASIM": "1", "PYTEST_ADDOPTS": ""} | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.slow
@pytest.mark.skipif(SIMULATED, reason="this is that process")
@pytest.mark.parametrize(
    "arguments",
    [(__file__,), *((str(ROOT / f"tests/test_{name}.py"), "-k", "numba-cuda") for name in ("handoff", "digest"))],
)
def test_in_the_simulator(arguments):
    done = child("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not gpu", *arguments)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    assert " passed" in done.stdout


@pytest.fixture(autouse=True, scope="module")
def honest_simulator():
    """The simulator's shared arrays, with garbage in them, and made once a block: it makes them without a lock."""
    if not SIMULATED:
        yield
        return
    from numba.cuda.simulator import kernelapi

    lock = threading.Lock()

    def array(self, shape, dtype):
        frame = sys._getframe(1)
        with lock:
            key = frame.f_code, frame.f_lineno
            if key not in self._allocations:
                self._allocations[key] = np.full(shape, -7777, dtype)
            return self._allocations[key]

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # threads of a block overlap in many ways
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernelapi.FakeCUDAShared, "array", array)
        yield
    sys.setswitchinterval(interval)


@on_device
@pytest.mark.parametrize("need_sort", [False, True])
@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("page_size", [1, 2, 3, 16, 48])
def test_same_as_reference(page_size, dtype, need_sort):
    for strict in (True, False):
        seed = 1000 * page_size + 100 * (dtype == "int64") + 10 * need_sort + strict
        fixed = {"index_dtype": np.dtype(dtype), "need_sort": need_sort, "strict": strict}
        play(NumbaCudaBackend, seed, page_size, steps=30 if SIMULATED else 60, **fixed)


@on_device
def test_more_requests_and_pages_than_threads():
    # On a GPU also more than the largest grid has threads.
    num_pages, batches = (300, (40,)) if SIMULATED else (200_000, (1500, 5000))
    for batch in batches:
        play(NumbaCudaBackend, batch, 3, steps=10, num_pages=num_pages, largest_batch=batch, strict=True)


class Watched(NumbaCudaBackend):
    """Compares the arguments of every launch with the signature that was compiled."""

    launched: set[str] = set()  # noqa: RUF012

    def _launch(self, kernel, blocks, *arguments):
        from numba.core import sigutils, types

        expected = sigutils.normalize_signature(KERNELS[kernel][0])[0]
        assert len(expected) == len(arguments), kernel
        for kind, argument in zip(expected, arguments, strict=True):
            if not isinstance(kind, types.Array):
                assert isinstance(argument, int), (kernel, kind, argument)
                continue
            assert str(argument.dtype) == str(kind.dtype), kernel
            assert len(tuple(argument.shape)) == kind.ndim, kernel
            assert kind.layout == "A" or _is_contiguous(argument), kernel
        self.launched.add(kernel)
        super()._launch(kernel, blocks, *arguments)


def overloads(backend) -> dict[str, int]:
    return {name: len(kernel.overloads) for name, kernel in backend.kernels.items()}


@on_device
def test_nothing_is_compiled_after_construction():
    found: list[dict[str, int]] = []

    class Counting(Watched):
        def __init__(self, **options):
            super().__init__(**options)
            found.append(overloads(self))
            found.append(self)

    for seed in range(4):  # int32 and int64 arguments and results, strides, tables of both kinds
        play(Counting, seed, 3, steps=25)
    assert set(KERNELS) == Watched.launched
    for before, backend in zip(found[::2], found[1::2], strict=True):
        assert overloads(backend) == before
        assert set(before.values()) == ({0} if SIMULATED else {1})


def make(**options) -> NumbaCudaBackend:
    chosen = {
        "num_pages": 20,
        "page_size": 4,
        "index_dtype": np.dtype(np.int64),
        "max_batch": 4,
        "need_sort": False,
        "strict": True,
        "refused_slot": 0,
        "device_index": 0,
    }
    backend = NumbaCudaBackend(**(chosen | options))
    backend.enter("")
    backend.host_op = 1
    backend.clear(backend.capacity)
    return backend


@on_device
def test_the_mail_is_the_words():
    backend = make()
    for host_op in (2, 3):
        backend.kind, backend.host_op = Kind.ALLOC, host_op
        result, out = backend.output("numba", 8)
        backend.alloc_pages(2, out)
    words = backend.snapshot()[2]
    assert words.shape == (NUM_WORDS,)
    mail = backend.mail.tolist()
    assert len(mail) == MAIL_WORDS
    assert [cell >> 32 for cell in mail] == [words[Word.OP]] * MAIL_WORDS == [3] * MAIL_WORDS
    assert unpack_mail(mail) == words.tolist()
    assert words[Word.HOST_OP] == 3
    assert to_host(result).tolist() == list(range(12, 20))
    backend.kind, backend.host_op = Kind.REFRESH, 0  # as in a captured graph
    backend.refresh()
    assert backend.snapshot()[2][Word.HOST_OP] == 3
    backend.poll()


@on_device
def test_memory_and_scratch():
    backend = make(num_pages=65_536 if not SIMULATED else 4096, max_batch=8192 if not SIMULATED else 512)
    assert backend.memory() <= 24 * backend.capacity
    ones = backend.vector(np.ones(backend.max_batch + 1, np.int64), "seq")
    _, out = backend.output("numba", backend.length(ones))
    backend.kind = Kind.DECODE
    backend.alloc_decode(ones, ones, out)  # scratch grows
    backend.captured = True
    more = backend.vector(np.ones(backend.max_batch + 1, np.int64), "seq")
    with pytest.raises(CaptureError, match="max_batch"):
        backend.alloc_decode(more, more, out)


@on_device
def test_arguments_of_all_kinds():
    cuda = numba_cuda.cuda
    pool = PagedTokenToKVPoolAllocator(64 * 4, 4, backend="numba-cuda", index_dtype="int32")
    assert pool.device == "cuda:0"
    device = cuda.to_device(np.array([0, 9, 3, 9, 0], np.int64))[::2]  # strided, on the device
    for prefix in ([0, 3, 0], np.array([0, 3, 0], np.int32), (0, 3, 0), device):
        slots = pool.alloc_extend(np.zeros(2, np.int32), [3, 3], [-1, -1], 6)
        last = to_host(slots)[5]
        result = pool.alloc_extend(prefix, [1, 9, 0], np.array([-1, last, -1], np.int64), 7)
        assert type(result) is type(slots)
        found = to_host(result)
        assert found.dtype == np.int32
        assert found.tolist()[1] == last + 1
        assert found[2] % 4 == 0
        pool.free(np.concatenate([to_host(slots), found]))
        pool.check()
    out = cuda.device_array(4, np.int32)
    assert pool.alloc_decode([1, 1, 1, 1], [-1] * 4, out=out) is out
    assert len(set(to_host(out).tolist())) == 4
    with pool.free_group():
        pool.free(out)
        pool.free_page_ids([to_host(pool.alloc(4))[0] // 4])
    pool.check_integrity()
    assert pool.available_size() == 64 * 4
    with pytest.raises(TypeError, match="out must be int32"):
        pool.alloc_decode([1], [-1], out=cuda.device_array(1, np.int64))
    with pytest.raises(TypeError, match="seq_lens must be int32 or int64"):
        pool.alloc_decode(np.ones(1, np.float32), [-1])
    assert int(to_host(pool.alloc(8)).size) == 8
    assert int(to_host(pool.ret_values)) == 2 << 32 | 8
    assert int(to_host(pool.ok)) == 1
    assert to_host(pool.free_pages).size == 62


@on_device
def test_a_whole_life():
    pool = PagedTokenToKVPoolAllocator(30 * 3, 3, backend="numba-cuda", need_sort=True, debug=True)
    pool.warmup()
    first = to_host(pool.alloc(12))
    pool.retain(np.unique(first // 3))
    state = pool.backup_state()
    pool.free(first)
    pool.free(first, num_pages=4)
    assert pool.available_size() == 90
    pool.merge_and_sort_free()
    assert to_host(pool.free_pages).tolist() == list(range(1, 31))
    pool.restore_state(state)
    assert pool.available_size() == 78
    assert pool.alloc(81) is None
    pool.resize(15)
    pool.refresh()
    assert pool.available_size() == 15
    assert pool.stats().refusals >= 1
    with pytest.raises(ValueError, match="does not exist"):
        PagedTokenToKVPoolAllocator(64, 4, backend="numba-cuda", device="cuda:99")


@on_device
def test_queued_page_lists_and_segments():
    orders = []
    for backend in ("reference", "numba-cuda"):
        pool = PagedTokenToKVPoolAllocator(20 * 4, 4, backend=backend)
        slots = to_host(pool.alloc(40))
        with pool.free_group():
            pool.free_page_ids([3, 1])
            pool.free_segment(slots[12:20], start_pos=0)
            pool.free(slots[20:])
            pool.free(slots[4:5])
        pool.check_integrity()
        orders.append(to_host(pool.free_pages).tolist())
    assert orders[0] == orders[1]


def hand_offs(pool, lend, table, rows, prefix, seq, total):
    """Every hand-off, without `out` and with one: results on the host, and what lies around a corner given."""
    table, rows, prefix, seq = map(lend, (table, rows, prefix, seq))
    n = len(rows)
    found = [*pool.flashinfer_tables(table, rows, seq), pool.expand_page_table(table, rows, seq, 2)]
    found += [pool.block_table(table, rows, seq, 8), pool.slot_mapping(table, rows, prefix, seq, total)]
    assert [x.dtype for x in found] == [np.dtype(np.int32)] * 5 + [np.dtype(np.int64)]
    given = tuple(lend(np.full(k, 7, np.int32)) for k in (n + 1, 60, n))
    assert pool.flashinfer_tables(table, rows, seq, out=given) is given
    buffer = lend(np.full((n + 2, 25), 7, np.int32))
    pool.expand_page_table(table, rows, seq, 1, out=buffer[:n, :24] if n else lend(np.zeros((0, 24), np.int32)))
    slots = lend(np.full(total + 5, 7, np.int64))
    assert pool.slot_mapping(table, rows, prefix, seq, total + 5, out=slots) is slots
    return [to_host(x) for x in (*found, *given, buffer, slots)]


@on_device
@pytest.mark.parametrize("n", [5, 0])
def test_hand_offs_of_numba_arrays(n):
    rng = np.random.default_rng(n)
    pools = [PagedTokenToKVPoolAllocator(60 * 4, 4, backend=name) for name in ("reference", "numba-cuda")]
    for dtype in (np.int32, np.int64):
        table = rng.integers(4, 61 * 4, (6, 22)).astype(np.int32)
        rows, seq = rng.permutation(6)[:n].astype(dtype), rng.integers(0, 23, n).astype(dtype)
        if n:
            rows[1] = -1
        prefix = seq // 2
        total = int((seq - prefix).sum())
        expected, found = (
            hand_offs(pool, lend, table, rows, prefix, seq, total)
            for pool, lend in zip(pools, (np.array, numba_cuda.cuda.to_device), strict=True)
        )
        pages = expected[0][-1]
        assert found[1].shape == (n * 6,) if HAS_GPU else (pages,)  # the number of pages is not waited for
        assert not found[1][pages:].any()
        found[1] = found[1][:pages]
        for mine, yours in zip(expected, found, strict=True):
            np.testing.assert_array_equal(yours, mine)


@on_device
def test_hand_offs_check_what_is_given():
    pool, lend = PagedTokenToKVPoolAllocator(60 * 4, 4, backend="numba-cuda"), numba_cuda.cuda.to_device
    table, spread = lend(np.zeros((2, 8), np.int32)), lend(np.zeros(6, np.int64))
    with pytest.raises(ValueError, match=r"out must be on cuda:0"):
        pool.slot_mapping(table, [0], [0], [3], 3, out=np.zeros(3, np.int64))
    with pytest.raises(ValueError, match="out must be contiguous"):
        pool.slot_mapping(table, [0], [0], [3], 3, out=spread[::2])
    with pytest.raises(TypeError, match="out must be int64"):
        pool.slot_mapping(table, [0], [0], [3], 3, out=lend(np.zeros(3, np.int32)))
    with pytest.raises(ValueError, match=r"out must be of shape \(1, 2\)"):
        pool.block_table(table, [0], [3], 2, out=lend(np.zeros((1, 3), np.int32)))


@on_device
def test_hand_offs_are_one_launch_or_none():
    backend, launched = make(), []
    launch = backend._launch
    backend._launch = lambda kernel, *rest: (launched.append(kernel), launch(kernel, *rest))
    table = backend.table(numba_cuda.cuda.to_device(np.zeros((2, 8), np.int32)), "table")
    none, one = (backend.vector(np.ones(n, np.int64), "argument") for n in (0, 1))
    array, indptr = backend.new_array("numba", (1,), np.dtype(np.int32))
    array[0] = 7
    before = backend.snapshot()[2]
    backend.flashinfer_tables(table, False, -1, none, none, indptr, 0, 0, 0)
    assert to_host(array).tolist() == [0]
    for rows, width in ((0, 3), (1, 0), (1, 3)):
        out, to = backend.new_table("numba", rows, width)
        assert out.shape == (rows, width)
        vector = one if rows else none
        backend.block_table(table, False, -1, vector, vector, 1, to)
    for entries in (0, 2):
        slots, to = backend.new_array("numba", (entries,), np.dtype(np.int64))
        backend.slot_mapping(table, False, -1, one, one, one, entries, to)
        assert to_host(slots).tolist() == [-1] * entries
    assert launched == ["list_pages", "list_blocks", "map_slots"]
    np.testing.assert_array_equal(backend.snapshot()[2], before)  # no op, no error


def _is_contiguous(array) -> bool:
    # mapped memory is a NumPy array to numba
    return array.flags.c_contiguous if isinstance(array, np.ndarray) else array.is_c_contiguous()


# ---- which numba.cuda ------------------------------------------------------------------------------------------

BROKEN_REDIRECT = """
import importlib.abc, sys
import numba, numpy
vars(numpy).pop("row_stack", None)  # as NumPy 2.5
class NumbaCudaFinder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "numba.cuda":
            raise AttributeError("module 'numpy' has no attribute 'row_stack'")
sys.meta_path.insert(0, NumbaCudaFinder())
from cupaged.backends import numba_cuda
assert numba_cuda.probe() == (True, "", ""), numba_cuda.probe()
assert not any(type(f) is NumbaCudaFinder for f in sys.meta_path)
assert numba_cuda.cuda.__name__ == "numba.cuda"
"""

ONLY_SUCCESSOR = """
import sys, types
sys.meta_path[:] = [finder for finder in sys.meta_path if "NumbaCuda" not in type(finder).__name__]
import numba.cuda as simulator
for name in [name for name in sys.modules if name.startswith("numba.cuda")]:
    del sys.modules[name]
import numba
del numba.cuda
class Blocker:
    def find_spec(name, path, target=None):
        if name == "numba.cuda":
            raise ImportError("gone")
sys.meta_path.insert(0, Blocker)
sys.modules["numba_cuda_mlir"] = module = types.ModuleType("numba_cuda_mlir")
module.cuda = simulator
from cupaged.backends import numba_cuda
assert numba_cuda.probe() == (True, "", "")
assert numba_cuda.cuda is simulator
"""

NOTHING = """
import sys
class Blocker:
    def find_spec(name, path, target=None):
        if name == "numba.cuda":
            raise ImportError("libNVVM cannot be found.\\nDo this or that")
        if name == "numba_cuda_mlir":
            raise ModuleNotFoundError("No module named 'numba_cuda_mlir'", name="numba_cuda_mlir")
sys.meta_path.insert(0, Blocker)
from cupaged import PagedTokenToKVPoolAllocator, backends
from cupaged.errors import BackendError
works, reason, hint = backends.probe("numba-cuda")
assert not works
assert reason.startswith("numba.cuda does not work (libNVVM cannot be found.)") and "\\n" not in reason
assert hint.startswith("pip install") and "\\n" not in hint
try:
    PagedTokenToKVPoolAllocator(64, 4, backend="numba-cuda")
except BackendError as error:
    assert "libNVVM" in str(error) and "pip install" in str(error)
else:
    raise AssertionError("it was made")
"""


@pytest.mark.skipif(SIMULATED, reason="starts its own processes")
@pytest.mark.parametrize(
    "script", [BROKEN_REDIRECT, ONLY_SUCCESSOR, NOTHING], ids=["redirect", "successor", "nothing"]
)
def test_takes_what_works(script):
    done = child("-c", script)
    assert done.returncode == 0, done.stderr


class Driver:
    """A driver that sees one GPU."""

    def count(self):
        return 1


def test_reasons_are_one_line(monkeypatch):
    monkeypatch.setattr(numba_cuda, "SIMULATED", False)

    def missing():
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(numba_cuda, "_Driver", missing)
    _, _, reason, hint = numba_cuda._choose()
    assert reason == "no NVIDIA driver works here (libcuda.so.1: cannot open shared object file)"
    assert hint == "needs an NVIDIA GPU and its driver"
    monkeypatch.setattr(numba_cuda, "_Driver", lambda: type("Empty", (), {"count": lambda self: 0})())
    assert numba_cuda._choose()[2] == "the NVIDIA driver sees no GPU"

    def incomplete(found):
        raise RuntimeError("Missing libdevice file.\nPlease ensure you have a CUDA Toolkit 11.2 or higher.")

    monkeypatch.setattr(numba_cuda, "_Driver", Driver)
    monkeypatch.setattr(numba_cuda, "_try_out", incomplete)
    monkeypatch.setattr(numba_cuda, "_import_mlir", lambda: None)
    found, _, reason, hint = numba_cuda._choose()
    assert found is None
    assert reason == "numba.cuda does not work (Missing libdevice file.)"
    assert "numba-cuda-mlir" in hint


def _write_two(x):
    x[0] = 2


@pytest.mark.skipif(not SIMULATED, reason="in the simulator's process")
def test_trial_kernel(monkeypatch):
    numba_cuda._try_out(numba_cuda.cuda)
    monkeypatch.setattr(numba_cuda, "_write_one", _write_two)
    with pytest.raises(RuntimeError, match="result did not come"):
        numba_cuda._try_out(numba_cuda.cuda)


# ---- only on a GPU ---------------------------------------------------------------------------------------------


@on_gpu
def test_torch_in_torch_out_on_its_stream():
    torch = pytest.importorskip("torch")
    pool = PagedTokenToKVPoolAllocator(640, 4, backend="numba-cuda")
    seq = torch.ones(8, dtype=torch.int32, device="cuda")
    last = torch.full((16,), -1, device="cuda")[::2]
    expected = list(range(4, 36, 4))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        result = pool.alloc_decode(seq, last)
        assert pool.backend._stream == stream.cuda_stream
        assert result.tolist() == expected
    out = torch.empty(8, dtype=torch.int64, device="cuda")
    assert pool.alloc_decode(seq, last, out=out) is out  # on the default stream, ordered by an event
    assert out.tolist() == list(range(36, 68, 4))
    pool.free(result)
    pool.check_integrity()


@on_gpu
def test_captured_in_a_graph():
    torch = pytest.importorskip("torch")
    pool = PagedTokenToKVPoolAllocator(640, 4, backend="numba-cuda")
    seq, last = torch.ones(8, dtype=torch.int64, device="cuda"), torch.full((8,), -1, device="cuda")
    out = torch.empty(8, dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pool.alloc_decode(seq, last, out=out)
    for turn in range(3):
        graph.replay()
        assert out.tolist() == [4 * (1 + 8 * turn + i) for i in range(8)]
    pool.refresh()
    assert pool.available_size() == 640 - 3 * 32
    pool.check_integrity()


@on_gpu
def test_cupy_in_cupy_out_on_its_stream():
    cupy = pytest.importorskip("cupy")
    pool = PagedTokenToKVPoolAllocator(640, 4, backend="numba-cuda")
    with cupy.cuda.Stream(non_blocking=True) as stream:
        result = pool.alloc_decode(cupy.ones(8, cupy.int64), cupy.full(8, -1))
        assert isinstance(result, cupy.ndarray)
        assert pool.backend._stream == stream.ptr
        assert result.tolist() == list(range(4, 36, 4))


@on_gpu
@pytest.mark.parametrize("library", ["torch", "cupy"])
def test_hand_offs_leave_in_the_library_of_their_arguments(library):
    arrays = pytest.importorskip(library)
    lend = arrays.asarray if library == "cupy" else lambda x: arrays.from_numpy(x).cuda()
    pool = PagedTokenToKVPoolAllocator(60 * 4, 4, backend="numba-cuda")
    rows, seq = lend(np.array([1, 0])), lend(np.array([6, 3]))
    table = lend(np.arange(4, 20, dtype=np.int32).reshape(2, 8))
    indptr, indices, last = pool.flashinfer_tables(table, rows, seq)
    blocks = pool.block_table(table, rows, seq, 3)
    slots = pool.slot_mapping(table, rows, seq - 1, seq, 2)
    assert {type(x) for x in (indptr, indices, last, blocks, slots)} == {type(seq)}
    assert indptr.tolist() == [0, 2, 3]
    assert indices.tolist() == [3, 4, 1, 0]
    assert last.tolist() == [2, 3]
    assert blocks.tolist() == [[3, 4, 0], [1, 0, 0]]
    assert slots.tolist() == [17, 6]
    buffer = lend(np.full((3, 5), 7, np.int32))
    pool.block_table(table, rows, seq, 3, out=buffer[:2, :3])
    assert buffer.tolist() == [[3, 4, 0, 7, 7], [1, 0, 0, 7, 7], [7] * 5]


@on_gpu
def test_hand_offs_in_a_graph():
    torch = pytest.importorskip("torch")
    pool = PagedTokenToKVPoolAllocator(60 * 4, 4, backend="numba-cuda")
    table = torch.arange(4, 20, dtype=torch.int32, device="cuda").view(2, 8)
    rows, seq = torch.tensor([1, 0], device="cuda"), torch.tensor([0, 0], device="cuda")
    given = tuple(torch.empty(n, dtype=torch.int32, device="cuda") for n in (3, 4, 2))
    blocks = torch.empty(2, 2, dtype=torch.int32, device="cuda")
    slots = torch.empty(9, dtype=torch.int64, device="cuda")
    zeros = torch.zeros_like(seq)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pool.flashinfer_tables(table, rows, seq, out=given)
        pool.block_table(table, rows, seq, 2, out=blocks)
        pool.slot_mapping(table, rows, zeros, seq, 9, out=slots)
    for lengths, pages, mapped in (([6, 3], [3, 4, 1, 0], [*range(12, 18), 4, 5, 6]), ([0, 1], [1, 0, 0, 0], [4])):
        seq.copy_(torch.tensor(lengths))
        graph.replay()
        assert given[1].tolist() == pages
        assert slots.tolist() == mapped + [-1] * (9 - len(mapped))
    assert blocks.tolist() == [[0, 0], [1, 0]]


@on_gpu
def test_numba_results_reach_torch_without_a_copy():
    pytest.importorskip("torch")
    import cupaged

    pool = PagedTokenToKVPoolAllocator(640, 4, backend="numba-cuda")
    result = pool.alloc(8)
    tensor = cupaged.to_torch(result)
    assert tensor.data_ptr() == result.__cuda_array_interface__["data"][0]
    assert tensor.tolist() == list(range(4, 12))
    by_torch = PagedTokenToKVPoolAllocator(640, 4, backend="numba-cuda", device=tensor.device)
    assert by_torch.alloc(4).is_cuda
    assert by_torch.ret_values.shape == ()
    assert int(by_torch.ret_values) == 1 << 32 | 4
    assert by_torch.free_pages.tolist() == list(range(2, 161))


@on_gpu
def test_another_device_and_the_callers_stays_current():
    torch = pytest.importorskip("torch")
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    pool = PagedTokenToKVPoolAllocator(640, 4, backend="numba-cuda", device="cuda:1")
    assert torch.cuda.current_device() == 0
    result = pool.alloc_decode(torch.ones(3, dtype=torch.int64, device="cuda:1"), [-1] * 3)
    assert result.device.index == 1
    assert result.tolist() == [4, 8, 12]
    assert numba_cuda._driver.current_device() == 0
    pool.check_integrity()


@on_gpu
def test_free_pages_where_for_many_entries():
    # One block whose threads each take the entries of their pages in order.
    backend = make(num_pages=5000, page_size=1)
    _, out = backend.output("numba", 5000)
    backend.kind = Kind.ALLOC
    backend.alloc_pages(5000, out)
    order = np.random.default_rng(5).permutation(5000) + 1
    backend.kind = Kind.FREE_PAGES
    backend.free_pages(backend.vector(order, "page_ids"), 1, Where.BACK)
    ring, refs, words = backend.snapshot()
    assert words[Word.FREE] == 5000
    np.testing.assert_array_equal(np.roll(ring, -int(words[Word.HEAD])), order)
    assert not refs[1:].any()


@on_device
def test_reference_counts():
    backend = make(num_pages=20)
    _, out = backend.output("numba", 12)
    backend.kind = Kind.ALLOC
    backend.alloc_pages(3, out)
    backend.kind = Kind.RETAIN
    backend.retain_pages(backend.vector(np.array([2, 2]), "page_ids"))
    counts, address = backend.new_array("numba", (6,), np.dtype(np.int32))
    backend.reference_counts(backend.vector(np.array([2, 1, 4, 0, 21, -(2**40)]), "page_ids"), address)
    assert to_host(counts).tolist() == [3, 1, 0, -1, -1, -1]
