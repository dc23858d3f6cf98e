"""Random batches on every backend against `reference`: the engine of ``cupaged check``.

A *case* is one small pool and a list of ops with concrete arguments; it runs on the reference and, in step, on the
backends in question. Ops come in bursts, so that a GPU has several of them queued before anybody waits, and all that
can be seen is compared at the end of a burst. The first difference is cut down to a short list of ops, which prints
as Python.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from cupaged import backends
from cupaged.errors import DeviceError
from cupaged.geometry import pages_taken
from cupaged.interop import to_host
from cupaged.paged import PagedTokenToKVPoolAllocator

__all__ = ["Case", "Difference", "Op", "Report", "check", "compare", "shrink"]

PAGE_SIZES = (1, 2, 3, 16, 48, 64, 256)
OPS_A_CASE = 48
SHRINK_RUNS = 600
SHRINK_SECONDS = 20.0
SHOWN = 12  # entries of a long list


@dataclass(frozen=True)
class Op:
    """One call: a method of the allocator and concrete arguments.

    Attributes
    ----------
    name : str
        Method; ``backup`` and ``restore`` stand for those of the state, with the checker keeping it.
    args : tuple
        Positional arguments, integers and lists of integers.
    kwargs : dict
        Keyword arguments of the same kinds. ``num_pages=True`` has the true count filled in, and ``out=True`` an
        array.
    forms : tuple of str
        How each list is handed over: ``list``, ``int32`` or ``int64``, ``strided`` (every second entry of an int64
        array), each of the last three also on the device (``int32@device``) where there is one.
    """

    name: str
    args: tuple = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    forms: tuple[str, ...] = ()

    def __str__(self) -> str:
        words = [_short(a, form) for a, form in zip(self.args, (*self.forms, *["list"] * 9), strict=False)]
        words += [f"{k}={_short(v)}" for k, v in self.kwargs.items() if v is not True]
        return f"pool.{_METHOD.get(self.name, self.name)}({', '.join(words)})"


_METHOD = {"backup": "backup_state", "restore": "restore_state"}


def _short(value: Any, form: str = "list") -> str:
    if not isinstance(value, list):
        return str(value)
    first = ", ".join(map(str, value[:SHOWN]))
    text = f"[{first}]" if len(value) <= SHOWN else f"[{first}, ... {len(value)} in all]"
    return text if form == "list" else f"{text} as {form}"


@dataclass(frozen=True)
class Case:
    """A pool, and what is done to it.

    Attributes
    ----------
    options : dict
        Keyword arguments of `PagedTokenToKVPoolAllocator`, `size` and `page_size` among them.
    ops : list of Op
        In order.
    bursts : list of int
        Ops between two comparisons, in turn; a recorded error ends a burst early.
    """

    options: dict[str, Any]
    ops: list[Op]
    bursts: tuple[int, ...] = (1,)

    def __str__(self) -> str:
        words = ", ".join(f"{k}={v!r}" for k, v in self.options.items())
        return "\n".join((f"pool = PagedTokenToKVPoolAllocator({words})", *map(str, self.ops)))


@dataclass(frozen=True)
class Difference:
    """What a backend did that the reference did not.

    Attributes
    ----------
    backend : str
        Which.
    case : Case
        Ops up to the one in question.
    what : str
        What was compared: a result, an error, the free list, a counter.
    expected, got : str
        By the reference, and by the backend.
    """

    backend: str
    case: Case
    what: str
    expected: str
    got: str

    def __str__(self) -> str:
        return f"{self.case}\n{self.what}\n  reference: {self.expected}\n  {self.backend}: {self.got}"


@dataclass
class Report:
    """How a check went.

    Attributes
    ----------
    seed, cases, ops : int
        What to run again, pools made, and ops run on each backend.
    refused, short, errors : int
        Ops whose recorded error, ``None`` or exception was compared.
    seconds : float
        Wall time.
    backends : list of str
        Compared with the reference.
    difference : Difference or None
        The first one, made small.
    failed_case : int or None
        Number of the case that showed it.
    """

    seed: int
    backends: list[str]
    cases: int = 0
    ops: int = 0
    refused: int = 0
    short: int = 0
    errors: int = 0
    seconds: float = 0.0
    difference: Difference | None = None
    failed_case: int | None = None


# ---- running a case ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Raised:
    """An exception, as far as it must be the same on every backend."""

    text: str
    recorded: bool = False  # on the device, and raised by the op itself since it runs in debug mode

    def __str__(self) -> str:
        return self.text


def _raised(error: Exception) -> _Raised:
    if isinstance(error, DeviceError):
        return _Raised(f"{type(error).__name__}(index {error.index}, value {error.value})", True)
    if isinstance(error, TypeError | ValueError):
        return _Raised(type(error).__name__)
    return _Raised(f"{type(error).__name__}: {error}")


def make_allocator(backend: str, options: dict[str, Any]) -> PagedTokenToKVPoolAllocator:
    """The allocator that a case runs on."""
    return PagedTokenToKVPoolAllocator(backend=backend, **options)


class _Player:
    """One allocator that ops are run on."""

    def __init__(self, backend: str, options: dict[str, Any]) -> None:
        self.name, self.pool = backend, make_allocator(backend, options)
        self.on_gpu = self.pool.device != "cpu"
        self.state: Any = None

    def run(self, op: Op, num_pages: int) -> Any:
        """Outcome of an op: what it returned, still on its device, or what it raised."""
        try:
            return self._call(op, num_pages)
        except Exception as error:
            return _raised(error)

    def _call(self, op: Op, num_pages: int) -> Any:
        if op.name == "backup":
            self.state = self.pool.backup_state()
            return None
        if op.name == "restore":
            return None if self.state is None else self.pool.restore_state(self.state)
        kwargs = dict(op.kwargs)
        if kwargs.get("num_pages") is True:
            kwargs["num_pages"] = num_pages
        forms = iter(op.forms)
        args = [self._array(a, next(forms, "list")) if isinstance(a, list) else a for a in op.args]
        if kwargs.pop("out", False):
            n = op.args[3] if op.name == "alloc_extend" else len(op.args[0])
            kwargs["out"] = out = self._native(np.full(n, -7, self.pool.backend.index_dtype))
            result = getattr(self.pool, op.name)(*args, **kwargs)
            return result if result is None or result is out else _Raised("another array than out=")
        return getattr(self.pool, op.name)(*args, **kwargs)

    def _array(self, values: list[int], form: str) -> Any:
        kind, _, where = form.partition("@")
        if kind == "list":
            return list(values)
        dtype = np.int32 if kind == "int32" and all(-(2**31) <= v < 2**31 for v in values) else np.int64
        array = np.array(values, dtype)
        if kind == "strided":
            array = np.repeat(array, 2)
        if where and self.on_gpu:
            array = self._native(array)
        return array[::2] if kind == "strided" and len(values) else array  # numba cannot slice nothing

    def _native(self, array: np.ndarray) -> Any:
        """Copy to the device, in the backend's own library."""
        return self.pool.backend.from_host(self.pool.backend.native, array) if self.on_gpu else array

    def error(self) -> str:
        """The recorded error, taken."""
        try:
            self.pool.check()
        except DeviceError as error:
            return str(_raised(error))
        return "none"

    def snapshot(self) -> dict[str, Any]:
        """All that can be seen of the pool."""
        counters = self.pool.stats()
        return {
            "available_size()": self.pool.available_size(),
            "free_pages": to_host(self.pool.free_pages),
            "staged_pages": to_host(self.pool.staged_pages),
            "shared pages": counters.shared_pages,
            "peak of owned pages": counters.peak_pages,
            "pages ever allocated": counters.pages_allocated,
            "pages ever freed": counters.pages_freed,
        }


class _Run:
    """A case in progress: the reference, the backends, and what they have to be compared for."""

    def __init__(self, options: dict[str, Any], names: Sequence[str], bursts: tuple[int, ...]) -> None:
        self.options, self.bursts = options, bursts
        self.reference = _Player("reference", options)
        self.others = [_Player(name, options) for name in names]
        self.ops: list[Op] = []
        self.pending: list[tuple[int, Any, list[Any]]] = []
        self.burst = 0
        self.error = self.recorded = "none"  # of this burst, not compared yet; and of the last op
        self.in_group = False
        self.touched: set[int] = set()  # pages that the open group has touched

    def step(self, op: Op) -> tuple[Any, Difference | None]:
        """Run one op everywhere; its outcome on the reference, and a difference if one was seen."""
        count = self._count_pages(op)
        free = self.reference.pool.available_size() // self.options["page_size"]
        expected = self.reference.run(op, count)
        self.error = self.recorded = self.reference.error()
        got = [player.run(op, count) for player in self.others]
        self.ops.append(op)
        wrong = self.error != "none" or (isinstance(expected, _Raised) and expected.recorded)
        if wrong and any(g is None for g in got) and _pages_needed(op, self.options["page_size"]) > free:
            # Short and wrong at once: a host that knows the lengths says None without asking the device.
            expected, self.error, got = None, "none", [None] * len(got)
            for player in self.others:
                player.error()
        self.pending.append((len(self.ops), expected, got))
        raised = isinstance(expected, _Raised) or any(isinstance(g, _Raised) for g in got)
        if raised or self.error != "none" or len(self.pending) >= self.bursts[self.burst % len(self.bursts)]:
            return expected, self.settle()
        return expected, None

    def _count_pages(self, op: Op) -> int:
        """Pages that a free gives back, as a caller that knows what it does would count them."""
        if op.name in ("free_group_begin", "free_group_end", "clear", "resize", "restore"):
            self.touched.clear()
            self.in_group = op.name == "free_group_begin"
        if op.name != "free":
            return 0
        pages = {s // self.options["page_size"] for s in op.args[0]} - self.touched
        if self.in_group:
            self.touched |= pages
        refs = self.reference.pool.backend.ref_count
        return sum(1 <= p < len(refs) and refs[p] > 0 for p in pages)

    def settle(self) -> Difference | None:
        """End a burst: compare everything."""
        pending, self.pending, self.burst = self.pending, [], self.burst + 1
        recorded, self.error = self.error, "none"
        for i, player in enumerate(self.others):
            for number, expected, got in pending:
                if not _same(expected, got[i]):
                    return self._difference(player, number, f"result of op {number}", expected, got[i])
            error = player.error()
            if error != recorded:
                return self._difference(player, len(self.ops), "recorded error", recorded, error)
        expected_view = self.reference.snapshot()
        for player in self.others:
            for what, value in player.snapshot().items():
                if not np.array_equal(value, expected_view[what]):
                    return self._difference(player, len(self.ops), what, expected_view[what], value)
            try:
                player.pool.check_integrity()
            except Exception as error:
                return self._difference(player, len(self.ops), "check_integrity()", "nothing", _raised(error))
        return None

    def _difference(self, player: _Player, number: int, what: str, expected: Any, got: Any) -> Difference:
        case = Case(self.options, self.ops[:number], self.bursts)
        return Difference(player.name, case, what, *_show(expected, got))


def _same(expected: Any, got: Any) -> bool:
    if expected is None or got is None or isinstance(expected, _Raised) or isinstance(got, _Raised):
        return expected == got if type(expected) is type(got) else False
    a, b = to_host(expected), to_host(got)
    return a.dtype == b.dtype and np.array_equal(a, b)


def _show(expected: Any, got: Any) -> tuple[str, str]:
    """Both as text; of long arrays only the neighbourhood of the first entry that differs."""
    a, b = (to_host(x) if hasattr(x, "shape") else x for x in (expected, got))
    start = 0
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        n = min(a.size, b.size)
        differs = a[:n] != b[:n]
        start = max(0, int(differs.argmax()) - 2) if differs.any() else max(0, n - 2)
    return _window(a, start), _window(b, start)


def _window(value: Any, start: int) -> str:
    if not isinstance(value, np.ndarray):
        return str(value)
    if value.size <= SHOWN:
        return f"{value.tolist()}, {value.dtype}"
    return f"[{start}:{start + SHOWN}] = {value[start : start + SHOWN].tolist()}, {value.size} {value.dtype} in all"


def _pages_needed(op: Op, page_size: int) -> int:
    """Pages that an allocation takes by the lengths that its host knows."""
    if op.name not in ("alloc_extend", "alloc_decode"):
        return 0
    after = np.array(op.kwargs.get("seq_lens_cpu", op.args[op.name == "alloc_extend"]), np.int64)
    before = after - 1
    if op.name == "alloc_extend":
        before = np.array(op.kwargs.get("prefix_lens_cpu", op.args[0]), np.int64)
    return pages_taken(before, after, page_size) if before.shape == after.shape else 0


_LENGTHS = ("prefix_lens", "seq_lens")


def compare(case: Case, names: Sequence[str]) -> Difference | None:
    """Run a case on the reference and on these backends.

    Parameters
    ----------
    case : Case
        What to do.
    names : sequence of str
        Backends.

    Returns
    -------
    Difference or None
        The first one.
    """
    run = _Run(case.options, names, case.bursts)
    for op in case.ops:
        difference = run.step(op)[1]
        if difference is not None:
            return difference
    return run.settle()


# ---- making a difference small -------------------------------------------------------------------------------------


def shrink(difference: Difference, *, runs: int = SHRINK_RUNS, seconds: float = SHRINK_SECONDS) -> Difference:
    """Cut a difference down: fewer ops, shorter batches, a smaller pool, as long as the backend still differs.

    Parameters
    ----------
    difference : Difference
        From `compare`.
    runs, seconds : optional
        What it may cost.
    """
    end, left = time.monotonic() + seconds, [runs]

    def attempt(case: Case) -> Difference | None:
        if left[0] <= 0 or time.monotonic() > end:
            return None
        left[0] -= 1
        return compare(case, [difference.backend])

    # Compared after each op, if it shows then too: only faults of ops that are queued together need the bursts.
    found = attempt(replace(difference.case, bursts=(1,))) or difference
    changed = True
    while changed and left[0] > 0 and time.monotonic() < end:
        shorter = _fewer_ops(found, attempt)
        smaller = _smaller_pool(_shorter_batches(shorter, attempt), attempt)
        changed, found = smaller is not found, smaller
    return found


def _fewer_ops(found: Difference, attempt: Callable[[Case], Difference | None]) -> Difference:
    chunk = max(1, len(found.case.ops) // 2)
    while True:
        i = 0
        while i < len(found.case.ops):
            ops = found.case.ops
            again = attempt(replace(found.case, ops=ops[:i] + ops[i + chunk :]))
            if again is None:
                i += chunk
            else:
                found = again
        if chunk == 1:
            return found
        chunk //= 2


def _shorter_batches(found: Difference, attempt: Callable[[Case], Difference | None]) -> Difference:
    i = -1
    while (i := i + 1) < len(found.case.ops):
        n = max((len(a) for a in found.case.ops[i].args if isinstance(a, list)), default=0)
        chunk = n // 2
        while chunk:
            start = 0
            while start < n and i < len(found.case.ops):
                ops = list(found.case.ops)
                ops[i] = _without(ops[i], start, chunk)
                again = attempt(replace(found.case, ops=ops))
                if again is None:
                    start += chunk
                else:
                    found, n = again, n - chunk
            chunk //= 2
    return found


def _smaller_pool(found: Difference, attempt: Callable[[Case], Difference | None]) -> Difference:
    while found.case.options["size"] >= 2 * found.case.options["page_size"]:
        options = {**found.case.options, "size": found.case.options["size"] // 2}
        again = attempt(replace(found.case, options=options))
        if again is None:
            return found
        found = again
    return found


def _without(op: Op, start: int, count: int) -> Op:
    """The op without some entries of its lists."""

    def cut(value: Any) -> Any:
        return value[:start] + value[start + count :] if isinstance(value, list) else value

    args = [cut(a) for a in op.args]
    kwargs = {k: cut(v) for k, v in op.kwargs.items()}
    if op.name == "alloc_extend":
        before, after = kwargs.get("prefix_lens_cpu", args[0]), kwargs.get("seq_lens_cpu", args[1])
        args[3] = max(0, sum(after) - sum(before))
    return replace(op, args=tuple(args), kwargs=kwargs)


# ---- making cases --------------------------------------------------------------------------------------------------


class _Author:
    """Thinks of ops as a serving engine with bugs would: keeps requests, and now and then breaks a rule."""

    def __init__(self, rng: np.random.Generator, options: dict[str, Any]) -> None:
        self.rng, self.page_size = rng, options["page_size"]
        self.capacity = options["size"] // self.page_size
        self.num_pages = self.capacity
        self.requests: list[list[int]] = []  # the slots of each
        self.extra: list[list[int]] = []  # page ids that `retain` gave one owner more
        self.freed: list[int] = []  # slots that were given back
        self.saved: tuple | None = None
        self.in_group = False

    def next(self) -> tuple[Op, Callable[[Any], None]]:
        """An op, and what to do with its outcome."""
        name = str(self.rng.choice(_NAMES, p=_WEIGHTS))
        return getattr(self, f"_{name}")()

    # -- chance

    def _int(self, low: int, high: int) -> int:
        return int(self.rng.integers(low, high + 1))

    def _maybe(self, share: float) -> bool:
        return bool(self.rng.random() < share)

    def _some(self, items: Sequence, most: int) -> list[int]:
        """Indices of some of the items, in any order."""
        if not items:
            return []
        return self.rng.permutation(len(items))[: self._int(1, most)].tolist()

    def _forms(self, count: int) -> tuple[str, ...]:
        where = "@device" if self._maybe(0.5) else ""
        kinds = ("int32", "int64", "strided") if where else ("list", "int32", "int64", "strided")
        return tuple(str(self.rng.choice(kinds)) + where for _ in range(count))

    # -- allocations

    def _extend(self) -> tuple[Op, Callable[[Any], None]]:
        old = self._some(self.requests, 6) if self._maybe(0.6) else []
        fresh = self._int(0, 6)
        if self._maybe(0.03):
            fresh = self._int(1030, 4200)  # more requests than a block has threads
        kept = [self.requests[i] for i in old] + [[] for _ in range(fresh)]
        most = 1 if fresh > 100 else 3 * self.page_size + 2
        count = [0 if self._maybe(0.15) else self._int(0, most) for _ in kept]
        prefix = [len(r) for r in kept]
        seq = [p + c for p, c in zip(prefix, count, strict=True)]
        last = [r[-1] if r else -1 for r in kept]

        def then(slots: Any) -> None:
            if slots is None or isinstance(slots, _Raised):
                return
            at = 0
            for request, c in zip(kept, count, strict=True):
                request.extend(slots[at : at + c])
                at += c
            self.requests += [r for r in kept[len(old) :] if r]

        op = Op("alloc_extend", (prefix, seq, last, sum(count)), self._extras(), self._forms(3))
        if not kept or not self._maybe(0.08):
            return self._with_lengths(op), then
        return self._spoil_extend(op), self._nothing

    def _decode(self) -> tuple[Op, Callable[[Any], None]]:
        chosen = self._some(self.requests, len(self.requests)) if self._maybe(0.5) else range(len(self.requests))
        kept = [self.requests[i] for i in chosen]
        seq, last = [len(r) + 1 for r in kept], [r[-1] for r in kept]

        def then(slots: Any) -> None:
            if slots is not None and not isinstance(slots, _Raised):
                for request, slot in zip(kept, slots, strict=True):
                    request.append(slot)

        op = Op("alloc_decode", (seq, last), self._extras(), self._forms(2))
        if not kept or not self._maybe(0.08):
            return self._with_lengths(op), then
        return self._spoil_decode(op), self._nothing

    def _extras(self) -> dict[str, Any]:
        return {"out": True} if self._maybe(0.1) else {}

    def _with_lengths(self, op: Op) -> Op:
        if self._maybe(0.6):
            return op
        names = _LENGTHS if op.name == "alloc_extend" else _LENGTHS[1:]
        known = {f"{name}_cpu": op.args[i] for i, name in enumerate(names)}
        return replace(op, kwargs={**op.kwargs, **known})

    def _spoil_extend(self, op: Op) -> Op:
        prefix, seq, last = (list(a) for a in op.args[:3])
        total, i = op.args[3], self._int(0, len(prefix) - 1)
        way = self._int(0, 3)
        if way == 0:
            last[i] = self._wrong_slot(last[i])
        elif way == 1:  # what a host sees at once
            seq[i] = prefix[i] - 1
            return replace(op, args=(prefix, seq, last, total), forms=("list",) * 3)
        elif way == 2:
            return replace(op, args=(prefix, seq, last, total + 1), forms=("list",) * 3)
        else:  # what only the kernel sees, since the lengths that the host is given are right
            known = {"prefix_lens_cpu": list(prefix), "seq_lens_cpu": list(seq)}
            if self._maybe(0.5):
                prefix[i] = -self._int(1, 5)
            else:
                seq[i] = self._int(0, 2**31 + 3) if self._maybe(0.5) else prefix[i] - 1
            return replace(op, args=(prefix, seq, last, total), kwargs={**op.kwargs, **known})
        return replace(op, args=(prefix, seq, last, total))

    def _spoil_decode(self, op: Op) -> Op:
        seq, last = (list(a) for a in op.args)
        i = self._int(0, len(seq) - 1)
        way = self._int(0, 2)
        if way == 0:
            last[i] = self._wrong_slot(last[i])
        elif way == 1:
            seq[i] = -self._int(0, 3)
            return replace(op, args=(seq, last), forms=("list",) * 2)
        else:
            known = {"seq_lens_cpu": list(seq)}
            seq[i] = int(self.rng.choice([0, -1, 2**31, 2**40, -(2**62)]))
            return replace(op, args=(seq, last), kwargs={**op.kwargs, **known})
        return replace(op, args=(seq, last))

    def _wrong_slot(self, slot: int) -> int:
        beyond = (self.num_pages + 1) * self.page_size
        choices = [slot + 1, slot - 1, slot + self.page_size, -1, 0, beyond, 2**40, -(2**40), *self.freed[-1:]]
        return int(self.rng.choice(choices))

    def _alloc(self) -> tuple[Op, Callable[[Any], None]]:
        if self._maybe(0.05) and self.page_size > 1:
            return Op("alloc", (self._int(1, 3) * self.page_size + 1,)), self._nothing

        def then(slots: Any) -> None:
            if slots is not None and not isinstance(slots, _Raised) and len(slots):
                self.requests.append(list(slots))

        pages = self._int(0, 4) if self._maybe(0.9) else self._int(0, self.num_pages + 2)
        return Op("alloc", (pages * self.page_size,)), then

    # -- frees

    def _take_request(self) -> list[int]:
        """A request's slots, from a page-aligned position on, which are its no more."""
        if not self.requests:
            return []
        i = self._int(0, len(self.requests) - 1)
        request = self.requests[i]
        start = self._int(0, (len(request) - 1) // self.page_size) * self.page_size if self._maybe(0.3) else 0
        tail = request[start:]
        del request[start:]
        if not request:
            del self.requests[i]
        self.freed += tail[-1:]
        return tail

    def _spoiled(self, entries: list[int], wrong: list[int]) -> list[int]:
        if not self._maybe(0.1):
            return entries
        at = self._int(0, len(entries))
        return [*entries[:at], int(self.rng.choice(wrong)), *entries[at:]]

    def _free(self) -> tuple[Op, Callable[[Any], None]]:
        slots: list[int] = []
        for _ in range(self._int(1, 4)):
            slots += self._take_request()
        if len(slots) > 8 and self._maybe(0.2):
            slots = slots[:: self._int(1, 3)] + slots  # the same page by many slots, some twice
        if self._maybe(0.5):
            slots = self.rng.permutation(slots).astype(int).tolist()
        beyond = (self.num_pages + 1) * self.page_size
        slots = self._spoiled(slots, [0, -1, self.page_size - 1, beyond, 2**40, -(2**40), *self.freed[:1]])
        kwargs = {"num_pages": True} if self._maybe(0.4) else {}
        return Op("free", (slots,), kwargs, self._forms(1)), self._nothing

    def _free_segment(self) -> tuple[Op, Callable[[Any], None]]:
        start = self._int(0, 3) * self.page_size
        if self._maybe(0.05) and self.page_size > 1:
            return Op("free_segment", ([self.page_size],), {"start_pos": start + 1}), self._nothing
        slots = self._take_request()
        return Op("free_segment", (slots,), {"start_pos": start}, self._forms(1)), self._nothing

    def _free_page_ids(self) -> tuple[Op, Callable[[Any], None]]:
        if self.extra and self._maybe(0.6):
            pages = self.extra.pop(self._int(0, len(self.extra) - 1))
        else:
            pages = self._pages_of(self._take_request())
        pages = self.rng.permutation(pages).astype(int).tolist()
        wrong = [0, -1, self.num_pages + 1, 2**40, *(s // self.page_size for s in self.freed[:1]), *pages[:1]]
        return Op("free_page_ids", (self._spoiled(pages, wrong),), {}, self._forms(1)), self._nothing

    def _retain(self) -> tuple[Op, Callable[[Any], None]]:
        if not self.requests:
            return self._alloc()
        pages = self._pages_of(self.requests[self._int(0, len(self.requests) - 1)])
        pages = pages[: self._int(1, len(pages))]
        if self._maybe(0.2):
            pages = pages + pages[:2]
        self.extra.append(pages)
        wrong = [0, -1, self.num_pages + 1, *(s // self.page_size for s in self.freed[:1])]
        return Op("retain", (self._spoiled(pages, wrong),), {}, self._forms(1)), self._nothing

    def _pages_of(self, slots: list[int]) -> list[int]:
        return list(dict.fromkeys(s // self.page_size for s in slots))

    def _group(self) -> tuple[Op, Callable[[Any], None]]:
        if self.in_group and self._maybe(0.05):
            return Op("free_group_begin"), self._nothing  # groups do not nest
        self.in_group = not self.in_group
        return Op("free_group_begin" if self.in_group else "free_group_end"), self._nothing

    # -- the pool as a whole

    def _sort(self) -> tuple[Op, Callable[[Any], None]]:
        return Op("merge_and_sort_free"), self._nothing

    def _backup(self) -> tuple[Op, Callable[[Any], None]]:
        requests, extra = [list(r) for r in self.requests], [list(e) for e in self.extra]
        self.saved = (requests, extra, self.num_pages)
        return Op("backup"), self._nothing

    def _restore(self) -> tuple[Op, Callable[[Any], None]]:
        if self.saved is None:
            return self._backup()
        requests, extra, self.num_pages = self.saved
        self.requests, self.extra = [list(r) for r in requests], [list(e) for e in extra]
        self.in_group = False
        return Op("restore"), self._nothing

    def _clear(self) -> tuple[Op, Callable[[Any], None]]:
        self._forget(self.num_pages)
        return Op("clear"), self._nothing

    def _resize(self) -> tuple[Op, Callable[[Any], None]]:
        pages = self._int(max(1, self.capacity // 2), self.capacity + self._maybe(0.1))
        if pages <= self.capacity:
            self._forget(pages)
        return Op("resize", (pages * self.page_size,)), self._nothing

    def _forget(self, pages: int) -> None:
        self.num_pages, self.requests, self.extra, self.in_group = pages, [], [], False

    @staticmethod
    def _nothing(outcome: Any) -> None:
        """What most ops leave to do."""


_CHANCES = {
    "extend": 26,
    "decode": 26,
    "alloc": 6,
    "free": 16,
    "free_segment": 4,
    "free_page_ids": 6,
    "retain": 4,
    "group": 6,
    "sort": 2,
    "backup": 1,
    "restore": 1,
    "clear": 0.5,
    "resize": 0.5,
}
_NAMES = list(_CHANCES)
_WEIGHTS = np.array(list(_CHANCES.values())) / sum(_CHANCES.values())


def _options(rng: np.random.Generator) -> dict[str, Any]:
    """A pool: small ones run full, a large one now and then does not."""
    page_size = int(rng.choice(PAGE_SIZES))
    pages = int(rng.integers(1, 40)) if rng.random() < 0.8 else int(rng.integers(40, 5000))
    return {
        "size": pages * page_size + int(rng.integers(page_size)),
        "page_size": page_size,
        "index_dtype": str(rng.choice(["int64", "int32"])),
        "need_sort": bool(rng.random() < 0.4),
        "refused_slot": int(rng.choice([0, -1])),
        "strict": bool(rng.random() < 0.8),
        "max_batch": int(rng.choice([64, 8192])),
        "debug": bool(rng.random() < 0.05),
    }


def _play(seed: int, number: int, names: Sequence[str], report: Report, end: float) -> Difference | None:
    """Make up one case while it runs."""
    rng = np.random.default_rng([seed, number])
    options = _options(rng)
    bursts = tuple(rng.integers(1, 9, 8).tolist()) if rng.random() < 0.7 else (1,)
    run, author = _Run(options, names, bursts), _Author(rng, options)
    for _ in range(OPS_A_CASE):
        op, then = author.next()
        outcome, difference = run.step(op)
        report.ops += 1
        report.short += outcome is None and op.name.startswith("alloc")
        report.errors += isinstance(outcome, _Raised)
        report.refused += run.recorded != "none"
        if difference is not None:
            return difference
        if outcome is not None and run.recorded == "none" and not isinstance(outcome, _Raised):
            then(outcome.tolist())
        if time.monotonic() > end:
            break
    return run.settle()


def check(
    names: Sequence[str],
    *,
    seconds: float = 10.0,
    seed: int = 0,
    cases: int | None = None,
    progress: Callable[[Report], object] | None = None,
) -> Report:
    """Compare backends with the reference on random cases until the time is up or one differs.

    Parameters
    ----------
    names : sequence of str
        Backends that work here.
    seconds : float
        How long.
    seed : int
        The same seed makes the same cases.
    cases : int, optional
        Ends after so many cases, whatever the time.
    progress : callable, optional
        Called with the report after each case.

    Returns
    -------
    Report
        With the first difference, made small, if there is one.
    """
    for name in names:
        result = backends.probe(name)
        if not result.works:
            raise backends.BackendError(f"backend {name!r} cannot run here: {result.reason}; {result.hint}")
    report = Report(seed, list(names))
    start = time.monotonic()
    while time.monotonic() < start + seconds and (cases is None or report.cases < cases):
        difference = _play(seed, report.cases, names, report, start + seconds)
        if difference is not None:
            report.failed_case = report.cases
            report.difference = shrink(difference)
            break
        report.cases += 1
        report.seconds = time.monotonic() - start
        if progress is not None:
            progress(report)
    report.seconds = time.monotonic() - start
    return report
