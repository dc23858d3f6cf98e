"""numba.cuda kernels: the cross-check of the CUDA C, and the fallback on a GPU without CuPy.

Built differently on purpose. A batch is first checked into `requests` (int64, five rows), then planned by one block,
then written. That block gives each thread a contiguous share of the batch, or of the pages; the threads add their
shares up in shared memory, thread 0 adds those sums and commits, and each thread walks its share again. Where entries
of one page must be taken in turn, a page belongs to one thread, which takes all its entries in order. No shuffles, no
ballots, and of atomics one minimum: all of it also runs in numba's simulator.

The kernels take the state as `pages` (int32, four rows), `words` (int64, as in `layout`, with the pool's constants
behind) and `mail`. An argument of int32 or int64, with any stride, comes as int32 of shape (n, 1) or (n, 2), so that
every kernel has one signature, compiled when the backend is made.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from numba.core import config

from cupaged.backends.gpu import GpuBackend
from cupaged.errors import CaptureError
from cupaged.interop import DeviceTable, DeviceVector, is_on_gpu, library_of, to_host, to_torch
from cupaged.layout import (
    DIGEST_CELLS,
    INT32_LARGEST,
    MAIL_WORDS,
    NUM_WORDS,
    SKIPPED_PAGE,
    WHOLE_BATCH,
    Breach,
    Kind,
    Status,
    Where,
    Word,
)

__all__ = ["NumbaCudaBackend", "probe"]

SIMULATED = bool(config.ENABLE_CUDASIM)
THREADS = 4 if SIMULATED else 128  # of every block: the simulator starts a thread of the host for each
MOST_BLOCKS = 1024
CONSTANTS = 16  # arguments that are one number: more than a few ops have

RING, REFS, MARKS, FIRST_INDEX = range(4)  # rows of `pages`
TOUCHED, GONE = 1, 2  # marks of a page: by the call that runs; freed, but not in the ring yet
LOWEST, CAPACITY, PAGE_SIZE, STRICT, REFUSED_SLOT, ALL_WORDS = range(NUM_WORDS, NUM_WORDS + 6)

# Plain integers: numba takes an enum's members as objects of their own.
HEAD, FREE, STAGED, SHARED, OP = map(int, (Word.HEAD, Word.FREE, Word.STAGED, Word.SHARED, Word.OP))
HOST_OP, NUM_PAGES, STATUS, RET, OK = map(int, (Word.HOST_OP, Word.NUM_PAGES, Word.STATUS, Word.RET, Word.OK))
REFUSALS, ALLOCATED, FREED, PEAK = map(int, (Word.REFUSALS, Word.ALLOCATED, Word.FREED, Word.PEAK))
FIRST, TOKENS, ERROR_CODE, ERROR_OP = map(int, (Word.FIRST, Word.TOKENS, Word.ERROR_CODE, Word.ERROR_OP))
ERROR_INDEX, ERROR_VALUE = int(Word.ERROR_INDEX), int(Word.ERROR_VALUE)
STATUS_OK, STATUS_SHORT, STATUS_REFUSED = map(int, (Status.OK, Status.SHORT, Status.REFUSED))
ROW, COLUMN = int(Breach.ROW), int(Breach.COLUMN)
NONE, SHORT, LENGTH, SUM, MISALIGNED = map(
    int, (Breach.NONE, Breach.SHORT, Breach.LENGTH, Breach.SUM, Breach.MISALIGNED)
)
RANGE, FREE_PAGE, SHARED_PAGE, DOUBLE_FREE = map(
    int, (Breach.RANGE, Breach.FREE_PAGE, Breach.SHARED_PAGE, Breach.DOUBLE_FREE)
)
FRONT, BACK = int(Where.FRONT), int(Where.BACK)
DECODE, DECODE_STEP, TRIM, FREE_QUEUE = map(int, (Kind.DECODE, Kind.DECODE_STEP, Kind.TRIM, Kind.FREE_QUEUE))
NO_TABLE, OF_SLOTS, OF_PAGES = range(3)
BEFORE, LENGTH_AFTER, LAST_SLOT, TABLE_ROW, VERDICT = range(5)  # rows of `requests`
CARRY_ON, PADDING = 1 << 8, 1 << 9  # of a verdict, above its breach
NO_BREACH = 2**63 - 1
LOW_HALF, SIGN = 0xFFFFFFFF, 0x80000000


# ---- which numba.cuda ----------------------------------------------------------------------------------------------


class _Driver:
    """The few calls of the CUDA driver that numba does not bind."""

    def __init__(self) -> None:
        self.lib = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        self.contexts: dict[int, int] = {}
        for name in ("cuCtxSetCurrent", "cuStreamQuery"):
            getattr(self.lib, name).argtypes = [ctypes.c_void_p]
        self.lib.cuStreamIsCapturing.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        self.check(self.lib.cuInit(0))

    def check(self, code: int) -> None:
        if code:
            text = ctypes.c_char_p()
            self.lib.cuGetErrorString(code, ctypes.byref(text))
            raise RuntimeError(f"CUDA error {code}: {(text.value or b'unknown').decode()}")

    def count(self) -> int:
        number = ctypes.c_int()
        self.check(self.lib.cuDeviceGetCount(ctypes.byref(number)))
        return number.value

    def current_device(self) -> int:
        device = ctypes.c_int()
        if self.lib.cuCtxGetDevice(ctypes.byref(device)):  # no context in this thread yet
            self.set_device(0)
            return 0
        return device.value

    def set_device(self, index: int) -> None:
        """Make a device's primary context current, which numba, CuPy and torch all take for theirs."""
        context = self.contexts.get(index)
        if context is None:
            handle = ctypes.c_void_p()
            self.check(self.lib.cuDevicePrimaryCtxRetain(ctypes.byref(handle), index))
            context = self.contexts[index] = handle.value or 0
        self.check(self.lib.cuCtxSetCurrent(context))

    def is_capturing(self, stream: int) -> bool:
        status = ctypes.c_int()
        self.check(self.lib.cuStreamIsCapturing(stream, ctypes.byref(status)))
        return status.value != 0

    def raise_failure(self, stream: int) -> None:
        code = self.lib.cuStreamQuery(stream)
        if code != 600:  # not ready: work is queued
            self.check(code)


class _SimulatedDriver:
    """One device, on which everything has ended when it was called."""

    def count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, index: int) -> None:
        pass

    def is_capturing(self, stream: int) -> bool:
        return False

    def raise_failure(self, stream: int) -> None:
        pass


def _is_redirect(finder: Any) -> bool:
    return "NumbaCuda" in (finder.__name__ if isinstance(finder, type) else type(finder).__name__)


def _import_numba_cuda() -> Any:
    """``numba.cuda``, which the package numba-cuda redirects to itself where it is installed.

    numba-cuda up to 0.30.4 loads with NumPy 2.5, but compiles nothing, and once it is loaded numba's own target
    cannot be: so it is kept away beforehand.
    """
    if not hasattr(np, "row_stack") and "numba.cuda" not in sys.modules:
        for finder in [finder for finder in sys.meta_path if _is_redirect(finder)]:
            sys.meta_path.remove(finder)
    from numba import cuda

    return cuda


def _import_mlir() -> Any:
    """The successor of numba-cuda; None if it is not installed."""
    try:
        from numba_cuda_mlir import cuda
    except ModuleNotFoundError as error:
        if error.name == "numba_cuda_mlir":
            return None
        raise
    return cuda


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _write_one(x):
    x[0] = 1


def _try_out(found: Any) -> None:
    """Compile and run a kernel: the only proof that no part of the toolkit is missing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a grid of one block is what is meant
        array = found.to_device(np.zeros(1, np.int32))
        found.jit("void(int32[::1])")(_write_one)[1, 1](array)
        if array.copy_to_host()[0] != 1:
            raise RuntimeError("a kernel ran, but its result did not come")


_NEEDS_GPU = "needs an NVIDIA GPU and its driver"
_NEEDS_PACKAGE = 'pip install "numba-cuda-mlir[cu13]" (or [cu12], to match your driver)'


def _choose() -> tuple[Any, Any, str, str]:
    """The first numba.cuda that works here, and the driver; if there is none, why, and what to install."""
    driver: Any = _SimulatedDriver()
    if not SIMULATED:
        try:
            driver = _Driver()
            if driver.count() == 0:
                return None, None, "the NVIDIA driver sees no GPU", _NEEDS_GPU
        except (OSError, RuntimeError, AttributeError) as error:
            return None, None, f"no NVIDIA driver works here ({_first_line(error)})", _NEEDS_GPU
    problems = []
    for name, load in (
        ("numba.cuda", _import_numba_cuda),
        ("numba_cuda_mlir", _import_mlir),
    ):
        try:
            found = load()
            if found is None:
                continue
            if not SIMULATED:
                _try_out(found)
            return found, driver, "", ""
        except Exception as error:  # whatever a broken installation raises: its own words say what is missing
            problems.append(f"{name} does not work ({_first_line(error)})")
    return None, driver, ", ".join(problems), _NEEDS_PACKAGE


cuda: Any
_driver: Any
cuda, _driver, _REASON, _HINT = _choose()


def probe() -> tuple[bool, str, str]:
    """Whether a numba.cuda works here, its simulator included; if not, why, and what to install."""
    return cuda is not None, _REASON, _HINT


# ---- kernels -------------------------------------------------------------------------------------------------------

KERNELS: dict[str, tuple[str, Callable]] = {}

_STATE = "int32[:,::1], int64[::1]"
_VECTOR = "int32[:,:]"
_TABLE = "int32[:,:]"
_REQUESTS = "int64[:,::1]"
_OP = "int64, int64, int64"  # host_op, error_ack, kind


def _kernel(*parts: str) -> Callable[[Callable], Callable]:
    def keep(function: Callable) -> Callable:
        KERNELS[function.__name__] = (f"void({', '.join(parts)})", function)
        return function

    return keep


def _device(function: Callable) -> Callable:
    return function if cuda is None else cuda.jit(device=True)(function)


@functools.cache
def _compiled(capability: tuple[int, int]) -> dict[str, Any]:
    """Every kernel for the GPU that is current, which has that compute capability."""
    return {name: _compile(signature, function) for name, (signature, function) in KERNELS.items()}


def _compile(signature: str, function: Callable) -> Any:
    try:
        return cuda.jit(signature, cache=True)(function)
    except (RuntimeError, TypeError, NotImplementedError):  # no folder to keep it in, or no cache at all
        return cuda.jit(signature)(function)


# numba 0.68's own target does not compile the built-in `min` and `max`.


@_device
def lesser(a, b):
    return a if a < b else b


@_device
def greater(a, b):
    return a if a > b else b


@_device
def at(x, i):
    """Entry i, put together from its halves."""
    low = np.int64(x[i, 0])
    if x.shape[1] == 1:
        return low
    return (np.int64(x[i, 1]) << 32) | (low & LOW_HALF)


@_device
def put(x, i, value):
    low = value & LOW_HALF
    x[i, 0] = (low ^ SIGN) - SIGN  # the same bits, as a signed number
    if x.shape[1] == 2:
        x[i, 1] = value >> 32


@_device
def is_page(words, page):
    return 1 <= page <= words[NUM_PAGES]


@_device
def page_of(entry, divisor):
    return entry // divisor if entry >= 0 else -1


@_device
def share(n, thread):
    """Begin and end of a thread's part of n things: contiguous, so that thread order is their order."""
    each = (n + THREADS - 1) // THREADS
    begin = lesser(n, each * thread)
    return begin, lesser(n, begin + each)


@_device
def running_sum(shares):
    """Replace each share by the sum of those before it, and return the sum of all: one thread."""
    total = 0
    for k in range(THREADS):
        own = shares[k]
        shares[k] = total
        total += own
    return total


@_device
def sum_of(shares):
    total = 0
    for k in range(THREADS):
        total += shares[k]
    return total


@_device
def least_of(shares):
    least = shares[0]
    for k in range(1, THREADS):
        least = lesser(least, shares[k])
    return least


@_device
def begin_op(words, host_op, error_ack):
    words[OP] += 1
    if host_op != 0:  # in a captured graph the host's number stays
        words[HOST_OP] = host_op
    if words[ERROR_OP] <= error_ack:
        words[ERROR_CODE] = 0


@_device
def record(words, kind, breach, index, value):
    if words[ERROR_CODE] == 0:
        words[ERROR_CODE] = kind << 8 | breach
        words[ERROR_OP] = words[OP]
        words[ERROR_INDEX] = index
        words[ERROR_VALUE] = value


@_device
def end_op(words, mail, status):
    """Post the words to the host; one thread. Cells carry the op's number, as in kernels_cu/common.cuh."""
    words[STATUS] = status
    words[OK] = 1 if status == STATUS_OK else 0
    number = words[OP] << 32
    for i in range(NUM_WORDS):
        mail[i] = number | (words[i] & 0xFFFFFFFF)
        mail[NUM_WORDS + i] = number | (words[i] >> 32 & 0xFFFFFFFF)


@_device
def give_pages(words, count, where):
    """Make room in the ring for pages that come back: the position of the first."""
    words[FREED] += count
    if where == FRONT:
        words[HEAD] = (words[HEAD] + words[CAPACITY] - count) % words[CAPACITY]
        words[FREE] += count
        return words[HEAD]
    first = (words[HEAD] + words[FREE] + words[STAGED]) % words[CAPACITY]
    words[FREE if where == BACK else STAGED] += count
    return first


# Allocation.


@_device
def pages_of(words, tokens):
    return (tokens + words[PAGE_SIZE] - 1) // words[PAGE_SIZE]


@_device
def lengths_hold(before, length):
    return 0 <= before <= length and length <= INT32_LARGEST


@_device
def fits_table(words, table, tables, length):
    return length <= table.shape[1] * (words[PAGE_SIZE] if tables == OF_PAGES else 1)


@_device
def last_slot(words, table, tables, row, before):
    """Slot of the last cached token as the table tells it."""
    if tables == OF_SLOTS:
        return np.int64(table[row, before - 1])
    size = words[PAGE_SIZE]
    page = np.int64(table[row, (before - 1) // size])
    return page * size + (before - 1) % size if page >= 0 else page


@_device
def verdict_of(pages, words, before, length, slot):
    """What is wrong with a request whose lengths hold, and whether to carry on as the classic kernels do."""
    size = words[PAGE_SIZE]
    offset = before % size
    if offset == 0 or length == before:  # no old page is written
        return NONE
    page = page_of(slot, size)
    if not is_page(words, page):
        return RANGE
    if pages[REFS, page] == 0:
        return FREE_PAGE
    if pages[REFS, page] > 1:
        return SHARED_PAGE
    found = slot % size + 1
    if found == offset:
        return NONE
    ends = found + lesser(length - before, size - offset)
    return MISALIGNED | CARRY_ON if words[STRICT] == 0 and ends <= size else MISALIGNED


@_kernel(_STATE, _REQUESTS, _TABLE, _VECTOR, _VECTOR, _VECTOR, _VECTOR, "int64, int64, int64, int64")
def check_requests(pages, words, requests, table, rows, prefix, seq, last, n, tables, pad_row, kind):
    # Reads the arguments, the only kernel that does, and looks at each request for itself.
    for i in range(np.int64(cuda.grid(1)), n, np.int64(cuda.gridsize(1))):
        length, before, slot, row, verdict = at(seq, i), np.int64(0), np.int64(-1), np.int64(-1), NONE
        if kind == DECODE:
            before = length - 1 if length > 0 else np.int64(-1)  # a decode of nothing has no prefix
        elif kind == DECODE_STEP:
            before = length
            length += 1 if length <= INT32_LARGEST else 0
        else:
            before = at(prefix, i)
        holds = lengths_hold(before, length)
        if tables == NO_TABLE:
            slot = at(last, i)
        else:
            row = at(rows, i)
        if tables != NO_TABLE and row == pad_row:
            verdict = PADDING
            length = length - before if holds else np.int64(1 if kind == DECODE_STEP else 0)
            before = np.int64(0)
        elif tables != NO_TABLE and (row < 0 or row >= table.shape[0]):
            verdict = ROW
        elif not holds:
            verdict = LENGTH
        elif tables != NO_TABLE and not fits_table(words, table, tables, length):
            verdict = COLUMN
        else:
            if tables != NO_TABLE and 0 < before < length:
                slot = last_slot(words, table, tables, row, before)
            verdict = verdict_of(pages, words, before, length, slot)
        requests[BEFORE, i], requests[LENGTH_AFTER, i], requests[LAST_SLOT, i] = before, length, slot
        requests[TABLE_ROW, i], requests[VERDICT, i] = row, verdict


@_device
def needs(words, requests, i):
    """New pages and tokens of a request."""
    before, length = requests[BEFORE, i], requests[LENGTH_AFTER, i]
    if not lengths_hold(before, length):
        return np.int64(0), np.int64(0)
    if requests[VERDICT, i] == PADDING:
        return np.int64(0), length
    return pages_of(words, length) - pages_of(words, before), length - before


@_device
def blamed(requests, i):
    """The value that a request's breach names."""
    breach = requests[VERDICT, i] & 255
    if breach == ROW:
        return requests[TABLE_ROW, i]
    return requests[LENGTH_AFTER if breach in (LENGTH, COLUMN) else LAST_SLOT, i]


@_device
def decide(words, kind, quiet, needed, tokens, num_tokens, breach, index, value, refused):
    """Take all the pages or none; returns the status."""
    status = STATUS_OK
    if quiet != 0 and needed > words[FREE]:
        status = STATUS_SHORT  # told as None, whatever else is wrong
    elif breach != NONE:
        record(words, kind, breach, index, value)
        status = STATUS_REFUSED if refused != 0 else STATUS_OK
    if status == STATUS_OK and tokens != num_tokens:
        record(words, kind, SUM, WHOLE_BATCH, tokens)
        if words[STRICT] != 0 or tokens > num_tokens:
            status = STATUS_REFUSED
    if status == STATUS_OK and needed > words[FREE]:
        record(words, kind, SHORT, WHOLE_BATCH, needed)
        status = STATUS_SHORT
    if status != STATUS_OK:
        words[REFUSALS] += 1
        if status == STATUS_REFUSED or quiet == 0:
            words[RET] = 0
        return status
    words[FIRST] = words[HEAD]
    words[HEAD] = (words[HEAD] + needed) % words[CAPACITY]
    words[FREE] -= needed
    words[ALLOCATED] += needed
    words[PEAK] = greater(words[PEAK], words[NUM_PAGES] - words[FREE] - words[STAGED])
    words[TOKENS] = tokens
    words[RET] = needed << 32 | (tokens & LOW_HALF)
    return status


@_kernel(_STATE, "int64[::1], int32[:,::1]", _REQUESTS, "int64, int64", _OP, "int64")
def plan_requests(pages, words, mail, plan, requests, n, num_tokens, host_op, error_ack, kind, quiet):
    # One block. `plan` gets each request's new pages and tokens before it, if the batch is granted.
    page_shares = cuda.shared.array(THREADS, np.int64)
    token_shares = cuda.shared.array(THREADS, np.int64)
    breach_shares = cuda.shared.array(THREADS, np.int64)
    refused_shares = cuda.shared.array(THREADS, np.int64)
    thread = cuda.threadIdx.x
    begin, end = share(n, thread)
    new_pages, tokens, breach_here, refused = 0, 0, NO_BREACH, 0
    for i in range(begin, end):
        breach = requests[VERDICT, i] & 255
        if breach != NONE:
            breach_here = lesser(breach_here, i << 8 | breach)
            refused += 1 if requests[VERDICT, i] & CARRY_ON == 0 else 0
        pages_here, tokens_here = needs(words, requests, i)
        new_pages += pages_here
        tokens += tokens_here
    page_shares[thread], token_shares[thread] = new_pages, tokens
    breach_shares[thread], refused_shares[thread] = breach_here, refused
    cuda.syncthreads()
    if thread == 0:
        begin_op(words, host_op, error_ack)
        lowest = least_of(breach_shares)
        breach, index, value = NONE, np.int64(0), np.int64(0)
        if lowest != NO_BREACH:
            breach, index = lowest & 255, lowest >> 8
            value = blamed(requests, index)
        needed, all_tokens = running_sum(page_shares), running_sum(token_shares)
        refused = sum_of(refused_shares)
        status = decide(words, kind, quiet, needed, all_tokens, num_tokens, breach, index, value, refused)
        end_op(words, mail, status)
    cuda.syncthreads()
    if words[OK] == 0:
        return
    new_pages, tokens = page_shares[thread], token_shares[thread]
    for i in range(begin, end):
        plan[0, i], plan[1, i] = new_pages, tokens
        pages_here, tokens_here = needs(words, requests, i)
        new_pages += pages_here
        tokens += tokens_here


@_kernel(_STATE, "int32[:,::1]", _REQUESTS, _TABLE, _VECTOR, "int64, int64, int64")
def write_slots(pages, words, plan, requests, table, out, n, num_tokens, tables):
    # Blocks along x take the requests in turn, blocks along y share the tokens of each.
    thread = np.int64(cuda.blockIdx.y * THREADS + cuda.threadIdx.x)
    step = np.int64(cuda.gridDim.y * THREADS)
    if cuda.blockIdx.x == 0:
        for token in range(words[TOKENS] * words[OK] + thread, num_tokens, step):
            put(out, token, words[REFUSED_SLOT])
    if words[OK] == 0:
        return
    size = words[PAGE_SIZE]
    for i in range(np.int64(cuda.blockIdx.x), n, np.int64(cuda.gridDim.x)):
        before, row = requests[BEFORE, i], requests[TABLE_ROW, i]
        padding = requests[VERDICT, i] == PADDING
        old_pages = pages_of(words, before)
        position = words[FIRST] + plan[0, i] - old_pages
        first = np.int64(plan[1, i])
        for token in range(before + thread, requests[LENGTH_AFTER, i], step):
            nth = token // size
            if padding:
                slot = np.int64(0)
            elif nth < old_pages:
                slot = requests[LAST_SLOT, i] + 1 + token - before
            else:
                page = np.int64(pages[RING, (position + nth) % words[CAPACITY]])
                slot = page * size + token % size
                if token % size == 0:
                    pages[REFS, page] = 1
                    if tables == OF_PAGES:
                        table[row, nth] = page
            if tables == OF_SLOTS and not padding:
                table[row, token] = slot
            put(out, first + token - before, slot)


@_kernel("int64[::1], int64[::1], int64", _OP, "int64")
def plan_pages(words, mail, count, host_op, error_ack, kind, quiet):
    if cuda.threadIdx.x == 0:
        begin_op(words, host_op, error_ack)
        tokens = count * words[PAGE_SIZE]
        end_op(words, mail, decide(words, kind, quiet, count, tokens, tokens, NONE, 0, 0, 0))


@_kernel(_STATE, _VECTOR, "int64")
def write_pages(pages, words, out, count):
    size = words[PAGE_SIZE]
    for k in range(np.int64(cuda.blockIdx.x), count, np.int64(cuda.gridDim.x)):
        page = np.int64(0)
        if words[OK] != 0:
            page = np.int64(pages[RING, (words[FIRST] + k) % words[CAPACITY]])
            if cuda.threadIdx.x == 0:
                pages[REFS, page] = 1
        for offset in range(np.int64(cuda.threadIdx.x), size, THREADS):
            put(out, k * size + offset, page * size + offset if page > 0 else words[REFUSED_SLOT])


# Frees.


@_kernel(_STATE, _VECTOR, "int64")
def mark_slots(pages, words, slots, n):
    for i in range(np.int64(cuda.grid(1)), n, np.int64(cuda.gridsize(1))):
        page = page_of(at(slots, i), words[PAGE_SIZE])
        if not is_page(words, page):
            cuda.atomic.min(words, LOWEST, i << 8 | RANGE)
        elif pages[REFS, page] > 0:
            pages[MARKS, page] = TOUCHED  # by however many threads: they write the same
        elif pages[MARKS, page] != GONE:
            cuda.atomic.min(words, LOWEST, i << 8 | DOUBLE_FREE)


@_kernel(_STATE, "int64[::1]", _VECTOR, "int64, int64, int64", _OP)
def settle_slots(pages, words, mail, slots, index_base, push, where, host_op, error_ack, kind):
    # One block takes an owner off each page that was marked, and gives back those without, ascending.
    gone_shares = cuda.shared.array(THREADS, np.int64)
    single_shares = cuda.shared.array(THREADS, np.int64)
    start = cuda.shared.array(1, np.int64)
    thread = cuda.threadIdx.x
    begin, end = share(words[NUM_PAGES], thread)
    gone, single = 0, 0
    for page in range(begin + 1, end + 1):
        if pages[MARKS, page] == TOUCHED:
            owners = pages[REFS, page] - 1
            pages[REFS, page] = owners
            pages[MARKS, page] = GONE if owners == 0 else 0
            single += 1 if owners == 1 else 0
        gone += 1 if pages[MARKS, page] == GONE else 0
    gone_shares[thread], single_shares[thread] = gone, single
    cuda.syncthreads()
    if thread == 0:
        begin_op(words, host_op, error_ack)
        lowest = words[LOWEST]
        if lowest != NO_BREACH:
            record(words, kind, lowest & 255, index_base + (lowest >> 8), at(slots, lowest >> 8))
            words[LOWEST] = NO_BREACH
        words[SHARED] -= sum_of(single_shares)
        if push != 0:
            start[0] = give_pages(words, running_sum(gone_shares), where)
        end_op(words, mail, STATUS_OK)
    cuda.syncthreads()
    if push == 0:
        return
    position = start[0] + gone_shares[thread]
    for page in range(begin + 1, end + 1):
        if pages[MARKS, page] == GONE:
            pages[MARKS, page] = 0
            pages[RING, position % words[CAPACITY]] = page
            position += 1


@_device
def is_mine(words, page, thread):
    """Whether this thread takes the entries of a page; thread 0 also has those of no page."""
    return thread == (page % THREADS if is_page(words, page) else 0)


@_device
def goes_at(pages, words, page, number):
    """Whether a page is pushed for this entry: its first one, if no owner is left."""
    return is_page(words, page) and pages[FIRST_INDEX, page] == number + 1 and pages[REFS, page] == 0


@_kernel(_STATE, "int64[::1]", _VECTOR, "int64, int64, int64", _OP)
def free_page_ids(pages, words, mail, entries, n, divisor, where, host_op, error_ack, kind):
    breach_shares = cuda.shared.array(THREADS, np.int64)
    single_shares = cuda.shared.array(THREADS, np.int64)
    gone_shares = cuda.shared.array(THREADS, np.int64)
    start = cuda.shared.array(1, np.int64)
    thread = cuda.threadIdx.x
    breach_here, single = NO_BREACH, 0
    for i in range(n):
        page = page_of(at(entries, i), divisor)
        if not is_mine(words, page, thread):
            continue
        if not is_page(words, page):
            breach_here = lesser(breach_here, i << 8 | RANGE)
        elif pages[REFS, page] == 0:
            breach_here = lesser(breach_here, i << 8 | DOUBLE_FREE)
        else:
            if pages[FIRST_INDEX, page] == 0:
                pages[FIRST_INDEX, page] = i + 1
            pages[REFS, page] -= 1
            single += 1 if pages[REFS, page] == 1 else 0
    breach_shares[thread], single_shares[thread] = breach_here, single
    cuda.syncthreads()
    # A page goes where its first entry stands, if no owner is left.
    begin, end = share(n, thread)
    gone = 0
    for i in range(begin, end):
        page = page_of(at(entries, i), divisor)
        gone += 1 if goes_at(pages, words, page, i) else 0
    gone_shares[thread] = gone
    cuda.syncthreads()
    if thread == 0:
        begin_op(words, host_op, error_ack)
        lowest = least_of(breach_shares)
        if lowest != NO_BREACH:
            record(words, kind, lowest & 255, lowest >> 8, at(entries, lowest >> 8))
        words[SHARED] -= sum_of(single_shares)
        start[0] = give_pages(words, running_sum(gone_shares), where)
        end_op(words, mail, STATUS_OK)
    cuda.syncthreads()
    position = start[0] + gone_shares[thread]
    for i in range(begin, end):
        page = page_of(at(entries, i), divisor)
        if goes_at(pages, words, page, i):
            pages[RING, position % words[CAPACITY]] = page
            position += 1
    cuda.syncthreads()
    for i in range(begin, end):
        page = page_of(at(entries, i), divisor)
        if is_page(words, page):
            pages[FIRST_INDEX, page] = 0


@_kernel("int64[::1]", _REQUESTS, _TABLE, _VECTOR, _VECTOR, _VECTOR, _VECTOR, "int64, int64, int64, int64")
def check_rows(words, requests, table, rows, keep, seq, ends, n, tables, pad_row, kind):
    # Which pages of its row each request gives back, and what is wrong with it. A queue says them itself.
    for i in range(np.int64(cuda.grid(1)), n, np.int64(cuda.gridsize(1))):
        row, begin, end, verdict = at(rows, i), np.int64(0), np.int64(0), NONE
        blame = row
        if kind == FREE_QUEUE:
            begin, end = at(keep, i), at(ends, i)
        elif row != pad_row:
            length = at(seq, i)
            kept = at(keep, i) if kind == TRIM else np.int64(0)
            if row < 0 or row >= table.shape[0]:
                verdict = ROW
            elif not lengths_hold(kept, length):
                verdict = LENGTH
                blame = kept if kept < 0 or kept > length else length
            elif not fits_table(words, table, tables, length):
                verdict = COLUMN
                blame = length
            else:
                begin, end = pages_of(words, kept), pages_of(words, length)
        requests[BEFORE, i], requests[LENGTH_AFTER, i], requests[LAST_SLOT, i] = begin, end, blame
        requests[TABLE_ROW, i], requests[VERDICT, i] = row, verdict


@_device
def cell_at(words, table, entries, tables, row, nth):
    """Entry of a page of a row; of a queue also an entry that was given as an array."""
    if row < 0:
        return at(entries, nth)
    return np.int64(table[row, nth if tables == OF_PAGES else nth * words[PAGE_SIZE]])


@_kernel(_STATE, "int64[::1]", _REQUESTS, _TABLE, _VECTOR, "int32[::1]", "int64, int64, int64, int64", _OP)
def free_rows(pages, words, mail, requests, table, entries, slot_refs, n, tables, counted, where, host_op, ack, kind):
    # As `free_page_ids`, over the pages of one request after the other.
    number_shares = cuda.shared.array(THREADS, np.int64)
    breach_shares = cuda.shared.array(THREADS, np.int64)
    index_shares = cuda.shared.array(THREADS, np.int64)
    blame_shares = cuda.shared.array(THREADS, np.int64)
    single_shares = cuda.shared.array(THREADS, np.int64)
    gone_shares = cuda.shared.array(THREADS, np.int64)
    start = cuda.shared.array(2, np.int64)
    thread = cuda.threadIdx.x
    first_request, end_request = share(n, thread)
    number, breach_here = 0, NO_BREACH
    for i in range(first_request, end_request):
        number += requests[LENGTH_AFTER, i] - requests[BEFORE, i]
        if requests[VERDICT, i] != NONE:
            breach_here = lesser(breach_here, i << 8 | requests[VERDICT, i])
    number_shares[thread], breach_shares[thread] = number, breach_here
    cuda.syncthreads()
    if thread == 0:
        begin_op(words, host_op, ack)
        lowest, total = least_of(breach_shares), running_sum(number_shares)
        start[1] = 0
        if lowest != NO_BREACH:
            record(words, kind, lowest & 255, lowest >> 8, requests[LAST_SLOT, lowest >> 8])
        elif total > INT32_LARGEST:
            record(words, kind, SUM, WHOLE_BATCH, total)
        if lowest != NO_BREACH or total > INT32_LARGEST:
            start[1] = -1
            words[REFUSALS] += 1
            end_op(words, mail, STATUS_REFUSED)
    cuda.syncthreads()
    if start[1] < 0:
        return
    breach_here, index_here, blame, single, number = NO_BREACH, np.int64(0), np.int64(0), 0, 0
    for i in range(n):
        for nth in range(requests[BEFORE, i], requests[LENGTH_AFTER, i]):
            cell = cell_at(words, table, entries, tables, requests[TABLE_ROW, i], nth)
            page = page_of(cell, 1 if tables == OF_PAGES else words[PAGE_SIZE])
            number += 1
            if not is_mine(words, page, thread):
                continue
            if is_page(words, page) and pages[REFS, page] > 0:
                if pages[FIRST_INDEX, page] == 0:
                    pages[FIRST_INDEX, page] = number
                pages[REFS, page] -= 1
                single += 1 if pages[REFS, page] == 1 else 0
            elif breach_here == NO_BREACH and (kind != FREE_QUEUE or cell != SKIPPED_PAGE):
                breach_here = number << 8 | (DOUBLE_FREE if is_page(words, page) else RANGE)
                index_here, blame = np.int64(i), cell
    breach_shares[thread], index_shares[thread], blame_shares[thread] = breach_here, index_here, blame
    single_shares[thread] = single
    cuda.syncthreads()
    gone, number = 0, number_shares[thread]
    for i in range(first_request, end_request):
        for nth in range(requests[BEFORE, i], requests[LENGTH_AFTER, i]):
            cell = cell_at(words, table, entries, tables, requests[TABLE_ROW, i], nth)
            page = page_of(cell, 1 if tables == OF_PAGES else words[PAGE_SIZE])
            gone += 1 if goes_at(pages, words, page, number) else 0
            number += 1
    gone_shares[thread] = gone
    cuda.syncthreads()
    if thread == 0:
        lowest = least_of(breach_shares)
        if lowest != NO_BREACH:
            for k in range(THREADS):
                if breach_shares[k] == lowest:
                    record(words, kind, lowest & 255, index_shares[k], blame_shares[k])
        words[SHARED] -= sum_of(single_shares)
        start[1] = running_sum(gone_shares)
        start[0] = give_pages(words, start[1], where)
        end_op(words, mail, STATUS_OK)
    cuda.syncthreads()
    position, number = start[0] + gone_shares[thread], number_shares[thread]
    for i in range(first_request, end_request):
        for nth in range(requests[BEFORE, i], requests[LENGTH_AFTER, i]):
            cell = cell_at(words, table, entries, tables, requests[TABLE_ROW, i], nth)
            page = page_of(cell, 1 if tables == OF_PAGES else words[PAGE_SIZE])
            if goes_at(pages, words, page, number):
                pages[RING, position % words[CAPACITY]] = page
                position += 1
            number += 1
    cuda.syncthreads()
    for i in range(first_request, end_request):
        for nth in range(requests[BEFORE, i], requests[LENGTH_AFTER, i]):
            cell = cell_at(words, table, entries, tables, requests[TABLE_ROW, i], nth)
            page = page_of(cell, 1 if tables == OF_PAGES else words[PAGE_SIZE])
            if is_page(words, page):
                pages[FIRST_INDEX, page] = 0
    if counted == 0:
        return
    # One reference less in every slot of the pages that were pushed, never below zero.
    size = words[PAGE_SIZE]
    for k in range(np.int64(thread), start[1] * size, THREADS):
        slot = np.int64(pages[RING, (start[0] + k // size) % words[CAPACITY]]) * size + k % size
        if slot_refs[slot] > 0:
            slot_refs[slot] -= 1


@_kernel(_STATE, "int64[::1]", _VECTOR, "int64", _OP)
def retain_page_ids(pages, words, mail, entries, n, host_op, error_ack, kind):
    breach_shares = cuda.shared.array(THREADS, np.int64)
    shared_shares = cuda.shared.array(THREADS, np.int64)
    thread = cuda.threadIdx.x
    breach_here, shared = NO_BREACH, 0
    for i in range(n):
        page = at(entries, i)
        if not is_mine(words, page, thread):
            continue
        if not is_page(words, page):
            breach_here = lesser(breach_here, i << 8 | RANGE)
        elif pages[REFS, page] == 0:
            breach_here = lesser(breach_here, i << 8 | FREE_PAGE)
        else:
            pages[REFS, page] += 1
            shared += 1 if pages[REFS, page] == 2 else 0
    breach_shares[thread], shared_shares[thread] = breach_here, shared
    cuda.syncthreads()
    if thread == 0:
        begin_op(words, host_op, error_ack)
        lowest = least_of(breach_shares)
        if lowest != NO_BREACH:
            record(words, kind, lowest & 255, lowest >> 8, at(entries, lowest >> 8))
        words[SHARED] += sum_of(shared_shares)
        end_op(words, mail, STATUS_OK)


# Hand-offs. They only read the state. Every block counts all requests, and writes its part of the output. To find
# whose an entry is, a thread looks among the threads' shares of the batch, and then in that share.


@_kernel(_STATE, _VECTOR, _VECTOR, "int64")
def count_references(pages, words, entries, out, n):
    for i in range(np.int64(cuda.grid(1)), n, np.int64(cuda.gridsize(1))):
        page = at(entries, i)
        put(out, i, np.int64(pages[REFS, page]) if is_page(words, page) else np.int64(-1))


@_device
def readable(words, table, tables, pad_row, row, length):
    if row == pad_row or row < 0 or row >= table.shape[0]:
        return False
    return lengths_hold(0, length) and fits_table(words, table, tables, length)


@_device
def page_in_table(words, table, tables, row, nth):
    """The nth page of a row, or the padding page where the cell names none of this pool."""
    if tables == OF_PAGES:
        page = np.int64(table[row, nth])
    else:
        page = page_of(np.int64(table[row, nth * words[PAGE_SIZE]]), words[PAGE_SIZE])
    return page if 0 <= page <= words[CAPACITY] else np.int64(0)


@_device
def slot_in_table(words, table, tables, row, token):
    """Slot of a token, or -1 where the cell names none of this pool."""
    slot = last_slot(words, table, tables, row, token + 1)
    return slot if 0 <= slot < (words[CAPACITY] + 1) * words[PAGE_SIZE] else np.int64(-1)


@_device
def listed_pages(words, table, rows, seq, tables, pad_row, i):
    length = at(seq, i)
    if readable(words, table, tables, pad_row, at(rows, i), length):
        return pages_of(words, length)
    return np.int64(0)


@_device
def mapped_tokens(prefix, seq, i):
    before, length = at(prefix, i), at(seq, i)
    return length - before if lengths_hold(before, length) else np.int64(0)


@_device
def thread_of(shares, number):
    """The thread in whose share an entry lies: the last share, of running sums, that begins no later."""
    low, high = 0, THREADS - 1
    while low < high:
        middle = (low + high + 1) // 2
        if shares[middle] <= number:
            low = middle
        else:
            high = middle - 1
    return low


@_kernel("int64[::1]", _TABLE, _VECTOR, _VECTOR, _VECTOR, _VECTOR, _VECTOR, "int64, int64, int64, int64")
def list_pages(words, table, rows, seq, indptr, indices, last, n, room, tables, pad_row):
    # FlashInfer's tables. The first block lists where each request begins and ends.
    page_shares = cuda.shared.array(THREADS, np.int64)
    total = cuda.shared.array(1, np.int64)
    thread = cuda.threadIdx.x
    begin, end = share(n, thread)
    number = 0
    for i in range(begin, end):
        number += listed_pages(words, table, rows, seq, tables, pad_row, i)
    page_shares[thread] = number
    cuda.syncthreads()
    if thread == 0:
        total[0] = running_sum(page_shares)
    cuda.syncthreads()
    if cuda.blockIdx.x == 0:
        if thread == 0:
            indptr[0, 0] = 0
        number = page_shares[thread]
        for i in range(begin, end):
            pages = listed_pages(words, table, rows, seq, tables, pad_row, i)
            given = lesser(pages, greater(np.int64(0), room - number))
            tokens = words[PAGE_SIZE] if given > 0 else np.int64(0)
            if given > 0 and given == pages:
                tokens = at(seq, i) - (pages - 1) * words[PAGE_SIZE]
            number += pages
            last[i, 0], indptr[i + 1, 0] = tokens, lesser(number, room)
    for entry in range(np.int64(cuda.grid(1)), room, np.int64(cuda.gridsize(1))):
        page = np.int64(0)
        if entry < total[0]:
            owner = thread_of(page_shares, entry)
            i, _ = share(n, owner)
            nth = entry - page_shares[owner]
            pages = listed_pages(words, table, rows, seq, tables, pad_row, i)
            while nth >= pages:
                nth -= pages
                i += 1
                pages = listed_pages(words, table, rows, seq, tables, pad_row, i)
            page = page_in_table(words, table, tables, at(rows, i), nth)
        indices[entry, 0] = page


@_kernel("int64[::1]", _TABLE, _VECTOR, _VECTOR, _TABLE, "int64, int64, int64")
def list_blocks(words, table, rows, seq, out, parts, tables, pad_row):
    width, kernel_size = np.int64(out.shape[1]), words[PAGE_SIZE] // parts
    for entry in range(np.int64(cuda.grid(1)), out.shape[0] * width, np.int64(cuda.gridsize(1))):
        i, nth = entry // width, entry % width
        row, length, page = at(rows, i), at(seq, i), np.int64(0)
        if readable(words, table, tables, pad_row, row, length) and nth * kernel_size < length:
            page = page_in_table(words, table, tables, row, nth // parts) * parts + nth % parts
        out[i, nth] = page


@_kernel("int64[::1]", _TABLE, _VECTOR, _VECTOR, _VECTOR, _VECTOR, "int64, int64, int64, int64")
def map_slots(words, table, rows, prefix, seq, out, n, num_tokens, tables, pad_row):
    token_shares = cuda.shared.array(THREADS, np.int64)
    total = cuda.shared.array(1, np.int64)
    thread = cuda.threadIdx.x
    begin, end = share(n, thread)
    number = 0
    for i in range(begin, end):
        number += mapped_tokens(prefix, seq, i)
    token_shares[thread] = number
    cuda.syncthreads()
    if thread == 0:
        total[0] = running_sum(token_shares)
    cuda.syncthreads()
    for entry in range(np.int64(cuda.grid(1)), num_tokens, np.int64(cuda.gridsize(1))):
        slot = np.int64(-1)
        if entry < total[0]:
            owner = thread_of(token_shares, entry)
            i, _ = share(n, owner)
            nth = entry - token_shares[owner]
            tokens = mapped_tokens(prefix, seq, i)
            while nth >= tokens:
                nth -= tokens
                i += 1
                tokens = mapped_tokens(prefix, seq, i)
            row = at(rows, i)
            if readable(words, table, tables, pad_row, row, at(seq, i)):
                slot = slot_in_table(words, table, tables, row, at(prefix, i) + nth)
        put(out, entry, slot)


# Digests. Signed 64-bit products and sums that wrap round have the same bits as unsigned ones.


@_device
def mixed(x):
    x = (x ^ (x >> 30 & 0x3FFFFFFFF)) * np.int64(-0x40A7B892E31B1A47)
    x = (x ^ (x >> 27 & 0x1FFFFFFFFF)) * np.int64(-0x6B2FB644ECCEEE15)
    return x ^ (x >> 31 & 0x1FFFFFFFF)


@_device
def term(place, value):
    return mixed(np.int64(value) + np.int64(place + 1) * np.int64(-0x61C8864680B583EB))


@_kernel(_STATE, _VECTOR, _VECTOR, "int64, int64")
def fold_digest(pages, words, entries, cells, n, where):
    sums = cuda.shared.array(THREADS, np.int64)
    thread = cuda.threadIdx.x
    listed, freed, capacity = words[FREE] + words[STAGED], words[FREED], words[CAPACITY]
    pushed = lesser(greater(freed - at(cells, 1), 0), listed)
    first = words[HEAD] + (0 if where == FRONT else listed - pushed)
    total = np.int64(0)
    begin, end = share(n + pushed, thread)
    for place in range(begin, end):
        if place < n:
            total += term(place, at(entries, place))
        else:
            total += term(place, pages[RING, (first + place - n) % capacity])
    sums[thread] = total
    cuda.syncthreads()
    if thread == 0:
        total = at(cells, 0)
        for k in range(THREADS):
            total += sums[k]
        place = n + pushed
        total += term(place, words[FREE]) + term(place + 1, words[STAGED]) + term(place + 2, words[SHARED])
        put(cells, 0, mixed(total))
        put(cells, 1, freed)


# The pool as a whole.


@_kernel(_STATE, "int64")
def sort_free(pages, words, bound):
    free_shares = cuda.shared.array(THREADS, np.int64)
    thread = cuda.threadIdx.x
    wanted = words[STAGED] > 0 and bound > words[FREE]
    begin, end = share(words[NUM_PAGES], thread)
    free = 0
    for page in range(begin + 1, end + 1):
        free += 1 if pages[REFS, page] == 0 else 0
    free_shares[thread] = free
    cuda.syncthreads()
    if not wanted:
        return
    if thread == 0:
        words[HEAD], words[STAGED] = 0, 0
        words[FREE] = running_sum(free_shares)
    cuda.syncthreads()
    position = free_shares[thread]
    for page in range(begin + 1, end + 1):
        if pages[REFS, page] == 0:
            pages[RING, position] = page
            position += 1


@_kernel(_STATE, "int64[::1], int64", _OP)
def clear_pool(pages, words, mail, num_pages, host_op, error_ack, kind):
    for i in range(np.int64(cuda.grid(1)), words[CAPACITY] + 1, np.int64(cuda.gridsize(1))):
        pages[RING, i] = i + 1
        pages[REFS, i] = 1 if i == 0 else 0
        pages[MARKS, i] = 0
        pages[FIRST_INDEX, i] = 0
    if cuda.grid(1) == 0:  # no block reads what this one changes
        begin_op(words, host_op, error_ack)
        words[HEAD], words[STAGED], words[SHARED], words[RET] = 0, 0, 0, 0
        words[NUM_PAGES], words[FREE], words[LOWEST] = num_pages, num_pages, NO_BREACH
        end_op(words, mail, STATUS_OK)


@_device
def saved_word(k):
    return HEAD if k == 0 else FREE if k == 1 else STAGED if k == 2 else SHARED if k == 3 else NUM_PAGES


@_kernel(_STATE, "int64[::1]", _VECTOR, _OP)
def backup_pool(pages, words, mail, saved, host_op, error_ack, kind):
    capacity = words[CAPACITY]
    for i in range(np.int64(cuda.grid(1)), capacity + 1, np.int64(cuda.gridsize(1))):
        if i < capacity:
            saved[i, 0] = pages[RING, i]
        saved[capacity + i, 0] = pages[REFS, i]
    if cuda.grid(1) == 0:
        begin_op(words, host_op, error_ack)
        for k in range(5):
            saved[2 * capacity + 1 + k, 0] = words[saved_word(k)]
        end_op(words, mail, STATUS_OK)


@_kernel(_STATE, "int64[::1]", _VECTOR, _OP)
def restore_pool(pages, words, mail, saved, host_op, error_ack, kind):
    capacity = words[CAPACITY]
    for i in range(np.int64(cuda.grid(1)), capacity + 1, np.int64(cuda.gridsize(1))):
        if i < capacity:
            pages[RING, i] = saved[i, 0]
        pages[REFS, i] = saved[capacity + i, 0]
    if cuda.grid(1) == 0:
        begin_op(words, host_op, error_ack)
        for k in range(5):
            words[saved_word(k)] = saved[2 * capacity + 1 + k, 0]
        end_op(words, mail, STATUS_OK)


@_kernel("int64[::1], int64[::1]", _OP)
def refresh_pool(words, mail, host_op, error_ack, kind):
    if cuda.grid(1) == 0:
        begin_op(words, host_op, error_ack)
        end_op(words, mail, STATUS_OK)


@_kernel(_VECTOR, _VECTOR, "int64")
def queue_entries(entries, out, n):
    for i in range(np.int64(cuda.grid(1)), n, np.int64(cuda.gridsize(1))):
        put(out, i, at(entries, i))


@_kernel(_VECTOR, "int64")
def store_constant(out, value):
    if cuda.grid(1) == 0:
        put(out, 0, value)


# ---- the backend ---------------------------------------------------------------------------------------------------


_NO_VECTOR: DeviceVector = (0, 0, 0, 0, None)


class _Memory:
    """Memory of another owner as what ``__cuda_array_interface__`` describes."""

    def __init__(self, address: int, shape: tuple, strides: tuple, typestr: str, owner: Any) -> None:
        self.interface = {
            "data": (address, False),
            "shape": shape,
            "strides": strides,
            "typestr": typestr,
            "version": 3,
        }
        self.owner = owner

    @property
    def __cuda_array_interface__(self) -> dict:
        return self.interface

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return _from_address(self.interface) if SIMULATED else self.owner.copy_to_host()


class NumbaCudaBackend(GpuBackend):
    """State of one pool on a GPU, or in numba's simulator of one.

    Parameters
    ----------
    **options
        As in `GpuBackend`.

    Notes
    -----
    numba keeps no pool of device memory and has no current stream: results in its own arrays are allocated anew, and
    work on them is queued on the default stream. Results for torch and CuPy inputs are those libraries' own.
    """

    name = "numba-cuda"
    native = "numba"

    def __init__(self, **options: Any) -> None:
        if cuda is None:
            raise RuntimeError(f"{_REASON}; {_HINT}")
        index = options["device_index"]
        if index is not None and index >= _driver.count():
            raise ValueError(f"device cuda:{index} does not exist; this machine has {_driver.count()} GPU(s)")
        before = _driver.current_device()
        _driver.set_device(before if index is None else index)
        try:
            super().__init__(**options)
            capability = (0, 0) if SIMULATED else tuple(cuda.get_current_device().compute_capability)
            self.kernels = _compiled(capability)
            self._configured: dict[tuple, Any] = {}
            self._streams: dict[int, Any] = {0: 0}
            self._event = cuda.event(timing=False) if not SIMULATED else cuda.event()
            self._make_state()
            self._first_launches()
        finally:
            _driver.set_device(before)

    def _make_state(self) -> None:
        n = self.capacity
        self.pages = cuda.device_array((4, n + 1), np.int32)
        constants = np.zeros(ALL_WORDS, np.int64)
        constants[LOWEST], constants[CAPACITY], constants[PAGE_SIZE] = NO_BREACH, n, self.page_size
        constants[STRICT], constants[REFUSED_SLOT] = self.strict, self.refused_slot
        self._constants = constants
        self.words = cuda.to_device(constants)
        self.mailbox = cuda.mapped_array(MAIL_WORDS, np.int64, portable=True)
        self._mail_host: np.ndarray = self.mailbox._ary if SIMULATED else np.asarray(self.mailbox)
        self.mail = self._mail_host.data.cast("B").cast("Q")
        self._nothing = cuda.device_array((1, 1), np.int32)
        self._no_counts = cuda.device_array(1, np.int32)
        self._numbers, self._numbers_used = self._empty(CONSTANTS, np.int64), 0
        self._scratch: list[Any] = []
        self._make_scratch(self.max_batch)

    def _make_scratch(self, batch: int) -> None:
        if self.captured:
            raise CaptureError(
                f"a batch of {batch} is larger than max_batch, {self.max_batch}, and scratch cannot grow after a "
                "capture; make the allocator with a larger max_batch"
            )
        self.max_batch = batch = max(batch, 2 * self.max_batch if self._scratch else 0)
        self._plan = cuda.device_array((2, batch), np.int32)
        self._requests = cuda.device_array((5, batch), np.int64)
        # What is replaced stays: a launch on another stream may still read it.
        self._scratch += [self._plan, self._requests]

    def _first_launches(self) -> None:
        """Run every kernel once, since what a first launch loads must not wait for a caller; then start from zero."""
        one = self._vector_of(np.ones(1, np.int64))
        _, slots = self._empty(self.page_size, self.index_dtype)
        self.clear(self.capacity)
        self.alloc_pages(1, slots)
        self.alloc_extend(self._vector_of(np.zeros(1, np.int64)), one, one, 1, slots)
        self.alloc_decode(one, one, slots)
        self.free_slots(one, True, 0, Where.FRONT)
        self.free_pages(one, 1, Where.FRONT)
        self.retain_pages(one)
        cells = self._vector_of(np.zeros(2, np.int64))
        table = cells[0], 2, 1, 2, cells[4]
        self.step(table, False, 0, self.constant(0), one, one, 0, slots)
        self.free_rows(table, False, 0, self.constant(0), None, one, Where.FRONT)
        self.sort_free(0)
        self.restore(self.backup())
        self.refresh()
        _, entry = self._empty(3, np.int64)
        self._copy_entries(one, entry)
        self.flashinfer_tables(table, False, 0, one, one, entry, entry + 8, 1, entry + 16)
        self.block_table(table, False, 0, one, one, 1, (entry, 1, 1, 1, None))
        self.slot_mapping(table, False, 0, one, one, one, 1, entry)
        self.reference_counts(one, entry)
        self.fold(one, Where.FRONT, entry)
        self.clear(self.capacity)
        cuda.synchronize()
        self.words.copy_to_device(self._constants)
        self._mail_host[:] = 0

    # ---- device, streams ---------------------------------------------------------------------------------------

    def _current_device(self) -> int:
        return _driver.current_device()

    def _set_device(self, index: int) -> None:
        _driver.set_device(index)

    def _native_stream(self) -> tuple[int, Any]:
        return 0, None

    def _current_stream(self, library: str) -> int:
        if library == "cupy":
            return int(sys.modules["cupy"].cuda.get_current_stream().ptr)
        return super()._current_stream(library)

    def _owner_of_stream(self, library: str) -> Any:
        if library == "cupy":
            return sys.modules["cupy"].cuda.get_current_stream()
        return super()._owner_of_stream(library)

    def _is_capturing(self, stream: int) -> bool:
        return _driver.is_capturing(stream)

    def _order(self, before: int, after: int) -> None:
        self._event.record(self._stream_object(before))
        self._event.wait(self._stream_object(after))

    def _stream_object(self, pointer: int) -> Any:
        stream = self._streams.get(pointer)
        if stream is None:
            if len(self._streams) > 64:
                self._streams = {0: 0}
                self._configured.clear()
            stream = self._streams[pointer] = cuda.external_stream(pointer)
        return stream

    def poll(self) -> None:
        """Raise if the device has failed: a query of the stream reports it."""
        _driver.raise_failure(self._stream)

    # ---- memory ------------------------------------------------------------------------------------------------

    def _empty(self, n: int, dtype: Any) -> tuple[Any, int]:
        array = cuda.device_array(n, dtype)
        return array, _address(array)

    def _upload(self, array: np.ndarray) -> Any:
        copy = cuda.to_device(array, stream=self._stream_object(self._stream))
        return _Memory(_address(copy), array.shape, array.strides, array.dtype.str, copy)

    def _vector_of(self, array: np.ndarray) -> DeviceVector:
        copy = self._upload(array)
        return copy.interface["data"][0], 8, 1, array.size, copy

    def _view(self, address: int, shape: tuple, strides: tuple, typestr: str, owner: Any) -> Any:
        """The memory as an array of numba's, without a copy."""
        memory = _Memory(address, shape, strides, typestr, owner)
        if not SIMULATED:
            return cuda.as_cuda_array(memory, sync=False)
        return type(self.words)(_from_address(memory.interface))

    def _entries(self, vector: DeviceVector) -> Any:
        """A vector as the kernels take it: int32 of shape (n, 1), or (n, 2) where it is int64."""
        address, stride, wide, n, owner = vector
        if n == 0:
            return self._nothing
        if address == 0:
            return self._number(stride)
        return self._view(address, (n, 1 + wide), (stride, 4), "<i4", owner)

    def _number(self, value: int) -> Any:
        """A vector of one entry that the host knows, stored by a kernel, so that it may be captured."""
        array, address = self._numbers
        slot, self._numbers_used = address + 8 * self._numbers_used, (self._numbers_used + 1) % CONSTANTS
        view = self._view(slot, (1, 2), (8, 4), "<i4", array)
        self._launch("store_constant", 1, view, value)
        return view

    def _cells(self, table: DeviceTable) -> Any:
        address, step, rows, columns, owner = table
        if rows * columns == 0:
            return self._view(_address(self._nothing), (rows, columns), (4 * columns, 4), "<i4", self._nothing)
        return self._view(address, (rows, columns), (4 * step, 4), "<i4", owner)

    def _slots(self, address: int, n: int) -> Any:
        size = self.index_dtype.itemsize
        return self._entries((address, size, size // 8, n, None))

    def use_library(self, *arrays: Any) -> str:
        """Library in which the result for these arguments leaves."""
        library = super().use_library(*arrays)
        if library == "torch" or not any(type(x).__module__.partition(".")[0] == "cupy" for x in arrays):
            return library
        return "cupy"

    def output(self, library: str, n: int) -> tuple[Any, int]:
        """New array of n slots in that library, and its address."""
        if library != "cupy":
            return super().output(library, n)
        array = sys.modules["cupy"].empty(n, self.index_dtype)
        return array, array.data.ptr

    def vector(self, x: Any, name: str) -> DeviceVector:
        """The argument as the kernels take it; a host array is copied to the device."""
        return super().vector(_as_device(x), name)

    def table(self, x: Any, name: str) -> DeviceTable:
        """The request table as the kernels take it."""
        return super().table(_as_device(x), name)

    def given_array(self, out: Any, name: str, dtype: np.dtype, n: int | None) -> tuple[int, int]:
        """Address and length of an array that the caller gave for a result, checked; None: any length."""
        return super().given_array(_as_device(out), name, dtype, n)

    def new_array(self, library: str, shape: tuple[int, ...], dtype: np.dtype) -> tuple[Any, int]:
        """New array in that library, and its address."""
        if library == "cupy":
            array = sys.modules["cupy"].empty(shape, dtype)
            return array, array.data.ptr
        if library == "torch":
            return super().new_array(library, shape, dtype)
        array = cuda.device_array(shape, dtype)
        return array, _address(array)

    def from_host(self, library: str, array: np.ndarray) -> Any:
        """A new array of that library with these elements."""
        copy = cuda.to_device(np.ascontiguousarray(array), stream=self._stream_object(self._stream))
        return to_torch(copy) if library == "torch" else copy

    def slot_refs(self, x: Any) -> int:
        return super().slot_refs(_as_device(x))

    def _native_zeros(self, shape: tuple[int, ...]) -> Any:
        return cuda.to_device(np.zeros(shape, np.int32))

    def _pinned_array(self, shape: tuple[int, ...]) -> np.ndarray:
        array = cuda.pinned_array(shape, np.int32)
        array[...] = 0
        return array

    def fill_zero(self, array: Any) -> None:
        if library_of(array) == "numba" and not isinstance(array, np.ndarray):
            array.copy_to_device(np.zeros(array.shape, array.dtype), stream=self._stream_object(self._stream))
        else:
            super().fill_zero(array)

    def rows_to_host(self, table: Any, rows: Any) -> np.ndarray:
        return to_host(table)[rows]

    def words_array(self, library: str, word: int) -> Any:
        """View, of shape (), of one word of the pool."""
        view = self._view(_address(self.words) + 8 * word, (), (), "<i8", self.words)
        return to_torch(view) if library == "torch" else view

    def snapshot(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Ring, reference counts and words, as they are after the last op."""
        before = _driver.current_device()
        _driver.set_device(self.index)
        try:
            stream = self._stream_object(self._stream)
            pages, words = self.pages.copy_to_host(stream=stream), self.words.copy_to_host(stream=stream)
            if stream:
                stream.synchronize()
        finally:
            _driver.set_device(before)
        return pages[RING, : self.capacity], pages[REFS], words[:NUM_WORDS]

    def memory(self) -> int:
        """Bytes of state on the device, scratch included."""
        return sum(int(array.nbytes) for array in (self.pages, self.words, *self._scratch))

    # ---- launch ------------------------------------------------------------------------------------------------

    def _launch(self, kernel: str, blocks: int | tuple[int, int], *arguments: Any) -> None:
        key = (kernel, blocks, self._stream)
        launch = self._configured.get(key)
        if launch is None:
            if len(self._configured) > 1024:
                self._configured.clear()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # numba finds small grids wasteful
                launch = self.kernels[kernel][blocks, THREADS, self._stream_object(self._stream)]
            if not SIMULATED:  # its kernels are configured in place
                self._configured[key] = launch
        launch(*arguments)

    @property
    def _op(self) -> tuple[int, int, int]:
        return self.host_op, self.error_ack, int(self.kind)

    # ---- operations --------------------------------------------------------------------------------------------

    def alloc_pages(self, pages: int, out: int) -> None:
        slots = pages * self.page_size
        self._launch("plan_pages", 1, self.words, self.mailbox, pages, *self._op, self.quiet)
        if slots:
            self._launch("write_pages", _blocks(pages), self.pages, self.words, self._slots(out, slots), pages)

    def alloc_extend(self, prefix, seq, last, num_tokens: int, out: int) -> None:
        self._allocate(seq[3], (_NO_VECTOR, prefix, seq, last), num_tokens, out)

    def alloc_decode(self, seq, last, out: int) -> None:
        self._allocate(seq[3], (_NO_VECTOR, _NO_VECTOR, seq, last), seq[3], out)

    def step(self, table, paged: bool, pad_row: int, rows, prefix, seq, num_tokens: int, out: int) -> None:
        tables = OF_PAGES if paged else OF_SLOTS
        vectors = rows, prefix or _NO_VECTOR, seq, _NO_VECTOR
        self._allocate(rows[3], vectors, num_tokens, out, self._cells(table), tables, pad_row)

    def _allocate(self, n, vectors, num_tokens: int, out: int, table=None, tables: int = NO_TABLE, pad_row=0) -> None:
        if n > self.max_batch:
            self._make_scratch(n)
        table = self._nothing if table is None else table
        state, requests = (self.pages, self.words), self._requests
        if n:
            batch = map(self._entries, vectors)
            blocks = _blocks(-(-n // THREADS))
            kind = int(self.kind)
            self._launch("check_requests", blocks, *state, requests, table, *batch, n, tables, pad_row, kind)
        op = *self._op, self.quiet
        self._launch("plan_requests", 1, *state, self.mailbox, self._plan, requests, n, num_tokens, *op)
        if num_tokens:
            grid = _blocks(n), _blocks(num_tokens // (max(n, 1) * THREADS * 4), 64)
            slots = self._slots(out, num_tokens)
            self._launch("write_slots", grid, *state, self._plan, requests, table, slots, n, num_tokens, tables)

    def free_slots(self, slots, push: bool, index_base: int, where: Where) -> None:
        n, entries = slots[3], self._entries(slots)
        if n:
            self._launch("mark_slots", _blocks(-(-n // THREADS)), self.pages, self.words, entries, n)
        self._launch(
            "settle_slots",
            1,
            self.pages,
            self.words,
            self.mailbox,
            entries,
            index_base,
            int(push),
            int(where),
            *self._op,
        )

    def free_pages(self, entries, divisor: int, where: Where) -> None:
        state = self.pages, self.words, self.mailbox
        self._launch("free_page_ids", 1, *state, self._entries(entries), entries[3], divisor, int(where), *self._op)

    def free_rows(self, table, paged: bool, pad_row: int, rows, keep, seq, where: Where) -> None:
        vectors = rows, keep or _NO_VECTOR, seq, _NO_VECTOR
        self._free_rows(self._cells(table), OF_PAGES if paged else OF_SLOTS, pad_row, vectors, _NO_VECTOR, where, 0)

    def free_queue(self, table, rows, begins, ends, entries, where: Where, slot_refs: int) -> None:
        vectors = rows, begins, _NO_VECTOR, ends
        self._free_rows(self._cells(table), OF_PAGES, -1, vectors, entries or _NO_VECTOR, where, slot_refs)

    def _free_rows(self, table, tables: int, pad_row: int, vectors, entries, where: Where, slot_refs: int) -> None:
        n = vectors[0][3]
        if n > self.max_batch:
            self._make_scratch(n)
        if n:
            ranges = map(self._entries, vectors)
            blocks, kind = _blocks(-(-n // THREADS)), int(self.kind)
            self._launch("check_rows", blocks, self.words, self._requests, table, *ranges, n, tables, pad_row, kind)
        counts = self._no_counts
        if slot_refs:
            counts = self._view(slot_refs, ((self.capacity + 1) * self.page_size,), (4,), "<i4", None)
        state = self.pages, self.words, self.mailbox, self._requests, table, self._entries(entries), counts
        self._launch("free_rows", 1, *state, n, tables, int(slot_refs != 0), int(where), *self._op)

    def retain_pages(self, entries) -> None:
        state = self.pages, self.words, self.mailbox
        self._launch("retain_page_ids", 1, *state, self._entries(entries), entries[3], *self._op)

    def sort_free(self, bound: int) -> None:
        self._launch("sort_free", 1, self.pages, self.words, bound)

    def clear(self, num_pages: int) -> None:
        blocks = self._state_blocks()
        self._launch("clear_pool", blocks, self.pages, self.words, self.mailbox, num_pages, *self._op)

    def backup(self) -> Any:
        n = 2 * self.capacity + 6
        array, address = self._empty(n, np.int32)
        saved = self._entries((address, 4, 0, n, array))
        self._launch("backup_pool", self._state_blocks(), self.pages, self.words, self.mailbox, saved, *self._op)
        return array

    def restore(self, saved: Any) -> None:
        entries = self._entries(self.vector(saved, "state"))
        self._launch("restore_pool", self._state_blocks(), self.pages, self.words, self.mailbox, entries, *self._op)

    def refresh(self) -> None:
        self._launch("refresh_pool", 1, self.words, self.mailbox, *self._op)

    def flashinfer_tables(
        self, table, paged: bool, pad_row: int, rows, seq, indptr: int, indices: int, length: int, last: int
    ) -> None:
        n, tables = rows[3], OF_PAGES if paged else OF_SLOTS
        lists = ((indptr, n + 1), (indices, length), (last, n))
        outs = [self._entries((address, 4, 0, entries, None)) for address, entries in lists]
        batch = self._cells(table), self._entries(rows), self._entries(seq)
        blocks = _blocks(-(-length // THREADS))
        self._launch("list_pages", blocks, self.words, *batch, *outs, n, length, tables, pad_row)

    def block_table(self, table, paged: bool, pad_row: int, rows, seq, parts: int, out: DeviceTable) -> None:
        entries, tables = out[2] * out[3], OF_PAGES if paged else OF_SLOTS
        if entries:
            batch = self._cells(table), self._entries(rows), self._entries(seq)
            blocks = _blocks(-(-entries // THREADS))
            self._launch("list_blocks", blocks, self.words, *batch, self._cells(out), parts, tables, pad_row)

    def slot_mapping(self, table, paged: bool, pad_row: int, rows, prefix, seq, num_tokens: int, out: int) -> None:
        n, tables = rows[3], OF_PAGES if paged else OF_SLOTS
        if num_tokens:
            batch = self._cells(table), *map(self._entries, (rows, prefix, seq))
            slots = self._entries((out, 8, 1, num_tokens, None))
            blocks = _blocks(-(-num_tokens // THREADS))
            self._launch("map_slots", blocks, self.words, *batch, slots, n, num_tokens, tables, pad_row)

    def reference_counts(self, entries: DeviceVector, out: int) -> None:
        n = entries[3]
        if n:
            counts = self._entries((out, 4, 0, n, None))
            self._launch(
                "count_references",
                _blocks(-(-n // THREADS)),
                self.pages,
                self.words,
                self._entries(entries),
                counts,
                n,
            )

    def fold(self, entries: DeviceVector, where: Where, cells: int) -> None:
        state = self.pages, self.words, self._entries(entries), self._entries((cells, 8, 1, DIGEST_CELLS, None))
        self._launch("fold_digest", 1, *state, entries[3], int(where))

    def _copy_entries(self, vector: DeviceVector, address: int) -> None:
        n = vector[3]
        if n:
            out = self._entries((address, 8, 1, n, None))
            self._launch("queue_entries", _blocks(-(-n // THREADS)), self._entries(vector), out, n)

    def _state_blocks(self) -> int:
        return _blocks(self.capacity // THREADS + 1)

    def warmup(self) -> None:
        """Nothing is left to do: every kernel was compiled and run when the backend was made."""


def _blocks(wanted: int, most: int = MOST_BLOCKS) -> int:
    """A power of two, so that few grids occur; every kernel steps over the rest."""
    if SIMULATED:
        return 2 if wanted > 1 else 1
    return min(most, 1 << max(0, wanted - 1).bit_length())


class _HostMemory:
    """Memory of the host as what ``__array_interface__`` describes: what the simulator's devices have."""

    def __init__(self, interface: dict) -> None:
        self.__array_interface__ = interface


def _from_address(interface: dict) -> np.ndarray:
    return np.asarray(_HostMemory(interface))


def _address(array: Any) -> int:
    if SIMULATED:
        return int(array.ctypes.data)
    return int(array.__cuda_array_interface__["data"][0] or 0)


def _as_device(x: Any) -> Any:
    """The simulator's arrays do not say that they are on a device."""
    if SIMULATED and not is_on_gpu(x) and getattr(x, "__cuda_ndarray__", False):
        return _Memory(x.ctypes.data, tuple(x.shape), x.strides, x.dtype.str, x)
    return x
