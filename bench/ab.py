"""The A/B benchmark: every contestant on the same inputs, in one run, in turn, after their results were compared.

``python bench/ab.py`` is ``cupaged bench``. A *case* is one thing to measure at one size; its row holds a figure for
each contestant. A contestant that fails, or answers wrongly, is an error in its row, and the run goes on.
"""

from __future__ import annotations

if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from cupaged.cli import main

    main(["bench", *sys.argv[1:]])

import fnmatch
import gc
import itertools
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from . import contestants, first, measure
from .bars import bars
from .contestants import PAGE_SIZE, Batch, Setup, kv, make, slots_by_rule

__all__ = ["Bench", "Case", "again", "cases", "chosen", "compare", "run", "save"]

Factory = Callable[[], measure.Timer]
Found = tuple[dict[str, dict[str, Any]], dict[str, str]]

DECODES = (1, 4, 16, 32, 64, 256, 1024, 4096, 16384)
SINGLES = (256, 1024, 4096, 16384, 32768, 65536, 262144, 1048576)
STEPS = (1, 64, 256, 1024)
LONG_KERNEL_MS = 20.0


class WrongAnswerError(Exception):
    """A contestant's slots are not those of the rule."""


@dataclass
class Bench:
    """What a run has: a device, its clock, and how thorough it shall be.

    Parameters
    ----------
    device : {"cuda", "cpu"}
        What the contestants run on; cases of the CPU run in both.
    quick : bool
        Fewer cases, contestants and samples.
    tiny : bool
        Sizes that a test can wait for.
    without : tuple of str
        Contestants to leave out.
    """

    device: str
    quick: bool = False
    tiny: bool = False
    without: tuple[str, ...] = ()
    gpu: measure.Gpu | None = None
    names: list[str] = field(default_factory=list)
    cpu_names: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        from cupaged import backends

        def works(name: str) -> bool:
            return backends.probe(name).works

        self.cpu_names = contestants.names("cpu", works)
        if self.device == "cuda":
            self.gpu = measure.Gpu()
            self.names = contestants.names("cuda", works)
            if self.quick:
                self.names = [name for name in self.names if name in ("cupy", "engine", "sglang")]
        self.names = [name for name in self.names if name not in self.without]
        self.cpu_names = [name for name in self.cpu_names if name not in self.without]

    @property
    def rounds(self) -> int:
        """Samples of each contestant."""
        return 3 if self.tiny else 7 if self.quick else 15


@dataclass(frozen=True)
class Case:
    """One thing to measure.

    Parameters
    ----------
    key : str
        ``section/what/shape``; the same in every run.
    size : int
        Requests of a decode, tokens or pages of anything else: a plot's axis.
    what : str
        What the figures are.
    measure : callable
        Gives figures and errors, by contestant.
    unit : str
        Of the figures.
    """

    key: str
    size: int
    what: str
    measure: Callable[[Bench], Found]
    unit: str = "us"

    def run(self, bench: Bench) -> dict[str, Any]:
        """Measure, and describe what was found as a row."""
        begin = time.monotonic()
        try:
            figures, errors = self.measure(bench)
        except Exception as error:
            figures, errors = {}, {"all": measure.in_words(error)}
        row = {"key": self.key, "size": self.size, "what": self.what, "unit": self.unit}
        return {**row, "figures": figures, "errors": errors, "took_s": round(time.monotonic() - begin, 2)}


def _timed(bench: Bench, factories: dict[str, Factory], rounds: int | None = None) -> Found:
    """Make each contestant, which checks its answers, then sample all in turn."""
    timers, errors = {}, {}
    for name, factory in factories.items():
        try:
            timers[name] = factory()
        except Exception as error:
            errors[name] = measure.in_words(error)
    figures, failed = measure.interleave(timers, rounds or bench.rounds, limit_s=6.0)
    return figures, errors | failed


def _check(name: str, got: Any, want: Any) -> None:
    if got is None:
        raise WrongAnswerError(f"{name} was refused")
    got, want = np.asarray(got), np.asarray(want)
    if got.shape != want.shape:
        raise WrongAnswerError(f"{name} gave {got.shape} slots, not {want.shape}")
    wrong = np.flatnonzero(got != want)
    if wrong.size:
        i = wrong[0]
        raise WrongAnswerError(f"{name} gave {got[i]} at {i}, not {want[i]}; {wrong.size} differ in all")


# ---- batches -------------------------------------------------------------------------------------------------------


def decode_batch(n: int) -> Batch:
    """N requests of 1 to 4,096 tokens; the first is about to begin a page."""
    prefix = np.random.default_rng(n).integers(1, 4096, n)
    prefix[0] = 2048
    return Batch(prefix, prefix + 1)


def extend_batch(n: int, tokens: int, spread: bool = False) -> Batch:
    """N requests that get so many tokens each, or on average; a single one starts from nothing."""
    rng = np.random.default_rng(n + tokens)
    prefix = rng.integers(1, 1024, n) if n > 1 and tokens < 100_000 else np.zeros(n, np.int64)
    new = rng.integers(tokens // 2, 3 * tokens // 2 + 1, n) if spread else np.full(n, tokens)
    return Batch(prefix, prefix + new)


def skewed_batch() -> Batch:
    """One prompt of 1M tokens and 255 of 16."""
    prefix = np.zeros(256, np.int64)
    seq = np.full(256, 16)
    seq[100] = 1 << 20
    return Batch(prefix, seq)


def extends() -> dict[str, Batch]:
    """Extends of the grid, by their shape."""
    found = {f"1x{n}": extend_batch(1, n) for n in SINGLES}
    found["10x1048576"] = extend_batch(10, 1 << 20)
    found["1x1M+255x16"] = skewed_batch()
    found["64x128"] = extend_batch(64, 128)
    found["256x1000"] = extend_batch(256, 1066, spread=True)
    found["4096x4"] = extend_batch(4096, 4)
    found["4096x1000"] = extend_batch(4096, 1000, spread=True)
    return found


def _inputs(c: Any, batch: Batch, decode: bool) -> tuple[Any, ...]:
    """A batch's arguments in the contestant's library."""
    host = getattr(c, "on_host", lambda array: array)
    if decode:
        return c.load(batch.seq), c.load(batch.last), host(batch.seq)
    lengths = c.load(batch.prefix), c.load(batch.seq), c.load(batch.last)
    return *lengths, batch.tokens, host(batch.prefix), host(batch.seq)


def _want(setup: Setup, batch: Batch, nth: int = 0) -> np.ndarray:
    """Slots of the nth of several equal calls."""
    free = setup.order[nth * batch.new_pages :]
    return slots_by_rule(free, batch.prefix, batch.seq, batch.last, batch.page_size)


def _setup(batch: Batch, calls: int) -> Setup:
    """A pool for so many calls, also by the bounds of who does not know their lengths."""
    bound = batch.tokens // PAGE_SIZE + batch.seq.size
    free = calls * max(batch.new_pages, min(bound, batch.tokens)) + 16
    return Setup(batch.owned, free, max_batch=max(8192, batch.seq.size))


# ---- kernels: time on the GPU --------------------------------------------------------------------------------------


def _launches(tokens: int) -> int:
    return 50 if tokens <= 1 << 16 else 20 if tokens <= 1 << 21 else 10


def _kernel(batch: Batch, decode: bool) -> Callable[[Bench], Found]:
    def run(bench: Bench) -> Found:
        launches = _launches(batch.tokens)
        setup = Setup(batch.owned, launches * batch.new_pages + 64, max_batch=max(8192, batch.seq.size))
        wants = _want(setup, batch), _want(setup, batch, launches - 1)
        factories: dict[str, Factory] = {}
        for name in bench.names:
            if name == "cupy":
                factories[name] = lambda: _captured_ours(bench, setup, batch, decode, launches, wants)
            elif name == "engine":
                factories["triton"] = lambda: _captured_triton(bench, setup, batch, decode, launches, wants)
            else:
                factories[name] = lambda name=name: _queued(bench, name, batch, decode)  # type: ignore[misc]
        if "cupy" in bench.names:
            factories["write"] = lambda: _captured_extra(bench, "write_slots", batch.tokens, launches)
            factories["empty"] = lambda: _captured_extra(bench, "empty", 0, launches)
        return _timed(bench, factories)

    return run


def _captured_ours(bench: Bench, setup: Setup, batch: Batch, decode: bool, launches: int, wants: Any) -> Any:
    c = make("cupy", setup, "cuda")
    inputs, call = _inputs(c, batch, decode), c.decode if decode else c.extend
    out = c.load(np.zeros(batch.tokens, np.int64))
    _check("cupy", c.fetch(call(*inputs, out=out)), wants[0])
    c.reset()
    timer = bench.gpu.graph_timer(lambda _: call(*inputs, out=out), launches, c.reset)  # type: ignore[union-attr]
    timer()
    _check("cupy, replayed,", c.fetch(out), wants[1])
    c.pool.check()
    return timer


def _captured_triton(bench: Bench, setup: Setup, batch: Batch, decode: bool, launches: int, wants: Any) -> Any:
    c = make("engine", setup, "cuda")
    arrays = _inputs(c, batch, decode)[: 2 if decode else 3]
    kernel = c.launch_decode if decode else c.launch_extend
    out = c.load(np.zeros(batch.tokens, np.int64))
    free = [c.start[i * batch.new_pages :] for i in range(launches)]
    kernel(*arrays, free[0], out)
    _check("triton", c.fetch(out), wants[0])
    timer = bench.gpu.graph_timer(  # type: ignore[union-attr]
        lambda i: kernel(*arrays, free[i], out), launches, lambda: None
    )
    timer()
    _check("triton, replayed,", c.fetch(out), wants[1])
    return timer


def _queued(bench: Bench, name: str, batch: Batch, decode: bool) -> Any:
    calls = 5
    setup = _setup(batch, calls + 1)
    c = make(name, setup, "cuda")
    inputs, call = _inputs(c, batch, decode), c.decode if decode else c.extend
    _check(name, c.fetch(call(*inputs)), _want(setup, batch))
    return bench.gpu.queue_timer(lambda: call(*inputs), calls, c.reset)  # type: ignore[union-attr]


_EXTRAS = r"""
extern "C" __global__ void empty(long long*, long long) {}

extern "C" __global__ void write_slots(long long* out, long long n) {
    const long long i = blockIdx.x * 256LL + threadIdx.x;
    if (2 * i + 1 < n)
        reinterpret_cast<longlong2*>(out)[i] = make_longlong2(2 * i, 2 * i + 1);
    else if (2 * i < n)
        out[2 * i] = 2 * i;
}
"""


def _captured_extra(bench: Bench, name: str, tokens: int, launches: int) -> Any:
    """The limits: a kernel that does nothing, and one that only writes as many slots."""
    import cupy
    import torch

    kernel = cupy.RawModule(code=_EXTRAS).get_function(name)
    out = torch.zeros(max(1, tokens), dtype=torch.int64, device="cuda")
    blocks = max(1, -(-tokens // 512))

    def launch(_: int = 0) -> None:
        kernel((blocks,), (256,), (np.uint64(out.data_ptr()), np.int64(tokens)))

    launch()
    if tokens:
        _check(name, out.cpu().numpy(), np.arange(tokens))
    timer = bench.gpu.graph_timer(launch, launches, lambda: None)  # type: ignore[union-attr]
    timer()
    return timer


def _step_kernel(n: int) -> Callable[[Bench], Found]:
    """A whole decode step on the device: ours in one launch, the chain that engines make."""

    def run(bench: Bench) -> Found:
        batch, launches = decode_batch(n), 20
        setup = Setup(batch.owned, launches * batch.new_pages + 64)
        want = _want(setup, batch, launches - 1)

        def captured(name: str) -> Any:
            c = make(name, setup, "cuda")
            table, rows = c.load(batch.table()), c.load(np.arange(n))
            seq, cpu = c.load(batch.prefix), getattr(c, "on_host", lambda a: a)(batch.prefix)
            out = c.load(np.zeros(n, np.int64)) if name == "cupy" else None
            _check(name, c.fetch(c.step(table, rows, seq, cpu, out=out)), _want(setup, batch))
            c.reset()
            results: dict[str, Any] = {}

            def launch(_: int) -> None:
                results["last"] = c.step(table, rows, seq, cpu, out=out)

            timer = bench.gpu.graph_timer(launch, launches, c.reset)  # type: ignore[union-attr]
            timer()
            _check(f"{name}, replayed,", c.fetch(results["last"]), want)
            _check(f"{name}'s table", c.fetch(table)[np.arange(n), batch.prefix], want)
            return timer

        names = [name for name in ("cupy", "engine", "torch ops") if name in bench.names]
        return _timed(bench, {name: lambda name=name: captured(name) for name in names})  # type: ignore[misc]

    return run


def _segment_kernel(pages: int) -> Callable[[Bench], Found]:
    """The free of whole segments on the device, the one free of engines that does not wait."""

    def run(bench: Bench) -> Found:
        launches = 20
        setup = Setup(0, (launches + 1) * pages + 16)

        def captured(name: str, method: str) -> Any:
            c = make(name, setup, "cuda")
            held = [c.alloc(pages * PAGE_SIZE) for _ in range(launches)]
            if name == "cupy":
                c.state = c.pool.backup_state()
            else:
                c.start = c.free_pages
            call = (lambda i: c.free(held[i], pages)) if method == "free" else (lambda i: c.free_segment(held[i]))
            call(0)
            want = np.sort(setup.order[:pages]) if method == "free" else setup.order[:pages]
            _check(name, c.fetch(c.alloc(pages * PAGE_SIZE))[::PAGE_SIZE], want * PAGE_SIZE)
            c.reset()
            return bench.gpu.graph_timer(call, launches, c.reset)  # type: ignore[union-attr]

        factories: dict[str, Factory] = {}
        for name in ("cupy", "engine"):
            if name in bench.names:
                factories[name] = lambda name=name: captured(name, "free_segment")  # type: ignore[misc]
        if "cupy" in bench.names:
            factories["cupy, by slot"] = lambda: captured("cupy", "free")
        return _timed(bench, factories)

    return run


# ---- calls: time on the host ---------------------------------------------------------------------------------------


def _call(batch: Batch, kind: str, on_cpu: bool) -> Callable[[Bench], Found]:
    """Whole calls of a decode, an extend or a step."""

    def run(bench: Bench) -> Found:
        calls = 20 if batch.tokens <= 1 << 14 else 5 if batch.tokens <= 1 << 19 else 1
        setup = _setup(batch, calls + 1)
        want = _want(setup, batch)
        device = "cpu" if on_cpu else "cuda"

        def prepared(name: str) -> Any:
            c = make(name, setup, device)
            if kind == "step":
                host = getattr(c, "on_host", lambda array: array)
                table, rows, seq = c.load(batch.table()), c.load(np.arange(batch.seq.size)), c.load(batch.prefix)
                inputs: tuple[Any, ...] = (table, rows, seq, host(batch.prefix))
                call = c.step
            else:
                inputs, call = _inputs(c, batch, kind == "decode"), getattr(c, kind)
            _check(name, c.fetch(call(*inputs)), want)
            return measure.host_timer(lambda: call(*inputs), calls, c.reset, _wait(bench, on_cpu))

        names = list(bench.cpu_names if on_cpu else bench.names)
        if "reference" in names and batch.tokens > (512 if bench.quick else 4096):
            names.remove("reference")  # loops in Python: seconds
        if kind == "step":
            names = [name for name in names if name not in ("cupy ops", "sglang")]
        elif "cupy" in names and not bench.quick:
            names.insert(1, "cupy, lengths known")
        factories: dict[str, Factory] = {name: lambda name=name: prepared(name) for name in names}  # type: ignore[misc]
        if on_cpu:
            factories["write"] = lambda: _written(batch.tokens, calls)
        return _timed(bench, factories)

    return run


def _wait(bench: Bench, on_cpu: bool) -> Callable[[], None]:
    if on_cpu or bench.gpu is None:
        return lambda: None
    return bench.gpu.wait


def _written(tokens: int, calls: int) -> measure.Timer:
    """The limit on the CPU: only to fill a new array of as many slots."""
    return measure.host_timer(lambda: np.full(tokens, 7), calls, lambda: None, lambda: None)


def _frees(pages: int, method: str, on_cpu: bool) -> Callable[[Bench], Found]:
    """Whole calls that free, or free and allocate, so many pages."""

    def run(bench: Bench) -> Found:
        calls, slots = 10, pages * PAGE_SIZE
        setup = Setup(0, 4 * calls * pages)  # so large that a free whose pages the host cannot count needs no wait
        first_pages = setup.order[:pages]

        def prepared(name: str) -> Any:
            c = make(name, setup, "cpu" if on_cpu else "cuda")
            held = c.alloc(slots)
            _check(name, c.fetch(held)[::PAGE_SIZE], first_pages * PAGE_SIZE)
            if method == "free_segment":
                c.free_segment(held)
            else:
                c.free(held, pages)
            want = first_pages if method == "free_segment" else np.sort(first_pages)
            _check(name, c.fetch(c.alloc(slots))[::PAGE_SIZE], want * PAGE_SIZE)
            kept: list[Any] = []

            def before() -> None:
                c.reset()
                kept[:] = [c.alloc(slots) for _ in range(calls)]

            def call() -> None:
                held = kept.pop()
                if method == "free_segment":
                    c.free_segment(held)
                    return
                c.free(held, pages)
                if method == "free+alloc":
                    c.alloc(slots)

            return measure.host_timer(call, calls, before, _wait(bench, on_cpu))

        names = [n for n in (bench.cpu_names if on_cpu else bench.names) if n != "reference"]
        if method == "free_segment":
            names = [name for name in names if name not in ("cupy ops", "numpy ops", "torch ops")]
        elif "cupy" in names and not bench.quick:
            names.insert(1, "cupy, lengths known")
        return _timed(bench, {name: lambda name=name: prepared(name) for name in names})  # type: ignore[misc]

    return run


# ---- request by request --------------------------------------------------------------------------------------------


def _kv_names(bench: Bench, on_cpu: bool) -> list[str]:
    from importlib.util import find_spec

    ours = [n for n in (bench.cpu_names if on_cpu else bench.names) if n in ("cupy", "numba-cuda", "numba")]
    return ours + (["engine"] if find_spec("torch") else [])


def _kv_alloc(on_cpu: bool) -> Callable[[Bench], Found]:
    """One request's 100 tokens."""

    def run(bench: Bench) -> Found:
        calls, need = 16, 100

        def prepared(name: str) -> Any:
            c = kv(name, 256, 32, 8, "cpu" if on_cpu else "cuda")
            _check(name, c.fetch(c.alloc(3, need, 0)), np.arange(PAGE_SIZE, PAGE_SIZE + need))
            _check(name, c.fetch(c.alloc(3, 30, need)), [*range(164, 192), *range(192, 194)])
            row = itertools.count()

            def before() -> None:
                nonlocal row
                c.reset()
                row = itertools.count()

            return measure.host_timer(lambda: c.alloc(next(row), need, 0), calls, before, _wait(bench, on_cpu))

        names = _kv_names(bench, on_cpu)
        return _timed(bench, {name: lambda name=name: prepared(name) for name in names})  # type: ignore[misc]

    return run


def _kv_step(n: int, on_cpu: bool) -> Callable[[Bench], Found]:
    """A decode step of n requests that each begin a page: one by one, and as a batch."""

    def run(bench: Bench) -> Found:
        rows, ones, have = list(range(n)), np.ones(n, np.int64), np.full(n, PAGE_SIZE)
        listed = np.arange(n)
        want = (np.arange(n) + n + 1) * PAGE_SIZE

        def prepared(name: str, one_by_one: bool) -> Any:
            c = kv(name, 2 * n + 8, n, 4, "cpu" if on_cpu else "cuda")
            got: list[Any] = []

            def before() -> None:
                c.reset()
                c.fill(rows, PAGE_SIZE)
                got.clear()

            def call() -> None:
                if one_by_one:
                    got.extend([c.alloc(row, 1, PAGE_SIZE) for row in rows])
                else:
                    got.append(c.kv.alloc_batch(listed, ones, have)[0])

            before()
            call()
            _check(name, np.concatenate([c.fetch(slots) for slots in got]), want)
            return measure.host_timer(call, 1, before, _wait(bench, on_cpu))

        factories: dict[str, Factory] = {}
        for name in _kv_names(bench, on_cpu):
            if name == "engine":
                factories[name] = lambda: prepared("engine", True)
                continue
            factories[name] = lambda name=name: prepared(name, False)  # type: ignore[misc]
            if name != "numba-cuda":
                factories[f"{name}, one by one"] = lambda name=name: prepared(name, True)  # type: ignore[misc]
        return _timed(bench, factories, rounds=min(7, bench.rounds))

    return run


def _kv_group_free(n: int, pages: int, on_cpu: bool) -> Callable[[Bench], Found]:
    """N requests of so many pages each end, and the group of frees with them."""

    def run(bench: Bench) -> Found:
        rows, tokens, total = list(range(n)), pages * PAGE_SIZE, n * pages
        spare = 8
        want = [*range(total + 1, total + spare + 1), *range(1, total + 1)]

        def prepared(name: str, finish: bool = False) -> Any:
            c = kv(name, total + spare, n, pages, "cpu" if on_cpu else "cuda")

            def before() -> None:
                c.reset()
                c.fill(rows, tokens)

            before()
            c.free_rows(rows, 0, tokens)
            _check(name, c.free_order(), np.array(want))
            return measure.host_timer(
                lambda: c.free_rows(rows, 0, tokens), 1, before, _wait(bench, on_cpu), finish=finish
            )

        factories: dict[str, Factory] = {}
        for name in _kv_names(bench, on_cpu):
            factories[name] = lambda name=name: prepared(name)  # type: ignore[misc]
            if name == "cupy":
                factories["cupy, to the end"] = lambda: prepared("cupy", finish=True)
        return _timed(bench, factories)

    return run


# ---- waiting, compiling, starting ----------------------------------------------------------------------------------


def _sync_calls(name: str) -> dict[str, Callable[[], Any]]:
    """Calls that must not wait; each may be made a few times."""
    n, pages = 64, 16
    slots = pages * PAGE_SIZE
    batch = decode_batch(n)
    longer = extend_batch(n, 40)
    setup = Setup(n, 40_000)
    calls: dict[str, Callable[[], Any]] = {}

    def held(c: Any, free: Callable[[Any], Any]) -> Callable[[], Any]:
        kept = [c.alloc(slots) for _ in range(8)]
        return lambda: free(kept.pop())

    c = make(name, setup, "cuda")
    decode, extend = _inputs(c, batch, True), _inputs(c, longer, False)
    table, rows, seq = c.load(batch.table()), c.load(np.arange(n)), c.load(batch.prefix)
    cpu = getattr(c, "on_host", lambda array: array)(batch.prefix)
    calls["alloc"] = lambda: c.alloc(slots)
    calls["alloc_decode"] = lambda: c.decode(*decode)
    calls["alloc_extend"] = lambda: c.extend(*extend)
    calls["decode_step"] = lambda: c.step(table, rows, seq, cpu)
    calls["free"] = held(c, lambda x: c.free(x, pages))
    calls["free_segment"] = held(c, c.free_segment)
    if name == "engine":
        chain = kv("engine", 4096, 64, 64, "cuda")
        chain.fill(list(range(8)), slots)
        free_rows = iter(range(8))
        at = iter(range(8, 64))
        calls["KVAllocator.alloc"] = lambda: chain.alloc(next(at), 100, 0)
        calls["KVAllocator.free_group_end"] = lambda: chain.free_rows([next(free_rows)], 0, slots)
        return calls

    pool = c.pool
    spec = c.load(np.zeros((n, 128), np.int32))
    zero, more = c.load(np.zeros(n, np.int64)), c.load(np.full(n, 100))
    calls["free, num_pages known"] = held(c, lambda x: pool.free(x, num_pages=pages))
    page_ids = c.load(np.arange(1, n + 1))
    calls["free_page_ids"] = held(c, lambda x: pool.free_page_ids(x[::PAGE_SIZE] // PAGE_SIZE))

    def group(x: Any) -> None:
        with pool.free_group():
            pool.free(x[: slots // 2])
            pool.free(x[slots // 2 :])

    calls["free_group"] = held(c, group)
    calls["extend_step, trim, release"] = lambda: (
        pool.extend_step(spec, rows, zero, more, 100 * n),
        pool.trim(spec, rows, more, more - 50),
        pool.release(spec, rows, more - 50),
    )

    sharing = make(name, Setup(n, 4096), "cuda").pool
    calls["retain, free_page_ids"] = lambda: (sharing.retain(page_ids), sharing.free_page_ids(page_ids))

    known = make(name, Setup(0, 4096), "cuda").pool
    calls["alloc, available_size"] = lambda: (known.alloc(slots), known.available_size())

    allocator = kv(name, 4096, 64, 64, "cuda").kv
    allocator.alloc_batch(list(range(8)), [slots] * 8, [0] * 8)
    at, free_rows = iter(range(8, 40)), iter(range(8))
    kv_rows, kv_seq = c.load(np.arange(40, 56)), c.load(np.zeros(16, np.int64))

    def end_group() -> None:
        allocator.free_req_cache(next(free_rows), slots)
        allocator.free_group_end()

    calls["KVAllocator.alloc"] = lambda: allocator.alloc(next(at), 100, 0)
    calls["KVAllocator.alloc_batch"] = lambda: allocator.alloc_batch([next(at), next(at)], [70, 80], [0, 0])
    calls["KVAllocator.free_group_end"] = end_group
    page_table = allocator.req_to_page
    calls["KVAllocator.decode_step"] = lambda: allocator.decode_step(page_table, kv_rows, kv_seq)
    calls["block_table"] = lambda: allocator.block_table(page_table, kv_rows, kv_seq + 1, max_pages=4)
    calls["slot_mapping"] = lambda: allocator.slot_mapping(page_table, kv_rows, kv_seq, kv_seq + 1, 16)
    calls["flashinfer_tables"] = lambda: allocator.flashinfer_tables(page_table, kv_rows, kv_seq + 1)
    return calls


def _sync_cases(bench: Bench) -> list[Case]:
    """Each call behind a kernel of 20 ms: one that waits takes as long."""
    names = [name for name in ("cupy", "numba-cuda", "engine") if name in bench.names]
    found: dict[str, dict[str, Callable[[], Any]]] = {}

    def calls_of(name: str) -> dict[str, Callable[[], Any]]:
        if name not in found:
            found[name] = _sync_calls(name)
        return found[name]

    def case(what: str) -> Case:
        def run(bench: Bench) -> Found:
            gpu = bench.gpu
            assert gpu is not None

            def prepared(name: str) -> Any:
                call = calls_of(name)[what]
                call()

                def sample() -> float:
                    gpu.wait()
                    gpu.sleep(LONG_KERNEL_MS * 1e3)
                    begin = time.perf_counter()
                    call()
                    end = time.perf_counter()
                    gpu.wait()
                    return (end - begin) * 1e3

                return sample

            has = [name for name in names if name != "engine" or what in _ENGINE_CALLS]
            return _timed(bench, {name: lambda name=name: prepared(name) for name in has}, rounds=3)  # type: ignore[misc]

        return Case(f"sync/{what}", 0, f"host time behind a kernel of {LONG_KERNEL_MS:.0f} ms", run, "ms")

    return [case(what) for what in _SYNC_CALLS]


_ENGINE_CALLS = (
    *("alloc", "alloc_decode", "alloc_extend", "decode_step", "free", "free_segment"),
    *("KVAllocator.alloc", "KVAllocator.free_group_end"),
)
_SYNC_CALLS = (
    *_ENGINE_CALLS,
    *("free, num_pages known", "free_page_ids", "free_group", "extend_step, trim, release", "retain, free_page_ids"),
    *("alloc, available_size", "KVAllocator.alloc_batch", "KVAllocator.decode_step"),
    *("block_table", "slot_mapping", "flashinfer_tables"),
)


def _once(value: float) -> dict[str, float]:
    return {"median": value, "low": value, "high": value, "n": 1}


def _start_names(bench: Bench) -> list[str]:
    ours = ["numba"]
    if bench.device == "cuda":  # numba's own are those of a run on the CPU
        ours = [name for name in ("cupy",) if name in bench.names]
    return ours + (["engine"] if "engine" in bench.names else [])


def _first(bench: Bench) -> dict[str, Found]:
    names = [name for name in _start_names(bench) if not (bench.quick and name == "numba")]
    cold: Found = ({}, {})
    disk: Found = ({}, {})
    for name, result in first.first_results(names, 1 if bench.quick else 2).items():
        if "error" in result:
            cold[1][name] = disk[1][name] = result["error"]
        else:
            cold[0][name] = _once(result["cold"])
            disk[0][name] = measure.spread(result["disk"])
    return {"cold": cold, "disk": disk}


def _start_cases(bench: Bench) -> list[Case]:
    done: dict[str, Found] = {}

    def first_of(which: str) -> Callable[[Bench], Found]:
        def run(bench: Bench) -> Found:
            if not done:
                done.update(_first(bench))
            return done[which]

        return run

    def compiled(bench: Bench) -> Found:
        figures: dict[str, Any] = {}
        errors: dict[str, str] = {}
        for name, result in first.compilations(_start_names(bench)).items():
            if "error" in result:
                errors[name] = result["error"]
            else:
                figures[name] = {**_once(result["compiled"]), **result}
        return figures, errors

    found = [Case("compile/24 batch shapes", 24, "kernels compiled after the warm-up", compiled, "kernels")]
    if not bench.quick or bench.device == "cuda":
        found.append(Case("first/cold", 0, "first slots of a ready process, no cache", first_of("cold"), "s"))
        found.append(Case("first/disk", 0, "first slots of a ready process, caches on disk", first_of("disk"), "s"))
    return found


# ---- all of it -----------------------------------------------------------------------------------------------------


def cases(bench: Bench, only: str = "") -> list[Case]:
    """Cases of a run, in its order.

    Parameters
    ----------
    bench : Bench
        Where, and how thoroughly.
    only : str
        Patterns or beginnings of keys, separated by commas.
    """
    found = [*(_gpu_cases(bench) if bench.device == "cuda" else []), *_cpu_cases(bench)]
    if not bench.tiny:
        found += _start_cases(bench)
    return chosen(found, only)


def chosen(found: list[Case], only: str) -> list[Case]:
    """Those whose keys begin with, or match, one of the patterns; all if there is none."""
    wanted = [word.strip() for word in only.split(",") if word.strip()]
    if not wanted:
        return found
    left = [c for c in found if any(c.key.startswith(w) or fnmatch.fnmatchcase(c.key, w) for w in wanted)]
    if not left:
        sections = dict.fromkeys(c.key.partition("/")[0] for c in found)
        raise ValueError(f"--only {only} names no case here; there are {', '.join(sections)}")
    return left


def _gpu_cases(bench: Bench) -> list[Case]:
    quick, shapes = bench.quick, extends()
    decodes = (1, 256, 4096, 16384) if quick else DECODES
    if quick:
        few = ("1x4096", "1x1048576", "1x1M+255x16", "256x1000", "4096x4", "10x1048576")
        shapes = {name: shapes[name] for name in few}
    gpu, host = "GPU time", "host time"
    found = [Case(f"kernel/decode/{n}", n, gpu, _kernel(decode_batch(n), True)) for n in decodes]
    found += [Case(f"kernel/extend/{s}", b.tokens, gpu, _kernel(b, False)) for s, b in shapes.items()]
    steps = (1, 256) if quick else STEPS
    found += [Case(f"kernel/step/{n}", n, gpu, _step_kernel(n)) for n in steps]
    found += [Case(f"kernel/free_segment/{n}", n, gpu, _segment_kernel(n)) for n in ((256,) if quick else (16, 256))]
    for n in (256,) if quick else (1, 32, 256, 1024, 4096, 16384):
        found.append(Case(f"call/decode/{n}", n, host, _call(decode_batch(n), "decode", False)))
    for n, tokens in ((64, 128),) if quick else ((1, 4096), (64, 128), (256, 128), (1024, 16)):
        batch = extend_batch(n, tokens)
        found.append(Case(f"call/extend/{n}x{tokens}", batch.tokens, host, _call(batch, "extend", False)))
    found += [Case(f"call/step/{n}", n, host, _call(decode_batch(n), "step", False)) for n in steps]
    methods = ("free+alloc",) if quick else ("free+alloc", "free", "free_segment")
    found += [Case(f"call/{method}/256", 256, host, _frees(256, method, False)) for method in methods]
    found.append(Case("kv/alloc/100", 100, host, _kv_alloc(False)))
    found.append(Case("kv/step/256", 256, host, _kv_step(256, False)))
    for n, pages in ((16, 32), (256, 2)):
        found.append(Case(f"kv/group_free/{n}x{pages}", n * pages, host, _kv_group_free(n, pages, False)))
    return found + _sync_cases(bench)


def _cpu_cases(bench: Bench) -> list[Case]:
    quick, host = bench.quick or bench.device == "cuda", "host time"
    decodes: tuple[int, ...]
    singles: tuple[int, ...]
    steps: tuple[int, ...]
    many: tuple[tuple[int, int], ...]
    if bench.tiny:
        decodes, singles, many, steps = (1, 64), (256,), ((16, 20),), (8,)
    elif quick:
        decodes, singles, many, steps = (1, 256, 16384), (4096, 1048576), ((256, 1000),), (256,)
    else:
        decodes, singles = DECODES, (256, 4096, 65536, 1048576)
        many, steps = ((64, 128), (256, 1000), (4096, 4)), STEPS
    found = [Case(f"cpu/decode/{n}", n, host, _call(decode_batch(n), "decode", True)) for n in decodes]
    batches = [*((f"1x{n}", extend_batch(1, n)) for n in singles)]
    batches += [(f"{n}x{tokens}", extend_batch(n, tokens, spread=tokens > 128)) for n, tokens in many]
    found += [Case(f"cpu/extend/{s}", b.tokens, host, _call(b, "extend", True)) for s, b in batches]
    found += [Case(f"cpu/step/{n}", n, host, _call(decode_batch(n), "step", True)) for n in steps]
    pages, requests = (4, 4) if bench.tiny else (256, 256)
    found.append(Case(f"cpu/free+alloc/{pages}", pages, host, _frees(pages, "free+alloc", True)))
    found.append(Case("cpu/kv_alloc/100", 100, host, _kv_alloc(True)))
    found.append(Case(f"cpu/kv_step/{requests}", requests, host, _kv_step(requests, True)))
    found.append(Case(f"cpu/kv_group_free/{requests}x2", 2 * requests, host, _kv_group_free(requests, 2, True)))
    return found


def run(
    bench: Bench,
    chosen: Iterable[Case],
    progress: Callable[[dict[str, Any]], None] = lambda row: None,
    file: Path | None = None,
) -> dict[str, Any]:
    """Measure cases one after the other.

    Parameters
    ----------
    bench : Bench
        Where, and how thoroughly.
    chosen : iterable of Case
        What.
    progress : callable
        Is told each row.
    file : Path, optional
        Results so far are kept there after each row, so that a run that is cut short leaves what it had.

    Returns
    -------
    dict
        ``machine``, ``settings``, ``rows`` and ``bars``.
    """
    results: dict[str, Any] = {
        "format": 1,
        "machine": measure.machine(bench.device),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "settings": {"quick": bench.quick, "page_size": PAGE_SIZE},
        "rows": [],
    }
    begin = time.monotonic()

    for case in chosen:
        row = again(bench, case)
        results["rows"].append(row)
        results["seconds"] = round(time.monotonic() - begin, 1)
        progress(row)
        if file is not None:
            save(results, file)
    results["bars"] = bars(results["rows"])
    if file is not None:
        save(results, file)
    return results


def again(bench: Bench, case: Case) -> dict[str, Any]:
    """Measure one case."""
    if case.key.startswith("cpu/"):
        with _one_thread(bench):
            row = case.run(bench)
    elif bench.gpu is None:
        row = case.run(bench)
    else:
        with bench.gpu.current():
            row = case.run(bench)
    gc.collect()
    if bench.gpu is not None and case.size >= 1 << 20:
        give_memory_back(bench)
    return row


@contextmanager
def _one_thread(bench: Bench) -> Iterator[None]:
    """On the CPU torch has as many threads as NumPy and cupaged, one: more only measure what else runs there."""
    if "torch ops" not in bench.cpu_names:
        yield
        return
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def give_memory_back(bench: Bench) -> None:
    bench.gpu.torch.cuda.empty_cache()  # type: ignore[union-attr]
    if "cupy" in bench.names:
        import cupy

        cupy.get_default_memory_pool().free_all_blocks()


def save(results: dict[str, Any], file: Path) -> None:
    """Write results, whole or not at all."""
    part = file.with_name(file.name + ".part")
    part.write_text(json.dumps(results, indent=1, default=float) + "\n")
    os.replace(part, file)


# ---- compare -------------------------------------------------------------------------------------------------------

WORSE = 1.3


def ratios(row: dict[str, Any]) -> dict[tuple[str, str], float]:
    """Time of each contestant of ours over that of each other one, in one row.

    Of the tenth percentiles, which whatever else the machine does disturbs least. On the CPU a fill of memory says
    nothing of how fast the machine computes just now, so there it is none of the others.
    """
    figures = row["figures"]
    limits = ("write", "empty") if row["key"].startswith("cpu/") else ("empty",)
    ours = [name for name in figures if name.partition(", ")[0] in ("cupy", "numba")]
    others = [name for name in figures if name.partition(", ")[0] not in (*contestants.OURS, *limits)]
    return {(a, b): figures[a]["low"] / figures[b]["low"] for a in ours for b in others}


def compare(
    old: dict[str, Any], new: dict[str, Any], again: Callable[[str], dict[str, Any] | None], attempts: int = 3
) -> list[dict[str, Any]]:
    """Find ratios that are 1.3 x worse than kept ones.

    Only ratios within one run count, never times. A row that looks worse is measured again before it is believed,
    and its best ratio counts: noise does not come back, a slower kernel does.

    Parameters
    ----------
    old, new : dict
        Kept and fresh results.
    again : callable
        Measures the row of that key once more.
    attempts : int
        How often at most.

    Returns
    -------
    list of dict
        ``key``, ``ours``, ``other``, and the ratios ``was`` and ``now``; ``now`` is None where ours failed.

    Raises
    ------
    ValueError
        If the two have no row in common.
    """
    kept = {row["key"]: row for row in old["rows"] if row["unit"] == "us"}
    shared = [row for row in new["rows"] if row["key"] in kept]
    if not shared:
        raise ValueError("there is nothing to compare: no row of the kept results was measured")
    worse = []
    for row in shared:
        was = ratios(kept[row["key"]])
        best = ratios(row)
        for _ in range(attempts):
            if all(pair not in best or best[pair] <= WORSE * was[pair] for pair in was):
                break
            repeated = again(row["key"])
            for pair, ratio in ratios(repeated).items() if repeated else ():
                best[pair] = min(ratio, best.get(pair, ratio))
        for (ours, other), ratio in was.items():
            now = best.get((ours, other))
            if (now is None and ours in row["errors"]) or (now is not None and now > WORSE * ratio):
                worse.append({"key": row["key"], "ours": ours, "other": other, "was": ratio, "now": now})
    return worse
