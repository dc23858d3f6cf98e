"""One call that replays a trace: from arguments to figures."""

from __future__ import annotations

import math
from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np

from cupaged.kv import KVAllocator
from cupaged.paged import PagedTokenToKVPoolAllocator
from cupaged.replay.drivers import Engine, KvEngine, SlotsEngine
from cupaged.replay.engine import Replayer
from cupaged.replay.report import ReplayResult
from cupaged.replay.sharing import PrefixCache
from cupaged.replay.traces import Trace
from cupaged.replay.verify import Ledger

ENGINES = ("slots", "kv")
POINTS = 500  # of the timeline
NAMED = 3  # skipped requests, of many


def replay(
    trace: Trace,
    page_size: int,
    pool_tokens: int,
    *,
    engine: str = "slots",
    share_prefixes: bool = False,
    backend: str = "auto",
    device: Any = "auto",
    step_ms: float = 25.0,
    chunk: int = 8192,
    max_running: int = 256,
    verify: bool = False,
    progress: Callable[[int, int], object] | None = None,
) -> ReplayResult:
    """Serve all requests of a trace with one allocator.

    Parameters
    ----------
    trace : Trace
        From `read_trace` or `synthetic`.
    page_size, pool_tokens : int
        Slots in a page, and slots in the pool: ``pool_tokens // page_size`` pages.
    engine : {"slots", "kv"}
        What is driven: `PagedTokenToKVPoolAllocator`, or `KVAllocator` with whole steps over its page tables.
    share_prefixes : bool
        Let prompts that begin alike, by the trace's `hash_ids`, share the pages of their whole blocks: requests
        leave these to a cache when they end, which gives up the least recently used when the pool is short.
    backend, device : optional
        As for `PagedTokenToKVPoolAllocator`.
    step_ms : float
        Milliseconds of the virtual clock that a step takes. A request comes in at the first step that begins
        no earlier than it arrives.
    chunk : int
        Prompt tokens that one step prefills, shared by the waiting requests in order.
    max_running : int
        Requests that may hold slots at a time.
    verify : bool
        Prove at every step that no slot is written for two requests, no shared page is written at all, and no page
        is lost; and, less often, that the allocator counts the owners of each page right.
    progress : callable, optional
        Called now and then with the number of requests that have ended, and of those that will have.

    Returns
    -------
    ReplayResult
        Requests longer than the pool are skipped, and its notes name them.

    Raises
    ------
    ValueError
        For an argument that makes no sense, or prefixes to share in a trace without `hash_ids`; the message names it.
    VerificationError
        If the allocator broke its contract.
    """
    check_arguments(trace, page_size, pool_tokens, step_ms, chunk, max_running)
    check_choices(trace, engine, share_prefixes)
    lengths = trace.prompt + trace.output
    fits = -(-lengths // page_size) <= pool_tokens // page_size
    order = np.flatnonzero(fits)
    rows = min(max_running, max(1, len(order)))
    longest = int(lengths[order].max(initial=0))
    driver = _driver(engine, page_size, pool_tokens, rows, longest, share_prefixes, backend, device)
    allocator, num_pages = driver.allocator, driver.free_pages()
    ledger = Ledger(num_pages, page_size, len(trace)) if verify else None
    replayer = Replayer(
        trace,
        order,
        driver,
        page_size=page_size,
        chunk=chunk,
        max_running=rows,
        step_s=step_ms / 1000,
        cache=PrefixCache(page_size) if share_prefixes else None,
        ledger=ledger,
    )
    start = perf_counter()
    replayer.run(progress)
    wall_s = perf_counter() - start
    allocator.check()
    if verify:
        allocator.check_integrity()
    notes = [*trace.notes, *_skipped(trace, lengths, ~fits, pool_tokens)]
    if share_prefixes:
        notes.append(_saved(replayer, page_size, pool_tokens))
    return ReplayResult(
        trace=trace.name,
        engine=engine,
        backend=allocator.backend.name,
        device=allocator.device,
        page_size=page_size,
        pool_tokens=pool_tokens,
        requests=len(trace),
        served=replayer.served,
        skipped=len(trace) - len(order),
        tokens=int(lengths[order].sum()),
        slots=replayer.slots,
        steps=replayer.steps,
        retractions=replayer.retractions,
        allocations=driver.allocations,
        allocator_s=driver.seconds,
        wall_s=wall_s,
        allocations_per_s=_ratio(driver.allocations, driver.seconds),
        slots_per_s=_ratio(replayer.slots, driver.seconds),
        digest=replayer.digest.text,
        owned_digest=replayer.owned.text,
        verified=verify,
        shared=share_prefixes,
        looked_up=replayer.looked_up,
        pages_saved=replayer.found_pages,
        found_share=_ratio(replayer.found_pages * page_size, replayer.looked_up),
        pages_evicted=replayer.evicted_pages,
        pages_replaced=replayer.replaced_pages,
        notes=notes,
        **_held(replayer, page_size, num_pages, step_ms / 1000),
        **_times(replayer),
    )


def _driver(
    engine: str,
    page_size: int,
    pool_tokens: int,
    rows: int,
    longest: int,
    sharing: bool,
    backend: str,
    device: Any,
) -> Engine:
    """Make a warm allocator of the kind that is asked for, and what drives it."""
    if engine == "slots":
        allocator = PagedTokenToKVPoolAllocator(
            pool_tokens, page_size, backend=backend, device=device, max_batch=max(8192, rows)
        )
        allocator.warmup()
        return SlotsEngine(allocator, rows, longest, sharing=sharing)
    # Its size counts page 0.
    slots = (pool_tokens // page_size + 1) * page_size
    kv = KVAllocator(slots, device, rows, max(1, longest), page_size, backend=backend)
    kv.warmup()
    return KvEngine(kv, rows, longest, sharing=sharing)


def check_choices(trace: Trace, engine: str, share_prefixes: bool) -> None:
    """Raise for an engine that there is not, or prefixes to share that the trace does not name."""
    if engine not in ENGINES:
        raise ValueError(f"engine must be one of {', '.join(ENGINES)}, got {engine!r}")
    if share_prefixes and trace.hash_ids is None:
        raise ValueError(
            f"share_prefixes needs hash_ids, which {trace.name} does not have: they say which prompts begin alike, "
            "as in Mooncake's traces"
        )


def check_arguments(
    trace: Trace, page_size: int, pool_tokens: int, step_ms: float, chunk: int, max_running: int
) -> None:
    """Raise for numbers that make no sense."""
    whole = {"page_size": page_size, "pool_tokens": pool_tokens, "chunk": chunk, "max_running": max_running}
    for name, value in whole.items():
        if not isinstance(value, int | np.integer) or value < 1:
            raise ValueError(f"{name} must be a whole number from 1 on, got {value!r}")
    if pool_tokens < page_size:
        raise ValueError(f"pool_tokens must make at least one page of {page_size} slots, got {pool_tokens}")
    if not (step_ms > 0 and math.isfinite(step_ms)):
        raise ValueError(f"step_ms must be positive, got {step_ms}")
    if trace.arrival.max(initial=0.0) / step_ms > 2**50:
        raise ValueError(f"step_ms is too small for a trace of {trace.arrival[-1]:g} seconds, got {step_ms}")


def _skipped(trace: Trace, lengths: np.ndarray, which: np.ndarray, pool_tokens: int) -> list[str]:
    """Name the first of the requests that are longer than the pool."""
    count = int(np.count_nonzero(which))
    if not count:
        return []
    named = [f"line {trace.lines[i]} ({lengths[i]:,} tokens)" for i in np.flatnonzero(which)[:NAMED]]
    more = f" and {count - NAMED} more" if count > NAMED else ""
    return [f"{count} skipped, longer than the pool of {pool_tokens:,} tokens: {', '.join(named)}{more}"]


def _saved(replayer: Replayer, page_size: int, pool_tokens: int) -> str:
    """Say what sharing was good for."""
    share = _ratio(replayer.found_pages * page_size, replayer.looked_up)
    return (
        f"page size {page_size}, pool {pool_tokens:,}: {replayer.found_pages:,} pages saved, {share:.1%} of the "
        f"prompt tokens were in the prefix cache; {replayer.evicted_pages:,} pages evicted, "
        f"{replayer.replaced_pages:,} computed twice and replaced"
    )


def _held(replayer: Replayer, page_size: int, num_pages: int, step_s: float) -> dict[str, Any]:
    """Figures of what was held at each step."""
    clocks, tokens, pages = (np.array(a) for a in (replayer.clocks, replayer.tokens, replayer.pages))
    if not len(pages):
        zero = ("occupancy_mean", "occupancy_peak", "waste_mean", "waste_peak", "waste_share")
        return {"timeline": [], **dict.fromkeys(zero, 0.0)}
    waste = pages * page_size - tokens
    spans = np.unique(clocks * POINTS // (clocks[-1] + 1), return_index=True)[1]
    peaks = np.maximum.reduceat(pages, spans) / num_pages
    return {
        "occupancy_mean": float(pages.mean()) / num_pages,
        "occupancy_peak": float(pages.max()) / num_pages,
        "waste_mean": float(waste.mean()),
        "waste_peak": float(waste.max()),
        "waste_share": _ratio(float(waste.mean()), float(pages.mean()) * page_size),
        "timeline": list(zip((clocks[spans] * step_s).tolist(), peaks.tolist(), strict=True)),
    }


def _times(replayer: Replayer) -> dict[str, Any]:
    """Percentiles of the time in the allocator per step."""
    microseconds = 1e6 * np.array(replayer.seconds) if replayer.seconds else np.zeros(1)
    p50, p99, most = np.percentile(microseconds, (50, 99, 100)).tolist()
    return {"step_p50_us": p50, "step_p99_us": p99, "step_max_us": most}


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
