"""What the two GPU backends share: arguments and results of any array library, streams, the free group's queue."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np

from cupaged.errors import CaptureError
from cupaged.interop import (
    DeviceTable,
    DeviceVector,
    device_table,
    device_vector,
    host_array,
    is_on_gpu,
    library_of,
    tensor_vector,
    to_host,
)
from cupaged.layout import Kind

__all__ = ["GpuBackend"]


class GpuBackend:
    """Arguments, results and streams of a pool on a GPU; a subclass allocates and launches.

    Parameters
    ----------
    num_pages, page_size, index_dtype, need_sort, strict, refused_slot
        As in `HostBackend`.
    max_batch : int
        Requests in a batch that scratch is made for.
    device_index : int or None
        Which GPU; None for the current one.
    library : {"torch", ""}
        In which results of calls without arrays leave; the backend's own where empty.
    """

    name = ""
    native = ""
    synchronous = False

    free_ring: Any
    ref_count: Any
    words: Any
    mail: memoryview

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        index_dtype: np.dtype,
        max_batch: int,
        need_sort: bool,
        strict: bool,
        refused_slot: int,
        device_index: int | None,
        library: str = "",
    ) -> None:
        self.capacity, self.page_size, self.index_dtype = num_pages, page_size, index_dtype
        self.need_sort, self.strict, self.refused_slot = need_sort, strict, refused_slot
        self.max_batch = max_batch
        self.index = self._current_device() if device_index is None else device_index
        self.device = f"cuda:{self.index}"
        self.library = library or self.native
        self.kind = Kind.CLEAR
        self.host_op = self.error_ack = self.quiet = 0
        self.capturing = self.captured = False
        self._stream = 0
        self._stream_owner: Any = None
        self._last_stream = -1
        self._last_library = self.library
        self._return_to: int | None = None
        self._torch_stream: Any = None
        self._torch_like: Any = None  # what an op's output is made like
        self._queue_buffers: list[tuple[Any, int, int]] = []  # (array, address, entries); the last is in use
        self._queue_used = 0

    # ---- what a subclass has -----------------------------------------------------------------------------------

    def _current_device(self) -> int:
        raise NotImplementedError

    def _set_device(self, index: int) -> None:
        raise NotImplementedError

    def _empty(self, n: int, dtype: Any) -> tuple[Any, int]:
        """New array of the backend's own library, in the order of this op's stream, and its address."""
        raise NotImplementedError

    def _upload(self, array: np.ndarray) -> Any:
        """Copy a host array to the device in stream order, without a wait."""
        raise NotImplementedError

    def _native_stream(self) -> tuple[int, Any]:
        """Handle of the stream that is current in the backend's own library, and what keeps it alive."""
        raise NotImplementedError

    def _is_capturing(self, stream: int) -> bool:
        raise NotImplementedError

    def _order(self, before: int, after: int) -> None:
        """Make one stream wait for what is queued on another."""
        raise NotImplementedError

    def _native_zeros(self, shape: tuple[int, ...]) -> Any:
        """New int32 array of the backend's own library."""
        raise NotImplementedError

    def _pinned_array(self, shape: tuple[int, ...]) -> np.ndarray:
        """New int32 array of zeros in pinned memory."""
        raise NotImplementedError

    def _copy_entries(self, vector: Any, address: int) -> None:
        """Write a vector's entries as contiguous int64 to an address."""
        raise NotImplementedError

    # ---- streams -----------------------------------------------------------------------------------------------

    def enter(self, library: str) -> bool:
        """Order this op behind the last one; True while the stream is being captured.

        The stream is the one that is current in the library of the arguments, or, for a call without any, of the
        last arguments seen.
        """
        current = self._current_device()
        if current != self.index:
            self._return_to = current
            self._set_device(self.index)
        if library:
            self._last_library = library
        else:
            library = self._last_library
        self._stream = stream = self._current_stream(library)
        self.capturing = stream != 0 and self._is_capturing(stream)
        if self.capturing:
            self.captured = True
        elif stream != self._last_stream:
            if self._last_stream >= 0:
                self._order(self._last_stream, stream)
            self._last_stream = stream
            # A stream that its library has dropped must not be waited for: this keeps it.
            self._stream_owner = self._owner_of_stream(library)
        return self.capturing

    def leave(self) -> None:
        """Give the caller back the device that was current."""
        if self._return_to is not None:
            self._set_device(self._return_to)
            self._return_to = None

    def _current_stream(self, library: str) -> int:
        if library != "torch":
            return self._native_stream()[0]
        if self._torch_stream is None:
            self._torch_stream = sys.modules["torch"]._C._cuda_getCurrentRawStream
        return self._torch_stream(self.index)

    def _owner_of_stream(self, library: str) -> Any:
        if library == "torch":
            return sys.modules["torch"].cuda.current_stream(self.index)
        return self._native_stream()[1]

    # ---- arguments and results ---------------------------------------------------------------------------------

    def use_library(self, *arrays: Any) -> str:
        """Library in which the result for these arguments leaves."""
        for x in arrays:
            library = library_of(x)
            if library == "torch" or library == self.native:
                return library
        return self.native

    def vector(self, x: Any, name: str) -> DeviceVector:
        """The argument as the kernels take it; a host array is copied to the device."""
        found = tensor_vector(x, name, self.index)
        if found is not None:
            return found
        if is_on_gpu(x):
            return device_vector(x, name, self.index)
        array = host_array(x, name)
        if self.capturing:
            raise CaptureError(f"{name} is on the host; a captured op needs arrays on {self.device}")
        return device_vector(self._upload(np.ascontiguousarray(array)), name, self.index)

    def table(self, x: Any, name: str) -> DeviceTable:
        """The request table as the kernels take it."""
        return device_table(x, name, self.index)

    @staticmethod
    def constant(value: int) -> DeviceVector:
        """A vector of one entry."""
        return 0, value, 1, 1, None

    @staticmethod
    def length(vector: DeviceVector) -> int:
        """Entries of a vector."""
        return vector[3]

    def output(self, library: str, n: int) -> tuple[Any, int]:
        """New array of n slots in that library, and its address."""
        if library != "torch":
            return self._empty(n, self.index_dtype)
        torch = sys.modules["torch"]
        if self._torch_like is None:
            dtype = torch.int64 if self.index_dtype.itemsize == 8 else torch.int32
            self._torch_like = torch.empty(0, dtype=dtype, device=self.device)
        tensor = self._torch_like.new_empty(n)
        return tensor, tensor.data_ptr()

    def handed_out(self, slots: int, n: int) -> DeviceVector:
        """An op's output as a vector."""
        size = self.index_dtype.itemsize
        return slots, size, size // 8, n, None

    def given_output(self, out: Any, n: int) -> int:
        """Address of the caller's `out`, checked."""
        return self.given_array(out, "out", self.index_dtype, n)[0]

    def given_array(self, out: Any, name: str, dtype: np.dtype, n: int | None) -> tuple[int, int]:
        """Address and length of an array that the caller gave for a result, checked; None: any length."""
        if not is_on_gpu(out):
            raise ValueError(f"{name} must be on {self.device}")
        address, stride, wide, length, _ = device_vector(out, name, self.index)
        if library_of(out) not in ("torch", "cupy") and out.__cuda_array_interface__["data"][1]:
            raise ValueError(f"{name} is read-only, but it is written in place")
        if wide != (dtype.itemsize == 8):
            raise TypeError(f"{name} must be {dtype}, not {'int64' if wide else 'int32'}")
        if n is None:
            n = length
        if length != n or (stride != dtype.itemsize and n > 1):
            raise ValueError(f"{name} must be contiguous and of shape ({n},), not ({length},), stride {stride} bytes")
        return address, length

    def new_array(self, library: str, shape: tuple[int, ...], dtype: np.dtype) -> tuple[Any, int]:
        """New array in that library, and its address."""
        if library == "torch":
            torch = sys.modules["torch"]
            kind = torch.int64 if dtype.itemsize == 8 else torch.int32
            tensor = torch.empty(shape, dtype=kind, device=self.device)
            return tensor, tensor.data_ptr()
        array, address = self._empty(math.prod(shape), dtype)
        return array if len(shape) == 1 else array.reshape(shape), address

    def new_table(self, library: str, rows: int, columns: int) -> tuple[Any, DeviceTable]:
        """New int32 array of that shape in that library, and the same as the kernels take it."""
        array, address = self.new_array(library, (rows, columns), np.dtype(np.int32))
        return array, (address, columns, rows, columns, None)

    @staticmethod
    def shape(table: DeviceTable) -> tuple[int, int]:
        """Rows and columns of a table."""
        return table[2], table[3]

    def overlaps(self, vector: DeviceVector, out: int, n: int, same_is_fine: bool = False) -> bool:
        """Whether an argument lies where the output goes; entry by entry in the same place may be fine."""
        address, stride, wide, length, _ = vector
        if not length or not n or (same_is_fine and (address, stride) == (out, self.index_dtype.itemsize)):
            return False
        far = address + stride * (length - 1)
        return min(address, far) < out + n * self.index_dtype.itemsize and out < max(address, far) + 4 + 4 * wide

    def table_overlaps(self, table: DeviceTable, out: int, n: int) -> bool:
        """Whether a table lies where the output goes."""
        begin, end = _span(table)
        return begin < out + n * self.index_dtype.itemsize and out < end

    @staticmethod
    def tables_overlap(one: DeviceTable, other: DeviceTable) -> bool:
        """Whether two tables share memory."""
        (begin, end), (other_begin, other_end) = _span(one), _span(other)
        return begin < other_end and other_begin < end

    @staticmethod
    def tables_equal(one: DeviceTable, other: DeviceTable) -> bool:
        """Whether two tables are the same cells in the same places."""
        return one[:4] == other[:4]

    def segment(self, vector: DeviceVector) -> DeviceVector:
        """Every page_size-th entry."""
        address, stride, wide, n, owner = vector
        return address, stride * self.page_size, wide, -(-n // self.page_size), owner

    def vectors(self, array: np.ndarray) -> tuple[DeviceVector, ...]:
        """Rows of an int64 array on the host, each as a vector: one copy to the device for all."""
        if self.capturing:
            raise CaptureError(f"lengths on the host cannot be captured; a captured op needs arrays on {self.device}")
        count, n = array.shape
        address, _, _, _, owner = device_vector(self._upload(array.reshape(-1)), "vectors", self.index)
        return tuple([(address + 8 * n * i, 8, 1, n, owner) for i in range(count)])

    def zeros(self, shape: tuple[int, ...]) -> Any:
        """New int32 array in the library of results."""
        if self.library == "torch":
            torch = sys.modules["torch"]
            return torch.zeros(shape, dtype=torch.int32, device=self.device)
        return self._native_zeros(shape)

    def pinned(self, shape: tuple[int, ...]) -> Any:
        """New int32 array of zeros on the host, pinned: torch's, or NumPy's."""
        if self.library == "torch":
            torch = sys.modules["torch"]
            return torch.zeros(shape, dtype=torch.int32, pin_memory=True)
        return self._pinned_array(shape)

    def fill_zero(self, array: Any) -> None:
        """Set every element to 0, in stream order."""
        array[:] = 0

    def rows_to_host(self, table: Any, rows: Any) -> np.ndarray:
        """Copy of some rows of a table on the host; waits."""
        return to_host(table[rows])

    def slot_refs(self, x: Any) -> Any:
        """Counts a slot, as the kernels take them."""
        return device_vector(x, "token_slot_refs", self.index)[0]

    # ---- the queue of a free group -----------------------------------------------------------------------------

    def queue_begin(self) -> None:
        """Start a group: its copies come from the beginning of the buffer."""
        self._queue_used = 0

    def queue(self, vector: Any) -> DeviceVector:
        """Copy an array into the group's buffer, which grows until something was captured."""
        n = self.length(vector)
        if not self._queue_buffers or self._queue_used + n > self._queue_buffers[-1][2]:
            self._grow_queue(n)
        array, address, _ = self._queue_buffers[-1]
        address += 8 * self._queue_used
        self._queue_used += n
        self._copy_entries(vector, address)
        return address, 8, 1, n, array

    def _grow_queue(self, n: int) -> None:
        if self.capturing:
            raise CaptureError("the queue of this free group would have to grow, which a stream capture forbids")
        size = max(8192, 2 * (self._queue_used + n))
        if not self.captured:
            self._queue_buffers.clear()  # what was queued keeps its own buffer alive
        self._queue_buffers.append((*self._empty(size, np.int64), size))
        self._queue_used = 0

    def queued(self, vectors: list[DeviceVector]) -> DeviceVector:
        """The queued arrays as one vector: no copy, unless the buffer grew or other arrays lie between."""
        address, _, _, _, owner = vectors[0]
        total = sum(v[3] for v in vectors)
        end = address
        for v in vectors:
            if v[0] != end:
                break
            end += 8 * v[3]
        else:
            return address, 8, 1, total, owner
        array, address = self._empty(total, np.int64)
        end = address
        for v in vectors:
            self._copy_entries(v, end)
            end += 8 * v[3]
        return address, 8, 1, total, array


def _span(table: DeviceTable) -> tuple[int, int]:
    """First address of a table, and the one behind its last."""
    address, stride, rows, columns, _ = table
    if not rows or not columns:
        return address, address
    last = address + 4 * stride * (rows - 1)
    return min(address, last), max(address, last) + 4 * columns
