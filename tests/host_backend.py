"""The CUDA C backend on a machine without a GPU: the product's own sources, launched by the fiber harness."""

from __future__ import annotations

import functools
from collections import deque

import numpy as np

from cupaged.backends.cupy_raw import CudaBackend
from cupaged.interop import device_vector, host_array, is_on_gpu
from cupaged.layout import NUM_WORDS
from tests.host_cuda import HostModule, exact_copy, exact_empty


@functools.cache
def host_module(mode: str) -> HostModule:
    return HostModule(mode=mode)


class DeviceArray:
    """Looks like an array on a GPU: only its address may be read."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    @property
    def __cuda_array_interface__(self) -> dict:
        return {
            "data": (self.array.ctypes.data, False),
            "shape": self.array.shape,
            "typestr": self.array.dtype.str,
            "strides": self.array.strides,
            "version": 3,
        }


class HostCudaBackend(CudaBackend):
    """Runs each launch at once, or, with `delayed`, only when the host polls: a device that lags behind."""

    native = "numpy"
    order = "ascending"
    mode = "plain"
    cluster = 8
    delayed = False
    seed = 0

    def __init__(self, **options) -> None:
        self._module = host_module(self.mode)
        self.queue_of_launches: deque = deque()
        self.launches: list[str] = []
        self.capture = False
        self.in_use: list = []
        super().__init__(**options)

    def _current_device(self) -> int:
        return 0

    def _set_device(self, index: int) -> None:
        raise AssertionError("there is one device")

    def _native_stream(self):
        return 7 if self.capture else 0, None

    def _is_capturing(self, stream: int) -> bool:
        return self.capture

    def _order(self, before: int, after: int) -> None:
        pass

    def _zeros(self, n, dtype):
        array = exact_empty(n, dtype)
        array[:] = 0
        return array, array.ctypes.data

    def _empty(self, n, dtype):
        array = exact_empty(n, dtype)
        if self.delayed:  # memory that a stream still uses
            self.in_use.append(array)
        return array, array.ctypes.data

    def output(self, library, n):
        """Every other one begins at no multiple of 16 bytes, as a caller's `out` may."""
        array, _ = self._empty(n + self.host_op % 2, self.index_dtype)
        array = array[self.host_op % 2 :]
        return array, array.ctypes.data

    def _upload(self, array):
        copy = exact_copy(array)
        if self.delayed:
            self.in_use.append(copy)
        return DeviceArray(copy)

    def lend(self, array):
        copy = exact_copy(array)
        return copy, copy.ctypes.data

    def table(self, x, name):
        return super().table(DeviceArray(x) if isinstance(x, np.ndarray) else x, name)

    def _native_zeros(self, shape):
        array = exact_empty(shape, np.int32)
        array[:] = 0
        return array

    def _pinned_array(self, shape):
        return self._native_zeros(shape)

    def slot_refs(self, x):
        return x.ctypes.data

    def _mapped(self, n):
        self.mailbox, address = self._zeros(n, np.int64)
        return self.mailbox.data.cast("B").cast("Q"), address

    def vector(self, x, name):
        if not is_on_gpu(x) and not self.capturing:
            return device_vector(self._upload(host_array(x, name)), name, 0)
        return super().vector(x, name)

    def backup(self):
        return DeviceArray(super().backup())  # an array of the device's: a restore reads it when its turn comes

    def _launch(self, kernel: str, blocks: int, threads: int) -> None:
        self.launches.append(kernel)
        if self.capture:
            return
        self.queue_of_launches.append((kernel, blocks, threads, self._args.tobytes()))
        if not self.delayed:
            self.run_launches()

    def run_launches(self) -> None:
        while self.queue_of_launches:
            kernel, blocks, threads, args = self.queue_of_launches.popleft()
            self.seed += 1
            self._module.launch(kernel, blocks, threads, args, order=self.order, seed=self.seed)

    def poll(self) -> None:
        self.run_launches()

    def snapshot(self):
        self.run_launches()
        return self.free_ring.copy(), self.ref_count.copy(), self.words[:NUM_WORDS].copy()

    def words_array(self, library, word):
        return self.words[word : word + 1].reshape(())

    def from_host(self, library, array):
        return array


def variant(
    order: str, mode: str = "plain", delayed: bool = False, cluster: int = 8, small: bool = True, tiles: bool = True
) -> type[HostCudaBackend]:
    """The backend with another order of threads, or run otherwise.

    Not `small`: many blocks for small batches too; with neither clusters nor `tiles`, two launches.
    """
    name = f"HostCuda_{order}_{mode}{'_delayed' if delayed else ''}_{cluster}"
    if mode == "asan":
        cluster = min(cluster, 1)  # all that such a build can run
    limits = {} if small else {"small_decode": 0, "small_step": 0, "small_extend": 0, "tile_threads": (64, 64)}
    if not tiles:
        limits["tiles_extend"] = 0
    return type(
        name, (HostCudaBackend,), {"order": order, "mode": mode, "delayed": delayed, "cluster": cluster} | limits
    )
