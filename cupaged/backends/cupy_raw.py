"""CUDA C through CuPy: the default wherever CuPy sees a GPU.

All kernels take one struct by value. `CudaBackend` fills it and decides which kernels an op launches; `CupyBackend`
adds memory, streams and the launch itself.
"""

from __future__ import annotations

import ctypes
import functools
import re
import struct
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from typing import Any

import numpy as np

from cupaged.backends.gpu import GpuBackend
from cupaged.errors import CaptureError
from cupaged.interop import DeviceTable, DeviceVector
from cupaged.layout import MAIL_WORDS, NUM_WORDS, STATE_WORDS, Where

__all__ = ["ARGS", "KERNELS", "CudaBackend", "CupyBackend", "probe", "source"]

KERNELS = (
    "decode_small",
    "decode_step_small",
    "extend_small",
    "extend_step_small",
    "extend_tiles",
    "extend_tiles_many",
    "plan_requests",
    "write_slots",
    "write_step",
    "alloc_pages_small",
    "plan_pages",
    "write_pages",
    "mark_slots",
    "settle_slots",
    "free_slots_small",
    "free_page_ids",
    "free_rows",
    "retain_page_ids",
    "sort_free",
    "clear_pool",
    "backup_pool",
    "restore_pool",
    "refresh_pool",
    "queue_entries",
    "handoff_pages",
    "handoff_block_table",
    "handoff_slots",
    "reference_counts",
    "fold_digest",
)
CLUSTER_KERNELS = ("decode_cluster", "decode_step_cluster")  # for GPUs that have clusters of blocks
# Compiled side by side, since NVRTC takes as long for each kernel as if it were alone.
_UNITS = (("decode.cu",), ("extend.cu",), ("write.cu",), ("free.cu",), ("state.cu", "handoff.cu", "digest.cu"))
_HEADERS = ("common.cuh", "alloc.cuh")
PLAN_THREADS = 1024
MOST_BLOCKS = 8  # of a cluster
TILE = 256
CLUSTER_SHARE = 8 * PLAN_THREADS  # requests of a decode that a block of a cluster can have
WRITE_TILE = 1024  # tokens that a block of TILE threads writes; up to eight times as many where there are
MULTIPROCESSORS = 132  # of an H200; each has room for PLAN_THREADS threads of an extend
WRITE_BLOCKS = 2 * MULTIPROCESSORS  # blocks enough
STAGING = 1 << 20  # bytes of pinned memory that host arguments go through
WIDE_SUM = 1 << 30  # requests times tokens, at most, of an extend that sums in 32 bits
SMALL_PAGES = 16384  # slots of whole pages that one block takes and writes
SMALL_FREE = 16384  # slots that one block marks and settles in a single launch

_VEC = np.dtype([("data", "u8"), ("stride", "i8"), ("wide", "i4"), ("unused", "i4")])
_POOL_FIELDS = [
    *((name, "u8") for name in ("free_ring", "ref_count", "first_index", "touched", "touched_groups")),
    *((name, "u8") for name in ("freed", "freed_groups", "words", "mailbox", "plan_tokens", "plan_pages")),
    ("refused_slot", "i8"),
    ("slot_magic", "u8"),
    *((name, "i4") for name in ("capacity", "page_size", "page_shift")),
    ("length_magic", "u4"),
    *((name, "i4") for name in ("magic_shift", "unused", "wide_out", "strict", "need_sort")),
]
# The C struct's fields in its order; the tests compare every offset.
ARGS = np.dtype(
    [
        *_POOL_FIELDS,
        ("host_op", "i8"),
        ("error_ack", "i8"),
        ("prefix", _VEC),
        ("seq", _VEC),
        ("last", _VEC),
        ("out", "u8"),
        ("num_tokens", "i8"),
        ("n", "i8"),
        ("kind", "i4"),
        ("quiet", "i4"),
        ("where", "i4"),
        ("push", "i4"),
        ("table", "u8"),
        ("table_stride", "i8"),
        ("table_rows", "i8"),
        ("table_cols", "i8"),
        ("pad_row", "i8"),
        ("rows", _VEC),
        ("slot_refs", "u8"),
        ("table_pages", "i4"),
        ("page_parts", "i4"),
        ("out_stride", "i8"),
        ("indptr", "u8"),
        ("last_page_lens", "u8"),
    ],
    align=True,
)
_OP_OFFSET = ARGS.fields["host_op"][1]  # type: ignore[index]
_TABLE_OFFSET = ARGS.fields["table"][1]  # type: ignore[index]
_HANDOFF_OFFSET = ARGS.fields["page_parts"][1]  # type: ignore[index]
_TABLE = struct.Struct("<QqqqqQqi4xQi4x")
_PACK_TABLE = _TABLE.pack_into
_PACK_NO_TABLE = struct.Struct(f"<{_TABLE.size}x").pack_into
_PACK_HANDOFF = struct.Struct("<iqQQ").pack_into
_PACK_OP = struct.Struct("<qq Qqi4x Qqi4x Qqi4x Q qq iiii".replace(" ", "")).pack_into
_NO_VECTOR: DeviceVector = (0, 0, 0, 0, None)


@functools.cache
def source(unit: tuple[str, ...] = sum(_UNITS, ())) -> str:
    """Kernels as one translation unit, all of them by default.

    No include paths at run time, and CuPy's disk cache sees every change.
    """
    try:
        files = resources.files("cupaged.kernels_cu")
    except ModuleNotFoundError:  # run from a checkout that is not installed
        files = resources.files("cupaged").joinpath("..", "kernels_cu")
    parts = []
    for name in (*_HEADERS, *unit):
        text = files.joinpath(name).read_text().replace("#pragma once", "")
        parts += [f'#line 1 "{name}"', re.sub(r'#include "\w+\.cuh"', "", text)]
    return "\n".join(parts)


def probe() -> tuple[bool, str, str]:
    """Whether CuPy is here and sees a GPU; if not, why, and what to install."""
    try:
        import cupy
    except ImportError:
        return False, "CuPy is not installed", 'pip install "cupaged[cuda13]" (or cuda12, to match your driver)'
    except Exception as error:  # a broken installation: the loader's own words say what is missing
        return False, f"CuPy does not load ({_first_line(error)})", "reinstall the cupy-cuda wheel for your driver"
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return False, f"CuPy sees no GPU ({_first_line(error)})", "needs an NVIDIA GPU and its driver"
    if count == 0:
        return False, "CuPy sees no GPU", "needs an NVIDIA GPU and its driver"
    return True, "", ""


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


class CudaBackend(GpuBackend):
    """Which kernels an op launches, with which arguments, over memory that a subclass gives."""

    name = "cupy"
    cluster = 0  # blocks of a cluster; 0: this GPU has none
    # What one block does in a single launch; more is for a cluster, or for a plan and a launch that writes.
    small_decode = PLAN_THREADS  # requests
    small_step = 512  # requests of a decode step, where there are clusters
    small_extend = 256  # tokens
    tiles_extend = 4 * PLAN_THREADS  # requests that each block of one launch plans for itself
    tile_threads = TILE // 2 + 32, TILE + 32  # of such a block, at least: for few tokens, and for many
    small_extend_step = 4096

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        n = self.capacity
        groups = (n >> 15) + 1
        self._args = np.zeros(1, ARGS)
        self._buffer = self._args.data.cast("B")
        self.free_ring = self._own("free_ring", n, np.int32)
        self.ref_count = self._own("ref_count", n + 1, np.int32)
        self._own("first_index", n + 1, np.int32)
        self._own("touched", groups * 1024, np.uint32)
        self._own("touched_groups", groups, np.uint32)
        self._own("freed", groups * 1024, np.uint32)
        self._own("freed_groups", groups, np.uint32)
        self.words = self._own("words", STATE_WORDS, np.int64)
        self.mail, self._args["mailbox"] = self._mapped(MAIL_WORDS)
        self._at_once = 16 // self.index_dtype.itemsize  # slots that a thread stores at once
        self._scratch: list[tuple[Any, int]] = []
        self._make_scratch(self.max_batch)
        constants = {
            "refused_slot": self.refused_slot,
            "capacity": n,
            "page_size": self.page_size,
            "wide_out": self.index_dtype.itemsize == 8,
            "strict": self.strict,
            "need_sort": self.need_sort,
        }
        for field, value in (constants | _divisor(self.page_size)).items():
            self._args[field] = value

    # ---- what a subclass has -----------------------------------------------------------------------------------

    def _zeros(self, n: int, dtype: Any) -> tuple[Any, int]:
        raise NotImplementedError

    def _mapped(self, n: int) -> tuple[memoryview, int]:
        """Pinned host memory of n int64 words that the device writes: the host's view and the device's address."""
        raise NotImplementedError

    def _launch(self, kernel: str, blocks: int, threads: int) -> None:
        raise NotImplementedError

    # ---- arguments ---------------------------------------------------------------------------------------------

    def _own(self, field: str, n: int, dtype: Any) -> Any:
        array, self._args[field] = self._zeros(n, dtype)
        self._keep = (*getattr(self, "_keep", ()), array)
        return array

    def _make_scratch(self, batch: int) -> None:
        if self.captured:
            raise CaptureError(
                f"a batch of {batch} is larger than max_batch, {self.max_batch}, and scratch cannot grow after a "
                "capture; make the allocator with a larger max_batch"
            )
        self.max_batch = max(batch, 2 * self.max_batch if self._scratch else 0)
        # What is replaced stays: a launch on another stream may still read it.
        self._scratch += [self._empty(self.max_batch + 1, np.int32) for _ in range(2)]
        self._args["plan_tokens"], self._args["plan_pages"] = (address for _, address in self._scratch[-2:])

    def _pack(
        self,
        *,
        prefix: DeviceVector = _NO_VECTOR,
        seq: DeviceVector = _NO_VECTOR,
        last: DeviceVector = _NO_VECTOR,
        out: int = 0,
        num_tokens: int = 0,
        n: int = 0,
        where: int = 0,
        push: int = 1,
    ) -> None:
        _PACK_OP(
            self._buffer,
            _OP_OFFSET,
            self.host_op,
            self.error_ack,
            prefix[0],
            prefix[1],
            prefix[2],
            seq[0],
            seq[1],
            seq[2],
            last[0],
            last[1],
            last[2],
            out,
            num_tokens,
            n,
            self.kind,
            self.quiet,
            where,
            push,
        )

    def _pack_table(
        self, table: DeviceTable, paged: bool, pad_row: int, rows: DeviceVector, slot_refs: int = 0
    ) -> None:
        _PACK_TABLE(
            self._buffer,
            _TABLE_OFFSET,
            table[0],
            table[1],
            table[2],
            table[3],
            pad_row,
            rows[0],
            rows[1],
            rows[2],
            slot_refs,
            paged,
        )

    def _no_table(self) -> None:
        _PACK_NO_TABLE(self._buffer, _TABLE_OFFSET)

    # ---- operations --------------------------------------------------------------------------------------------

    def alloc_pages(self, pages: int, out: int) -> None:
        slots = pages * self.page_size
        self._pack(out=out, num_tokens=slots, n=pages)
        if slots <= SMALL_PAGES:
            self._launch("alloc_pages_small", 1, _threads(-(-slots // 4)))
            return
        self._launch("plan_pages", 1, 32)
        self._launch("write_pages", -(-slots // TILE), TILE)

    def alloc_extend(self, prefix, seq, last, num_tokens: int, out: int) -> None:
        n = seq[3]
        self._pack(prefix=prefix, seq=seq, last=last, out=out, num_tokens=num_tokens, n=n)
        self._extend(n, num_tokens)

    def alloc_decode(self, seq, last, out: int) -> None:
        n = seq[3]
        self._pack(seq=seq, last=last, out=out, num_tokens=n, n=n)
        if n == 0:
            self._extend(n, n)
        elif n <= self.small_decode:
            self._launch("decode_small", 1, _threads(n + 32))
        elif n <= self.cluster * CLUSTER_SHARE:
            self._launch("decode_cluster", self.cluster, _threads(-(-n // self.cluster) + 32))
        else:
            self._plan_and_write(n, n)

    def step(self, table, paged: bool, pad_row: int, rows, prefix, seq, num_tokens: int, out: int) -> None:
        n = rows[3]
        self._pack(prefix=prefix or _NO_VECTOR, seq=seq, out=out, num_tokens=num_tokens, n=n)
        self._pack_table(table, paged, pad_row, rows)
        try:
            if prefix is None and 0 < n <= (self.small_step if self.cluster else PLAN_THREADS):
                self._launch("decode_step_small", 1, _threads(n + 32))
            elif prefix is None and 0 < n <= self.cluster * CLUSTER_SHARE:
                self._launch("decode_step_cluster", self.cluster, _threads(-(-n // self.cluster) + 32))
            elif prefix is not None and 0 < n <= PLAN_THREADS and num_tokens <= self.small_extend_step:
                self._launch("extend_step_small", 1, _threads(max(n, num_tokens)))
            else:
                self._plan_and_write(n, num_tokens)
        finally:
            self._no_table()

    def _extend(self, n: int, num_tokens: int) -> None:
        if 0 < n <= PLAN_THREADS and num_tokens <= self.small_extend:
            self._launch("extend_small", 1, _threads(max(n, -(-num_tokens // self._at_once)) + 32))
        elif 0 < n <= self.tiles_extend and n * num_tokens < WIDE_SUM:
            rows = -(-num_tokens // (32 * self._at_once))  # that a warp writes at once
            threads = max(self.tile_threads[rows > 4 * MULTIPROCESSORS], _threads(n))
            writers = threads // 32 - 1
            each = -(-rows // (writers * MULTIPROCESSORS * (PLAN_THREADS // threads)))
            blocks = -(-rows // (writers * each)) if rows else 1
            self._launch("extend_tiles" if n <= PLAN_THREADS else "extend_tiles_many", blocks, threads)
        else:
            self._plan(n)
            if num_tokens:
                tiles = -(-num_tokens // WRITE_TILE)
                self._launch("write_slots", min(tiles, max(WRITE_BLOCKS, tiles // 8)), TILE)

    def _plan(self, n: int) -> None:
        if n > self.max_batch:
            self._make_scratch(n)
        threads = PLAN_THREADS if n > PLAN_THREADS else _threads(n)
        self._launch("plan_requests", max(1, -(-n // PLAN_THREADS)), threads)

    def _plan_and_write(self, n: int, num_tokens: int) -> None:
        self._plan(n)
        if num_tokens:
            self._launch("write_step", -(-num_tokens // TILE), TILE)

    def free_slots(self, slots, push: bool, index_base: int, where: Where) -> None:
        n = slots[3]
        self._pack(seq=slots, num_tokens=index_base, n=n, where=where, push=push)
        if n <= SMALL_FREE:
            self._launch("free_slots_small", 1, 1024)
        else:
            self._launch("mark_slots", -(-n // TILE), TILE)
            self._launch("settle_slots", 1, 1024)

    def free_pages(self, entries, divisor: int, where: Where) -> None:
        n = entries[3]
        self._pack(seq=entries, num_tokens=divisor, n=n, where=where)
        self._launch("free_page_ids", 1, _threads(n))

    def free_rows(self, table, paged: bool, pad_row: int, rows, keep, seq, where: Where) -> None:
        self._free_rows(table, paged, pad_row, rows, where, prefix=keep or _NO_VECTOR, seq=seq)

    def free_queue(self, table, rows, begins, ends, entries, where: Where, slot_refs: int) -> None:
        self._free_rows(table, True, -1, rows, where, slot_refs, prefix=begins, last=ends, seq=entries or _NO_VECTOR)

    def _free_rows(self, table, paged, pad_row, rows, where, slot_refs: int = 0, **vectors) -> None:
        n = rows[3]
        if n > self.max_batch:
            self._make_scratch(n)
        self._pack(n=n, where=where, **vectors)
        self._pack_table(table, paged, pad_row, rows, slot_refs)
        try:
            self._launch("free_rows", 1, PLAN_THREADS)
        finally:
            self._no_table()

    def retain_pages(self, entries) -> None:
        n = entries[3]
        self._pack(seq=entries, num_tokens=1, n=n)
        self._launch("retain_page_ids", 1, _threads(n))

    def sort_free(self, bound: int) -> None:
        self._pack(num_tokens=bound)
        self._launch("sort_free", 1, 1024)

    def clear(self, num_pages: int) -> None:
        self._pack(n=num_pages)
        self._launch("clear_pool", self._state_blocks(), TILE)

    def backup(self) -> Any:
        array, address = self._empty(2 * self.capacity + 6, np.int32)
        self._pack(out=address)
        self._launch("backup_pool", self._state_blocks(), TILE)
        return array

    def restore(self, saved: Any) -> None:
        vector = self.vector(saved, "state")
        self._pack(seq=vector)
        self._launch("restore_pool", self._state_blocks(), TILE)

    def refresh(self) -> None:
        self._pack()
        self._launch("refresh_pool", 1, 32)

    def flashinfer_tables(
        self, table, paged: bool, pad_row: int, rows, seq, indptr: int, indices: int, length: int, last: int
    ) -> None:
        self._pack(seq=seq, out=indices, num_tokens=length, n=rows[3])
        blocks, threads = _ragged_grid(rows[3], length)
        self._hand_off("handoff_pages", blocks, threads, table, paged, pad_row, rows, indptr=indptr, last=last)

    def block_table(self, table, paged: bool, pad_row: int, rows, seq, parts: int, out: DeviceTable) -> None:
        address, stride, n, width, _ = out
        self._pack(seq=seq, out=address, num_tokens=width, n=n)
        if n * width:
            blocks = -(-n * width // TILE)
            self._hand_off("handoff_block_table", blocks, TILE, table, paged, pad_row, rows, parts, stride)

    def slot_mapping(self, table, paged: bool, pad_row: int, rows, prefix, seq, num_tokens: int, out: int) -> None:
        self._pack(prefix=prefix, seq=seq, out=out, num_tokens=num_tokens, n=rows[3])
        if num_tokens:
            blocks, threads = _ragged_grid(rows[3], num_tokens)
            self._hand_off("handoff_slots", blocks, threads, table, paged, pad_row, rows)

    def _hand_off(
        self, kernel, blocks, threads, table, paged, pad_row, rows, parts=1, out_stride=0, indptr=0, last=0
    ) -> None:
        self._pack_table(table, paged, pad_row, rows)
        _PACK_HANDOFF(self._buffer, _HANDOFF_OFFSET, parts, out_stride, indptr, last)
        try:
            self._launch(kernel, blocks, threads)
        finally:
            self._no_table()

    def reference_counts(self, entries: DeviceVector, out: int) -> None:
        n = entries[3]
        self._pack(seq=entries, out=out, n=n)
        if n:
            self._launch("reference_counts", -(-n // TILE), TILE)

    def fold(self, entries: DeviceVector, where: Where, cells: int) -> None:
        n = entries[3]
        self._pack(seq=entries, out=cells, n=n, where=where)
        self._launch("fold_digest", 1, _threads(max(n, 256)))  # how many pages came back the host does not know

    def _copy_entries(self, vector: DeviceVector, address: int) -> None:
        n = vector[3]
        self._pack(seq=vector, out=address, n=n)
        self._launch("queue_entries", -(-n // TILE), TILE)

    def _state_blocks(self) -> int:
        return min(1024, self.capacity // TILE + 1)

    def warmup(self) -> None:
        """Nothing is left to do: every kernel was compiled and loaded when the backend was made."""


def _threads(n: int) -> int:
    """Threads of one block for n: where 32 more are asked for, a warp that has only the words to look after."""
    return min(PLAN_THREADS, max(32, -(-n // 32) * 32))


def _ragged_grid(n: int, entries: int) -> tuple[int, int]:
    """Blocks and threads: each block looks at every request, so many requests get few blocks."""
    most = 2048 if n <= PLAN_THREADS else 264
    return max(1, min(most, -(-entries // PLAN_THREADS))), TILE if n <= TILE else PLAN_THREADS


def _divisor(n: int) -> dict[str, int]:
    """How the kernels divide by n: a shift, or the multiplication that common.cuh describes."""
    bits = n.bit_length()
    if n & (n - 1) == 0:
        return {"page_shift": bits - 1}
    magic = {"slot_magic": (1 << (63 + bits)) // n + 1, "length_magic": (1 << (31 + bits)) // n + 1}
    return {"page_shift": -1, "magic_shift": bits - 1, **magic}


class CupyBackend(CudaBackend):
    """The kernels, compiled by NVRTC and launched by CuPy."""

    native = "cupy"

    def __init__(self, **options: Any) -> None:
        import cupy

        self._cupy = cupy
        self._runtime = cupy.cuda.runtime
        self._get_device = cupy.cuda.runtime.getDevice
        self._capture_status = cupy.cuda.runtime.streamIsCapturing
        self._stream_pointer = cupy.cuda.stream.get_current_stream
        index = options["device_index"]
        count = cupy.cuda.runtime.getDeviceCount()
        if index is not None and index >= count:
            raise ValueError(f"device cuda:{index} does not exist; this machine has {count} GPU(s)")
        with cupy.cuda.Device(index):
            device = cupy.cuda.Device()
            self.cluster = MOST_BLOCKS if int(device.compute_capability) >= 90 else 0
            self._functions = _functions(device.id, self.cluster > 0)
            self._streams: dict[int, Any] = {}
            self._event = cupy.cuda.Event(disable_timing=True)
            self._stagings: list[tuple[Any, list[Any]]] = []
            self._staging_half = self._staging_used = 0
            self._make_staging()
            super().__init__(**options)
            self._driver_launch = cupy.cuda.driver.launchKernel
            self._parameters = np.array([self._args.ctypes.data], np.uintp)  # the one argument's address
            self._parameters_address = self._parameters.ctypes.data
            cupy.cuda.runtime.deviceSynchronize()  # zeros were queued on whatever stream is current

    # ---- device, streams ---------------------------------------------------------------------------------------

    def _current_device(self) -> int:
        return self._get_device()

    def _set_device(self, index: int) -> None:
        self._runtime.setDevice(index)

    def _native_stream(self) -> tuple[int, Any]:
        stream = self._stream_pointer()
        return stream.ptr, stream

    def _is_capturing(self, stream: int) -> bool:
        return self._capture_status(stream)

    def _order(self, before: int, after: int) -> None:
        self._runtime.eventRecord(self._event.ptr, before)
        self._runtime.streamWaitEvent(after, self._event.ptr)

    def _stream_object(self) -> Any:
        """CuPy's object for this op's stream: launches and memory need one."""
        stream = self._streams.get(self._stream)
        if stream is None:
            if len(self._streams) > 64:
                self._streams.clear()
            stream = self._streams[self._stream] = _stream_of(self._cupy, self._stream)
        return stream

    def poll(self) -> None:
        """Raise if the device has failed: a query of the stream reports it."""
        try:
            self._runtime.streamQuery(self._stream)
        except self._runtime.CUDARuntimeError as error:
            if "NotReady" not in str(error):
                raise

    # ---- memory ------------------------------------------------------------------------------------------------

    def _zeros(self, n: int, dtype: Any) -> tuple[Any, int]:
        array = self._cupy.zeros(n, dtype)
        return array, array.data.ptr

    def _empty(self, n: int, dtype: Any) -> tuple[Any, int]:
        if self._stream == self._native_stream()[0]:
            array = self._cupy.empty(n, dtype)
        else:
            with self._stream_object():
                array = self._cupy.empty(n, dtype)
        return array, array.data.ptr

    def _upload(self, array: np.ndarray) -> Any:
        if array.nbytes > STAGING // 4:
            with self._stream_object():
                return self._cupy.array(array)
        copy, address = self._empty(array.size, array.dtype)
        if array.nbytes:
            source = self._staged(array.reshape(-1))
            self._runtime.memcpyAsync(address, source, array.nbytes, 1, self._stream)
        return copy if array.ndim == 1 else copy.reshape(array.shape)

    def _staged(self, array: np.ndarray) -> int:
        """Address of a copy of a host array in pinned memory, which is used in halves, one after the other."""
        half = STAGING // 2
        if self._staging_used + array.nbytes > half:
            self._runtime.eventRecord(self._staging_events[self._staging_half].ptr, self._stream)
            self._staging_half ^= 1
            self._staging_used = 0
            if not self._staging_events[self._staging_half].done:  # a copy out of it may still be queued
                self._make_staging()
        begin = self._staging_half * half + self._staging_used
        self._staging_view[begin : begin + array.nbytes] = array.view(np.uint8)
        self._staging_used += -(-array.nbytes // 16) * 16
        return self._staging.ptr + begin

    def _make_staging(self) -> None:
        """New pinned memory; what it replaces stays for as long as copies out of it may be queued."""
        self._stagings = [(old, events) for old, events in self._stagings if not all(e.done for e in events)]
        events = [self._cupy.cuda.Event(disable_timing=True) for _ in range(2)]
        self._staging = self._cupy.cuda.PinnedMemory(STAGING, self._runtime.hostAllocPortable)
        self._stagings.append((self._staging, events))
        raw: Any = (ctypes.c_ubyte * STAGING).from_address(self._staging.ptr)
        self._staging_view = np.frombuffer(raw, np.uint8)
        self._staging_events = events
        self._staging_half = self._staging_used = 0

    def _mapped(self, n: int) -> tuple[memoryview, int]:
        flags = self._runtime.hostAllocMapped | self._runtime.hostAllocPortable
        self._pinned = self._cupy.cuda.PinnedMemory(8 * n, flags)
        words = (ctypes.c_longlong * n).from_address(self._pinned.ptr)
        ctypes.memset(self._pinned.ptr, 0, 8 * n)
        return memoryview(words).cast("B").cast("Q"), self._pinned.ptr

    def _native_zeros(self, shape: tuple[int, ...]) -> Any:
        return self._cupy.zeros(shape, np.int32)

    def _pinned_array(self, shape: tuple[int, ...]) -> np.ndarray:
        import cupyx

        return cupyx.zeros_pinned(shape, np.int32)

    def from_host(self, library: str, array: np.ndarray) -> Any:
        """A new array of that library with these elements."""
        copy = self._upload(array)
        return _torch_view(copy) if library == "torch" else copy

    def words_array(self, library: str, word: int) -> Any:
        """View, of shape (), of one word of the pool."""
        view = self.words[word : word + 1].reshape(())
        return _torch_view(view) if library == "torch" else view

    def snapshot(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Ring, reference counts and words, as they are after the last op."""
        with self._cupy.cuda.Device(self.index), self._stream_object():
            return self.free_ring.get(), self.ref_count.get(), self.words.get()[:NUM_WORDS]

    def memory(self) -> int:
        """Bytes of state on the device, scratch included."""
        return sum(a.nbytes for a in self._keep) + sum(a.nbytes for a, _ in self._scratch)

    # ---- launch ------------------------------------------------------------------------------------------------

    def _launch(self, kernel: str, blocks: int, threads: int) -> None:
        # The driver's own call: CuPy's builds lists of arguments anew, which costs as much again.
        self._driver_launch(
            self._functions[kernel], blocks, 1, 1, threads, 1, 1, 0, self._stream, self._parameters_address, 0
        )


@functools.cache
def _functions(device: int, clusters: bool) -> dict[str, int]:
    """Every kernel, compiled and loaded on one device: a launch must never find work left to do."""
    import cupy

    options = ("-std=c++17",)

    def load(unit: tuple[str, ...]) -> dict[str, int]:
        code = source(unit)
        with cupy.cuda.Device(device):  # which is a thread's own
            module = cupy.RawModule(code=code, options=options)
            names = [name for name in (KERNELS + CLUSTER_KERNELS if clusters else KERNELS) if f" {name}(" in code]
            functions = {name: module.get_function(name).kernel.ptr for name in names}
        _MODULES.append(module)
        return functions

    # CuPy has NVRTC say what it is before it looks into its cache: once, and not in each thread.
    cupy.RawModule(code='extern "C" __global__ void nothing() {}', options=options).get_function("nothing")
    with ThreadPoolExecutor(len(_UNITS)) as threads:
        return {name: pointer for functions in threads.map(load, _UNITS) for name, pointer in functions.items()}


_MODULES: list[Any] = []  # a module that has gone takes its kernels along


class _Handle:
    """A raw stream, in CUDA's protocol for streams of other libraries."""

    def __init__(self, pointer: int) -> None:
        self.pointer = pointer

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.pointer


def _stream_of(cupy: Any, pointer: int) -> Any:
    if pointer == 0:
        return cupy.cuda.Stream.null
    from_external = getattr(cupy.cuda.Stream, "from_external", None)  # CuPy 14; before it, ExternalStream
    return from_external(_Handle(pointer)) if from_external else cupy.cuda.ExternalStream(pointer)


def _torch_view(array: Any) -> Any:
    import torch

    return torch.from_dlpack(array)
