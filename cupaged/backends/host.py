"""What the two backends on the host share: state in NumPy arrays, arguments as contiguous int64."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from cupaged.geometry import check_lengths
from cupaged.interop import host_table, host_vector, library_of
from cupaged.layout import MAIL_WORDS, NUM_WORDS, Kind

__all__ = ["HostBackend"]

_INT64, _INT32 = np.dtype(np.int64), np.dtype(np.int32)


class HostBackend:
    """State of one pool on the host. Every op has ended when its call returns, and its mail has come.

    Parameters
    ----------
    num_pages, page_size : int
        Pages 1 .. num_pages, of `page_size` slots each.
    index_dtype : numpy.dtype
        int32 or int64, of the slots handed out.
    max_batch : int
        Not needed here: nothing is sized by it.
    need_sort, strict, refused_slot
        As in `PagedTokenToKVPoolAllocator`.
    device_index, library
        Of a GPU; not used here.
    """

    name = ""
    synchronous = True

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
        device_index: int | None = None,
        library: str = "",
    ) -> None:
        self.capacity, self.page_size, self.index_dtype = num_pages, page_size, index_dtype
        self.need_sort, self.strict, self.refused_slot = need_sort, strict, refused_slot
        self.device = "cpu"
        self.library = library if library == "torch" else "numpy"
        self.free_ring = np.zeros(num_pages, np.int32)
        self.ref_count = np.zeros(num_pages + 1, np.int32)
        self.words = np.zeros(NUM_WORDS, np.int64)
        self.mailbox = np.zeros(MAIL_WORDS, np.int64)
        self.mail = self.mailbox.data.cast("B").cast("Q")
        self.freed: set[int] = set()
        self.kind = Kind.CLEAR
        self.host_op = self.error_ack = self.quiet = 0

    def use_library(self, *arrays: Any) -> str:
        """Library in which the result for these arguments leaves."""
        for array in arrays:
            library = library_of(array)
            if library == "numpy" or library == "torch":
                return library
        return self.library

    def vector(self, x: Any, name: str) -> np.ndarray:
        """The argument as the kernels take it."""
        if type(x) is np.ndarray and x.dtype is _INT64 and x.ndim == 1 and x.flags.carray:
            return x
        return host_vector(x, name)

    def check_lengths(self, prefix: np.ndarray | None, seq: np.ndarray, num_tokens: int | None) -> None:
        """Raise ``ValueError`` for lengths that no allocation can mean; a decode has neither `prefix` nor a sum."""
        check_lengths(prefix, seq, num_tokens)

    def table(self, x: Any, name: str) -> np.ndarray:
        """The request table as the kernels take it."""
        if type(x) is np.ndarray and x.dtype is _INT32 and x.ndim == 2 and x.flags.carray:
            return x
        return host_table(x, name)

    @staticmethod
    def constant(value: int) -> np.ndarray:
        """A vector of one entry."""
        return np.array([value], np.int64)

    @staticmethod
    def length(vector: np.ndarray) -> int:
        """Entries of a vector."""
        return vector.shape[0]

    def output(self, library: str, n: int) -> tuple[Any, np.ndarray]:
        """New array of n slots in that library, and the same memory as the kernels take it."""
        if library == "torch":
            torch = sys.modules["torch"]
            tensor = torch.empty(n, dtype=torch.int64 if self.index_dtype == np.int64 else torch.int32)
            return tensor, tensor.numpy()
        array = np.empty(n, self.index_dtype)
        return array, array

    @staticmethod
    def handed_out(slots: np.ndarray, n: int) -> np.ndarray:
        """An op's output as a vector."""
        return slots

    def given_output(self, out: Any, n: int) -> np.ndarray:
        """The caller's `out`, checked."""
        return self.given_array(out, "out", self.index_dtype, n)[0]

    def given_array(self, out: Any, name: str, dtype: np.dtype, n: int | None) -> tuple[np.ndarray, int]:
        """An array that the caller gave for a result, checked, and its length; None: any length."""
        on_cpu = getattr(getattr(out, "device", None), "type", "") == "cpu"
        array = out.numpy() if library_of(out) == "torch" and on_cpu else out
        if not isinstance(array, np.ndarray):
            raise TypeError(f"{name} must be a NumPy array or a torch tensor on the CPU, not {type(out).__name__}")
        if array.dtype != dtype:
            raise TypeError(f"{name} must be {dtype}, not {array.dtype}")
        if n is None:
            n = array.size
        if array.shape != (n,) or not array.flags.c_contiguous or not array.flags.writeable:
            raise ValueError(f"{name} must be contiguous, writeable and of shape ({n},), not shape {array.shape}")
        return array, n

    def new_array(self, library: str, shape: tuple[int, ...], dtype: np.dtype) -> tuple[Any, np.ndarray]:
        """New array in that library, and the same memory as the kernels take it."""
        array = np.empty(shape, dtype)
        return self.from_host(library, array), array

    def new_table(self, library: str, rows: int, columns: int) -> tuple[Any, np.ndarray]:
        """New int32 array of that shape in that library, and the same as the kernels take it."""
        return self.new_array(library, (rows, columns), np.dtype(np.int32))

    @staticmethod
    def shape(table: np.ndarray) -> tuple[int, int]:
        """Rows and columns of a table."""
        return table.shape[0], table.shape[1]

    @staticmethod
    def overlaps(vector: np.ndarray, out: np.ndarray, n: int, same_is_fine: bool = False) -> bool:
        """Whether an argument lies where the output goes; entry by entry in the same place may be fine."""
        if same_is_fine and vector.ctypes.data == out.ctypes.data and vector.dtype == out.dtype:
            return False
        return np.may_share_memory(vector, out)

    @staticmethod
    def table_overlaps(table: np.ndarray, out: np.ndarray, n: int) -> bool:
        """Whether a table lies where the output goes."""
        return np.may_share_memory(table, out)

    @staticmethod
    def tables_overlap(one: np.ndarray, other: np.ndarray) -> bool:
        """Whether two tables share memory."""
        return np.may_share_memory(one, other)

    @staticmethod
    def tables_equal(one: np.ndarray, other: np.ndarray) -> bool:
        """Whether two tables are the same cells in the same places."""
        return (one.ctypes.data, one.shape, one.strides) == (other.ctypes.data, other.shape, other.strides)

    def enter(self, library: str) -> bool:
        """Order this op behind the last one; True while the stream is being captured."""
        return False

    def poll(self) -> None:
        """Raise if the device has failed."""

    def leave(self) -> None:
        """End an op."""

    def queue_begin(self) -> None:
        """Start a group of frees."""

    def queue(self, vector: np.ndarray) -> np.ndarray:
        """A copy of a queued array, for the end of the group."""
        return vector.copy()

    def queued(self, vectors: list[np.ndarray]) -> np.ndarray:
        """The queued arrays as one vector."""
        return vectors[0] if len(vectors) == 1 else np.concatenate(vectors)

    def segment(self, vector: np.ndarray) -> np.ndarray:
        """Every page_size-th entry."""
        return np.ascontiguousarray(vector[:: self.page_size])

    def vectors(self, array: np.ndarray) -> tuple[np.ndarray, ...]:
        """Rows of an int64 array, each as a vector."""
        return tuple(np.ascontiguousarray(array))

    def zeros(self, shape: tuple[int, ...]) -> Any:
        """New int32 array in the library of results."""
        return self.from_host(self.library, np.zeros(shape, np.int32))

    def pinned(self, shape: tuple[int, ...]) -> Any:
        """New int32 array on the host that a device copies to."""
        return self.zeros(shape)

    @staticmethod
    def fill_zero(array: Any) -> None:
        """Set every element to 0."""
        array[:] = 0

    @staticmethod
    def rows_to_host(table: Any, rows: Any) -> np.ndarray:
        """Copy of some rows of a table."""
        return (table if isinstance(table, np.ndarray) else table.numpy())[rows]

    def slot_refs(self, x: Any) -> np.ndarray:
        """Counts a slot, as the kernels take them."""
        return x if isinstance(x, np.ndarray) else x.numpy()

    def words_array(self, library: str, word: int) -> Any:
        """View, of shape (), of one word of the pool."""
        view = self.words[word : word + 1].reshape(())
        return sys.modules["torch"].from_numpy(view) if library == "torch" else view

    def from_host(self, library: str, array: np.ndarray) -> Any:
        """A new array of that library with these elements."""
        return sys.modules["torch"].from_numpy(array) if library == "torch" else array

    def snapshot(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Ring, reference counts and words, as they are after the last op."""
        return self.free_ring.copy(), self.ref_count.copy(), self.words.copy()

    def warmup(self) -> None:
        """Compile everything."""

    def memory(self) -> int:
        """Bytes of state on the device."""
        arrays = (self.free_ring, self.ref_count, self.words, self.mailbox)
        return sum(a.nbytes for a in arrays)
