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
        env=os.environ | {"NUMBA_ENABLE_CUDASIM": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.skipif(SIMULATED, reason="this is that process")
def test_in_the_simulator():
    done = child("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not gpu", __file__)
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
