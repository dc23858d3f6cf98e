"""numba.cuda kernels: the cross-check of the CUDA C, and the fallback on a GPU without CuPy.

Built differently on purpose. A block gives each thread a contiguous share of the batch, or of the pages; the threads
add their shares up in shared memory, thread 0 adds those sums and commits, and each thread walks its share again.
Where entries of one page must be taken in turn, a page belongs to one thread, which takes all its entries in order.
No shuffles, no ballots, and of atomics one minimum: all of it also runs in numba's simulator.

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
from cupaged.backends.layout import (
    INT32_LARGEST,
    MAIL_WORDS,
    NUM_WORDS,
    STATE_WORDS,
    WHOLE_BATCH,
    Breach,
    Kind,
    Status,
    Where,
    Word,
)
from cupaged.errors import CaptureError
from cupaged.interop import DeviceVector, is_on_gpu, to_torch

__all__ = ["NumbaCudaBackend", "probe"]

SIMULATED = bool(config.ENABLE_CUDASIM)
THREADS = 4 if SIMULATED else 128  # of every block: the simulator starts a thread of the host for each
MOST_BLOCKS = 1024

RING, REFS, MARKS, FIRST_INDEX = range(4)  # rows of `pages`
TOUCHED, GONE = 1, 2  # marks of a page: by the call that runs; freed, but not in the ring yet
LOWEST, CAPACITY, PAGE_SIZE, STRICT, REFUSED_SLOT, ALL_WORDS = range(NUM_WORDS, NUM_WORDS + 6)
assert ALL_WORDS == STATE_WORDS + 4

# Plain integers: numba takes an enum's members as objects of their own.
HEAD, FREE, STAGED, SHARED, OP = map(int, (Word.HEAD, Word.FREE, Word.STAGED, Word.SHARED, Word.OP))
HOST_OP, NUM_PAGES, STATUS, RET, OK = map(int, (Word.HOST_OP, Word.NUM_PAGES, Word.STATUS, Word.RET, Word.OK))
REFUSALS, ALLOCATED, FREED, PEAK = map(int, (Word.REFUSALS, Word.ALLOCATED, Word.FREED, Word.PEAK))
FIRST, TOKENS, ERROR_CODE, ERROR_OP = map(int, (Word.FIRST, Word.TOKENS, Word.ERROR_CODE, Word.ERROR_OP))
ERROR_INDEX, ERROR_VALUE = int(Word.ERROR_INDEX), int(Word.ERROR_VALUE)
STATUS_OK, STATUS_SHORT, STATUS_REFUSED = map(int, (Status.OK, Status.SHORT, Status.REFUSED))
NONE, SHORT, LENGTH, SUM, MISALIGNED = map(
    int, (Breach.NONE, Breach.SHORT, Breach.LENGTH, Breach.SUM, Breach.MISALIGNED)
)
RANGE, FREE_PAGE, SHARED_PAGE, DOUBLE_FREE = map(
    int, (Breach.RANGE, Breach.FREE_PAGE, Breach.SHARED_PAGE, Breach.DOUBLE_FREE)
)
FRONT, BACK = int(Where.FRONT), int(Where.BACK)
DECODE = int(Kind.DECODE)
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
    """``numba.cuda``, which the package numba-cuda redirects to itself where it is installed."""
    from numba import cuda

    return cuda


def _import_built_in() -> Any:
    """The target inside numba, behind a numba-cuda package that does not load; None if that is not what is wrong."""
    redirects = [finder for finder in sys.meta_path if _is_redirect(finder)]
    if "numba.cuda" in sys.modules or not redirects:
        return None
    for finder in redirects:
        sys.meta_path.remove(finder)
    for name in [name for name in sys.modules if name.startswith("numba.cuda.")]:
        del sys.modules[name]  # the half that was loaded
    return _import_numba_cuda()


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
        array = found.device_array(1, np.int32)
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
        ("numba's built-in CUDA target", _import_built_in),
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
    """Post the words to the host, under a sequence that is odd meanwhile; one thread."""
    words[STATUS] = status
    words[OK] = 1 if status == STATUS_OK else 0
    sequence = 2 * words[OP]
    mail[0] = sequence - 1
    cuda.threadfence_system()
    for i in range(NUM_WORDS):
        mail[1 + i] = words[i]
    cuda.threadfence_system()
    mail[0] = sequence


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
def request_at(kind, prefix, seq, last, i):
    length = at(seq, i)
    if kind != DECODE:
        return at(prefix, i), length, at(last, i)
    return greater(length, np.int64(0)) - 1, length, at(last, i)  # a decode of nothing has a negative prefix


@_device
def pages_of(words, tokens):
    return (tokens + words[PAGE_SIZE] - 1) // words[PAGE_SIZE]


@_device
def breach_of(pages, words, prefix, seq, last):
    """What is wrong with a request, and whether to carry on (1) as the classic kernels do."""
    if prefix < 0 or seq < prefix or seq > INT32_LARGEST:
        return LENGTH, 0
    size = words[PAGE_SIZE]
    offset = prefix % size
    if offset == 0 or seq == prefix:  # no old page is written
        return NONE, 0
    page = page_of(last, size)
    if not is_page(words, page):
        return RANGE, 0
    if pages[REFS, page] == 0:
        return FREE_PAGE, 0
    if pages[REFS, page] > 1:
        return SHARED_PAGE, 0
    found = last % size + 1
    if found == offset:
        return NONE, 0
    ends = found + lesser(seq - prefix, size - offset)
    return MISALIGNED, 1 if words[STRICT] == 0 and ends <= size else 0


@_device
def decide(words, kind, quiet, needed, tokens, num_tokens, refused):
    """Take all the pages or none; returns the status."""
    status = STATUS_REFUSED if refused != 0 else STATUS_OK
    if status == STATUS_OK and tokens != num_tokens:
        record(words, kind, SUM, WHOLE_BATCH, tokens)
        if words[STRICT] != 0 or tokens > num_tokens:
            status = STATUS_REFUSED
    if status == STATUS_OK and needed > words[FREE]:
        if quiet == 0:
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
    words[RET] = needed << 32 | tokens
    return status


@_kernel(_STATE, "int64[::1], int32[:,::1]", _VECTOR, _VECTOR, _VECTOR, "int64, int64", _OP, "int64")
def plan_requests(pages, words, mail, plan, prefix, seq, last, n, num_tokens, host_op, error_ack, kind, quiet):
    # One block. `plan` gets each request's new pages and tokens before it, if the batch is granted.
    page_shares = cuda.shared.array(THREADS, np.int64)
    token_shares = cuda.shared.array(THREADS, np.int64)
    breach_shares = cuda.shared.array(THREADS, np.int64)
    refused_shares = cuda.shared.array(THREADS, np.int64)
    thread = cuda.threadIdx.x
    begin, end = share(n, thread)
    new_pages, tokens, breach_here, refused = 0, 0, NO_BREACH, 0
    for i in range(begin, end):
        before, length, slot = request_at(kind, prefix, seq, last, i)
        breach, carry_on = breach_of(pages, words, before, length, slot)
        if breach != NONE:
            breach_here = lesser(breach_here, i << 8 | breach)
            refused |= 1 - carry_on
        if breach != LENGTH:
            new_pages += pages_of(words, length) - pages_of(words, before)
            tokens += length - before
    page_shares[thread], token_shares[thread] = new_pages, tokens
    breach_shares[thread], refused_shares[thread] = breach_here, refused
    cuda.syncthreads()
    if thread == 0:
        begin_op(words, host_op, error_ack)
        lowest = least_of(breach_shares)
        if lowest != NO_BREACH:
            before, length, slot = request_at(kind, prefix, seq, last, lowest >> 8)
            breach = lowest & 255
            record(words, kind, breach, lowest >> 8, length if breach == LENGTH else slot)
        needed, all_tokens = running_sum(page_shares), running_sum(token_shares)
        status = decide(words, kind, quiet, needed, all_tokens, num_tokens, sum_of(refused_shares))
        end_op(words, mail, status)
    cuda.syncthreads()
    if words[OK] == 0:
        return
    new_pages, tokens = page_shares[thread], token_shares[thread]
    for i in range(begin, end):
        before, length, slot = request_at(kind, prefix, seq, last, i)
        plan[0, i], plan[1, i] = new_pages, tokens
        new_pages += pages_of(words, length) - pages_of(words, before)
        tokens += length - before


@_kernel(_STATE, "int32[:,::1]", _VECTOR, _VECTOR, _VECTOR, _VECTOR, "int64, int64, int64")
def write_slots(pages, words, plan, prefix, seq, last, out, n, num_tokens, kind):
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
        before, length, slot = request_at(kind, prefix, seq, last, i)
        old_pages = pages_of(words, before)
        position = words[FIRST] + plan[0, i] - old_pages
        first = plan[1, i]
        for token in range(before + thread, length, step):
            where = first + token - before
            nth = token // size
            if nth < old_pages:
                put(out, where, slot + 1 + token - before)
                continue
            page = np.int64(pages[RING, (position + nth) % words[CAPACITY]])
            if token % size == 0:
                pages[REFS, page] = 1
            put(out, where, page * size + token % size)


@_kernel("int64[::1], int64[::1], int64", _OP, "int64")
def plan_pages(words, mail, count, host_op, error_ack, kind, quiet):
    if cuda.threadIdx.x == 0:
        begin_op(words, host_op, error_ack)
        tokens = count * words[PAGE_SIZE]
        end_op(words, mail, decide(words, kind, quiet, count, tokens, tokens, 0))


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
        if is_page(words, page) and pages[FIRST_INDEX, page] == i + 1 and pages[REFS, page] == 0:
            gone += 1
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
        if is_page(words, page) and pages[FIRST_INDEX, page] == i + 1 and pages[REFS, page] == 0:
            pages[RING, position % words[CAPACITY]] = page
            position += 1
    cuda.syncthreads()
    for i in range(begin, end):
        page = page_of(at(entries, i), divisor)
        if is_page(words, page):
            pages[FIRST_INDEX, page] = 0


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
    return k if k < 4 else NUM_PAGES  # as in layout.SAVED_WORDS


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


# ---- the backend ---------------------------------------------------------------------------------------------------


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
        self.mail = self._mail_host.data
        self._nothing = cuda.device_array((1, 1), np.int32)
        self._make_scratch(self.max_batch)

    def _make_scratch(self, batch: int) -> None:
        if self.captured:
            raise CaptureError(
                f"a batch of {batch} is larger than max_batch, {self.max_batch}, and scratch cannot grow after a "
                "capture; make the allocator with a larger max_batch"
            )
        self.max_batch = batch
        self._plan = cuda.device_array((2, batch), np.int32)

    def _first_launches(self) -> None:
        """Run every kernel once, since what a first launch loads must not wait for a caller; then start from zero."""
        one = self._vector_of(np.ones(1, np.int64))
        _, slots = self._empty(self.page_size, self.index_dtype)
        self.clear(self.capacity)
        self.alloc_pages(1, slots)
        self.alloc_extend(self._vector_of(np.zeros(1, np.int64)), one, one, 1, slots)
        self.alloc_decode(one, one, slots)
        self.free_slots(one, True, 0)
        self.free_pages(one, 1, Where.FRONT)
        self.retain_pages(one)
        self.sort_free(0)
        self.restore(self.backup())
        self.refresh()
        _, entry = self._empty(1, np.int64)
        self._copy_entries(one, entry)
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
        memory.__array_interface__ = memory.interface  # type: ignore[attr-defined]
        return type(self.words)(np.asarray(memory))

    def _entries(self, vector: DeviceVector) -> Any:
        """A vector as the kernels take it: int32 of shape (n, 1), or (n, 2) where it is int64."""
        address, stride, wide, n, owner = vector
        if n == 0:
            return self._nothing
        return self._view(address, (n, 1 + wide), (stride, 4), "<i4", owner)

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

    def given_output(self, out: Any, n: int) -> int:
        """Address of the caller's `out`, checked."""
        return super().given_output(_as_device(out), n)

    def from_host(self, library: str, array: np.ndarray) -> Any:
        """A new array of that library with these elements."""
        copy = cuda.to_device(np.ascontiguousarray(array), stream=self._stream_object(self._stream))
        return to_torch(copy) if library == "torch" else copy

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
        return sum(int(array.nbytes) for array in (self.pages, self.words, self._plan))

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
        self._allocate(prefix, seq, last, num_tokens, out)

    def alloc_decode(self, seq, last, out: int) -> None:
        self._allocate(seq, seq, last, seq[3], out)

    def _allocate(self, prefix, seq, last, num_tokens: int, out: int) -> None:
        n = seq[3]
        if n > self.max_batch:
            self._make_scratch(n)
        state, batch = (self.pages, self.words), tuple(map(self._entries, (prefix, seq, last)))
        self._launch(
            "plan_requests", 1, *state, self.mailbox, self._plan, *batch, n, num_tokens, *self._op, self.quiet
        )
        if num_tokens:
            grid = _blocks(n), _blocks(num_tokens // (max(n, 1) * THREADS * 4), 64)
            slots = self._slots(out, num_tokens)
            self._launch("write_slots", grid, *state, self._plan, *batch, slots, n, num_tokens, int(self.kind))

    def free_slots(self, slots, push: bool, index_base: int) -> None:
        n, entries = slots[3], self._entries(slots)
        where = int(Where.STAGE if self.need_sort else Where.FRONT)
        if n:
            self._launch("mark_slots", _blocks(-(-n // THREADS)), self.pages, self.words, entries, n)
        self._launch(
            "settle_slots", 1, self.pages, self.words, self.mailbox, entries, index_base, int(push), where, *self._op
        )

    def free_pages(self, entries, divisor: int, where: Where) -> None:
        state = self.pages, self.words, self.mailbox
        self._launch("free_page_ids", 1, *state, self._entries(entries), entries[3], divisor, int(where), *self._op)

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


def _address(array: Any) -> int:
    if SIMULATED:
        return int(array.ctypes.data)
    return int(array.__cuda_array_interface__["data"][0] or 0)


def _as_device(x: Any) -> Any:
    """The simulator's arrays do not say that they are on a device."""
    if SIMULATED and not is_on_gpu(x) and getattr(x, "__cuda_ndarray__", False):
        return _Memory(x.ctypes.data, tuple(x.shape), x.strides, x.dtype.str, x)
    return x
