"""Arrays of other libraries, in and out."""

from __future__ import annotations

import sys
import types

import numpy as np
import pytest
import torch

import cupaged
from cupaged import PagedTokenToKVPoolAllocator
from cupaged.backends import numba_cpu
from cupaged.interop import (
    device_table,
    device_vector,
    host_array,
    host_vector,
    is_on_gpu,
    library_of,
    parse_device,
    to_host,
)
from tests.allocators import make
from tests.host_backend import DeviceArray, HostCudaBackend

HOSTS = ("reference", "numba")


@pytest.fixture(params=HOSTS)
def pool(request):
    return make(request.param, 64, 4)


@pytest.fixture(autouse=True)
def _torch_of_the_cpu(monkeypatch):
    """torch built for the CPU has no streams for the GPU that the host plays."""
    monkeypatch.setattr(HostCudaBackend, "use_library", lambda self, *arrays: self.native)


# ---- the library out is the library in ---------------------------------------------------------------------------


def test_numpy_in_numpy_out(pool):
    out = pool.alloc_extend(np.array([0]), np.array([3]), np.array([-1]), 3)
    assert type(out) is np.ndarray
    assert type(pool.alloc_decode(np.array([4]), out[-1:])) is np.ndarray
    assert type(pool.alloc(4)) is type(pool.free_pages) is np.ndarray


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("backend", HOSTS)
def test_torch_in_torch_out(backend, dtype):
    pool = make(backend, 64, 4, index_dtype=getattr(torch, dtype))
    out = pool.alloc_extend(torch.tensor([0]), torch.tensor([3]), torch.tensor([-1]), 3)
    assert isinstance(out, torch.Tensor)
    assert out.dtype == getattr(torch, dtype)
    assert out.tolist() == [4, 5, 6]
    decoded = pool.alloc_decode(torch.tensor([4], dtype=torch.int32), out[-1:])
    assert isinstance(decoded, torch.Tensor)
    assert decoded.tolist() == [7]
    pool.free(torch.cat([out, decoded]))
    assert pool.available_size() == 64
    pool.check()


def test_lists_take_the_library_of_the_first_array(pool):
    assert isinstance(pool.alloc_decode([1], torch.tensor([-1])), torch.Tensor)
    assert type(pool.alloc_decode([1], np.array([-1]))) is np.ndarray
    assert type(pool.alloc_decode([1], [-1])) is np.ndarray


def test_a_torch_device_makes_torch_the_default():
    pool = PagedTokenToKVPoolAllocator(64, 4, device=torch.device("cpu"), index_dtype=torch.int32)
    for result in (
        pool.alloc(4),
        pool.alloc(0),
        pool.free_pages,
        pool.ret_values,
        pool.ok,
        pool.alloc_decode([1], [-1]),
    ):
        assert isinstance(result, torch.Tensor)
    assert pool.alloc(4).dtype == torch.int32
    assert type(pool.alloc_decode(np.array([1]), [-1])) is np.ndarray


def test_subclasses_of_tensors_and_arrays(pool):
    parameter = torch.nn.Parameter(torch.tensor([1]), requires_grad=False)
    assert isinstance(pool.alloc_decode(parameter, [-1]), torch.Tensor)
    assert pool.alloc_decode(np.ma.array([1]), [-1]).tolist() == [8]


# ---- nothing is copied -------------------------------------------------------------------------------------------


def test_out_is_written_in_place_and_returned(pool):
    for out in (np.full(3, -7), torch.full((3,), -7)):
        found = pool.alloc_extend([0], [3], [-1], 3, out=out)
        assert found is out
        assert (out[1] - out[0], out[2] - out[0]) == (1, 2)
    array = np.full(8, -7)
    pool.alloc_decode([1, 1], [-1, -1], out=array[3:5])
    assert (array != -7).tolist() == [False] * 3 + [True] * 2 + [False] * 3


def test_to_torch_shares_the_memory(pool):
    slots = pool.alloc(8)
    tensor = cupaged.to_torch(slots)
    assert tensor.data_ptr() == slots.ctypes.data
    slots[0] = 99
    assert tensor[0] == 99
    assert cupaged.to_torch(tensor) is tensor

    class Exporter:
        def __init__(self, array):
            self.array = array

        def __dlpack__(self, **kwargs):
            return self.array.__dlpack__(**kwargs)

        def __dlpack_device__(self):
            return self.array.__dlpack_device__()

    assert cupaged.to_torch(Exporter(slots)).data_ptr() == slots.ctypes.data


def test_to_torch_without_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match="pip install"):
        cupaged.to_torch(np.zeros(1, np.int64))


def test_arguments_are_read_where_they_lie():
    array = np.arange(5)
    assert host_vector(array, "x").ctypes.data == array.ctypes.data
    tensor = torch.arange(5)
    assert host_vector(tensor, "x").ctypes.data == tensor.data_ptr()
    address, stride, wide, length, owner = device_vector(device := DeviceArray(array[::2]), "x", 0)
    assert (address, stride, wide, length) == (array.ctypes.data, 16, 1, 3)
    assert owner is device


def test_arguments_are_never_written():
    for backend in HOSTS:
        pool = make(backend, 64, 4)
        arrays = [np.array([0, 0]), np.array([3, 9]), np.array([-1, -1])]
        copies = [a.copy() for a in arrays]
        slots = pool.alloc_extend(*arrays, 12)
        given = slots[::-1].copy()
        pool.free(given)
        assert given.tolist() == slots[::-1].tolist()
        for array, before in zip(arrays, copies, strict=True):
            assert array.tolist() == before.tolist()


# ---- forms of arguments ------------------------------------------------------------------------------------------


def forms(values):
    """The same integers in every form that a host array has."""
    n = len(values)
    for dtype in (np.int32, np.int64):
        plain = np.array(values, dtype)
        yield f"{plain.dtype}", plain
        spaced = np.full(3 * n + 1, -55, dtype)
        spaced[1::3] = plain
        yield "strided", spaced[1::3]
        yield "reversed", plain[::-1].copy()[::-1]
        columns = np.full((n, 3), -55, dtype)
        columns[:, 1] = plain
        yield "column", columns[:, 1]
        odd = np.zeros(plain.nbytes + 1, np.uint8)[1:].view(dtype)
        odd[:] = plain
        yield "unaligned", odd
        still = plain.copy()
        still.flags.writeable = False
        yield "read-only", still
        tensor = torch.from_numpy(plain.copy())
        yield "torch", tensor
        wide = torch.full((n, 2), -55, dtype=tensor.dtype)
        wide[:, 1] = tensor
        yield "torch-strided", wide[:, 1]
        yield "dlpack", OnlyDlpack(plain)
        yield "old-dlpack", OldDlpack(plain)
        yield "array-interface", Interface(plain)
    yield "list", list(values)
    yield "tuple", tuple(values)
    yield "scalars", [np.int32(v) for v in values]


class OnlyDlpack:
    def __init__(self, array):
        self._array = array

    def __dlpack__(self, **kwargs):
        return self._array.__dlpack__(**kwargs)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


class OldDlpack(OnlyDlpack):
    def __dlpack__(self, stream=None):
        return self._array.__dlpack__()


class Interface:
    def __init__(self, array):
        self._array = array

    @property
    def __array_interface__(self):
        return self._array.__array_interface__


FORM_NAMES = [name for name, _ in forms([1])]


@pytest.mark.parametrize("i", range(len(FORM_NAMES)), ids=FORM_NAMES)
@pytest.mark.parametrize("backend", [*HOSTS, "cuda-random"])
def test_every_form_of_argument(backend, i):
    pool = make(backend, 16 * 4, 4)

    def form(*values):
        return list(forms(values))[i][1]

    slots = pool.alloc_extend(form(0, 0, 0), form(5, 3, 4), form(-1, -1, -1), 12)
    assert slots.tolist() == [4, 5, 6, 7, 8, 12, 13, 14, 16, 17, 18, 19]
    out = pool.alloc_decode(form(6, 4, 5), form(8, 14, 19))
    assert out.tolist() == [9, 15, 20]
    pool.retain(form(3))
    pool.free(form(15, 12, 13, 14))
    assert pool.free_pages.tolist() == list(range(6, 17))
    pool.free_page_ids(form(5, 3))
    assert pool.free_pages.tolist() == [5, 3, *range(6, 17)]
    pool.free_segment(form(4, 5, 6, 7, 8, 9), start_pos=0)
    assert pool.free_pages.tolist() == [1, 2, 5, 3, *range(6, 17)]
    pool.check()


@pytest.mark.parametrize("backend", [*HOSTS, "cuda-random"])
def test_a_stride_of_zero(backend):
    pool = make(backend, 16 * 4, 4)
    zeros, ones = np.broadcast_to(np.int64(0), (5,)), np.broadcast_to(np.int32(1), (5,))
    assert pool.alloc_extend(zeros, ones, zeros, 5).tolist() == [4, 8, 12, 16, 20]
    if backend.startswith("cuda"):
        assert pool.alloc_decode(DeviceArray(ones), DeviceArray(zeros)).tolist() == [24, 28, 32, 36, 40]
    pool.free(np.broadcast_to(np.int64(5), (1000,)))
    assert pool.free_pages.tolist()[0] == 1
    pool.check()


@pytest.mark.parametrize("stride", [1, 2, -1, -3])
@pytest.mark.parametrize("dtypes", [("int32", "int64", "int32"), ("int64", "int32", "int64")], ids=str)
def test_each_device_argument_has_a_dtype_and_stride_of_its_own(stride, dtypes):
    pool = make("cuda-random", 16 * 4, 4)
    kept = []

    def on_device(values, dtype):
        spaced = np.full(len(values) * abs(stride), -55, dtype)
        view = spaced[:: abs(stride)] if stride > 0 else spaced[::stride][: len(values)]
        view[:] = values
        kept.append(view)
        return DeviceArray(view)

    prefix, seq, last = (on_device(v, d) for v, d in zip(([0, 0, 0], [5, 3, 4], [-1, -1, -1]), dtypes, strict=True))
    slots = pool.alloc_extend(prefix, seq, last, 12)
    assert slots.tolist() == [4, 5, 6, 7, 8, 12, 13, 14, 16, 17, 18, 19]
    pool.free_segment(on_device([4, 5, 6, 7, 8], dtypes[0]), start_pos=0)
    assert pool.free_pages.tolist() == [1, 2, *range(5, 17)]
    with pool.free_group():
        pool.free(on_device([14, 12, 13], dtypes[1]))
        pool.free(on_device([17], dtypes[0]))
    assert pool.free_pages.tolist()[:4] == [3, 4, 1, 2]
    pool.check()


def test_no_form_of_argument_compiles_anything():
    kernels = (numba_cpu.alloc, numba_cpu.free_by_slot, numba_cpu.retain, numba_cpu.free_by_page)
    pools = [make("numba", 64, 4, index_dtype=d) for d in ("int32", "int64")]
    before = [len(k.signatures) for k in kernels]
    for pool in pools:
        for _, zero in forms([0]):
            pool.alloc_extend(zero, [1], zero, 1)
            pool.clear()
        for _, one in forms([1]):
            pool.alloc(4)
            pool.retain(one)
            pool.free_page_ids(one)
            pool.clear()
    assert [len(k.signatures) for k in kernels] == before


# ---- small functions ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("auto", ("auto", None)),
        ("cpu", ("cpu", None)),
        ("cuda", ("cuda", None)),
        ("cuda:0", ("cuda", 0)),
        ("cuda:11", ("cuda", 11)),
        (3, ("cuda", 3)),
        (torch.device("cpu"), ("cpu", None)),
        (torch.device("cuda"), ("cuda", None)),
        (torch.device("cuda", 2), ("cuda", 2)),
        (types.SimpleNamespace(id=1), ("cuda", 1)),  # cupy.cuda.Device has an id
    ],
    ids=str,
)
def test_parse_device(device, expected):
    assert parse_device(device) == expected


def test_library_of():
    assert library_of(np.zeros(1)) == "numpy"
    assert library_of(torch.zeros(1)) == "torch"
    assert library_of(torch.nn.Parameter(torch.zeros(1))) == "torch"
    assert library_of([1]) == library_of(None) == library_of(DeviceArray(np.zeros(1))) == ""

    class Mine(torch.Tensor):
        pass

    assert library_of(torch.zeros(1).as_subclass(Mine)) == "torch"


def test_is_on_gpu():
    on_gpu = types.SimpleNamespace(__dlpack_device__=lambda: (2, 0))
    managed = types.SimpleNamespace(__dlpack_device__=lambda: (13, 0))
    pinned = types.SimpleNamespace(__dlpack_device__=lambda: (3, 0))
    assert [is_on_gpu(x) for x in (on_gpu, managed, DeviceArray(np.zeros(1)))] == [True] * 3
    for x in (pinned, np.zeros(1), torch.zeros(1), [1], (1,), "a", None, 5, range(3)):
        assert not is_on_gpu(x)


@pytest.mark.parametrize("backend", HOSTS)
def test_a_gpu_array_for_a_host_pool(backend):
    pool = make(backend, 64, 4)
    with pytest.raises(ValueError, match="seq_lens is on a GPU, but this allocator is on the CPU"):
        pool.alloc_decode(DeviceArray(np.array([1])), [-1])
    with pytest.raises((TypeError, ValueError), match="out"):
        pool.alloc_decode([1], [-1], out=DeviceArray(np.array([1])))
    assert pool.alloc_decode([1], [-1]).tolist() == [4]


def test_an_array_on_another_gpu():
    class Elsewhere(DeviceArray):
        def __dlpack_device__(self):
            return 2, 1

    pool = make("cuda-ascending", 64, 4)
    with pytest.raises(ValueError, match="seq_lens is on cuda:1, but this allocator is on cuda:0"):
        pool.alloc_decode(Elsewhere(np.array([1])), [-1])
    with pytest.raises(ValueError, match="out is on cuda:1"):
        pool.alloc_decode([1], [-1], out=Elsewhere(np.array([1])))
    assert pool.stats().ops == 1


@pytest.mark.parametrize("dtype", ["uint64", "float64", "bool", ">i8", "int16"])
def test_device_arrays_of_other_dtypes(dtype):
    pool = make("cuda-ascending", 64, 4)
    with pytest.raises(TypeError, match=f"seq_lens must be int32 or int64, not {dtype}"):
        pool.alloc_decode(DeviceArray(np.zeros(1, dtype)), [-1])
    with pytest.raises(ValueError, match=r"seq_lens must have one dimension, not shape \(1, 1\)"):
        pool.alloc_decode(DeviceArray(np.zeros((1, 1), np.int64)), [-1])


def test_an_interface_without_strides():
    array = np.arange(4, dtype=np.int32)

    class Plain:
        __cuda_array_interface__ = {  # noqa: RUF012
            "data": (array.ctypes.data, False),
            "shape": (4,),
            "typestr": "<i4",
            "version": 2,
        }

    plain = Plain()
    assert device_vector(plain, "x", 0) == (array.ctypes.data, 4, 0, 4, plain)


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        (types.SimpleNamespace(platform="cpu", id=0), ("cpu", None)),
        (types.SimpleNamespace(platform="gpu", id=9, local_hardware_id=1), ("cuda", 1)),
    ],
    ids=["cpu", "gpu"],
)
def test_a_device_of_jax(device, expected):
    assert parse_device(device) == expected


def test_a_device_that_is_no_gpu():
    with pytest.raises(ValueError, match="device must be"):
        parse_device(types.SimpleNamespace(platform="tpu", id=0))


def test_an_array_that_is_still_computed_is_waited_for():
    class Lazy(DeviceArray):
        def block_until_ready(self):
            self.array[:] = [3, 4]

    lazy = Lazy(np.zeros(2, np.int64))
    pool = make("cuda-ascending", 64, 4)
    pool.alloc_extend(np.zeros(2, np.int64), lazy, np.full(2, -1), 7)
    assert pool.ret_values == 2 << 32 | 7
    pool.check()


def test_a_read_only_table_on_a_gpu():
    class Immutable(DeviceArray):
        @property
        def __cuda_array_interface__(self):
            interface = super().__cuda_array_interface__
            return interface | {"data": (interface["data"][0], True)}

    table = np.zeros((2, 8), np.int32)
    assert device_table(DeviceArray(table), "table", 0)[:4] == (table.ctypes.data, 8, 2, 8)
    with pytest.raises(ValueError, match="table is read-only, but it is written in place"):
        device_table(Immutable(table), "table", 0)


def test_an_array_that_numpy_cannot_read():
    class Bfloat16:
        def __dlpack__(self, **options):
            raise BufferError("no such dtype")

        def __dlpack_device__(self):
            return 1, 0

    with pytest.raises(TypeError, match="seq_lens cannot be read through DLPack: no such dtype"):
        host_array(Bfloat16(), "seq_lens")


# ---- JAX, where it is installed ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def jnp():
    return pytest.importorskip("jax.numpy")


def test_jax_arrays_in_numpy_arrays_out(pool, jnp):
    seq, none = jnp.array([3, 5]), jnp.zeros(2, jnp.int32)
    slots = pool.alloc_extend(none, seq, none - 1, 8)
    assert type(slots) is np.ndarray
    assert slots.tolist() == [4, 5, 6, 8, 9, 10, 11, 12]
    as_jax = jnp.from_dlpack(slots)
    new = pool.alloc_decode(seq + 1, as_jax[jnp.array([2, 7])])
    assert new.tolist() == [7, 13]
    pool.free(jnp.concatenate([as_jax, jnp.from_dlpack(new)]))
    pool.check()
    assert pool.available_size() == 64


@pytest.mark.parametrize("backend", HOSTS)
def test_jax_lengths_in_a_step(backend, jnp):
    kv = cupaged.KVAllocator(64, "cpu", 4, 32, 4, backend=backend)
    rows, seq = jnp.array([2, 0]), jnp.array([4, 7])
    assert kv.extend_step(kv.req_to_page, rows, seq * 0, seq, 11).tolist() == [*range(4, 15)]
    assert kv.decode_step(kv.req_to_page, rows, seq).tolist() == [16, 15]
    assert kv.block_table(kv.req_to_page, rows, seq + 1, 2).tolist() == [[1, 4], [2, 3]]
    kv.release(kv.req_to_page, rows, seq + 1)
    kv.check()
    assert kv.available_size() == 15


def test_what_jax_cannot_give(pool, jnp):
    three = jnp.array([3])
    with pytest.raises(TypeError, match="table must be a NumPy array or a torch tensor"):
        pool.decode_step(jnp.zeros((2, 64), jnp.int32), jnp.array([0]), three)
    with pytest.raises(TypeError, match="out must be a NumPy array or a torch tensor"):
        pool.alloc_decode(three, three, out=three)
    for dtype in (jnp.float32, jnp.bfloat16, jnp.uint32):
        with pytest.raises(TypeError, match="seq_lens"):
            pool.alloc_decode(three.astype(dtype), three)
    assert pool.available_size() == 64


def test_a_device_of_the_installed_jax(jnp):
    import jax

    pool = PagedTokenToKVPoolAllocator(64, 4, device=jax.devices("cpu")[0], backend="reference")
    assert pool.device == "cpu"


def test_to_host():
    assert to_host(torch.tensor([1, 2])).tolist() == [1, 2]
    array = np.zeros(2)
    assert to_host(array) is array
    assert to_host([1, 2]).tolist() == [1, 2]


def test_host_array_keeps_int32():
    assert host_array([np.int32(3)], "x").dtype == np.int32
    assert host_array([3], "x").dtype == host_array([], "x").dtype == np.int64
    assert host_array(range(3), "x").tolist() == [0, 1, 2]


# ---- on a GPU ----------------------------------------------------------------------------------------------------

gpu = pytest.mark.gpu


def _has_gpu() -> bool:
    return torch.cuda.is_available()


needs_gpu = pytest.mark.skipif(not _has_gpu(), reason="needs a CUDA GPU and a CUDA build of torch")


@gpu
@needs_gpu
@pytest.mark.parametrize("backend", ["cupy", "numba-cuda"])
def test_torch_on_the_gpu(backend):
    device = torch.device("cuda", 0)
    pool = PagedTokenToKVPoolAllocator(64, 4, device=device, backend=backend)
    out = torch.full((3,), -7, device=device)
    pointer = out.data_ptr()
    zero, none = torch.tensor([0], device=device), torch.tensor([-1], device=device, dtype=torch.int32)
    found = pool.alloc_extend(zero, torch.tensor([3], device=device), none, 3, out=out)
    assert found is out
    assert found.data_ptr() == pointer
    assert out.tolist() == [4, 5, 6]
    decoded = pool.alloc_decode(torch.tensor([4], device=device), out[-1:])
    assert decoded.device == device
    assert decoded.tolist() == [7]
    assert pool.alloc(4).device == device
    assert pool.free_pages.device == device
    pool.free(torch.cat([out, decoded]).flip(0))
    pool.check()
    assert pool.available_size() == 60
    with pytest.raises(ValueError, match="out must be on cuda:0"):
        pool.alloc_decode([1], [-1], out=torch.zeros(1, dtype=torch.int64))


@gpu
@needs_gpu
def test_cupy_and_numba_on_the_gpu():
    cupy = pytest.importorskip("cupy")
    from numba import cuda

    pool = PagedTokenToKVPoolAllocator(64, 4, device="cuda:0", backend="cupy")
    slots = pool.alloc_extend(cupy.array([0]), cupy.array([3]), cupy.array([-1]), 3)
    assert isinstance(slots, cupy.ndarray)
    assert slots.get().tolist() == [4, 5, 6]
    tensor = cupaged.to_torch(slots)
    assert tensor.data_ptr() == torch.from_dlpack(slots).data_ptr() == slots.data.ptr
    pool.free(slots[::-1])
    backwards = cupy.arange(8)[4:][::-1]  # 7, 6, 5, 4
    assert pool.alloc(4).get().tolist() == [4, 5, 6, 7]
    pool.free(backwards)
    pool.alloc_decode(cuda.to_device(np.array([1])), cuda.to_device(np.array([-1], np.int32)))
    pool.check()
    assert pool.available_size() == 60
    with cupy.cuda.Stream(non_blocking=True):
        assert pool.alloc(4).get().tolist() == [8, 9, 10, 11]


@gpu
@needs_gpu
@pytest.mark.skipif(not _has_gpu() or torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus():
    pools = [PagedTokenToKVPoolAllocator(64, 4, device=f"cuda:{i}") for i in range(2)]
    with torch.cuda.device(0):
        for i, pool in enumerate(pools):
            one = torch.tensor([1], device=f"cuda:{i}")
            out = pool.alloc_decode(one, one - 2)
            assert out.device.index == i
            assert out.tolist() == [4]
            pool.free(out)
            assert pool.available_size() == 64
            assert torch.cuda.current_device() == 0
            with pytest.raises(ValueError, match=f"seq_lens is on cuda:{1 - i}"):
                pool.alloc_decode(torch.tensor([1], device=f"cuda:{1 - i}"), one)
