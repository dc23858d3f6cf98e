"""What cupaged raises beyond ``TypeError`` and ``ValueError`` for mistakes that the host can see."""

from __future__ import annotations

from cupaged.layout import Breach, Kind

__all__ = [
    "BackendError",
    "CaptureError",
    "ConcurrentCallError",
    "DeviceError",
    "DeviceTimeoutError",
    "DoubleFreeError",
    "FreePageError",
    "IntegrityError",
    "LengthError",
    "LockstepError",
    "MisalignedError",
    "OutOfRangeError",
    "PoolShortError",
    "SharedPageError",
    "TableColumnError",
    "TableRowError",
    "TokenCountError",
]


class BackendError(RuntimeError):
    """A backend that was asked for cannot run here; the message says why and what to install."""


class CaptureError(RuntimeError):
    """A call would have to wait, or to allocate, while its stream is being captured into a CUDA graph."""


class ConcurrentCallError(RuntimeError):
    """A mutating call overlapped another one on the same allocator."""


class IntegrityError(RuntimeError):
    """The pool's state contradicts itself: a page is lost, twice in the free list, or both free and owned."""


class DeviceTimeoutError(RuntimeError):
    """The device did not report in time: it is stuck, or it runs something very long."""


class LockstepError(RuntimeError):
    """Ranks that must make the same calls and hand out the same slots did not, or one of them does not answer.

    Attributes
    ----------
    first_op, last_op : int
        The calls in question, counted from 1 since the guard was made; 0 where it could not be made.
    ranks : tuple of int
        Those that differ from most others, or all where no most can be told; empty where ranks did not answer.
    """

    def __init__(self, message: str, first_op: int, last_op: int, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.first_op, self.last_op, self.ranks = first_op, last_op, ranks

    def __reduce__(self):
        return type(self), (str(self), self.first_op, self.last_op, self.ranks)


class DeviceError(RuntimeError):
    """An error that only the device could see, recorded there and raised later.

    Attributes
    ----------
    op : int
        Number of the operation, counted from 1 on this allocator, graph replays included.
    kind : str
        Name of the method that queued it.
    index : int
        Position in that call's batch; -1 where the batch as a whole was at fault.
    value : int
        The offending value: a slot, a page id, a length or a count.
    """

    what = "device error"

    def __init__(self, op: int, kind: str, index: int, value: int) -> None:
        where = "the batch as a whole" if index < 0 else f"index {index}"
        super().__init__(f"op {op}, {kind}(), {where}: {self.what} (value {value})")
        self.op, self.kind, self.index, self.value = op, kind, index, value

    def __reduce__(self):
        return type(self), (self.op, self.kind, self.index, self.value)


class PoolShortError(DeviceError):
    """The pool had fewer pages than the op needs where nobody could be told ``None``."""

    what = "not enough free pages; the value is the number needed"


class LengthError(DeviceError):
    """A length is negative, shrinks, or exceeds 2**31 - 1."""

    what = "seq_lens must be at least prefix_lens, at least 1 in a decode, and at most 2**31 - 1"


class TokenCountError(DeviceError):
    """``extend_num_tokens`` is not the sum of the lengths' differences."""

    what = "extend_num_tokens differs from the sum of seq_lens - prefix_lens; the value is that sum"


class MisalignedError(DeviceError):
    """``last_loc`` does not lie where the prefix length says."""

    what = "last_loc does not fit its prefix: (last_loc + 1) % page_size must equal prefix_len % page_size"


class OutOfRangeError(DeviceError):
    """A slot or page id lies outside the pool, or in page 0."""

    what = "out of the pool's range, or in page 0"


class FreePageError(DeviceError):
    """``last_loc`` lies in a page, or ``retain`` names one, that nobody owns."""

    what = "the page is free"


class SharedPageError(DeviceError):
    """``last_loc`` lies in a page with more than one owner, which must not be written."""

    what = "the page has more than one owner and must not be written"


class DoubleFreeError(DeviceError):
    """A page was freed more often than it was owned."""

    what = "freed more often than it was owned"


class TableRowError(OutOfRangeError):
    """A row of a request table does not exist."""

    what = "no such row in the request table"


class TableColumnError(OutOfRangeError):
    """A length does not fit a row of its request table."""

    what = "the length needs more columns than the request table has"


BY_BREACH: dict[int, type[DeviceError]] = {
    Breach.SHORT: PoolShortError,
    Breach.LENGTH: LengthError,
    Breach.SUM: TokenCountError,
    Breach.MISALIGNED: MisalignedError,
    Breach.RANGE: OutOfRangeError,
    Breach.FREE_PAGE: FreePageError,
    Breach.SHARED_PAGE: SharedPageError,
    Breach.DOUBLE_FREE: DoubleFreeError,
    Breach.ROW: TableRowError,
    Breach.COLUMN: TableColumnError,
}


def device_error(code: int, op: int, index: int, value: int) -> DeviceError:
    """Build the exception for a recorded error.

    Parameters
    ----------
    code : int
        ``kind << 8 | breach``, as the kernels record it.
    op, index, value : int
        As in `DeviceError`.
    """
    return BY_BREACH[code & 255](op, Kind(code >> 8).method, index, value)
