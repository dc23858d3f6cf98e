"""How time and memory grow with the pool and the batch, slots past 2^31, and millions of calls on one allocator."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from cupaged import KVAllocator, PagedTokenToKVPoolAllocator

from . import measure
from .ab import Bench, Case, Found, _captured_extra, _check, _once, _timed, _wait, _written, chosen, give_memory_back
from .contestants import PAGE_SIZE, Batch, slots_by_rule

__all__ = ["cases"]

POOLS = (1_000, 10_000, 100_000, 1_000_000, 16_000_000)
BATCHES = (1, 16, 256, 4096, 16384, 65536)
LONG = 10_000_000
OWNERS = 256
CALLS = 20


def cases(bench: Bench, only: str = "") -> list[Case]:
    """Cases of ``cupaged bench --scale``, in their order.

    Parameters
    ----------
    bench : Bench
        Where; quick: with smaller pools and fewer calls.
    only : str
        As in `ab.cases`.
    """
    pools = POOLS[:2] if bench.tiny else POOLS[:4] if bench.quick else POOLS
    batches = BATCHES[:3] if bench.tiny else BATCHES
    tokens = 100_000 if bench.tiny else LONG
    millions = 0.002 if bench.tiny else 0.1 if bench.quick else 10
    found: list[Case] = []
    for pages in pools:
        found += _pool_cases(pages)
    found += [Case(f"scale/batch/{n}", n, _what(bench), _decode(n)) for n in batches]
    found.append(Case(f"scale/request/{tokens} tokens", tokens, _what(bench), _one_request(tokens)))
    pages = 1 << (10 if bench.tiny else 20 if bench.quick else 24)
    found.append(Case("scale/slots/past 2^31", pages, "largest slot handed out", _past_int32(pages), "slot"))
    return chosen(found + _ops_cases(int(millions * 1e6)), only)


def _backend(bench: Bench) -> str:
    return "cupy" if bench.device == "cuda" else "numba"


def _what(bench: Bench) -> str:
    return "GPU time" if bench.device == "cuda" else "host time"


def _pool(bench: Bench, pages: int, **options: Any) -> PagedTokenToKVPoolAllocator:
    device: Any = "cpu"
    if bench.gpu is not None:
        device = bench.gpu.torch.device("cuda")
    size = options.pop("page_size", PAGE_SIZE)
    return PagedTokenToKVPoolAllocator(pages * size, size, device=device, backend=_backend(bench), **options)


def _give(bench: Bench, array: np.ndarray) -> Any:
    return array if bench.gpu is None else bench.gpu.torch.from_numpy(array.copy()).cuda()


def _fetch(array: Any) -> np.ndarray:
    return array if isinstance(array, np.ndarray) else array.cpu().numpy()


def _sampled(bench: Bench, call: Callable[[], Any], calls: int = CALLS) -> measure.Timer:
    """The device's time of a call that can be captured; the host's where there is none."""
    if bench.gpu is None:
        return measure.host_timer(call, calls, lambda: None, lambda: None)
    return bench.gpu.graph_timer(lambda _: call(), calls, lambda: None)


# ---- pools ---------------------------------------------------------------------------------------------------------


def _pool_cases(pages: int) -> list[Case]:
    found: dict[str, Found] = {}

    def part(name: str) -> Callable[[Bench], Found]:
        def run(bench: Bench) -> Found:
            if not found:
                found.update(_measure_pool(bench, pages))
            return found[name]

        return run

    return [
        Case(f"scale/pool/{pages}, time", pages, f"decode of {OWNERS}, 4 of them begin a page", part("time")),
        Case(f"scale/pool/{pages}, free", pages, "free of 16 pages by slot", part("free")),
        Case(f"scale/pool/{pages}, made", pages, "making the pool", part("made"), "ms"),
        Case(f"scale/pool/{pages}, memory", pages, "state on the device", part("memory"), "bytes a page"),
    ]


def _measure_pool(bench: Bench, pages: int) -> dict[str, Found]:
    name, wait = _backend(bench), _wait(bench, False)
    _pool(bench, 8)  # whatever is made once
    if bench.gpu is not None:
        give_memory_back(bench)
    wait()
    before = _used(bench)
    begin = time.perf_counter()
    pool = _pool(bench, pages)
    pool.check()
    made = (time.perf_counter() - begin) * 1e3
    memory = {name: _once(pool.backend.memory() / pages)}
    if bench.gpu is not None and pages >= 1_000_000:  # below, what the driver rounds up to outweighs it
        memory[f"{name}, as the driver counts"] = _once((_used(bench) - before) / pages)

    # 4 of 256 begin a page in each call; no call gives it back, and the smallest pool has room for all samples.
    pool.alloc(OWNERS * PAGE_SIZE)
    prefix = np.full(OWNERS, 10)
    prefix[:4] = PAGE_SIZE
    batch = Batch(prefix, prefix + 1)
    seq, last = _give(bench, batch.seq), _give(bench, batch.last)
    out = _give(bench, np.zeros(OWNERS, np.int64))
    held = [pool.alloc(16 * PAGE_SIZE) for _ in range(4)]
    slots = _fetch(pool.alloc_decode(seq, last, out=out))
    first_new = OWNERS + 64 + 1
    _check(name, slots[:4], (first_new + np.arange(4)) * PAGE_SIZE)
    _check(name, slots[4:], batch.last[4:] + 1)

    def free() -> float:
        kept = [pool.alloc(16 * PAGE_SIZE)] if not held else [held.pop()]
        if bench.gpu is None:
            start = time.perf_counter()
            pool.free(kept[0])
            return (time.perf_counter() - start) * 1e6
        start, end = bench.gpu.torch.cuda.Event(enable_timing=True), bench.gpu.torch.cuda.Event(enable_timing=True)
        bench.gpu.sleep(200)
        start.record()
        pool.free(kept[0])
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3

    free_figures = measure.interleave({name: free}, 5)
    times = measure.interleave({name: _sampled(bench, lambda: pool.alloc_decode(seq, last, out=out), 10)}, 5)
    pool.check()
    return {"time": times, "free": free_figures, "made": ({name: _once(made)}, {}), "memory": (memory, {})}


def _used(bench: Bench) -> int:
    """Bytes in use, on the device or of this process."""
    if bench.gpu is not None:
        free, total = bench.gpu.torch.cuda.mem_get_info()
        return total - free
    return _resident()


def _resident() -> int:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS")), 0)


# ---- batches and one long request ----------------------------------------------------------------------------------


def _decode(n: int) -> Callable[[Bench], Found]:
    def run(bench: Bench) -> Found:
        name, calls = _backend(bench), 10

        def prepared() -> measure.Timer:
            prefix = np.full(n, 10)
            prefix[::PAGE_SIZE] = PAGE_SIZE
            batch = Batch(prefix, prefix + 1)
            pool = _pool(bench, n + (calls * 8 + 2) * batch.new_pages, max_batch=max(8192, n))
            pool.alloc(n * PAGE_SIZE)
            seq, last = _give(bench, batch.seq), _give(bench, batch.last)
            out = _give(bench, np.zeros(n, np.int64))
            got = _fetch(pool.alloc_decode(seq, last, out=out))
            free = np.arange(n + 1, n + 1 + batch.new_pages)
            _check(name, got, slots_by_rule(free, batch.prefix, batch.seq, batch.last, PAGE_SIZE))
            return _sampled(bench, lambda: pool.alloc_decode(seq, last, out=out), calls)

        return _timed(bench, {name: prepared, **_limit(bench, n, calls)}, rounds=5)

    return run


def _limit(bench: Bench, tokens: int, calls: int) -> dict[str, Callable[[], measure.Timer]]:
    if bench.gpu is None:
        return {"write": lambda: _written(tokens, calls)}
    return {"write": lambda: _captured_extra(bench, "write_slots", tokens, calls)}


def _one_request(tokens: int) -> Callable[[Bench], Found]:
    def run(bench: Bench) -> Found:
        name, calls, pages = _backend(bench), 2, -(-tokens // PAGE_SIZE)

        def prepared() -> measure.Timer:
            pool = _pool(bench, pages * (1 + calls * 6))
            prefix, seq, last = (_give(bench, np.array([value])) for value in (0, tokens, -1))
            out = _give(bench, np.zeros(tokens, np.int64))
            got = _fetch(pool.alloc_extend(prefix, seq, last, tokens, out=out))
            _check(name, got, np.arange(PAGE_SIZE, PAGE_SIZE + tokens))
            return _sampled(bench, lambda: pool.alloc_extend(prefix, seq, last, tokens, out=out), calls)

        return _timed(bench, {name: prepared, **_limit(bench, tokens, calls)}, rounds=5)

    return run


# ---- slots past 2^31 -----------------------------------------------------------------------------------------------


def _past_int32(pages: int) -> Callable[[Bench], Found]:
    """All pages of a pool, one slot of each, in batches of 65,536: the last slots need 33 bits."""

    def run(bench: Bench) -> Found:
        size = (1 << 32) // pages
        name, step = _backend(bench), min(65536, pages)
        pool = _pool(bench, pages, page_size=size, max_batch=65536)
        seq, last = _give(bench, np.ones(step, np.int64)), _give(bench, np.full(step, -1))
        largest = 0
        for begin in range(0, pages, step):
            got = _fetch(pool.alloc_decode(seq, last))
            _check(name, got, (begin + 1 + np.arange(step)) * size)
            largest = int(got[-1])
        pool.check()
        if pool.available_size() or pool.alloc_decode(seq, last) is not None:
            raise AssertionError("the pool is not empty, though every page was handed out")
        for what, refused in (
            ("int32 slots", lambda: _pool(bench, pages, page_size=size, index_dtype="int32")),
            ("KVAllocator", lambda: KVAllocator(1 << 32, "cpu", 1, 64, size)),
        ):
            try:
                refused()
            except ValueError:
                continue
            raise AssertionError(f"{what}: a pool whose slots do not fit was not refused")
        return {name: _once(largest)}, {}

    return run


# ---- millions of calls ---------------------------------------------------------------------------------------------


def _ops_cases(ops: int) -> list[Case]:
    found: dict[str, float] = {}

    def part(key: str) -> Callable[[Bench], Found]:
        def run(bench: Bench) -> Found:
            if not found:
                found.update(_many_calls(bench, ops))
            return {_backend(bench): {**_once(found[key]), "ops": ops}}, {}

        return run

    return [
        Case(f"scale/{ops} calls/start", ops, "host time of a call, second to eleventh hundredth", part("start")),
        Case(f"scale/{ops} calls/end", ops, "host time of a call, last ten hundredths", part("end")),
        Case(f"scale/{ops} calls/host", ops, "growth of this process", part("host"), "MiB"),
        Case(f"scale/{ops} calls/device", ops, "growth of what is used on the device", part("device"), "MiB"),
    ]


def _many_calls(bench: Bench, ops: int) -> dict[str, float]:
    """Decodes and frees of 4 requests on one allocator, in a hundred parts."""
    wait, rounds = _wait(bench, False), max(1, ops // 200)
    # Minutes long: on the CPU, what else runs there meanwhile must not count.
    clock = time.thread_time if bench.gpu is None else time.perf_counter
    pool = _pool(bench, 4096)
    seq, last = _give(bench, np.ones(4, np.int64)), _give(bench, np.full(4, -1))
    times: list[float] = []
    memory: list[tuple[int, int]] = []
    for _ in range(100):
        begin = clock()
        for _ in range(rounds):
            pool.free(pool.alloc_decode(seq, last))
        wait()
        times.append((clock() - begin) * 1e6 / (2 * rounds))
        memory.append((_resident(), _used(bench) if bench.gpu is not None else 0))
    pool.check()
    pool.check_integrity()
    if pool.available_size() != 4096 * PAGE_SIZE:
        raise AssertionError("pages are lost")
    settled = memory[10]  # the first parts load what is loaded once
    return {
        "start": float(np.median(times[1:11])),
        "end": float(np.median(times[-10:])),
        "host": (memory[-1][0] - settled[0]) / 2**20,
        "device": (memory[-1][1] - settled[1]) / 2**20,
    }
